# SPDX-License-Identifier: Apache-2.0
"""
Which drafted tokens stand, and the target's own token after them.

Three rules, one result: (accepted, tokens to emit), the accepted ones and then
the target's own, a recovered token after a rejection or a bonus token after
none. What is emitted follows the target's distribution whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from ..models.state import Proposal
from ..models.tree import common_prefix
from .chance import Chance


def verify_greedy(scores: Tensor, drafted: Sequence[int]) -> tuple[int, list[int]]:
    """
    Accept the longest prefix of ``drafted`` that equals the target's argmax.

    scores [len(drafted) + 1, V]: row i is the target's view after i drafted
    tokens. Output equals plain greedy decoding.
    """
    choices = scores.argmax(-1).tolist()
    accepted = 0
    while accepted < len(drafted) and drafted[accepted] == choices[accepted]:
        accepted += 1
    return accepted, [*drafted[:accepted], choices[accepted]]


def descend(drafted: Sequence[int], branches: Iterable[tuple[int, int]],
            draw: Callable[[int, int], int]) -> tuple[list[int], list[int]]:
    """
    Walk down a chain and its branches (Proposal) as far as the target's own tokens lead.

    draw(row, depth): what the target says after a row (0: the last committed
    token, then the chain, then the branches), ``depth`` tokens further on. Returns
    (rows of the accepted tokens, tokens to emit): at every place the target's
    token is taken, whether it was drafted or not.
    """
    places = [*enumerate(drafted), *branches]
    row_of = {place: row for row, place in enumerate(places, start=1)}
    rows, tokens = [], []
    row: int | None = 0
    while row is not None:
        tokens.append(draw(row, len(rows)))
        row = row_of.get((row, tokens[-1]))
        if row is not None:
            rows.append(row)
    return rows, tokens


def verify_coupled(p: Tensor, drafted: Sequence[int], chance: Chance,
                   position: int) -> tuple[int, list[int]]:
    """
    Accept the longest prefix of ``drafted`` that equals what the target itself draws.

    p [len(drafted) + 1, V]; ``position`` of row 0's token. Randomness belongs
    to positions (Daliri et al. 2024): output equals plain sampling with the same
    seed token for token, and drafts that draw by the same randomness are
    accepted often.
    """
    tokens: list[int] = []
    for row in p:
        tokens.append(chance.draw(row, position + len(tokens)))
        if tokens != drafted[:len(tokens)]:
            break
    return len(tokens) - 1, tokens


def verify_rejection(p: Tensor, proposal: Proposal, chance: Chance,
                     position: int) -> tuple[int, list[int]]:
    """
    Accept token t where u * q(t) < p(t), else draw from norm(max(p - q, 0)).

    p [len(drafted) + 1, V]; ``position`` of row 0's token. Accepts as often as
    is possible at all (Leviathan et al. 2023, Chen et al. 2023); which token
    comes out depends on what was drafted, its distribution does not.
    """
    tokens, q = proposal.tokens, proposal.probs
    for place, token in enumerate(tokens):
        likely = 1.0 if q is None else float(q[place, token])
        if not chance.accepts(float(p[place, token]), likely, position + place):
            rest = residual(p[place], token if q is None else q[place])
            return place, [*tokens[:place], chance.draw(rest, position + place)]
    return len(tokens), [*tokens, chance.draw(p[len(tokens)], position + len(tokens))]


def residual(p: Tensor, q: Tensor | int) -> Tensor:
    """norm(max(p - q, 0)) [V], p where that is 0 everywhere; q: [V], or the token it is one of."""
    if isinstance(q, int):
        rest = p.clone()
        rest[q] = 0.0
    else:
        rest = (p - q).clamp(min=0.0)
    total = rest.sum()
    return rest / total if total > 0 else p


def agreement(proposal: Sequence[int], emitted: Sequence[int]) -> tuple[int, int]:
    """
    (accepted, judged) of a proposal that was not verified, but could have led to ``emitted``.

    No more is judged than was emitted, and nothing after the first wrong token.
    """
    accepted = common_prefix(proposal, emitted)
    return accepted, accepted + (accepted < min(len(proposal), len(emitted)))
