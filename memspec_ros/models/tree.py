# SPDX-License-Identifier: Apache-2.0
"""
Branches of a chain of drafted tokens: second choices, and what another draft says.

One pass of the target verifies many rows for hardly more than one. The rows that
a chain leaves free go to the tokens most likely to be right where the chain is
wrong, by the draft's own probabilities: a tree whose branches are one token
long, which takes no further draft step. After SpecExec (Svirschevski et al.
2024), which spends a budget of rows on the likeliest paths. The chain of another
draft can be grafted onto that tree, from where the two part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .state import Branching, Proposal


def choose_branches(logits: Sequence[Tensor], chain: Sequence[int], ids: Tensor | None,
                    branching: Branching | None) -> dict[tuple[int, int], float]:
    """
    The likeliest alternatives to the tokens of ``chain``: (d, token), d from 0 -> probability.

    logits: row d [N] is the draft's view of token d, over a vocabulary of its own
    (``ids`` [N]; None: all tokens). An alternative is right where the chain is up to d and
    it itself is: that probability decides.
    """
    if not (branching and chain):
        return {}
    chances = torch.stack(logits[:len(chain)]).float().softmax(-1)
    best = chances.topk(min(branching.most + 1, chances.shape[1]))
    tokens = best.indices if ids is None else ids[best.indices]
    found, reach = [], 1.0
    for depth, (row, values, said) in enumerate(zip(tokens.tolist(), best.values.tolist(),
                                                    chain)):
        likely = 0.0
        for token, chance in zip(row, values):
            if token == said:
                likely = chance
            elif reach * chance >= branching.least:
                found.append((reach * chance, depth, token))
        reach *= likely
        if reach < branching.least:
            break
    found.sort(key=lambda item: (-item[0], item[1], item[2]))
    return {(depth, token): worth for worth, depth, token
            in sorted(found[:branching.most], key=lambda item: item[1:])}


@dataclass(frozen=True)
class Merged:
    """
    A proposal that another draft's chain has been grafted onto.

    placed: how many tokens of that chain have a row. alone: rows that stand for
    it and for nothing that the first draft proposed.
    """

    proposal: Proposal
    placed: int = 0
    alone: int = 0


def graft(first: Proposal, second: Sequence[int], chances: Sequence[float],
          branching: Branching) -> Merged:
    """
    One tree of a proposal and of another draft's chain ``second``; prefixes in common merge.

    chances: probability that each token of ``second`` after the common prefix is
    accepted, falling. Of these tokens and the proposal's own branches those
    with the largest get the ``branching.most`` rows, none below ``branching.least``.
    """
    chain, own = first.tokens, dict(first.branches)
    shared = common_prefix(chain, second)
    rest, chances = second[shared:], list(chances)
    mutual = own.pop((shared, rest[0]), None) if rest else None
    if mutual is not None:
        chances[0] = max(mutual, chances[0])
    found = [(-chance, 0, *key) for key, chance in own.items()]
    found += [(-chance, 1, depth, token) for depth, (token, chance) in enumerate(
        zip(rest, chances)) if chance >= branching.least]
    taken = sorted(found)[:branching.most]
    branches = {(row, token): own[row, token]
                for row, token in sorted(item[2:] for item in taken if item[1] == 0)}
    row, count = shared, len(taken) - len(branches)
    for token, chance in zip(rest[:count], chances):
        branches[row, token] = chance
        row = len(chain) + len(branches)
    return Merged(Proposal(chain, first.probs, branches), shared + count,
                  count - (mutual is not None and count > 0))


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    return next((place for place, pair in enumerate(zip(one, other)) if pair[0] != pair[1]),
                min(len(one), len(other)))


def parents_of(chain: int, branches: Iterable[tuple[int, int]]) -> list[int]:
    """
    The row that each row to verify follows, -1 for none.

    First stands the last committed token, then the chain, then its branches.
    """
    return [-1, *range(chain), *(row for row, _ in branches)]


def depths_of(parents: Sequence[int]) -> list[int]:
    """How many rows stand above each."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def tree_mask(parents: Sequence[int], before: int, device: torch.device) -> Tensor:
    """Additive mask [R, before + R]: a row sees what is committed, its ancestors and itself."""
    seen = torch.zeros(len(parents), before + len(parents), dtype=torch.bool)
    seen[:, :before] = True
    for row, parent in enumerate(parents):
        if parent >= 0:
            seen[row, before:] = seen[parent, before:]
        seen[row, before + row] = True
    return torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf).to(device)
