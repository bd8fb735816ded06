# SPDX-License-Identifier: Apache-2.0
"""What this process takes: now, at most, and before any model is loaded."""

from __future__ import annotations

import contextlib
from pathlib import Path
import resource

import torch

from ..models.layers import layer_shapes, LayerWeights
from ..models.llama import Llama
from ..models.llama_config import LlamaConfig
from ..models.target import LlamaTarget
from .allocator import give_back

_ROWS = 64


def resident_bytes() -> int:
    """Bytes of this process that are in memory (VmRSS)."""
    return _status('VmRSS')


def peak_bytes() -> int:
    """The most bytes of this process that were in memory since the last ``reset_peak`` (VmHWM)."""
    return _status('VmHWM')


def reset_peak() -> None:
    """Look for the peak from now on; a kernel that does not allow it keeps that of all time."""
    with contextlib.suppress(OSError):
        Path('/proc/self/clear_refs').write_text('5')


def _status(name: str) -> int:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path('/proc/self/status').read_text().splitlines()
        line = next(line for line in lines if line.startswith(name + ':'))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@torch.inference_mode()
def runtime_bytes(dtype: torch.dtype, device: torch.device) -> int:
    """
    Bytes that interpreter and libraries take here: measured, once their kernels have run.

    A model of next to no size decodes first: half of what PyTorch takes comes
    into memory with the first products. To be called while the tokenizer is
    held: that, and what it imports, is most of the rest.
    """
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, layers=1, heads=2, kv_heads=1,
        head_dim=32, norm_eps=1e-5, rope_theta=1e4, rope_scaling=None, max_positions=2 * _ROWS,
        tied_embeddings=True)
    layer = LayerWeights.of({
        name: torch.zeros(shape, dtype=dtype, device=device)
        for name, shape in layer_shapes(config).items() if name != 'qkv_bias'})
    table = torch.zeros(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
    norm = torch.ones(config.hidden_size, dtype=dtype, device=device)
    target = LlamaTarget(Llama(config, table, [layer.packed()], norm, table))
    state = target.new_state(2 * _ROWS)
    for rows in (_ROWS, 1, 2, 4):
        target.forward(state, [0] * rows, last_only=rows == _ROWS)
    del target, state, layer
    give_back()
    return resident_bytes()
