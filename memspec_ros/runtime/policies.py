# SPDX-License-Identifier: Apache-2.0
"""What to keep in memory and what to decode with: policies behind one interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from ..models.bundle import DraftSpec
from ..models.errors import BundleError, InvalidRequestError
from .ranking import Ranker, RankingContext


@dataclass(frozen=True)
class Plan:
    """
    A policy's wish at an interval boundary.

    ranked: (draft, score), best first. working_set: how many of them to hold in
    memory (None: K). prefetch: whether loads are made ahead of need.
    """

    ranked: Sequence[tuple[str, float]]
    working_set: int | None = None
    prefetch: bool = True

    @property
    def desired(self) -> str:
        """The best-ranked draft, '' if there is none."""
        return self.ranked[0][0] if self.ranked else ''


class Policy(ABC):
    """Decides at every interval boundary; told nothing of time or threads."""

    def begin(self, context: RankingContext) -> None:
        """A new request."""

    @abstractmethod
    def plan(self, context: RankingContext) -> Plan:
        """Rank the drafts for the next interval."""


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


class GeneralStaticPolicy(Policy):
    """One general draft for everything."""

    def __init__(self, drafts: Sequence[DraftSpec]):
        general = [spec.id for spec in drafts if spec.domain in ('general', '') and spec.path]
        if not general:
            raise BundleError('policy general_static needs a draft of domain "general"')
        self._plan = Plan([(general[0], 1.0)], working_set=1, prefetch=False)

    def plan(self, context: RankingContext) -> Plan:
        return self._plan


POLICY_NAMES = ('memspec', 'prediction_only', 'general_static')


def make_policy(name: str, drafts: Sequence[DraftSpec], ranker: Ranker) -> Policy:
    """The policy of that name (parameter ``policy``)."""
    if name == 'memspec':
        return MemSpecPolicy(ranker)
    if name == 'prediction_only':
        return PredictionOnlyPolicy(ranker)
    if name == 'general_static':
        return GeneralStaticPolicy(drafts)
    raise InvalidRequestError(
        f'policy {name!r} is not known; there are: {", ".join(POLICY_NAMES)}')
