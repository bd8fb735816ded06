# SPDX-License-Identifier: Apache-2.0
"""
The MemSpec controller (Algorithm 3): rank, prefetch, decode with the best draft there is.

Every N iterations the policy ranks the drafts, the residency steers towards the
ranking in the background, and the best-ranked draft that is READY goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
import logging

from ..decoding.draft_length import DraftLength
from ..decoding.engine import DraftFailure, Engine
from ..decoding.stats import StepRecord
from ..models.tokenizer import Tokenizer
from .drafting import Drafting, Way
from .memory_guard import Limits
from .policies import Policy
from .requests import Chunk, Finish, PreparedRequest
from .residency import Residency
from .scheduling import Scheduling, WAIT_SLICE_SEC
from .sessions import SessionStore
from .settings import Settings
from .turn import Turn

_LOG = logging.getLogger(__name__)
# Iterations kept for windowed figures.
KEPT_STEPS = 1024


class Controller:
    """
    Answers one request at a time over an Engine and a Residency.

    Used by one thread; ``settings`` may be changed by others, and ``limits`` be replaced:
    what memory allows at present, below what the settings ask for. Policy, draft length and
    the settings object may be exchanged between requests.
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
        # Of the request that runs.
        self._scheduling: Scheduling | None = None
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
        turn = Turn(request, cancelled, self.tokenizer, self.residency.counters, self.clock)
        scheduling = self._scheduling = Scheduling(
            turn, self.engine, self.residency, self.tokenizer, self.policy, self.draft_length,
            self.settings, lambda: self.capacity)
        seq = 0
        finish, message = None, ''
        try:
            # Looked at first: a request that was given up in the queue must not cost the next one
            # its cached prompt.
            finish = turn.interruption()
            if finish is None:
                self._change_session(request.session)
                self.draft_length.begin()
                scheduling.begin()
                finish = self._prefill(turn)
            before = self.clock()
            turn.stats.prefill_sec = before - turn.started
            while finish is None:
                finish = turn.interruption()
                if finish is not None:
                    break
                step, chunk = self._iterate(turn, scheduling, seq)
                finish = turn.ending(chunk.token_ids, self.stop_ids)
                now = self.clock()
                turn.count(step, now - before - step.duration - scheduling.spent, now)
                self.recent_steps.append((now, step))
                before = now
                if finish is None:
                    yield chunk
                else:
                    yield turn.close(chunk, finish)
                    return
                seq += 1
        except Exception as error:  # noqa: BLE001 (the worker outlives whatever a request meets)
            finish = Finish.OUT_OF_MEMORY if _is_out_of_memory(error) else Finish.INTERNAL
            _LOG.exception('a request ended with %s', finish.name)
            message = f'{type(error).__name__}: {error}'
        finally:
            self._scheduling = None
        yield turn.close(Chunk(seq, '', []), finish, message)

    @property
    def active(self) -> str:
        """The draft that decodes now, '' for none."""
        scheduling = self._scheduling
        return scheduling.active if scheduling is not None else ''

    @property
    def desired(self) -> str:
        """The draft that the policy would rather decode with, '' for none."""
        scheduling = self._scheduling
        return scheduling.desired if scheduling is not None else ''

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

    def _prefill(self, turn: Turn) -> Finish | None:
        """Run the prompt while the first draft loads; None when ready to decode."""
        self.engine.use(replace(turn.request.sampling, stop_ids=self.stop_ids),
                        self.settings.verification, self.settings.min_confidence)
        # Who talks waits for the first token.
        chunks = self.engine.prefill(turn.request.prompt_ids, opening=bool(turn.request.session))
        turn.stats.cached_tokens = next(chunks)
        for drafter in self.residency.drafters():
            drafter.begin(self.engine.state)
        finish = turn.interruption()
        while finish is None and next(chunks, None) is not None:
            self.residency.poll()
            finish = turn.interruption()
        while (self.settings.wait_for_first_load and finish is None
               and self.residency.loading is not None):
            self.residency.wait(WAIT_SLICE_SEC)
            self.residency.poll()
            finish = turn.interruption()
        return finish

    def _iterate(self, turn: Turn, scheduling: Scheduling, seq: int) -> tuple[StepRecord, Chunk]:
        """One iteration of Algorithm 3 and the chunk it makes."""
        scheduling.advance()
        opening = self.engine.opening
        way = Way('', None, 0) if opening else self._way(scheduling)
        # A draft that is still catching up was not asked, and has not failed to answer.
        cold = way.drafter is not None and self.engine.is_cold(way.drafter)
        limit = turn.remaining
        tokens, step = self._step(way, scheduling, limit,
                                  frozenset() if turn.request.ignore_eos else self.stop_ids)
        drafter = way.drafter
        # What a copier has accepted where it found a match says nothing of where it does not,
        # and what the target accepts of its own exits nothing of drafts.
        if drafter is not None and min(way.gamma, limit - 1) > 0 and not (
                cold or step.copied or drafter.bridges):
            scheduling.learn(step)
        if not opening:
            self.drafting.learn(self.draft_length, way, step, tokens)
        for failed, reason in ((step.draft, step.draft_error),
                               (way.second and way.second.id, step.second_error)):
            if reason:
                scheduling.give_up(failed, reason)
        text, taken = turn.output.add(tokens)
        # A stop string within the block: what comes after it was never part of the answer.
        step.emitted, step.accepted = taken, min(step.accepted, taken)
        step.second_accepted = min(step.second_accepted, taken)
        self.policy.observe(step)
        chunk = Chunk(seq, text, tokens[:taken], step.draft if step.drafted else '', step=step)
        return step, chunk

    def _step(self, way: Way, scheduling: Scheduling, limit: int, stop_ids: frozenset[int]
              ) -> tuple[list[int], StepRecord]:
        """Draft and verify that ``way``; without a draft, and ``way`` says so, where it fails."""
        active = scheduling.active
        try:
            tokens, step = self.engine.step(way.drafter, way.gamma, limit, stop_ids,
                                            way.branching, way.second)
        except DraftFailure as failure:
            scheduling.give_up(way.draft, str(failure))
            way.drafter = None
            tokens, step = self.engine.step(None, 0, limit, stop_ids)
        step.desired = scheduling.desired
        step.t_predict, step.t_wait = scheduling.t_predict, scheduling.t_wait
        if way.drafter is not None:
            step.draft = way.draft
            if way.draft != active:
                step.copied = way.drafter.copies
                if active == step.desired:
                    step.desired = way.draft  # the wanted one was there: this was better still
        return tokens, step

    def _way(self, scheduling: Scheduling) -> Way:
        """Who drafts this iteration, and how much."""
        if not self.settings.speculate:
            return Way('', None, 0)
        active = scheduling.active
        way = self.drafting.choose(self.draft_length, active, scheduling.preferred,
                                   self.settings.copy, self.settings.merge,
                                   self._bridge(active))
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


def _is_out_of_memory(error: Exception) -> bool:
    text = str(error)
    return isinstance(error, MemoryError) or 'out of memory' in text or 'enough memory' in text
