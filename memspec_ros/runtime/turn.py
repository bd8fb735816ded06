# SPDX-License-Identifier: Apache-2.0
"""One request while it runs: what has been said, what it took, and how it ends."""

from __future__ import annotations

from collections.abc import Callable

from ..decoding.output import OutputStream
from ..decoding.stats import GenerationStats, StepRecord
from ..models.tokenizer import Tokenizer
from .requests import Chunk, Finish, PreparedRequest
from .residency import ResidencyCounters


class Turn:
    """
    The answer to one request, and the account of it.

    Parameters
    ----------
    request: what is asked
    cancelled: whether the client has given it up
    tokenizer: makes the text
    counters: of the residency; what they grow by is the request's
    clock: seconds, monotonic

    """

    def __init__(self, request: PreparedRequest, cancelled: Callable[[], bool],
                 tokenizer: Tokenizer, counters: ResidencyCounters, clock: Callable[[], float]):
        self.request = request
        self.started = clock()
        self.stats = GenerationStats(prompt_tokens=len(request.prompt_ids),
                                     queue_sec=self.started - request.accepted_at)
        self.output = OutputStream(tokenizer.decode, request.stop)
        self._cancelled = cancelled
        self._clock = clock
        self._counters = counters
        self._loads, self._evictions = counters.loads, counters.evictions
        self._first_token_at: float | None = None
        self._last_token_at: float | None = None

    @property
    def remaining(self) -> int:
        """Tokens that may still be written."""
        return self.request.max_new_tokens - len(self.output.token_ids)

    def interruption(self) -> Finish | None:
        """Why it must end at once: given up, or out of time."""
        request = self.request
        if self._cancelled():
            return Finish.CANCELED
        if (request.timeout_sec
                and self._clock() - request.accepted_at >= request.timeout_sec):
            return Finish.TIMEOUT
        return None

    def ending(self, tokens: list[int], stop_ids: frozenset[int]) -> Finish | None:
        """Whether the answer is complete with the ``tokens`` that were added last."""
        if self.output.stopped:
            return Finish.STOP
        if not self.request.ignore_eos and tokens[-1] in stop_ids:
            return Finish.STOP
        return Finish.LENGTH if self.remaining <= 0 else None

    def count(self, step: StepRecord, between: float, now: float) -> None:
        """Add an iteration that ended ``now``, ``between`` seconds of it spent by nobody else."""
        self.stats.add(step, max(0.0, between))
        if self._first_token_at is None:
            self._first_token_at = now
            self.stats.time_to_first_token_sec = now - self.request.accepted_at
        elif step.emitted:
            # Tokens of an iteration arrive together: one gap, then none.
            self.stats.gaps += [now - self._last_token_at] + [0.0] * (step.emitted - 1)
        self._last_token_at = now

    def close(self, chunk: Chunk, finish: Finish, message: str = '') -> Chunk:
        """Make ``chunk`` the last one: text held back, how it ended, and the figures."""
        stats = self.stats
        stats.total_sec = self._clock() - self.request.accepted_at
        stats.loads = self._counters.loads - self._loads
        stats.evictions = self._counters.evictions - self._evictions
        chunk.text += self.output.finish()
        chunk.last, chunk.finish, chunk.message, chunk.stats = True, finish, message, stats
        return chunk
