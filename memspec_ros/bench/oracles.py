# SPDX-License-Identifier: Apache-2.0
"""
What could be had if the future were known: to measure policies by, not to deploy.

``oracle_static`` and ``oracle_dynamic`` are run by the same controller as the
others. Neither is a bound (see bound.py): they choose from interval to interval,
and greedily. How much of what ``oracle_dynamic`` gains is luck that nobody can
foresee is told by one that is blind to the coming interval.
"""

from __future__ import annotations

from collections.abc import Sequence
import math

from ..decoding.engine import CATCH_UP_ROWS
from ..runtime.policies import Plan, Policy, StaticPolicy
from ..runtime.ranking import RankingContext
from ..training.trace_store import Trace
from .replay import Outcome, Replayer, World
from .trace_costs import PLAIN, TraceCosts


def oracle_static(replayer: Replayer, traces: Sequence[Trace]) -> list[Outcome]:
    """
    Every draft run whole, and the best of them kept; ties go to the bundle's order.

    ``traces``: the turns of a conversation, or the one of a prompt.
    """
    runs = [replayer.converse(traces, lambda world, draft=spec.id: StaticPolicy(draft))
            for spec in replayer.drafts]
    return max(runs, key=lambda outcomes: sum(turn.stats.output_tokens for turn in outcomes)
               / sum(turn.stats.decode_sec for turn in outcomes))


class _ForeknowingPolicy(Policy):
    """Reads in the trace that is replayed."""

    def __init__(self, world: World):
        self._world = world

    def begin(self, context: RankingContext) -> None:
        self._costs = TraceCosts(self._world)
        # The prompt's ranking comes first: decoding has not begun.
        self._begins = True

    def _look(self) -> tuple[int, bool]:
        """Position in the output, and whether it is the prompt that is ranked."""
        begins, self._begins = self._begins, False
        return 0 if begins else self._world.position, begins


class BlindOraclePolicy(_ForeknowingPolicy):
    """
    Knows for nothing how good every draft is before and after, but not in the coming interval.

    What is left of oracle_dynamic without its foresight of which draft happens to
    be right next. Rates are of true tokens, over so many positions on either side.
    """

    WINDOW = 64

    def plan(self, context: RankingContext) -> Plan:
        position, _ = self._look()
        interval = self._world.scenario.interval
        rates = {spec.id: self._costs.around(spec.id, position, interval, self.WINDOW)
                 for spec in self._world.drafts}
        most = max(rates.values(), default=0.0) or 1.0
        return Plan([(draft, rates[draft] / most)
                     for draft in sorted(rates, key=lambda draft: -rates[draft])])


class OracleDynamicPolicy(_ForeknowingPolicy):
    """
    The best READY draft of the coming interval; loads what will be best once it is there.

    Utilities are true tokens per second over an interval, catch-up included:
    of the coming one for what runs, of the first one that a load begun now can
    serve for what is loaded. With K = 1 a load costs the draft that is there:
    it is given up at the boundary from which on the answer is done soonest.
    """

    def plan(self, context: RankingContext) -> Plan:
        world, costs = self._world, self._costs
        position, begins = self._look()
        drafts, residency = [spec.id for spec in world.drafts], self._world.residency
        ready = [draft for draft in drafts if residency.is_ready(draft)]
        now = {draft: self._rate(draft, position) for draft in drafts}
        use = sorted(drafts, key=lambda draft: -now[draft])
        current = next((draft for draft in use if draft in ready), PLAIN)
        serves = self._load_ms(drafts, ready)
        if begins and not world.scenario.first_load_counts:
            serves = dict.fromkeys(drafts, 0.0)
        later = {draft: costs.interval(
            draft, costs.after(current, position, serves[draft], world.scenario.interval),
            world.scenario.interval) for draft in drafts}
        successor = self._successor(position, ready)
        # What runs next must not be what makes room.
        first = successor or current
        order = sorted(drafts, key=lambda draft: (draft != first, -later[draft]))
        most = max(later.values(), default=0.0) or 1.0
        return Plan([(draft, later[draft] / most) for draft in order], use=use,
                    replace=bool(successor))

    def _rate(self, draft: str, position: int) -> float:
        """Of the coming interval; a draft that is not there needs no catching up to be wanted."""
        drafter, catch_up_ms = self._world.residency.drafter(draft), 0.0
        if drafter is not None and self._world.engine.state.held:
            lag = drafter.lag(self._world.engine.state)
            if lag > drafter.rows_with_proposal:
                catch_up_ms = lag * self._world.scenario.profile.catch_up_row(
                    self._costs.specs[draft])
        return self._costs.interval(draft, position, self._world.scenario.interval, catch_up_ms)

    def _load_ms(self, drafts: list[str], ready: list[str]) -> dict[str, float]:
        """
        Until each draft could serve, if its load began as soon as the loader is free.

        Those that are there count by the soonest of the others: the question is
        who is to be there then.
        """
        world = self._world
        busy = world.loader.remaining_ms
        absent = {draft: busy + (0.0 if draft == world.loader.loading else world.load_ms[draft])
                  for draft in drafts if draft not in ready}
        return {**dict.fromkeys(drafts, min(absent.values(), default=0.0)), **absent}

    def _successor(self, position: int, ready: list[str]) -> str:
        """K = 1: the draft that is to take the only slot now, '' for none or not yet."""
        world, costs = self._world, self._costs
        resident = next((draft for draft in world.residency.resident if draft in ready), '')
        if (world.scenario.cache_capacity != 1 or not resident
                or world.loader.loading is not None):
            return ''
        free = [draft for draft in ready if draft != resident]
        found, least, passed = '', costs.to_the_end(resident, position), 0.0
        for boundary, until in costs.boundaries(resident, position, world.scenario.interval):
            for draft in world.load_ms:
                total = until + min(self._after_a_gap(bridge, draft, boundary)
                                    for bridge in (PLAIN, *free))
                if draft != resident and total < least:
                    found, least, passed = draft, total, until
        return '' if passed else found

    def _after_a_gap(self, bridge: str, draft: str, position: int) -> float:
        """Milliseconds to the end where ``bridge`` drafts until ``draft`` is loaded."""
        world = self._world
        then, passed = self._costs.bridged(bridge, position, world.load_ms[draft])
        if then >= self._costs.length:
            return math.inf  # it would not live to see it
        lag = min(len(world.trace.prompt_ids) + then, CATCH_UP_ROWS)
        row_ms = world.scenario.profile.catch_up_row(self._costs.specs[draft])
        return passed + lag * row_ms + self._costs.to_the_end(draft, then)
