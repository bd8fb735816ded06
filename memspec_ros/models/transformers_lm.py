# SPDX-License-Identifier: Apache-2.0
"""
Any Hugging Face causal language model, behind a cache that rolls back.

The one place that touches the forward signature and the cache classes of
``transformers``, which change between releases.
"""

from __future__ import annotations

from collections.abc import Mapping
import inspect
from pathlib import Path

import torch
from torch import Tensor

from .errors import BundleError, UnsupportedModelError


def _cache_classes():
    from transformers.cache_utils import Cache, CacheLayerMixin

    class PreallocatedLayer(CacheLayerMixin):
        """Keys and values of one layer in a fixed buffer, with a length pointer."""

        is_sliding = False

        def __init__(self, owner):
            super().__init__()
            self.owner = owner

        def lazy_initialization(self, key_states, value_states=None):
            values = key_states if value_states is None else value_states
            capacity = self.owner.capacity
            self.keys = key_states.new_zeros((*key_states.shape[:2], capacity,
                                              key_states.shape[3]))
            self.values = values.new_zeros((*values.shape[:2], capacity, values.shape[3]))
            self.is_initialized = True

        def update(self, key_states, value_states, *args, **kwargs):
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            start = self.owner.length
            end = start + key_states.shape[2]
            self.keys[:, :, start:end] = key_states
            self.values[:, :, start:end] = value_states
            return self.keys[:, :, :end], self.values[:, :, :end]

        def get_seq_length(self, *args):
            return self.owner.length

        def get_max_cache_shape(self):
            return self.owner.capacity

        def get_max_length(self):
            return self.owner.capacity

        def get_mask_sizes(self, query, *args):
            new = query if isinstance(query, int) else query.shape[0]
            return self.owner.length + new, 0

    class PreallocatedCache(Cache):
        """All layers share one length: positions before it are held, the rest is scratch."""

        def __init__(self, layers: int, capacity: int):
            self.length = 0
            self.capacity = capacity
            super().__init__(layers=[PreallocatedLayer(self) for _ in range(layers)])

    return PreallocatedCache


def build_skeleton(path: Path):
    """
    Build the model of ``path`` without weights (meta tensors).

    Done once and by one thread: building models at the same time as loading
    others corrupts ``transformers``' global state. Raises UnsupportedModelError
    for models whose cache cannot be rolled back.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # noqa: BLE001 (its validators have error classes of their own)
        raise BundleError(f'{path}: no usable config.json there ({error})') from error
    kinds = set(getattr(config, 'layer_types', None) or ())
    if kinds - {'full_attention'} or getattr(config, 'sliding_window', None) and getattr(
            config, 'use_sliding_window', True):
        raise UnsupportedModelError(
            f'{path}: {config.model_type} with sliding-window or recurrent layers '
            f'({", ".join(sorted(kinds)) or "sliding_window"}) cannot be rolled back '
            'after a rejected draft; use a model with full attention')
    try:
        with init_empty_weights(include_buffers=False):
            return AutoModelForCausalLM.from_config(config).eval()
    except ValueError as error:
        raise UnsupportedModelError(f'{path}: {error}') from error


def decoder_layers(model) -> torch.nn.ModuleList | None:
    """The model's decoder layers; None where they are not one list of the right length."""
    count = model.config.num_hidden_layers
    # Outer modules come first: lists within a layer (experts, say) are not mistaken for it.
    return next((module for module in model.modules()
                 if isinstance(module, torch.nn.ModuleList) and len(module) == count), None)


class TransformersLM:
    """
    A causal LM with its weights and a rolled-back cache, fed token by token or in blocks.

    Attributes
    ----------
    length: positions held in the cache
    capacity: positions that fit

    """

    def __init__(self, model, capacity: int):
        self.model = model
        self.config = model.config
        self.cache = _cache_classes()(model.config.num_hidden_layers, capacity)
        names = inspect.signature(model.forward).parameters
        self._cache_argument = 'past_key_values' if 'past_key_values' in names else 'cache'
        self._layers = decoder_layers(model)

    @classmethod
    def attach(cls, skeleton, tensors: Mapping[str, Tensor], dtype: torch.dtype,
               device: torch.device, capacity: int) -> TransformersLM:
        """Give a copy of ``skeleton`` its weights; the skeleton stays empty for the next load."""
        import copy
        model = copy.deepcopy(skeleton)
        wanted = {name: tensor.to(device=device, dtype=dtype) for name, tensor in tensors.items()}
        model.load_state_dict(wanted, strict=False, assign=True)
        model.tie_weights()
        missing = [name for name, p in model.named_parameters() if p.is_meta]
        if missing:
            raise BundleError(
                f'{len(missing)} weights are missing from the file, the first: {missing[0]}')
        return cls(model.to(device).requires_grad_(False).eval(), capacity)

    @property
    def length(self) -> int:
        """Positions held."""
        return self.cache.length

    @property
    def position_bytes(self) -> int:
        """Bytes of the keys and values of one position; 0 before the first pass."""
        return sum(rows.nbytes // self.cache.capacity for layer in self.cache.layers
                   if layer.is_initialized for rows in (layer.keys, layer.values))

    def step_bytes(self, held: int) -> int:
        """Bytes that a step of one token after ``held`` positions reads: see Target."""
        table, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        # Tied, the embedding is listed once, and read whole as the head.
        apart = head is not None and head.weight is not table.weight
        weights = sum(p.nbytes for p in self.model.parameters())
        return weights - apart * table.weight.nbytes + self.position_bytes * held

    def set_length(self, length: int) -> None:
        """Roll back to (or declare) ``length`` positions; copies nothing."""
        if not 0 <= length <= self.cache.capacity:
            raise ValueError(f'length {length} outside 0..{self.cache.capacity}')
        self.cache.length = length

    def views(self, length: int) -> list[Tensor]:
        """The first ``length`` positions of all layers' keys and values, writable."""
        return [rows[:, :, :length] for layer in self.cache.layers
                for rows in (layer.keys, layer.values)] if length else []

    @torch.inference_mode()
    def forward(self, tokens: list[int], last_only: bool = False,
                hidden: bool = False) -> tuple[Tensor, Tensor | None]:
        """
        Run ``tokens`` after the positions held, and hold them too.

        Returns logits [T, V] (or [1, V]) in float32 and, where asked for, the
        hidden states [T, H] after the last layer, before the final norm (after
        it in a model whose layers cannot be told).
        """
        start = self.cache.length
        ids = torch.tensor([tokens], device=self.model.device)
        positions = torch.arange(start, start + len(tokens), device=ids.device)[None]
        seen, hook = [], None
        if hidden and self._layers is not None:
            # transformers gives the last state after the norm only. The hook stays for this call
            # alone, so that nothing holds on to the states, or to the model once it is let go of.
            hook = self._layers[-1].register_forward_hook(
                lambda module, inputs, output: seen.append(output))
        try:
            result = self.model(
                input_ids=ids, position_ids=positions, use_cache=True, return_dict=True,
                output_hidden_states=hidden and hook is None,
                **{self._cache_argument: self.cache},
                **({'logits_to_keep': 1} if last_only else {}))
        finally:
            if hook is not None:
                hook.remove()
        self.cache.length = start + len(tokens)
        states = None
        if hidden:
            states = seen[-1] if seen else result.hidden_states[-1]
            states = (states[0] if isinstance(states, tuple) else states)[0]
        return result.logits[0].float(), states
