# SPDX-License-Identifier: Apache-2.0
"""
What drafts on the target can say: a trimmed vocabulary, and whatever the text has used.

A rare token (a name, a term of the question) is likely again once it was there.
So the tokens of prompt and answer are added to the trimmed vocabulary, and cost
a row of the target's head each: measured on held-out answers, that makes half
the trimmed vocabulary cover more (docs/training.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

# Most tokens that a text adds. Half a megabyte a step for a width of 576.
MOST_FURTHER = 512


class TextVocabulary:
    """
    Token ids by place: those of the trimmed head, then the text's own.

    Parameters
    ----------
    trimmed: Tensor [V] of token ids
    places: the place of each of them

    Attributes
    ----------
    ids: Tensor [V + E], the token ids by place
    further: the last E of them, each with the place of its first occurrence, by which they stand

    """

    def __init__(self, trimmed: Tensor, places: Mapping[int, int]):
        self._trimmed = self.ids = trimmed
        self._places = places
        self.further: dict[int, int] = {}
        self._text: list[int] = []
        self._rows: Tensor | None = None

    def follow(self, tokens: Sequence[int]) -> None:
        """Be the vocabulary for what follows ``tokens``, which mostly grow from call to call."""
        held, before = len(self._text), len(self.further)
        if self._text != tokens[:held]:
            self.further, self._text, self._rows, held, before = {}, [], None, 0, -1
        for place, token in enumerate(tokens[held:], held):
            if token not in self._places and len(self.further) < MOST_FURTHER:
                self.further.setdefault(token, place)
        self._text += tokens[held:]
        if len(self.further) != before:
            self.ids = torch.cat([self._trimmed, self._trimmed.new_tensor(list(self.further))])

    def further_rows(self, read: Callable[[Sequence[int]], Tensor]) -> Tensor | None:
        """
        A row for each of ``further``, None for none; ``read`` gives those not read before.

        Always the same ``read``: the rows of a text are kept as it grows.
        """
        ids = list(self.further)
        held = 0 if self._rows is None else len(self._rows)
        if held < len(ids):
            rows = read(ids[held:])
            self._rows = rows if self._rows is None else torch.cat([self._rows, rows])
        return self._rows
