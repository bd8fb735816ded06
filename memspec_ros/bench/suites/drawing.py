# SPDX-License-Identifier: Apache-2.0
"""Charts as PNGs, all in one look."""

from __future__ import annotations

from pathlib import Path

from ..plotting import new_axes, save
from ..source import policy_names
from .base import Chart

_GROUP = 0.84


def draw(chart: Chart, directory: Path) -> Path:
    """Draw ``chart`` into ``directory``; its path. Raises MemSpecError."""
    axes = new_axes(max(6.4, 1.2 + 0.9 * len(chart.places)), 4.4)
    {'bars': _bars, 'stack': _stack, 'lines': _lines}[chart.kind](axes, chart)
    axes.set_title(chart.title, fontsize=10)
    axes.set_xlabel(chart.x)
    axes.set_ylabel(chart.y)
    axes.grid(alpha=0.25, axis='y')
    axes.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    axes.figure.legend(handles, labels, fontsize=8, ncol=min(4, len(labels)),
                       loc='outside lower center')
    path = directory / f'{chart.stem}.png'
    save(axes.figure, path)
    return path


def _colour(name: str, place: int) -> str:
    """The same for a policy in every picture."""
    known = policy_names()
    return f'C{known.index(name) if name in known else place}'


def _values(values) -> list[float]:
    return [float('nan') if value is None else value for value in values]


def _bars(axes, chart: Chart) -> None:
    width = _GROUP / len(chart.series)
    shown = False
    for place, (name, values) in enumerate(chart.series.items()):
        x = [group + (place + 0.5) * width - _GROUP / 2 for group in range(len(chart.places))]
        axes.bar(x, _values(values), width, label=name, color=_colour(name, place))
        if name in chart.paper:
            axes.plot(x, _values(chart.paper[name]), 'D', color='black', markerfacecolor='none',
                      markersize=5, label='' if shown else 'paper')
            shown = True
    if ', over ' in chart.y:
        axes.axhline(1.0, color='0.6', linestyle='--', linewidth=0.8)
    _ticks(axes, chart)


def _stack(axes, chart: Chart) -> None:
    below = [0.0] * len(chart.places)
    for place, (name, values) in enumerate(chart.series.items()):
        axes.bar(range(len(below)), values, _GROUP, bottom=below, label=name, color=f'C{place}')
        below = [low + value for low, value in zip(below, values)]
    _ticks(axes, chart)


def _lines(axes, chart: Chart) -> None:
    for place, (name, values) in enumerate(chart.series.items()):
        colour = _colour(name, place)
        axes.plot(range(len(chart.places)), _values(values), 'o-', label=name, color=colour)
        if name in chart.paper:
            axes.plot(range(len(chart.places)), _values(chart.paper[name]), 'D', color=colour,
                      markerfacecolor='none', label=f'paper: {name}')
    axes.set_xticks(range(len(chart.places)), [str(value) for value in chart.places])


def _ticks(axes, chart: Chart) -> None:
    names = [str(place) for place in chart.places]
    slanted = sum(map(len, names)) > 60
    axes.set_xticks(range(len(names)), names, fontsize=8, rotation=25 if slanted else 0,
                    ha='right' if slanted else 'center')
