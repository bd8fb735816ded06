# SPDX-License-Identifier: Apache-2.0
"""
Training the head of a ranker on acceptance traces (MemSpec, Prediction Engine).

An example is a boundary of a trace: what a ranker would see there, and the
utility of every draft, which is its tokens per iteration over what follows.
The encoder, or the target, stays as it is; only the head learns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
import hashlib
from itertools import product
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..models.encoder import (
    PROMPT_TOKENS,
    RECENT_TOKENS,
    SentenceEncoder,
    WEIGHTS_SHA256,
    WIDTH,
)
from ..models.errors import InvalidRequestError
from ..models.ranking_head import INPUTS, prompt_mark, RankingHead, rms_normalised
from ..runtime.scheduling import RECENT_TOKENS as RECENT_OUTPUT
from .trace_store import Trace, TraceError, TraceHeader, TraceStore

# Utilities nearer than this are equal: they are quotients of small whole numbers.
TIE = 1e-6
_ROWS = 4096


@dataclass(frozen=True)
class RankerOptions:
    """
    How heads are trained.

    layers, learning_rates: sizes of the hidden layer (0: a linear head) and
    rates to try; the head with the least validation loss is kept. Few prompts
    want a low rate, so that learning can stop in time. temperature: of the
    softmax over utilities that the scores should give too. regression: weight of
    the squared error of the utilities themselves. validation: share of the
    prompts held out to stop.
    """

    layers: tuple[int, ...] = (0, 64)
    temperature: float = 0.2
    regression: float = 1.0
    epochs: int = 40
    patience: int = 4
    batch: int = 256
    learning_rates: tuple[float, ...] = (1e-3, 1e-4, 2e-5)
    weight_decay: float = 0.03
    validation: float = 0.2
    seed: int = 0


@dataclass
class Examples:
    """
    Boundaries of many prompts.

    prompts [P, W], recent [B, W], utilities [B, D], of_prompt [B] the row of
    ``prompts``, positions [B]; keys and domains [P]. A vector of zeros is one
    that is not there.
    """

    drafts: tuple[str, ...]
    kind: str
    prompts: Tensor
    recent: Tensor
    utilities: Tensor
    of_prompt: Tensor
    positions: Tensor
    keys: list[str]
    domains: list[str]

    def __len__(self) -> int:
        return len(self.of_prompt)


class Inputs(Protocol):
    """Vectors that a kind of ranker sees: the prompt's [W], those at ``positions`` [n, W]."""

    kind: str
    width: int

    def __call__(self, trace: Trace, positions: np.ndarray) -> tuple[Tensor, Tensor]: ...


