# SPDX-License-Identifier: Apache-2.0
"""Giving memory back to the system, so that other programs can have it."""

from __future__ import annotations

import contextlib
import ctypes
import gc

import torch


def give_back() -> None:
    """
    Return what has been freed to the system, after models were let go of.

    glibc keeps freed blocks below its mmap threshold (a third of what the
    weights took, measured), PyTorch's CUDA allocator keeps all of them.
    """
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # another C library has no such call
        ctypes.CDLL(None).malloc_trim(0)
