# SPDX-License-Identifier: Apache-2.0
"""
What a memory budget buys: the largest K, gamma and context that fit, and at what speed.

The speed is a model's, since a plan is made before anything has run:

- Decoding is bound by reading memory. A target step of one row costs 1, of n
  rows 1 + 0.03 (n - 1); a drafted token costs what the draft reads, lower
  layers of the target included, relative to the target.
- Acceptance is what the bundle declares, per domain, the same at every depth:
  E(g) = 1 + a + … + a^g tokens an iteration of g drafted tokens.
- Speed-up on a domain is that of the best draft in memory at the best length up
  to gamma; over domains, the mean. Drafts are not swapped in the model, so what
  K drafts give is what they give at least. Drafts without weights are there at
  any budget, and left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import combinations
import statistics

from ..decoding.draft_length import ROW_COST_PRIOR
from .footprint import Demand, Footprint, FootprintModel

# SpecMemo keeps 96 % of the throughput of unrestrained speculation.
KEPT_SPEED = 0.96
# Of a draft that declares none.
_ACCEPTANCE_PRIOR = 0.45
_LEAST_CONTEXT = 16
_MOST_GAMMA = 16


@dataclass(frozen=True)
class Step:
    """The best that can be had for ``bytes``: K drafts, gamma and the speed-up over plain."""

    bytes: int
    capacity: int
    gamma: int
    speed_up: float
    drafts: tuple[str, ...] = ()


class SpeedModel:
    """Speed-up over plain decoding, as the module says."""

    def __init__(self, model: FootprintModel):
        self._bundle = model.bundle
        self._sized = [spec for spec in model.bundle.drafts if model.draft_bytes[spec.id]]
        self._cost = {spec.id: model.step_share(spec) for spec in self._sized}
        self.domains = sorted({domain for spec in self._sized for domain in spec.acceptance})
        # What declares no acceptance is believed to be like any other.
        self.assumed = [spec.id for spec in self._sized if not spec.acceptance]

    def best_drafts(self, capacity: int, gamma: int) -> tuple[float, tuple[str, ...]]:
        """Speed-up of the best ``capacity`` drafts, and which they are."""
        ids = [spec.id for spec in self._sized]
        if not capacity or not gamma or not ids:
            return 1.0, ()
        speeds = {draft: self._speeds(draft, gamma) for draft in ids}
        return max(((self._mean(chosen, speeds), chosen)
                    for chosen in self._choices(ids, min(capacity, len(ids)), speeds)),
                   key=lambda item: item[0])

    def _choices(self, ids, count, speeds) -> Iterator[tuple[str, ...]]:
        """All sets of ``count`` drafts where they can be tried, else one chosen draft by draft."""
        if len(ids) <= 12:
            yield from combinations(ids, count)
            return
        chosen: tuple[str, ...] = ()
        while len(chosen) < count:
            chosen += (max((d for d in ids if d not in chosen),
                           key=lambda d: self._mean((*chosen, d), speeds)),)
        yield chosen

    @staticmethod
    def _mean(chosen: tuple[str, ...], speeds) -> float:
        """Over domains, of the best of the chosen drafts, or of none where that is better."""
        return statistics.fmean(max(1.0, *values)
                                for values in zip(*(speeds[draft] for draft in chosen)))

    def _speeds(self, draft: str, gamma: int) -> list[float]:
        """Speed-up of one draft on each domain, at the best length up to ``gamma``."""
        known = self._bundle.draft(draft).acceptance
        prior = statistics.fmean(known.values()) if known else _ACCEPTANCE_PRIOR
        return [max(self._speed(known.get(domain, prior), self._cost[draft], length)
                    for length in range(gamma + 1)) for domain in self.domains or ['']]

    @staticmethod
    def _speed(acceptance: float, cost: float, length: int) -> float:
        tokens = sum(acceptance ** depth for depth in range(length + 1))
        return tokens / (length * cost + 1 + ROW_COST_PRIOR * length)


@dataclass(frozen=True)
class Plan:
    """
    The answer of ``make_plan``; sizes in bytes.

    footprint: of the demand. largest: what fits the budget, each with the other
    two as demanded; None where not even the least does. steps: the cheapest way
    to every speed-up, dearer ones faster. least: the first of them that keeps
    96 % of the fastest.
    """

    demand: Demand
    budget: int
    footprint: Footprint
    speed_up: float
    largest_capacity: int | None
    largest_gamma: int | None
    largest_context: int | None
    steps: tuple[Step, ...]
    least: Step
    assumed_acceptance: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the demand stays within the budget."""
        return not self.budget or self.footprint.total <= self.budget

    @property
    def least_that_works(self) -> int:
        """Bytes below which the target cannot be run with this context at all."""
        return self.steps[0].bytes

    @property
    def affordable(self) -> Step | None:
        """The fastest step within the budget; None where there is none."""
        within = [step for step in self.steps if not self.budget or step.bytes <= self.budget]
        return within[-1] if within else None

    def as_dict(self) -> dict:
        """Plain data for JSON; sizes in MiB."""
        def mib(size: int) -> float:
            return round(size / (1 << 20), 2)

        def step(entry: Step | None) -> dict | None:
            return None if entry is None else {
                'mib': mib(entry.bytes), 'cache_capacity': entry.capacity, 'gamma': entry.gamma,
                'speed_up': round(entry.speed_up, 3), 'drafts': list(entry.drafts)}

        return {
            'demand': asdict(self.demand), 'budget_mib': mib(self.budget),
            'footprint_mib': {name: mib(size) for name, size in asdict(self.footprint).items()},
            'predicted_peak_mib': mib(self.footprint.total), 'fits': self.fits,
            'speed_up': round(self.speed_up, 3),
            'largest': {'cache_capacity': self.largest_capacity, 'gamma': self.largest_gamma,
                        'context': self.largest_context},
            'least_that_works_mib': mib(self.least_that_works), 'least': step(self.least),
            'affordable': step(self.affordable), 'steps': [step(entry) for entry in self.steps],
            'kept_speed': KEPT_SPEED, 'assumed_acceptance': list(self.assumed_acceptance)}