class HiddenInputs:
    """The target's own hidden states, as the traces hold them."""

    kind = 'hidden'

    def __init__(self, header: TraceHeader, width: int):
        if not header.hidden_every:
            raise InvalidRequestError('these traces hold no hidden states; train a ranker of '
                                      'kind bert, or make traces that hold them')
        self.width = width
        self._every = header.hidden_every

    def __call__(self, trace: Trace, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        hidden = torch.from_numpy(trace.hidden)
        return hidden[0], hidden[torch.from_numpy(positions // self._every)]


class TextInputs:
    """A sentence encoder's view of the prompt and of the last tokens of the output."""

    kind = 'bert'
    width = WIDTH

    def __init__(self, encoder: SentenceEncoder, decode: Callable[[Sequence[int]], str]):
        self._encoder = encoder
        self._decode = decode

    def __call__(self, trace: Trace, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        output = trace.output_ids.tolist()
        texts = [self._decode(output[max(0, t - RECENT_OUTPUT):t]) for t in positions.tolist()]
        recent = [self._encoder.encode(texts[i:i + 32], RECENT_TOKENS)
                  for i in range(0, len(texts), 32)]
        return self._encoder.encode([trace.prompt], PROMPT_TOKENS)[0], torch.cat(recent)


def read_traces(directories: Sequence[Path]) -> tuple[TraceHeader, list[Trace]]:
    """
    All traces of several directories, each prompt once; checked.

    Raises TraceError where one is malformed, or the directories do not belong together.
    """
    header, traces = None, {}
    for directory in directories:
        store = TraceStore(directory)
        own = store.header()
        if header is None:
            header = own
        for name in ('bundle', 'drafts', 'gamma', 'hidden_every'):
            if getattr(own, name) != getattr(header, name):
                raise TraceError(f'{directory}: these traces were made with another {name} than '
                                 f'those of {directories[0]}')
        for trace in store:
            _check_hidden(own, trace, directory / f'{trace.key}.npz')
            traces.setdefault(trace.key, trace)
    if not traces:
        raise TraceError(f'{", ".join(map(str, directories))}: no traces there')
    if len({trace.hidden.shape[1] for trace in traces.values() if trace.hidden is not None}) > 1:
        raise TraceError(f'{directories[0]}: hidden states of several widths')
    return header, [traces[key] for key in sorted(traces)]


def _check_hidden(header: TraceHeader, trace: Trace, path: Path) -> None:
    if not header.hidden_every:
        return
    rows = -(-len(trace.output_ids) // header.hidden_every)
    if trace.hidden is None or trace.hidden.ndim != 2 or len(trace.hidden) != rows:
        found = 'none' if trace.hidden is None else list(trace.hidden.shape)
        raise TraceError(f'{path}: hidden states are {found}, expected {rows} rows')
    if not np.isfinite(trace.hidden).all():
        raise TraceError(f'{path}: hidden states that are not finite')


def utilities(trace: Trace, drafts: Sequence[int], positions: np.ndarray, gamma: int,
              horizon: int) -> np.ndarray:
    """
    Tokens per iteration [len(positions), len(drafts)] of each draft from each position.

    Over ``horizon`` iterations, or to the end of the output, as the engine would
    decode with that draft alone: accepted tokens and one of the target's own.
    """
    end = len(trace.output_ids)
    table = np.empty((len(positions), len(drafts)), np.float32)
    for column, draft in enumerate(drafts):
        # At the end nothing is emitted, and no iteration is counted.
        after = np.append(np.minimum(
            np.arange(end) + trace.accepted(draft, gamma) + 1, end), end).astype(np.int64)
        place, iterations = positions.astype(np.int64), np.zeros(len(positions), np.int64)
        for _ in range(horizon):
            iterations += place < end
            place = after[place]
        table[:, column] = (place - positions) / iterations
    return table


def make_examples(header: TraceHeader, traces: Iterable[Trace], drafts: Sequence[str],
                  inputs: Inputs, every: int, gamma: int, horizon: int,
                  per_prompt: int = 0) -> Examples:
    """
    Examples at every ``every``-th position of the traces.

    per_prompt: at most so many of each, evenly spread (0: all).
    InvalidRequestError where there are none.
    """
    missing = [draft for draft in drafts if draft not in header.drafts]
    if missing or not drafts:
        raise InvalidRequestError(f'the traces hold no draft {missing[0]!r}; they hold: '
                                  f'{", ".join(header.drafts)}' if missing else 'no drafts')
    if gamma > header.gamma:
        raise InvalidRequestError(f'the traces hold chains of {header.gamma} tokens, '
                                  f'not of {gamma}')
    rows = [header.drafts.index(draft) for draft in drafts]
    prompts, recent, table, of_prompt, places, keys, domains = [], [], [], [], [], [], []
    for trace in traces:
        positions = np.arange(0, len(trace.output_ids), every)
        if per_prompt and len(positions) > per_prompt:
            chosen = np.linspace(0, len(positions) - 1, per_prompt).round().astype(int)
            positions = positions[chosen]
        if len(positions):
            seen, at = inputs(trace, positions)
            prompts.append(seen)
            recent.append(at)
            table.append(torch.from_numpy(utilities(trace, rows, positions, gamma, horizon)))
            of_prompt.append(torch.full((len(positions),), len(keys)))
            places.append(torch.from_numpy(positions))
            keys.append(trace.key)
            domains.append(trace.domain)
    if not keys:
        raise InvalidRequestError('the traces hold no output')
    return Examples(tuple(drafts), inputs.kind, torch.stack(prompts), torch.cat(recent),
                    torch.cat(table), torch.cat(of_prompt), torch.cat(places), keys, domains)


def ranking_loss(scores: Tensor, wanted: Tensor, temperature: float,
                 regression: float) -> Tensor:
    """Listwise cross-entropy between the softmaxes of both [B, D], and their squared error."""
    target = (wanted / temperature).softmax(-1)
    listwise = -(target * (scores / temperature).log_softmax(-1)).sum(-1).mean()
    return listwise + regression * (scores - wanted).square().mean()


def train_head(examples: Examples, inputs: str, gamma: int, horizon: int,
               options: RankerOptions, about: dict | None = None,
               report: Callable[[str], None] | None = None) -> RankingHead:
    """
    The best of the heads that ``options`` tries, for ``inputs`` of ranking_head.INPUTS.

    Deterministic by seed. Raises InvalidRequestError where the prompts are too
    few to hold any out.
    """
    learn, held = _split(examples, options)
    shift, scale = _moments(examples, inputs, learn)
    mean = examples.utilities[learn].mean(0)
    best = None
    for size, rate in product(options.layers, options.learning_rates):
        start = RankingHead(
            examples.kind, inputs, examples.drafts, examples.prompts.shape[1], gamma, horizon,
            shift, scale, _new_layers(len(shift), size, mean, options.seed), mean,
            torch.tensor([prompt_mark(key) for key in examples.keys]))
        layers, loss, epochs = _fit(start, examples, learn, held, rate, options)
        if report:
            report(f'{inputs}, {f"hidden layer of {size}" if size else "linear"}, rate {rate:g}: '
                   f'validation loss {loss:.4f} after {epochs} epochs')
        if best is None or loss < best[0]:
            best = loss, size, rate, layers, epochs, start
    loss, size, rate, layers, epochs, start = best
    return RankingHead(
        start.kind, inputs, start.drafts, start.width, gamma, horizon, shift, scale, layers, mean,
        start.trained_on, {
            **(about or {}), 'hidden_layer': size, 'learning_rate': rate,
            'seed': options.seed, 'epochs': epochs,
            'validation_loss': round(loss, 5), 'prompts': len(examples.keys),
            'examples': len(examples), 'prompts_sha256': keys_sha256(examples.keys),
            'encoder': WEIGHTS_SHA256 if examples.kind == 'bert' else ''})


def keys_sha256(keys: Iterable[str]) -> str:
    """One hash for a set of prompts."""
    return hashlib.sha256('\n'.join(sorted(keys)).encode()).hexdigest()


def _split(examples: Examples, options: RankerOptions) -> tuple[Tensor, Tensor]:
    """Rows to learn from and rows to stop by, of different prompts."""
    prompts = len(examples.keys)
    if prompts < 2:
        raise InvalidRequestError('training needs traces of at least two prompts')
    count = min(prompts - 1, max(1, round(options.validation * prompts)))
    order = torch.randperm(prompts, generator=torch.Generator().manual_seed(options.seed))
    held = torch.isin(examples.of_prompt, order[:count])
    return (~held).nonzero()[:, 0], held.nonzero()[:, 0]


def _moments(examples: Examples, inputs: str, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and spread of each normalised input over ``rows``."""
    parts = []
    prompts = examples.prompts[examples.of_prompt[rows].unique()]
    for wanted, vectors in zip(INPUTS[inputs], (prompts, examples.recent[rows])):
        if not wanted:
            continue
        total, squares, count = 0.0, 0.0, 0
        for block in vectors.split(_ROWS):
            block = rms_normalised(block[(block != 0).any(-1)]).double()
            total, squares = total + block.sum(0), squares + block.square().sum(0)
            count += len(block)
        mean = total / max(1, count)
        spread = (squares / max(1, count) - mean.square()).clamp(min=0).sqrt()
        # Numbers that hardly vary here must not blow up where they do.
        parts.append((mean.float(), spread.float().clamp(min=1e-3 + 0.05 * spread.mean().item())))
    return torch.cat([mean for mean, _ in parts]), torch.cat([spread for _, spread in parts])


def _new_layers(rows: int, size: int, mean: Tensor, seed: int):
    """Layers that give every draft its mean utility, whatever the input."""
    last = torch.zeros(len(mean), size or rows), mean.clone()
    if not size:
        return (last,)
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(size, rows, generator=generator) * (2 / rows) ** 0.5
    return ((first, torch.zeros(size)), last)


def _fit(head: RankingHead, examples: Examples, learn: Tensor, held: Tensor, rate: float,
         options: RankerOptions):
    """Train the layers of ``head`` in place; (best layers, their validation loss, epochs)."""
    weights, biases = zip(*((w.requires_grad_(), b.requires_grad_()) for w, b in head.layers))
    optimiser = torch.optim.AdamW(
        [{'params': weights, 'weight_decay': options.weight_decay},
         {'params': biases, 'weight_decay': 0.0}], rate)
    generator = torch.Generator().manual_seed(options.seed)

    def loss_of(scores: Tensor, wanted: Tensor) -> Tensor:
        return ranking_loss(scores, wanted, options.temperature, options.regression)

    best, kept, best_epoch = float('inf'), None, 0
    for epoch in range(options.epochs + 1):
        if epoch:
            order = learn[torch.randperm(len(learn), generator=generator)]
            for rows in order.split(options.batch):
                loss = loss_of(scores_of(head, examples, rows), examples.utilities[rows])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
        with torch.no_grad():
            loss = loss_of(torch.cat([scores_of(head, examples, rows)
                                      for rows in held.split(_ROWS)]),
                           examples.utilities[held]).item()
        if loss < best:
            best, best_epoch = loss, epoch
            kept = tuple((weight.detach().clone(), bias.detach().clone())
                         for weight, bias in head.layers)
        elif epoch - best_epoch >= options.patience:
            break
    return kept, best, best_epoch


def scores_of(head: RankingHead, examples: Examples, rows: Tensor) -> Tensor:
    """What ``head`` predicts [len(rows), D] for those examples."""
    return head.utilities(examples.prompts[examples.of_prompt[rows]], examples.recent[rows])
