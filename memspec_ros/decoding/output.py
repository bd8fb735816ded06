# SPDX-License-Identifier: Apache-2.0
"""From committed tokens to the text a client sees: characters, stop strings, agreement."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .detokenizer import Detokenizer
from .stopping import StopStrings


class OutputStream:
    """
    Text and ids of one answer, always in agreement.

    ``token_ids`` ends with the token that completed a stop string, ``text``
    right before that string; both end where the statistics end.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]):
        self._detokenizer = Detokenizer(decode)
        self._stops = StopStrings(stops)
        self.token_ids: list[int] = []
        self.text = ''

    @property
    def stopped(self) -> bool:
        """A stop string has been met: nothing is added any more."""
        return self._stops.hit is not None

    def add(self, tokens: Sequence[int]) -> tuple[str, int]:
        """
        Take a block of committed tokens.

        Returns (text that became certain, tokens taken): fewer than given when a
        stop string ends the answer within the block.
        """
        piece, taken = '', 0
        for token in tokens:
            if self.stopped:
                break
            piece += self._stops.add(self._detokenizer.add(token))
            self.token_ids.append(token)
            taken += 1
        self.text += piece
        return piece, taken

    def finish(self) -> str:
        """Text held back so far, which is certain now that nothing follows."""
        piece = self._stops.add(self._detokenizer.flush()) + self._stops.flush()
        self.text += piece
        return piece
