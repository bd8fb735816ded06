# SPDX-License-Identifier: Apache-2.0
"""
Which kernel multiplies 16-bit matrices faster here: measured once, then remembered.

FBGEMM streams them faster, oneDNN computes faster, and processors differ (with AMX
oneDNN is ahead). Timed is what decoding does: a step of one row and a verify of a
few, over more weights than a processor's cache holds. What came out is kept in the
cache directory; a file that cannot be read or written costs a measurement, no more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
import platform
import time

import torch
from torch import Tensor

from .cache import cache_directory, read_notes, write_notes
from .half import half, has_half

FILE_NAME = 'kernels.json'
_SHAPE = (2048, 1024)
# 50 MB in 16 bits.
_COPIES = 12
_ROWS = (1, 5)
_ROUNDS = 5


def half_pays(dtype: torch.dtype, device: torch.device,
              other: Callable[[Tensor], Callable[[Tensor], Tensor]]) -> bool:
    """
    Whether FBGEMM multiplies matrices of ``dtype`` faster than ``other`` does.

    ``other`` takes a matrix and returns what multiplies rows [1, T, in] with it.
    """
    if not has_half(device, dtype):
        return False
    return _remembered(dtype, torch.get_num_threads(), cache_directory() / FILE_NAME, other)


@lru_cache
def _remembered(dtype: torch.dtype, threads: int, file: Path, other) -> bool:
    key = f'{machine()} | {threads} threads | {dtype}'
    known = read_notes(file)
    if not isinstance(known.get(key), bool):
        known[key] = measure(dtype, other)
        write_notes(file, known)
    return known[key]


def machine() -> str:
    """What timings of this process hold for."""
    return (f'{processor() or platform.machine()} | {torch.backends.cpu.get_cpu_capability()} | '
            f'torch {torch.__version__}')


@torch.inference_mode()
def measure(dtype: torch.dtype, other) -> bool:
    """Time both, in turn."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(_SHAPE, generator=generator) / 32).to(dtype)
    contenders = [([half(weight).multiply for _ in range(_COPIES)], torch.float32),
                  ([other(weight) for _ in range(_COPIES)], dtype)]
    total = [0.0, 0.0]
    for rows in _ROWS:
        best = [float('inf')] * 2
        for _ in range(_ROUNDS):
            for place, (multiply, kind) in enumerate(contenders):
                x = torch.ones(1, rows, _SHAPE[1], dtype=kind)
                start = time.perf_counter()
                for one in multiply:
                    one(x)
                best[place] = min(best[place], time.perf_counter() - start)
        total = [done + seconds for done, seconds in zip(total, best)]
    return total[0] < total[1]


def processor() -> str:
    """Model name of the CPU, '' where the system does not say."""
    try:
        lines = Path('/proc/cpuinfo').read_text().splitlines()
    except OSError:
        return ''
    names = [line.partition(':')[2].strip() for line in lines if line.startswith('model name')]
    return names[0] if names else ''
