# SPDX-License-Identifier: Apache-2.0
"""What ``frontier`` measured, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..models.drafts import KINDS
from .floor import format_glance
from .plotting import new_axes, save

PICTURE_NAME = 'frontier.png'
_MARKERS = 'os^Dv'


def format_table(result: dict) -> str:
    """The result as text, drafts by memory."""
    points = sorted(result['points'], key=lambda point: (point['extra_bytes'], point['draft']))
    width = max(5, *(len(point['draft']) for point in points))
    lines = [f'{"draft":{width}} {"kind":13} {"memory":>8} {"speed-up":>9} {"tokens/it.":>11} '
             f'{"step/step":>10}']
    for point in points:
        lines.append(f'{point["draft"]:{width}} {point["kind"]:13} '
                     f'{point["extra_percent"]:7.2f}% {point["speedup"]:9.2f} '
                     f'{point["tokens_per_iteration"]:11.2f} '
                     f'{point["draft_step_over_target_step"]:9.1%}')
    for name, head in result['shared_heads'].items():
        lines.append(f'shared head of {name}: {head["percent"]:.2f}%, once for all its drafts')
    target = result['target']
    lines.append(f'memory: % of the target\'s {target["bytes"] / 1e6:.1f} MB; speed-up over '
                 f'{target["plain_tps"]:.1f} tokens/s, prefill included; step/step: one draft '
                 f'step against one target step of {1e3 * target["step_sec"]:.1f} ms')
    lines.append(format_glance(result['floor']))
    return '\n'.join(lines)


def draw(result: dict, path: Path) -> None:
    """
    Draw speed-up against memory as a PNG, the best drafts of each kind joined.

    A thin line to the right of a point is the head that it shares with others.
    """
    axes = new_axes(7.2, 4.6)
    kinds = sorted({point['kind'] for point in result['points']})
    for kind in kinds:
        # The same look in every picture, whichever kinds are in it.
        place = sorted(KINDS).index(kind)
        marker, colour = _MARKERS[place % len(_MARKERS)], f'C{place}'
        points = [point for point in result['points'] if point['kind'] == kind]
        x, y = ([point[key] for point in points] for key in ('extra_percent', 'speedup'))
        axes.plot(x, y, marker, color=colour, label=kind)
        best = frontier(list(zip(x, y)))
        axes.plot(*zip(*best), '-', color=colour, alpha=0.5)
        axes.hlines(y, x, [a + point['shared_head_percent'] for a, point in zip(x, points)],
                    color=colour, linewidth=0.6, alpha=0.6)
        for point in points:
            axes.annotate(point['draft'], (point['extra_percent'], point['speedup']),
                          textcoords='offset points', xytext=(4, 4), fontsize=7)
    axes.axhline(1.0, color='0.6', linestyle='--', linewidth=0.8)
    # From zero, with room for the marker of a draft that takes nothing.
    axes.set_xlim(left=-0.02 * axes.get_xlim()[1])
    axes.set_xlabel("Additional memory (% of the target's weights)")
    axes.set_ylabel('Speed-up over plain decoding (×)')
    axes.set_title(result['target']['name'], fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, loc='upper center', bbox_to_anchor=(0.5, -0.13), ncol=len(kinds))
    save(axes.figure, path)


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those (memory, speed-up) that no other point beats with as little memory, by memory."""
    best: list[tuple[float, float]] = []
    for memory, speedup in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or speedup > best[-1][1]:
            best.append((memory, speedup))
    return best
