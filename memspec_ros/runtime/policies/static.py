# SPDX-License-Identifier: Apache-2.0
"""One draft for everything."""

from __future__ import annotations

from collections.abc import Sequence

from ...models.bundle import DraftSpec
from ...models.errors import BundleError
from ..ranking import RankingContext
from .base import Plan, Policy


class StaticPolicy(Policy):
    """Always the same draft."""

    def __init__(self, draft: str):
        self._plan = Plan([(draft, 1.0)], working_set=1, prefetch=False)

    def plan(self, context: RankingContext) -> Plan:
        return self._plan


class GeneralStaticPolicy(StaticPolicy):
    """The first draft of domain "general"."""

    def __init__(self, drafts: Sequence[DraftSpec]):
        general = [spec.id for spec in drafts if spec.domain in ('general', '') and spec.path]
        if not general:
            raise BundleError('policy general_static needs a draft of domain "general"')
        super().__init__(general[0])
