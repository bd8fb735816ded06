# SPDX-License-Identifier: Apache-2.0
"""Having the system's allocator hold no more than is used, and give it back."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import ctypes
import gc

import torch

MIB = 1 << 20
# glibc's mallopt: blocks of at least this size are mapped one by one, and unmapped when freed;
# free memory at the end of the heap beyond this size is returned.
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1
_LOADING_BYTES = 64 << 10
# Activations stay below this, and are not mapped anew in every step.
_RUNNING_BYTES = 8 * MIB


@contextlib.contextmanager
def compact() -> Iterator[None]:
    """
    Have whatever is allocated meanwhile leave nothing behind when it is freed.

    Left alone, glibc raises the size from which blocks are mapped with every
    larger block freed, up to 32 MiB: while a model is loaded, the matrices that
    its layers are fused and packed from then leave holes in the heap (measured:
    a fifth of the model). Applies to all threads.
    """
    _mallopt(_M_MMAP_THRESHOLD, _LOADING_BYTES)
    try:
        yield
    finally:
        _mallopt(_M_MMAP_THRESHOLD, _RUNNING_BYTES)
        _mallopt(_M_TRIM_THRESHOLD, 2 * _RUNNING_BYTES)


def give_back() -> None:
    """
    Return what has been freed to the system, after models were let go of.

    glibc keeps freed blocks below its mmap threshold (a third of what the
    weights took, measured), PyTorch's CUDA allocator keeps all of them.
    """
    gc.collect()
    trim()


def trim() -> None:
    """Return freed memory to the system, without looking for garbage first."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # another C library has no such call
        ctypes.CDLL(None).malloc_trim(0)


def _mallopt(parameter: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(parameter, value)
