# SPDX-License-Identifier: Apache-2.0
"""
Exact checks on a small vocabulary: is what comes out distributed as the target says?

Every way the random draws of an iteration can fall is gone through with its
probability, so that the distribution of the output is computed, not estimated.
The target's own distribution comes from the processors of ``transformers``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
import itertools

import torch
from torch import Tensor

from ..decoding.chance import Chance, Purpose
from ..decoding.sampler import CoupledSampler, RejectionSampler, Sampler
from ..decoding.sampling import Prefix, Sampling
from ..models.state import DecodeState, Proposal

# Float32 products of a few probabilities; a wrong rule is off by percents.
TOLERANCE = 1e-5
_VOCABULARY = 5
_GAMMA = 2
_SEEDS = 4
# Draws that the frequencies of plain sampling are judged by.
_DRAWS = 20_000
_PROMPT = [0, 3, 3]
_OUTPUT = [1, 3]
_PROCESSORS = (
    {'logit_bias': ((1, 1.5), (2, -1.0))}, {'repetition_penalty': 1.4}, {'presence_penalty': 0.5},
    {'frequency_penalty': 0.4}, {'min_tokens': 4, 'stop_ids': frozenset({4})},
    {'temperature': 0.7}, {'top_k': 4}, {'top_p': 0.85}, {'min_p': 0.1})

Logits = Callable[[Sequence[int]], Tensor]


class _Path:
    """A Chance whose draws fall as told, and as they may where nothing is told."""

    def __init__(self, path: list[int]):
        self.path = path
        self.options: list[int] = []
        self.weight = 1.0

    def draw(self, probs: Tensor, position: int, purpose: Purpose = Purpose.TOKEN) -> int:
        possible = probs.nonzero().flatten().tolist()
        token = possible[self._fall(len(possible))]
        self.weight *= float(probs[token] / probs.sum())
        return token

    def accepts(self, p: float, q: float, position: int) -> bool:
        share = min(1.0, p / q)
        answers = [answer for answer, chance in ((True, share), (False, 1.0 - share)) if chance]
        accepted = answers[self._fall(len(answers))]
        self.weight *= share if accepted else 1.0 - share
        return accepted

    def forget(self, position: int) -> None:
        """Nothing is kept."""

    def _fall(self, options: int) -> int:
        if len(self.options) == len(self.path):
            self.path.append(0)
        self.options.append(options)
        return self.path[len(self.options) - 1]


def outcomes(program: Callable[[_Path], tuple]) -> dict[tuple, float]:
    """Results of ``program(chance)`` with their probabilities, over all ways draws can fall."""
    found: dict[tuple, float] = defaultdict(float)
    path: list[int] = []
    while True:
        chance = _Path(path)
        found[program(chance)] += chance.weight
        while path and path[-1] == chance.options[len(path) - 1] - 1:
            path.pop()
        if not path:
            return dict(found)
        path[-1] += 1


def iterate(sampler: Sampler, state: DecodeState, target: Logits, draft: Logits, gamma: int,
            ids: Tensor | None = None) -> tuple[int, ...]:
    """Draft, verify: the tokens of one iteration; ``ids``: of the draft's vocabulary."""
    choices: list[tuple[int, Tensor | None]] = []
    while len(choices) < gamma:
        drafted = [token for token, _ in choices]
        choice = sampler.choose(state, draft([*state.tokens, *drafted]), drafted, ids)
        if choice is None:
            break
        choices.append(choice)
    proposal = Proposal.of(choices)
    rows = [target([*state.tokens, *proposal.tokens[:i]]) for i in range(len(choices) + 1)]
    return tuple(sampler.verify(state, torch.stack(rows), proposal)[1])


def state_of(prompt: Sequence[int], output: Sequence[int], capacity: int = 64) -> DecodeState:
    """A state that holds tokens, and nothing that was computed from them."""
    state = DecodeState(None, {}, capacity)
    state.tokens, state.prompt_length = [*prompt, *output], len(prompt)
    return state


