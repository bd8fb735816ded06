# SPDX-License-Identifier: Apache-2.0
"""Agreement against training tokens, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def draw_curve(domain: str, points: Sequence[tuple[int, Sequence[Mapping[str, float]]]],
               path: Path) -> None:
    """
    Draw a PNG of what DistillJob.curve returned, a line a held-out domain; needs matplotlib.

    The draft's own domain is drawn thick. The axis of tokens is logarithmic.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    figure = Figure(figsize=(6.4, 4.2), layout='constrained')
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    tokens = [count for count, _ in points]
    for name in points[-1][1][0]:
        axes.plot(tokens, [scores[0][name] for _, scores in points], 'o-', label=name,
                  linewidth=2.4 if name == domain else 0.9,
                  markersize=5 if name == domain else 3)
    axes.set_xscale('log', base=2)
    axes.set_xticks(tokens, [f'{count / 1000:.0f}k' for count in tokens])
    axes.minorticks_off()
    axes.set_xlabel(f"Tokens of the target's {domain} outputs trained on")
    axes.set_ylabel('Agreement with the target, held out')
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
