# SPDX-License-Identifier: Apache-2.0
"""Moving draft weights from storage into memory, in the background, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
import os
from pathlib import Path
import threading
from typing import Protocol

from torch import Tensor

from ..models.weights import LoadCancelled, read_tensors

_LOADER_NICENESS = 10


@dataclass(frozen=True)
class LoadResult:
    """How a load ended: with tensors, or with the reason it failed."""

    draft: str
    tensors: Mapping[str, Tensor] | None = None
    error: str | None = None
    cancelled: bool = False


class Store(Protocol):
    """Where draft weights lie."""

    def read(self, draft: str, progress: Callable[[int], None],
             cancelled: Callable[[], bool]) -> Mapping[str, Tensor]:
        """Read all bytes of ``draft``; raises to say why not."""


class FileStore:
    """Weight files of a bundle: draft id -> (file, sha256)."""

    def __init__(self, files: Mapping[str, tuple[Path, str | None]]):
        self._files = dict(files)

    def read(self, draft, progress, cancelled):
        path, sha256 = self._files[draft]
        return read_tensors(path, sha256, progress, cancelled)


class Loader(Protocol):
    """One load in flight; the caller polls."""

    loading: str | None
    bytes_read: int

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

    def close(self) -> None:
        """End the background work."""


class ThreadLoader:
    """Loader on one background thread, which only moves bytes."""

    def __init__(self, store: Store):
        self._store = store
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
            self._cancel.clear()
            self._wake.notify_all()

    def poll(self) -> LoadResult | None:
        with self._wake:
            result = self._result
            if result is not None:
                self.loading, self._result = None, None
            return result

    def wait(self, timeout: float | None = None) -> bool:
        with self._wake:
            return self._wake.wait_for(
                lambda: self.loading is None or self._result is not None, timeout)

    def cancel(self) -> None:
        self._cancel.set()

    def close(self) -> None:
        self._cancel.set()
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join()

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

    def _load(self, draft: str) -> LoadResult:
        try:
            return LoadResult(draft, self._store.read(draft, self._progress, self._cancel.is_set))
        except LoadCancelled:
            return LoadResult(draft, cancelled=True)
        except Exception as error:  # noqa: BLE001 (any fault of a load is that draft's, not ours)
            return LoadResult(draft, error=f'{error}' or type(error).__name__)

    def _progress(self, count: int) -> None:
        self.bytes_read = count


def _lower_priority() -> None:
    """On few cores a load must not take time from decoding: this thread yields to others."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOADER_NICENESS)
    except (AttributeError, OSError):
        pass  # not Linux, or not allowed: the load still runs, only less politely
