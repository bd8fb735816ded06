# SPDX-License-Identifier: Apache-2.0
"""Whether there is room, asked before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import math
import os
from pathlib import Path
import tempfile
import time

from ..models.errors import InsufficientMemoryError
from .allocator import MIB
from .footprint import Footprint


def room_bytes(available: int, runtime: int, budget: int, min_free: int) -> int:
    """Bytes that may be taken beside the ``runtime`` that is there already; budget 0 for none."""
    room = available - min_free
    return min(room, budget - runtime) if budget else room


def check(footprint: Footprint, least: Footprint, available: int, budget: int,
          min_free: int) -> None:
    """
    Refuse what does not fit; sizes in bytes, budget 0 for none.

    ``least`` is the footprint without drafts. Raises InsufficientMemoryError with
    needed and available MiB.
    """
    total, needed = footprint.total, footprint.needed
    remedy = ('lower cache_capacity or context.max_tokens' if least.total < total
              else 'lower context.max_tokens or draft.max_tokens')
    if budget and total > budget:
        raise InsufficientMemoryError(
            f'needs {total / MIB:.0f} MiB, memory.budget_mib allows {budget / MIB:.0f}; {remedy}, '
            f'or raise the budget: {math.ceil(least.total / MIB)} is the least that works')
    if needed + min_free > available:
        raise InsufficientMemoryError(
            f'needs {needed / MIB:.0f} MiB and {min_free / MIB:.0f} MiB left free, '
            f'{available / MIB:.0f} MiB are available; {remedy}, or stop other programs')


@contextlib.contextmanager
def machine_lock(timeout_sec: float = 300.0,
                 while_waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """
    Hold a lock of this machine while measuring free memory and taking it.

    Two nodes starting together would otherwise count the same free bytes.
    Raises InsufficientMemoryError after ``timeout_sec``, and what ``while_waiting``
    raises to give up earlier.
    """
    import fcntl
    path = Path(tempfile.gettempdir()) / f'memspec-preflight-{os.getuid()}.lock'
    with path.open('w') as file:
        deadline = time.monotonic() + timeout_sec
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise InsufficientMemoryError(
                        f'another node has been loading for {timeout_sec:.0f} s '
                        f'(lock {path})') from None
                while_waiting()
                time.sleep(0.05)
        yield
