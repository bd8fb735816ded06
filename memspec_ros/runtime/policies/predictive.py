# SPDX-License-Identifier: Apache-2.0
"""Policies that follow a ranker's prediction."""

from __future__ import annotations

from ..ranking import Ranker, RankingContext
from .base import Plan, Policy


class MemSpecPolicy(Policy):
    """The paper's policy: prefetch the K best predicted drafts, use the best that is there."""

    def __init__(self, ranker: Ranker):
        self._ranker = ranker

    def begin(self, context: RankingContext) -> None:
        self._ranker.begin(context)

    def plan(self, context: RankingContext) -> Plan:
        return Plan(self._ranker.rank(context))


class PredictionOnlyPolicy(MemSpecPolicy):
    """Ranks like MemSpec, but loads on demand: only the draft it wants now."""

    def plan(self, context: RankingContext) -> Plan:
        return Plan(self._ranker.rank(context), working_set=1, prefetch=False)
