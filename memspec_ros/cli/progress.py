# SPDX-License-Identifier: Apache-2.0
"""How far a long command has come."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class ProgressBar:
    """
    A progress bar; a line now and then where the output is not a terminal.

    Gives a function of (done, in all, note).
    """

    _PERIOD_SEC = 20.0

    def __init__(self, title: str, total: int, done: int = 0):
        self._title, self._told = title, time.monotonic()
        self._progress = None
        console = Console()
        if console.is_terminal:
            self._progress = Progress(
                TextColumn('{task.description}'), BarColumn(), MofNCompleteColumn(),
                TimeRemainingColumn(), TextColumn('{task.fields[note]}'), console=console)
            self._task = self._progress.add_task(title, total=total, completed=done, note='')
        else:
            print(f'{title}: {total} to do', flush=True)

    def __enter__(self):
        if self._progress is not None:
            self._progress.start()
        return self._advance

    def __exit__(self, *exc) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _advance(self, done: int, total: int, note: str = '') -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=done, total=total, note=note)
        elif done == total or time.monotonic() - self._told > self._PERIOD_SEC:
            self._told = time.monotonic()
            print(f'  {self._title}: {done} of {total}' + (f', {note}' if note else ''),
                  flush=True)
