# SPDX-License-Identifier: Apache-2.0
"""
Distilling shared-layer drafts from the target's own outputs.

The lower layers are the target's and frozen, so their hidden states are
computed once per sequence. The top starts as a copy of the target's layers that
follow (they are used to what the shared ones put out, which the last ones are
not: measured, 0.27 against 0.23 agreement after one epoch), its final norm as
the target's; the head is the target's, restricted to a trimmed vocabulary. What
is learned is to say, from a lower layer, what the target says next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
import math
from pathlib import Path
import time

from safetensors.torch import save_file
import torch
from torch import Tensor
import torch.nn.functional as F

from ..models.llama import causal_mask, LayerWeights, Llama, run_layer_uncached
from .outputs import OutputRecord

_IGNORED = -100


@dataclass(frozen=True)
class DistillOptions:
    """
    depth: target layers reused (L). layers: own ones. epochs over the data.
    batch: sequences a step. learning_rate: peak, warmed up and then annealed to
    a tenth. seed: of the order of sequences.
    """

    depth: int = 2
    layers: int = 1
    epochs: float = 3.0
    batch: int = 16
    learning_rate: float = 6e-4
    weight_decay: float = 0.01
    seed: int = 0


def choose_vocabulary(records: Iterable[OutputRecord], size: int,
                      always: Iterable[int] = ()) -> list[int]:
    """The ``size`` most frequent output tokens, ``always`` included, in ascending order."""
    counts = Counter(token for record in records for token in record.output_ids)
    chosen = set(always)
    for token, _ in counts.most_common():
        if len(chosen) >= size:
            break
        chosen.add(token)
    return sorted(chosen)


def coverage(records: Iterable[OutputRecord], vocabulary: Sequence[int]) -> float:
    """Share of output tokens that the trimmed vocabulary can express."""
    known = set(vocabulary)
    hits = total = 0
    for record in records:
        total += len(record.output_ids)
        hits += sum(token in known for token in record.output_ids)
    return hits / max(total, 1)


class Top(torch.nn.Module):
    """The trainable top: own layers and norm, float32, initialised from layer ``depth`` on."""

    def __init__(self, target: Llama, depth: int, layers: int):
        super().__init__()
        self.config = target.config
        self.rope = target.rope
        self.norm = torch.nn.Parameter(target.norm.float().clone())
        self.parts = torch.nn.ModuleList()
        for weights in target.layers[depth:depth + layers]:
            self.parts.append(torch.nn.ParameterDict(
                {name: torch.nn.Parameter(tensor.float().clone())
                 for name, tensor in weights.tensors().items()}))

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states after the shared layers [B, T, H] -> normed top states [B, T, H]."""
        rope = self.rope.at(0, hidden.shape[1])
        mask = causal_mask(hidden.shape[1], hidden.shape[1], hidden.device)
        x = hidden.float()
        for part in self.parts:
            x = run_layer_uncached(self.config, self._weights(part), x, rope, mask)
        return F.rms_norm(x, x.shape[-1:], self.norm, self.config.norm_eps)

    @staticmethod
    def _weights(part: torch.nn.ParameterDict) -> LayerWeights:
        names = {f.name for f in fields(LayerWeights)}
        return LayerWeights(**{name: part[name] if name in part else None for name in names})

    def export(self) -> dict[str, Tensor]:
        """Tensors as a ``shared_layers`` draft file holds them, bfloat16."""
        state = {'norm': self.norm}
        for index, part in enumerate(self.parts):
            state.update({f'layers.{index}.{name}': tensor for name, tensor in part.items()})
        return {name: tensor.detach().to(torch.bfloat16).contiguous()
                for name, tensor in state.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Continue from an exported draft (a general one into a domain)."""
        with torch.no_grad():
            self.norm.copy_(state['norm'])
            for index, part in enumerate(self.parts):
                for name, tensor in part.items():
                    tensor.copy_(state[f'layers.{index}.{name}'])


class Examples:
    """Sequences with their shared-layer hidden states (bfloat16, computed once) and labels."""

    def __init__(self, target: Llama, records: Sequence[OutputRecord], depth: int,
                 vocabulary: Sequence[int]):
        self.records = list(records)
        index = torch.full((target.config.vocab_size,), _IGNORED)
        index[torch.tensor(vocabulary)] = torch.arange(len(vocabulary))
        self._index = index
        self._hidden = [self._lower(target, record, depth) for record in self.records]

    @staticmethod
    @torch.no_grad()
    def _lower(target: Llama, record: OutputRecord, depth: int) -> Tensor:
        tokens = torch.tensor([record.prompt_ids + record.output_ids[:-1]], device=target.device)
        x = target.embed(tokens)
        rope, mask = target.rope.at(0, x.shape[1]), causal_mask(x.shape[1], x.shape[1], x.device)
        for weights in target.layers[:depth]:
            x = run_layer_uncached(target.config, weights, x, rope, mask)
        return x[0].to(torch.bfloat16)

    @property
    def output_tokens(self) -> int:
        """Tokens there are to learn from."""
        return sum(len(record.output_ids) for record in self.records)

    def batch(self, rows: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states [B, T, H], and flat positions and tokens of the outputs in them."""
        longest = max(self._hidden[row].shape[0] for row in rows)
        width = self._hidden[rows[0]].shape[1]
        hidden = torch.zeros(len(rows), longest, width, dtype=torch.bfloat16)
        positions, tokens = [], []
        for place, row in enumerate(rows):
            states, record = self._hidden[row], self.records[row]
            hidden[place, :states.shape[0]] = states
            first = place * longest + len(record.prompt_ids) - 1
            positions.append(torch.arange(first, first + len(record.output_ids)))
            tokens.append(torch.tensor(record.output_ids))
        return hidden, torch.cat(positions), torch.cat(tokens)

    def labels(self, tokens: Tensor) -> Tensor:
        """Places of tokens in the trimmed vocabulary; ignored where they are not in it."""
        return self._index[tokens]

    def orders(self, batch: int, generator: torch.Generator) -> list[list[int]]:
        """Row groups of one epoch: shuffled, sequences of like length together."""
        jitter = torch.rand(len(self.records), generator=generator) * 64
        order = sorted(range(len(self.records)),
                       key=lambda row: self._hidden[row].shape[0] + float(jitter[row]))
        groups = [order[i:i + batch] for i in range(0, len(order), batch)]
        return [groups[i] for i in torch.randperm(len(groups), generator=generator)]


def distill(target: Llama, examples: Examples, vocabulary: Sequence[int],
            options: DistillOptions, start: dict[str, Tensor] | None = None,
            report: Callable[[int, int, float, float], None] | None = None,
            checkpoint: Callable[[Top, int], None] | None = None) -> Top:
    """
    Train a top on ``examples``; deterministic for a seed and a thread count.

    ``report(step, steps, loss, agreement)`` is told of the training loss and
    the share of output tokens whose prediction was right. ``checkpoint(top,
    step)`` is called after every epoch.
    """
    generator = torch.Generator().manual_seed(options.seed)
    top = Top(target, options.depth, options.layers).to(target.device)
    if start is not None:
        top.load(start)
    head = target.head[torch.tensor(vocabulary)].to(torch.bfloat16)
    decay = [p for p in top.parameters() if p.dim() > 1]
    rest = [p for p in top.parameters() if p.dim() <= 1]
    optimiser = torch.optim.AdamW(
        [{'params': decay, 'weight_decay': options.weight_decay},
         {'params': rest, 'weight_decay': 0.0}], lr=options.learning_rate, betas=(0.9, 0.98))
    per_epoch = math.ceil(len(examples.records) / options.batch)
    steps = max(1, round(per_epoch * options.epochs))
    step = 0
    while step < steps:
        for rows in examples.orders(options.batch, generator):
            for group in optimiser.param_groups:
                group['lr'] = options.learning_rate * _schedule(step, steps)
            hidden, positions, tokens = examples.batch(rows)
            labels = examples.labels(tokens).to(target.device)
            with torch.autocast(target.device.type, torch.bfloat16):
                states = top(hidden.to(target.device))
                logits = F.linear(states.flatten(0, 1)[positions.to(target.device)], head).float()
            loss = F.cross_entropy(logits, labels, ignore_index=_IGNORED)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(top.parameters(), 1.0)
            optimiser.step()
            step += 1
            if report:
                report(step, steps, loss.item(),
                       (logits.argmax(-1) == labels).float().mean().item())
            if step >= steps:
                break
        if checkpoint:
            checkpoint(top, step)
    return top


def _schedule(step: int, steps: int) -> float:
    """Warm-up over the first twentieth, then a cosine down to one tenth."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, steps - warm))


@torch.no_grad()
def agreement(target: Llama, top: Top, examples: Examples, vocabulary: Sequence[int],
              batch: int = 16) -> dict[str, float]:
    """Share of the target's output tokens that the draft predicts, by domain (teacher-forced)."""
    head = target.head[torch.tensor(vocabulary)].to(torch.bfloat16)
    hits: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for first in range(0, len(examples.records), batch):
        rows = list(range(first, min(first + batch, len(examples.records))))
        hidden, positions, tokens = examples.batch(rows)
        with torch.autocast(target.device.type, torch.bfloat16):
            states = top(hidden.to(target.device)).flatten(0, 1)[positions]
            labels = examples.labels(tokens).to(target.device)
            right = F.linear(states, head).argmax(-1) == labels
        place = 0
        for row in rows:
            record = examples.records[row]
            count = len(record.output_ids)
            hits[record.domain] += int(right[place:place + count].sum())
            totals[record.domain] += count
            place += count
    return {domain: hits[domain] / totals[domain] for domain in sorted(totals)}


def save_draft(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a draft file in one piece: a half-written one never carries its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix('.partial')
    save_file(tensors, partial, metadata=metadata)
    partial.chmod(0o644)  # the writer makes it private; a bundle is for whoever runs the node
    partial.replace(path)


class Throttle:
    """Lets a report through at most once per ``period`` seconds."""

    def __init__(self, period: float):
        self._period = period
        self._last = -math.inf

    def __call__(self) -> bool:
        now = time.monotonic()
        if now - self._last < self._period:
            return False
        self._last = now
        return True
