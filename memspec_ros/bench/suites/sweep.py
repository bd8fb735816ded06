# SPDX-License-Identifier: Apache-2.0
"""One field of the scenario swept: what the suites over N, length and K have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..source import BASELINE
from .base import Chart, number, Result, Table
from .comparison import Bench
from .sums import GMEAN

POLICIES = ('oracle_static', 'ucb_async', 'memspec', 'oracle_dynamic')


def sweep(bench: Bench, field: str, letter: str, values: Sequence[int], stem: str, title: str,
          paper: Mapping[str, Mapping[int, float]], shape: str = '') -> Result:
    """
    Throughput over the baseline's at the same value, geometric means over domains.

    field: of the scenario; ``letter`` is what people call it. paper: policy ->
    value -> what the paper has; shape: what it says in words.
    """
    names = bench.names(POLICIES)
    rates = {value: {} for value in values}
    for value in values:
        compared = bench.compare(names, **{field: value})
        rates[value] = {name: compared.relative(name) for name in names}
    rows = []
    for name in names[1:]:
        rows.append([name, *(number(rates[value][name][GMEAN]) for value in values)])
        if name in paper:
            rows.append([f'  paper: {name}',
                         *(number(paper[name].get(value)) for value in values)])
    note = f'paper: {shape}; {bench.note()}' if shape else bench.note()
    table = Table(f'tokens/s over those of {BASELINE}, by {title}',
                  [f'{letter} = {value}' for value in values], rows, note)
    chart = Chart(
        stem, f'Throughput by {title}', 'lines', f'tokens/s, over {BASELINE}', list(values),
        {name: [rates[value][name][GMEAN] for value in values] for name in names[1:]},
        {name: [paper[name].get(value) for value in values] for name in names if name in paper},
        x=letter)
    data = {
        **bench.about(), 'swept': field, 'values': list(values),
        'normalised': {name: {str(value): rates[value][name] for value in values}
                       for name in names},
        'best': {name: max(values, key=lambda value, name=name: rates[value][name][GMEAN] or 0.0)
                 for name in names[1:]},
        'paper': {name: {str(value): found for value, found in curve.items()}
                  for name, curve in paper.items()} or shape}
    return Result(data, [table], [chart])
