# SPDX-License-Identifier: Apache-2.0
"""
Distilling drafts from lessons: the target's distribution at every position of its outputs.

The lower layers are the target's and frozen, and so is the head, restricted to
a trimmed vocabulary: hidden states and distributions come from ``teacher``, and
only the top is run. What is learned is to say, from a lower layer (and what the
target thought one token before), what the target says next. A ``feature`` draft
is trained several steps ahead on its own outputs, as it will have to draft.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
import json
import math
from pathlib import Path

import torch
from torch import Tensor

from ..memory.allocator import trim
from ..models.errors import MemSpecError
from ..models.llama import Llama
from .lessons import Lessons
from .tops import make_top, Top

# Batches are of many lengths, and what one leaves in the heap seldom fits the next: untrimmed,
# glibc held 5 GB after 350 steps that need less than 1.
_TRIM_STEPS = 8


@dataclass(frozen=True)
class DistillOptions:
    """
    epochs over the data; batch: sequences a step. learning_rate: peak, warmed up
    and then annealed to a tenth. ahead: steps drafted in training (feature
    drafts). prompt_share: share of the prompt's positions learned from, beside
    all of the output's. checkpoint_steps: every how many steps the training is
    saved. seed: of the order of sequences.
    """

    epochs: float = 3.0
    batch: int = 16
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    ahead: int = 2
    prompt_share: float = 0.25
    checkpoint_steps: int = 50
    seed: int = 0


def distribution_loss(logits: Tensor, labels: Tensor, probabilities: Tensor) -> Tensor:
    """
    Cross-entropy [N] of logits [N, V] against a distribution over few of the V labels.

    labels [N, top], -1 for what cannot be expressed; what such tokens weigh is
    left out, so that a position whose likely tokens are all missing teaches nothing.
    """
    known = labels >= 0
    probabilities = probabilities * known
    chosen = logits.gather(1, labels.clamp(min=0))
    return (probabilities.sum(1) * logits.logsumexp(1)) - (probabilities * chosen).sum(1)


class Distillation:
    """
    One training run: deterministic for a seed, a thread count and a device.

    ``state`` and ``resume`` carry it over an interruption, to the same result.
    """

    def __init__(self, target: Llama, lessons: Lessons, vocabulary: Sequence[int],
                 options: DistillOptions, start: Mapping[str, Tensor] | None = None):
        self.lessons = lessons
        self.options = options
        self.device = target.device
        self.top = make_top(target, lessons.shape, vocabulary)
        if start is not None:
            self.top.load(start)
        self._vocabulary = len(vocabulary)
        parameters = list(self.top.parameters())
        self._optimiser = torch.optim.AdamW(
            [{'params': [p for p in parameters if p.dim() > 1],
              'weight_decay': options.weight_decay},
             {'params': [p for p in parameters if p.dim() <= 1], 'weight_decay': 0.0}],
            lr=options.learning_rate, betas=(0.9, 0.98))
        per_epoch = math.ceil(len(lessons.lessons) / options.batch)
        self.steps = max(1, round(per_epoch * options.epochs))
        self.step = 0

    def run(self, report: Callable[[int, int, float, float], None] | None = None,
            checkpoint: Callable[[Distillation], None] | None = None) -> Top:
        """
        Train to the end.

        ``report(step, steps, loss, agreement)`` gets the loss of a step and the
        share of output positions at which it was right. ``checkpoint`` is called
        every ``checkpoint_steps`` steps.
        """
        for rows in self._rows_to_come():
            loss, right = self._learn(rows)
            self.step += 1
            if self.step % _TRIM_STEPS == 0:
                trim()
            if report:
                report(self.step, self.steps, loss, right)
            if checkpoint and self.step % self.options.checkpoint_steps == 0:
                checkpoint(self)
        return self.top

    def state(self) -> dict:
        """All that ``resume`` needs."""
        return {'step': self.step, 'top': self.top.state_dict(),
                'optimiser': self._optimiser.state_dict(), 'about': self._about()}

    def resume(self, state: Mapping) -> None:
        """Go on where ``state`` was; MemSpecError where it is of another run."""
        if state.get('about') != self._about():
            raise MemSpecError('the checkpoint belongs to another run (other data, vocabulary, '
                               'shape or options): delete it to begin anew')
        self.top.load_state_dict(state['top'])
        self._optimiser.load_state_dict(state['optimiser'])
        self.step = state['step']

    def _about(self) -> dict:
        return json.loads(json.dumps({
            'shape': asdict(self.lessons.shape), 'options': asdict(self.options),
            'vocabulary': self._vocabulary, 'lessons': len(self.lessons.lessons),
            'tokens': self.lessons.output_tokens}))

    def _rows_to_come(self) -> Iterable[list[int]]:
        """The groups of rows still to be learned from: the order depends on the seed alone."""
        generator = torch.Generator().manual_seed(self.options.seed)
        place = 0
        while place < self.steps:
            for rows in self.lessons.orders(self.options.batch, generator):
                if self.step <= place < self.steps:
                    yield rows
                place += 1

    def _learn(self, rows: Sequence[int]) -> tuple[float, float]:
        options, generator = self.options, torch.Generator()
        generator.manual_seed(options.seed * 1_000_003 + self.step)
        rate = options.learning_rate * _schedule(self.step, self.steps)
        for group in self._optimiser.param_groups:
            group['lr'] = rate
        batch = self.lessons.batch(rows, self.device)
        drawn = torch.rand(len(batch.place), generator=generator).to(self.device)
        loss, right = torch.zeros((), device=self.device), 0.0
        with torch.autocast(self.device.type, torch.bfloat16):
            steps = self.top.steps(batch, options.ahead)
            for ahead, states in enumerate(steps):
                # Further ahead counts less (it is reached less often), and is sampled.
                kept = (batch.in_output & (drawn < 0.5 ** ahead)) | (
                    ~batch.in_output & (drawn < options.prompt_share * 0.5 ** ahead))
                kept &= batch.row >= ahead
                logits = self.top.training_logits(states, batch, kept, generator).float()
                losses = distribution_loss(logits, batch.labels[kept],
                                           batch.probabilities[kept])
                loss = loss + losses.mean() * 0.6 ** ahead
                if ahead == 0:
                    said = logits[:, :self._vocabulary + len(batch.further)].argmax(-1)
                    found = (said == batch.labels[kept][:, 0])[batch.in_output[kept]]
                    right, first_loss = float(found.float().mean()), float(losses.detach().mean())
        self._optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.top.parameters(), 1.0)
        self._optimiser.step()
        return first_loss, right


def _schedule(step: int, steps: int) -> float:
    """Warm-up over the first twentieth, then a cosine down to one tenth."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, steps - warm))


