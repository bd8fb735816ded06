# SPDX-License-Identifier: Apache-2.0
"""
What stands in for models, storage and time in a replay.

A target that knows its output from a trace, drafts that propose what the trace
says they would have proposed, a loader: all take the time a cost profile says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from ..decoding.engine import Engine, PREFILL_CHUNK
from ..models.bundle import DraftSpec
from ..models.drafts import Drafter, DraftKind, KINDS
from ..models.drafts.causal_lm import CausalLMDrafter
from ..models.drafts.feature import FeatureDrafter
from ..models.drafts.prompt_lookup import PromptLookupDrafter
from ..models.drafts.shared_layers import JUDGED_ROWS, SharedLayersDrafter
from ..models.kv_cache import RollbackCache
from ..models.state import DecodeState, Proposal
from ..models.target import Target
from ..runtime.loader import LoadResult
from ..runtime.ranking import Ranker, RankingContext
from ..training.trace_store import Trace
from .profile import CostProfile

# What a draft proposes where it was wrong, and what the target says beyond the end of the output.
_WRONG, _BEYOND = -1, -2
_ROWS_WITH_PROPOSAL = {'causal_lm': CausalLMDrafter.rows_with_proposal,
                       'feature': FeatureDrafter.rows_with_proposal,
                       'shared_layers': SharedLayersDrafter.rows_with_proposal}


class VirtualClock:
    """Time that passes only where something takes it; whole nanoseconds, so that it adds up."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> float:
        return self.ns / 1e9

    def advance(self, ms: float) -> None:
        self.ns += _ns(ms)


def _ns(ms: float) -> int:
    return round(ms * 1e6)


class VirtualLoader:
    """A Loader whose loads take ``load_ms``, one at a time."""

    stall = ''

    def __init__(self, clock: VirtualClock, load_ms: Mapping[str, float]):
        self.loading: str | None = None
        self.bytes_read = 0
        self._clock = clock
        self._load_ms = load_ms
        self._due = 0
        self._cancelled = False

    def start(self, draft: str) -> None:
        if self.loading is not None:
            raise RuntimeError(f'{self.loading} is being loaded')
        self.loading, self._cancelled = draft, False
        self._due = self._clock.ns + _ns(self._load_ms[draft])

    def poll(self) -> LoadResult | None:
        if self.loading is None or self._clock.ns < self._due:
            return None
        draft, self.loading = self.loading, None
        return LoadResult(draft, None if self._cancelled else {}, cancelled=self._cancelled)

    def cancel(self) -> None:
        if self.loading is not None:
            self._due, self._cancelled = self._clock.ns, True

    def wait(self, timeout: float | None = None) -> bool:
        if self.loading is not None:
            until = self._due if timeout is None else min(self._due,
                                                          self._clock.ns + _ns(1e3 * timeout))
            self._clock.ns = max(self._clock.ns, until)
        return self.loading is None or self._clock.ns >= self._due

    def close(self) -> None:
        pass

    @property
    def remaining_ms(self) -> float:
        """Until the load in flight ends, 0 for none."""
        return 0.0 if self.loading is None else max(0, self._due - self._clock.ns) / 1e6


class _Choices:
    """Stands for logits of which only the largest matter."""

    def __init__(self, tokens: list[int]):
        self._tokens = tokens

    def argmax(self, dim: int) -> Tensor:
        return torch.tensor(self._tokens)


class _NoCache(RollbackCache):
    """Keys and values that nobody needs."""

    capacity = 1 << 62

    def set_length(self, length: int, group: int | None = None) -> None:
        pass


class Tape:
    """The trace that is replayed. Target and drafts read on when the next turn's is put in."""

    def __init__(self, trace: Trace, hidden_every: int = 0):
        self._every = hidden_every
        self.insert(trace)

    def insert(self, trace: Trace) -> None:
        self.trace = trace
        self.output: list[int] = trace.output_ids.tolist()
        self.tokens: list[int] = [*trace.prompt_ids.tolist(), *self.output]
        self._right: dict[int, list[list[bool]]] = {}
        has_hidden = trace.hidden is not None and self._every and len(trace.hidden)
        self._hidden = (torch.from_numpy(np.asarray(trace.hidden, np.float32)) if has_hidden
                        else None)

    @property
    def has_hidden(self) -> bool:
        return self._hidden is not None

    def right(self, draft: int) -> list[list[bool]]:
        """By position and depth, whether the draft says the output's own token."""
        if draft not in self._right:
            self._right[draft] = (self.trace.ranks[draft] == 1).tolist()
        return self._right[draft]

    def hidden(self, position: int) -> Tensor:
        """The target's hidden state; between those kept, the latest before."""
        row = max(0, position - (len(self.trace.prompt_ids) - 2)) // self._every
        return self._hidden[min(row, len(self._hidden) - 1)]


class _TapeHidden:
    """The tape's hidden states, in place of a buffer of them."""

    def __init__(self, tape: Tape):
        self._tape = tape

    def __getitem__(self, position: int) -> Tensor:
        return self._tape.hidden(position)


class TraceTarget(Target):
    """A target whose answer to the trace's prompt is the trace's output."""

    layers = 1
    vocab_size = 0  # there are no logits

    def __init__(self, tape: Tape, profile: CostProfile, clock: VirtualClock):
        self._tape = tape
        self._profile = profile
        self._clock = clock
        self.device, self.dtype = torch.device('cpu'), torch.float32

    def new_state(self, capacity, depths=frozenset(), stops=frozenset()):
        hidden = {self.layers: _TapeHidden(self._tape)} if self._tape.has_hidden else {}
        return DecodeState(_NoCache(), hidden, capacity)

    def forward(self, state, tokens, last_only=False):
        self._clock.advance(self._profile.verify(len(tokens)))
        following = self._tape.tokens[state.held + 1:state.held + 1 + len(tokens)]
        return _Choices(following + [_BEYOND] * (len(tokens) - len(following)))


