# SPDX-License-Identifier: Apache-2.0
"""
Decoding without a model: the real controller over acceptance traces, on a virtual clock.

Controller, engine, residency, rankers and policies are those that a node runs.
Beneath them, a target that knows its output from the trace, drafts that propose
what the trace says they would have proposed, and a loader, all of which take
the time that a cost profile says. So any policy, K, N, draft length and machine
is tried token for token, in milliseconds, and twice with the same result.

A ranker of hidden states is shown the latest one that the trace holds at or
before a boundary: exact where traces were made with ``--hidden-every 1``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from ..decoding.draft_length import DraftLength
from ..decoding.stats import StepRecord
from ..models.bundle import Bundle, DraftSpec
from ..models.drafts import Drafter, KINDS
from ..models.errors import InvalidRequestError, MemSpecError
from ..runtime.controller import Controller
from ..runtime.policies import Policy
from ..runtime.ranking import make_ranker, Ranker, RankingContext
from ..runtime.requests import Finish, PreparedRequest
from ..runtime.residency import Residency
from ..runtime.settings import Settings
from ..training.trace_store import Trace, TraceHeader
from .profile import CostProfile
from .source import Outcome
from .virtual import (
    LookupDrafter,
    ReplayEngine,
    Tape,
    TimedRanker,
    TraceDrafter,
    TraceKind,
    TraceTarget,
    VirtualClock,
    VirtualLoader,
)


@dataclass(frozen=True)
class Scenario:
    """
    How traces are replayed.

    cache_capacity: K. interval: N. gamma: tokens drafted (at most, where
    adaptive). max_new_tokens: answers are cut there. first_load_counts: decoding
    begins while the first draft loads, as in the node; else the clock of decoding
    starts when it is there, as in the paper. copy: as in Settings.
    """

    profile: CostProfile
    cache_capacity: int = 2
    interval: int = 4
    gamma: int = 4
    max_new_tokens: int = 128
    adaptive: bool = False
    first_load_counts: bool = False
    copy: bool = False

    def __post_init__(self) -> None:
        for name, least in (('cache_capacity', 0), ('interval', 1), ('gamma', 0),
                            ('max_new_tokens', 1)):
            if getattr(self, name) < least:
                raise InvalidRequestError(
                    f'{name} is {getattr(self, name)}, expected at least {least}')


class NoText:
    """In place of a tokenizer, where nothing that is run looks at text."""

    size, eos_id = 0, None

    def decode(self, ids: Sequence[int]) -> str:
        return ''


class _ManifestRanker(Ranker):
    """Ranks in the bundle's order: for policies that do not ask."""

    def __init__(self, drafts: Sequence[DraftSpec]):
        self._ranked = [(spec.id, 1.0 / (2 + index)) for index, spec in enumerate(drafts)]

    def expected(self, context: RankingContext) -> list[tuple[str, float]]:
        return list(self._ranked)

    def rank(self, context: RankingContext) -> list[tuple[str, float]]:
        return list(self._ranked)


class _Shape:
    """What rankers check of a target, without one."""

    device, hidden_before_norm = torch.device('cpu'), True

    def __init__(self, hidden_size: int):
        self.hidden_size = hidden_size


def open_ranker(bundle: Bundle, drafts: Sequence[DraftSpec], traces: Sequence[Trace]) -> Ranker:
    """The bundle's ranker, to be asked about ``traces``; raises BundleError."""
    hidden = next((trace.hidden for trace in traces if trace.hidden is not None), None)
    if bundle.ranker.kind == 'hidden' and hidden is None:
        raise InvalidRequestError('the ranker looks at hidden states and the traces hold none; '
                                  'make them with --hidden-every')
    width = 0 if hidden is None else hidden.shape[1]
    return make_ranker(bundle.ranker, drafts, bundle, _Shape(width))


