# SPDX-License-Identifier: Apache-2.0
"""What every draft would emit at every position of a trace, and what that would cost."""

from __future__ import annotations

import numpy as np

from ..models.bundle import DraftSpec
from ..models.drafts import KINDS
from ..models.state import DecodeState
from ..training.trace_store import Trace
from .replay import World

# Plain decoding, beside the drafts.
PLAIN = ''


class TraceCosts:
    """
    Iterations at the full draft length, by draft and position; milliseconds.

    Catch-up is not in them.

    Attributes
    ----------
    length: tokens of the answer
    accepted: draft -> tokens accepted [length], no more than are left

    """

    def __init__(self, world: World):
        self._profile, self._gamma = world.scenario.profile, world.scenario.gamma
        self.length = min(len(world.trace.output_ids), world.limit)
        # Beyond the end of an answer that a stop token ended, drafts go on drafting.
        self._limit = world.limit
        self.specs = {spec.id: spec for spec in world.drafts}
        left = self.length - np.arange(self.length)
        self.accepted = {}
        self._emitted = {PLAIN: [1] * self.length}
        self._ms = {PLAIN: [self._profile.verify(1) + self._profile.overhead_ms] * self.length}
        for spec in world.drafts:
            found = world.trace.accepted(world.header.drafts.index(spec.id), self._gamma)
            found = np.minimum(found[:self.length].astype(int), left)
            drafted = self._drafted(spec, world.trace)
            self.accepted[spec.id] = found
            self._emitted[spec.id] = np.minimum(np.minimum(found, drafted) + 1, left).tolist()
            self._ms[spec.id] = [self._profile.iteration(spec, n) for n in drafted.tolist()]

    def _drafted(self, spec: DraftSpec, trace: Trace) -> np.ndarray:
        """Tokens it proposes at every position."""
        most = np.minimum(self._gamma, self._limit - 1 - np.arange(self.length))
        if not KINDS[spec.kind].slot_free:
            return most
        # A lookup has something to say only where the text repeats itself.
        drafter = KINDS[spec.kind](spec, None, None, 0).attach({})
        state = DecodeState(None, {}, 0)
        prompt, output = trace.prompt_ids.tolist(), trace.output_ids.tolist()
        for t in range(self.length):
            state.tokens = prompt + output[:t]
            most[t] = len(drafter.propose(state, int(most[t])).tokens)
        return most

    def interval(self, draft: str, position: int, iterations: int,
                 catch_up_ms: float = 0.0) -> float:
        """Tokens per millisecond of that many iterations from ``position`` on."""
        end, ms = position, catch_up_ms
        for _ in range(iterations):
            if end >= self.length:
                break
            ms += self._ms[draft][end]
            end += self._emitted[draft][end]
        return (end - position) / ms if ms else 0.0

    def around(self, draft: str, position: int, iterations: int, window: int) -> float:
        """
        Tokens per millisecond at the ``window`` positions before ``position`` and after it.

        But for that many iterations from ``position`` on, and whatever tells of their tokens.
        """
        end = position
        for _ in range(iterations):
            end += self._emitted[draft][end] if end < self.length else 0
        first = max(0, position - self._gamma)
        places = [*range(max(0, first - window), first),
                  *range(end, min(end + window, self.length))]
        ms = sum(self._ms[draft][place] for place in places)
        return sum(self._emitted[draft][place] for place in places) / ms if ms else 0.0

    def after(self, draft: str, position: int, ms: float, interval: int) -> int:
        """Position at the first boundary at which at least ``ms`` have passed."""
        return next((boundary for boundary, passed in self.boundaries(draft, position, interval)
                     if passed >= ms), self.length)

    def boundaries(self, draft: str, position: int, interval: int) -> list[tuple[int, float]]:
        """(position, milliseconds from now) of this boundary and those to come."""
        found, passed = [], 0.0
        while position < self.length:
            found.append((position, passed))
            for _ in range(interval):
                if position < self.length:
                    passed += self._ms[draft][position]
                    position += self._emitted[draft][position]
        return found

    def bridged(self, draft: str, position: int, ms: float) -> tuple[int, float]:
        """(position, milliseconds passed) after the first iteration that ends ``ms`` from now."""
        passed = 0.0
        while passed < ms and position < self.length:
            passed += self._ms[draft][position]
            position += self._emitted[draft][position]
        return position, passed

    def to_the_end(self, draft: str, position: int) -> float:
        """Milliseconds of the rest of the answer."""
        ms = 0.0
        while position < self.length:
            ms += self._ms[draft][position]
            position += self._emitted[draft][position]
        return ms

    def choices(self, draft: str, position: int) -> list[tuple[int, float]]:
        """
        (tokens emitted, milliseconds), the cheapest for every number of tokens to be had.

        At any draft length up to the full one; PLAIN for none.
        """
        if draft == PLAIN:
            return [(1, self._ms[PLAIN][position])]
        accepted, spec = int(self.accepted[draft][position]), self.specs[draft]
        found: dict[int, float] = {}
        for gamma in range(1, self._gamma + 1):
            emitted = min(min(gamma, accepted) + 1, self.length - position)
            ms = self._profile.iteration(spec, gamma)
            found[emitted] = min(ms, found.get(emitted, ms))
        return sorted(found.items())
