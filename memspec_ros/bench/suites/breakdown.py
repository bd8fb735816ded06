# SPDX-License-Identifier: Apache-2.0
"""Suite ``breakdown``: where the time goes (MemSpec, Figs. 4, 7, 9)."""

from __future__ import annotations

from ...decoding.stats import TIME_SHARES
from ..source import BOUND
from .base import Chart, percent, Result, Suite, Table
from .comparison import Bench
from .paper import FALLBACK, LIMITS, PREDICTION


def run(bench: Bench) -> Result:
    """Shares of the decoding time by policy, 1 together."""
    names = [name for name in bench.names() if name != BOUND]
    compared = bench.compare(names)
    shares = {name: compared.breakdown(name) for name in names}
    table = Table(
        'shares of the time', [*TIME_SHARES, 'paper: fallback', 'prediction'],
        [[name, *(percent(shares[name][share]) for share in TIME_SHARES),
          _limit(name, FALLBACK), _limit(name, PREDICTION)] for name in names],
        f'desired: the draft in use is the one that was wanted; {bench.note()}')
    chart = Chart('breakdown', 'Where the time goes (Figs. 4, 7, 9)', 'stack',
                  'share of the time', names,
                  {share: [shares[name][share] for name in names] for share in TIME_SHARES})
    data = {**bench.about(), 'breakdown': shares,
            'paper': {'fallback': FALLBACK, 'prediction': PREDICTION, 'at_most': list(LIMITS)}}
    return Result(data, [table], [chart])


def _limit(name: str, values: dict[str, float]) -> str:
    if name not in values:
        return ''
    return ('< ' if name in LIMITS else '') + percent(values[name])


SUITE = Suite('breakdown', 'Figs. 4, 7, 9', run)
