# SPDX-License-Identifier: Apache-2.0
"""Policies that follow a ranker (MemSpec, Algorithms 1 and 2)."""

from __future__ import annotations

from collections.abc import Mapping
import math

from ..ranking import Acceptance, blend, PRIOR_WEIGHT, Ranker, RankingContext
from .base import Plan, Policy

# What was judged so many tokens ago has lost two thirds of its weight.
MEMORY_TOKENS = 100.0
# Drafts are judged at every second boundary: what it costs is a pass, however many rows.
JUDGE_EVERY = 2
# The draft in use goes on unless another promises so much more acceptance. Below that, a change
# of ranks is mostly noise, and the better draft mostly not there.
STAYING = 1.05
# Loaded ahead of need is what may be the best: what is behind it by so many standard deviations
# of the difference, no more.
DOUBT = 0.5
# The interval doubles with every so many plans at which the best draft was in use and had been
# the best before, up to so many times its length.
CALM_PLANS = 2
MOST_STRETCH = 4


class MemSpecPolicy(Policy):
    """
    Prefetch the best drafts, use the best that is there.

    As in the paper, but for what it goes by: the ranker's word is corrected by
    how every draft in memory has done on the tokens emitted, whether it drafted
    them or not. Where a kind cannot say that, by what was accepted of it. It looks
    the more rarely the longer nothing changes, and of the K best prefetches only
    those that may be the best one.
    """

    def __init__(self, ranker: Ranker):
        self._ranker = ranker
        self._seen: dict[str, Acceptance] = {}
        self._position = self._plans = self._calm = 0
        self._best = ''

    def begin(self, context: RankingContext) -> None:
        self._ranker.begin(context)
        self._seen, self._position, self._plans = {}, 0, 0
        self._calm, self._best = 0, ''

    @property
    def stretch(self) -> int:
        return min(2 ** (self._calm // CALM_PLANS), MOST_STRETCH)

    @property
    def judges(self) -> bool:
        return self._plans % JUDGE_EVERY == 0

    def judged(self, draft: str, right: int, count: int) -> None:
        self._seen.setdefault(draft, Acceptance()).count(right, count)

    def plan(self, context: RankingContext) -> Plan:
        seen = self._all_seen(context)
        ranked = self._rank(context, seen)
        return Plan(ranked, working_set=_in_doubt(_loaded(ranked, context), seen),
                    use=_staying(ranked, context.active))

    def _all_seen(self, context: RankingContext) -> dict[str, Acceptance]:
        return {**context.acceptance, **self._seen}

    def _rank(self, context: RankingContext, seen: Mapping[str, Acceptance]
              ) -> list[tuple[str, float]]:
        ranked = blend(self._ranker.expected(context), seen)
        best = next((draft for draft, _ in _loaded(ranked, context)), '')
        self._calm = self._calm + 1 if best == self._best == context.active else 0
        self._best = best
        memory = (1.0 - 1.0 / MEMORY_TOKENS) ** (context.position - self._position)
        self._position = context.position
        self._plans += 1
        for seen in self._seen.values():
            seen.decay(memory)
        return ranked


class PredictionOnlyPolicy(MemSpecPolicy):
    """Ranks like MemSpec, but loads on demand: only the draft it wants now."""

    def plan(self, context: RankingContext) -> Plan:
        return Plan(self._rank(context, self._all_seen(context)), working_set=1, prefetch=False)


def _loaded(ranked: list[tuple[str, float]], context: RankingContext) -> list[tuple[str, float]]:
    """Those of the drafts that have to be loaded."""
    return [(draft, acceptance) for draft, acceptance in ranked
            if draft not in context.slot_free]


def _in_doubt(ranked: list[tuple[str, float]], seen: Mapping[str, Acceptance]) -> int:
    """How many of the drafts may be the best: the first, and those next to it in doubt."""
    def variance(draft: str, acceptance: float) -> float:
        return (acceptance * (1.0 - acceptance)
                / (PRIOR_WEIGHT + seen.get(draft, Acceptance()).judged))

    count = 1
    for draft, acceptance in ranked[1:]:
        best, most = ranked[0]
        if most - acceptance > DOUBT * math.sqrt(variance(best, most)
                                                 + variance(draft, acceptance)):
            break
        count += 1
    return count


def _staying(ranked: list[tuple[str, float]], active: str) -> list[str]:
    """The drafts, best first, the one in use ahead of those that are hardly better."""
    return [draft for draft, _ in sorted(
        ranked, key=lambda item: -item[1] * (STAYING if item[0] == active else 1.0))]
