# SPDX-License-Identifier: Apache-2.0
"""Chi-square tests: are these counts of that distribution, are both of the same one?"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# Cells that are expected to hold fewer are put together: the approximation needs them full.
LEAST_EXPECTED = 5.0


@dataclass(frozen=True)
class ChiSquare:
    """A statistic and the probability ``p`` of one as large by chance alone."""

    statistic: float
    degrees: int

    @property
    def p(self) -> float:
        """1 where there was nothing to compare."""
        if not self.degrees:
            return 1.0
        half = torch.tensor([self.degrees, self.statistic], dtype=torch.float64) / 2
        return float(torch.special.gammaincc(half[0], half[1]))


def goodness_of_fit(counts: Tensor, probs: Tensor) -> ChiSquare:
    """Counts [V] against probabilities [V]; what is impossible must not occur."""
    counts, expected = counts.double(), probs.double() / probs.double().sum() * counts.sum()
    if counts[expected == 0].any():
        return ChiSquare(torch.inf, 1)
    cells = _pooled(list(zip(expected.tolist(), counts.tolist())))
    return ChiSquare(sum((seen - wanted) ** 2 / wanted for wanted, seen in cells),
                     max(0, len(cells) - 1))


def two_samples(strata: Iterable[tuple[Mapping[Hashable, int], Mapping[Hashable, int]]]
                ) -> ChiSquare:
    """
    Test that in every stratum both samples (value -> count) are of one distribution.

    Statistics of strata add up. A stratum with fewer than two cells left after
    pooling says nothing and is left out.
    """
    statistic, degrees = 0.0, 0
    for first, second in strata:
        sizes = sum(first.values()), sum(second.values())
        if not all(sizes):
            continue
        total = sum(sizes)
        # (what the smaller sample is expected to hold, of the first, of the second)
        cells = _pooled([
            (min(sizes) * (first.get(value, 0) + second.get(value, 0)) / total,
             first.get(value, 0), second.get(value, 0))
            for value in sorted({*first, *second}, key=repr)])
        if len(cells) < 2:
            continue
        for _, *seen in cells:
            for count, size in zip(seen, sizes):
                wanted = size * sum(seen) / total
                statistic += (count - wanted) ** 2 / wanted
        degrees += len(cells) - 1
    return ChiSquare(statistic, degrees)


def _pooled(cells: list[tuple]) -> list[tuple]:
    """Cells, those whose first number is too low added up, the least first, until it is not."""
    ordered = sorted(cells, key=lambda cell: cell[0])
    pooled: list[tuple] = []
    rest = None
    for cell in ordered:
        if rest is None or rest[0] >= LEAST_EXPECTED:
            pooled += [rest] if rest is not None else []
            rest = cell
        else:
            rest = tuple(a + b for a, b in zip(rest, cell))
    if rest is not None and (rest[0] >= LEAST_EXPECTED or not pooled):
        pooled.append(rest)
    elif rest is not None:
        pooled[-1] = tuple(a + b for a, b in zip(pooled[-1], rest))
    return [cell for cell in pooled if cell[0] > 0]
