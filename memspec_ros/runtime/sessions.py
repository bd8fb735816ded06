# SPDX-License-Identifier: Apache-2.0
"""
What the target has read of conversations that are not the running one.

The engine decodes in one set of buffers. When another conversation comes to
them, what they hold is parked here, no longer than it is, and comes back with
its next turn: a second turn is then read from where the first ended.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
import threading

from ..models.state import ParkedState

KEPT_SESSIONS = 16


class SessionStore:
    """
    Parked conversations; the one longest unused goes first.

    ``clear`` may be called by any thread, the rest by the worker.

    Parameters
    ----------
    room: bytes that all of them together may take now
    most: how many are kept

    """

    def __init__(self, room: Callable[[], int] = lambda: 1 << 62, most: int = KEPT_SESSIONS):
        self.room = room
        self.most = most
        self.evictions = 0
        self._lock = threading.Lock()
        self._parked: OrderedDict[str, ParkedState] = OrderedDict()

    def __len__(self) -> int:
        return len(self._parked)

    @property
    def bytes(self) -> int:
        """Bytes of all of them."""
        with self._lock:
            return self._bytes()

    def make_room(self, size: int) -> bool:
        """Whether ``size`` further bytes may be parked, older conversations given up for them."""
        with self._lock:
            room = self.room()
            if size > room:
                return False
            while self._parked and (self._bytes() + size > room
                                    or len(self._parked) >= self.most):
                self._parked.popitem(last=False)
                self.evictions += 1
            return True

    def put(self, session: str, parked: ParkedState) -> None:
        """Keep a conversation, for which there is room."""
        with self._lock:
            self._parked[session] = parked

    def take(self, session: str) -> ParkedState | None:
        """A conversation that is to go on; None if it is not kept."""
        with self._lock:
            return self._parked.pop(session, None)

    def clear(self) -> int:
        """Forget all of them; returns how many bytes they took."""
        with self._lock:
            size = self._bytes()
            self.evictions += len(self._parked)
            self._parked.clear()
            return size

    def _bytes(self) -> int:
        return sum(parked.bytes for parked in self._parked.values())
