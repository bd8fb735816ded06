# SPDX-License-Identifier: Apache-2.0
"""What ``gamma`` measured, as a table and as a picture."""

from __future__ import annotations

from pathlib import Path

from .plotting import check_plotting, save

PICTURE_NAME = 'gamma.png'


def format_table(result: dict) -> str:
    """Speed-up (acceptance) by gamma; what a draft and verify cost; why a pair loses."""
    sweeps = result['configurations']
    width = max(len(_label(sweep)) for sweep in sweeps)
    gammas = [point['gamma'] for point in sweeps[0]['points']]
    lines = [f'{"gamma":{width}}' + ''.join(f'{gamma:>12}' for gamma in gammas)]
    for sweep in sweeps:
        lines.append(f'{_label(sweep):{width}}' + ''.join(
            f'{point["speedup"]:6.2f} ({_short(point["acceptance"])})'
            for point in sweep['points']))
    lines.append('speed-up over plain decoding, prefill left out (accepted of drafted tokens)')
    for sweep in sweeps:
        rows, last = len(sweep['verify_cost']), sweep['verify_cost'][-1]
        lines.append(
            f'{_label(sweep)}: c = {sweep["draft_cost"]:.3f}, '
            f'verify({rows})/verify(1) = {last:.2f}, '
            + ('rows in parallel' if sweep['batch_parallel'] else 'rows one after another')
            + f'; best {sweep["best_speedup"]:.2f} at gamma {sweep["best_gamma"]}')
        if sweep['decelerates']:
            lines.append(f'  decelerates ({sweep["cause"]}): {sweep["reason"]}')
    return '\n'.join(lines)


def _label(sweep: dict) -> str:
    weights = '' if sweep['weights'] == sweep['dtype'] else f', {sweep["weights"]}'
    return f'{sweep["name"]}, {sweep["dtype"]}{weights}'


def _short(acceptance: float | None) -> str:
    return ' - ' if acceptance is None else f'{acceptance:.2f}'.removeprefix('0').rjust(3)


def draw(result: dict, path: Path) -> None:
    """Speed-up, acceptance and the cost of verified rows beside each other, as a PNG."""
    check_plotting()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    figure = Figure(figsize=(10.8, 4.2), layout='constrained')
    FigureCanvasAgg(figure)
    speed, acceptance, verify = figure.subplots(1, 3)
    for sweep in result['configurations']:
        gammas = [point['gamma'] for point in sweep['points']]
        line, = speed.plot(gammas, [point['speedup'] for point in sweep['points']], 'o-',
                           markersize=4, label=_label(sweep))
        acceptance.plot(gammas, [float('nan') if point['acceptance'] is None
                                 else point['acceptance'] for point in sweep['points']],
                        'o-', markersize=4, color=line.get_color())
        rows = range(1, len(sweep['verify_cost']) + 1)
        verify.plot(rows, sweep['verify_cost'], 'o-', markersize=4, color=line.get_color())
    speed.axhline(1.0, color='0.6', linestyle='--', linewidth=0.8)
    verify.plot(rows, rows, color='0.6', linestyle='--', linewidth=0.8)
    verify.annotate('one after another', (rows[-1], rows[-1]), textcoords='offset points',
                    xytext=(-4, -2), ha='right', va='top', fontsize=7, color='0.4')
    for axes, name, below in ((speed, 'Speed-up over plain decoding (×)', 'Drafted tokens'),
                              (acceptance, 'Accepted per drafted token', 'Drafted tokens'),
                              (verify, 'verify(n) / verify(1)', 'Rows n')):
        axes.set_ylabel(name)
        axes.set_xlabel(below)
        axes.grid(alpha=0.25)
    acceptance.set_ylim(0, 1)
    figure.legend(fontsize=8, loc='outside lower center', ncol=3)
    save(figure, path)
