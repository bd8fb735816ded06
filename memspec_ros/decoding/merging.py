# SPDX-License-Identifier: Apache-2.0
"""
Two drafts in one verify pass: when that pays, and which rows the second one gets.

Where two chains part, one pass of the target can follow both. The second draft
then costs what it takes to propose and the rows after the parting. What these
are worth is measured: how often the second draft is right where it disagrees
with the first, and how its acceptance falls from there on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..models.tree import common_prefix
from .draft_length import DraftLength
from .stats import StepRecord

# Each observation counts this much less with each later one.
_MEMORY = 0.98
# Of two drafts that disagree the second is believed to be right so often until it was seen …
_ASIDE_PRIOR = 0.2
# … and the tree to give so much of what it would if drafts erred independently of each other.
_SHARE_PRIOR = 0.85
_PRIOR_WEIGHT = 4.0
# So many iterations of each pair are spent to see what it brings.
_TRIALS = 3
# Neither a clock too coarse nor an acceptance never seen must become a division by zero.
_LEAST = 1e-9


@dataclass
class _Figures:
    """Of a pair of drafts; sums that decay."""

    # The second draft's token at the first place where the two differ.
    right: float = 0.0
    seen: float = 0.0
    # Tokens of merged iterations, and what they would have been with independent errors.
    emitted: float = 0.0
    expected: float = 0.0
    # Rows beside the first chain.
    rows: float = 0.0
    iterations: float = 0.0

    @property
    def aside(self) -> float:
        return (self.right + _ASIDE_PRIOR * _PRIOR_WEIGHT) / (self.seen + _PRIOR_WEIGHT)

    @property
    def share(self) -> float:
        # The prior's weight is in tokens here: as of so many iterations.
        weight = 2 * _PRIOR_WEIGHT
        return (self.emitted + _SHARE_PRIOR * weight) / (self.expected + weight)


class Merging:
    """
    What merging pairs of drafts has brought in this process.

    A pair is (id of the draft whose chain and branches make the tree, id of the other). What
    each of them costs and has accepted is known to a DraftLength.
    """

    def __init__(self) -> None:
        self._pairs: dict[tuple[str, str], _Figures] = {}

    def speed(self, length: DraftLength, first: str, gamma: int, second: str, count: int,
              most: int) -> float:
        """Expected tokens/s with ``count`` tokens of ``second`` beside ``gamma`` of ``first``."""
        figures = self._pairs.get((first, second), _Figures())
        rows = (figures.rows + count * _PRIOR_WEIGHT) / (figures.iterations + _PRIOR_WEIGHT)
        cost = (length.drafting_cost(first, gamma) + length.drafting_cost(second, count)
                + length.verify_cost(1 + gamma + round(min(most, rows))))
        return (figures.share * _independent(length, first, gamma, second, count)
                / max(cost, _LEAST))

    def untried(self, first: str, second: str) -> bool:
        """Whether hardly anything is known of a pair but what is believed of all pairs."""
        return self._pairs.get((first, second), _Figures()).iterations < _TRIALS

    def chances(self, length: DraftLength, first: str, second: str, chain: Sequence[int],
                other: Sequence[int]) -> list[float]:
        """
        Probability of being accepted of each token of ``other`` after the common prefix.

        chain, other: what the two drafts propose. Falling.
        """
        shared = common_prefix(chain, other)
        own = length.reaches(second, len(other))
        reach = max(length.reaches(first, shared)[-1], own[shared - 1]) if shared else 1.0
        chances = []
        for depth in range(shared, len(other)):
            if depth == shared < len(chain):
                reach *= self._pairs.get((first, second), _Figures()).aside
            else:
                # Where the first draft's chain has ended, the second one's goes on.
                reach *= own[depth] / max(own[depth - 1], _LEAST) if depth else own[0]
            chances.append(reach)
        return chances

    def learn(self, length: DraftLength, step: StepRecord, chain: Sequence[int],
              other: Sequence[int], emitted: Sequence[int]) -> None:
        """Learn from a merged iteration: what its two drafts proposed, and what was right."""
        figures = self._pairs.setdefault((step.draft, step.second), _Figures())
        place = common_prefix(chain, other)
        if (place < min(len(chain), len(other)) and place < len(emitted)
                and common_prefix(chain, emitted) >= place):
            figures.right = _MEMORY * figures.right + (other[place] == emitted[place])
            figures.seen = _MEMORY * figures.seen + 1
        figures.rows = _MEMORY * figures.rows + step.branches
        figures.iterations = _MEMORY * figures.iterations + 1
        figures.emitted = _MEMORY * figures.emitted + step.emitted
        figures.expected = _MEMORY * figures.expected + _independent(
            length, step.draft, len(chain), step.second, len(other))
        length.overhear(step.second, other, emitted, step.t_second)


def _independent(length: DraftLength, first: str, gamma: int, second: str, count: int) -> float:
    """Tokens of an iteration if the two drafts erred independently of each other."""
    one, other = length.reaches(first, gamma), length.reaches(second, count)
    one += [0.0] * (len(other) - len(one))
    other += [0.0] * (len(one) - len(other))
    return 1.0 + sum(1 - (1 - a) * (1 - b) for a, b in zip(one, other))
