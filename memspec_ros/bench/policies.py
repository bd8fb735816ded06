# SPDX-License-Identifier: Apache-2.0
"""
Suite ``policies``: what every way to schedule drafts is worth (MemSpec, Figs. 1, 6, 7, 8, 9).

Throughput normalised to one general draft for everything, acceptance, and where
the time goes. Cache, policy and context are as new for every prompt, and the
prefill is left out, as in the paper.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
import math
import statistics
from typing import Any

from ..decoding.stats import TIME_SHARES
from ..models.bundle import DraftSpec
from ..models.errors import InvalidRequestError
from ..runtime.policies import make_policy, POLICY_NAMES
from ..runtime.ranking import Ranker
from ..training.trace_store import Trace, TraceHeader
from .bound import bound
from .oracles import oracle_static, OracleDynamicPolicy
from .replay import Outcome, Replayer, Scenario

BASELINE, BOUND, GMEAN = 'general_static', 'bound', 'gmean'
# Bandits are run with each of these and with both intervals; the best is reported.
UCB_C = (0.1, 0.5, 1.0, 2.0, 3.0)
_BANDITS = ('ucb_sync', 'ucb_async')


def policy_names() -> tuple[str, ...]:
    """Everything the suite compares: the baseline, what can be deployed, oracles, the bound."""
    others = [name for name in POLICY_NAMES if name not in (BASELINE, 'memspec')]
    return (BASELINE, 'oracle_static', *others, 'memspec', 'oracle_dynamic', BOUND)


def variants(name: str) -> dict[str, dict[str, Any]]:
    """Options of ``make_policy`` that a policy is tried with, by what they are called."""
    if name not in _BANDITS:
        return {'': {}}
    return {f'c = {c:g}, per {"iteration" if often else "interval"}':
            {'ucb_c': c, 'ucb_per_iteration': often} for often in (False, True) for c in UCB_C}


def run_policy(replayer: Replayer, trace: Trace, name: str, **options: Any) -> Outcome:
    """One trace under one policy, deployable (``options`` of make_policy) or oracle."""
    if name == 'oracle_static':
        return oracle_static(replayer, trace)
    if name == 'oracle_dynamic':
        return replayer.run(trace, OracleDynamicPolicy)
    return replayer.run(
        trace, lambda world: make_policy(name, world.drafts, world.ranker, **options))


class _Sums:
    """What was counted of one policy, by domain."""

    def __init__(self) -> None:
        self.tokens: dict[str, int] = defaultdict(int)
        self.seconds: dict[str, float] = defaultdict(float)
        self.drafted: dict[str, int] = defaultdict(int)
        self.accepted: dict[str, int] = defaultdict(int)
        self.shares: dict[str, float] = dict.fromkeys(TIME_SHARES, 0.0)
        self.iterations = self.loads = self.switches = 0
        self.by_prompt: dict[str, float] = {}

    def add(self, key: str, domain: str, tokens: int, seconds: float) -> None:
        self.tokens[domain] += tokens
        self.seconds[domain] += seconds
        self.by_prompt[key] = tokens / seconds

    def add_outcome(self, outcome: Outcome) -> None:
        stats, domain = outcome.stats, outcome.domain
        self.add(outcome.key, domain, stats.output_tokens, stats.decode_sec)
        self.drafted[domain] += stats.drafted
        self.accepted[domain] += stats.accepted
        for share in TIME_SHARES:
            self.shares[share] += getattr(stats, f'{share}_sec')
        self.iterations += stats.iterations
        self.loads += stats.loads
        self.switches += stats.switches

    def throughput(self) -> dict[str, float]:
        """Tokens per second of decoding, by domain."""
        return {domain: self.tokens[domain] / self.seconds[domain] for domain in self.tokens}

    def acceptance(self) -> dict[str, float | None]:
        """Accepted per drafted token, by domain; None where nothing was drafted."""
        rates = {domain: self.accepted[domain] / self.drafted[domain]
                 if self.drafted[domain] else None for domain in self.tokens}
        return {**rates, GMEAN: geometric_mean(rates.values())}

    def breakdown(self) -> dict[str, float]:
        """Shares of the time, 1 together."""
        whole = sum(self.shares.values())
        return {share: value / whole for share, value in self.shares.items()}


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Of positive numbers; None where one is missing or 0, or there are none."""
    known = list(values)
    if not known or not all(known):
        return None
    return math.exp(statistics.fmean(math.log(value) for value in known))


