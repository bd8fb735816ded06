# SPDX-License-Identifier: Apache-2.0
"""What a suite gives: data, tables and charts. How they look is decided elsewhere, once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TYPE_CHECKING

from ...models.errors import InvalidRequestError

if TYPE_CHECKING:
    from .comparison import Bench


@dataclass(frozen=True)
class Table:
    """Rows of text, each beginning with its name; ``columns`` are the other cells' titles."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ''

    def text(self) -> str:
        """For a terminal."""
        cells = [['', *self.columns], *self.rows]
        widths = [max(len(row[place]) for row in cells) for place in range(len(cells[0]))]
        lines = [row[0].ljust(widths[0]) + ''.join(
            f'  {cell:>{width}}' for cell, width in zip(row[1:], widths[1:])) for row in cells]
        return '\n'.join(line.rstrip() for line in [self.title, *lines, *self._notes()])

    def markdown(self) -> str:
        """For a report."""
        lines = [f'**{self.title}**', '', _pipes(['', *self.columns]),
                 _pipes(['---', *['---:'] * len(self.columns)]), *map(_pipes, self.rows)]
        return '\n'.join([*lines, *(f'\n{note}' for note in self._notes())])

    def _notes(self) -> list[str]:
        return [self.note] if self.note else []


def _pipes(cells: Sequence[str]) -> str:
    return '| ' + ' | '.join(cell.replace('|', '\\|') for cell in cells) + ' |'


@dataclass(frozen=True)
class Chart:
    """
    A picture. kind: 'bars', 'stack' (shares of one bar) or 'lines' (over numbers).

    places: along x. series: name -> a value for each place, None where there is
    none. paper: the same of the paper. stem: of the file's name.
    """

    stem: str
    title: str
    kind: str
    y: str
    places: Sequence[Any]
    series: Mapping[str, Sequence[float | None]]
    paper: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    x: str = ''


@dataclass(frozen=True)
class Result:
    """What a suite found; ``data`` is plain data for JSON."""

    data: dict[str, Any]
    tables: Sequence[Table]
    charts: Sequence[Chart] = ()

    def text(self) -> str:
        """All tables, for a terminal."""
        return '\n\n'.join(table.text() for table in self.tables)


@dataclass(frozen=True)
class Suite:
    """
    figures: of the paper, which it is held against. measure: does it. lacks: what
    it needs and these prompts or this mode do not give, '' if nothing.
    """

    name: str
    figures: str
    measure: Callable[[Bench], Result]
    lacks: Callable[[Bench], str] = lambda bench: ''

    def run(self, bench: Bench) -> Result:
        """What it finds; raises MemSpecError."""
        if reason := self.lacks(bench):
            raise InvalidRequestError(f'{self.name}: {reason}')
        return self.measure(bench)


def number(value: float | None, digits: int = 3) -> str:
    """A cell."""
    return '-' if value is None else f'{value:.{digits}f}'


def percent(value: float | None, signed: bool = False) -> str:
    """A cell; ``value`` is a share of 1."""
    if value is None:
        return '-'
    return f'{100 * value:{"+" if signed else ""}.1f} %'
