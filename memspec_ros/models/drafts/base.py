# SPDX-License-Identifier: Apache-2.0
"""The interface of a draft."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from ..errors import BundleError
from ..state import DecodeState, Proposal

if TYPE_CHECKING:
    from ..bundle import Bundle, DraftSpec
    from ..target import Target


class Drafter(ABC):
    """
    A resident draft: two methods, and how far it lags behind.

    A drafter may hold a cache of its own. It then knows how many committed
    positions the cache covers (``cached``), and catches up before it proposes.
    A lag of at most ``rows_with_proposal`` it makes up while it proposes.
    """

    rows_with_proposal = 0

    def __init__(self) -> None:
        self.cached = 0

    @abstractmethod
    def propose(self, state: DecodeState, gamma: int) -> Proposal:
        """
        Propose at most ``gamma`` tokens to follow ``state.tokens``.

        May propose fewer, or none where it lags too far behind. Leaves the
        committed part of ``state`` as it was.
        """

    def update(self, state: DecodeState, accepted: int) -> None:
        """Learn that the first ``accepted`` tokens of the last proposal were accepted."""

    def lag(self, state: DecodeState) -> int:
        """Committed positions that ``catch_up`` has to run before the next proposal."""
        return 0

    def catch_up(self, state: DecodeState, limit: int) -> None:
        """Bring the cache up to date with at most ``limit`` committed positions."""

    def restart(self, kept: int) -> None:
        """Begin a new prompt that shares its first ``kept`` positions with the last."""
        self.cached = min(self.cached, kept)


class DraftKind(ABC):
    """
    One draft of a bundle, resident or not.

    Attributes
    ----------
    slot_free: needs no loaded bytes, hence no residency; never counts against K
    depths: depths of target hidden states it reads

    """

    @classmethod
    def check_options(cls, spec: DraftSpec) -> None:
        """Refuse options the kind does not have; BundleError naming the first."""
        for name in spec.options:
            if name not in cls.option_names:
                raise BundleError(f'draft {spec.id!r}: unknown key {name!r} in options')

    slot_free = False
    depths: frozenset[int] = frozenset()
    # Keys that the manifest may give under "options".
    option_names: frozenset[str] = frozenset()

    @abstractmethod
    def __init__(self, spec: DraftSpec, bundle: Bundle, target: Target, capacity: int):
        """
        Check the draft against the target and prepare what every load shares.

        ``capacity``: positions that caches must hold (context and gamma).
        Raises MemSpecError naming the draft where the two do not fit together.
        """

    @abstractmethod
    def attach(self, tensors: Mapping[str, Tensor]) -> Drafter:
        """Make a drafter of the loaded ``tensors`` (empty for slot-free kinds)."""
