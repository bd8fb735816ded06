# SPDX-License-Identifier: Apache-2.0
"""Which drafted tokens stand, and the target's own token after them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def verify_greedy(logits: Tensor, drafted: Sequence[int]) -> tuple[int, list[int]]:
    """
    Accept the longest prefix of ``drafted`` that equals the target's argmax.

    logits [len(drafted) + 1, V]: row i is the target's view after i drafted
    tokens. Returns (accepted, tokens to emit): the accepted ones and then the
    target's own, a recovered token after a rejection or a bonus token after
    none. Output equals plain greedy decoding whatever was drafted.
    """
    choices = logits.argmax(-1).tolist()
    accepted = 0
    while accepted < len(drafted) and drafted[accepted] == choices[accepted]:
        accepted += 1
    return accepted, [*drafted[:accepted], choices[accepted]]


def agreement(proposal: Sequence[int], emitted: Sequence[int]) -> tuple[int, int]:
    """
    (accepted, judged) of a proposal that was not verified, but could have led to ``emitted``.

    No more is judged than was emitted, and nothing after the first wrong token.
    """
    count = min(len(proposal), len(emitted))
    accepted = 0
    while accepted < count and proposal[accepted] == emitted[accepted]:
        accepted += 1
    return accepted, accepted + (accepted < count)
