# SPDX-License-Identifier: Apache-2.0
"""What replays of traces made by hand need: drafts, profiles, random traces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from trace_maker import DRAFTS, header, trace_of

from memspec_ros.bench.profile import CostProfile
from memspec_ros.bench.replay import Replayer, Scenario
from memspec_ros.models.bundle import DraftSpec
from memspec_ros.runtime.ranking import Ranker


def drafts_of(names: Sequence[str] = DRAFTS, kind: str = 'shared_layers') -> list[DraftSpec]:
    """The first one is the general one."""
    return [DraftSpec(name, kind, name if index else 'general', 'Apache-2.0', 'made up',
                      f'{name}.safetensors', bytes=1000) for index, name in enumerate(names)]


def profile_of(**changes) -> CostProfile:
    return CostProfile(**{
        'name': 'test', 'verify_ms': (100, 105, 110, 115, 120), 'draft_step_ms': {'default': 10},
        'catch_up_row_ms': {'default': 1}, 'rank_ms': 5, 'overhead_ms': 2,
        'load_ms': {'default': 300}, **changes})


def replayer_of(names=DRAFTS, kind='shared_layers', ranker=None, header_changes=None,
                profile_changes=None, **scenario) -> Replayer:
    settings = {'cache_capacity': 2, 'interval': 2, 'gamma': 2, **scenario}
    return Replayer(header(names, **(header_changes or {})), drafts_of(names, kind),
                    Scenario(profile_of(**(profile_changes or {})), **settings), ranker)


def random_trace(seed: int, drafts: int = 3, tokens: int = 40, phases: int = 3):
    """In each phase another draft is the good one."""
    generator = np.random.default_rng(seed)
    good = np.repeat(generator.integers(drafts, size=phases), -(-tokens // phases))[:tokens]
    chances = np.where(good[None] == np.arange(drafts)[:, None], 0.9, 0.35)
    return trace_of(f'r{seed}', generator.random((drafts, tokens)) < chances, f'domain{seed % 2}')


class FixedRanker(Ranker):
    """Expects of every draft what it is told, whatever the text."""

    def __init__(self, expected: dict[str, float]):
        self._expected = expected

    def expected(self, context):
        return list(self._expected.items())
