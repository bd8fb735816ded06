# SPDX-License-Identifier: Apache-2.0
"""
A bounded queue of requests and the one thread that answers them.

The caller's threads only enqueue, flag and look; the worker thread owns the
controller and calls back with every chunk. Results are kept for a bounded time
and number, for clients that missed the end.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
import threading
import traceback

from ..decoding.stats import GenerationStats
from ..models.errors import ContextOverflowError, InvalidRequestError
from .controller import Controller
from .requests import Chunk, Finish, PreparedRequest

KEPT_RESULTS = 256
KEPT_SEC = 600.0


class QueueFullError(Exception):
    """As many requests wait as may."""


class JobState(Enum):
    """Where a request stands."""

    PENDING = 'pending'
    RUNNING = 'running'
    ENDED = 'ended'


@dataclass
class Job:
    """
    A request in the queue, running, or ended with its result.

    ``on_chunk(job, chunk)`` is called on the worker thread, the last chunk
    included; it must not block. ``prepare`` makes the request anew when its turn
    comes: that of a conversation whose earlier turns had not ended yet.
    """

    id: str
    request: PreparedRequest
    client: str = ''
    priority: int = 0
    on_chunk: Callable[[Job, Chunk], None] = lambda job, chunk: None
    prepare: Callable[[], PreparedRequest] | None = None
    state: JobState = JobState.PENDING
    text: str = ''
    token_ids: list[int] = field(default_factory=list)
    finish: Finish | None = None
    message: str = ''
    stats: GenerationStats | None = None
    ended_at: float = 0.0
    position: int = 0
    cancelled: threading.Event = field(default_factory=threading.Event)


class GenerationWorker:
    """
    Runs jobs one after another on its own thread.

    Order: higher priority first; within a priority, clients take turns; within
    a client, first come first served. Turns of a conversation keep their order
    whatever their priority. ``log`` receives tracebacks of faults.
    """

    def __init__(self, controller: Controller, max_queue: Callable[[], int],
                 log: Callable[[str], None] = lambda text: None):
        self._controller = controller
        self._max_queue = max_queue
        self._log = log
        self._clock = controller.clock
        self._changed = threading.Condition()
        self._waiting: list[Job] = []
        self._running: Job | None = None
        self._ended: OrderedDict[str, Job] = OrderedDict()
        self._served: Counter[str] = Counter()
        self._errand: Callable[[], None] | None = None
        self._closing = False
        self.last_progress = self._clock()
        self._thread = threading.Thread(target=self._run, name='memspec-worker', daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread lives."""
        return self._thread.is_alive()

    @property
    def running(self) -> Job | None:
        """The job being answered."""
        return self._running

    @property
    def waiting(self) -> int:
        """Jobs in the queue."""
        return len(self._waiting)

    def submit(self, job: Job) -> int:
        """
        Enqueue; returns (and notes) how many jobs are served before it.

        Raises QueueFullError at once when the queue is full, InvalidRequestError
        for an id in use or whose result is still kept.
        """
        with self._changed:
            self._forget_old()
            if self._find(job.id) is not None:
                raise InvalidRequestError(
                    f'request_id {job.id!r} is in use, or its result is still kept')
            if len(self._waiting) >= self._max_queue():
                raise QueueFullError(
                    f'{len(self._waiting)} requests wait already (queue.max_size)')
            self._waiting.append(job)
            job.position = sum(other.priority >= job.priority for other in self._waiting) - 1
            self._changed.notify_all()
            job.position += self._running is not None
            return job.position

    def cancel(self, job_id: str) -> int:
        """Cancel one job, or all for ''; returns how many. Never waits."""
        with self._changed:
            jobs = [job for job in (*self._waiting, self._running) if job is not None
                    and job_id in ('', job.id) and not job.cancelled.is_set()]
            for job in jobs:
                job.cancelled.set()
            self._changed.notify_all()
            return len(jobs)

    def find(self, job_id: str) -> Job | None:
        """The job of that id: waiting, running, or ended and still kept."""
        with self._changed:
            self._forget_old()
            return self._find(job_id)

    def between(self, work: Callable[[], None]) -> None:
        """
        Have ``work`` done on the worker's thread before the next job, at once where none runs.

        Work that has not begun yet is replaced.
        """
        with self._changed:
            self._errand = work
            self._changed.notify_all()

    def drain(self, timeout: float | None = None) -> bool:
        """Cancel everything and wait until all have got their last chunk."""
        self.cancel('')
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._waiting and self._running is None or not self.alive, timeout)

    def close(self) -> None:
        """Drain and end the thread."""
        self.drain()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _find(self, job_id: str) -> Job | None:
        for job in (self._running, *self._waiting):
            if job is not None and job.id == job_id:
                return job
        return self._ended.get(job_id)

    def _forget_old(self) -> None:
        oldest = self._clock() - KEPT_SEC
        while self._ended:
            job = next(iter(self._ended.values()))
            if len(self._ended) <= KEPT_RESULTS and job.ended_at >= oldest:
                return
            self._ended.popitem(last=False)

    def _take(self) -> Job:
        """The next job: a cancelled one at once, else by priority, turn and arrival."""
        def rank(item: tuple[int, Job]) -> tuple:
            index, job = item
            return (not job.cancelled.is_set(), -job.priority, self._served[job.client], index)

        begun: set[str] = set()  # conversations of which an earlier turn waits
        ready = []
        for item in enumerate(self._waiting):
            session = item[1].request.session
            if item[1].cancelled.is_set() or session not in begun:
                ready.append(item)
                begun |= {session} - {''}
        index, job = min(ready, key=rank)
        del self._waiting[index]
        if not job.cancelled.is_set():
            self._served[job.client] += 1
        if not self._waiting:
            self._served.clear()
        return job

    def _run(self) -> None:
        while True:
            self._run_errand()
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._waiting or self._errand)
                if self._errand is not None:
                    continue
                if self._closing and not self._waiting:
                    return
                job = self._running = self._take()
                job.state = JobState.RUNNING
            self.last_progress = self._clock()
            try:
                again = job.prepare is not None and not job.cancelled.is_set()
                request = job.prepare() if again else job.request
                for chunk in self._controller.generate(request, job.cancelled.is_set):
                    self.last_progress = self._clock()
                    self._deliver(job, chunk)
            except InvalidRequestError as error:
                overflow = isinstance(error, ContextOverflowError)
                self._end(job, Finish.CONTEXT_OVERFLOW if overflow else Finish.INVALID, str(error))
            except Exception as error:  # noqa: BLE001 (one request's fault must not end the thread)
                self._log(traceback.format_exc())
                if job.finish is None:
                    self._end(job, Finish.INTERNAL, f'{type(error).__name__}: {error}')
            with self._changed:
                self._running = None
                self._changed.notify_all()

    def _run_errand(self) -> None:
        with self._changed:
            work, self._errand = self._errand, None
        if work is not None:
            try:
                work()
            except Exception:  # noqa: BLE001 (an errand's fault is no request's)
                self._log(traceback.format_exc())

    def _end(self, job: Job, finish: Finish, message: str) -> None:
        """End a job that the controller has not ended."""
        self._deliver(job, Chunk(-1, '', [], last=True, finish=finish, message=message,
                                 stats=GenerationStats()))

    def _deliver(self, job: Job, chunk: Chunk) -> None:
        job.text += chunk.text
        job.token_ids += chunk.token_ids
        if chunk.last:
            with self._changed:
                job.finish, job.message, job.stats = chunk.finish, chunk.message, chunk.stats
                job.state, job.ended_at = JobState.ENDED, self._clock()
                self._ended[job.id] = job
        try:
            job.on_chunk(job, chunk)
        except Exception:  # noqa: BLE001 (a listener's fault is not the request's)
            self._log(traceback.format_exc())