@torch.no_grad()
def agreement(top: Top, lessons: Lessons, device: torch.device, ahead: int = 1,
              batch: int = 16) -> list[dict[str, float]]:
    """
    Share of the outputs' positions at which the draft says what the target says, by domain.

    One dictionary a step drafted ahead (those of a shared_layers draft are all
    alike, and it gives one), each on the true tokens.
    """
    hits: list[Counter[str]] = []
    totals: list[Counter[str]] = []
    order = sorted(range(len(lessons.lessons)), key=lambda row: len(lessons.lessons[row]))
    for first in range(0, len(order), batch):
        rows = order[first:first + batch]
        data = lessons.batch(rows, device)
        domains = [lessons.lessons[row].domain for row in rows]
        with torch.autocast(device.type, torch.bfloat16):
            for step, states in enumerate(top.steps(data, ahead)):
                if step == len(hits):
                    hits.append(Counter())
                    totals.append(Counter())
                kept = data.in_output & (data.row >= step)
                said = top.logits(states, data, kept).argmax(-1)
                right = said == data.labels[kept][:, 0]
                owner = data.place[kept] // data.tokens.shape[1]
                for index, domain in enumerate(domains):
                    mine = owner == index
                    hits[step][domain] += int(right[mine].sum())
                    totals[step][domain] += int(mine.sum())
    return [{domain: hit[domain] / total[domain] for domain in sorted(total)}
            for hit, total in zip(hits, totals)]


def save_training(path: Path, state: Mapping) -> None:
    """Save a training state in one piece; MemSpecError where the disk is full."""
    partial = path.with_suffix('.partial')
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        torch.save(dict(state), partial)
        partial.replace(path)
    except (OSError, RuntimeError) as error:  # torch reports a short write as a RuntimeError
        partial.unlink(missing_ok=True)
        raise MemSpecError(f'{path}: cannot be written ({error}); make room and run the same '
                           'command again, it goes on from the last checkpoint') from error


def load_training(path: Path) -> Mapping | None:
    """A saved training state, None where there is none; MemSpecError where it is damaged."""
    if not path.exists():
        return None
    try:
        return torch.load(path, map_location='cpu', weights_only=True)
    except Exception as error:
        raise MemSpecError(f'{path}: not a checkpoint ({error}); delete it to begin anew'
                           ) from error
