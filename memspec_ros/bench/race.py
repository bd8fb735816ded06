# SPDX-License-Identifier: Apache-2.0
"""
Contenders that answer the same prompts in one process, in turn.

The order rotates from prompt to prompt, so that whatever else the machine does
hits all alike. Tokens are those that a contender really emitted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
import hashlib
import math
from pathlib import Path
import statistics

import torch

from ..decoding.stats import GenerationStats
from ..models.errors import InvalidRequestError, MemSpecError
from ..models.kernel_choice import processor
from ..models.target import Target
from ..runtime.requests import Finish, GenerationRequest
from ..runtime.runtime import Runtime
from ..training.outputs import read_prompts


@dataclass(frozen=True)
class Answer:
    """Ids emitted, seconds from the prompt to the last of them; stats of our own engine."""

    ids: list[int]
    seconds: float
    stats: GenerationStats | None = None


@dataclass
class Tally:
    """Answers of one contender, by domain."""

    answers: dict[str, list[Answer]] = field(default_factory=lambda: defaultdict(list))

    def all(self, domain: str | None = None) -> list[Answer]:
        """Those of a domain, or of all, in the order of the prompts."""
        domains = self.answers if domain is None else (domain,)
        return [answer for name in domains for answer in self.answers[name]]

    def speed(self, domain: str | None = None) -> float:
        """Tokens per second, prefill included, pooled."""
        answers = self.all(domain)
        return sum(len(a.ids) for a in answers) / sum(a.seconds for a in answers)

    def differing(self, other: Tally) -> int:
        """Answers whose ids are not those of ``other``."""
        return sum(a.ids != b.ids for a, b in zip(self.all(), other.all()))


# Answers a prompt with at most so many tokens.
Runner = Callable[[str, int], Answer]


def choose_prompts(prompts: Path, per_domain: int) -> list[tuple[str, str]]:
    """(domain, prompt), domain by domain; ``per_domain`` 0 for all. Raises MemSpecError."""
    groups: dict[str, list[str]] = defaultdict(list)
    for domain, prompt in read_prompts(prompts):
        if not per_domain or len(groups[domain]) < per_domain:
            groups[domain].append(prompt)
    chosen = [(domain, text) for domain, texts in groups.items() for text in texts]
    if not chosen:
        raise InvalidRequestError(f'{prompts}: no prompts in it')
    return chosen


def race(runners: Mapping[str, Runner], texts: Sequence[tuple[str, str]], limit: int,
         report: Callable[[str], None]) -> dict[str, Tally]:
    """Have every contender answer every (domain, prompt); ``report`` receives a line a prompt."""
    names = list(runners)
    tallies = {name: Tally() for name in names}
    for name in names:  # the first answer of each pays for its kernels
        runners[name](texts[0][1], limit)
    for turn, (domain, text) in enumerate(texts):
        for shift in range(len(names)):
            name = names[(turn + shift) % len(names)]
            tallies[name].answers[domain].append(runners[name](text, limit))
        report(f'{domain}: {turn + 1} of {len(texts)}')
    return tallies


def answer(runtime: Runtime, prompt: str, limit: int, speculate: bool) -> Answer:
    """Our own answer, nothing of the prompt being in the cache; MemSpecError if it fails."""
    controller = runtime.controller
    controller.settings.speculate = speculate
    # Every contender computes the prompt.
    controller.engine.state.hold(0)
    start = controller.clock()
    request = runtime.prepare(GenerationRequest(prompt, max_new_tokens=limit))
    chunks = list(controller.generate(request))
    seconds = controller.clock() - start
    last = chunks[-1]
    if last.finish not in (Finish.STOP, Finish.LENGTH):
        raise MemSpecError(last.message or last.finish.value)
    return Answer([token for chunk in chunks for token in chunk.token_ids], seconds, last.stats)


def geometric_mean(values) -> float:
    """Of positive numbers."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


def conditions(target: Target, prompts: Path | None = None) -> dict:
    """What a result holds for: type, device, processor, versions, prompts."""
    known = {'dtype': str(target.dtype), 'device': str(target.device), 'processor': processor(),
             'torch': torch.__version__, 'torch_threads': torch.get_num_threads()}
    if prompts is not None:
        known['prompts_sha256'] = hashlib.sha256(prompts.read_bytes()).hexdigest()
    return known
