# SPDX-License-Identifier: Apache-2.0
"""
Shared-layer draft: the target's embedding and lower layers, a small top of its own.

Extra memory is the top alone (a few percent of the target). The head covers a
trimmed vocabulary, is sliced from the target's own and shared by all drafts of
the bundle. Source: "Speculative Decoding Under Memory Constraints" (2026) for
the idea; the figures are ours.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
import torch.nn.functional as F

from ..errors import BundleError, UnsupportedModelError
from ..llama import layer_shapes, LayerWeights, LlamaConfig, run_layers
from ..packing import linear
from ..state import DecodeState, KVCache, Proposal
from ..target import LlamaTarget
from .base import Drafter, DraftKind


class SharedLayersDrafter(Drafter):
    """
    Runs the target's lower layers on drafted tokens, then its own top.

    The top's cache is built from committed hidden states, never from drafted
    ones: what was drafted is forgotten at every proposal.
    """

    # What the last iteration committed runs in one pass with the first drafted token.
    rows_with_proposal = 16

    def __init__(self, target: LlamaTarget, depth: int, layers: list[LayerWeights], norm: Tensor,
                 head: Tensor, head_ids: list[int], capacity: int):
        super().__init__()
        self.target = target
        self.depth = depth
        self.layers = layers
        self.norm = norm
        self.head = head
        self.head_ids = head_ids
        config = target.model.config
        self.kv = KVCache(len(layers), config.kv_heads, capacity, config.head_dim,
                          target.model.attention_dtype, target.device)

    def lag(self, state: DecodeState) -> int:
        return max(0, state.held - self.cached)

    @torch.inference_mode()
    def catch_up(self, state: DecodeState, limit: int) -> None:
        count = min(limit, self.lag(state))
        if count:
            self._run_top(self._committed(state, self.cached + count), self.cached)
            self.cached += count

    @torch.inference_mode()
    def propose(self, state: DecodeState, gamma: int) -> Proposal:
        if self.lag(state) > self.rows_with_proposal:
            return Proposal([])
        position = state.held
        token, tokens = state.tokens[-1], []
        for step in range(min(gamma, self.kv.capacity - position)):
            x = self.target.run_lower(state, token, position + step, self.depth)
            if step == 0 and self.cached < position:
                x = torch.cat([self._committed(state, position), x], dim=1)
            top = self._run_top(x, position + step + 1 - x.shape[1])[0, -1]
            self.cached = position
            normed = F.rms_norm(top, top.shape, self.norm, self.target.model.config.norm_eps)
            token = self.head_ids[int(linear(normed, self.head).argmax())]
            tokens.append(token)
        for group in state.kv.groups_below(self.depth):
            state.kv.set_length(position, group)
        return Proposal(tokens)

    def _committed(self, state: DecodeState, end: int) -> Tensor:
        """Hidden states [1, T, H] of committed positions from ``cached`` up to ``end``."""
        return state.hidden[self.depth][self.cached:end][None]

    def _run_top(self, x: Tensor, start: int) -> Tensor:
        config = self.target.model.config
        rope = self.target.model.rope.at(start, x.shape[1])
        return run_layers(config, self.layers, x, self.kv.keys, self.kv.values, start, rope)


class SharedLayersKind(DraftKind):
    """
    Options: ``depth`` (L, target layers reused), ``layers`` (own ones).

    The file holds ``layers.<i>.<field>`` of LayerWeights and ``norm``.
    """

    option_names = frozenset({'depth', 'layers'})

    def __init__(self, spec, bundle, target, capacity):
        if not isinstance(target, LlamaTarget):
            raise UnsupportedModelError(
                f'draft {spec.id!r}: shared_layers needs a target on the lean path (llama, qwen2)')
        self.id = spec.id
        self.target = target
        self.capacity = capacity
        self.depth = _count(spec, 'depth', target.layers - 1)
        self.own_layers = _count(spec, 'layers', target.layers)
        self.depths = frozenset({self.depth})
        head_ids = bundle.head_token_ids()
        if head_ids is None:
            raise BundleError(
                f'draft {spec.id!r}: shared_layers needs "shared_head" in bundle.yaml')
        self.head_ids = head_ids
        self.head = bundle.shared_head_of(target)

    def attach(self, tensors: Mapping[str, Tensor]) -> Drafter:
        config: LlamaConfig = self.target.model.config
        layers = [self._layer(tensors, index, config).packed()
                  for index in range(self.own_layers)]
        norm = self._tensor(tensors, 'norm', (config.hidden_size,))
        return SharedLayersDrafter(self.target, self.depth, layers, norm, self.head,
                                   self.head_ids, self.capacity)

    def _layer(self, tensors, index: int, config: LlamaConfig) -> LayerWeights:
        shapes = layer_shapes(config)
        bias = f'layers.{index}.qkv_bias'
        fields = {name: self._tensor(tensors, f'layers.{index}.{name}', shape)
                  for name, shape in shapes.items() if name != 'qkv_bias' or bias in tensors}
        return LayerWeights(**{'qkv_bias': None, **fields})

    def _tensor(self, tensors, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = tensors.get(name)
        if tensor is None:
            raise BundleError(f'draft {self.id!r}: tensor {name} is missing')
        if tuple(tensor.shape) != shape:
            raise BundleError(f'draft {self.id!r}: tensor {name} is {tuple(tensor.shape)}, '
                              f'this target needs {shape}: it was made for another one')
        return tensor.to(device=self.target.device, dtype=self.target.dtype)


def _count(spec, name: str, most: int) -> int:
    value = spec.options.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise BundleError(f'draft {spec.id!r}: {name} is {value!r}, expected 1..{most}')
    return value
