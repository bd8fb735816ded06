# SPDX-License-Identifier: Apache-2.0
"""
Runs of layers, as one call where that is to be had.

A layer is some forty small operations around four products. Called one by one from
Python, they take a pass over a small model half as long again as its weights take
to be read, however many rows it verifies. TorchScript calls them without Python
between. With ``PYTORCH_JIT=0`` the same functions run as Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache
import warnings

import torch
from torch import Tensor

from . import scripted
from .half import HalfMatrix
from .kv_cache import KVBuffers
from .layers import (
    attend,
    causal_mask,
    finish_layer,
    GROUPED_KERNEL,
    LayerWeights,
    project_qkv,
)
from .llama_config import LlamaConfig
from .quantized import Matrix


class LayerStack(Sequence):
    """
    Layers that stay as they are. Slices are stacks too.

    Attributes
    ----------
    run: runs hidden states through all of them at once (see ``scripted.py``), or None
        where these layers have no such program

    """

    def __init__(self, layers: Sequence[LayerWeights]):
        self._layers = list(layers)
        self._slices: dict[tuple[int, int], LayerStack] = {}

    @cached_property
    def run(self) -> Callable[..., Tensor] | None:
        # When it is first run: of a target that is trained on, or only run by parts, never.
        return _program(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index):
        if not isinstance(index, slice) or index.step not in (None, 1):
            return self._layers[index]
        first, last, _ = index.indices(len(self))
        if (first, last) == (0, len(self)):
            return self
        if (first, last) not in self._slices:
            self._slices[first, last] = LayerStack(self._layers[index])
        return self._slices[first, last]


def of_one_stream(layers: list[LayerWeights], norm: Tensor) -> tuple[list[LayerWeights], Tensor]:
    """
    Layers and the norm after them, so that hidden states need not change type on their way.

    float32 where FBGEMM multiplies, which computes in it; as they are elsewhere.
    """
    if not all(isinstance(matrix, Matrix) and matrix.kind == HalfMatrix.kind
               for layer in layers for matrix in layer.matrices()):
        return layers, norm
    return [layer.streaming(torch.float32) for layer in layers], norm.float()


def run_layers(config: LlamaConfig, layers: Iterable[LayerWeights], x: Tensor, cache: KVBuffers,
               start: int, rope: tuple[Tensor, Tensor], mask: Tensor | None = None,
               first: int = 0) -> Tensor:
    """Run ``layers``, which are the cache's from ``first`` on, over x; see Llama.run_layers."""
    if mask is None:
        mask = causal_mask(x.shape[1], start + x.shape[1], x.device)
    if isinstance(layers, LayerStack) and layers.run and cache.plain:
        held = cache.keys[first:first + len(layers)], cache.values[first:first + len(layers)]
        return layers.run(x, (*held, start), rope, mask, (config.heads, config.kv_heads),
                          config.norm_eps)
    for layer, w in enumerate(layers, first):
        query, key, value = project_qkv(config, w, x, rope, cache.dtype)
        keys, values = cache.extend(layer, start, key, value)
        x = finish_layer(config, w, x, attend(query, keys, values, mask))
    return x


def _program(layers: Sequence[LayerWeights]) -> Callable[..., Tensor] | None:
    """What runs all ``layers``, whose matrices must be of one kind; None where there is none."""
    if not layers or not GROUPED_KERNEL:
        return None
    matrices = tuple([getattr(layer, name) for layer in layers] for name in LayerWeights.MATRICES)
    vectors = tuple([getattr(layer, name) for layer in layers]
                    for name in ('input_norm', 'post_norm', 'qkv_bias'))
    every = [matrix for kind in matrices for matrix in kind]
    if all(isinstance(matrix, HalfMatrix) for matrix in every):
        held = tuple([matrix.packed for matrix in kind] for kind in matrices)
        run = _half()
        return lambda x, *rest: run(x, vectors, held, *rest)
    # On CUDA TorchScript would also fuse, and compile anew for every shape.
    if (all(isinstance(matrix, Tensor) and matrix.device.type == 'cpu' for matrix in every)
            and len({matrix.is_mkldnn for matrix in every}) == 1):
        run, packed = _dense(), every[0].is_mkldnn
        return lambda x, *rest: run(x, vectors, matrices, packed, *rest)
    return None


@lru_cache
def _dense() -> Callable[..., Tensor]:
    return _scripted(scripted.run_dense)


@lru_cache
def _half() -> Callable[..., Tensor]:
    from .scripted_half import run_half
    return _scripted(run_half)


def _scripted(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    with warnings.catch_warnings():
        # Said to be deprecated since PyTorch 2.10; what is to follow has no FBGEMM.
        warnings.simplefilter('ignore', DeprecationWarning)
        return torch.jit.script(function)