def by_transformers(row: Tensor, prefix: Prefix, params: Sampling) -> tuple[Tensor, Tensor]:
    """
    Scores [V] and probabilities [V] of logits ``row`` [V] by the processors of transformers.

    Presence and frequency penalty, which it lacks, as the OpenAI API defines them.
    """
    from transformers.generation import logits_process as hf
    ids, output = torch.tensor([prefix.tokens]), prefix.tokens[prefix.prompt_length:]
    processors, warpers = hf.LogitsProcessorList(), hf.LogitsProcessorList()
    if params.logit_bias:
        processors.append(hf.SequenceBiasLogitsProcessor(
            {(token,): float(value) for token, value in params.logit_bias}))
    if params.repetition_penalty != 1.0:
        processors.append(hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.min_tokens:
        processors.append(hf.MinNewTokensLengthLogitsProcessor(
            prefix.prompt_length, params.min_tokens, sorted(params.stop_ids), device='cpu'))
    if params.temperature:
        warpers.append(hf.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        warpers.append(hf.TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(hf.TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(hf.MinPLogitsWarper(params.min_p))
    scores = processors(ids, row[None].clone())
    for token in set(output):
        scores[0, token] -= (params.presence_penalty
                             + params.frequency_penalty * output.count(token))
    return scores[0], warpers(ids, scores)[0].softmax(-1)


def combinations() -> Iterator[Sampling]:
    """Sampling with every combination of processors."""
    for chosen in itertools.product((False, True), repeat=len(_PROCESSORS)):
        params = Sampling(temperature=1.0)
        for change in itertools.compress(_PROCESSORS, chosen):
            params = replace(params, **change)
        yield params


def random_logits(seed: int, vocabulary: int = _VOCABULARY, spread: float = 1.5) -> Logits:
    """A made-up model: logits that depend on the last two tokens."""
    table = torch.randn(vocabulary, vocabulary, vocabulary,
                        generator=torch.Generator().manual_seed(seed)) * spread
    return lambda prefix: table[prefix[-2], prefix[-1]]


def output_error(params: Sampling, target: Logits, draft: Logits, gamma: int,
                 ids: Tensor | None = None, min_confidence: float = 0.0) -> float:
    """
    How far rejection sampling is from the target, at most, over all outputs of gamma + 1 tokens.

    Computed: 0 but for rounding where the rule is right.
    """
    state = state_of(_PROMPT, _OUTPUT)

    def program(chance) -> tuple[int, ...]:
        sampler = RejectionSampler(params, len(target(state.tokens)), min_confidence,
                                   chance=chance)
        return iterate(sampler, state, target, draft, gamma, ids)

    known: dict[tuple[int, ...], list[float]] = {}

    def follows(tokens: tuple[int, ...]) -> list[float]:
        """The target's probabilities of what follows the output and ``tokens``."""
        if tokens not in known:
            before = Prefix([*state.tokens, *tokens], state.prompt_length)
            known[tokens] = by_transformers(target(before.tokens), before, params)[1].tolist()
        return known[tokens]

    # A block shorter than gamma + 1 goes on as the target does.
    difference: dict[tuple[int, ...], float] = defaultdict(float)
    for weight, blocks in ((-1.0, {(): 1.0}), (1.0, outcomes(program))):
        for _ in range(gamma + 1):
            longer: dict[tuple[int, ...], float] = defaultdict(float)
            for block, chance in blocks.items():
                if len(block) == gamma + 1:
                    longer[block] += chance
                    continue
                for token, share in enumerate(follows(block)):
                    longer[(*block, token)] += chance * share
            blocks = longer
        for block, chance in blocks.items():
            difference[block] += weight * chance
    return max(map(abs, difference.values()))


def coupled_differs(params: Sampling, target: Logits, draft: Logits, gamma: int) -> bool:
    """Whether coupled verification ever gives another output than plain sampling."""
    state = state_of(_PROMPT, _OUTPUT)
    for seed in range(1, _SEEDS + 1):
        sampler = CoupledSampler(replace(params, seed=seed), len(target(state.tokens)))
        block = iterate(sampler, state, target, draft, gamma)
        chance, tokens = Chance(seed), list(state.tokens)
        for token in block:
            probs = by_transformers(target(tokens), Prefix(tokens, state.prompt_length), params)[1]
            if token != chance.draw(probs, len(tokens)):
                return True
            tokens.append(token)
    return False


def check(report: Callable[[str], None] = print) -> dict:
    """
    All checks, for every combination of processors.

    Returns ``combinations``, ``largest_error`` (of a probability, by rejection),
    ``coupled_differing`` and ``draws_p`` (of the frequencies of plain draws).
    """
    from .chi_square import goodness_of_fit
    errors, differing = [], 0
    for seed, params in enumerate(combinations()):
        target, draft = random_logits(seed), random_logits(10_000 + seed)
        errors.append(output_error(params, target, draft, _GAMMA))
        differing += coupled_differs(params, target, draft, _GAMMA)
        if seed % 128 == 127:
            report(f'exact: {seed + 1} combinations of processors')
    probs = random_logits(0)([0, 1]).softmax(-1)
    counts = torch.zeros(len(probs))
    for seed in range(1, _DRAWS + 1):
        counts[Chance(seed).draw(probs, 7)] += 1
    return {'combinations': len(errors), 'largest_error': max(errors),
            'coupled_differing': differing, 'draws_p': goodness_of_fit(counts, probs).p}
