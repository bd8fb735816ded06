# SPDX-License-Identifier: Apache-2.0
"""
Full information on what is in memory: every READY draft is held against the output.

After "Not-a-Bandit" (Liu et al., 2026): what the target has verified judges the
drafts that did not draft as well as the one that did, so nothing need be
explored to be known. What it costs, at each boundary and for each READY draft
but the active one: a catch-up over the tokens of the last interval, and
``PROBE_TOKENS`` draft steps. All of it counts as prediction time.
"""

from __future__ import annotations

from ...decoding.stats import StepRecord
from ..ranking import Acceptance, blend, Ranker, RankingContext
from .base import Plan, Policy

PROBE_TOKENS = 2


class HedgePolicy(Policy):
    """
    Ranks READY drafts by how well they agree with the output, recent tokens first.

    Drafts that are not in memory cannot be asked: they keep what the ranker
    expects of them, scaled by how hard the text has proved for those that were.
    """

    # The ranker's word counts as so many judged tokens; what was judged this many intervals
    # ago has lost two thirds of its weight.
    _PRIOR_WEIGHT = 4.0
    _MEMORY_INTERVALS = 10.0

    def __init__(self, ranker: Ranker):
        self._ranker = ranker
        self._seen: dict[str, Acceptance] = {}

    def begin(self, context: RankingContext) -> None:
        self._ranker.begin(context)
        self._seen = {}

    def observe(self, step: StepRecord) -> None:
        if step.drafted and not step.copied:
            self._count(step.draft, step.accepted, step.judged)

    def overhear(self, draft: str, accepted: int, judged: int) -> None:
        self._count(draft, accepted, judged)

    def plan(self, context: RankingContext) -> Plan:
        expected = self._ranker.expected(context)
        ranked = blend(expected, self._seen, self._PRIOR_WEIGHT)
        for seen in self._seen.values():
            seen.decay(1.0 - 1.0 / self._MEMORY_INTERVALS)
        return Plan(ranked, probe=PROBE_TOKENS)

    def _count(self, draft: str, accepted: int, judged: int) -> None:
        self._seen.setdefault(draft, Acceptance()).count(accepted, judged)
