# SPDX-License-Identifier: Apache-2.0
"""What drafts learn from, in batches: lessons cut to a draft's shape and vocabulary."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
import torch.nn.functional as F

from ..models.layers import layer_elements
from ..models.llama import Llama
from ..models.llama_config import LlamaConfig
from .outputs import OutputRecord
from .teacher import Lesson

if TYPE_CHECKING:
    from .student import StudentShape

# Share of the positions of lessons that a training step scores, about: those of outputs and few
# of the prompts'.
SCORED = 0.6


@dataclass(frozen=True)
class TopShape:
    """
    What a draft is made of.

    kind: ``shared_layers`` or ``feature``. depth: target layers reused (L).
    layers: own ones. features: depths of the target's hidden states that a
    ``feature`` draft reads besides.
    """

    kind: str = 'shared_layers'
    depth: int = 2
    layers: int = 1
    features: tuple[int, ...] = ()

    @property
    def depths(self) -> frozenset[int]:
        """Depths of target hidden states needed to train it."""
        return frozenset((self.depth, *self.features)) - {0}

    @property
    def options(self) -> dict:
        """Options of the draft in a manifest."""
        options = {'depth': self.depth, 'layers': self.layers}
        return {**options, 'features': list(self.features)} if self.features else options

    def products(self, config: LlamaConfig, vocabulary: int) -> float:
        """Multiply-adds of training on a position, about; ``vocabulary``: of the trimmed head."""
        # Forward, and back to inputs and weights; the head does not learn.
        return 3 * self.parameters(config) + 2 * SCORED * vocabulary * config.hidden_size

    def parameters(self, config: LlamaConfig) -> int:
        """Parameters that are trained."""
        return self.layers * layer_elements(config) + len(self.features) * config.hidden_size ** 2

    def problem(self, layers: int) -> str:
        """What is wrong with it for a target of ``layers`` layers; '' for nothing."""
        least = 0 if self.kind == 'feature' else 1
        if not least <= self.depth < layers:
            return f'depth is {self.depth}, expected {least}..{layers - 1}'
        if not 1 <= self.layers <= layers - self.depth:
            return f'layers is {self.layers}, expected 1..{layers - self.depth}'
        if bool(self.features) != (self.kind == 'feature'):
            return 'a feature draft reads features, a shared_layers draft none'
        if any(not 1 <= depth <= layers for depth in self.features):
            return f'features are {list(self.features)}, expected numbers in 1..{layers}'
        return ''


@dataclass(frozen=True)
class ExitShape:
    """
    Exits of the target for ``self_speculation``.

    features: after how many layers, the uppermost first. rank: width of each
    adapter.
    """

    kind: str = 'self_speculation'
    features: tuple[int, ...] = (2,)
    rank: int = 256

    # It has nothing between the target's hidden states and the head but adapters.
    depth = None
    layers = 0

    @property
    def depths(self) -> frozenset[int]:
        """Depths of target hidden states needed to train it."""
        return frozenset(self.features)

    @property
    def options(self) -> dict:
        """Options of the exits in a manifest."""
        check, *lower = self.features
        return {'depth': lower[0], 'check': check} if lower else {'depth': check}

    def products(self, config: LlamaConfig, vocabulary: int) -> float:
        """Multiply-adds of training on a position, about; ``vocabulary``: of the trimmed head."""
        return (3 * self.parameters(config)
                + 2 * SCORED * len(self.features) * vocabulary * config.hidden_size)

    def parameters(self, config: LlamaConfig) -> int:
        """Parameters that are trained."""
        return len(self.features) * config.hidden_size * (3 * self.rank + 2)

    def problem(self, layers: int) -> str:
        """What is wrong with it for a target of ``layers`` layers; '' for nothing."""
        if any(not 1 <= depth < layers for depth in self.features):
            return f'exits are after {list(self.features)} layers, expected 1..{layers - 1}'
        return ''


def choose_vocabulary(records: Iterable[OutputRecord], size: int,
                      always: Iterable[int] = ()) -> list[int]:
    """
    The ``size`` tokens that cover most of the outputs, ``always`` included, ascending.

    Coverage is of each domain alike: frequencies count relative to the domain's tokens.
    """
    counts: dict[str, Counter[int]] = defaultdict(Counter)
    for record in records:
        counts[record.domain].update(record.output_ids)
    shares: Counter[int] = Counter()
    for counter in counts.values():
        total = counter.total()
        for token, count in counter.items():
            shares[token] += count / total
    chosen = set(always)
    for token, _ in sorted(shares.items(), key=lambda item: (-item[1], item[0])):
        if len(chosen) >= size:
            break
        chosen.add(token)
    return sorted(chosen)


def coverage(records: Iterable[OutputRecord], vocabulary: Sequence[int],
             text: bool = False) -> float:
    """
    Share of output tokens that the trimmed vocabulary can express.

    ``text``: with the tokens that prompt and output held before, as drafts have them.
    """
    trimmed = set(vocabulary)
    hits = total = 0
    for record in records:
        known = trimmed | set(record.prompt_ids) if text else trimmed
        total += len(record.output_ids)
        for token in record.output_ids:
            hits += token in known
            if text:
                known.add(token)
    return hits / max(total, 1)


@dataclass(frozen=True)
class Batch:
    """
    Several lessons side by side, padded on the right.

    tokens [B, T]; lower [B, T, H]: hidden states after the shared layers, or
    None; features [B, T, F, H] or None. further [E]: ids of the tokens outside
    of the trimmed vocabulary that any of the sequences holds, ascending. For each of the N
    positions learned from: place (flat, in B * T), row (its position in the
    sequence), labels [N, top] (places in the trimmed vocabulary and, behind it,
    in ``further``; -1 for what the draft cannot say there) with probabilities
    [N, top], in_output [N].
    """

    tokens: Tensor
    lower: Tensor | None
    features: Tensor | None
    further: Tensor
    place: Tensor
    row: Tensor
    labels: Tensor
    probabilities: Tensor
    in_output: Tensor
    # [B, E]: where in its sequence a further token stands first, beyond the end where it does not.
    since: Tensor

    def logits(self, states: Tensor, chosen: Tensor, head: Tensor, further: Tensor) -> Tensor:
        """
        Logits [n, trimmed V + E] of states [B, T, H] at the ``chosen`` of N positions.

        head [trimmed V, H]; further [E, H], the rows of the ``further`` tokens,
        which count as -inf where the text did not hold them yet.
        """
        rows = states.flatten(0, 1)[self.place[chosen]]
        more = F.linear(rows, further).masked_fill(~self.held(chosen), -torch.inf)
        return torch.cat([F.linear(rows, head), more], dim=1)

    def held(self, chosen: Tensor) -> Tensor:
        """Which ``further`` tokens stood in the text at each of the ``chosen``: [n, E]."""
        owner = self.place[chosen] // self.tokens.shape[1]
        return self.since[owner] <= self.row[chosen][:, None]


class Lessons:
    """Lessons made into batches for a draft of one shape over one vocabulary."""

    def __init__(self, target: Llama, lessons: Sequence[Lesson],
                 shape: TopShape | ExitShape | StudentShape, vocabulary: Sequence[int]):
        self.lessons = list(lessons)
        self.shape = shape
        self._embedding = target.embedding if shape.depth == 0 else None
        self._trimmed = len(vocabulary)
        self._index = torch.full((target.config.vocab_size,), -1)
        self._index[torch.tensor(vocabulary)] = torch.arange(len(vocabulary))

    @property
    def output_tokens(self) -> int:
        """Tokens there are to learn from."""
        return sum(lesson.output_tokens for lesson in self.lessons)

    def batch(self, rows: Sequence[int], device: torch.device | str = 'cpu') -> Batch:
        """The lessons of ``rows``; the last position of each has nothing to predict."""
        chosen = [self.lessons[row] for row in rows]
        longest = max(map(len, chosen))
        place, row, in_output = [], [], []
        for index, lesson in enumerate(chosen):
            positions = torch.arange(len(lesson) - 1)
            row.append(positions)
            place.append(positions + index * longest)
            in_output.append(positions >= lesson.first - 1)
        further, since = self._further(chosen)
        index = self._index.clone()
        index[further] = torch.arange(len(further)) + self._trimmed
        labels = index[torch.cat([lesson.top_ids[:-1] for lesson in chosen]).long()]
        owner = torch.cat([torch.full((len(lesson) - 1,), index)
                           for index, lesson in enumerate(chosen)])
        if len(further):
            seen = since[owner[:, None], (labels - self._trimmed).clamp(min=0)]
            unsaid = (labels >= self._trimmed) & (seen > torch.cat(row)[:, None])
            labels = labels.masked_fill(unsaid, -1)
        logprobs = torch.cat([lesson.top_logprobs[:-1] for lesson in chosen])
        lower = features = None
        if self.shape.depth is not None:
            lower = _padded([self._lower(lesson) for lesson in chosen], longest).to(device)
        if self.shape.features:
            features = torch.stack([_padded([lesson.hidden[depth] for lesson in chosen], longest)
                                    for depth in self.shape.features], dim=2).to(device)
        tokens = torch.zeros(len(chosen), longest, dtype=torch.long)
        for index, lesson in enumerate(chosen):
            tokens[index, :len(lesson)] = lesson.tokens
        return Batch(
            tokens=tokens.to(device), lower=lower, features=features,
            further=further.to(device), since=since.to(device),
            place=torch.cat(place).to(device), row=torch.cat(row).to(device),
            labels=labels.to(device), probabilities=logprobs.float().exp().to(device),
            in_output=torch.cat(in_output).to(device))

    def _further(self, chosen: Sequence[Lesson]) -> tuple[Tensor, Tensor]:
        """Tokens [E] that these texts add to the vocabulary, and where each has them first."""
        texts = [lesson.tokens.long() for lesson in chosen]
        further = torch.cat(texts).unique()
        further = further[self._index[further] < 0]
        since = torch.full((len(texts), len(further)), max(map(len, texts)))
        for row, tokens in zip(since, texts):
            stands = tokens == further[:, None]
            there = stands.any(1)
            row[there] = stands.int().argmax(1)[there]
        return further, since

    def orders(self, batch: int, generator: torch.Generator) -> list[list[int]]:
        """Row groups of one epoch: shuffled, sequences of like length together."""
        jitter = torch.rand(len(self.lessons), generator=generator) * 64
        order = sorted(range(len(self.lessons)),
                       key=lambda row: len(self.lessons[row]) + float(jitter[row]))
        groups = [order[i:i + batch] for i in range(0, len(order), batch)]
        return [groups[i] for i in torch.randperm(len(groups), generator=generator)]

    def _lower(self, lesson: Lesson) -> Tensor:
        if self._embedding is None:
            return lesson.hidden[self.shape.depth]
        return self._embedding[lesson.tokens.long().to(self._embedding.device)].cpu()


def _padded(rows: Sequence[Tensor], longest: int) -> Tensor:
    padded = torch.zeros(len(rows), longest, rows[0].shape[1], dtype=torch.bfloat16)
    for index, row in enumerate(rows):
        padded[index, :len(row)] = row
    return padded
