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
from collections.abc import Callable, Collection, Mapping
from functools import partial
import json
import math
from pathlib import Path

import torch
from torch import Tensor

from .errors import BundleError, UnsupportedModelError
from .gptq import GptqCheckpoint, GptqSettings
from .gptq_library import installed_library, load_with_library
from .half import half_padding
from .int8_cache import Int8KVCache
from .kv_cache import KVCache, RollbackCache
from .kv_options import KVOptions
from .llama import Llama
from .llama_config import LlamaConfig, SUPPORTED_MODEL_TYPES
from .offload import Offload, place_layers, StreamedLayers
from .packing import dense, prefers_half, ROUNDED_GROUP
from .quantized import has_int4, int4_bytes, int8_bytes, kernel_group
from .state import DecodeState, Eviction
from .transformers_lm import build_skeleton, decoder_layers, TransformersLM
from .tree import depths_of, parents_of, tree_mask
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
    weight_kinds: what the matrices of its layers are held as: bfloat16, int8, int4 …
    verifies_trees: whether ``forward`` takes branches
    hidden_before_norm: whether the last hidden states it keeps are those before
        the final norm, as they should be

    """

    hidden_before_norm = True
    verifies_trees = False
    vocab_size: int
    hidden_size: int
    layers: int
    max_positions: int
    weight_bytes: int
    weight_kinds: tuple[str, ...]
    device: torch.device
    dtype: torch.dtype

    @abstractmethod
    def new_state(self, capacity: int, depths: frozenset[int] = frozenset(),
                  stops: frozenset[int] = frozenset()) -> DecodeState:
        """
        Allocate buffers for ``capacity`` positions and hidden states at ``depths``.

        stops: further depths at which a pass can pause, and go on from there.
        """

    def new_lossy_state(self, kv: KVOptions, context: int, rows: int,
                        depths: frozenset[int] = frozenset()) -> DecodeState:
        """
        Allocate for ``context`` positions of which old ones are kept as ``kv`` says.

        rows: most that run beyond them at once. Raises UnsupportedModelError where the
        target can do no such thing, InvalidRequestError where it does not fit the context.
        """
        raise UnsupportedModelError(
            f'keys and values ({kv}) can be rounded or evicted on the lean path only '
            f'({", ".join(SUPPORTED_MODEL_TYPES)}); set kv.int8_after and kv.window to 0')

    @abstractmethod
    def forward(self, state: DecodeState, tokens: list[int], last_only: bool = False,
                branches: Collection[tuple[int, int]] = ()) -> Tensor:
        """
        Run tokens after the committed positions; logits [T, V] (or [1, V]) in float32.

        The last ``len(branches)`` tokens are those of a proposal's branches, for a
        target that ``verifies_trees``: each sees the row it follows and what that one sees.

        Writes keys, values and hidden states of the new positions, but does not
        commit them: the caller decides with ``state.hold`` how many stay.
        """

    def close(self) -> None:  # noqa: B027 (most have nothing to end)
        """End what reads in the background."""

    def step_bytes(self, state: DecodeState) -> int:
        """
        Bytes that a one-row step on ``state`` reads, however well it is written.

        The weights it multiplies with and the keys and values held; of an
        embedding that is not the head too, one row is nothing.
        """
        return self.weight_bytes


class LlamaTarget(Target):
    """Target on the lean path."""

    verifies_trees = True

    def __init__(self, model: Llama):
        self.model = model
        self.vocab_size = model.config.vocab_size
        self.hidden_size = model.config.hidden_size
        self.layers = model.config.layers
        self.max_positions = model.config.max_positions
        self.device = model.device
        self.dtype = model.dtype
        self.weight_bytes = (model.embedding.nbytes + model.norm.nbytes
                             + sum(layer.bytes for layer in model.held_layers)
                             + getattr(model.layers, 'buffer_bytes', 0))
        self._padding = sum(layer.padding for layer in model.held_layers)
        if model.head is not model.embedding:
            self.weight_bytes += model.head.nbytes
            self._padding += getattr(model.head, 'padding', 0)
        self.weight_bytes += self._padding
        # Layers of one model can differ, and matrices of one layer, by what kernels take.
        self.weight_kinds = tuple(sorted(set().union(
            *(layer.kinds for layer in model.held_layers))))

    def new_state(self, capacity: int, depths: frozenset[int] = frozenset(),
                  stops: frozenset[int] = frozenset()) -> DecodeState:
        return self._state(KVCache, capacity, depths, stops=stops)

    def new_lossy_state(self, kv: KVOptions, context: int, rows: int,
                        depths: frozenset[int] = frozenset()) -> DecodeState:
        limit, eviction, cache = kv.positions(context), None, KVCache
        if kv.int8_after:
            cache = partial(Int8KVCache, recent=kv.int8_after, sinks=kv.sinks, spare=rows)
        if kv.evicts:
            eviction = Eviction(limit, kv.sinks, kv.stride(context), self.model.rope.turn_back)
        return self._state(cache, limit + rows, depths, eviction)

    def _state(self, cache: Callable[..., KVCache], capacity: int, depths: frozenset[int],
               eviction: Eviction | None = None,
               stops: frozenset[int] = frozenset()) -> DecodeState:
        config = self.model.config
        for depth in depths | stops:
            if not 0 < depth <= self.layers:
                raise UnsupportedModelError(
                    f'hidden states after layer {depth}: the target has {self.layers} layers')
        kv = cache(config.layers, config.kv_heads, capacity, config.head_dim,
                   self.model.attention_dtype, self.device, depths | stops)
        hidden = {depth: torch.zeros(capacity, config.hidden_size, dtype=self.dtype,
                                     device=self.device)
                  for depth in depths | {self.layers}}
        return DecodeState(kv, hidden, capacity, eviction)

    def close(self) -> None:
        if isinstance(self.model.layers, StreamedLayers):
            self.model.layers.close()

    @torch.inference_mode()
    def forward(self, state: DecodeState, tokens: list[int], last_only: bool = False,
                branches: Collection[tuple[int, int]] = ()) -> Tensor:
        x = self.run_to(state, tokens, self.layers, branches)
        state.ahead, state.passing = [], {}
        return self.model.logits(x[-1:] if last_only else x)

    @torch.inference_mode()
    def run_to(self, state: DecodeState, tokens: list[int], depth: int,
               branches: Collection[tuple[int, int]] = ()) -> Tensor:
        """
        Run tokens after the committed positions through the lowest ``depth`` layers; [T, H].

        ``depth`` is one that the state was made to stop at. Tokens that are ahead
        (``state.ahead``) are not run again through what they have been run through;
        afterwards all of these are ahead, to that depth at least.
        """
        start, end, kv = state.held, state.held + len(tokens), state.kv
        chain = tokens[:len(tokens) - len(branches)]
        known = next((place for place, (one, other) in enumerate(zip(state.ahead, chain))
                      if one != other), min(len(state.ahead), len(chain)))
        rope, mask = None, None
        if branches:
            parents = parents_of(len(tokens) - 1 - len(branches), branches)
            mask = tree_mask(parents, start, self.device)
            places = torch.tensor([depths_of(parents)], device=self.device) + start
            rope = self.model.rope.gather(places)
        x = None
        for group, (first, last) in enumerate(kv.groups):
            done = min(kv.lengths[group] - start, known)
            if first < depth and done < len(tokens):
                x = (state.passing[first][done:] if first else
                     self.model.embed(torch.tensor(tokens[done:], device=self.device))
                     .to(self.model.stream_dtype))[None]
                x = self.model.run_layers(
                    x, first, last, kv, start + done,
                    rope and tuple(table[:, done:] for table in rope),
                    None if mask is None else mask[done:])[0]
                if last in state.hidden:
                    state.hidden[last][start + done:end] = x
                state.passing[last] = (torch.cat([state.passing[last][:done], x]) if done else x)
                done = len(tokens)
            kv.set_length(start + done, group)
        state.ahead = list(tokens)
        return state.passing[depth]

    def step_bytes(self, state: DecodeState) -> int:
        model = self.model
        table = 0 if model.head is model.embedding else model.embedding.nbytes
        return self.weight_bytes - self._padding - table + state.kv.read_bytes(state.held)

    def lower_bytes(self, state: DecodeState, depth: int) -> int:
        """Bytes that ``run_lower`` reads: the lowest ``depth`` layers, their keys and values."""
        return (sum(layer.bytes for layer in self.model.held_layers[:depth])
                + state.kv.read_bytes(state.held) * depth // self.layers)

    @torch.inference_mode()
    def run_lower(self, state: DecodeState, token: int, position: int, depth: int) -> Tensor:
        """
        Run one token through the lowest ``depth`` layers at ``position``; returns [1, 1, H].

        Advances those layer groups alone: the drafted positions stand beyond the
        committed length until verification overwrites them.
        """
        x = self.model.embed(torch.tensor([[token]], device=self.device))
        state.ahead, state.passing = [], {}
        kv = state.kv
        x = x.to(self.model.stream_dtype)
        x = self.model.run_layers(x, 0, depth, kv, position)
        for group in kv.groups_below(depth):
            kv.set_length(position + 1, group)
        return x.to(self.dtype)


class _RollbackOnly(RollbackCache):
    """What DecodeState needs of a cache, served by a TransformersLM."""

    def __init__(self, lm: TransformersLM):
        self.set_length = lm.set_length
        self.views = lm.views
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
        self.weight_kinds = (_name(dtype),)
        self.device = device
        self.dtype = dtype

    def new_state(self, capacity: int, depths: frozenset[int] = frozenset(),
                  stops: frozenset[int] = frozenset()) -> DecodeState:
        if (depths | stops) - {self.layers}:
            raise UnsupportedModelError(
                'drafts that share its layers need a target on the lean path '
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

    def step_bytes(self, state: DecodeState) -> int:
        return self._lm.step_bytes(state.held)


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
    if not (path / names[0]).exists() and not index.exists():
        # GPTQ tools name the file by bits and group.
        found = [file.name for file in path.glob('*.safetensors')]
        names = found if len(found) == 1 else names
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())['weight_map'].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise BundleError(f'{index}: not a weight index ({error})') from error
    return Checkpoint([path / name for name in names])


def quantization_of(path: Path, raw: Mapping) -> GptqSettings | None:
    """How the weights of ``path`` are quantised, of whose ``config.json`` is ``raw``; or None."""
    settings = raw.get('quantization_config')
    if settings is None and (path / 'quantize_config.json').exists():  # of older tools
        settings = read_config(path, 'quantize_config.json')
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise BundleError(f'{path / "config.json"}: quantization_config is no JSON object')
    return GptqSettings.from_config(settings)


def open_weights(path: Path) -> Checkpoint | GptqCheckpoint:
    """The weights of a Hugging Face directory under the names of the unquantised model."""
    settings = quantization_of(path, read_config(path))
    files = open_checkpoint(path)
    return files if settings is None else GptqCheckpoint(files, settings)


def stored_bytes(path: Path, dtype: torch.dtype, device: torch.device,
                 weights: str = 'auto') -> int:
    """Bytes that the weights of ``path`` take once loaded, computed from shapes alone."""
    total, vectors, plain = 0, 0, True
    config = read_config(path)
    halves = (weights not in ('dense', 'library') and prefers_half(dtype, device)
              and config.get('model_type') in SUPPORTED_MODEL_TYPES)
    head = ('model.embed_tokens.weight' if config.get('tie_word_embeddings')
            else 'lm_head.weight')
    with open_weights(path) as checkpoint:
        for name in checkpoint:
            shape = checkpoint.shape(name)
            size = math.prod(shape) * dtype.itemsize
            if name == head and halves:
                size += half_padding(shape)
            if len(shape) == 1:
                vectors += math.prod(shape)
            elif '.layers.' in name:
                group = (checkpoint.int4_group(name) if isinstance(checkpoint, GptqCheckpoint)
                         else kernel_group(shape[1], ROUNDED_GROUP) if weights == 'int4'
                         else None)
                if weights == 'int8':
                    size, plain = int8_bytes(*shape), False
                elif (group is not None and weights != 'dense'
                      and has_int4(device, dtype, shape[0])):
                    size, plain = int4_bytes(*shape, group, dtype), False
                elif halves:
                    size += half_padding(shape)
            total += size
    if plain and weights == 'auto' and halves:
        # Matrices that are multiplied in float32 have their vectors in it.
        total += vectors * (torch.float32.itemsize - dtype.itemsize)
    return total


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix('torch.')


def load_target(path: Path, dtype: torch.dtype, device: torch.device, context: int,
                generic: bool = False, packed: bool = True, weights: str = 'auto',
                offload: Offload | None = None) -> Target:
    """
    Load the target of directory ``path``: on the lean path where its family has one.

    ``packed`` is for decoding; a target to train on must not be. ``weights`` is
    one of packing.WEIGHT_KINDS. On CUDA a GPTQ checkpoint runs through a GPTQ
    library where one is installed, unless ``weights`` asks for something else.
    ``offload`` leaves layers in storage.

    Raises BundleError for missing, truncated or malformed files,
    UnsupportedModelError for models that cannot be decoded rightly.
    """
    raw = read_config(path)
    quantization = quantization_of(path, raw)
    lean = raw.get('model_type') in SUPPORTED_MODEL_TYPES and not generic
    if offload is not None and (not lean or quantization or weights not in ('auto', 'dense')):
        raise UnsupportedModelError(
            'layers can be left in storage of an unquantised target on the lean path '
            f'({", ".join(SUPPORTED_MODEL_TYPES)}), with weights auto or dense; keep all layers '
            'of this one in memory')
    if lean:
        config = LlamaConfig.from_hf(raw)
        if packed and _wants_library(quantization, weights, device):
            return LlamaTarget(load_with_library(path, config, dtype, device, context))
        place = None
        if offload is not None:
            place = partial(place_layers, config, offload, path, dtype, device)
            weights = 'dense'  # in the least memory: more layers fit
        with open_weights(path) as checkpoint:
            return LlamaTarget(Llama.from_state(config, checkpoint, dtype, device, context,
                                                packed, weights, place))
    if weights not in ('auto', 'dense'):
        raise UnsupportedModelError(
            f'weights {weights} needs a target on the lean path '
            f'({", ".join(SUPPORTED_MODEL_TYPES)}); use weights auto')
    skeleton = build_skeleton(path)
    state = _dense_state(path, dtype)
    size = sum(tensor.numel() for tensor in state.values()) * dtype.itemsize

    def factory(capacity: int) -> TransformersLM:
        return TransformersLM.attach(skeleton, state, dtype, device, capacity)

    target = TransformersTarget(factory, skeleton.config, size, dtype, device)
    target.hidden_before_norm = decoder_layers(skeleton) is not None
    return target


def load_reference(path: Path, dtype: torch.dtype, device: torch.device):
    """
    The target as a model of ``transformers``, to be compared with.

    A GPTQ checkpoint is dequantised: ``transformers`` would ask for a library.
    """
    if quantization_of(path, read_config(path)) is not None:
        return TransformersLM.attach(build_skeleton(path), _dense_state(path, dtype), dtype,
                                     device, 1).model
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, local_files_only=True).to(device).eval()


def _dense_state(path: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    with open_weights(path) as checkpoint:
        return {name: dense(checkpoint[name]).to(dtype) for name in checkpoint}


def _wants_library(quantization: GptqSettings | None, weights: str,
                   device: torch.device) -> bool:
    if weights == 'library' and quantization is None:
        raise UnsupportedModelError('weights library is for GPTQ checkpoints, and this target is '
                                    'none; use weights auto')
    return weights == 'library' or (
        weights == 'auto' and quantization is not None and device.type == 'cuda'
        and installed_library() is not None)
