# SPDX-License-Identifier: Apache-2.0
"""
Giving memory back while others are short of it, and taking it again afterwards.

One step a check, in this order: what idle conversations have read, drafts that
do not draft now, the length of drafts, new requests. The request that runs goes
on to its end. When memory has been there for a while, the steps are undone one
by one, the last one first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from ..memory.allocator import MIB
from ..memory.pressure import PressureReading

if TYPE_CHECKING:
    from .controller import Controller

NO_LIMIT = 1 << 30
# Calm is more than the absence of pressure: this much above the least free memory, and a share
# of waiting below half of what is pressure.
_CALM_FREE, _CALM_STALL = 1.25, 0.5
# What had to be given up again at once is given back after twice the time, at most so many times.
_MOST_PATIENCE = 16.0


class Level(IntEnum):
    """How far memory was given up: each level includes those below."""

    NORMAL = 0
    SESSIONS = 1
    DRAFTS = 2
    GAMMA = 3
    REQUESTS = 4


@dataclass(frozen=True)
class Limits:
    """
    What decoding may use at present.

    sessions: keep what idle conversations have read. drafts: most in memory.
    gamma: most tokens drafted in an iteration. requests: take new ones.
    """

    sessions: bool = True
    drafts: int = NO_LIMIT
    gamma: int = NO_LIMIT
    requests: bool = True


@dataclass(frozen=True)
class Thresholds:
    """
    What counts as pressure.

    min_free: bytes to be left available. stall_percent: share of the time in which
    programs wait for memory, 0 for never mind. recover_sec: how long it must be
    calm before a step is undone.
    """

    min_free: int
    stall_percent: float = 10.0
    recover_sec: float = 10.0


@dataclass(frozen=True)
class _Step:
    level: Level
    limit: int = 0
    freed: int = 0  # bytes; what taking it back needs
    nothing: bool = False  # there was nothing to give up: the next step follows at once


class MemoryGuard:
    """
    Decides what a controller gives up.

    ``check`` is called by one thread, any but the worker; it never waits. It
    clears idle conversations itself; the controller heeds the other ``limits`` at
    its next scheduling interval, or in ``Controller.settle`` where none runs.

    Parameters
    ----------
    controller: whose limits are set
    thresholds: read at every check
    clock: seconds, monotonic

    """

    def __init__(self, controller: Controller, thresholds: Callable[[], Thresholds],
                 clock: Callable[[], float]):
        self._controller = controller
        self._thresholds = thresholds
        self._clock = clock
        self._given: list[_Step] = []
        self._before: tuple[float, PressureReading] | None = None
        self._calm_since: float | None = None
        self._grown_at: float | None = None
        self._patience = 1.0
        self.reading = PressureReading()
        # Why memory is short, in one line; of the last time it was where it no longer is.
        self.reason = ''
        self.pressed = False

    @property
    def limits(self) -> Limits:
        """What is allowed at present."""
        return self._controller.limits

    @property
    def level(self) -> Level:
        """How far memory was given up."""
        return self._given[-1].level if self._given else Level.NORMAL

    @property
    def given_up(self) -> list[str]:
        """What was given up, in words."""
        limits = self.limits
        return [words for words, given in (
            ('idle conversations', not limits.sessions),
            (f'drafts beyond {limits.drafts}', limits.drafts < NO_LIMIT),
            (f'drafting beyond {limits.gamma}', limits.gamma < NO_LIMIT),
            ('new requests', not limits.requests)) if given]

    def check(self, reading: PressureReading) -> bool:
        """Give up a step, or take one back, as ``reading`` has it; True if anything changed."""
        now, thresholds = self._clock(), self._thresholds()
        shortage = self._shortage(reading, thresholds, now)
        self._before, self.reading = (now, reading), reading
        self.pressed = bool(shortage)
        if shortage:
            self.reason, self._calm_since = shortage, None
            if not self.limits.sessions:
                self._controller.sessions.clear()  # one may have been parked in that very moment
            return self._shrink(now, thresholds)
        if not self._is_calm(reading, thresholds):
            self._calm_since = None
            return False
        if self._calm_since is None:
            self._calm_since = now
        if now - self._calm_since < thresholds.recover_sec * self._patience:
            return False
        if not self._given:
            self._patience, self.reason = 1.0, ''
            return False
        self._calm_since = self._grown_at = now
        self._given.pop()
        self._apply()
        return True

    def _shortage(self, reading: PressureReading, thresholds: Thresholds, now: float) -> str:
        if reading.available < thresholds.min_free:
            return (f'{reading.available / MIB:.0f} MiB available ({reading.source}), '
                    f'memory.min_free_mib is {thresholds.min_free / MIB:.0f}')
        least, percent = thresholds.stall_percent, reading.stall_percent
        if not least or percent is None or percent < least:
            return ''
        if self._before is not None:
            at, before = self._before
            # The mean of 10 s stays up for a while after memory was given back.
            if (now > at and before.stalled_sec is not None
                    and 100 * (reading.stalled_sec - before.stalled_sec) / (now - at) < least):
                return ''
        return (f'programs waited for memory {percent:.0f} % of the time, '
                f'memory.stall_percent is {least:g}')

    def _is_calm(self, reading: PressureReading, thresholds: Thresholds) -> bool:
        """Whether there is room enough to take the last step back and not be short again."""
        needed = self._given[-1].freed if self._given else 0
        return (reading.available - needed >= thresholds.min_free * _CALM_FREE
                and (not thresholds.stall_percent or reading.stall_percent is None
                     or reading.stall_percent < thresholds.stall_percent * _CALM_STALL))

    def _shrink(self, now: float, thresholds: Thresholds) -> bool:
        grown, self._grown_at = self._grown_at, None
        if grown is not None and now - grown < thresholds.recover_sec * self._patience:
            self._patience = min(2 * self._patience, _MOST_PATIENCE)
        changed = False
        while (step := self._next()) is not None:
            self._given.append(step)
            self._apply()
            changed = True
            if not step.nothing:
                break
        return changed

    def _next(self) -> _Step | None:
        controller, limits = self._controller, self.limits
        if limits.sessions:
            size = controller.sessions.bytes
            return _Step(Level.SESSIONS, freed=size, nothing=not size)
        if limits.drafts > 1 and controller.capacity > 1:
            held = len(controller.residency.resident)
            largest = max((view.bytes for view in controller.residency.view()
                           if not view.slot_free), default=0)
            return _Step(Level.DRAFTS, max(1, min(held, controller.capacity) - 1),
                         largest if held > 1 else 0, nothing=held <= 1)
        gamma = min(limits.gamma, controller.engine.max_gamma)
        if gamma > 1:
            return _Step(Level.GAMMA, gamma // 2)
        return _Step(Level.REQUESTS) if limits.requests else None

    def _apply(self) -> None:
        def lowest(level: Level) -> int:
            return min((step.limit for step in self._given if step.level is level),
                       default=NO_LIMIT)

        levels = {step.level for step in self._given}
        self._controller.limits = Limits(
            Level.SESSIONS not in levels, lowest(Level.DRAFTS), lowest(Level.GAMMA),
            Level.REQUESTS not in levels)
        if Level.SESSIONS in levels:
            self._controller.sessions.clear()
