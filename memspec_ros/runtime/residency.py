# SPDX-License-Identifier: Apache-2.0
"""
Which drafts are in memory (MemSpec, Algorithm 2).

At most K drafts hold slots, those being loaded included. Ranked drafts are
prefetched one at a time; to make room, the lowest-scored resident draft outside
the working set goes, never the active one, never one being loaded. A draft that
cannot be loaded is FAILED with its reason and tried again later: decoding goes
on with the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
import logging
import threading

from ..models.drafts import Drafter, DraftKind
from .loader import Loader

_LOG = logging.getLogger(__name__)
_RETRY_FIRST_SEC = 1.0
_RETRY_MOST_SEC = 60.0
_CLEAR_SEC = 2.0
# Until a load has been timed: a modest SD card.
_BYTES_PER_SEC_PRIOR = 80e6
Ranked = Sequence[tuple[str, float]]


class SlotState(IntEnum):
    """State of one draft; values as in DraftResidency.msg."""

    ABSENT = 0
    LOADING = 1
    READY = 2
    FAILED = 3


@dataclass
class ResidencyCounters:
    """Counted since the runtime was opened; see Residency.msg."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    loads: int = 0
    failures: int = 0
    prefetches_issued: int = 0
    prefetches_used: int = 0
    prefetches_late: int = 0
    prefetches_wasted: int = 0


@dataclass
class _Slot:
    kind: DraftKind
    bytes: int
    memory_bytes: int
    state: SlotState = SlotState.ABSENT
    drafter: Drafter | None = None
    score: float = 0.0
    reason: str = ''
    failures: int = 0
    retry_at: float = 0.0
    used: bool = False
    prefetched: bool = False  # loaded ahead of need, as opposed to on demand
    awaited: bool = False
    doomed: bool = False  # being loaded, but no longer wanted


@dataclass(frozen=True)
class DraftView:
    """One draft, for messages and displays."""

    id: str
    state: SlotState
    score: float
    bytes: int
    progress: float
    reason: str
    slot_free: bool


