# SPDX-License-Identifier: Apache-2.0
"""
Who drafts an iteration: the active draft, one that copies in its place, or two in one tree.

Slot-free drafts are always there, so that one of them may step in wherever the
text repeats itself, whatever the policy has chosen; and what it would copy can
be verified beside what the active draft proposes, as can a second draft's chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..decoding.draft_length import DraftLength
from ..decoding.engine import Engine, Second
from ..decoding.merging import Merging
from ..decoding.stats import StepRecord
from ..models.drafts import Drafter
from ..models.state import Branching
from .residency import Residency

# Shorter repetitions are chance: two tokens in a row are often followed by another third.
LEAST_MATCH = 3


@dataclass
class Way:
    """
    How an iteration drafts: ``gamma`` tokens of a draft ('' and None for none).

    second: another draft in the same tree. overheard: a copier that was not
    asked, and what it would have said. pair: what the two drafts of a tree
    proposed, once they have.
    """

    draft: str
    drafter: Drafter | None
    gamma: int
    branching: Branching | None = None
    second: Second | None = None
    overheard: tuple[str, list[int]] | None = None
    pair: tuple[Sequence[int], Sequence[int]] = field(default=((), ()))

    def within(self, gamma: int) -> Way:
        """The same draft alone, a chain of ``gamma`` tokens at most: it takes least memory."""
        return Way(self.draft, self.drafter, min(self.gamma, gamma), overheard=self.overheard)


class Drafting:
    """
    Chooses the Way of each iteration by what has been measured in this process.

    ``length`` is given each time: whoever measures may exchange the controller's.
    """

    def __init__(self, engine: Engine, residency: Residency):
        self._engine = engine
        self._residency = residency
        self._merging = Merging()

    def choose(self, length: DraftLength, active: str, others: Sequence[str], copy: bool,
               merge: bool, bridge: str | None = None) -> Way:
        """
        The way with most expected tokens per second.

        active: the draft that the policy has chosen. others: further drafts, the
        best first, of which the first that is READY and has caught up may join
        it. copy, merge: as in Settings. bridge: stands in for the active draft where it pays.
        """
        drafter = self._residency.drafter(active)
        way = Way(active, drafter, length.choose(active) if drafter is not None else 0)
        if bridge is not None and (count := length.choose(bridge)):
            way, active = Way(bridge, self._residency.drafter(bridge), count), bridge
            merge = False  # a second draft would be run beside layers that are ahead
        merge = merge and way.gamma > 0 and self._engine.merges
        copier = self._matching(active) if copy else None
        if copier is not None:
            name, copying = copier
            count, speed = length.choose(name), length.speed(active, way.gamma)
            if merge:
                speed = max(speed, self._speed(length, way, name, length.max_gamma))
            if length.speed(name, count) > speed:
                way = Way(name, copying, count)
                merge = False
            elif merge:
                way.second = self._beside(length, way, name, copying, length.max_gamma)
            else:
                way.overheard = (name, copying.propose(
                    self._engine.state, length.max_gamma).tokens)
        elif merge:
            self._add_resident(length, way, others)
        way.branching = self._branching(length, way)
        return way

    def learn(self, length: DraftLength, way: Way, step: StepRecord,
              emitted: Sequence[int]) -> None:
        """Learn from an iteration that went that way."""
        length.observe(step)
        if way.overheard is not None:
            length.overhear(*way.overheard, emitted)
        if step.second:
            self._merging.learn(length, step, *way.pair, emitted)

    def _matching(self, active: str) -> tuple[str, Drafter] | None:
        """The first slot-free draft that can copy here."""
        for name in self._residency.slot_free:
            drafter = self._residency.drafter(name)
            if (name != active and drafter is not None and drafter.copies
                    and drafter.match(self._engine.state) >= LEAST_MATCH):
                return name, drafter
        return None

    def _add_resident(self, length: DraftLength, way: Way, others: Sequence[str]) -> None:
        """Have the best of ``others`` draft too, where both pay, or nobody knows yet."""
        for name in others:
            drafter = self._residency.drafter(name)
            if (name == way.draft or drafter is None or drafter.copies
                    or self._engine.is_cold(drafter)):
                continue
            count = length.choose(name)
            if count and (self._merging.untried(way.draft, name)
                          or self._speed(length, way, name, count)
                          > length.speed(way.draft, way.gamma)):
                way.second = self._beside(length, way, name, drafter, count)
            return

    def _speed(self, length: DraftLength, way: Way, second: str, count: int) -> float:
        return self._merging.speed(length, way.draft, way.gamma, second, count,
                                   self._most_rows(way))

    def _most_rows(self, way: Way) -> int:
        """Rows beside the first draft's chain; what the chain does not need is free for them."""
        return self._engine.max_gamma - way.gamma + self._engine.max_branches

    def _beside(self, length: DraftLength, way: Way, name: str, drafter: Drafter,
                count: int) -> Second:
        least = length.worth_of_row(self._speed(length, way, name, count))

        def chances(chain: Sequence[int], other: Sequence[int]) -> list[float]:
            way.pair = (chain, other)
            return self._merging.chances(length, way.draft, name, chain, other)

        return Second(name, drafter, count, Branching(
            self._most_rows(way), least if length.adaptive else 0.0), chances)

    def _branching(self, length: DraftLength, way: Way) -> Branching | None:
        """Whether and how the first draft may name alternatives to what it proposes."""
        most = self._engine.max_branches
        if not most or not way.gamma:
            return None
        speed = length.speed(way.draft, way.gamma)
        return Branching(most, length.worth_of_row(speed) if length.adaptive else 0.0)
