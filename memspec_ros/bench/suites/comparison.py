# SPDX-License-Identifier: Apache-2.0
"""Contenders held against the baseline, run by run: what every suite reads its figures off."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
import statistics
from typing import Any

from ...models.errors import InvalidRequestError
from ..source import BASELINE, check_policies, Contender, policy_names, Source, STATIC
from .sums import geometric_mean, GMEAN, Sums, with_gmean

# From the sums of one contender, by domain.
Quantity = Callable[[Sums], Mapping[str, 'float | None']]


class Comparison:
    """
    Sums of every name and run; of a policy that was tried in several ways those of the best.

    Attributes
    ----------
    names: in the order they were asked for, the baseline among them
    best: name -> what the best way is called, of those tried in several
    ways: name -> way -> its sums, a run each

    """

    def __init__(self, ways: Mapping[str, Mapping[str, Sequence[Sums]]]):
        self.ways = ways
        self.names = list(ways)
        best = {name: max(tried, key=lambda way: geometric_mean(
            sums.speed() for sums in tried[way]) or 0.0) for name, tried in ways.items()}
        self._sums = {name: ways[name][way] for name, way in best.items()}
        self.best = {name: way for name, way in best.items() if way}

    def mean(self, name: str, quantity: Quantity) -> dict[str, float | None]:
        """``quantity`` by domain, geometric mean over runs, and ``gmean`` over domains."""
        runs = [quantity(sums) for sums in self._sums[name]]
        return with_gmean({place: _mean([run[place] for run in runs]) for place in runs[0]})

    def relative(self, name: str, quantity: Quantity = Sums.throughput, way: str | None = None
                 ) -> dict[str, float | None]:
        """The same over the baseline's of the same run (``way``: of that way, not the best)."""
        return _mean_of_ratios(self.runs(name, way), self._sums[BASELINE], quantity)

    def spread(self, name: str, quantity: Quantity = Sums.throughput
               ) -> tuple[float | None, float | None]:
        """Least and most of the runs' geometric means over the baseline's."""
        means = [_mean_of_ratios([sums], [base], quantity)[GMEAN]
                 for sums, base in zip(self._sums[name], self._sums[BASELINE])]
        return (None, None) if None in means else (min(means), max(means))

    def average(self, name: str, figure: Callable[[Sums], float]) -> float:
        """``figure``, arithmetic mean over runs."""
        return statistics.fmean(figure(sums) for sums in self._sums[name])

    def breakdown(self, name: str) -> dict[str, float]:
        """Shares of the time, 1 together; arithmetic mean over runs."""
        runs = [sums.breakdown() for sums in self._sums[name]]
        return {share: sum(run[share] for run in runs) / len(runs) for share in runs[0]}

    def runs(self, name: str, way: str | None = None) -> Sequence[Sums]:
        """Sums of every run (``way``: of that way, not the best)."""
        return self._sums[name] if way is None else self.ways[name][way]


def _mean(values: Sequence[float | None]) -> float | None:
    """Over runs; a rate of 0 is one."""
    return 0.0 if 0.0 in values else geometric_mean(values)


def _mean_of_ratios(runs: Sequence[Sums], bases: Sequence[Sums], quantity: Quantity
                    ) -> dict[str, float | None]:
    ratios = []
    for sums, base in zip(runs, bases):
        own, other = quantity(sums), quantity(base)
        ratios.append({place: own[place] / other[place] if own[place] and other[place] else None
                       for place in own})
    return with_gmean({place: geometric_mean(ratio[place] for ratio in ratios)
                       for place in ratios[0]})


class Bench:
    """
    What suites are given.

    source: of prompts. conversations: of conversations, None where there are
    none. policies: compare only these with the baseline (none: all). runs: how
    often where a second run says something else. values: to sweep instead of a
    suite's own. rankers: files of trained rankers to judge beside the bundle's.
    """

    def __init__(self, source: Source, conversations: Source | None = None,
                 policies: Sequence[str] = (), runs: int = 3, values: Sequence[int] = (),
                 rankers: Sequence[str] = ()):
        check_policies(policies)
        self.source, self.conversations = source, conversations
        self.values, self.rankers, self.repeats = tuple(values), tuple(rankers), runs
        self._policies = policies
        self._done: dict[tuple, list[dict[Contender, Sums]]] = {}

    def of(self, source: Source) -> Bench:
        """The same over other prompts."""
        return Bench(source, None, self._policies, self.repeats, self.values, self.rankers)

    def names(self, wanted: Iterable[str] = ()) -> list[str]:
        """Of the policies ``wanted`` (none: all) those to compare, the baseline first."""
        wanted = list(wanted) or policy_names()
        chosen = [name for name in wanted if name != BASELINE and name in self.source.policies
                  and (not self._policies or name in self._policies)]
        return [BASELINE, *chosen]

    def sweep_values(self, own: Sequence[int], least: int) -> list[int]:
        """What to sweep over: a suite's ``own`` values, unless others were given."""
        chosen = sorted(set(self.values or own))
        if chosen[0] < least:
            raise InvalidRequestError(f'--values: {chosen[0]}, expected at least {least}')
        return chosen

    @property
    def runs(self) -> int:
        return 1 if self.source.deterministic else self.repeats

    def compare(self, names: Iterable[str], drafts: Iterable[str] = (),
                beside: Iterable[str] = (), **changes: Any) -> Comparison:
        """
        Run what was not run yet of ``names``, single ``drafts`` and what stands ``beside``.

        beside: PLAIN, BLIND. changes: fields of the scenario.
        """
        scenario = replace(self.source.scenario, **changes)
        ways = {name: self.source.variants(name, scenario) for name in names}
        ways.update({draft: {'': Contender(STATIC, (('draft', draft),))} for draft in drafts})
        ways.update({name: {'': Contender(name)} for name in beside})
        done = self._run([way for tried in ways.values() for way in tried.values()], changes)
        return Comparison({name: {label: [run[way] for run in done]
                                  for label, way in tried.items()}
                           for name, tried in ways.items()})

    def _run(self, contenders: Sequence[Contender], changes: dict[str, Any]
             ) -> list[dict[Contender, Sums]]:
        base = self.source.scenario
        changes = {name: value for name, value in changes.items()
                   if value != getattr(base, name)}
        done = self._done.setdefault(tuple(sorted(changes.items())),
                                     [{} for _ in range(self.runs)])
        missing = [contender for contender in contenders if contender not in done[0]]
        for run in done if missing else ():
            run.update({contender: Sums() for contender in missing})
            for contender, outcome in self.source.run(missing, replace(base, **changes)):
                run[contender].add(outcome)
        return done

    def about(self) -> dict[str, Any]:
        """What every suite's data begins with."""
        return {**self.source.about(), 'runs': self.runs}

    def note(self) -> str:
        """How often it was run, for people."""
        if self.source.deterministic:
            return 'replayed once: it is deterministic, further runs would say the same'
        return f'{self.runs} runs: geometric mean, and least to most over them'
