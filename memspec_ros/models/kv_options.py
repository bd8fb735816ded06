# SPDX-License-Identifier: Apache-2.0
"""What is kept of a cache of keys and values: all of it exactly, unless told otherwise."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import InvalidRequestError

# Positions are rounded to INT8, and dropped, by so many at a time. Where a block ends depends on
# positions alone, never on how many rows were verified together: so drafts change no output.
BLOCK = 64


@dataclass(frozen=True)
class KVOptions:
    """
    How keys and values of old positions are kept; the defaults change nothing.

    int8_after: recent positions that stay as they are, those before them are kept in
    INT8; 0: none is. window: recent positions that are kept when room runs out,
    -1: as many as the context allows, 0: none is dropped, and a text ends with
    the context. sinks: first positions, which are neither rounded nor dropped.
    """

    int8_after: int = 0
    sinks: int = 4
    window: int = 0

    @property
    def exact(self) -> bool:
        """Whether what is decoded is what the target says."""
        return not self.int8_after and not self.window

    @property
    def evicts(self) -> bool:
        """Whether positions are dropped, so that a text may be longer than the context."""
        return self.window != 0

    def positions(self, context: int) -> int:
        """Most positions held at a time; InvalidRequestError where they do not fit ``context``."""
        if not self.evicts:
            return context
        if self.window < 0:
            least = self.sinks + 2 * BLOCK
            if context < least:
                raise InvalidRequestError(
                    f'kv.window is -1 and kv.sinks {self.sinks}: that takes a context.max_tokens '
                    f'of at least {least}, it is {context}')
            return context
        most = self.sinks + self.window + self.stride(context)
        if most > context:
            raise InvalidRequestError(
                f'kv.window is {self.window} and kv.sinks {self.sinks}: with the '
                f'{self.stride(context)} positions between two evictions that takes a '
                f'context.max_tokens of {most}, it is {context}; -1 takes what fits')
        return most

    def stride(self, context: int) -> int:
        """Positions dropped at a time: about a quarter of what is kept, in whole blocks."""
        kept = context - self.sinks if self.window < 0 else self.window
        return max(BLOCK, kept // (4 * BLOCK) * BLOCK)

    def __str__(self) -> str:
        parts = []
        if self.int8_after:
            parts.append(f'int8 after {self.int8_after}')
        if self.evicts:
            window = 'the context' if self.window < 0 else self.window
            parts.append(f'{self.sinks} sinks and a window of {window}')
        return ', '.join(parts) or 'exact'