def run_policies(traces: Iterable[Trace], header: TraceHeader, drafts: Sequence[DraftSpec],
                 scenario: Scenario, ranker: Ranker | None = None, tokenizer=None,
                 policies: Sequence[str] = ()) -> dict[str, Any]:
    """
    Replay ``traces`` under every policy (``policies``: all) in ``scenario``.

    ``ranker`` and ``tokenizer`` as for Replayer. Tokens and seconds of a domain
    are pooled over its prompts; ``gmean`` is over domains. Returns plain data, see
    docs/benchmarks.md. Raises MemSpecError.
    """
    names = list(policies) or list(policy_names())
    for name in names:
        if name not in policy_names():
            raise InvalidRequestError(f'policy {name!r} is not known; there are: '
                                      f'{", ".join(policy_names())}')
    if BASELINE not in names:
        names.insert(0, BASELINE)
    replayer = Replayer(header, drafts, scenario, ranker, tokenizer)
    tried = {name: {label: _Sums() for label in variants(name)} for name in names}
    prompts: dict[str, int] = defaultdict(int)
    for trace in traces:
        prompts[trace.domain] += 1
        for name in names:
            if name == BOUND:
                tokens, seconds = bound(replayer, trace)
                tried[name][''].add(trace.key, trace.domain, tokens, seconds)
                continue
            for label, options in variants(name).items():
                tried[name][label].add_outcome(run_policy(replayer, trace, name, **options))
    if not prompts:
        raise InvalidRequestError('there are no traces to replay')
    best = {name: max(ways, key=lambda label: geometric_mean(ways[label].throughput().values()))
            for name, ways in tried.items()}
    sums = {name: tried[name][label] for name, label in best.items()}
    throughput = {name: sums[name].throughput() for name in names}
    normalised = {name: {domain: value / throughput[BASELINE][domain]
                         for domain, value in sorted(rates.items())}
                  for name, rates in throughput.items()}
    for rates in normalised.values():
        rates[GMEAN] = geometric_mean(rates.values())
    plain = 1e3 / (scenario.profile.verify(1) + scenario.profile.overhead_ms)
    run = [name for name in names if name != BOUND]
    return {
        'normalised': normalised,
        'acceptance': {name: sums[name].acceptance() for name in run},
        'breakdown': {name: sums[name].breakdown() for name in run},
        'tokens_per_sec': throughput,
        # Without any draft: where it is faster, a fixed draft length is what loses.
        'plain': {**{domain: plain / throughput[BASELINE][domain] for domain in sorted(prompts)},
                  GMEAN: geometric_mean(plain / value for value in throughput[BASELINE].values())},
        'tokens_per_iteration': {name: sum(sums[name].tokens.values()) / sums[name].iterations
                                 for name in run},
        'loads': {name: sums[name].loads for name in run},
        'switches': {name: sums[name].switches for name in run},
        'prompt_tokens_per_sec': {name: sums[name].by_prompt for name in names},
        'best_variant': {name: label for name, label in best.items() if label},
        'variants': {name: {label: geometric_mean(
            speed / throughput[BASELINE][domain] for domain, speed in way.throughput().items())
            for label, way in ways.items()} for name, ways in tried.items() if len(ways) > 1},
        'prompts': dict(sorted(prompts.items())),
        'bundle': header.bundle, 'dtype': header.dtype, 'drafts': [spec.id for spec in drafts],
        'scenario': {**asdict(scenario), 'profile': scenario.profile.as_dict()}}


def format_table(result: dict[str, Any]) -> str:
    """The result as text."""
    scenario, domains = result['scenario'], [*result['prompts'], GMEAN]
    profile = scenario['profile']
    load = 'as its storage has it' if profile['load_ratio'] is None else (
        f'{profile["load_ratio"]:g} iterations')
    lines = [f'profile {profile["name"]}, a load takes {load}; K = {scenario["cache_capacity"]}, '
             f'N = {scenario["interval"]}, {scenario["gamma"]} drafted tokens, '
             f'{sum(result["prompts"].values())} prompts',
             '', f'tokens/s over those of {BASELINE}',
             _row('', domains, 9)]
    for name, rates in (*result['normalised'].items(), ('(no draft)', result['plain'])):
        lines.append(_row(name, [_number(rates[domain]) for domain in domains], 9))
    lines += ['', 'accepted per drafted token, then shares of the time',
              _row('', ['accepted', *TIME_SHARES, 'loads'], 11)]
    for name, shares in result['breakdown'].items():
        cells = [_number(result['acceptance'][name][GMEAN]),
                 *(f'{100 * shares[share]:.1f} %' for share in TIME_SHARES),
                 str(result['loads'][name])]
        lines.append(_row(name, cells, 11))
    lines += ['', *(f'{name}: {label}, the best of {len(result["variants"][name])}'
                    for name, label in result['best_variant'].items())]
    return '\n'.join(lines).rstrip()


def _number(value: float | None) -> str:
    return '-' if value is None else f'{value:.3f}'


def _row(name: str, cells: Sequence[str], width: int) -> str:
    return f'{name:16}' + ''.join(f'{cell:>{width}}' for cell in cells)