def make_plan(model: FootprintModel, demand: Demand, budget: int) -> Plan:
    """Plan ``demand`` within ``budget`` bytes (0: no limit)."""
    speed = SpeedModel(model)

    def within(changed: Demand) -> bool:
        return not budget or model.of(changed).total <= budget

    def largest(low: int, high: int, name: str) -> int | None:
        """The largest value of a field with which the rest of the demand fits."""
        if not within(replace(demand, **{name: low})):
            return None
        while low < high:
            middle = (low + high + 1) // 2
            if within(replace(demand, **{name: middle})):
                low = middle
            else:
                high = middle - 1
        return low

    steps = _steps(model, speed, demand)
    fastest = steps[-1].speed_up
    return Plan(
        demand, budget, model.of(demand),
        speed.best_drafts(demand.capacity, demand.gamma)[0],
        largest(0, model.sized_drafts, 'capacity'), largest(0, _MOST_GAMMA, 'gamma'),
        largest(max(_LEAST_CONTEXT, demand.kv.least_context), model.most_context, 'context'),
        steps,
        next(step for step in steps if step.speed_up >= KEPT_SPEED * fastest),
        tuple(speed.assumed))


def _steps(model: FootprintModel, speed: SpeedModel, demand: Demand) -> tuple[Step, ...]:
    """Every K and gamma up to what is demanded that no cheaper one is as fast as."""
    options = []
    for capacity in range(min(demand.capacity, model.sized_drafts) + 1):
        for gamma in range(demand.gamma + 1) if capacity else (0,):
            speed_up, drafts = speed.best_drafts(capacity, gamma)
            total = model.of(replace(demand, capacity=capacity, gamma=gamma)).total
            options.append(Step(total, capacity, gamma, speed_up, drafts))
    kept: list[Step] = []
    for option in sorted(options, key=lambda step: (step.bytes, -step.speed_up)):
        if not kept or option.speed_up > kept[-1].speed_up + 1e-6:
            kept.append(option)
    return tuple(kept)
