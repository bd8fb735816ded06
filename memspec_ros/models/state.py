# SPDX-License-Identifier: Apache-2.0
"""
What a decode has committed so far: tokens, keys and values, hidden states.

These live on the lowest floor because the target writes them and every draft
reads them; the decoding floor owns and advances them.

The invariant (between iterations): every layer group of the target's cache and
every hidden-state buffer holds ``len(tokens) - 1`` positions; the last token
has been emitted but not yet run. Drafting through shared lower layers advances
their group alone, beyond that length; verification brings all groups back to
the committed length. Rolling back sets lengths, and copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


class KVCache:
    """
    Preallocated keys and values, with one length per group of layers.

    Attributes
    ----------
    keys, values: Tensor [layers, 1, KV heads, capacity, head width]
    groups: layer ranges (first, last exclusive), lowest first
    lengths: positions held, one a group

    """

    def __init__(self, layers: int, kv_heads: int, capacity: int, head_dim: int,
                 dtype: torch.dtype, device: torch.device, boundaries: Iterable[int] = ()):
        shape = (layers, 1, kv_heads, capacity, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        edges = [0, *sorted(set(boundaries) - {0, layers}), layers]
        self.groups = tuple(zip(edges, edges[1:]))
        self.lengths = [0] * len(self.groups)

    @property
    def capacity(self) -> int:
        """Positions that fit."""
        return self.keys.shape[3]

    @property
    def bytes(self) -> int:
        """Bytes allocated."""
        return 2 * self.keys.numel() * self.keys.element_size()

    def set_length(self, length: int, group: int | None = None) -> None:
        """Say how many positions a group (or every group) holds from now on."""
        if not 0 <= length <= self.capacity:
            raise ValueError(f'length {length} outside 0..{self.capacity}')
        for index in range(len(self.lengths)) if group is None else (group,):
            self.lengths[index] = length

    def groups_below(self, depth: int) -> Iterable[int]:
        """Indices of the groups that make up the lowest ``depth`` layers."""
        return (index for index, (_, last) in enumerate(self.groups) if last <= depth)


class DecodeState:
    """
    Committed tokens with the target's cache and hidden states for them.

    Attributes
    ----------
    tokens: committed token ids, the prompt first
    prompt_length: how many of them are the prompt
    kv: the target's cache (a KVCache, or what a generic target keeps instead)
    hidden: depth -> Tensor [capacity, H], the target's hidden states after that
        many layers at committed positions. A depth equal to the number of
        layers is the last layer's output before the final norm.

    """

    def __init__(self, kv, hidden: dict[int, Tensor], capacity: int):
        self.kv = kv
        self.hidden = hidden
        self.capacity = capacity
        self.tokens: list[int] = []
        self.prompt_length = 0
        self.held = 0

    @property
    def output(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[self.prompt_length:]

    @property
    def last_hidden(self) -> Tensor | None:
        """Hidden state [H] of the last position run, after the deepest kept layer, or None."""
        if not self.hidden or not self.held:
            return None
        return self.hidden[max(self.hidden)][self.held - 1]

    def hold(self, length: int) -> None:
        """Set the committed length of cache and hidden states (commit or rollback)."""
        self.kv.set_length(length)
        self.held = length

    def restart(self, prompt: list[int]) -> int:
        """
        Begin a new prompt, keeping what it has in common with the tokens held.

        Returns the number of leading positions whose keys, values and hidden
        states stay valid: a second turn of a conversation, or a shared system
        prompt, is not evaluated again.
        """
        kept = 0
        limit = min(self.held, len(prompt) - 1)
        while kept < limit and self.tokens[kept] == prompt[kept]:
            kept += 1
        self.tokens = list(prompt)
        self.prompt_length = len(prompt)
        self.hold(kept)
        return kept


@dataclass(frozen=True)
class TargetRun:
    """
    One pass of the target over a prompt and an output that are given (teacher-forced).

    tokens: prompt and output. hidden: depth -> Tensor [len(tokens), H], the
    target's hidden states after that many layers, for every depth that drafts
    read and after the last layer (before the final norm).
    """

    tokens: list[int]
    hidden: dict[int, Tensor]


@dataclass(frozen=True)
class Proposal:
    """
    Tokens a draft proposes, and the distributions they were drawn from.

    ``probs`` [len(tokens), V] float32, or None for one-hot (a greedy draft, an
    n-gram): verification uses that q and nothing else.
    """

    tokens: list[int]
    probs: Tensor | None = None
