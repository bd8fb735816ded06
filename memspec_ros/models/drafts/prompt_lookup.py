# SPDX-License-Identifier: Apache-2.0
"""
Prompt lookup: propose what followed the same n-gram earlier in the text.

Costs no memory and next to no time, so it bridges loads. It shines where the
answer repeats its prompt: summaries, edits, code with recurring names.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import BundleError
from ..state import DecodeState, Proposal, TargetRun
from .base import Drafter, DraftKind

DEFAULT_NGRAMS = (4, 3, 2)


class PromptLookupDrafter(Drafter):
    """Index of the n-grams seen so far, kept up to date token by token."""

    copies = True

    def __init__(self, sizes: tuple[int, ...] = DEFAULT_NGRAMS):
        super().__init__()
        self.sizes = tuple(sorted(sizes, reverse=True))
        self._follows: dict[tuple[int, ...], int] = {}

    def evict(self, first: int, count: int) -> int:
        return self.cached  # it reads the text, all of which stays

    def restart(self, kept: int) -> None:
        # Entries are overwritten by later occurrences and cannot be undone one by one.
        self._follows.clear()
        self.cached = 0

    def propose(self, state: DecodeState, gamma: int) -> Proposal:
        size, start = self._find(state.tokens)
        if gamma > 0 and size:
            return Proposal(self._copy(state.tokens, start, gamma))
        return Proposal([])

    def match(self, state: DecodeState) -> int:
        return self._find(state.tokens)[0]

    def _find(self, tokens: list[int]) -> tuple[int, int]:
        """(n, where what followed it begins) of the longest n-gram seen before; (0, 0) if none."""
        self._index(tokens)
        for size in self.sizes:
            start = self._follows.get(tuple(tokens[-size:]))
            if start is not None and len(tokens) > size:
                return size, start
        return 0, 0

    def _index(self, tokens: list[int]) -> None:
        """Add n-grams that end before the last token (what follows them is known)."""
        for end in range(max(self.cached, 1), len(tokens)):
            for size in self.sizes:
                if end >= size:
                    self._follows[tuple(tokens[end - size:end])] = end
        self.cached = max(self.cached, len(tokens))

    @staticmethod
    def _copy(tokens: list[int], start: int, gamma: int) -> list[int]:
        """The run from ``start``, continuing into itself where it reaches the end of the text."""
        period = len(tokens) - start
        return [tokens[start + i % period] for i in range(gamma)]


class PromptLookupKind(DraftKind):
    """Slot-free. Option ``ngrams``: sizes to look for, tried from the longest."""

    slot_free = True
    option_names = frozenset({'ngrams'})

    def __init__(self, spec, bundle, target, capacity):
        sizes = spec.options.get('ngrams', list(DEFAULT_NGRAMS))
        if not (isinstance(sizes, list) and sizes
                and all(type(n) is int and 1 <= n <= 16 for n in sizes)):
            raise BundleError(f'draft {spec.id!r}: ngrams must be a list of sizes 1..16')
        self.sizes = tuple(sizes)

    def attach(self, tensors: Mapping[str, Tensor]) -> Drafter:
        return PromptLookupDrafter(self.sizes)

    def rollout_ranks(self, tensors: Mapping[str, Tensor], run: TargetRun, first: int,
                      gamma: int, top: int) -> Tensor:
        drafter = self.attach(tensors)
        # It reads nothing but the tokens.
        state = DecodeState(None, {}, len(run.tokens))
        ranks = torch.zeros(len(run.tokens) - first, gamma, dtype=torch.uint8)
        for t in range(len(ranks)):
            state.tokens = run.tokens[:first + t]
            proposal = drafter.propose(state, gamma).tokens
            for j, (token, true) in enumerate(zip(proposal, run.tokens[first + t:])):
                ranks[t, j] = token == true
        return ranks
