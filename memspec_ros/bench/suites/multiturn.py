# SPDX-License-Identifier: Apache-2.0
"""Suite ``multiturn``: conversations, in which the domain changes while drafts stay in memory."""

from __future__ import annotations

from ..source import BASELINE
from .base import Chart, number, Result, Suite, Table
from .comparison import Bench
from .sums import GMEAN

POLICIES = ('oracle_static', 'ucb_async', 'prediction_only', 'hedge', 'memspec',
            'oracle_dynamic')
_CHANGES = {'first_load_counts': True}


def run(bench: Bench) -> Result:
    """
    Throughput by turn over that of the baseline.

    Nothing is in memory when a conversation begins; then drafts stay from turn
    to turn, and decoding goes on while others load. The baselines that never
    change are general_static and every other draft, the best of them for all
    conversations (best_static) and the best of each (oracle_static).
    """
    bench = bench.of(bench.conversations)
    names, drafts = bench.names(POLICIES), [spec.id for spec in bench.source.drafts]
    compared = bench.compare(names, drafts, **_CHANGES)
    rates = {name: compared.relative(name) for name in (*names, *drafts)}
    best = max(drafts, key=lambda draft: rates[draft][GMEAN] or 0.0)
    places = [*bench.source.prompts, GMEAN]
    shown = {**{name: rates[name] for name in names}, f'best static ({best})': rates[best]}
    table = Table(f'tokens/s over those of {BASELINE}', places,
                  [[name, *(number(found[place]) for place in places)]
                   for name, found in shown.items()],
                  f'{max(bench.source.prompts.values())} conversations; the paper has none; '
                  f'{bench.note()}')
    chart = Chart('multiturn', 'Conversations', 'bars', f'tokens/s, over {BASELINE}', places,
                  {name: [found[place] for place in places] for name, found in shown.items()})
    about = bench.about()
    data = {**about, 'scenario': {**about['scenario'], **_CHANGES},
            'normalised': {name: rates[name] for name in names},
            'drafts_alone': {draft: rates[draft] for draft in drafts}, 'best_static': best,
            'breakdown': {name: compared.breakdown(name) for name in names}}
    return Result(data, [table], [chart])


def lacks(bench: Bench) -> str:
    if bench.conversations is not None:
        return ''
    return ('there are no conversations: they are made of --prompts of at least two domains, or '
            'are those of "turns" there')


SUITE = Suite('multiturn', 'beyond the paper', run, lacks)
