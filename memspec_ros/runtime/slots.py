# SPDX-License-Identifier: Apache-2.0
"""
Memory that draft files are read into, allocated once and used again.

On the CPU a slot is the draft's memory where its weights are used as they are in
the file, or the staging place of weights that are packed. On a CUDA device
files pass through two pinned chunks on a stream of their own.
"""

from __future__ import annotations

from collections import deque
import contextlib
import mmap
import weakref

import numpy as np
import torch

from ..models.reading import BLOCK_BYTES, CHUNK_BYTES, HostSlot, Slot, whole_blocks

# One free slot is what the next load begins with; more would be memory for nothing.
_KEPT_FREE = 1


class SlotPool:
    """
    Slots for files of at most ``slot_bytes``, on the CPU.

    A slot is free again when the last tensor in it is gone, whoever held it.
    Used by the loader thread; slots may come free on any.
    """

    def __init__(self, slot_bytes: int):
        self._slot_bytes = whole_blocks(slot_bytes)
        # Appending and popping need no lock: tensors may end in the midst of either.
        self._free: deque[mmap.mmap] = deque()
        self._made = 0

    @property
    def allocated(self) -> int:
        """Slots allocated since the pool was made: does not grow while they are used again."""
        return self._made

    @property
    def free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    def give_back(self) -> None:
        """Return the memory of free slots to the system (any thread); the next load takes anew."""
        with contextlib.suppress(IndexError):
            while True:
                self._free.pop()

    def __call__(self, size: int) -> Slot:
        """A slot for a file of ``size`` bytes."""
        needed = whole_blocks(size)
        try:
            memory = self._free.pop()
        except IndexError:
            memory = None
        if memory is None or len(memory) < needed:
            memory = mmap.mmap(-1, max(needed, self._slot_bytes))
            self._made += 1
        elif needed < len(memory) and hasattr(memory, 'madvise'):
            # What a larger file left beyond this one's end.
            start = -(-needed // mmap.PAGESIZE) * mmap.PAGESIZE
            if start < len(memory):
                memory.madvise(mmap.MADV_DONTNEED, start)
        lease = np.frombuffer(memory, np.uint8)
        weakref.finalize(lease, self._give_back, memory).atexit = False
        return HostSlot(lease, size)

    def _give_back(self, memory: mmap.mmap) -> None:
        if len(self._free) < _KEPT_FREE:
            self._free.append(memory)


class DeviceStaging:
    """
    Slots on a CUDA device, filled through two pinned chunks that are allocated once.

    Copies run on a stream of their own beside decoding. ``finish`` waits for
    them on the host: a load has ended when its bytes are there.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)
        # Pinned pages are page-aligned, as direct I/O needs them.
        self.chunks = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
                       for _ in range(2)]
        self.copied = [torch.cuda.Event() for _ in self.chunks]
        assert all(chunk.data_ptr() % BLOCK_BYTES == 0 for chunk in self.chunks)

    def __call__(self, size: int) -> Slot:
        """A slot for a file of ``size`` bytes; one at a time."""
        return _DeviceSlot(self, size)


class _DeviceSlot:
    """One file on its way to the device."""

    def __init__(self, staging: DeviceStaging, size: int):
        self._staging = staging
        self._turn = 0
        with torch.cuda.stream(staging.stream):
            self._buffer = torch.empty(size, dtype=torch.uint8, device=staging.device)

    def window(self, offset, count):
        # The chunk may still be on its way to the device.
        self._staging.copied[self._turn].synchronize()
        return memoryview(self._staging.chunks[self._turn].numpy())[:count]

    def take(self, offset, count):
        staging = self._staging
        with torch.cuda.stream(staging.stream):
            self._buffer[offset:offset + count].copy_(staging.chunks[self._turn][:count],
                                                      non_blocking=True)
            staging.copied[self._turn].record(staging.stream)
        self._turn = 1 - self._turn

    def finish(self):
        for event in self._staging.copied:
            event.synchronize()
        # Freed while decoding still reads it, the memory must not be the next load's at once.
        self._buffer.record_stream(torch.cuda.default_stream(self._staging.device))
        return self._buffer


def slots_for(device: torch.device, slot_bytes: int) -> SlotPool | DeviceStaging:
    """What makes slots on ``device``, each for a file of at most ``slot_bytes``."""
    return DeviceStaging(device) if device.type == 'cuda' else SlotPool(slot_bytes)
