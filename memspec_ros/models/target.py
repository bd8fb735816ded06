# SPDX-License-Identifier: Apache-2.0
"""
The target model: two ways to run it behind one interface.

``LlamaTarget`` is the lean path (Llama, Qwen2): it can stop between layers, so
drafts may reuse its lower layers. ``TransformersTarget`` runs any causal LM of
``transformers``; it is the reference, and serves drafts that bring their own
layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
import json
from pathlib import Path

import torch
from torch import Tensor

from .errors import BundleError, UnsupportedModelError
from .llama import Llama, LlamaConfig, SUPPORTED_MODEL_TYPES
from .state import DecodeState, KVCache
from .transformers_lm import build_skeleton, decoder_layers, TransformersLM
from .weights import Checkpoint


class Target(ABC):
    """
    A target model.

    Attributes
    ----------
    vocab_size: width of its logits
    hidden_size: width H of its hidden states
    layers: number of decoder layers
    max_positions: longest context it was made for
    weight_bytes: bytes of its weights in memory
    hidden_before_norm: whether the last hidden states it keeps are those before
        the final norm, as they should be

    """

    hidden_before_norm = True
    vocab_size: int
    hidden_size: int
    layers: int
    max_positions: int
    weight_bytes: int
    device: torch.device
    dtype: torch.dtype

    @abstractmethod
    def new_state(self, capacity: int, depths: frozenset[int] = frozenset()) -> DecodeState:
        """Allocate buffers for ``capacity`` positions and hidden states at ``depths``."""

    @abstractmethod
    def forward(self, state: DecodeState, tokens: list[int], last_only: bool = False) -> Tensor:
        """
        Run tokens after the committed positions; logits [T, V] (or [1, V]) in float32.

        Writes keys, values and hidden states of the new positions, but does not
        commit them: the caller decides with ``state.hold`` how many stay.
        """


class LlamaTarget(Target):
    """Target on the lean path."""

    def __init__(self, model: Llama):
        self.model = model
        self.vocab_size = model.config.vocab_size
        self.hidden_size = model.config.hidden_size
        self.layers = model.config.layers
        self.max_positions = model.config.max_positions
        self.device = model.device
        self.dtype = model.dtype
        tensors = [model.embedding, model.norm]
        tensors += [t for layer in model.layers for t in layer.tensors().values()]
        if model.head is not model.embedding:
            tensors.append(model.head)
        self.weight_bytes = sum(t.numel() * t.element_size() for t in tensors)

    def new_state(self, capacity: int, depths: frozenset[int] = frozenset()) -> DecodeState:
        config = self.model.config
        for depth in depths:
            if not 0 < depth <= self.layers:
                raise UnsupportedModelError(
                    f'hidden states after layer {depth}: the target has {self.layers} layers')
        kv = KVCache(config.layers, config.kv_heads, capacity, config.head_dim,
                     self.model.attention_dtype, self.device, depths)
        hidden = {depth: torch.zeros(capacity, config.hidden_size, dtype=self.dtype,
                                     device=self.device)
                  for depth in depths | {self.layers}}
        return DecodeState(kv, hidden, capacity)

    @torch.inference_mode()
    def forward(self, state: DecodeState, tokens: list[int], last_only: bool = False) -> Tensor:
        x = self.model.embed(torch.tensor([tokens], device=self.device))
        start = state.held
        end = start + len(tokens)
        rope = self.model.rope.at(start, len(tokens))
        kv = state.kv
        for group, (first, last) in enumerate(kv.groups):
            x = self.model.run_layers(x, first, last, kv.keys, kv.values, start, rope)
            kv.set_length(end, group)
            if last in state.hidden:
                state.hidden[last][start:end] = x[0]
        return self.model.logits(x[0, -1:] if last_only else x[0])

    @torch.inference_mode()
    def run_lower(self, state: DecodeState, token: int, position: int, depth: int) -> Tensor:
        """
        Run one token through the lowest ``depth`` layers at ``position``; returns [1, 1, H].

        Advances those layer groups alone: the drafted positions stand beyond the
        committed length until verification overwrites them.
        """
        x = self.model.embed(torch.tensor([[token]], device=self.device))
        kv = state.kv
        x = self.model.run_layers(x, 0, depth, kv.keys, kv.values, position)
        for group in kv.groups_below(depth):
            kv.set_length(position + 1, group)
        return x


class _RollbackOnly:
    """What DecodeState needs of a cache, served by a TransformersLM."""

    def __init__(self, lm: TransformersLM):
        self.set_length = lm.set_length
        self.capacity = lm.cache.capacity


class TransformersTarget(Target):
    """
    Target through ``transformers``: any causal LM with full attention.

    Holds one state at a time (the cache belongs to the model here).
    """

    def __init__(self, lm_factory, config, weight_bytes: int, dtype: torch.dtype,
                 device: torch.device):
        self._factory = lm_factory
        self._lm: TransformersLM | None = None
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.layers = config.num_hidden_layers
        self.max_positions = getattr(config, 'max_position_embeddings', 2048)
        self.weight_bytes = weight_bytes
        self.device = device
        self.dtype = dtype

    def new_state(self, capacity: int, depths: frozenset[int] = frozenset()) -> DecodeState:
        if depths - {self.layers}:
            raise UnsupportedModelError(
                'shared_layers drafts need a target on the lean path '
                f'({", ".join(SUPPORTED_MODEL_TYPES)})')
        self._lm = self._factory(capacity)
        hidden = {self.layers: torch.zeros(capacity, self.hidden_size, dtype=self.dtype,
                                           device=self.device)}
        return DecodeState(_RollbackOnly(self._lm), hidden, capacity)

    def forward(self, state: DecodeState, tokens: list[int], last_only: bool = False) -> Tensor:
        self._lm.set_length(state.held)
        logits, hidden = self._lm.forward(tokens, last_only, hidden=True)
        state.hidden[self.layers][state.held:state.held + len(tokens)] = hidden
        return logits


def read_config(path: Path, name: str = 'config.json') -> dict:
    """The ``config.json`` (or another JSON file) of a Hugging Face directory."""
    file = path / name
    try:
        config = json.loads(file.read_text(encoding='utf-8'))
    except OSError as error:
        raise BundleError(f'{file}: {error.strerror or error}') from error
    except ValueError as error:
        raise BundleError(f'{file}: not JSON ({error})') from error
    if not isinstance(config, dict):
        raise BundleError(f'{file}: expected a JSON object')
    return config


def open_checkpoint(path: Path) -> Checkpoint:
    """The weights of a Hugging Face directory: one safetensors file, or those of an index."""
    index = path / 'model.safetensors.index.json'
    names = ['model.safetensors']
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())['weight_map'].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise BundleError(f'{index}: not a weight index ({error})') from error
    return Checkpoint([path / name for name in names])


def load_target(path: Path, dtype: torch.dtype, device: torch.device, context: int,
                generic: bool = False, packed: bool = True) -> Target:
    """
    Load the target of directory ``path``: on the lean path where its family has one.

    ``packed`` is for decoding; a target to train on must not be.

    Raises BundleError for missing, truncated or malformed files,
    UnsupportedModelError for models that cannot be decoded rightly.
    """
    raw = read_config(path)
    if raw.get('model_type') in SUPPORTED_MODEL_TYPES and not generic:
        config = LlamaConfig.from_hf(raw)
        with open_checkpoint(path) as weights:
            return LlamaTarget(Llama.from_state(config, weights, dtype, device, context,
                                                packed))
    skeleton = build_skeleton(path)
    with open_checkpoint(path) as weights:
        state = {name: weights[name].to(dtype) for name in weights}
    size = sum(tensor.numel() for tensor in state.values()) * dtype.itemsize

    def factory(capacity: int) -> TransformersLM:
        return TransformersLM.attach(skeleton, state, dtype, device, capacity)

    target = TransformersTarget(factory, skeleton.config, size, dtype, device)
    target.hidden_before_norm = decoder_layers(skeleton) is not None
    return target
