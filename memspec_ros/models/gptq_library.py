# SPDX-License-Identifier: Apache-2.0
"""
GPTQ through a library, for its CUDA kernels: optional, and used where it is installed.

``transformers`` loads the checkpoint and asks gptqmodel for the kernels (releases
before 5: auto-gptq too). The lean path then multiplies by the library's modules,
so that rollback, hidden states and drafts stay what they are.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from .errors import UnsupportedModelError
from .layers import LayerWeights
from .llama import Llama
from .llama_config import LlamaConfig
from .quantized import Matrix, StackedMatrix

LIBRARIES = ('gptqmodel', 'auto_gptq')


def installed_library() -> str | None:
    """The GPTQ library at hand, with optimum, which ``transformers`` loads it by; or None."""
    if find_spec('optimum') is None:
        return None
    return next((name for name in LIBRARIES if find_spec(name) is not None), None)


class ModuleMatrix(Matrix):
    """A library's module for one matrix, its bias included."""

    kind = 'library'

    def __init__(self, module: torch.nn.Module, shape: tuple[int, int]):
        self.module = module
        self.shape = shape
        self.nbytes = sum(t.nbytes for t in (*module.parameters(), *module.buffers()))

    def multiply(self, x: Tensor) -> Tensor:
        return self.module(x).to(x.dtype)


def load_with_library(path: Path, config: LlamaConfig, dtype: torch.dtype, device: torch.device,
                      context: int) -> Llama:
    """The model of ``path`` with the library's matrices; raises UnsupportedModelError."""
    library = installed_library()
    if library is None:
        raise UnsupportedModelError(
            'weights library: no GPTQ library is installed; install gptqmodel and optimum (the '
            'extra memspec_ros[gptq]), or use weights auto')
    from transformers import AutoModelForCausalLM
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, device_map={'': device}, local_files_only=True).eval()
    except Exception as error:  # noqa: BLE001 (libraries and their builds fail in many ways)
        raise UnsupportedModelError(
            f'{library} cannot load {path} ({error}); use weights int4 or dense') from error
    hidden, wide = config.hidden_size, config.intermediate_size
    heads, kv_heads = (count * config.head_dim for count in (config.heads, config.kv_heads))
    layers = [LayerWeights(
        input_norm=layer.input_layernorm.weight.data,
        qkv=StackedMatrix([ModuleMatrix(layer.self_attn.q_proj, (heads, hidden)),
                           ModuleMatrix(layer.self_attn.k_proj, (kv_heads, hidden)),
                           ModuleMatrix(layer.self_attn.v_proj, (kv_heads, hidden))]),
        qkv_bias=None,
        out=ModuleMatrix(layer.self_attn.o_proj, (hidden, heads)),
        post_norm=layer.post_attention_layernorm.weight.data,
        gate_up=StackedMatrix([ModuleMatrix(layer.mlp.gate_proj, (wide, hidden)),
                               ModuleMatrix(layer.mlp.up_proj, (wide, hidden))]),
        down=ModuleMatrix(layer.mlp.down_proj, (hidden, wide)))
        for layer in model.model.layers]
    embedding = model.model.embed_tokens.weight.data
    head = embedding if config.tied_embeddings else model.lm_head.weight.data
    return Llama(config, embedding, layers, model.model.norm.weight.data, head, context)
