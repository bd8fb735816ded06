# SPDX-License-Identifier: Apache-2.0
"""
Which draft decodes a request: ranked, brought in and chosen at every interval boundary.

Nothing here waits for a load, unless the policy asks for just that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..decoding.draft_length import DraftLength
from ..decoding.engine import DraftFailure, Engine
from ..decoding.stats import StepRecord
from ..decoding.verification import agreement
from ..models.tokenizer import Tokenizer
from .policies import Plan, Policy
from .ranking import Acceptance, RankingContext
from .residency import Residency
from .settings import Settings
from .turn import Turn

# Recent output that a ranker sees, in tokens.
RECENT_TOKENS = 32
# Who waits for a load looks at cancellation and deadline this often, in seconds.
WAIT_SLICE_SEC = 0.02


class Scheduling:
    """
    The drafts of one request (Algorithms 1 to 3).

    active: the draft that decodes, '' for none. desired: the one the policy would
    rather have. t_predict, t_warm, t_wait: seconds that this iteration took so far for
    ranking and choosing, for a draft that catches up, and for loads waited for.

    Parameters
    ----------
    turn: the request
    engine, residency, tokenizer: of the controller
    policy, draft_length: what decides, and what is known of each draft's speed
    settings: read at every boundary
    capacity: K in force

    """

    def __init__(self, turn: Turn, engine: Engine, residency: Residency, tokenizer: Tokenizer,
                 policy: Policy, draft_length: DraftLength, settings: Settings,
                 capacity: Callable[[], int]):
        self._turn = turn
        self._engine = engine
        self._residency = residency
        self._tokenizer = tokenizer
        self._policy = policy
        self._draft_length = draft_length
        self._settings = settings
        self._capacity = capacity
        self._context = RankingContext(turn.request.prompt_ids, turn.request.prompt_text)
        self._plan = Plan([])
        self.active = self.desired = ''
        self.t_predict = self.t_warm = self.t_wait = 0.0
        self._previous = self._warming = ''
        # Iterations that came before the intervals began: one that ends a prefill.
        self._opened = 0
        # What other drafts proposed (Plan.probe), and after how many output tokens.
        self._probes: dict[str, list[int]] = {}
        self._probed_at = 0

    @property
    def spent(self) -> float:
        """Seconds that this iteration took beside drafting and verifying."""
        return self.t_predict + self.t_warm + self.t_wait

    @property
    def preferred(self) -> list[str]:
        """Drafts to decode with, the best first."""
        return list(self._plan.preferred)

    def begin(self) -> None:
        """Rank the drafts by the prompt, so that the first one loads during the prefill."""
        self._policy.begin(self._context)
        self._schedule(first=True)

    def advance(self) -> None:
        """Before an iteration: plan anew at a boundary, and warm the draft that comes next."""
        self.t_predict = self.t_warm = self.t_wait = 0.0
        loaded = self._residency.poll()
        interval = self._policy.stretch * (
            self._policy.interval or max(1, self._settings.scheduling_interval))
        opening = self._engine.opening
        self._opened += opening
        at_boundary = (not opening
                       and (self._turn.stats.iterations - self._opened) % interval == 0)
        if (at_boundary or (loaded and not self._residency.is_ready(self.active))
                or self._capacity() < self._residency.capacity):
            self._schedule(first=False)
        self._warm()

    def give_up(self, draft: str, reason: str) -> None:
        """Take a misbehaving draft out of service, and go on with the next best at once."""
        self._residency.fail(draft, reason)
        self._choose(first=False)

    def learn(self, step: StepRecord) -> None:
        """Count what was accepted of the draft that was asked."""
        self._context.acceptance.setdefault(step.draft, Acceptance()).add(step)

    def _schedule(self, first: bool) -> None:
        """Interval boundary: rank (Algorithm 1), steer residency (2), choose the draft (3)."""
        start, waited = self._engine.clock(), self.t_wait
        settings, residency = self._settings, self._residency
        self._judge_probes()
        if self._policy.judges and settings.speculate and self._turn.output.token_ids:
            self._judge()
        self._look(first)
        self._plan = self._ask_policy()
        capacity = self._capacity()
        if capacity != residency.capacity:
            residency.set_capacity(capacity, self.active or None)
        if settings.speculate:
            self._replace_only_resident()
            self._steer()
        if self._plan.wait and not first:  # the first load has the time of the prefill
            self._await()
        self._choose(first)
        if self._plan.probe and not first:
            self._probe()
        self.t_predict += self._engine.clock() - start - (self.t_wait - waited)

    def _ask_policy(self) -> Plan:
        """
        What the policy wants; where copying is on, drafts that copy come after the others.

        They step in by themselves wherever they find a match: as the active draft
        they would leave all other places to plain decoding.
        """
        if not self._settings.speculate:
            return Plan([])
        plan = self._policy.plan(self._context)
        if not self._settings.copy:
            return plan

        def copies(draft: str) -> bool:
            drafter = self._residency.drafter(draft)
            return drafter is not None and drafter.copies

        return replace(
            plan, ranked=sorted(plan.ranked, key=lambda item: copies(item[0])),
            use=None if plan.use is None else sorted(plan.use, key=copies))

    def _look(self, first: bool) -> None:
        """Bring what a policy may look at up to date."""
        context, turn = self._context, self._turn
        output = turn.output.token_ids
        context.position = len(turn.request.prompt_ids) + len(output)
        context.remaining = turn.remaining
        context.active, context.ready = self.active, frozenset(self._residency.ready)
        context.loading = self._residency.loading or ''
        context.slot_free = frozenset(self._residency.slot_free)
        if not first:
            context.recent = output[-RECENT_TOKENS:]
            context.recent_text = self._tokenizer.decode(context.recent)
            context.hidden = self._engine.state.last_hidden

    def _steer(self) -> None:
        plan = self._plan
        self._residency.update(plan.ranked, self.active or None, plan.working_set, plan.prefetch)

    def _await(self) -> None:
        """Wait for the desired draft while loads are in flight, and nobody gives the answer up."""
        start, residency, desired = self._engine.clock(), self._residency, self._plan.desired
        while (not residency.is_ready(desired) and residency.loading is not None
               and self._turn.interruption() is None):
            residency.wait(WAIT_SLICE_SEC)
            if residency.poll() and not residency.is_ready(desired):
                # Another one's load was in the way, or this one failed: on to the next.
                self._steer()
        self.t_wait += self._engine.clock() - start

    def _judge(self) -> None:
        """Hold every READY draft against what was emitted since it was last asked."""
        for draft in self._residency.ready:
            drafter = self._residency.drafter(draft)
            if not drafter.judges:
                continue
            try:
                # The active one catches up anyway, as it drafts.
                right, count = self._engine.judge(drafter, catch_up=draft != self.active)
            except DraftFailure as failure:
                self._residency.fail(draft, str(failure))
                continue
            if count:
                self._policy.judged(draft, right, count)

    def _probe(self) -> None:
        """Ask the READY drafts that are not to draft, for a policy that compares them all."""
        self._probed_at = len(self._turn.output.token_ids)
        for draft in self._plan.preferred:
            drafter = self._residency.drafter(draft)
            if drafter is None or draft == self.active:
                continue
            try:
                self._probes[draft] = self._engine.ask(drafter, self._plan.probe)
            except DraftFailure as failure:
                self.give_up(draft, str(failure))

    def _judge_probes(self) -> None:
        """Hold what was proposed at the last boundary against what was emitted since."""
        emitted = self._turn.output.token_ids[self._probed_at:]
        for draft, proposal in self._probes.items():
            self._policy.overhear(draft, *agreement(proposal, emitted))
        self._probes = {}

    def _choose(self, first: bool) -> None:
        """
        The best-ranked READY draft that is warm; a better one that is cold is warmed meanwhile.

        If none is warm, the best READY one: it warms over the next iterations.
        """
        self._warming, chosen = '', None
        for draft in self._plan.preferred:
            drafter = self._residency.drafter(draft)
            if drafter is None:
                continue
            if first or not self._engine.is_cold(drafter):
                chosen = draft
                break
            self._warming = self._warming or draft
        if chosen is None:
            chosen, self._warming = self._warming, ''
        self.active = chosen
        self.desired = self._plan.desired
        if chosen:
            # Plain decoding between two drafts (one failed or was given up) is part of it.
            self._turn.stats.switches += self._previous not in ('', chosen)
            self._previous = chosen
            self._residency.note_use(chosen)

    def _warm(self) -> None:
        """Let a better draft that is READY but cold catch up a little."""
        drafter = self._residency.drafter(self._warming) if self._warming else None
        if drafter is not None:
            start = self._engine.clock()
            try:
                self._engine.warm(drafter)
            except DraftFailure as failure:
                self.give_up(self._warming, str(failure))
            self.t_warm = self._engine.clock() - start
            self._turn.stats.catch_up_sec += self.t_warm

    def _replace_only_resident(self) -> None:
        """
        K = 1: give up the active draft if what remains to be written repays the gap.

        Or where the policy insists (Plan.replace). While the successor loads, a
        slot-free draft or plain decoding goes on.
        """
        active, plan, residency = self.active, self._plan, self._residency
        if residency.capacity != 1 or active not in residency.resident:
            return
        scores = dict(plan.ranked)
        wanted = next((d for d, _ in plan.ranked
                       if d == active or residency.can_load(d)), active)
        if wanted == active or active not in scores:
            return
        gamma = max(1, self._draft_length.max_gamma)
        now, then = (_tokens_per_iteration(min(1.0, scores[d]), gamma)
                     for d in (active, wanted))
        remaining = self._turn.remaining
        step_sec = self._draft_length.verify_cost(gamma + 1)
        bridged = residency.estimated_load_sec(wanted) / step_sec
        # In iterations: saved by the better draft, lost while nothing (worth one token) bridges.
        if plan.replace or remaining / now - remaining / then > bridged * (now - 1) / now:
            residency.release(active)
            self.active = ''


def _tokens_per_iteration(acceptance: float, gamma: int) -> float:
    """Expected tokens of an iteration at a uniform acceptance: 1 + a + … + a^gamma."""
    return sum(acceptance ** depth for depth in range(gamma + 1))
