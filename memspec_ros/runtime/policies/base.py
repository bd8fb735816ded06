# SPDX-License-Identifier: Apache-2.0
"""What a policy is told, and what it may wish for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from ...decoding.stats import StepRecord
from ..ranking import RankingContext


@dataclass(frozen=True)
class Plan:
    """
    A policy's wish at an interval boundary.

    ranked: (draft, score), best first; the residency steers towards it. A score is
    an expected acceptance; above 1 counts as 1. working_set: how many of them to
    hold in memory (None: K). prefetch: whether loads are made ahead of need. use:
    the order in which READY drafts are preferred, where it is not that of
    ``ranked`` (what is best now need not be what is best once it is loaded).
    replace: at K = 1 the active draft makes room for the best-ranked one, whether
    or not that repays the load. wait: decoding stops until the desired draft is
    there. probe: so many tokens are asked of every READY draft that does not
    draft itself; the answers come back through ``Policy.overhear``.
    """

    ranked: Sequence[tuple[str, float]]
    working_set: int | None = None
    prefetch: bool = True
    use: Sequence[str] | None = None
    replace: bool = False
    wait: bool = False
    probe: int = 0

    @property
    def preferred(self) -> Sequence[str]:
        """Drafts to decode with, the best first."""
        return [draft for draft, _ in self.ranked] if self.use is None else self.use

    @property
    def desired(self) -> str:
        """The draft to decode with if it is there, '' if there is none."""
        return next(iter(self.preferred), '')


class Policy(ABC):
    """
    Decides at every interval boundary; told nothing of time or threads.

    interval: iterations between two plans, or None for the parameter
    ``scheduling_interval``. stretch: the next plan is made where the iterations are a
    multiple of so many intervals. judges: before the next plan ``judged`` says how every
    READY draft would have done since the last one. What a policy has learned ends with the
    request: ``begin`` forgets it.
    """

    interval: int | None = None
    stretch = 1
    judges = False

    def begin(self, context: RankingContext) -> None:
        """A new request."""

    @abstractmethod
    def plan(self, context: RankingContext) -> Plan:
        """
        Rank the drafts for the next interval.

        Also called within an interval, where a draft came and none was active, or less
        memory is to be taken.
        """

    def observe(self, step: StepRecord) -> None:
        """See how an iteration went."""

    def overhear(self, draft: str, accepted: int, judged: int) -> None:
        """
        See how ``draft`` would have done, which was asked but did not draft (Plan.probe).

        ``accepted`` of its first ``judged`` tokens were emitted later; at most
        the last of them was wrong.
        """

    def judged(self, draft: str, right: int, count: int) -> None:
        """See that ``right`` of ``count`` tokens emitted were the first choice of ``draft``."""
