# SPDX-License-Identifier: Apache-2.0
"""Policies that follow a ranker (MemSpec, Algorithms 1 and 2)."""

from __future__ import annotations

from ..ranking import Acceptance, blend, Ranker, RankingContext
from .base import Plan, Policy

# What was judged so many tokens ago has lost two thirds of its weight.
MEMORY_TOKENS = 100.0
# Drafts are judged at every second boundary: what it costs is a pass, however many rows.
JUDGE_EVERY = 2
# The draft in use goes on unless another promises so much more acceptance. Below that, a change
# of ranks is mostly noise, and the better draft mostly not there.
STAYING = 1.05


class MemSpecPolicy(Policy):
    """
    Prefetch the K best drafts, use the best that is there.

    As in the paper, but for what it goes by: the ranker's word is corrected by
    how every draft in memory has done on the tokens emitted, whether it drafted
    them or not. Where a kind cannot say that, by what was accepted of it.
    """

    def __init__(self, ranker: Ranker):
        self._ranker = ranker
        self._seen: dict[str, Acceptance] = {}
        self._position = self._plans = 0

    def begin(self, context: RankingContext) -> None:
        self._ranker.begin(context)
        self._seen, self._position, self._plans = {}, 0, 0

    @property
    def judges(self) -> bool:
        return self._plans % JUDGE_EVERY == 0

    def judged(self, draft: str, right: int, count: int) -> None:
        self._seen.setdefault(draft, Acceptance()).count(right, count)

    def plan(self, context: RankingContext) -> Plan:
        ranked = self._rank(context)
        return Plan(ranked, use=_staying(ranked, context.active))

    def _rank(self, context: RankingContext) -> list[tuple[str, float]]:
        ranked = blend(self._ranker.expected(context), {**context.acceptance, **self._seen})
        memory = (1.0 - 1.0 / MEMORY_TOKENS) ** (context.position - self._position)
        self._position = context.position
        self._plans += 1
        for seen in self._seen.values():
            seen.decay(memory)
        return ranked


class PredictionOnlyPolicy(MemSpecPolicy):
    """Ranks like MemSpec, but loads on demand: only the draft it wants now."""

    def plan(self, context: RankingContext) -> Plan:
        return Plan(self._rank(context), working_set=1, prefetch=False)


def _staying(ranked: list[tuple[str, float]], active: str) -> list[str]:
    """The drafts, best first, the one in use ahead of those that are hardly better."""
    return [draft for draft, _ in sorted(
        ranked, key=lambda item: -item[1] * (STAYING if item[0] == active else 1.0))]