def take_per_domain(traces: Iterable[Trace], count: int) -> list[Trace]:
    """The first ``count`` traces of every domain, 0 for all."""
    taken: dict[str, int] = {}
    chosen = []
    for trace in traces:
        taken[trace.domain] = taken.get(trace.domain, 0) + 1
        if not count or taken[trace.domain] <= count:
            chosen.append(trace)
    return chosen


class World:
    """
    The turns of a conversation (most have one) with everything that runs on them, as new.

    What an oracle may look at that a policy is not shown: the trace of the turn,
    the clock, the loader and who is READY.
    """

    def __init__(self, header: TraceHeader, traces: Sequence[Trace], drafts: Sequence[DraftSpec],
                 scenario: Scenario, ranker: Ranker, tokenizer):
        self.header, self.drafts, self.scenario = header, drafts, scenario
        self._traces = traces
        profile, gamma = scenario.profile, scenario.gamma
        self.clock = VirtualClock()
        self.tape = Tape(traces[0], header.hidden_every)
        self.limit, self.stop_ids = _end_of(header, traces[0], scenario.max_new_tokens)
        self.load_ms = {spec.id: profile.load(spec, gamma) for spec in drafts
                        if not KINDS[spec.kind].slot_free}
        self.loader = VirtualLoader(self.clock, self.load_ms)
        target = TraceTarget(self.tape, profile, self.clock)
        # Wide enough that it is the answer's limit that ends it, as where contexts are long.
        context = (max(len(trace.prompt_ids) for trace in traces) + scenario.max_new_tokens
                   + gamma + 1)
        self.engine = ReplayEngine(target, context, gamma, self.clock, profile,
                                   None if scenario.first_load_counts else self.loader)
        self.kinds = {spec.id: TraceKind(spec, self._maker(spec)) for spec in drafts}
        self.residency = Residency({spec.id: (self.kinds[spec.id], spec.bytes or 1)
                                    for spec in drafts} if gamma else {},
                                   self.loader, scenario.cache_capacity, self.clock)
        self.draft_length = DraftLength(gamma, scenario.adaptive)
        for rows in range(1, gamma + 2):  # as a runtime does when it warms up
            self.draft_length.calibrate(rows, profile.verify(rows) / 1e3)
        self.ranker = TimedRanker(ranker, self.clock, profile.rank_ms)
        self._tokenizer = tokenizer

    @property
    def trace(self) -> Trace:
        """Of the turn that is being answered."""
        return self.tape.trace

    @property
    def position(self) -> int:
        """Tokens of the output that are committed."""
        state = self.engine.state
        return max(0, len(state.tokens) - len(self.trace.prompt_ids))

    def run(self, policy: Policy) -> list[Outcome]:
        """Answer turn after turn; once only."""
        scenario = self.scenario
        settings = Settings(scenario.cache_capacity, scenario.interval, bool(scenario.gamma),
                            scenario.copy)
        controller = Controller(self.engine, self._tokenizer, self.residency, policy,
                                self.draft_length, settings, self.stop_ids)
        outcomes = []
        for trace in self._traces:
            self.tape.insert(trace)
            self.limit, self.stop_ids = _end_of(self.header, trace, scenario.max_new_tokens)
            controller.stop_ids = self.stop_ids
            outcomes.append(self._answer(controller, trace))
        return outcomes

    def _answer(self, controller: Controller, trace: Trace) -> Outcome:
        request = PreparedRequest(trace.prompt_ids.tolist(), trace.prompt, self.limit,
                                  accepted_at=self.clock())
        chunks = list(controller.generate(request))
        last = chunks[-1]
        if last.finish not in (Finish.STOP, Finish.LENGTH):
            raise MemSpecError(f'replaying {trace.key}: {last.message or last.finish.value}')
        ids = [token for chunk in chunks for token in chunk.token_ids]
        if ids != trace.output_ids.tolist()[:self.limit]:
            raise MemSpecError(f'replaying {trace.key} gave another output')
        return Outcome(trace.key, trace.domain, ids,
                       [chunk.step for chunk in chunks if chunk.step], last.stats)

    def _maker(self, spec: DraftSpec) -> Callable[[], Drafter]:
        profile = self.scenario.profile
        if KINDS[spec.kind].slot_free:
            return lambda: LookupDrafter(spec, profile, self.clock)
        draft = self.header.drafts.index(spec.id)
        return lambda: TraceDrafter(spec, self.tape, draft, profile, self.clock)