class ReplayEngine(Engine):
    """
    The engine over a trace: a prefill computes nothing, an iteration takes its overhead too.

    loader: a prefill also lasts until its load in flight has ended; None: it does not.
    """

    def __init__(self, target: Target, context: int, max_gamma: int, clock: VirtualClock,
                 profile: CostProfile, loader: VirtualLoader | None):
        super().__init__(target, context, max_gamma, frozenset(), clock)
        self._profile = profile
        self._loader = loader

    def prefill(self, prompt: list[int], chunk: int = PREFILL_CHUNK,
                opening: bool = False) -> Iterator[int]:
        # By the row: the same time whether or not the first token comes with the last rows.
        kept = self.state.restart(prompt)
        yield kept
        self.clock.advance((len(prompt) - 1 - kept) * self._profile.prefill_row_ms)
        self.state.hold(len(prompt) - 1)
        if self._loader is not None:
            self._loader.wait()
        yield self.state.held

    def step(self, *args, **kwargs):
        result = super().step(*args, **kwargs)
        # Outside of the step's own duration, as detokenising and scheduling are.
        self.clock.advance(self._profile.overhead_ms)
        return result


class TraceDrafter(Drafter):
    """
    A draft that proposes the output's own tokens where the trace says it was right.

    It lags and catches up as drafters of its kind do; positions that run along
    with a proposal are part of the draft step's cost.
    """

    def __init__(self, spec: DraftSpec, tape: Tape, draft: int, profile: CostProfile,
                 clock: VirtualClock):
        super().__init__()
        self.rows_with_proposal = _ROWS_WITH_PROPOSAL.get(spec.kind, 0)
        # An independent model keeps what it drafted and was accepted; a top over the target's
        # hidden states begins anew at every proposal.
        self._keeps_drafted = spec.kind == 'causal_lm'
        self._tape, self._draft = tape, draft
        self._step_ms, self._row_ms = profile.draft_step(spec), profile.catch_up_row(spec)
        self._clock = clock
        self._drafted = self._judged = 0
        self.judges = not self._keeps_drafted
        self._has_drafted = False

    def lag(self, state: DecodeState) -> int:
        return max(0, state.held - self.cached)

    def judge(self, state: DecodeState) -> tuple[int, int]:
        """
        As shared_layers drafts do: by the rank it gave to every token that it has read past.

        By the bytes that are read: a draft that has not drafted runs its own layers
        and the head, half of a draft step (the lower layers need not be run), one that
        has drafted only the head, a sixth.
        """
        end = self.cached + 1 - state.prompt_length
        start = max(self._judged, end - JUDGED_ROWS)
        if end <= start:
            return 0, 0
        self._clock.advance(self._step_ms / (6 if self._has_drafted else 2))
        self._judged, self._has_drafted = end, False
        right = [row[0] for row in self._tape.right(self._draft)[start:end]]
        return sum(right), len(right)

    def restart(self, kept: int) -> None:
        super().restart(kept)
        self._judged = 0

    def catch_up(self, state: DecodeState, limit: int) -> None:
        count = min(limit, self.lag(state))
        self._clock.advance(count * self._row_ms)
        self.cached += count

    def propose(self, state: DecodeState, gamma: int) -> Proposal:
        if gamma <= 0 or self.lag(state) > self.rows_with_proposal:
            return Proposal([])
        t = len(state.tokens) - state.prompt_length
        right, following = self._tape.right(self._draft)[t], self._tape.output[t:t + gamma]
        tokens = [token if good else _WRONG for good, token in zip(right, following)]
        tokens += [_WRONG] * (gamma - len(tokens))
        self._clock.advance(gamma * self._step_ms)
        self.cached = max(self.cached, state.held)
        self._drafted, self._has_drafted = gamma, True
        return Proposal(tokens)

    def update(self, state: DecodeState, accepted: int) -> None:
        if self._keeps_drafted and self._drafted:
            self.cached = min(self.cached + 1 + min(accepted, self._drafted - 1),
                              len(state.tokens) - 1)
        self._drafted = 0


class LookupDrafter(PromptLookupDrafter):
    """The real prompt lookup, which needs nothing but tokens, at the profile's cost."""

    def __init__(self, spec: DraftSpec, profile: CostProfile, clock: VirtualClock):
        super().__init__(KINDS[spec.kind](spec, None, None, 0).sizes)
        self._step_ms, self._clock = profile.draft_step(spec), clock

    def propose(self, state: DecodeState, gamma: int) -> Proposal:
        proposal = super().propose(state, gamma)
        self._clock.advance(len(proposal.tokens) * self._step_ms)
        return proposal


class TraceKind(DraftKind):
    """A draft of the trace, resident or not."""

    def __init__(self, spec: DraftSpec, make: Callable[[], Drafter]):
        self.slot_free = KINDS[spec.kind].slot_free
        self._make = make

    def attach(self, tensors):
        return self._make()


class TimedRanker(Ranker):
    """A ranker whose rankings take the profile's time."""

    def __init__(self, ranker: Ranker, clock: VirtualClock, rank_ms: float):
        self._ranker, self._clock, self._rank_ms = ranker, clock, rank_ms

    def begin(self, context: RankingContext) -> None:
        self._ranker.begin(context)

    def expected(self, context: RankingContext) -> list[tuple[str, float]]:
        self._clock.advance(self._rank_ms)
        return self._ranker.expected(context)

    def rank(self, context: RankingContext) -> list[tuple[str, float]]:
        self._clock.advance(self._rank_ms)
        return self._ranker.rank(context)
