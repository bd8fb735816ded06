# SPDX-License-Identifier: Apache-2.0
"""
What to keep in memory and what to decode with: policies behind one interface.

Those here can be deployed (parameter ``policy``): they know no more than a
running node does.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...models.bundle import DraftSpec
from ...models.errors import InvalidRequestError
from ..ranking import Ranker
from .bandit import UCBPolicy
from .base import Plan, Policy
from .hedge import HedgePolicy
from .predictive import MemSpecPolicy, PredictionOnlyPolicy
from .static import GeneralStaticPolicy, StaticPolicy

POLICY_NAMES = ('memspec', 'prediction_only', 'general_static', 'ucb_sync', 'ucb_async', 'hedge')

__all__ = ['GeneralStaticPolicy', 'HedgePolicy', 'make_policy', 'MemSpecPolicy', 'Plan', 'Policy',
           'POLICY_NAMES', 'PredictionOnlyPolicy', 'StaticPolicy', 'UCBPolicy']


def make_policy(name: str, drafts: Sequence[DraftSpec], ranker: Ranker, ucb_c: float = 1.0,
                ucb_per_iteration: bool = False) -> Policy:
    """The policy of that name (parameter ``policy``); ``ucb_…`` are for the bandits."""
    if name == 'memspec':
        return MemSpecPolicy(ranker)
    if name == 'prediction_only':
        return PredictionOnlyPolicy(ranker)
    if name == 'general_static':
        return GeneralStaticPolicy(drafts)
    if name in ('ucb_sync', 'ucb_async'):
        return UCBPolicy(drafts, ucb_c, ucb_per_iteration, wait=name == 'ucb_sync')
    if name == 'hedge':
        return HedgePolicy(ranker)
    raise InvalidRequestError(
        f'policy {name!r} is not known; there are: {", ".join(POLICY_NAMES)}')
