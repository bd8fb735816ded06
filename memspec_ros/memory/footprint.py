# SPDX-License-Identifier: Apache-2.0
"""
How many bytes a runtime takes, before it takes them.

Computed from the manifest, ``config.json`` and the headers of the weight files,
so that a node can refuse to configure instead of being killed while it loads.
After SpecMemo (arXiv 2506.01986), which models what speculation adds to the
weights: caches for context and drafted tokens, rows of logits, activations.
``memspec plan --measure`` holds the model against a real run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
import math
from pathlib import Path

import torch

from ..decoding.engine import CATCH_UP_ROWS, PREFILL_CHUNK
from ..models.bundle import Bundle, DraftSpec
from ..models.drafts import KINDS
from ..models.drafts.prompt_lookup import DEFAULT_NGRAMS
from ..models.encoder import locate_encoder
from ..models.errors import BundleError
from ..models.half import half_padding
from ..models.int8_cache import int8_cache_bytes
from ..models.kv_options import KVOptions
from ..models.llama_config import LlamaConfig, SUPPORTED_MODEL_TYPES
from ..models.offload import BUFFERS, layer_bytes, Offload
from ..models.packing import prefers_half
from ..models.target import read_config, stored_bytes
from ..models.weights import Checkpoint
from .allocator import MIB

# Kernels that PyTorch compiles for the shapes of a model, and their scratch space, measured on
# x86-64 with AVX-512 in models of any size: where FBGEMM multiplies, and where oneDNN does.
_HALF_KERNEL_BYTES, _KERNEL_BYTES = 22 * MIB, 40 * MIB
# An entry of prompt lookup's index: a tuple of small numbers and its place in a dict.
_NGRAM_BYTES = 200


@dataclass(frozen=True)
class Footprint:
    """
    Bytes by purpose.

    runtime: interpreter and libraries, where the caller has measured them.
    drafts: the K largest; draft_caches: their keys and values. kv_cache and
    hidden_states: of all sessions. loading: the file of a draft while it is
    being packed, beside all that decoding takes. layer: one layer of the
    target, of which there are two copies while the last one is packed. exits:
    of a target that drafts for itself.
    """

    weights: int
    kv_cache: int
    hidden_states: int
    logits: int
    activations: int
    shared_head: int
    drafts: int
    draft_caches: int
    loading: int
    kernels: int
    layer: int
    ranker: int = 0
    runtime: int = 0
    exits: int = 0

    @property
    def needed(self) -> int:
        """Bytes to be taken, at the peak, in a process that has loaded its libraries."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        fixed = self.weights + self.shared_head
        running = sum(parts.values()) - self.runtime - self.layer
        return max(running, fixed + self.layer)

    @property
    def total(self) -> int:
        """Bytes of the process at the peak."""
        return self.needed + self.runtime


@dataclass(frozen=True)
class Demand:
    """
    What is to be run: K drafts, ``gamma`` drafted tokens, ``context`` tokens a session.

    sessions: conversations whose keys and values are kept, the running one included.
    branches: alternatives to drafted tokens verified beside them. kv: how keys and
    values of old positions are kept.
    """

    context: int = 2048
    gamma: int = 4
    capacity: int = 2
    sessions: int = 1
    branches: int = 4
    kv: KVOptions = KVOptions()

    @property
    def rows(self) -> int:
        """Rows of a verification."""
        return 1 + (self.gamma + self.branches if self.gamma else 0)


