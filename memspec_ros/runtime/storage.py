# SPDX-License-Identifier: Apache-2.0
"""
Where draft weights lie, and how fast they come from there.

Besides the files of a bundle: the same at the pace of slower storage, so that a
workstation shows what a board with an SD card would do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
import logging
import math
import os
from pathlib import Path
import time
from typing import Protocol

from torch import Tensor

from ..models.drafts import DraftKind
from ..models.errors import BundleError, InvalidRequestError
from ..models.reading import cached_bytes, drop_pages, LoadCancelled, new_slot, Slot
from ..models.weights import read_tensors
from .slots import SlotPool

_LOG = logging.getLogger(__name__)
# Who is paced looks at cancellation this often, in seconds.
_SLICE_SEC = 0.01


class Store(Protocol):
    """Where draft weights lie."""

    def read(self, draft: str, progress: Callable[[int], None],
             cancelled: Callable[[], bool]) -> Mapping[str, Tensor]:
        """Read all bytes of ``draft``; raises to say why not."""

    def give_back(self) -> None:
        """Return memory that is kept for the next read to the system; any thread may ask."""


class FileStore:
    """
    Weight files of a bundle: draft id -> (file, sha256).

    slot: makes the memory that a file of so many bytes is read into. cold: each
    read is one from the storage itself, whatever the page cache holds. refused:
    draft id -> why it is not to be used, whatever its file holds. A file with
    values that are no numbers is refused too: such a draft would propose
    nonsense without a word.
    """

    def __init__(self, files: Mapping[str, tuple[Path, str | None]],
                 slot: Callable[[int], Slot] = new_slot, cold: bool = False,
                 refused: Mapping[str, str] | None = None):
        self._files = dict(files)
        self._slot = slot
        self._cold = cold
        self._refused = dict(refused or {})

    def read(self, draft, progress, cancelled):
        if draft in self._refused:
            raise BundleError(self._refused[draft])
        path, sha256 = self._files[draft]
        if self._cold:
            drop_from_cache(path)
        tensors = read_tensors(path, sha256, progress, cancelled, self._slot)
        check_numbers(path, tensors)
        return tensors

    def give_back(self):
        if isinstance(self._slot, SlotPool):
            self._slot.give_back()


class PreparingStore:
    """
    Another ``store``, from which drafts come as decoding wants them.

    kinds: draft id -> (kind, bytes of its file), as for a Residency.
    """

    def __init__(self, store: Store, kinds: Mapping[str, tuple[DraftKind, int]]):
        self.store = store
        self._kinds = kinds

    def read(self, draft, progress, cancelled):
        kind, _ = self._kinds[draft]
        return kind.prepare(self.store.read(draft, progress, cancelled))

    def give_back(self):
        self.store.give_back()


def check_numbers(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise BundleError naming the first tensor with a value that is infinite or no number."""
    for name, tensor in tensors.items():
        # Both are the same as the value that is none, if there is one; nothing is copied.
        if tensor.is_floating_point() and tensor.numel() and not all(
                math.isfinite(value) for value in tensor.aminmax()):
            raise BundleError(f'{path}: {name} holds values that are no numbers: fetch or distil '
                              'the draft again')


def drop_from_cache(path: Path) -> None:
    """
    Have the page cache let go of a file, changes written first.

    Raises BundleError where the file cannot be opened. Where pages stay (the
    file system lies in memory, or a program has the file mapped) a warning says so.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages not yet written cannot be let go of
            drop_pages(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise BundleError(f'{path}: {error.strerror or error}') from error
    if left := cached_bytes(path):
        _LOG.warning('%s: %d bytes stay in memory (mapped by a program, or a file system in '
                     'memory); this read is not a cold one', path, left)


@dataclass(frozen=True)
class StorageLimits:
    """
    How draft files are read: by default as fast as the storage goes.

    mb_per_sec: at most so many megabytes (10^6 bytes) a second, 0 for no limit.
    latency_ms: that every load waits before its first byte. cold: the page cache
    lets go of a file before each read.
    """

    mb_per_sec: float = 0.0
    latency_ms: float = 0.0
    cold: bool = False

    def __post_init__(self) -> None:
        for name in ('mb_per_sec', 'latency_ms'):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidRequestError(f'storage: {name} is {value}, expected at least 0')

    def limit(self, store: Store) -> Store:
        """``store`` at this pace."""
        if not (self.mb_per_sec or self.latency_ms):
            return store
        return PacedStore(store, 1e6 * self.mb_per_sec, self.latency_ms / 1e3)


class PacedStore:
    """
    A store whose bytes come no faster than those of slower storage.

    A chunk that was read is held back until it would have come from there. Due
    times count from the beginning of a read, so that an inexact sleep is made up
    for by the next; an underlying store that is slower still is not slowed down.
    A load that is given up while it is held back ends within 10 ms.

    Parameters
    ----------
    inner: the store to read from
    bytes_per_sec: rate of all drafts, 0 for no limit
    latency_sec: before the first byte of every read
    rates: draft id -> its own rate, in place of bytes_per_sec; may be changed
        between reads
    clock, sleep: seconds

    """

    def __init__(self, inner: Store, bytes_per_sec: float = 0.0, latency_sec: float = 0.0,
                 rates: Mapping[str, float] | None = None,
                 clock: Callable[[], float] = time.monotonic,
                 sleep: Callable[[float], None] = time.sleep):
        self.inner = inner
        self.bytes_per_sec = bytes_per_sec
        self.latency_sec = latency_sec
        self.rates = dict(rates or {})
        self._clock = clock
        self._sleep = sleep

    def read(self, draft, progress, cancelled):
        rate, start = self.rates.get(draft, self.bytes_per_sec), self._clock()

        came = 0

        def paced(count: int) -> None:
            nonlocal came
            due = start + self.latency_sec + (count / rate if rate else 0.0)
            while (left := due - self._clock()) > 0:
                if cancelled():
                    raise LoadCancelled(draft)
                # A chunk of a very slow storage must not look like one that stands still.
                came = max(came, count - math.ceil(left * rate))
                progress(came)
                self._sleep(min(left, _SLICE_SEC))
            came = count
            progress(count)

        paced(0)
        return self.inner.read(draft, paced, cancelled)

    def give_back(self):
        self.inner.give_back()
