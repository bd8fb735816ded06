# SPDX-License-Identifier: Apache-2.0
"""The interface of a draft."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import BundleError, UnsupportedModelError
from ..state import DecodeState, Proposal, TargetRun

if TYPE_CHECKING:
    from ..bundle import Bundle, DraftSpec
    from ..quantized import Matrix
    from ..target import Target


class Drafter(ABC):
    """
    A resident draft: two methods, and how far it lags behind.

    A drafter may hold a cache of its own. It then knows how many committed
    positions the cache covers (``cached``), and catches up before it proposes.
    A lag of at most ``rows_with_proposal`` it makes up while it proposes. One
    that ``copies`` knows by ``match`` where it is of use, and says nothing elsewhere.
    One that ``bridges`` is for when none that was loaded is there. One
    that ``judges`` can say how it would have done where it did not draft.
    ``dropped``: how many of the state's evicted positions it has let go of.
    """

    rows_with_proposal = 0
    copies = False
    bridges = False
    judges = False

    def __init__(self) -> None:
        self.cached = 0
        self.dropped = 0

    @abstractmethod
    def propose(self, state: DecodeState, gamma: int) -> Proposal:
        """
        Propose at most ``gamma`` tokens to follow ``state.tokens``.

        Each is what ``state.choose`` makes of the draft's logits, if it has any. May
        propose fewer, or none where it lags too far behind. Leaves the
        committed part of ``state`` as it was.
        """

    def match(self, state: DecodeState) -> int:
        """
        How many of the last tokens stood in the text before; 0 for drafts that do not copy.

        A long match says that what followed it then is likely to follow now.
        """
        return 0

    def step_bytes(self, state: DecodeState) -> int:
        """Bytes that drafting a token on ``state`` reads; 0 for what has no weights."""
        return 0

    def update(self, state: DecodeState, accepted: int) -> None:
        """Learn that the first ``accepted`` tokens of the last proposal were accepted."""

    def lag(self, state: DecodeState) -> int:
        """Committed positions that ``catch_up`` has to run before the next proposal."""
        return 0

    def catch_up(self, state: DecodeState, limit: int) -> None:
        """Bring the cache up to date with at most ``limit`` committed positions."""

    def judge(self, state: DecodeState) -> tuple[int, int]:
        """
        (right, judged) of the answer's tokens that it has read since it was last asked.

        Right is a token that was its first choice after the true ones before it. It
        runs nothing that it has not run: tokens that it lags behind are not judged
        yet. (0, 0) for drafts that do not judge.
        """
        return 0, 0

    def begin(self, state: DecodeState) -> None:
        """Begin the prompt that ``state`` has begun, with what it has kept."""
        self.restart(state.held)
        self.dropped = state.dropped

    def follow(self, state: DecodeState) -> None:
        """Let go of the positions that ``state`` has evicted since the last call."""
        if self.dropped != state.dropped:
            self.cached = self.evict(state.eviction.sinks, state.dropped - self.dropped)
            self.dropped = state.dropped

    def evict(self, first: int, count: int) -> int:
        """
        Let go of ``count`` positions from ``first`` on: those behind move up.

        Returns how many positions the cache covers then. By default what stood
        behind them is caught up with again.
        """
        return min(self.cached, first)

    def restart(self, kept: int) -> None:
        """Begin a new prompt, none of it evicted, that shares its first ``kept`` positions."""
        self.cached = min(self.cached, kept)
        self.dropped = 0


class DraftKind(ABC):
    """
    One draft of a bundle, resident or not.

    Attributes
    ----------
    slot_free: needs no loaded bytes, hence no residency; never counts against K
    depths: depths of target hidden states it reads
    stops: depths at which it has the target's passes pause, and go on

    """

    @classmethod
    def check_options(cls, spec: DraftSpec) -> None:
        """Refuse options the kind does not have; BundleError naming the first."""
        for name in spec.options:
            if name not in cls.option_names:
                raise BundleError(f'draft {spec.id!r}: unknown key {name!r} in options')

    slot_free = False
    depths: frozenset[int] = frozenset()
    stops: frozenset[int] = frozenset()
    # Keys that the manifest may give under "options".
    option_names: frozenset[str] = frozenset()

    @abstractmethod
    def __init__(self, spec: DraftSpec, bundle: Bundle, target: Target, capacity: int):
        """
        Check the draft against the target and prepare what every load shares.

        ``capacity``: positions that caches must hold (context and gamma).
        Raises MemSpecError naming the draft where the two do not fit together.
        """

    def prepare(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor | Matrix]:
        """
        The loaded ``tensors`` as decoding wants them, so far as that takes time.

        Called beside decoding, on the thread that loads.
        """
        return tensors

    @staticmethod
    def is_matrix(name: str) -> bool:
        """Whether ``prepare`` packs the tensor of that name, if it is a matrix."""
        return False

    @abstractmethod
    def attach(self, tensors: Mapping[str, Tensor | Matrix]) -> Drafter:
        """
        Make a drafter of the loaded ``tensors`` (empty for slot-free kinds).

        Decoding waits for it; it is short for what has been prepared.
        """

    def rollout_ranks(self, tensors: Mapping[str, Tensor], run: TargetRun, first: int,
                      gamma: int, top: int) -> Tensor:
        """
        Ranks the draft gives to the tokens of ``run`` from ``first`` (at least 1) on.

        uint8 [len(run.tokens) - first, gamma]: element [t, j] is the rank (1:
        first, 0: beyond ``top`` or beyond the end) of ``run.tokens[first + t +
        j]`` where the draft has begun to draft from the committed
        ``run.tokens[:first + t]`` and the ``j`` tokens between are the true
        ones. Rank 1 is what ``propose`` says: a kind whose ``propose`` changes
        has to change this too. The kind's capacity covers the run.
        """
        raise UnsupportedModelError(f'{type(self).__name__} records no acceptance traces')


def token_ranks(logits: Tensor, wanted: Sequence[int], top: int) -> Tensor:
    """
    Rank of ``wanted[i]`` in row i of ``logits`` [N, V]: uint8 [N], 0 beyond ``top``.

    Equal logits rank by index, as argmax has it. A wanted token outside 0..V-1
    (-1, say) is none the draft can propose: 0.
    """
    size = logits.shape[1]
    tokens = torch.tensor(wanted, dtype=torch.long, device=logits.device)
    places = tokens.clamp(0, size - 1)[:, None]
    scores = logits.gather(1, places)
    before = torch.arange(size, device=logits.device) < places
    ranks = 1 + ((logits > scores) | ((logits == scores) & before)).sum(1)
    outside = (tokens < 0) | (tokens >= size) | (ranks > top)
    return ranks.masked_fill(outside, 0).to(torch.uint8)


def rank_windows(ranks: Tensor, gamma: int) -> Tensor:
    """
    Windows [T, gamma] of ranks [T], 0 beyond the end.

    For drafts whose rank of a token does not depend on where they began.
    """
    return torch.cat([ranks, ranks.new_zeros(gamma - 1)]).unfold(0, gamma, 1).contiguous()
