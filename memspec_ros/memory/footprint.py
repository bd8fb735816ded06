# SPDX-License-Identifier: Apache-2.0
"""
How many bytes a runtime takes, before it takes them.

Computed from the manifest and ``config.json`` alone, so that a node can refuse
to configure instead of being killed while it loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..models.bundle import Bundle, DraftSpec
from ..models.encoder import locate_encoder
from ..models.errors import BundleError
from ..models.target import open_checkpoint, read_config
from ..models.weights import Checkpoint

MIB = 1 << 20
# Activations, tokenizer, allocator slack: measured on the default bundle, rounded up.
_WORKING_BYTES = 96 * MIB


@dataclass(frozen=True)
class Footprint:
    """Bytes by purpose; ``drafts`` are the K largest."""

    weights: int
    kv_cache: int
    hidden_states: int
    logits: int
    shared_head: int
    drafts: int
    working: int
    ranker: int = 0

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return (self.weights + self.kv_cache + self.hidden_states + self.logits
                + self.shared_head + self.drafts + self.working + self.ranker)


def estimate(bundle: Bundle, dtype: torch.dtype, device: torch.device, context: int,
             max_gamma: int, capacity: int) -> Footprint:
    """
    Footprint of ``bundle`` (its target located) at K = ``capacity``.

    Key/value bytes count the key/value heads, not the query heads (grouped-query
    attention), in the type that attention runs in.
    """
    config = read_config(bundle.target_path)
    for name in ('hidden_size', 'num_hidden_layers', 'num_attention_heads', 'vocab_size'):
        if not isinstance(config.get(name), int) or config[name] < 1:
            raise BundleError(
                f'{bundle.target_path / "config.json"}: {name} is {config.get(name)!r}')
    hidden, layers = config['hidden_size'], config['num_hidden_layers']
    heads = config['num_attention_heads']
    kv_heads = config.get('num_key_value_heads') or heads
    head_dim = config.get('head_dim') or hidden // heads
    positions = context + max_gamma + 1
    attention_bytes = 4 if device.type == 'cpu' else dtype.itemsize
    depths = {layers}.union(*([spec.options.get('depth', 0), *spec.options.get('features', [])]
                              for spec in bundle.drafts)) - {0}
    head_ids = bundle.head_token_ids()
    with open_checkpoint(bundle.target_path) as weights:
        elements = weights.elements
    return Footprint(
        weights=elements * dtype.itemsize,
        kv_cache=2 * layers * kv_heads * head_dim * positions * attention_bytes,
        hidden_states=len(depths) * hidden * positions * dtype.itemsize,
        logits=(max_gamma + 1) * config['vocab_size'] * (4 + dtype.itemsize),
        shared_head=0 if head_ids is None else len(head_ids) * hidden * dtype.itemsize,
        drafts=sum(sorted((draft_bytes(bundle, spec, dtype) for spec in bundle.drafts),
                          reverse=True)[:capacity]),
        working=_WORKING_BYTES, ranker=ranker_bytes(bundle))


def ranker_bytes(bundle: Bundle) -> int:
    """Bytes a trained ranker takes in memory, with its encoder if it has one."""
    if bundle.ranker_file is None:
        return 0
    files = [bundle.ranker_file]
    if bundle.ranker.kind == 'bert':
        files.append(locate_encoder() / 'model.safetensors')
    return sum(file.stat().st_size for file in files)


def draft_bytes(bundle: Bundle, spec: DraftSpec, dtype: torch.dtype) -> int:
    """Bytes a draft's weights take in memory as ``dtype``; 0 for slot-free drafts."""
    path = bundle.weight_file(spec)
    if path is None:
        return 0
    with Checkpoint([path]) as weights:
        return weights.elements * dtype.itemsize


def affordable_capacity(fixed: int, draft_bytes: Sequence[int], budget: int) -> int:
    """
    K = -1: the most drafts that fit ``budget`` beside ``fixed`` bytes, whichever they are.

    ``budget`` 0 means no limit: all drafts.
    """
    sizes = sorted((size for size in draft_bytes if size), reverse=True)
    if not budget:
        return len(sizes)
    count, used = 0, fixed
    for size in sizes:
        used += size
        if used > budget:
            break
        count += 1
    return count
