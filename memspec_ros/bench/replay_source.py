# SPDX-License-Identifier: Apache-2.0
"""Outcomes from traces: replayed on a virtual clock, the same twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ..decoding.stats import GenerationStats
from ..models.bundle import DraftSpec
from ..models.drafts import KINDS
from ..models.errors import InvalidRequestError
from ..runtime.policies import make_policy, StaticPolicy
from ..runtime.ranking import Ranker
from ..training.ranker import keys_sha256
from ..training.trace_store import Trace, TraceHeader
from .bound import bound
from .oracles import BlindOraclePolicy, oracle_static, OracleDynamicPolicy
from .replay import Replayer, Scenario
from .source import (
    BLIND,
    BOUND,
    Contender,
    ORACLE_DYNAMIC,
    ORACLE_STATIC,
    Outcome,
    PLAIN,
    PlainPolicy,
    policy_names,
    STATIC,
    SwitchCost,
    variants,
)


class ReplaySource:
    """
    A Source over traces.

    ``conversations``: each the traces of its turns; where all have one they are
    prompts, summed by domain, else turns are summed by their number. ``ranker``
    and ``tokenizer`` as for Replayer. Raises InvalidRequestError where there is
    nothing to replay.
    """

    mode, deterministic = 'replay', True

    def __init__(self, conversations: Sequence[Sequence[Trace]], header: TraceHeader,
                 drafts: Sequence[DraftSpec], scenario: Scenario, ranker: Ranker | None = None,
                 tokenizer=None):
        if not conversations:
            raise InvalidRequestError('there are no traces to replay')
        self.header, self.drafts, self.scenario = header, list(drafts), scenario
        self.ranker, self.tokenizer = ranker, tokenizer
        self.most_tokens = header.max_new_tokens
        self._conversations = conversations
        self._by_turn = any(len(turns) > 1 for turns in conversations)
        self.prompts = dict(sorted(Counter(
            self._place(number, trace) for turns in conversations
            for number, trace in enumerate(turns, 1)).items()))
        # Of a conversation it does not know what earlier turns have left in memory.
        self.policies = tuple(name for name in policy_names()
                              if name != BOUND or not self._by_turn)

    @property
    def traces(self) -> list[Trace]:
        """Of all turns."""
        return [trace for turns in self._conversations for trace in turns]

    def heading(self) -> str:
        profile = self.scenario.profile
        load = 'as its storage has it' if profile.load_ratio is None else (
            f'{profile.load_ratio:g} iterations')
        return (f'{self.mode}, profile {profile.name}, a load takes {load}; '
                f'K = {self.scenario.cache_capacity}, N = {self.scenario.interval}, '
                f'{self.scenario.gamma} drafted tokens, {self.scenario.max_new_tokens} tokens at '
                f'most, {sum(self.prompts.values())} prompts')

    def about(self) -> dict[str, Any]:
        return {
            'mode': self.mode, 'deterministic': self.deterministic, 'prompts': self.prompts,
            'prompts_sha256': keys_sha256(trace.key for trace in self.traces),
            'bundle': self.header.bundle, 'dtype': self.header.dtype,
            'drafts': [spec.id for spec in self.drafts],
            'scenario': {**asdict(self.scenario), 'profile': self.scenario.profile.as_dict()}}

    def variants(self, name: str, scenario: Scenario) -> Mapping[str, Contender]:
        return variants(name)

    def run(self, contenders: Iterable[Contender], scenario: Scenario
            ) -> Iterator[tuple[Contender, Outcome]]:
        contenders = list(contenders)
        replayer = self._replayer(scenario)
        for turns in self._conversations:
            for contender in contenders:
                for outcome in self._placed(turns, answer(replayer, turns, contender)):
                    yield contender, outcome

    def switch_costs(self) -> list[SwitchCost]:
        profile, gamma = self.scenario.profile, self.scenario.gamma
        return [SwitchCost(spec.id, profile.iteration(spec, gamma),
                           profile.with_load_ratio(None).load(spec, gamma),
                           profile.load(spec, gamma))
                for spec in self.drafts if not KINDS[spec.kind].slot_free]

    def _replayer(self, scenario: Scenario) -> Replayer:
        return Replayer(self.header, self.drafts, scenario, self.ranker, self.tokenizer)

    def _placed(self, turns: Sequence[Trace], outcomes: Sequence[Outcome]) -> Iterator[Outcome]:
        for number, (trace, outcome) in enumerate(zip(turns, outcomes), 1):
            yield replace(outcome, domain=self._place(number, trace))

    def _place(self, number: int, trace: Trace) -> str:
        return f'turn {number}' if self._by_turn else trace.domain


def answer(replayer: Replayer, turns: Sequence[Trace], contender: Contender) -> list[Outcome]:
    """
    The turns of a conversation under ``contender``.

    ``replayer``: a RealRunner too, but for BOUND and BLIND. Raises MemSpecError.
    """
    name, options = contender.policy, dict(contender.options)
    if name == ORACLE_STATIC:
        return oracle_static(replayer, turns)
    if name == ORACLE_DYNAMIC:
        return replayer.converse(turns, OracleDynamicPolicy)
    if name == BLIND:
        return replayer.converse(turns, BlindOraclePolicy)
    if name == STATIC:
        return replayer.converse(turns, lambda world: StaticPolicy(options['draft']))
    if name == PLAIN:
        return replayer.converse(turns, lambda world: PlainPolicy())
    if name == BOUND:
        outcomes = []
        for trace in turns:
            tokens, seconds = bound(replayer, trace)
            outcomes.append(Outcome(trace.key, trace.domain, [], [], GenerationStats(
                output_tokens=tokens, other_sec=seconds)))
        return outcomes
    return replayer.converse(
        turns, lambda world: make_policy(name, world.drafts, world.ranker, **options))
