# SPDX-License-Identifier: Apache-2.0
"""Requests on their way through the node: checked, queued, streamed, remembered."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
import math
import threading
from typing import Any
import uuid

from . import messages
from .decoding.stats import GenerationStats
from .models.errors import InsufficientMemoryError, InvalidRequestError
from .msg import GenerateRequest, GenerationStatus, TokenChunk
from .runtime.requests import Chunk, PreparedRequest
from .runtime.runtime import Runtime
from .runtime.sessions import KEPT_SESSIONS
from .runtime.worker import GenerationWorker, Job, QueueFullError

# Turns of a conversation: (role, text).
History = list[tuple[str, str]]


class ChunkStream:
    """Puts an answer's chunks together to at most one message per period, on the worker thread."""

    def __init__(self, publish: Callable[[TokenChunk], None], request_id: str, period: float,
                 clock: Callable[[], float], stamp: Callable):
        self._publish = publish
        self._period = period
        self._clock = clock
        self._stamp = stamp
        self._last_at = -math.inf
        self._pending = TokenChunk(request_id=request_id)
        self._seq = 0

    def add(self, chunk: Chunk) -> None:
        """Take a chunk; publish what there is if it is time, or the last."""
        pending = self._pending
        pending.text += messages.to_text(chunk.text)
        pending.token_ids.extend(chunk.token_ids)
        pending.draft = chunk.draft
        if chunk.last:
            pending.last = True
            pending.status = messages.finish_status(chunk.finish, chunk.message)
            pending.stats = [messages.to_stats(chunk.stats)]
        elif not pending.token_ids or self._clock() - self._last_at < self._period:
            return
        else:
            pending.status.code = GenerationStatus.RUNNING
        pending.seq = self._seq
        pending.header.stamp = self._stamp()
        self._publish(pending)
        self._seq += 1
        self._last_at = self._clock()
        self._pending = TokenChunk(request_id=pending.request_id)


class RequestDesk:
    """
    Takes requests in while it is open, and keeps what the node remembers of them.

    Parameters
    ----------
    node: for its log, clock, state and memory
    defaults: parameters that fill a request's zeros, by name
    publish: sends a TokenChunk
    on_progress: called after every chunk, on the worker thread

    """

    def __init__(self, node, defaults: Mapping[str, Any],
                 publish: Callable[[TokenChunk], None], on_progress: Callable[[], None]):
        self._node = node
        self._defaults = defaults
        self._publish = publish
        self._on_progress = on_progress
        # A request is queued either before the drain of a transition, or not at all.
        self._gate = threading.Lock()
        self._open_for: tuple[Runtime, GenerationWorker] | None = None
        # Never holds '': a request without a session has no history.
        self._sessions: OrderedDict[str, History] = OrderedDict()
        self.counts: Counter[str] = Counter()
        self.last_stats: GenerationStats | None = None

    def open(self, runtime: Runtime, worker: GenerationWorker) -> None:
        """Accept requests from now on."""
        with self._gate:
            self._open_for = (runtime, worker)

    def close(self) -> None:
        """Refuse requests from now on; none is queued after this returns."""
        with self._gate:
            self._open_for = None

    def forget_sessions(self) -> None:
        """Drop all conversations."""
        self._sessions.clear()

    def enqueue(self, message: GenerateRequest, on_end: Callable[[Job], None] | None = None,
                feedback: Callable[[TokenChunk], None] | None = None
                ) -> tuple[Job | None, GenerationStatus | None]:
        """
        Check and queue a request: (job, None), or (None, status that says why not).

        ``on_end(job)`` and ``feedback(chunk)`` are called on the worker thread.
        """
        open_for = self._open_for
        if open_for is None:
            return None, self._not_active()
        runtime, worker = open_for
        try:
            self._node.memory.admit()
            history = self._sessions.get(message.session_id)
            prepared = self._prepare(message, runtime, history)
            job = Job(message.request_id or uuid.uuid4().hex, prepared, message.client_id,
                      message.priority)
            job.prepare = self._preparer(message, runtime, history, prepared)
            job.on_chunk = self._listener(job, message, runtime, on_end, feedback)
            with self._gate:
                if self._open_for is open_for:
                    worker.submit(job)
                    return job, None
            refused = self._not_active()
        except (InsufficientMemoryError, InvalidRequestError, QueueFullError) as error:
            refused = messages.refusal(error)
        except Exception as error:  # noqa: BLE001 (a request must never end the executor)
            self._node.get_logger().error(f'request refused: {type(error).__name__}: {error}')
            refused = messages.refusal(error)
        self.counts[messages.STATUS_NAMES[refused.code]] += 1
        return None, refused

    def _prepare(self, message: GenerateRequest, runtime: Runtime, history: History | None
                 ) -> PreparedRequest:
        return runtime.prepare(messages.to_request(message, self._defaults, history or ()),
                               message.session_id)

    def _preparer(self, message: GenerateRequest, runtime: Runtime, history: History | None,
                  prepared: PreparedRequest) -> Callable[[], PreparedRequest]:
        """What makes a request anew when its turn comes, if an earlier one has ended since."""

        def prepare() -> PreparedRequest:
            now = self._sessions.get(message.session_id)
            if now is history:
                return prepared
            return replace(self._prepare(message, runtime, now),
                           accepted_at=prepared.accepted_at)

        return prepare

    def _not_active(self) -> GenerationStatus:
        state = self._node.state_label
        remedy = 'try again when it is active' if state.endswith('ing') else 'activate it first'
        return messages.status(GenerationStatus.NOT_ACTIVE, f'the node is {state}; {remedy}')

    def _listener(self, job: Job, message: GenerateRequest, runtime: Runtime, on_end, feedback):
        """What happens with each chunk of a job, on the worker thread."""

        def publish(chunk: TokenChunk) -> None:
            self._publish(chunk)
            if feedback is not None:
                feedback(chunk)

        stream = ChunkStream(publish, job.id, self._defaults['stream.min_period_sec'],
                             runtime.controller.clock,
                             lambda: self._node.get_clock().now().to_msg())

        def on_chunk(job: Job, chunk: Chunk) -> None:
            stream.add(chunk)
            self._on_progress()
            if chunk.last:
                self._finish(job, message)
                if on_end is not None:
                    on_end(job)

        return on_chunk

    def _finish(self, job: Job, message: GenerateRequest) -> None:
        code = messages.job_status(job).code
        self.counts[messages.STATUS_NAMES[code]] += 1
        if job.token_ids:  # the figures of one that never began say nothing
            self.last_stats = job.stats
        if code in (GenerationStatus.INTERNAL, GenerationStatus.OUT_OF_MEMORY):
            self._node.get_logger().error(f'request {job.id} failed: {job.message}')
        if message.session_id and code in (GenerationStatus.OK, GenerationStatus.LENGTH):
            turns = self._sessions.get(message.session_id, [])
            self._sessions[message.session_id] = [
                *turns, ('user', message.prompt), ('assistant', job.text)]
            self._sessions.move_to_end(message.session_id)
            while len(self._sessions) > KEPT_SESSIONS:
                self._sessions.popitem(last=False)
