# SPDX-License-Identifier: Apache-2.0
"""
A trained ranking head: from what a ranker sees to every draft's tokens per iteration.

A safetensors file with its description as metadata. Linear, or with one hidden
layer; small enough to be read whole at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor

from .errors import BundleError
from .weights import read_metadata, read_tensors

FORMAT = 1
# What vectors it looks at: the target's hidden states, or a sentence encoder's.
HEAD_KINDS = ('hidden', 'bert')
# Which of the two vectors it looks at: that of the prompt and that of the recent output.
INPUTS = {'combined': (True, True), 'prompt_only': (True, False), 'recent_only': (False, True)}


def rms_normalised(x: Tensor) -> Tensor:
    """``x`` [..., W] in float32 with a root mean square of 1: its scale does not matter."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-12)


def prompt_mark(key: str) -> int:
    """A prompt's key as a number that fits int64: heads remember what they were trained on."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], 'little', signed=True)


@dataclass(frozen=True)
class RankingHead:
    """
    Predicts tokens per iteration of a chain of ``gamma`` drafted tokens, for each of ``drafts``.

    width: W of its input vectors. shift, scale [I]: of the normalised inputs, I
    being W for each vector looked at. layers: (weight, bias) pairs, the last
    one giving a row for each draft. prior [D]: the mean over the training
    examples, for when there is nothing to look at. trained_on int64: marks of
    the prompts. about: how it was made.
    """

    kind: str
    inputs: str
    drafts: tuple[str, ...]
    width: int
    gamma: int
    horizon: int
    shift: Tensor
    scale: Tensor
    layers: tuple[tuple[Tensor, Tensor], ...]
    prior: Tensor
    trained_on: Tensor
    about: Mapping[str, str] = field(default_factory=dict)

    def features(self, prompt: Tensor, recent: Tensor) -> Tensor:
        """Inputs [B, I] from vectors [B, W]; a vector of zeros is one that is not there."""
        parts = []
        for vector, wanted in zip((prompt, recent), INPUTS[self.inputs]):
            if wanted:
                first = len(parts) * self.width
                shift, scale = (t[first:first + self.width] for t in (self.shift, self.scale))
                there = (vector != 0).any(-1, keepdim=True)
                parts.append((rms_normalised(vector) - shift) / scale * there)
        return torch.cat(parts, -1)

    def utilities(self, prompt: Tensor, recent: Tensor) -> Tensor:
        """Tokens per iteration [B, D] expected for vectors [B, W]."""
        x = self.features(prompt, recent)
        for index, (weight, bias) in enumerate(self.layers):
            x = torch.nn.functional.linear(x.relu() if index else x, weight, bias)
        return x

    def predict(self, prompt: Tensor | None, recent: Tensor | None) -> Tensor:
        """Tokens per iteration [D] for vectors [W], either of which may be missing."""
        seen = [vector for vector, wanted in zip((prompt, recent), INPUTS[self.inputs]) if wanted]
        if all(vector is None or not vector.any() for vector in seen):
            return self.prior
        none = torch.zeros(self.width)
        return self.utilities(*(none[None] if vector is None else vector[None]
                                for vector in (prompt, recent)))[0]


def save_head(path: Path, head: RankingHead) -> None:
    """Write a head; the same head gives the same bytes."""
    from safetensors.torch import save
    tensors = {'shift': head.shift, 'scale': head.scale, 'prior': head.prior,
               'trained_on': head.trained_on}
    for index, (weight, bias) in enumerate(head.layers):
        tensors.update({f'layers.{index}.weight': weight, f'layers.{index}.bias': bias})
    # One entry: safetensors keeps several in an order of its own, anew in every process.
    about = {'format': FORMAT, 'kind': head.kind, 'inputs': head.inputs,
             'drafts': list(head.drafts), 'width': head.width, 'gamma': head.gamma,
             'horizon': head.horizon, **head.about}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + '.partial')
    # Copied: safetensors refuses tensors that share memory. Its own files only the user can read.
    partial.write_bytes(save(
        {name: tensor.contiguous().clone() for name, tensor in tensors.items()},
        {'ranking_head': json.dumps(about, sort_keys=True)}))
    partial.replace(path)


def read_head(path: Path, sha256: str | None = None) -> RankingHead:
    """Read a head; BundleError naming the file where it is not one, or not the one expected."""
    tensors = read_tensors(path, sha256)
    try:
        about = json.loads(read_metadata(path)['ranking_head'])
        if about.pop('format') != FORMAT:
            raise BundleError(f'{path}: a ranking head of another format than {FORMAT}')
        count = sum(name.endswith('.weight') for name in tensors)
        head = RankingHead(
            about.pop('kind'), about.pop('inputs'), tuple(about.pop('drafts')),
            about.pop('width'), about.pop('gamma'), about.pop('horizon'),
            tensors['shift'], tensors['scale'],
            tuple((tensors[f'layers.{i}.weight'], tensors[f'layers.{i}.bias'])
                  for i in range(count)),
            tensors['prior'], tensors['trained_on'], about)
        _check_shapes(head)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise BundleError(f'{path}: not a ranking head ({type(error).__name__}: {error})'
                          ) from error
    return head


def _check_shapes(head: RankingHead) -> None:
    if head.kind not in HEAD_KINDS or head.inputs not in INPUTS:
        raise ValueError(f'kind {head.kind!r}, inputs {head.inputs!r}')
    for name in ('width', 'gamma', 'horizon'):
        if type(getattr(head, name)) is not int or getattr(head, name) < 1:
            raise ValueError(f'{name} is {getattr(head, name)!r}')
    rows = head.width * sum(INPUTS[head.inputs])
    if not head.layers or head.shift.shape != (rows,) or head.scale.shape != (rows,):
        raise ValueError(f'no layers, or shift and scale not of {rows} numbers')
    for weight, bias in head.layers:
        if weight.dim() != 2 or weight.shape[1] != rows or bias.shape != weight.shape[:1]:
            raise ValueError('layers do not fit each other')
        rows = weight.shape[0]
    if not head.drafts or rows != len(head.drafts) or head.prior.shape != (rows,):
        raise ValueError(f'{rows} scores for {len(head.drafts)} drafts')
    if not all(t.isfinite().all() for t in (head.shift, head.scale, head.prior,
                                            *sum(head.layers, ()))):
        raise ValueError('numbers that are not finite')