def _end_of(header: TraceHeader, trace: Trace, max_new_tokens: int) -> tuple[int, frozenset[int]]:
    """
    (most tokens, stop ids) with which an answer ends as the trace does.

    A trace that is shorter than it might be ended with a stop token, and drafts
    did not know it: they draft beyond.
    """
    output, limit = trace.output_ids.tolist(), min(max_new_tokens, header.max_new_tokens)
    if not output:
        raise InvalidRequestError(f'trace {trace.key} has no output')
    if len(output) >= limit or output[-1] in output[:-1]:
        return min(limit, len(output)), frozenset()
    return limit, frozenset(output[-1:])


PolicyMaker = Callable[[World], Policy]


class Replayer:
    """
    Replays traces of the given drafts.

    ``drafts``: those of the traces that may be used, as the bundle describes
    them. ``ranker`` is asked by the policies that rank; it sees text where there
    is a ``tokenizer``. Raises InvalidRequestError where traces and drafts do not
    belong together, or the traces are not as deep as ``gamma``.
    """

    def __init__(self, header: TraceHeader, drafts: Sequence[DraftSpec], scenario: Scenario,
                 ranker: Ranker | None = None, tokenizer=None):
        for spec in drafts:
            if spec.id not in header.drafts:
                raise InvalidRequestError(f'the traces hold no draft {spec.id!r}; they hold: '
                                          f'{", ".join(header.drafts)}')
        if scenario.gamma > header.gamma:
            raise InvalidRequestError(f'drafting {scenario.gamma} tokens: the traces hold '
                                      f'{header.gamma}; make them with a larger --gamma')
        self.header, self.drafts, self.scenario = header, list(drafts), scenario
        self._ranker = ranker or _ManifestRanker(drafts)
        self._tokenizer = tokenizer or NoText()

    def world(self, *traces: Trace) -> World:
        """Everything as new: no draft in memory, nothing learned."""
        return World(self.header, traces, self.drafts, self.scenario, self._ranker,
                     self._tokenizer)

    def run(self, trace: Trace, make: PolicyMaker) -> Outcome:
        """Replay ``trace`` under a new policy."""
        return self.converse([trace], make)[0]

    def converse(self, traces: Sequence[Trace], make: PolicyMaker) -> list[Outcome]:
        """
        Replay the turns of a conversation under a new policy.

        Drafts stay in memory from turn to turn, and so does what a turn's prompt
        has in common with the text before it.
        """
        world = self.world(*traces)
        return world.run(make(world))

    def follow(self, trace: Trace, decisions: Iterable[tuple[str, int]]) -> list[StepRecord]:
        """
        Take the (draft, tokens drafted) of another run, '' and 0 for none, step by step.

        The steps up to the end of the decisions or of the trace.
        """
        world = self.world(trace)
        engine, prompt = world.engine, trace.prompt_ids.tolist()
        for _ in engine.prefill(prompt):
            pass
        drafters = {spec.id: world.kinds[spec.id].attach({}) for spec in self.drafts}
        steps, done = [], 0
        for draft, drafted in decisions:
            drafter = drafters.get(draft)
            if drafter is not None:
                drafter.catch_up(engine.state, len(engine.state.tokens))
            tokens, step = engine.step(drafter, drafted, world.limit - done, world.stop_ids)
            step.draft = draft
            steps.append(step)
            done += len(tokens)
            if done >= world.limit or tokens[-1] in world.stop_ids:
                break
        return steps
