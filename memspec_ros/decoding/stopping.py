# SPDX-License-Identifier: Apache-2.0
"""Where an answer ends: stop strings, whatever tokens and blocks they span."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """
    Scans text as it comes, and holds back what may be the start of a stop string.

    The text let through ends right before the first stop string to be complete
    (of two that end together, the longer), however the text was split; the stop
    string itself is not part of the answer.
    """

    def __init__(self, stops: Sequence[str]):
        if any(not stop for stop in stops):
            raise ValueError('a stop string is empty')
        self._stops = tuple(stops)
        self._held = ''
        self.hit: str | None = None

    def add(self, text: str) -> str:
        """Text that is certain to be part of the answer; sets ``hit`` at a stop string."""
        if self.hit is not None:
            return ''
        self._held += text
        found = [(self._held.index(stop) + len(stop), -len(stop), stop)
                 for stop in self._stops if stop in self._held]
        if found:
            end, _, self.hit = min(found)
            certain, self._held = self._held[:end - len(self.hit)], ''
            return certain
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        certain = self._held[:len(self._held) - keep]
        self._held = self._held[len(self._held) - keep:]
        return certain

    def flush(self) -> str:
        """What was held back in vain, when the answer ends otherwise."""
        held, self._held = self._held, ''
        return '' if self.hit is not None else held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of ``stop`` that ``text`` ends with."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
