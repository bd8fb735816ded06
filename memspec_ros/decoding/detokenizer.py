# SPDX-License-Identifier: Apache-2.0
"""Token ids to text, piece by piece, in whole characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = '\ufffd'
# A UTF-8 character has four bytes at most: more replacement characters than the
# three an unfinished one can show are broken for good.
_UNFINISHED = 3


class Detokenizer:
    """
    Incremental detokeniser over a ``decode(ids) -> text`` function.

    Tokens may hold parts of a character, and a token's text depends on what
    stands before it, so each piece is the difference of two decodes over a short
    window. Text that may still be an unfinished character is held back. All
    pieces and the flush together equal the decode of all ids.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._context: list[int] = []
        self._pending: list[int] = []
        self._emitted = 0  # characters of the window that are out already

    def add(self, token: int) -> str:
        """Text that became certain with ``token``; may be empty."""
        self._pending.append(token)
        return self._advance(final=False)

    def flush(self) -> str:
        """What is held back, an unfinished character as U+FFFD."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        if not self._pending:
            return ''
        base = self._decode(self._context)
        text = self._decode([*self._context, *self._pending])[len(base):]
        certain = len(text)
        if not final and text.endswith(_REPLACEMENT):
            certain = max(self._emitted, len(text) - _UNFINISHED)
            while certain < len(text) and text[certain] != _REPLACEMENT:
                certain += 1
        piece = text[self._emitted:certain]
        if certain == len(text):
            # A complete boundary: the tokens just finished are context for the next ones. Tokens
            # without text (special ones) stay in the window, else it would have no anchor.
            if text:
                self._context, self._pending, self._emitted = self._pending, [], 0
        else:
            self._emitted = certain
        return piece
