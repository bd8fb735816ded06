# SPDX-License-Identifier: Apache-2.0
"""Moving draft weights from storage into memory, in the background, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
import logging
import os
import threading
import time
from typing import Protocol

from torch import Tensor

from ..models.reading import LoadCancelled
from .storage import Store

_LOG = logging.getLogger(__name__)
_LOADER_NICENESS = 10
# A read that the kernel does not return from cannot be ended; closing does not wait for it longer.
_CLOSE_SEC = 2.0
STALL_SEC = 5.0


@dataclass(frozen=True)
class LoadResult:
    """How a load ended: with tensors, or with the reason it failed."""

    draft: str
    tensors: Mapping[str, Tensor] | None = None
    error: str | None = None
    cancelled: bool = False


class Loader(Protocol):
    """
    One load in flight; the caller polls.

    stall: why the load in flight is not to be waited for, '' while it moves.
    """

    loading: str | None
    bytes_read: int
    stall: str

    def start(self, draft: str) -> None:
        """Begin to load; only while ``loading`` is None."""

    def poll(self) -> LoadResult | None:
        """The load that has ended since the last poll, if any."""

    def cancel(self) -> None:
        """Give up the load in flight; its end is still to be polled."""

    def wait(self, timeout: float | None = None) -> bool:
        """
        Block until no load is in flight or its end can be polled.

        While decoding, only for a policy that asks for it (Plan.wait).
        """

    def give_back(self) -> None:
        """Return memory that is kept for the next load to the system."""

    def close(self) -> None:
        """End the background work."""


class ThreadLoader:
    """
    Loader on one background thread, which only moves bytes.

    stall_sec: so long without a byte, and a load is taken for stalled.
    """

    def __init__(self, store: Store, stall_sec: float = STALL_SEC,
                 clock: Callable[[], float] = time.monotonic):
        self._store = store
        self._stall_sec = stall_sec
        self._clock = clock
        self._moved_at = 0.0
        self.loading: str | None = None
        self.bytes_read = 0
        self._result: LoadResult | None = None
        self._cancel = threading.Event()
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name='memspec-loader', daemon=True)
        self._thread.start()

    def start(self, draft: str) -> None:
        with self._wake:
            if self.loading is not None:
                raise RuntimeError(f'{self.loading} is being loaded')
            self.loading, self.bytes_read, self._result = draft, 0, None
            self._moved_at = self._clock()
            self._cancel.clear()
            self._wake.notify_all()

    def poll(self) -> LoadResult | None:
        with self._wake:
            result = self._result
            if result is not None:
                self.loading, self._result = None, None
            return result

    @property
    def stall(self) -> str:
        with self._wake:
            still = self._clock() - self._moved_at
            if self.loading is None or self._result is not None or still < self._stall_sec:
                return ''
            return (f'the storage has sent nothing for {still:.0f} s, '
                    f'after {self.bytes_read} bytes')

    def wait(self, timeout: float | None = None) -> bool:
        with self._wake:
            return self._wake.wait_for(
                lambda: self.loading is None or self._result is not None, timeout)

    def cancel(self) -> None:
        self._cancel.set()

    def give_back(self) -> None:
        self._store.give_back()

    def close(self) -> None:
        self._cancel.set()
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join(_CLOSE_SEC)
        if self._thread.is_alive():
            _LOG.warning('the storage does not answer: the load of %s is left behind and ends '
                         'when it does', self.loading)

    def _run(self) -> None:
        _lower_priority()
        while True:
            with self._wake:
                self._wake.wait_for(
                    lambda: self._closing or (self.loading is not None and self._result is None))
                if self._closing:
                    return
                draft = self.loading
            result = self._load(draft)
            with self._wake:
                self._result = result
                self._wake.notify_all()
            # Tensors of a load must not outlive their draft here, until the next one comes.
            del result

    def _load(self, draft: str) -> LoadResult:
        try:
            return LoadResult(draft, self._store.read(draft, self._progress, self._cancel.is_set))
        except LoadCancelled:
            return LoadResult(draft, cancelled=True)
        except Exception as error:  # noqa: BLE001 (any fault of a load is that draft's, not ours)
            return LoadResult(draft, error=f'{error}' or type(error).__name__)

    def _progress(self, count: int) -> None:
        if count > self.bytes_read:
            self.bytes_read, self._moved_at = count, self._clock()


def _lower_priority() -> None:
    """On few cores a load must not take time from decoding: this thread yields to others."""
    try:
        thread = threading.get_native_id()
        # A process that yields to others already is not to be helped up.
        niceness = max(_LOADER_NICENESS, os.getpriority(os.PRIO_PROCESS, thread))
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
    except (AttributeError, OSError):
        pass  # not Linux, or not allowed: the load still runs, only less politely
