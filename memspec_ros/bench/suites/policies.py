# SPDX-License-Identifier: Apache-2.0
"""
Suite ``policies``: what every way to schedule drafts is worth (MemSpec, Figs. 6, 8).

Throughput over that of one general draft for everything. Cache, policy and
context are as new for every prompt, and the prefill is left out, as in the paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import statistics
from typing import Any

from ...decoding.stats import TIME_SHARES
from ..source import BASELINE, BLIND, BOUND, PLAIN, variants
from .base import Chart, number, percent, Result, Suite, Table
from .comparison import Bench
from .paper import FALLBACK, OF_ORACLE_DYNAMIC, PREDICTION, THROUGHPUT
from .sums import geometric_mean, GMEAN, Sums

# How far throughput of a replay may be from the real one.
MARGIN = 0.1


def run(bench: Bench) -> Result:
    """
    Compare all policies.

    Tokens and seconds of a domain are pooled over its prompts; ``gmean`` is over
    domains. See docs/benchmarks.md for the data.
    """
    names = bench.names()
    run_names = [name for name in names if name != BOUND]
    beside = [PLAIN, BLIND] if bench.source.deterministic else [PLAIN]
    compared = bench.compare(names, beside=beside)
    normalised = {name: compared.relative(name) for name in names}
    aside = {name: compared.relative(name) for name in beside}
    breakdown = {name: compared.breakdown(name) for name in run_names}
    data = {
        'normalised': normalised,
        'acceptance': {name: compared.mean(name, Sums.acceptance) for name in run_names},
        'breakdown': breakdown,
        'shares': shares(normalised, breakdown, aside.get(BLIND, {}).get(GMEAN)),
        'spread': {name: compared.spread(name) for name in names},
        'paper': THROUGHPUT,
        'tokens_per_sec': {name: compared.mean(name, Sums.throughput) for name in names},
        # Without any draft: where it is faster, a fixed draft length is what loses. And with all
        # knowledge but that of the coming interval.
        **aside,
        'tokens_per_iteration': {name: compared.average(name, Sums.tokens_per_iteration)
                                 for name in run_names},
        'loads': {name: compared.average(name, lambda sums: sums.loads) for name in run_names},
        'switches': {name: compared.average(name, lambda sums: sums.switches)
                     for name in run_names},
        'prompt_tokens_per_sec': {name: _by_prompt(compared.runs(name)) for name in names},
        'best_variant': compared.best,
        'variants': {name: {way: compared.relative(name, way=way)[GMEAN]
                            for way in compared.ways[name]} for name in compared.best},
        **bench.about()}
    tables = [_throughput(bench, data), _time(data), _shares(data['shares'])]
    ratios = {name: [sums.replay_over_real for sums in compared.runs(name)]
              for name in run_names}
    if any(ratios[BASELINE]):
        data['replay_over_real'] = replay_over_real(ratios)
        data['outputs_differing_from_trace'] = {
            name: sum(sums.differing for sums in compared.runs(name)) for name in run_names}
        tables.append(_agreement(data['replay_over_real']))
    return Result(data, tables, [_chart(bench, data)])


def replay_over_real(ratios: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """
    Throughput of replays over that of real runs, by policy.

    ``ratios``: by policy, of each run by prompt. Of a prompt the median of its
    runs counts, of prompts the geometric mean. ``within``: whether the geometric
    mean over policies is at most MARGIN from 1.
    """
    by_policy = {name: geometric_mean(statistics.median(run[key] for run in runs)
                                      for key in runs[0]) for name, runs in ratios.items()}
    mean = geometric_mean(by_policy.values())
    return {'by_policy': by_policy, 'gmean': mean, 'margin': MARGIN,
            'within': abs(mean - 1.0) <= MARGIN}


def _by_prompt(runs: Sequence[Sums]) -> dict[str, float | None]:
    return {key: geometric_mean(sums.by_prompt[key] for sums in runs)
            for key in runs[0].by_prompt}


def shares(normalised: dict[str, dict[str, Any]], breakdown: dict[str, dict[str, float]],
           blind: float | None = None) -> dict[str, float | None]:
    """
    What memspec makes of the room that the drafts leave, and what it pays.

    blind: what is had of it without foresight (oracles.BlindOraclePolicy).
    None where it cannot be said: a policy was not run, or there is no room.
    """
    gain = {name: rates[GMEAN] for name, rates in normalised.items()}
    memspec, best, bandit = map(gain.get, ('memspec', 'oracle_dynamic', 'ucb_async'))
    time = breakdown.get('memspec', {})
    return {
        'room_over_general_static': _share_of_room(memspec, best, gain[BASELINE]),
        'room_over_ucb_async': _share_of_room(memspec, best, bandit),
        'of_oracle_dynamic': memspec / best if memspec and best else None,
        'fallback': time.get('fallback'), 'prediction': time.get('prediction'),
        'over_general_static': memspec - 1 if memspec else None,
        'over_ucb_async': memspec / bandit - 1 if memspec and bandit else None,
        'blind_room_over_general_static': _share_of_room(blind, best, gain[BASELINE]),
        'blind_of_oracle_dynamic': blind / best if blind and best else None}


def _share_of_room(value: float | None, most: float | None, least: float | None) -> float | None:
    if not value or not most or not least or most - least < 1e-9:
        return None
    return (value - least) / (most - least)


def _throughput(bench: Bench, data: dict[str, Any]) -> Table:
    places = [*data['prompts'], GMEAN]
    several = data['runs'] > 1
    rows = []
    aside = [(title, data[key]) for title, key in (('(no draft)', PLAIN), ('(blind)', BLIND))
             if key in data]
    for name, rates in (*data['normalised'].items(), *aside):
        low, high = data['spread'].get(name, (None, None))
        rows.append([name, *(number(rates[place]) for place in places),
                     *([f'{number(low)} to {number(high)}' if low else ''] if several else []),
                     number(THROUGHPUT[name]) if name in THROUGHPUT else ''])
    notes = [f'{name}: {way}, the best of {_tried(name, data["variants"][name])}'
             for name, way in data['best_variant'].items()]
    return Table(f'tokens/s over those of {BASELINE}',
                 [*places, *(['spread'] if several else []), 'paper'], rows,
                 '; '.join([*notes, bench.note()]))


def _tried(name: str, ways: Mapping[str, float]) -> str:
    return str(len(ways)) if len(ways) > 1 else f'{len(variants(name))} in a replay'


def _agreement(found: dict[str, Any]) -> Table:
    word = 'agree' if found['within'] else 'DO NOT AGREE'
    return Table('tokens/s of replays by the measured profile over those of these runs', ['here'],
                 [[name, number(ratio)] for name, ratio in (*found['by_policy'].items(),
                                                            (GMEAN, found['gmean']))],
                 f'they {word} to {percent(found["margin"])}')


def _time(data: dict[str, Any]) -> Table:
    return Table(
        'accepted per drafted token, then shares of the time',
        ['accepted', *TIME_SHARES, 'loads'],
        [[name, number(data['acceptance'][name][GMEAN]),
          *(percent(time[share]) for share in TIME_SHARES), number(data['loads'][name], 1)]
         for name, time in data['breakdown'].items()])


def _shares(found: dict[str, float | None]) -> Table:
    low, high = OF_ORACLE_DYNAMIC
    static, dynamic = THROUGHPUT['general_static'], THROUGHPUT['oracle_dynamic']
    # Read off 95 to 97 % of oracle_dynamic: its +58.8 % would be above oracle_dynamic.
    room = [percent((share * dynamic - static) / (dynamic - static)) for share in (low, high)]
    paper = {
        'room_over_general_static': f'{room[0]} to {room[1]}',
        'of_oracle_dynamic': f'{percent(low)} to {percent(high)}',
        'fallback': f'< {percent(FALLBACK["memspec"])}',
        'prediction': f'< {percent(PREDICTION["memspec"])}',
        'over_general_static': '+47 %, +58.8 %', 'over_ucb_async': '+30 %, +40.7 %'}
    titles = {
        'room_over_general_static': '(memspec - general) / (oracle_dynamic - general)',
        'room_over_ucb_async': '(memspec - ucb_async) / (oracle_dynamic - ucb_async)',
        'of_oracle_dynamic': 'memspec / oracle_dynamic', 'fallback': 'fallback, of the time',
        'prediction': 'prediction, of the time', 'over_general_static': 'memspec over general',
        'over_ucb_async': 'memspec over ucb_async',
        'blind_room_over_general_static': '(blind - general) / (oracle_dynamic - general)',
        'blind_of_oracle_dynamic': 'blind / oracle_dynamic'}
    return Table('memspec', ['here', 'paper'],
                 [[titles[key], percent(value, signed=key.startswith('over')),
                   paper.get(key, '')] for key, value in found.items()])


def _chart(bench: Bench, data: dict[str, Any]) -> Chart:
    places = [*data['prompts'], GMEAN]
    return Chart(
        'policies', 'Throughput (Figs. 6, 8)', 'bars', f'tokens/s, over {BASELINE}', places,
        {name: [rates[place] for place in places] for name, rates in data['normalised'].items()},
        {name: [None] * (len(places) - 1) + [THROUGHPUT[name]]
         for name in data['normalised'] if name in THROUGHPUT})


SUITE = Suite('policies', 'Figs. 6, 8', run)
