# SPDX-License-Identifier: Apache-2.0
"""Suite ``latency``: from the prompt to the last token (MemSpec, section 4.6)."""

from __future__ import annotations

from ..source import BASELINE
from .base import Chart, number, percent, Result, Suite, Table
from .comparison import Bench
from .paper import LATENCY
from .sums import GMEAN, Sums

POLICIES = ('oracle_static', 'ucb_sync', 'ucb_async', 'prediction_only', 'memspec',
            'oracle_dynamic')
# As in the paper, decoding begins when the first draft is there; or meanwhile, as in the node.
BEGINNINGS = {'waits for the first load, as in the paper': False,
              'begins while it loads, as the node does': True}


def run(bench: Bench) -> Result:
    """Latency with prefill and first loads over the baseline's, seconds pooled by domain."""
    names, places = bench.names(POLICIES), [*bench.source.prompts, GMEAN]
    tables, data, bars = [], {}, {}
    for title, counts in BEGINNINGS.items():
        compared = bench.compare(names, first_load_counts=counts)
        rates = {name: compared.relative(name, Sums.latency) for name in names}
        first = {name: compared.average(name, _first_token) for name in names}
        key = 'node' if counts else 'paper_setting'
        data[key] = {'latency': rates, 'first_token_sec': first,
                     'latency_sec': {name: compared.mean(name, Sums.latency) for name in names},
                     'memspec': _reduction(rates)}
        bars[title] = [rates[name][GMEAN] for name in names]
        tables.append(Table(
            f'latency over that of {BASELINE}; decoding {title}',
            [*places, 'first token, s', 'paper'],
            [[name, *(number(rates[name][place]) for place in places), number(first[name]),
              _paper(name)] for name in names]))
        tables.append(Table('memspec', ['here', 'paper'], [
            [f'over {name}', percent(value, signed=True), percent(LATENCY[name] - 1, signed=True)]
            for name, value in data[key]['memspec'].items()], bench.note()))
    chart = Chart('latency', 'End-to-end latency (section 4.6)', 'bars',
                  f'seconds, over {BASELINE}', names, bars)
    return Result({**bench.about(), **data, 'paper': LATENCY}, tables, [chart])


def _first_token(sums: Sums) -> float:
    """Mean seconds to the first token, over prompts."""
    seconds = [value for values in sums.first_token.values() for value in values]
    return sum(seconds) / len(seconds)


def _paper(name: str) -> str:
    """What the paper's two figures for memspec say of others."""
    if name == BASELINE:
        return number(1.0)
    if name == 'memspec':
        return number(LATENCY[BASELINE])
    return number(LATENCY[BASELINE] / LATENCY[name]) if name in LATENCY else ''


def _reduction(rates: dict[str, dict[str, float | None]]) -> dict[str, float | None]:
    """Change of memspec's latency against each of those that the paper has."""
    own = rates.get('memspec', {}).get(GMEAN)
    return {name: own / rates[name][GMEAN] - 1 for name in LATENCY
            if own and name in rates and rates[name][GMEAN]}


SUITE = Suite('latency', 'section 4.6', run)
