# SPDX-License-Identifier: Apache-2.0
"""Pictures, where matplotlib is installed: the package does not depend on it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ..models.errors import InvalidRequestError, MemSpecError


def check_plotting() -> None:
    """Raise MemSpecError where pictures cannot be drawn."""
    if find_spec('matplotlib') is None:
        raise MemSpecError('--out draws pictures with matplotlib, which is not installed: pip '
                           "install matplotlib, or the package's extra 'plots'")


def new_axes(width: float, height: float):
    """Axes of a figure of that size, in inches."""
    check_plotting()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    figure = Figure(figsize=(width, height), layout='constrained')
    FigureCanvasAgg(figure)
    return figure.add_subplot()


def save(figure, path: Path) -> None:
    """Write a figure as a PNG; raises InvalidRequestError."""
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise InvalidRequestError(f'{path}: {error.strerror or error}') from error
