# SPDX-License-Identifier: Apache-2.0
"""
The MemSpec controller (Algorithm 3): rank, prefetch, decode with the best draft there is.

Every N iterations the policy ranks the drafts, the residency steers towards the
ranking in the background, and the best-ranked draft that is READY goes on.
Nothing here ever waits for a load, unless the policy asks for just that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
import logging

from ..decoding.draft_length import DraftLength
from ..decoding.engine import CATCH_UP_ROWS, DraftFailure, Engine
from ..decoding.output import OutputStream
from ..decoding.stats import GenerationStats, StepRecord
from ..decoding.verification import agreement
from ..models.tokenizer import Tokenizer
from .drafting import Drafting, Way
from .memory_guard import Limits
from .policies import Plan, Policy
from .ranking import Acceptance, RankingContext
from .requests import Chunk, Finish, PreparedRequest
from .residency import Residency
from .sessions import SessionStore

_LOG = logging.getLogger(__name__)
# Recent output that a ranker sees, in tokens.
RECENT_TOKENS = 32
# Iterations kept for windowed figures.
KEPT_STEPS = 1024
# Who waits for a load looks at cancellation and deadline this often, in seconds.
_WAIT_SLICE_SEC = 0.02


@dataclass
class Settings:
    """
    What may change while the controller runs; read at interval boundaries.

    cache_capacity: K. scheduling_interval: N. speculate: False decodes plainly.
    copy: where the last tokens stood in the text before, copy what followed
    instead of drafting, if that promises more tokens per second. self_speculation:
    while no draft is READY that had to be loaded, the target drafts for itself, if
    the bundle says how and it pays. merge: verify what a
    second draft proposes, or what would be copied, in one tree with what the active
    draft does, likewise. verification: how
    drafted tokens of a request that samples are judged (decoding.sampler). min_confidence:
    a draft less sure of its next token than that proposes no more.
    wait_for_first_load: decode only when the first draft is there, as in the paper
    (benchmarks; the wait counts as part of the prefill).
    """

    cache_capacity: int = 2
    scheduling_interval: int = 4
    speculate: bool = True
    copy: bool = True
    self_speculation: bool = False
    merge: bool = False
    verification: str = 'coupled'
    min_confidence: float = 0.0
    wait_for_first_load: bool = False


@dataclass
class _Turn:
    """The state of one request while it runs."""

    request: PreparedRequest
    cancelled: Callable[[], bool]
    context: RankingContext
    stats: GenerationStats
    output: OutputStream
    started: float
    loads_before: int
    evictions_before: int
    plan: Plan | None = None
    # Iterations that came before the intervals began: one that ends a prefill.
    opened: int = 0
    active: str = ''
    previous: str = ''
    warming: str = ''
    # What other drafts proposed (Plan.probe), and after how many output tokens.
    probes: dict[str, list[int]] = field(default_factory=dict)
    probed_at: int = 0
    t_predict: float = 0.0
    t_warm: float = 0.0
    t_wait: float = 0.0
    first_token_at: float | None = None
    last_token_at: float | None = None


class Controller:
    """
    Answers one request at a time over an Engine and a Residency.

    Used by one thread; ``settings`` may be changed by others, and ``limits`` be replaced:
    what memory allows at present, below what the settings ask for.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, residency: Residency,
                 policy: Policy, draft_length: DraftLength, settings: Settings,
                 stop_ids: frozenset[int]):
        self.engine = engine
        self.tokenizer = tokenizer
        self.residency = residency
        self.policy = policy
        self.draft_length = draft_length
        self.settings = settings
        self.stop_ids = stop_ids
        self.limits = Limits()
        self.drafting = Drafting(engine, residency)
        self.sessions = SessionStore()
        # Whose conversation the engine's buffers hold.
        self._session = ''
        self.clock = engine.clock
        self.active = ''
        self.desired = ''
        # (clock, step), for whoever shows windowed figures; appended by one thread, read by any.
        self.recent_steps: deque[tuple[float, StepRecord]] = deque(maxlen=KEPT_STEPS)

    def generate(self, request: PreparedRequest,
                 cancelled: Callable[[], bool] = lambda: False) -> Iterator[Chunk]:
        """
        Answer a request; the last chunk says how it ended.

        ``cancelled`` and the deadline are looked at every iteration and between
        the chunks of the prefill. Faults of the engine end the request
        (OUT_OF_MEMORY, INTERNAL), not the controller.
        """
        turn = self._turn(request, cancelled)
        seq = 0
        finish, message = None, ''
        try:
            # Looked at first: a request that was given up in the queue must not cost the next one
            # its cached prompt.
            finish = self._interruption(turn)
            if finish is None:
                self._begin(turn)
                finish = self._prefill(turn)
            before = self.clock()
            turn.stats.prefill_sec = before - turn.started
            while finish is None:
                finish = self._interruption(turn)
                if finish is not None:
                    break
                step, chunk = self._iterate(turn, seq)
                finish = self._end(turn, chunk)
                now = self.clock()
                between = (now - before - step.duration - turn.t_predict - turn.t_warm
                           - turn.t_wait)
                self._count(turn, step, between, now)
                before = now
                if finish is None:
                    yield chunk
                else:
                    yield self._last(turn, finish, '', chunk)
                    return
                seq += 1
        except Exception as error:  # noqa: BLE001 (the worker outlives whatever a request meets)
            finish = Finish.OUT_OF_MEMORY if _is_out_of_memory(error) else Finish.INTERNAL
            _LOG.exception('a request ended with %s', finish.name)
            message = f'{type(error).__name__}: {error}'
        finally:
            self.active = self.desired = ''
        yield self._last(turn, finish, message, Chunk(seq, '', []))

    @property
    def capacity(self) -> int:
        """K in force."""
        return min(self.settings.cache_capacity, self.limits.drafts)

    def settle(self) -> None:
        """
        Between requests: bring the drafts down to what the limits allow.

        Where no request is taken the last one goes too: nobody would be served by it.
        """
        self.residency.poll()
        self.residency.set_capacity(self.capacity if self.limits.requests else 0)

    def reset(self) -> None:
        """Forget drafts and conversations: the next request starts cold."""
        self.residency.clear()
        self.sessions.clear()
        self._session = ''
        self.engine.state.restart([0])
        self.engine.state.hold(0)

    def _turn(self, request: PreparedRequest, cancelled: Callable[[], bool]) -> _Turn:
        started, counters = self.clock(), self.residency.counters
        return _Turn(
            request, cancelled, RankingContext(request.prompt_ids, request.prompt_text),
            GenerationStats(prompt_tokens=len(request.prompt_ids),
                            queue_sec=started - request.accepted_at),
            OutputStream(self.tokenizer.decode, request.stop),
            started, counters.loads, counters.evictions)

    def _begin(self, turn: _Turn) -> None:
        self._change_session(turn.request.session)
        self.policy.begin(turn.context)
        self.draft_length.begin()
        self._schedule(turn, first=True)

    def _change_session(self, session: str) -> None:
        """
        Have the buffers hold what was read of ``session``, if it is kept.

        What they held stays available to its own conversation, where there is room.
        """
        if session == self._session:
            return
        state, before = self.engine.state, self._session
        # Taken first: its room is free for the one that goes.
        parked = self.sessions.take(session) if session else None
        if (before and state.held and self.limits.sessions
                and self.sessions.make_room(state.held_bytes)):
            self.sessions.put(before, state.park())
        self._session = session
        if parked is not None:
            common = state.resume(parked)
            for drafter in self.residency.drafters():
                drafter.restart(common)
                drafter.dropped = state.dropped

    def _prefill(self, turn: _Turn) -> Finish | None:
        """Run the prompt while the first draft loads; None when ready to decode."""
        self.engine.use(replace(turn.request.sampling, stop_ids=self.stop_ids),
                        self.settings.verification, self.settings.min_confidence)
        # Who talks waits for the first token.
        chunks = self.engine.prefill(turn.request.prompt_ids, opening=bool(turn.request.session))
        turn.stats.cached_tokens = next(chunks)
        for drafter in self.residency.drafters():
            drafter.begin(self.engine.state)
        finish = self._interruption(turn)
        while finish is None and next(chunks, None) is not None:
            self.residency.poll()
            finish = self._interruption(turn)
        while (self.settings.wait_for_first_load and finish is None
               and self.residency.loading is not None):
            self.residency.wait(_WAIT_SLICE_SEC)
            self.residency.poll()
            finish = self._interruption(turn)
        return finish

    def _iterate(self, turn: _Turn, seq: int) -> tuple[StepRecord, Chunk]:
        """One iteration of Algorithm 3 and the chunk it makes."""
        turn.t_predict = turn.t_warm = turn.t_wait = 0.0
        loaded = self.residency.poll()
        interval = self.policy.stretch * (
            self.policy.interval or max(1, self.settings.scheduling_interval))
        opening = self.engine.opening
        turn.opened += opening
        at_boundary = not opening and (turn.stats.iterations - turn.opened) % interval == 0
        if (at_boundary or (loaded and not self.residency.is_ready(turn.active))
                or self.capacity < self.residency.capacity):
            self._schedule(turn, first=False)
        self._warm(turn)
        way = Way('', None, 0) if opening else self._way(turn)
        draft, drafter, gamma = way.draft, way.drafter, way.gamma
        # A draft that is still catching up was not asked, and has not failed to answer.
        cold = drafter is not None and drafter.lag(self.engine.state) > CATCH_UP_ROWS
        limit = turn.request.max_new_tokens - len(turn.output.token_ids)
        stop_ids = frozenset() if turn.request.ignore_eos else self.stop_ids
        try:
            tokens, step = self.engine.step(drafter, gamma, limit, stop_ids, way.branching,
                                            way.second)
        except DraftFailure as failure:
            self._give_up(turn, draft, str(failure))
            drafter = None
            tokens, step = self.engine.step(None, 0, limit, stop_ids)
        stepped_in = draft != turn.active and drafter is not None
        copied = stepped_in and drafter.copies
        step.draft = draft if drafter is not None else ''
        step.desired = turn.plan.desired
        if stepped_in and turn.active == step.desired:
            step.desired = draft  # the wanted draft was there: another was better still
        step.copied = copied
        step.t_predict, step.t_wait = turn.t_predict, turn.t_wait
        # What a copier has accepted where it found a match says nothing of where it does not,
        # and what the target accepts of its own exits nothing of drafts.
        if drafter is not None and min(gamma, limit - 1) > 0 and not (
                cold or copied or drafter.bridges):
            turn.context.acceptance.setdefault(step.draft, Acceptance()).add(step)
        if not opening:
            self.drafting.learn(self.draft_length, way, step, tokens)
        for failed, reason in ((step.draft, step.draft_error),
                               (way.second and way.second.id, step.second_error)):
            if reason:
                self._give_up(turn, failed, reason)
        text, taken = turn.output.add(tokens)
        # A stop string within the block: what comes after it was never part of the answer.
        step.emitted, step.accepted = taken, min(step.accepted, taken)
        step.second_accepted = min(step.second_accepted, taken)
        self.policy.observe(step)
        chunk = Chunk(seq, text, tokens[:taken], step.draft if step.drafted else '', step=step)
        return step, chunk

    def _way(self, turn: _Turn) -> Way:
        """Who drafts this iteration, and how much."""
        if not self.settings.speculate:
            return Way('', None, 0)
        way = self.drafting.choose(self.draft_length, turn.active, turn.plan.preferred,
                                   self.settings.copy, self.settings.merge,
                                   self._bridge(turn.active))
        limit = self.limits.gamma
        return way.within(limit) if limit < self.engine.max_gamma else way

    def _bridge(self, active: str) -> str | None:
        """The draft that stands in while none is there that had to be loaded."""
        slot_free = self.residency.slot_free
        if not self.settings.self_speculation or (
                self.residency.is_ready(active) and active not in slot_free):
            return None
        return next((draft for draft in slot_free
                     if (drafter := self.residency.drafter(draft)) is not None
                     and drafter.bridges), None)

    def _schedule(self, turn: _Turn, first: bool) -> None:
        """Interval boundary: rank (Algorithm 1), steer residency (2), choose the draft (3)."""
        start, waited = self.clock(), turn.t_wait
        self._judge_probes(turn)
        if self.policy.judges and self.settings.speculate and turn.output.token_ids:
            self._judge(turn)
        self._look(turn, first)
        turn.plan = plan = self._plan(turn)
        if self.capacity != self.residency.capacity:
            self.residency.set_capacity(self.capacity, turn.active or None)
        if self.settings.speculate:
            self._replace_only_resident(turn, plan)
            self.residency.update(plan.ranked, turn.active or None, plan.working_set,
                                  plan.prefetch)
        if plan.wait and not first:  # the first load has the time of the prefill
            self._await(turn, plan)
        self._choose(turn, plan, first)
        if plan.probe and not first:
            self._probe(turn, plan)
        turn.t_predict += self.clock() - start - (turn.t_wait - waited)

    def _plan(self, turn: _Turn) -> Plan:
        """
        What the policy wants; where copying is on, drafts that copy come after the others.

        They step in by themselves wherever they find a match: as the active draft
        they would leave all other places to plain decoding.
        """
        if not self.settings.speculate:
            return Plan([])
        plan = self.policy.plan(turn.context)
        if not self.settings.copy:
            return plan

        def copies(draft: str) -> bool:
            drafter = self.residency.drafter(draft)
            return drafter is not None and drafter.copies

        return replace(
            plan, ranked=sorted(plan.ranked, key=lambda item: copies(item[0])),
            use=None if plan.use is None else sorted(plan.use, key=copies))

    def _look(self, turn: _Turn, first: bool) -> None:
        """Bring what a policy may look at up to date."""
        context, output = turn.context, turn.output.token_ids
        context.position = len(turn.request.prompt_ids) + len(output)
        context.remaining = turn.request.max_new_tokens - len(output)
        context.active, context.ready = turn.active, frozenset(self.residency.ready)
        context.loading = self.residency.loading or ''
        context.slot_free = frozenset(self.residency.slot_free)
        if not first:
            context.recent = output[-RECENT_TOKENS:]
            context.recent_text = self.tokenizer.decode(context.recent)
            context.hidden = self.engine.state.last_hidden

    def _await(self, turn: _Turn, plan: Plan) -> None:
        """Wait for the desired draft while loads are in flight, and nobody gives the answer up."""
        start = self.clock()
        while (not self.residency.is_ready(plan.desired) and self.residency.loading is not None
               and self._interruption(turn) is None):
            self.residency.wait(_WAIT_SLICE_SEC)
            if self.residency.poll() and not self.residency.is_ready(plan.desired):
                # Another one's load was in the way, or this one failed: on to the next.
                self.residency.update(plan.ranked, turn.active or None, plan.working_set,
                                      plan.prefetch)
        turn.t_wait += self.clock() - start

    def _judge(self, turn: _Turn) -> None:
        """Hold every READY draft against what was emitted since it was last asked."""
        for draft in self.residency.ready:
            drafter = self.residency.drafter(draft)
            if not drafter.judges:
                continue
            try:
                # The active one catches up anyway, as it drafts.
                right, count = self.engine.judge(drafter, catch_up=draft != turn.active)
            except DraftFailure as failure:
                self.residency.fail(draft, str(failure))
                continue
            if count:
                self.policy.judged(draft, right, count)

    def _probe(self, turn: _Turn, plan: Plan) -> None:
        """Ask the READY drafts that are not to draft, for a policy that compares them all."""
        turn.probed_at = len(turn.output.token_ids)
        for draft in plan.preferred:
            drafter = self.residency.drafter(draft)
            if drafter is None or draft == turn.active:
                continue
            try:
                turn.probes[draft] = self.engine.ask(drafter, plan.probe)
            except DraftFailure as failure:
                self._give_up(turn, draft, str(failure))

    def _judge_probes(self, turn: _Turn) -> None:
        """Hold what was proposed at the last boundary against what was emitted since."""
        emitted = turn.output.token_ids[turn.probed_at:]
        for draft, proposal in turn.probes.items():
            self.policy.overhear(draft, *agreement(proposal, emitted))
        turn.probes = {}

    def _choose(self, turn: _Turn, plan: Plan, first: bool) -> None:
        """
        The best-ranked READY draft that is warm; a better one that is cold is warmed meanwhile.

        If none is warm, the best READY one: it warms over the next iterations.
        """
        turn.warming, chosen = '', None
        for draft in plan.preferred:
            drafter = self.residency.drafter(draft)
            if drafter is None:
                continue
            if first or drafter.lag(self.engine.state) <= CATCH_UP_ROWS:
                chosen = draft
                break
            turn.warming = turn.warming or draft
        if chosen is None:
            chosen, turn.warming = turn.warming, ''
        turn.active = self.active = chosen
        self.desired = plan.desired
        if chosen:
            # Plain decoding between two drafts (one failed or was given up) is part of it.
            turn.stats.switches += turn.previous not in ('', chosen)
            turn.previous = chosen
            self.residency.note_use(chosen)

    def _warm(self, turn: _Turn) -> None:
        """Let a better draft that is READY but cold catch up a little."""
        drafter = self.residency.drafter(turn.warming) if turn.warming else None
        if drafter is not None:
            start = self.clock()
            try:
                drafter.catch_up(self.engine.state, CATCH_UP_ROWS)
            except Exception as error:  # noqa: BLE001 (as in Engine.step)
                self._give_up(turn, turn.warming, str(error) or type(error).__name__)
            turn.t_warm = self.clock() - start
            turn.stats.catch_up_sec += turn.t_warm

    def _give_up(self, turn: _Turn, draft: str, reason: str) -> None:
        """Take a misbehaving draft out of service, and go on with the next best at once."""
        self.residency.fail(draft, reason)
        self._choose(turn, turn.plan, first=False)

    def _replace_only_resident(self, turn: _Turn, plan: Plan) -> None:
        """
        K = 1: give up the active draft if what remains to be written repays the gap.

        Or where the policy insists (Plan.replace). While the successor loads, a
        slot-free draft or plain decoding goes on.
        """
        active = turn.active
        if self.residency.capacity != 1 or active not in self.residency.resident:
            return
        scores = dict(plan.ranked)
        wanted = next((d for d, _ in plan.ranked
                       if d == active or self.residency.can_load(d)), active)
        if wanted == active or active not in scores:
            return
        gamma = max(1, self.draft_length.max_gamma)
        now, then = (_tokens_per_iteration(min(1.0, scores[d]), gamma)
                     for d in (active, wanted))
        remaining = turn.request.max_new_tokens - len(turn.output.token_ids)
        step_sec = self.draft_length.verify_cost(gamma + 1)
        bridged = self.residency.estimated_load_sec(wanted) / step_sec
        # In iterations: saved by the better draft, lost while nothing (worth one token) bridges.
        if plan.replace or remaining / now - remaining / then > bridged * (now - 1) / now:
            self.residency.release(active)
            turn.active = ''

    def _interruption(self, turn: _Turn) -> Finish | None:
        request = turn.request
        if turn.cancelled():
            return Finish.CANCELED
        if request.timeout_sec and self.clock() - request.accepted_at >= request.timeout_sec:
            return Finish.TIMEOUT
        return None

    def _end(self, turn: _Turn, chunk: Chunk) -> Finish | None:
        if turn.output.stopped:
            return Finish.STOP
        if not turn.request.ignore_eos and chunk.token_ids[-1] in self.stop_ids:
            return Finish.STOP
        if len(turn.output.token_ids) >= turn.request.max_new_tokens:
            return Finish.LENGTH
        return None

    def _count(self, turn: _Turn, step: StepRecord, between: float, now: float) -> None:
        turn.stats.add(step, max(0.0, between))
        self.recent_steps.append((now, step))
        if turn.first_token_at is None:
            turn.first_token_at = now
            turn.stats.time_to_first_token_sec = now - turn.request.accepted_at
        elif step.emitted:
            # Tokens of an iteration arrive together: one gap, then none.
            turn.stats.gaps += [now - turn.last_token_at] + [0.0] * (step.emitted - 1)
        turn.last_token_at = now

    def _last(self, turn: _Turn, finish: Finish, message: str, chunk: Chunk) -> Chunk:
        stats, counters = turn.stats, self.residency.counters
        stats.total_sec = self.clock() - turn.request.accepted_at
        stats.loads = counters.loads - turn.loads_before
        stats.evictions = counters.evictions - turn.evictions_before
        chunk.text += turn.output.finish()
        chunk.last, chunk.finish, chunk.message, chunk.stats = True, finish, message, stats
        return chunk


def _is_out_of_memory(error: Exception) -> bool:
    text = str(error)
    return isinstance(error, MemoryError) or 'out of memory' in text or 'enough memory' in text


def _tokens_per_iteration(acceptance: float, gamma: int) -> float:
    """Expected tokens of an iteration at a uniform acceptance: 1 + a + … + a^gamma."""
    return sum(acceptance ** depth for depth in range(gamma + 1))
