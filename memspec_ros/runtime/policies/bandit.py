# SPDX-License-Identifier: Apache-2.0
"""
Drafts as the arms of a bandit (UCB1), as in BanditSpec (Hou et al., 2025).

The score of arm i is mean_i + c sqrt(ln t / n_i), t being the sum of all n_i.
The reward of a pull is the share of drafted tokens that was accepted in one
interval. Every arm is pulled once first, ties go to the lowest index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
import math

from ...decoding.stats import StepRecord
from ...models.bundle import DraftSpec
from ...models.drafts import KINDS
from ..ranking import RankingContext
from .base import Plan, Policy


@dataclass
class _Arm:
    pulls: int = 0
    rewards: float = 0.0
    # Tokens of the interval that is running.
    drafted: int = 0
    accepted: int = 0

    def close(self) -> None:
        """End the interval: a pull, if the draft has drafted in it."""
        if self.drafted:
            self.pulls += 1
            self.rewards += self.accepted / self.drafted
        self.drafted = self.accepted = 0


class UCBPolicy(Policy):
    """
    Explores while it decodes; loads on demand.

    Slot-free drafts are arms only where there are no others, and else bridge the
    time until one of the arms is there. Whichever arm drafted gets the reward,
    wanted or not.

    Parameters
    ----------
    drafts: those of the bundle
    c: weight of exploration
    per_iteration: plan after every iteration, instead of every interval
    wait: stop decoding until the wanted draft is loaded (ucb_sync), instead of
        going on with what is there (ucb_async)

    """

    def __init__(self, drafts: Sequence[DraftSpec], c: float = 1.0, per_iteration: bool = False,
                 wait: bool = False):
        loaded = [spec.id for spec in drafts if not KINDS[spec.kind].slot_free]
        self._names = loaded or [spec.id for spec in drafts]
        self._bridges = [(spec.id, 0.0) for spec in drafts if spec.id not in self._names]
        self._c = c
        self._wait = wait
        self.interval = 1 if per_iteration else None
        self._arms: dict[str, _Arm] = {}

    def begin(self, context: RankingContext) -> None:
        self._arms = {name: _Arm() for name in self._names}

    def observe(self, step: StepRecord) -> None:
        arm = self._arms.get(step.draft)
        if arm is not None and not step.copied:
            arm.drafted += step.drafted
            arm.accepted += step.accepted

    def plan(self, context: RankingContext) -> Plan:
        for arm in self._arms.values():
            arm.close()
        scores = self.scores()
        # Stable: equal ones stay in the bundle's order.
        order = sorted(scores, key=lambda name: (self._arms[name].pulls > 0, -scores[name]))
        return Plan([*((name, scores[name]) for name in order), *self._bridges],
                    working_set=1, prefetch=False, replace=True, wait=self._wait)

    def scores(self) -> dict[str, float]:
        """
        The upper confidence bound of every arm.

        One that was never pulled has the most that a single pull could give it,
        in place of infinity; it is ranked before all others anyway.
        """
        total = max(1, sum(arm.pulls for arm in self._arms.values()))
        return {name: (arm.rewards / arm.pulls if arm.pulls else 1.0)
                + self._c * math.sqrt(math.log(total) / max(1, arm.pulls))
                for name, arm in self._arms.items()}