class Residency:
    """
    The draft cache.

    Used by one thread (the worker); ``view`` may be called from any. Slot-free
    drafts are always READY and never count.

    Parameters
    ----------
    kinds: draft id -> (kind, bytes of its file), in the bundle's order
    loader: moves bytes in the background
    capacity: K
    clock: seconds, monotonic
    memory_bytes: draft id -> bytes it takes in memory, where that is not the
        file's size (weights kept in another type)

    """

    def __init__(self, kinds: Mapping[str, tuple[DraftKind, int]], loader: Loader, capacity: int,
                 clock: Callable[[], float], memory_bytes: Mapping[str, int] | None = None):
        if capacity < 0:
            raise ValueError(f'capacity {capacity} is negative')
        self._loader = loader
        self._clock = clock
        self._lock = threading.RLock()
        self._capacity = capacity
        sizes = memory_bytes or {}
        self._slots = {draft: _Slot(kind, size, sizes.get(draft, size))
                       for draft, (kind, size) in kinds.items()}
        self._load_started = 0.0
        self._bytes_per_sec = _BYTES_PER_SEC_PRIOR
        self.counters = ResidencyCounters()
        self._attach_slot_free()

    @property
    def capacity(self) -> int:
        """K: most drafts in memory at a time, loading ones included."""
        return self._capacity

    @property
    def resident(self) -> list[str]:
        """Drafts that hold a slot: READY or LOADING, slot-free ones left out."""
        return [draft for draft, slot in self._slots.items() if self._holds_slot(slot)]

    @property
    def ready(self) -> list[str]:
        """Drafts that can propose now, slot-free ones included."""
        return [draft for draft, slot in self._slots.items() if slot.state is SlotState.READY]

    @property
    def slot_free(self) -> list[str]:
        """Drafts that need no slot: there at any time, whatever K is."""
        return [draft for draft, slot in self._slots.items() if slot.kind.slot_free]

    @property
    def loading(self) -> str | None:
        """The draft being loaded, unless its load was given up."""
        draft = self._loader.loading
        waited_for = draft is not None and self._slots[draft].state is SlotState.LOADING
        return draft if waited_for else None

    def is_ready(self, draft: str) -> bool:
        """Whether ``draft`` can propose now."""
        slot = self._slots.get(draft)
        return slot is not None and slot.state is SlotState.READY

    def drafter(self, draft: str) -> Drafter | None:
        """The drafter of a READY draft, else None."""
        slot = self._slots.get(draft)
        return slot.drafter if slot is not None and slot.state is SlotState.READY else None

    def drafters(self) -> list[Drafter]:
        """All drafters in memory."""
        return [slot.drafter for slot in self._slots.values() if slot.drafter is not None]

    def poll(self) -> bool:
        """Take in a load that has ended; True if anything changed. Never waits."""
        result = self._loader.poll()
        if result is None:
            return self._give_up_stalled()
        with self._lock:
            slot = self._slots[result.draft]
            if slot.state is not SlotState.LOADING:
                return False  # it had stalled, and was given up
            if result.cancelled or slot.doomed:
                slot.state, slot.doomed = SlotState.ABSENT, False
            elif result.error is not None:
                self._fail(result.draft, slot, result.error)
            else:
                self._attach(result.draft, slot, result.tensors)
        return True

    def wait(self, timeout: float) -> None:
        """Block until the load in flight can be polled, at most ``timeout`` seconds."""
        self._loader.wait(timeout)

    def update(self, ranked: Ranked, active: str | None, working_set: int | None = None,
               prefetch: bool = True) -> None:
        """
        Steer the cache towards the top of ``ranked`` (draft, score), best first.

        ``active`` is protected. ``working_set`` limits how many ranked drafts are
        wanted (K by default); ``prefetch`` counts loads as prefetches, as opposed
        to loads on demand. Starts at most one load, and waits for nothing.
        """
        with self._lock:
            for draft, score in ranked:
                self._slots[draft].score = score
            # A draft that failed a moment ago must not keep the next best from its place.
            needing = [draft for draft, _ in ranked if not self._slots[draft].kind.slot_free
                       and self._may_try(self._slots[draft])]
            wanted = needing[:min(self._capacity, working_set or self._capacity)]
            self._attach_slot_free()
            self._note_desired(ranked)
            self._shrink(active, wanted)
            if self._loader.loading is not None:
                return
            for draft in wanted:
                slot = self._slots[draft]
                if slot.state in (SlotState.READY, SlotState.LOADING):
                    continue
                if len(self.resident) >= self._capacity:
                    victim = self._victim(active, wanted)
                    if victim is None:
                        return
                    self._evict(victim)
                self._start(draft, slot, prefetch)
                return

    def note_use(self, draft: str) -> None:
        """Say that ``draft`` has become active."""
        slot = self._slots.get(draft)
        if slot is not None and not slot.used:
            slot.used = True
            self.counters.prefetches_used += slot.prefetched

    def release(self, draft: str) -> None:
        """Evict a draft now, active or not (K = 1 replacement, memory pressure)."""
        with self._lock:
            slot = self._slots[draft]
            if slot.state is SlotState.READY and not slot.kind.slot_free:
                self._evict(draft)

    def set_capacity(self, capacity: int, active: str | None = None) -> None:
        """
        Change K. Drafts too many are evicted, the lowest-scored first.

        The active one goes last, and only if nothing else makes room.
        """
        if capacity < 0:
            raise ValueError(f'capacity {capacity} is negative')
        with self._lock:
            self._capacity = capacity
            self._shrink(active, [])

    def clear(self) -> None:
        """
        Evict everything and wait for the load in flight to be given up (cleanup).

        Forgets what earlier rankings and loads have taught, too.
        A load that storage does not let go of is left behind after 2 s.
        """
        self._loader.cancel()
        self._loader.wait(_CLEAR_SEC)
        self.poll()
        with self._lock:
            for draft, slot in self._slots.items():
                if slot.state is SlotState.LOADING:
                    slot.state, slot.doomed = SlotState.ABSENT, False
                if slot.state is SlotState.READY and not slot.kind.slot_free:
                    self._evict(draft)
                slot.score = 0.0
            self._bytes_per_sec = _BYTES_PER_SEC_PRIOR

    def fail(self, draft: str, reason: str) -> None:
        """Take a draft that misbehaved out of service; it is loaded anew after the back-off."""
        with self._lock:
            slot = self._slots[draft]
            slot.drafter = None
            self._fail(draft, slot, reason)

    def can_load(self, draft: str) -> bool:
        """
        Whether a load of ``draft`` could be started now, if there were a slot.

        Not of one that has failed: no other is given up for another try.
        """
        slot = self._slots[draft]
        return (self._loader.loading is None and not slot.kind.slot_free
                and slot.state is SlotState.ABSENT)

    def estimated_load_sec(self, draft: str) -> float:
        """Seconds a load of ``draft`` takes at the rate of the last load."""
        return self._slots[draft].bytes / self._bytes_per_sec

    def used_bytes(self) -> int:
        """Bytes of drafts loaded or being loaded."""
        return sum(self._slots[draft].memory_bytes for draft in self.resident)

    def view(self) -> list[DraftView]:
        """A snapshot of every draft."""
        with self._lock:
            return [self._view(draft, slot) for draft, slot in self._slots.items()]

    def _view(self, draft: str, slot: _Slot) -> DraftView:
        state, reason = slot.state, slot.reason
        if state is SlotState.LOADING and (stall := self._loader.stall):
            # Between requests nobody polls, and a load that stalls is to be seen all the same.
            state, reason = SlotState.FAILED, stall
        return DraftView(draft, state, slot.score, slot.memory_bytes, self._progress(slot),
                         reason, slot.kind.slot_free)

    def _progress(self, slot: _Slot) -> float:
        if slot.state is SlotState.READY:
            return 1.0
        if slot.state is SlotState.LOADING and slot.bytes:
            return min(1.0, self._loader.bytes_read / slot.bytes)
        return 0.0

    @staticmethod
    def _holds_slot(slot: _Slot) -> bool:
        return not slot.kind.slot_free and slot.state in (SlotState.READY, SlotState.LOADING)

    def _may_try(self, slot: _Slot) -> bool:
        return slot.state is not SlotState.FAILED or self._clock() >= slot.retry_at

    def _note_desired(self, ranked: Ranked) -> None:
        if not ranked:
            return
        slot = self._slots[ranked[0][0]]
        if slot.state is SlotState.READY:
            self.counters.hits += 1
            return
        self.counters.misses += 1
        if slot.state is SlotState.LOADING and not slot.awaited:
            slot.awaited = True
            self.counters.prefetches_late += 1

    def _shrink(self, active: str | None, wanted: Sequence[str]) -> None:
        """Bring residents down to K; beyond it even wanted and active ones have to go."""
        while len(self.resident) > self._capacity:
            victim = self._victim(active, wanted) or self._victim(active, [])
            if victim is None and active is not None and self._capacity == 0:
                slot = self._slots[active]
                evictable = slot.state is SlotState.READY and not slot.kind.slot_free
                victim = active if evictable else None
            if victim is not None:
                self._evict(victim)
                continue
            # Only the draft being loaded is left over: give it up, its slot ends with the load.
            loading = self._loader.loading
            if loading is not None and not self._slots[loading].doomed:
                self._slots[loading].doomed = True
                self._loader.cancel()
            return

    def _victim(self, active: str | None, wanted: Sequence[str]) -> str | None:
        """The lowest-scored READY draft that is neither wanted nor active; ties to the later."""
        candidates = [(slot.score, -index, draft)
                      for index, (draft, slot) in enumerate(self._slots.items())
                      if slot.state is SlotState.READY and not slot.kind.slot_free
                      and draft != active and draft not in wanted]
        return min(candidates)[2] if candidates else None

    def _start(self, draft: str, slot: _Slot, prefetch: bool) -> None:
        slot.state, slot.reason = SlotState.LOADING, ''
        slot.used, slot.awaited, slot.doomed = False, False, False
        slot.prefetched = prefetch
        self.counters.loads += 1
        self.counters.prefetches_issued += prefetch
        self._load_started = self._clock()
        self._loader.start(draft)

    def _attach(self, draft: str, slot: _Slot, tensors) -> None:
        try:
            slot.drafter = slot.kind.attach(tensors)
        except Exception as error:  # noqa: BLE001 (whatever a damaged file does to its kind)
            self._fail(draft, slot, str(error) or type(error).__name__)
            return
        slot.state, slot.reason = SlotState.READY, ''
        elapsed = self._clock() - self._load_started
        if elapsed > 0 and slot.bytes and not slot.kind.slot_free:
            self._bytes_per_sec = slot.bytes / elapsed

    def _attach_slot_free(self) -> None:
        """Slot-free drafts need no load: make those that are new, or failed a while ago."""
        for draft, slot in self._slots.items():
            if slot.kind.slot_free and slot.drafter is None and self._may_try(slot):
                slot.used = False
                self._attach(draft, slot, {})

    def _give_up_stalled(self) -> bool:
        """
        Take a load that does not move for a failed one; True if there was one.

        The loader stays busy until its storage answers: nothing else is loaded
        from there, and its slot's memory is the only one beyond those of K.
        """
        draft = self.loading
        if draft is None or not (reason := self._loader.stall):
            return False
        with self._lock:
            self._loader.cancel()
            self._fail(draft, self._slots[draft], reason)
        return True

    def _fail(self, draft: str, slot: _Slot, reason: str) -> None:
        _LOG.warning('draft %s cannot be used: %s', draft, reason)
        slot.state, slot.reason, slot.doomed = SlotState.FAILED, reason, False
        # The exponent is bounded too: weeks of failures must not end in an overflow.
        delay = _RETRY_FIRST_SEC * 2 ** min(slot.failures, 16)
        slot.retry_at = self._clock() + min(delay, _RETRY_MOST_SEC)
        slot.failures += 1
        self.counters.failures += 1

    def _evict(self, draft: str) -> None:
        slot = self._slots[draft]
        slot.state, slot.drafter = SlotState.ABSENT, None
        self.counters.evictions += 1
        self.counters.prefetches_wasted += slot.prefetched and not slot.used
        if slot.used:
            slot.failures = 0  # it served: a later failure is a first one again
