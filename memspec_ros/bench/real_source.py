# SPDX-License-Identifier: Apache-2.0
"""Outcomes from the engine itself, each with a replay of the same beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ..runtime.ranking import Ranker
from ..training.trace_store import Trace, TraceHeader
from .real import Machine, RealRunner
from .replay import Scenario
from .replay_source import answer, ReplaySource
from .source import BASELINE, BOUND, Contender, Outcome
from .suites.sums import Sums


class RealSource(ReplaySource):
    """
    A Source that answers traced prompts on ``machine``, contenders taking turns.

    scenario: with the profile by which storage is paced at first; it is measured
    anew for every run. ranker: for replays, the machine has its own.
    all_variants: try policies in every way, not only in the one that is best in a
    replay of the same prompts. report: told how far it is. Otherwise as
    ReplaySource.
    """

    mode, deterministic = 'real', False

    def __init__(self, machine: Machine, conversations: Sequence[Sequence[Trace]],
                 header: TraceHeader, scenario: Scenario, ranker: Ranker | None = None,
                 tokenizer=None, all_variants: bool = False,
                 report: Callable[[str], None] = print):
        super().__init__(conversations, header, machine.drafts, scenario, ranker, tokenizer)
        self._machine, self._report = machine, report
        self._all_variants = all_variants
        self._chosen: dict[tuple[str, str], dict[str, Contender]] = {}
        self._runs = 0

    def variants(self, name: str, scenario: Scenario) -> Mapping[str, Contender]:
        ways = super().variants(name, scenario)
        if self._all_variants or len(ways) == 1:
            return ways
        key = name, repr(scenario)
        if key not in self._chosen:
            sums = {contender: Sums() for contender in ways.values()}
            for contender, outcome in super().run(ways.values(), scenario):
                sums[contender].add(outcome)
            best = max(ways, key=lambda way: sums[ways[way]].speed() or 0.0)
            self._chosen[key] = {best: ways[best]}
        return self._chosen[key]

    def run(self, contenders: Iterable[Contender], scenario: Scenario
            ) -> Iterator[tuple[Contender, Outcome]]:
        contenders = list(contenders)
        profile = self._machine.measure().with_load_ratio(scenario.profile.load_ratio)
        scenario = replace(scenario, profile=profile)
        runner, replayer = (RealRunner(self._machine, self.header, scenario),
                            self._replayer(scenario))
        self._runs += 1
        for number, turns in enumerate(self._conversations):
            first = (number + self._runs - 1) % len(contenders)
            real = {contender: answer(runner, turns, contender)
                    for contender in contenders[first:] + contenders[:first]
                    if contender.policy != BOUND}
            # Afterwards, so that what is timed stands close together.
            replays = {contender: answer(replayer, turns, contender) for contender in contenders}
            pace = _pace(real, replays)
            for contender, replayed in replays.items():
                if contender.policy == BOUND:
                    outcomes = [_slower(outcome, pace) for outcome in replayed]
                else:
                    outcomes = [replace(outcome, replay=replay)
                                for outcome, replay in zip(real[contender], replayed)]
                for outcome in self._placed(turns, outcomes):
                    yield contender, outcome
            self._report(f'{number + 1} of {len(self._conversations)} answered by '
                         f'{len(contenders)}')


def _pace(real: Mapping[Contender, list[Outcome]], replays: Mapping[Contender, list[Outcome]]
          ) -> float:
    """
    Seconds of the baseline over those of its replay, 1 where it was not run.

    A bound by the measured profile is held against real runs at their own pace.
    """
    baseline = Contender(BASELINE)
    if baseline not in real:
        return 1.0
    return _seconds(real[baseline]) / _seconds(replays[baseline])


def _seconds(outcomes: Sequence[Outcome]) -> float:
    return sum(outcome.stats.decode_sec for outcome in outcomes)


def _slower(outcome: Outcome, pace: float) -> Outcome:
    return replace(outcome, stats=replace(outcome.stats,
                                          other_sec=outcome.stats.other_sec * pace))
