# SPDX-License-Identifier: Apache-2.0
"""
What a decode has committed so far: tokens, keys and values, hidden states.

These live on the lowest floor because the target writes them and every draft
reads them; the decoding floor owns and advances them.

The invariant (between iterations): every layer group of the target's cache and
every hidden-state buffer holds ``len(tokens) - 1`` positions; the last token
has been emitted but not yet run. Drafting through shared lower layers advances
their group alone, beyond that length; verification brings all groups back to
the committed length. What drafting has run of the tokens to be verified
(``DecodeState.ahead``) verification does not run again. Rolling back sets
lengths, and copies nothing; where a branch of drafted tokens was accepted, its
row moves up behind those before it.

Where old positions are evicted, cache, buffers and drafts count the positions
that are left, as if the text were shorter: ``held``, ``last`` and what stands
there (``read``) are of these; ``tokens`` is always the whole text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .kv_cache import Turn


def choose_most_probable(state: DecodeState, logits: Tensor, drafted: Sequence[int],
                         ids: Tensor | None = None) -> tuple[int, None]:
    """Choose as ``DecodeState.choose`` says, the most probable token."""
    best = int(logits.argmax())
    return best if ids is None else int(ids[best]), None


class DecodeState:
    """
    Committed tokens with the target's cache and hidden states for them.

    Attributes
    ----------
    tokens: committed token ids, the prompt first
    prompt_length: how many of them are the prompt
    kv: the target's cache (a KVCache, or what a generic target keeps instead)
    hidden: depth -> Tensor [capacity, H], the target's hidden states after that
        many layers at committed positions. A depth equal to the number of
        layers is the last layer's output before the final norm.
    ahead: tokens after the held positions that were run through lower layers
        already, each group of the cache as far as its length says
    passing: depth -> Tensor [T, H], their hidden states where groups of layers meet
    chooser: what ``choose`` does
    branching: how proposals may branch, None for not at all
    eviction: how room is made when it runs out, None for not at all
    dropped: positions that were evicted for it, behind the first ``eviction.sinks``

    """

    def __init__(self, kv, hidden: dict[int, Tensor], capacity: int,
                 eviction: Eviction | None = None):
        self.kv = kv
        self.hidden = hidden
        self.capacity = capacity
        self.eviction = eviction
        self.dropped = 0
        self.tokens: list[int] = []
        self.prompt_length = 0
        self.held = 0
        self.ahead: list[int] = []
        self.passing: dict[int, Tensor] = {}
        self.chooser: Callable[..., tuple[int, Tensor | None] | None] = choose_most_probable
        self.branching: Branching | None = None

    @property
    def output(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[self.prompt_length:]

    @property
    def last(self) -> int:
        """Position of the last token among those that are left."""
        return len(self.tokens) - 1 - self.dropped

    def read(self, start: int, end: int) -> list[int]:
        """Tokens at positions from ``start`` up to ``end`` among those that are left."""
        if not self.dropped:
            return self.tokens[start:end]
        edge = self.eviction.sinks
        return (self.tokens[start:min(end, edge)]
                + self.tokens[max(start, edge) + self.dropped:end + self.dropped])

    @property
    def reach(self) -> int:
        """Most rows that may run together after the held positions; drafting keeps within it."""
        reach = self.kv.reach(self.held)
        return min(reach, self.eviction.limit - self.held) if self.eviction else reach

    def make_room(self) -> None:
        """
        Drop the oldest positions but the sinks, where no further row has room.

        When that is depends on positions alone. To be called when all held is committed.
        """
        if self.eviction is None or self.held < self.eviction.limit:
            return
        first, count = self.eviction.sinks, self.eviction.stride
        self.kv.drop(first, count, self.held, self.eviction.turn)
        for states in self.hidden.values():
            states[first:self.held - count] = states[first + count:self.held].clone()
        self.held -= count
        self.dropped += count

    @property
    def last_hidden(self) -> Tensor | None:
        """Hidden state [H] of the last position run, after the deepest kept layer, or None."""
        if not self.hidden or not self.held:
            return None
        return self.hidden[max(self.hidden)][self.held - 1]

    def choose(self, logits: Tensor, drafted: Sequence[int],
               ids: Tensor | None = None) -> tuple[int, Tensor | None] | None:
        """
        Choose a draft's next token, after the committed tokens and ``drafted``.

        logits [N] over a vocabulary of the draft's own: token ``ids[i]`` has logit
        i (None: token i). Returns the token and the distribution q [V] it was
        drawn from (None: one-hot), or None where the draft is to propose no more.
        """
        return self.chooser(self, logits, drafted, ids)

    def keep(self, rows: Sequence[int]) -> None:
        """
        Of the rows run after the held positions, bring ``rows`` to the front (ascending).

        What it takes to hold a path through a tree; ``hold`` then says how far.
        """
        first = next((place for place, row in enumerate(rows) if place != row), len(rows))
        if first == len(rows):
            return
        start = self.held + first
        moved = [row - first for row in rows[first:]]
        self.kv.move(start, moved)
        for states in self.hidden.values():
            source = torch.tensor(moved, device=states.device) + start
            states[start:start + len(moved)] = states[source]

    def hold(self, length: int) -> None:
        """Set the committed length of cache and hidden states (commit or rollback)."""
        if not length:
            self.dropped = 0
        self.kv.set_length(length)
        self.held = length
        self.ahead, self.passing = [], {}

    @property
    def held_bytes(self) -> int:
        """Bytes of what is held: what a copy of it would take."""
        return sum(view.nbytes for view in self._views(self.held))

    @torch.inference_mode()
    def park(self) -> ParkedState:
        """A copy of what is held, no longer than that: for a conversation that is to go on."""
        return ParkedState(self.tokens[:self.held + self.dropped],
                           [view.clone() for view in self._views(self.held)],
                           self.dropped, self.kv.mark)

    @torch.inference_mode()
    def resume(self, parked: ParkedState) -> int:
        """
        Hold what was parked; whatever was held before is gone.

        Returns how many leading positions the two have in common: what drafts
        keep of those stays valid.
        """
        mine, count = self.read(0, self.held), len(parked.tokens) - parked.dropped
        self.dropped, self.tokens = parked.dropped, list(parked.tokens)
        self.prompt_length = len(parked.tokens)
        self.kv.arrange(count, parked.mark)
        for view, kept in zip(self._views(count), parked.tensors):
            view.copy_(kept)
        self.hold(count)
        return next((i for i, (one, other) in enumerate(zip(mine, self.read(0, count)))
                     if one != other), min(len(mine), count))

    def _views(self, length: int) -> list[Tensor]:
        return self.kv.views(length) + [self.hidden[depth][:length]
                                        for depth in sorted(self.hidden)]

    def restart(self, prompt: list[int]) -> int:
        """
        Begin a new prompt, keeping what it has in common with the tokens held.

        Returns the number of leading positions whose keys, values and hidden
        states stay valid: a second turn of a conversation, or a shared system
        prompt, is not evaluated again. Behind what was evicted, or rounded, there is
        no way back but to the beginning.
        """
        kept = 0
        limit = min(self.held + self.dropped, len(prompt) - 1)
        while kept < limit and self.tokens[kept] == prompt[kept]:
            kept += 1
        floor = max(self.kv.floor, self.eviction.limit - self.eviction.stride
                    if self.dropped else 0)
        if kept - self.dropped < floor:
            kept = self.dropped = 0
        self.tokens = list(prompt)
        self.prompt_length = len(prompt)
        self.hold(kept - self.dropped)
        return kept


@dataclass(frozen=True)
class ParkedState:
    """
    What a DecodeState held for ``tokens``: keys, values, hidden states.

    dropped: positions evicted before; mark: the cache's.
    """

    tokens: list[int]
    tensors: list[Tensor]
    dropped: int = 0
    mark: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of it."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class Eviction:
    """
    How room is made: with ``limit`` positions held, ``stride`` go, behind the first ``sinks``.

    turn: brings keys to where they stand then.
    """

    limit: int
    sinks: int
    stride: int
    turn: Turn


@dataclass(frozen=True)
class TargetRun:
    """
    One pass of the target over a prompt and an output that are given (teacher-forced).

    tokens: prompt and output. hidden: depth -> Tensor [len(tokens), H], the
    target's hidden states after that many layers, for every depth that drafts
    read and after the last layer (before the final norm).
    """

    tokens: list[int]
    hidden: dict[int, Tensor]


@dataclass(frozen=True)
class Branching:
    """
    How proposals may branch.

    most: further tokens to verify beside the chain. least: probability of being
    right, in the draft's opinion, from which on one of them pays for its row.
    """

    most: int
    least: float = 0.0


@dataclass(frozen=True)
class Proposal:
    """
    Tokens a draft proposes, and the distributions they were drawn from.

    tokens: a chain. ``probs`` [len(tokens), V] float32, or None for one-hot (a
    greedy draft, an n-gram): verification uses that q and nothing else.
    branches: what stands beside the chain, (row, token) -> probability of being
    right: the token follows row ``row`` of those to verify (0: the last committed
    token, then the chain, then the branches in their order). A draft's own are
    alternatives to tokens of its chain, which nothing is drafted after.
    """

    tokens: list[int]
    probs: Tensor | None = None
    branches: Mapping[tuple[int, int], float] = field(default_factory=dict)

    @classmethod
    def of(cls, choices: Sequence[tuple[int, Tensor | None]],
           branches: Mapping[tuple[int, int], float] | None = None) -> Proposal:
        """Put together what ``DecodeState.choose`` returned, token by token, and branches."""
        rows = [q for _, q in choices if q is not None]
        return cls([token for token, _ in choices], torch.stack(rows) if rows else None,
                   branches or {})
