# SPDX-License-Identifier: Apache-2.0
"""
Reading files chunk by chunk, past the page cache.

Bytes go from storage to where they are to stay: direct I/O where the file
system has it, else reads whose pages are let go of chunk by chunk, with one
chunk read ahead and no more.
"""

from __future__ import annotations

from collections.abc import Callable
import ctypes
import errno
import hashlib
import mmap
import os
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .errors import BundleError

CHUNK_BYTES = 1 << 20
# Direct I/O wants offsets, lengths and addresses in multiples of the device's block.
BLOCK_BYTES = 4096
# What file systems without direct I/O answer.
_NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


class LoadCancelled(Exception):  # noqa: N818 (not an error: somebody asked for it)
    """A load was given up on request."""


class Slot(Protocol):
    """Memory that takes a file's bytes in."""

    def window(self, offset: int, count: int) -> memoryview:
        """Where to read at most ``count`` bytes of the file to, aligned to BLOCK_BYTES."""

    def take(self, offset: int, count: int) -> None:
        """So many bytes are in the last window."""

    def finish(self) -> Tensor:
        """The file as a uint8 tensor; all bytes are there."""


class HostSlot:
    """
    A slot in the system's memory.

    ``memory``: page-aligned, of at least ``size`` bytes in whole blocks.
    """

    def __init__(self, memory: np.ndarray, size: int):
        self._buffer = torch.from_numpy(memory[:size])
        self._view = memoryview(memory)

    def window(self, offset, count):
        return self._view[offset:offset + count]

    def take(self, offset, count):
        pass

    def finish(self):
        return self._buffer


def whole_blocks(size: int) -> int:
    """``size`` rounded up to whole blocks, at least one."""
    return max(1, -(-size // BLOCK_BYTES)) * BLOCK_BYTES


def new_slot(size: int) -> HostSlot:
    """A slot of fresh pages, which go back to the system with the last tensor of theirs."""
    return HostSlot(np.frombuffer(mmap.mmap(-1, whole_blocks(size)), np.uint8), size)


def read_file(path: Path, sha256: str | None = None,
              progress: Callable[[int], None] | None = None,
              cancelled: Callable[[], bool] | None = None,
              slot: Callable[[int], Slot] = new_slot) -> Tensor:
    """
    Read a whole file as a uint8 tensor, into the slot that ``slot`` gives for its size.

    ``progress`` receives the bytes read so far; the hash is taken of what is
    read, in the same pass. Raises BundleError where the file is missing,
    shrinks or is not the one of that ``sha256``; LoadCancelled when
    ``cancelled`` says so.
    """
    digest = hashlib.sha256()
    try:
        with DirectFile(path) as file:
            place, done = slot(file.size), 0
            while done < file.size:
                if cancelled is not None and cancelled():
                    raise LoadCancelled(path.name)
                window = place.window(done, CHUNK_BYTES)
                count = min(file.read_into(window), file.size - done)
                if not count:
                    raise BundleError(f'{path}: ended after {done} of {file.size} bytes')
                if sha256 is not None:
                    digest.update(window[:count])
                place.take(done, count)
                done += count
                if progress is not None:
                    progress(done)
            whole = place.finish()
    except OSError as error:
        raise BundleError(f'{path}: {error.strerror or error}') from error
    if sha256 is not None and digest.hexdigest() != sha256:
        raise BundleError(
            f'{path}: sha256 is {digest.hexdigest()}, the manifest says {sha256}; '
            'the file is damaged or was replaced')
    return whole


class DirectFile:
    """
    A file read once from its beginning, leaving nothing in the page cache.

    Use as a context manager. Raises OSError.

    Attributes
    ----------
    size: bytes, when it was opened
    direct: whether the page cache is passed by; else it is cleaned behind the reader

    """

    def __init__(self, path: Path):
        self._file, self.direct = _open(path)
        self.size = os.fstat(self._file.fileno()).st_size
        self._done = 0

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, *exc) -> None:
        # Direct reads leave nothing, but others may have read the file, to check it say.
        drop_pages(self._file.fileno())
        self._file.close()

    def read_into(self, window: memoryview) -> int:
        """Read the next bytes; how many, 0 at the end."""
        try:
            count = self._file.readinto(window)
        except OSError as error:
            if not self.direct or error.errno not in _NOT_DIRECT:
                raise
            # Opened, but not to be read so; or a short read has left the blocks' raster.
            self._buffer()
            count = self._file.readinto(window)
        if not self.direct:
            _advise(self._file.fileno(), 'WILLNEED', self._done + count, len(window))
            drop_pages(self._file.fileno(), self._done, count)
        self._done += count
        return count

    def _buffer(self) -> None:
        import fcntl
        descriptor = self._file.fileno()
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.direct = False
        # The kernel's own read-ahead would grow with a sequential reader.
        advise_random(descriptor)


def _open(path: Path):
    """(raw file, whether reads are direct)."""
    direct = getattr(os, 'O_DIRECT', 0)
    if direct:
        try:
            return open(path, 'rb', buffering=0,
                        opener=lambda name, flags: os.open(name, flags | direct)), True
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                raise
    file = path.open('rb', buffering=0)
    advise_random(file.fileno())
    return file, False


def advise_random(descriptor: int) -> None:
    """Have the system read no more of a file than is asked for (advice only)."""
    _advise(descriptor, 'RANDOM')


def drop_pages(descriptor: int, offset: int = 0, count: int = 0) -> None:
    """Let go of a file's pages in the cache, ``count`` 0: to its end (advice only)."""
    _advise(descriptor, 'DONTNEED', offset, count)


def _advise(descriptor: int, advice: str, offset: int = 0, count: int = 0) -> None:
    if hasattr(os, 'posix_fadvise'):
        try:
            os.posix_fadvise(descriptor, offset, count, getattr(os, f'POSIX_FADV_{advice}'))
        except OSError:
            pass  # a file system that takes no advice


def cached_bytes(path: Path) -> int | None:
    """
    Bytes of a file in the page cache, in whole pages; None where the system does not say.

    (mincore; for files that the caller could not write, Linux says all are.)
    """
    try:
        mincore = ctypes.CDLL(None, use_errno=True).mincore
        with path.open('rb') as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                return 0
            pages = np.frombuffer(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ), np.uint8)
    except (OSError, AttributeError, TypeError):
        return None
    there = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    if mincore(ctypes.c_void_p(pages.ctypes.data), ctypes.c_size_t(size),
               ctypes.c_void_p(there.ctypes.data)):
        return None
    return int((there & 1).sum()) * mmap.PAGESIZE
