# SPDX-License-Identifier: Apache-2.0
"""
What the next token is drawn from: a pure function of logits, prefix and parameters.

Target and drafts go through the same function. In this order, each with the
meaning it has in ``transformers`` (presence and frequency as in the OpenAI API):
logit bias, repetition penalty, presence and frequency penalty, min tokens (the
scores, which greedy decoding takes the largest of); temperature, top-k, top-p,
min-p (the probabilities). All in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
import math
from typing import NamedTuple

import torch
from torch import Tensor
import torch.nn.functional as F

from ..models.errors import InvalidRequestError

LARGEST_SEED = 2 ** 63 - 1
MOST_BIAS = 100.0
# What parameters may be, ends included; ints where the ends are.
RANGES: dict[str, tuple[float, float]] = {
    'temperature': (0.0, 100.0), 'top_k': (0, 2 ** 31 - 1), 'top_p': (0.0, 1.0),
    'min_p': (0.0, 1.0), 'repetition_penalty': (0.0, 100.0), 'presence_penalty': (-2.0, 2.0),
    'frequency_penalty': (-2.0, 2.0), 'min_tokens': (0, 2 ** 31 - 1),
    'seed': (-LARGEST_SEED - 1, LARGEST_SEED)}
# Closer to 0 (but for 0 itself, which says greedy or off) float32 runs out of exponents.
LEAST = {'temperature': 0.001, 'repetition_penalty': 0.01}
# A first guess at how many tokens make up a nucleus: to sort them all takes longer than a draft.
_NUCLEUS = 256


@dataclass(frozen=True)
class Sampling:
    """
    How the tokens of a request are chosen; the defaults are plain greedy decoding.

    temperature 0 is greedy. logit_bias: (id, added to its logit) pairs. seed 0:
    a new one for every request. stop_ids: end-of-sequence ids, which min_tokens
    bans; not the client's to say. The others as in msg/SamplingParams.msg.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_ids: frozenset[int] = frozenset()

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken, and nothing drawn."""
        return self.temperature == 0.0

    @property
    def keeps_scores(self) -> bool:
        """Whether scores are the logits as they are."""
        return not (self.logit_bias or self.presence_penalty or self.frequency_penalty
                    or self.repetition_penalty != 1.0 or self.min_tokens)

    def checked(self, vocabulary: int) -> Sampling:
        """
        The same with 0 read as "off" where it makes no sense as a value.

        Raises InvalidRequestError naming the field that is out of range, or an
        id of the logit bias that is none of ``vocabulary``.
        """
        for name, (low, high) in RANGES.items():
            value, least = getattr(self, name), LEAST.get(name, low)
            if not (low <= value <= high and math.isfinite(value)) or 0 < value < least:
                off = f'{low:g}' if least == low else f'0 or {least:g}'
                raise InvalidRequestError(
                    f'sampling.{name} is {value:g}, expected {off} to {high:g}')
        for token, value in self.logit_bias:
            if not 0 <= token < vocabulary:
                raise InvalidRequestError(
                    f'sampling.logit_bias_ids has {token}, expected 0 to {vocabulary - 1}, '
                    'the ids of the target')
            if not abs(value) <= MOST_BIAS:
                raise InvalidRequestError(
                    f'sampling.logit_bias_values has {value:g}, expected {-MOST_BIAS:g} to '
                    f'{MOST_BIAS:g}')
        return replace(self, top_p=self.top_p or 1.0,
                       repetition_penalty=self.repetition_penalty or 1.0)


# Those that a node's parameters or a command line may give as plain numbers.
NUMBERS = tuple(field for field in fields(Sampling) if field.name in RANGES)


class Prefix(NamedTuple):
    """What stands before a token: all tokens, the first ``prompt_length`` of them the prompt."""

    tokens: Sequence[int]
    prompt_length: int


def process(logits: Tensor, prefix: Prefix, params: Sampling,
            drafted: Sequence[int] = ()) -> Tensor:
    """
    Logits [R, V] -> scores [R, V] float32; row i follows ``prefix`` and ``drafted[:i]``.

    Drafted tokens count as output. ``logits`` stay as they are.
    """
    scores = logits.float()
    if params.logit_bias:
        ids, values = zip(*params.logit_bias)
        scores = scores.index_add(
            1, torch.tensor(ids, device=scores.device),
            torch.tensor(values, device=scores.device).expand(len(scores), -1))
    if params.repetition_penalty != 1.0:
        seen = _counts(prefix.tokens, drafted, scores) > 0
        penalty = params.repetition_penalty
        scores = torch.where(
            seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
    output = prefix.tokens[prefix.prompt_length:]
    if params.presence_penalty or params.frequency_penalty:
        counts = _counts(output, drafted, scores)
        scores = (scores - params.frequency_penalty * counts
                  - params.presence_penalty * (counts > 0))
    short = params.min_tokens - len(output)
    if short > 0 and params.stop_ids:
        scores = scores.clone()
        known = [token for token in params.stop_ids if token < scores.shape[1]]
        scores[:short, known] = -torch.inf
    return scores


def warp(logits: Tensor, prefix: Prefix, params: Sampling, drafted: Sequence[int] = ()) -> Tensor:
    """
    Logits [R, V] -> probabilities [R, V] float32; row i follows ``prefix`` and ``drafted[:i]``.

    One-hot where params are greedy. Tokens that are equally probable are kept or
    dropped together.
    """
    scores = process(logits, prefix, params, drafted)
    if params.greedy:
        return F.one_hot(scores.argmax(-1), scores.shape[-1]).float()
    # Shifted first: a low temperature makes numbers float32 cannot hold of large logits.
    scores = (scores - scores.amax(-1, keepdim=True)) / params.temperature
    if 0 < params.top_k < scores.shape[-1]:
        least = scores.topk(params.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    probs = scores.softmax(-1)
    if params.top_p < 1.0:
        probs = _keep(probs, _least_of_nucleus(probs, params.top_p))
    if params.min_p > 0.0:
        probs = _keep(probs, params.min_p * probs.amax(-1, keepdim=True))
    return probs


def _counts(tokens: Sequence[int], drafted: Sequence[int], like: Tensor) -> Tensor:
    """How often each token stands before each row: float32 as ``like`` [R, V]."""
    before = torch.bincount(torch.tensor(tokens, dtype=torch.long, device=like.device),
                            minlength=like.shape[1])
    counts = before.float().repeat(len(like), 1)
    for place, token in enumerate(drafted[:len(like) - 1], start=1):
        counts[place:, token] += 1
    return counts


def _least_of_nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Least probability [R, 1] in the smallest set of tokens that adds up to ``top_p``."""
    size = min(_NUCLEUS, probs.shape[-1])
    while True:
        largest = probs.topk(size).values
        before = largest.cumsum(-1) - largest
        if size == probs.shape[-1] or bool((before[:, -1] >= top_p).all()):
            break
        size = min(16 * size, probs.shape[-1])
    kept = (before < top_p).sum(-1, keepdim=True).clamp(min=1)
    return largest.gather(-1, kept - 1)


def _keep(probs: Tensor, least: Tensor) -> Tensor:
    """Drop tokens of less than ``least`` [R, 1], and let the others add up to 1."""
    probs = probs.masked_fill(probs < least, 0.0)
    return probs / probs.sum(-1, keepdim=True)
