# SPDX-License-Identifier: Apache-2.0
"""Suite ``switch-cost``: a load against an iteration (MemSpec, Fig. 2)."""

from __future__ import annotations

from dataclasses import asdict

from .base import Chart, number, Result, Suite, Table
from .comparison import Bench
from .paper import LOAD_RATIO


def run(bench: Bench) -> Result:
    """Loads in iterations of the draft: from the machine's storage, and as they are set here."""
    costs = bench.source.switch_costs()
    rows = [[cost.draft, number(cost.iteration_ms, 1), number(cost.load_ms, 1),
             number(cost.load_ms / cost.iteration_ms, 2), number(cost.set_load_ms, 1),
             number(cost.set_load_ms / cost.iteration_ms, 2), number(LOAD_RATIO, 2)]
            for cost in costs]
    table = Table('a load against an iteration, in milliseconds',
                  ['iteration', 'load', 'load/it.', 'load here', 'here/it.', 'paper'], rows,
                  "load: from the machine's storage; load here: as the other suites have it")
    chart = Chart(
        'switch_cost', 'A load against an iteration (Fig. 2)', 'bars', 'iterations',
        [cost.draft for cost in costs],
        {'storage': [cost.load_ms / cost.iteration_ms for cost in costs],
         'as set': [cost.set_load_ms / cost.iteration_ms for cost in costs]},
        {'storage': [LOAD_RATIO] * len(costs)})
    data = {**bench.about(), 'paper': {'load_over_iteration': LOAD_RATIO},
            'drafts_ms': {cost.draft: asdict(cost) for cost in costs}}
    return Result(data, [table], [chart] if costs else [])


SUITE = Suite('switch-cost', 'Fig. 2', run)
