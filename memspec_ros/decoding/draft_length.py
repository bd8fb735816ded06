# SPDX-License-Identifier: Apache-2.0
"""
How many tokens to draft: as many as pay.

Expected tokens of an iteration are E(g) = 1 + sum over depths of the product of
acceptances up to that depth; its cost is g drafted tokens and a verify of g + 1
rows. The length that maximises tokens per second wins, zero included: a draft
that does not pay is not asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
import math

from .stats import StepRecord
from .verification import agreement

# Each observation counts this much less with each later one: within an answer acceptance drifts,
# and times with the machine's load; what holds from answer to answer is learned more slowly.
_MEMORY = 0.96
_LONG_MEMORY = 0.995
# What earlier answers taught counts as so many observations of this one.
_EARLIER_WEIGHT = 8.0
# A draft that does not pay is heard so seldom, and more seldom where that would take more than
# this share of the time.
_PROBE_EVERY = 16
_PROBE_SHARE = 0.02
# A clock too coarse to see a step must not become a division by zero.
_LEAST_SEC = 1e-9
# Verifying a further row costs this share of a one-row step until it has been
# measured (memory-bound decoding: the weights are read once for all rows).
ROW_COST_PRIOR = 0.03
_DRAFT_COST_PRIOR = 0.12
_ACCEPTANCE_PRIOR = 0.45
_PRIOR_WEIGHT = 4.0


@dataclass
class _Mean:
    """Decaying mean of what was measured."""

    total: float = 0.0
    weight: float = 0.0
    memory: float = _MEMORY

    def add(self, value: float) -> None:
        self.total = self.total * self.memory + value
        self.weight = self.weight * self.memory + 1.0

    def value(self, prior: float, prior_weight: float = 0.0) -> float:
        weight = self.weight + prior_weight
        return (self.total + prior * prior_weight) / weight if weight else prior


@dataclass
class _DraftFigures:
    # Acceptance at each depth, given that the depth was reached: in all answers, and in this one.
    by_depth: list[_Mean] = field(default_factory=list)
    now: list[_Mean] = field(default_factory=list)
    step_cost: _Mean = field(default_factory=_Mean)
    # Rows verified beside the chain.
    branches: _Mean = field(default_factory=_Mean)
    # A verify after its drafting, which may have run a part of it, to one of all layers.
    verify_share: _Mean = field(default_factory=_Mean)
    # Iterations since it was last heard; whether it was right then.
    idle: int = 0
    again: bool = False


class DraftLength:
    """
    Chooses gamma per draft from what has been measured in this process.

    Parameters
    ----------
    max_gamma: most tokens to draft
    adaptive: False always drafts ``max_gamma``

    """

    def __init__(self, max_gamma: int, adaptive: bool = True):
        self.max_gamma = max_gamma
        self.adaptive = adaptive
        self._shape: dict[int, float] = {}
        self._load = _Mean()
        self._drafts: dict[str, _DraftFigures] = {}

    def verify_cost(self, rows: int) -> float:
        """
        Seconds of a verify of ``rows`` rows.

        The cost of each size relative to the others is measured back to back
        (``calibrate``); while decoding, one factor follows the machine's load.
        Sizes measured at different times would be compared by the noise between.
        """
        return self._shape_of(rows) * self._load.value(1.0)

    def _shape_of(self, rows: int) -> float:
        if rows in self._shape:
            return self._shape[rows]
        if not self._shape:
            return 1.0 + ROW_COST_PRIOR * (rows - 1)
        nearest = min(self._shape, key=lambda n: (abs(n - rows), n))
        return self._shape[nearest] * ((1 + ROW_COST_PRIOR * (rows - 1))
                                       / (1 + ROW_COST_PRIOR * (nearest - 1)))

    def begin(self) -> None:
        """
        A new answer: what the last one was like says little of it.

        Without this, a draft that an unlucky prompt had brought to zero would stay
        there, unheard, for the prompts it is good at.
        """
        for figures in self._drafts.values():
            figures.now = []

    def reaches(self, draft: str, gamma: int) -> list[float]:
        """Probability that the first, the first two … ``gamma`` tokens of ``draft`` are right."""
        figures = self._drafts.get(draft, _DraftFigures())
        reaches, reach, earlier = [], 1.0, _ACCEPTANCE_PRIOR
        for depth in range(gamma):
            # A depth that was hardly seen is believed to be like the one before.
            earlier = _at(figures.by_depth, depth).value(earlier, _PRIOR_WEIGHT)
            reach *= _at(figures.now, depth).value(earlier, _EARLIER_WEIGHT)
            reaches.append(reach)
        return reaches

    def expected_tokens(self, draft: str, gamma: int) -> float:
        """E(gamma) of ``draft``."""
        return 1.0 + sum(self.reaches(draft, gamma))

    def drafting_cost(self, draft: str, gamma: int) -> float:
        """Seconds in which ``draft`` proposes ``gamma`` tokens."""
        figures = self._drafts.get(draft, _DraftFigures())
        return gamma * figures.step_cost.value(_DRAFT_COST_PRIOR * self.verify_cost(1))

    def speed(self, draft: str, gamma: int) -> float:
        """Expected tokens per second when ``draft`` proposes ``gamma`` tokens."""
        figures = self._drafts.get(draft, _DraftFigures())
        rows = 1 + gamma + (round(figures.branches.value(0.0)) if gamma else 0)
        cost = self.drafting_cost(draft, gamma) + self.verify_cost(rows) * (
            figures.verify_share.value(1.0) if gamma else 1.0)
        return self.expected_tokens(draft, gamma) / max(cost, _LEAST_SEC)

    def worth_of_row(self, speed: float) -> float:
        """
        Probability of being right from which on a further row pays, at ``speed`` tokens/s.

        What a row costs is taken as equal for all sizes: differences between
        neighbours are smaller than the noise of measuring them.
        """
        most = max(self._shape, default=self.max_gamma + 1)
        if most < 2:
            return 1.0
        row = max(0.0, self.verify_cost(most) - self.verify_cost(1)) / (most - 1)
        return row * speed

    def choose(self, draft: str) -> int:
        """Gamma for the next iteration of ``draft``; 0 where drafting does not pay."""
        if not self.adaptive or not self.max_gamma:
            return self.max_gamma
        best = max(range(self.max_gamma + 1), key=lambda gamma: self.speed(draft, gamma))
        figures = self._drafts.setdefault(draft, _DraftFigures())
        if best == 0:
            # Acceptance is not seen at zero: look again now and then.
            figures.idle += 1
            if (figures.again and self._would_pay(draft)
                    or figures.idle >= self._probe_interval(draft)):
                figures.idle, figures.again = 0, False
                return self._probe_gamma
        return best

    @property
    def _probe_gamma(self) -> int:
        return min(2, self.max_gamma)

    def _would_pay(self, draft: str) -> bool:
        """Whether a look at a draft is worth its time where all that it says is right."""
        return self._extra(draft) < self._probe_gamma

    def _extra(self, draft: str) -> float:
        """What a look at a draft takes beside a plain step, in plain steps."""
        gamma, plain = self._probe_gamma, max(self.verify_cost(1), _LEAST_SEC)
        return (self.drafting_cost(draft, gamma) + self.verify_cost(1 + gamma) - plain) / plain

    def _probe_interval(self, draft: str) -> int:
        """Iterations between two looks at a draft that does not pay: the dearer, the rarer."""
        return max(_PROBE_EVERY, math.ceil(self._extra(draft) / _PROBE_SHARE))

    def calibrate(self, rows: int, seconds: float) -> None:
        """Set the cost of a verify of ``rows`` rows, measured beside the other sizes (warm-up)."""
        self._shape[rows] = max(seconds, _LEAST_SEC)

    def observe(self, step: StepRecord) -> None:
        """Learn from an iteration."""
        if step.ahead:
            self._drafts.setdefault(step.draft, _DraftFigures()).verify_share.add(
                step.t_verify / max(self.verify_cost(step.rows), _LEAST_SEC))
        else:
            self._load.add(step.t_verify / self._shape_of(step.rows))
        if not step.draft or not step.drafted:
            return
        figures = self._drafts.setdefault(step.draft, _DraftFigures())
        # All accepted: one position to catch up with, about a draft step more. What exceeds that
        # is the price of a switch, paid once, and says nothing about the steps to come.
        catch_up = min(step.t_catch_up, step.t_draft / step.drafted)
        figures.step_cost.add((step.t_draft + catch_up) / step.drafted)
        figures.branches.add(step.branches - step.grafted)
        # It has paid for being heard: that goes on as long as it does.
        figures.again = step.accepted == step.drafted
        self._judge(figures, step.accepted, step.judged)

    def overhear(self, draft: str, proposal: Sequence[int], emitted: Sequence[int],
                 seconds: float | None = None) -> None:
        """
        Learn what a draft beside the active one would have had accepted: no more than emitted.

        seconds: what it took to propose, where that is known.
        """
        figures = self._drafts.setdefault(draft, _DraftFigures())
        if seconds is not None and proposal:
            figures.step_cost.add(seconds / len(proposal))
        self._judge(figures, *agreement(proposal, emitted))

    @staticmethod
    def _judge(figures: _DraftFigures, accepted: int, judged: int) -> None:
        """``accepted`` tokens were right, and one more wrong where so many were ``judged``."""
        figures.by_depth += [_Mean(memory=_LONG_MEMORY)
                             for _ in range(judged - len(figures.by_depth))]
        figures.now += [_Mean() for _ in range(judged - len(figures.now))]
        for depth in range(judged):
            right = 1.0 if depth < accepted else 0.0
            figures.by_depth[depth].add(right)
            figures.now[depth].add(right)


def _at(means: list[_Mean], depth: int) -> _Mean:
    return means[depth] if depth < len(means) else _Mean()
