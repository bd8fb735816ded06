# SPDX-License-Identifier: Apache-2.0
"""Outcomes added up, and means over domains."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
import math
import statistics

from ...decoding.stats import TIME_SHARES
from ..source import Outcome

GMEAN = 'gmean'


class Sums:
    """What was counted of one contender; by domain, times in seconds."""

    def __init__(self) -> None:
        self.tokens: dict[str, int] = defaultdict(int)
        self.decode: dict[str, float] = defaultdict(float)
        # From the prompt to the last token.
        self.whole: dict[str, float] = defaultdict(float)
        self.first_token: dict[str, list[float]] = defaultdict(list)
        self.iterations: dict[str, int] = defaultdict(int)
        self.drafted: dict[str, int] = defaultdict(int)
        self.accepted: dict[str, int] = defaultdict(int)
        self.shares: dict[str, float] = dict.fromkeys(TIME_SHARES, 0.0)
        self.loads = self.switches = 0
        # Tokens per second, by the prompt's key.
        self.by_prompt: dict[str, float] = {}
        # Those of a replay over those of the run, where there was one, and other answers than
        # there.
        self.replay_over_real: dict[str, float] = {}
        self.differing = 0

    def add(self, outcome: Outcome) -> None:
        stats, domain = outcome.stats, outcome.domain
        self.tokens[domain] += stats.output_tokens
        self.decode[domain] += stats.decode_sec
        self.whole[domain] += stats.total_sec
        self.first_token[domain].append(stats.time_to_first_token_sec)
        self.iterations[domain] += stats.iterations
        self.drafted[domain] += stats.drafted
        self.accepted[domain] += stats.accepted
        for share in TIME_SHARES:
            self.shares[share] += getattr(stats, f'{share}_sec')
        self.loads += stats.loads
        self.switches += stats.switches
        self.by_prompt[outcome.key] = stats.tokens_per_sec or 0.0
        if outcome.replay is not None:
            self.replay_over_real[outcome.key] = (outcome.replay.stats.tokens_per_sec
                                                  / stats.tokens_per_sec)
            self.differing += outcome.ids != outcome.replay.ids

    def throughput(self) -> dict[str, float]:
        """Tokens per second of decoding."""
        return {domain: self.tokens[domain] / self.decode[domain] for domain in self.tokens}

    def speed(self) -> float | None:
        """Geometric mean of the throughputs."""
        return geometric_mean(self.throughput().values())

    def latency(self) -> dict[str, float]:
        """Seconds from the prompt to the last token, all prompts together."""
        return dict(self.whole)

    def acceptance(self) -> dict[str, float | None]:
        """Accepted per drafted token; None where nothing was drafted."""
        return {domain: self.accepted[domain] / self.drafted[domain]
                if self.drafted[domain] else None for domain in self.tokens}

    def accepted_per_iteration(self) -> dict[str, float]:
        """Tokens of a draft that an iteration gains."""
        return {domain: self.accepted[domain] / self.iterations[domain]
                for domain in self.tokens}

    def breakdown(self) -> dict[str, float]:
        """Shares of the time, 1 together."""
        whole = sum(self.shares.values())
        return {share: value / whole for share, value in self.shares.items()}

    def tokens_per_iteration(self) -> float:
        """Tokens of a pass of the target, its own included."""
        return sum(self.tokens.values()) / sum(self.iterations.values())


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Of positive numbers; None where one is missing or 0, or there are none."""
    known = list(values)
    if not known or not all(known):
        return None
    return math.exp(statistics.fmean(math.log(value) for value in known))


def with_gmean(values: dict[str, float | None]) -> dict[str, float | None]:
    """By domain in order, and their geometric mean."""
    return {**dict(sorted(values.items())), GMEAN: geometric_mean(values.values())}
