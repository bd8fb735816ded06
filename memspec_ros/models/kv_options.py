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
        """Most positions held at a time; InvalidRequestError where ``context`` is short."""
        if not self.evicts:
            return context
        if context < self.least_context:
            raise InvalidRequestError(
                f'kv.window is {self.window} and kv.sinks {self.sinks}: with what is between '
                f'two evictions that takes a context of {self.least_context} tokens '
                f'(context.max_tokens), it is {context}; kv.window -1 takes what fits')
        return context if self.window < 0 else self.least_context

    @property
    def least_context(self) -> int:
        """Tokens of the smallest context that this is possible with; 1 without eviction."""
        if not self.evicts:
            return 1
        return self.sinks + (2 * BLOCK if self.window < 0 else self.window + self.stride(0))

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


EXACT = KVOptions()
