# SPDX-License-Identifier: Apache-2.0
"""
How many threads a pass takes: measured, not assumed.

A decode step waits for memory, which one core may well use up, and every product
wakes and awaits the threads it is shared among: more of them can be slower. A
prefill computes, and gains by all. So there are two numbers, and both are found by
timing the target itself, once: what came out is kept as that of ``kernel_choice``
is. Cores left over are the robot's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
import statistics
import time

import torch

from .cache import cache_directory, read_notes, write_notes
from .kernel_choice import FILE_NAME, machine

# Up to so many rows a pass is one of decoding.
FEW_ROWS = 12
_MANY_ROWS = 64
# A step and a verify, as often as the other.
_STEPS = (1, 5)
_ROUNDS = 8
# More threads have to be this much faster: cores have other work, and timings noise.
_WORTH = 0.9
# Where one row takes longer than this, 64 are not timed: all threads compute them.
_LONG_SEC = 0.1


@dataclass(frozen=True)
class Threads:
    """few: of a pass over up to FEW_ROWS rows; many: of a longer one; 0: as they are."""

    few: int = 0
    many: int = 0

    @contextmanager
    def running(self, rows: int) -> Iterator[None]:
        """What is done within is a pass over so many rows."""
        count, before = self.few if rows <= FEW_ROWS else self.many, torch.get_num_threads()
        try:
            torch.set_num_threads(count or before)
            yield
        finally:
            torch.set_num_threads(before)


def choose_threads(name: str, forward: Callable[[int], object],
                   clock: Callable[[], float] = time.perf_counter) -> Threads:
    """
    The fastest on this machine for the target ``name``, of which ``forward`` runs so many rows.

    Numbers tried are 1, 2, 4 … and what PyTorch would take. Leaves PyTorch's number as it was.
    """
    most = torch.get_num_threads()
    if most == 1:
        return Threads()
    key = f'threads for {name} | {machine()} | of {most}'
    file = cache_directory() / FILE_NAME
    found = read_notes(file).get(key)
    if not (isinstance(found, list) and len(found) == 2
            and all(type(count) is int and 1 <= count <= most for count in found)):
        found = _measure(forward, _numbers(most), clock)
        write_notes(file, {**read_notes(file), key: found})
    return Threads(*found)


def _numbers(most: int) -> list[int]:
    return sorted({most, *(1 << power for power in range(most.bit_length())
                           if 1 << power <= most)})


def _measure(forward: Callable[[int], object], numbers: Sequence[int],
             clock: Callable[[], float]) -> list[int]:
    def timed(rows: int, count: int) -> float:
        torch.set_num_threads(count)
        start = clock()
        forward(rows)
        return clock() - start

    try:
        for count in numbers:  # sets kernels and threads up
            step = timed(1, count)
        found = []
        for sizes in (_STEPS, (_MANY_ROWS,)):
            if sizes == (_MANY_ROWS,) and step > _LONG_SEC:
                found.append(numbers[-1])
                continue
            times = {(rows, count): [] for rows in sizes for count in numbers}
            for _ in range(_ROUNDS):
                for one, measured in times.items():
                    measured.append(timed(*one))
            # Not the least of them: threads that await each other are fast now and then.
            found.append(_fewest(numbers, [
                sum(statistics.median(times[rows, count]) for rows in sizes)
                for count in numbers]))
        return found
    finally:
        torch.set_num_threads(numbers[-1])


def _fewest(numbers: Sequence[int], seconds: Sequence[float]) -> int:
    """Of ascending numbers, the last one that was worth taking more than the one before."""
    chosen, least = numbers[0], seconds[0]
    for count, taken in zip(numbers, seconds):
        if taken < _WORTH * least:
            chosen, least = count, taken
    return chosen
