# SPDX-License-Identifier: Apache-2.0
"""
Branches of a chain of drafted tokens: second choices where the draft is in doubt.

One pass of the target verifies many rows for hardly more than one. The rows that
a chain leaves free go to the tokens most likely to be right where the chain is
wrong, by the draft's own probabilities: a tree whose branches are one token
long, which takes no further draft step. After SpecExec (Svirschevski et al.
2024), which spends a budget of rows on the likeliest paths.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .state import Branching


def choose_branches(logits: Sequence[Tensor], chain: Sequence[int], ids: Tensor | None,
                    branching: Branching | None) -> list[tuple[int, int]]:
    """
    The likeliest alternatives to the tokens of ``chain``: (d, token) pairs, d from 0.

    logits: row d [N] is the draft's view of token d, over a vocabulary of its own
    (``ids`` [N]; None: all tokens). An alternative is right where the chain is up to d and
    it itself is: that probability decides.
    """
    if not (branching and chain):
        return []
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
    return sorted((depth, token) for _, depth, token in found[:branching.most])


def parents_of(chain: int, branches: Sequence[tuple[int, int]]) -> list[int]:
    """
    The row that each row to verify follows, -1 for none.

    First stands the last committed token, then the chain, then its branches.
    """
    return [-1, *range(chain), *(depth for depth, _ in branches)]


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