class FootprintModel:
    """
    Footprints of one bundle, its target located, in one type on one device.

    Reads the sizes once; ``of`` is then cheap enough to search with. ``weights``
    as for ``load_target``; ``runtime``: bytes of the process before it loads.
    layers_bytes: most memory for the target's layers, 0 for all of them. Raises
    BundleError for a target whose configuration says nothing of use.
    """

    def __init__(self, bundle: Bundle, dtype: torch.dtype, device: torch.device,
                 weights: str = 'auto', runtime: int = 0, layers_bytes: int = 0):
        self.bundle = bundle
        self.dtype = dtype
        self.device = device
        self.runtime = runtime
        self.target = _Shape.read(bundle.target_path)
        most = read_config(bundle.target_path).get('max_position_embeddings')
        self.most_context = most if isinstance(most, int) and most > 0 else 1 << 20
        self.weight_bytes = stored_bytes(bundle.target_path, dtype, device,
                                         'dense' if layers_bytes else weights)
        if layers_bytes:
            self.weight_bytes -= _left_in_storage(bundle.target_path, dtype, layers_bytes)
        self._exits = 0 if bundle.self_speculation is None else draft_bytes(
            bundle, bundle.self_speculation, dtype, device)
        head_ids = bundle.head_token_ids()
        self.head_bytes = 0 if head_ids is None else (
            _packed_bytes((len(head_ids), self.target.hidden), dtype, device))
        self.draft_bytes = {spec.id: draft_bytes(bundle, spec, dtype, device)
                            for spec in bundle.drafts}
        self._draft_shapes = {spec.id: self._draft_shape(spec) for spec in bundle.drafts}
        self._ranker = ranker_bytes(bundle)
        self._kernel_bytes = (
            _HALF_KERNEL_BYTES if weights == 'auto' and not layers_bytes
            and prefers_half(dtype, device) else _KERNEL_BYTES)

    def of(self, demand: Demand) -> Footprint:
        """
        Footprint of ``demand``.

        Key/value bytes count the key/value heads, not the query heads (grouped-query
        attention), in the type that attention runs in.
        """
        shape, item = self.target, self.dtype.itemsize
        positions = demand.kv.positions(min(demand.context, self.most_context)) + demand.rows
        specs = self.bundle.drafts if demand.gamma else ()
        depths = {shape.layers}.union(
            *([spec.options.get('depth', 0), *spec.options.get('features', [])]
              for spec in specs)) - {0}
        resident = self.largest(demand)
        rows = CATCH_UP_ROWS if resident else PREFILL_CHUNK
        sessions = demand.sessions
        return Footprint(
            weights=self.weight_bytes,
            kv_cache=self._cache_bytes(demand, positions),
            hidden_states=sessions * len(depths) * shape.hidden * positions * item,
            logits=demand.rows * shape.vocabulary * (4 + item),
            activations=4 * max(PREFILL_CHUNK * shape.row_elements,
                                *(CATCH_UP_ROWS * self._draft_shapes[d].row_elements
                                  for d in resident), 0) + 4 * rows * positions,
            shared_head=self.head_bytes if demand.gamma and self.bundle.drafting else 0,
            exits=self._exits if demand.gamma else 0,
            drafts=sum(self.draft_bytes[d] for d in resident),
            draft_caches=self._index_bytes(specs, positions) + sum(
                self.cache_bytes(self.bundle.draft(d), positions) for d in resident),
            loading=max(map(self._loading_bytes, resident), default=0),
            kernels=self._kernel_bytes, layer=shape.layer_elements * item, ranker=self._ranker,
            runtime=self.runtime)

    def _cache_bytes(self, demand: Demand, positions: int) -> int:
        """Keys and values of all sessions; those that rest need not be readable."""
        shape, number = self.target, self._attention_bytes(self.target)
        if not demand.kv.int8_after:
            return demand.sessions * shape.cache_bytes(positions, number)
        held, readable = int8_cache_bytes(
            shape.layers, shape.kv_heads * shape.head_dim, shape.kv_heads, positions, number,
            demand.kv.int8_after, demand.kv.sinks, demand.rows)
        return demand.sessions * held + readable

    def cache_bytes(self, spec: DraftSpec, positions: int) -> int:
        """Keys and values that a draft keeps of its own."""
        shape = self._draft_shapes[spec.id]
        return shape.cache_bytes(positions, self._attention_bytes(shape))

    def affordable_capacity(self, demand: Demand, room: int) -> int:
        """K = -1: the most drafts, whichever they are, that ``room`` bytes suffice to add."""
        count = self.sized_drafts
        while count and self.of(replace(demand, capacity=count)).needed > room:
            count -= 1
        return count

    def step_share(self, spec: DraftSpec) -> float:
        """What drafting a token reads, relative to what a step of the target reads."""
        table = self.target.vocabulary * self.target.hidden * self.dtype.itemsize
        layers = self.weight_bytes - (table if self.target.tied else 2 * table)
        own = self.draft_bytes[spec.id]
        if spec.kind != 'causal_lm':
            own += self.head_bytes + layers * spec.options.get('depth', 0) / self.target.layers
        return own / (layers + table)

    @property
    def sized_drafts(self) -> int:
        """Drafts that take memory."""
        return sum(size > 0 for size in self.draft_bytes.values())

    def largest(self, demand: Demand) -> list[str]:
        """Ids of the K drafts that take most."""
        sized = [d for d, size in self.draft_bytes.items() if size and demand.gamma]
        return sorted(sized, key=lambda d: -self.draft_bytes[d])[:demand.capacity]

    def _loading_bytes(self, draft: str) -> int:
        """A draft's file and, where it holds another type, what it is converted to."""
        spec = self.bundle.draft(draft)
        size, kept = spec.bytes, self.dtype.itemsize * sum(
            map(math.prod, _shapes(self.bundle, spec).values()))
        # Headers are a few kilobytes, types differ by a factor of two.
        return size if size < 1.5 * kept and kept < 1.5 * size else size + kept

    def _attention_bytes(self, shape: _Shape) -> int:
        """Bytes of a number in a cache: the lean path attends in float32 on a CPU."""
        return 4 if shape.lean and self.device.type == 'cpu' else self.dtype.itemsize

    def _draft_shape(self, spec: DraftSpec) -> _Shape:
        """Sizes of the draft's own layers."""
        if spec.kind == 'causal_lm':
            # Run by transformers, whatever its family.
            return replace(_Shape.read(self.bundle.directory_of(spec)), lean=False)
        return replace(self.target, layers=spec.options.get('layers', 0))

    @staticmethod
    def _index_bytes(specs: Sequence[DraftSpec], positions: int) -> int:
        """What drafts that copy keep of the text."""
        return sum(len(spec.options.get('ngrams', DEFAULT_NGRAMS)) * positions * _NGRAM_BYTES
                   for spec in specs if spec.kind == 'prompt_lookup')


