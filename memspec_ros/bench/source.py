# SPDX-License-Identifier: Apache-2.0
"""
What is run: prompts answered under a policy, whoever answers them.

Suites (bench/suites) sum and show what comes from a Source and cannot tell
sources apart: one replays traces (replay_source.py), one runs the engine (real_source.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TYPE_CHECKING

from ..decoding.stats import GenerationStats, StepRecord
from ..models.bundle import DraftSpec
from ..models.errors import InvalidRequestError
from ..runtime.policies import Plan, Policy, POLICY_NAMES
from ..runtime.ranking import RankingContext

if TYPE_CHECKING:
    from .replay import Scenario

# Beside the policies of runtime/policies: oracles, the bound, one draft of choice, none, and (in
# replays) oracle_dynamic without its foresight.
BASELINE = 'general_static'
ORACLE_STATIC, ORACLE_DYNAMIC, BOUND = 'oracle_static', 'oracle_dynamic', 'bound'
STATIC, PLAIN, BLIND = 'static', 'plain', 'blind'
# Bandits are run with each of these and with both intervals; the best is reported.
UCB_C = (0.1, 0.5, 1.0, 2.0, 3.0)
BANDITS = ('ucb_sync', 'ucb_async')


def policy_names() -> tuple[str, ...]:
    """Everything that is compared: the baseline, what can be deployed, oracles, the bound."""
    others = [name for name in POLICY_NAMES if name not in (BASELINE, 'memspec')]
    return (BASELINE, ORACLE_STATIC, *others, 'memspec', ORACLE_DYNAMIC, BOUND)


def check_policies(names: Iterable[str]) -> None:
    """Refuse what is not one of ``policy_names``; InvalidRequestError."""
    for name in names:
        if name not in policy_names():
            raise InvalidRequestError(f'policy {name!r} is not known; there are: '
                                      f'{", ".join(policy_names())}')


@dataclass(frozen=True)
class Contender:
    """
    One way to answer prompts.

    policy: of ``policy_names``, or STATIC (option ``draft``: its id), or PLAIN
    for no draft at all, or BLIND. options: those of ``make_policy``.
    """

    policy: str
    options: tuple[tuple[str, Any], ...] = ()


def variants(name: str) -> dict[str, Contender]:
    """Ways that a policy is tried in, by what they are called."""
    if name not in BANDITS:
        return {'': Contender(name)}
    return {f'c = {c:g}, per {"iteration" if often else "interval"}':
            Contender(name, (('ucb_c', c), ('ucb_per_iteration', often)))
            for often in (False, True) for c in UCB_C}


class PlainPolicy(Policy):
    """No draft at all."""

    def plan(self, context: RankingContext) -> Plan:
        return Plan([], prefetch=False)


@dataclass(frozen=True)
class Outcome:
    """
    One prompt, answered: what was emitted, by which steps, and in what time.

    domain: what it is summed under. Of a bound only tokens and seconds are known.
    replay: of the same, by the profile measured before it; None of what is replayed.
    """

    key: str
    domain: str
    ids: list[int]
    steps: list[StepRecord] = field(repr=False)
    stats: GenerationStats
    replay: Outcome | None = field(default=None, repr=False)


@dataclass(frozen=True)
class SwitchCost:
    """
    What using a draft that is not there costs, in milliseconds.

    iteration: with that draft, at the full draft length. load: from this machine's
    storage. set_load: in this benchmark, whose storage may be set to be slower.
    """

    draft: str
    iteration_ms: float
    load_ms: float
    set_load_ms: float


class Source(Protocol):
    """
    Where outcomes come from.

    Attributes
    ----------
    mode: how prompts are answered, 'replay' or 'real'
    deterministic: a second run would say the same
    scenario: K, N, draft length, tokens: suites change some of its fields
    drafts: those that may be used
    prompts: how many, by what outcomes are summed under
    most_tokens: of the longest answers it can give
    policies: of ``policy_names``, those it can run

    """

    mode: str
    deterministic: bool
    scenario: Scenario
    drafts: Sequence[DraftSpec]
    prompts: Mapping[str, int]
    most_tokens: int
    policies: Sequence[str]

    def heading(self) -> str:
        """One line: the machine, and what suites do not change of the scenario."""

    def about(self) -> dict[str, Any]:
        """
        Plain data that says what was run.

        ``mode``, ``deterministic``, ``prompts``, ``prompts_sha256``, ``bundle``
        (sha256 of its manifest), ``dtype``, ``drafts`` (ids) and ``scenario``.
        """

    def variants(self, name: str, scenario: Scenario) -> Mapping[str, Contender]:
        """Ways that a policy is to be tried in, by what they are called."""

    def run(self, contenders: Iterable[Contender], scenario: Scenario
            ) -> Iterator[tuple[Contender, Outcome]]:
        """
        Every prompt under every contender, each with cache, policy and context as new.

        Where time is measured, contenders take turns prompt by prompt. Raises
        MemSpecError.
        """

    def switch_costs(self) -> list[SwitchCost]:
        """Of every draft that has to be loaded."""