@dataclass(frozen=True)
class _Shape:
    """Sizes of a model that memory depends on."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    kv_heads: int
    qkv: int
    head_dim: int
    tied: bool
    lean: bool

    @classmethod
    def read(cls, directory: Path) -> _Shape:
        config = read_config(directory)
        for name in ('hidden_size', 'num_hidden_layers', 'num_attention_heads', 'vocab_size'):
            if not isinstance(config.get(name), int) or config[name] < 1:
                raise BundleError(f'{directory / "config.json"}: {name} is {config.get(name)!r}')
        hidden, heads = config['hidden_size'], config['num_attention_heads']
        kv_heads = config.get('num_key_value_heads') or heads
        head_dim = config.get('head_dim') or hidden // heads
        return cls(
            vocabulary=config['vocab_size'], hidden=hidden,
            # Some families say it another way, or not at all: four times the width is usual.
            intermediate=config.get('intermediate_size') or 4 * hidden,
            layers=config['num_hidden_layers'], kv_heads=kv_heads,
            qkv=(heads + 2 * kv_heads) * head_dim, head_dim=head_dim,
            tied=bool(config.get('tie_word_embeddings')),
            lean=config.get('model_type') in SUPPORTED_MODEL_TYPES)

    def cache_bytes(self, positions: int, number: int) -> int:
        """Keys and values of ``positions``, ``number`` bytes each."""
        return 2 * self.layers * self.kv_heads * self.head_dim * positions * number

    @property
    def row_elements(self) -> int:
        """Numbers that a row of a forward pass holds at a time, where it holds most."""
        return 6 * self.hidden + 3 * self.qkv + 4 * self.intermediate

    @property
    def layer_elements(self) -> int:
        """Numbers in a layer's matrices."""
        attention = self.qkv - 2 * self.kv_heads * self.head_dim
        return self.hidden * (self.qkv + attention + 3 * self.intermediate)


def _left_in_storage(directory: Path, dtype: torch.dtype, layers_bytes: int) -> int:
    """Bytes of layers that are not in memory, less the buffers they pass through."""
    config = LlamaConfig.from_hf(read_config(directory))
    resident = Offload(layers_bytes, Path()).resident(config, dtype)
    if resident == config.layers:
        return 0
    return (config.layers - resident - BUFFERS) * layer_bytes(config, dtype)


def ranker_bytes(bundle: Bundle) -> int:
    """Bytes a trained ranker takes in memory, with its encoder if it has one."""
    if bundle.ranker_file is None:
        return 0
    files = [bundle.ranker_file]
    if bundle.ranker.kind == 'bert':
        files.append(locate_encoder() / 'model.safetensors')
    return sum(file.stat().st_size for file in files)


def draft_bytes(bundle: Bundle, spec: DraftSpec, dtype: torch.dtype,
                device: torch.device) -> int:
    """Bytes a draft's weights take in memory as ``dtype``; 0 for those without a file."""
    return sum(_packed_bytes(shape, dtype, device) if KINDS[spec.kind].is_matrix(name)
               else math.prod(shape) * dtype.itemsize
               for name, shape in _shapes(bundle, spec).items())


def _shapes(bundle: Bundle, spec: DraftSpec) -> dict[str, tuple[int, ...]]:
    """Of the tensors in a draft's file."""
    path = bundle.weight_file(spec)
    if path is None:
        return {}
    with Checkpoint([path]) as weights:
        return {name: weights.shape(name) for name in weights}


def _packed_bytes(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> int:
    """Bytes of a tensor that is packed for the kernel that is faster here if it is a matrix."""
    padding = half_padding(shape) if len(shape) == 2 and prefers_half(dtype, device) else 0
    return math.prod(shape) * dtype.itemsize + padding
