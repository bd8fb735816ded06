# SPDX-License-Identifier: Apache-2.0
"""
The trainable part of drafts that live on the target: own layers, norm, mixer.

Own layers start as copies of the target's layers that follow the shared ones:
they are used to what those put out, which the last layers are not (measured:
0.27 against 0.23 agreement after one epoch). Float32; files are bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
import torch.nn.functional as F

from ..models.drafts.feature import Mixer, unroll
from ..models.drafts.self_speculation import Adapter
from ..models.layers import causal_mask, LayerWeights, run_layer_uncached
from ..models.llama import Llama
from ..models.weights import read_metadata, read_tensors
from .lessons import Batch, ExitShape, TopShape
from .student import save_student, Student, StudentShape
from .teacher import write_whole


class Top(torch.nn.Module):
    """
    Own layers and norm of a ``shared_layers`` draft.

    ``vocabulary``: token ids of the trimmed head, which is the target's and stays as it is.
    """

    def __init__(self, target: Llama, shape: TopShape, vocabulary: Sequence[int]):
        super().__init__()
        self.register_buffer('head', target.head[torch.tensor(vocabulary)].to(torch.bfloat16),
                             persistent=False)
        # Not a copy: the text's own tokens are looked up there.
        self.register_buffer('whole_head', target.head, persistent=False)
        self.config = target.config
        self.shape = shape
        self.rope = target.rope
        self.norm = torch.nn.Parameter(target.norm.float().clone())
        self.parts = torch.nn.ModuleList()
        first = shape.depth or 0
        for weights in target.layers[first:first + shape.layers]:
            self.parts.append(torch.nn.ParameterDict(
                {name: torch.nn.Parameter(tensor.float().clone())
                 for name, tensor in weights.tensors().items()}))

    def steps(self, batch: Batch, count: int) -> list[Tensor]:
        """
        Normed top states [B, T, H], one a step drafted from every position at once.

        Here all steps are the same one, and it is given once: a drafted token
        passes through the shared layers as a committed one does.
        """
        lower = batch.lower
        length = lower.shape[1]
        rope, mask = self.rope.at(0, length), causal_mask(length, length, lower.device)
        x = lower.float()
        for layer in self.weights():
            x = run_layer_uncached(self.config, layer, x, rope, mask)
        return [self.normed(x)]

    def logits(self, states: Tensor, batch: Batch, chosen: Tensor) -> Tensor:
        """Logits of normed states [B, T, H], as Batch.logits has them."""
        further = self.whole_head[batch.further].to(self.head.dtype)
        return batch.logits(states, chosen, self.head, further)

    def training_logits(self, states: Tensor, batch: Batch, chosen: Tensor,
                        generator: torch.Generator) -> Tensor:
        """Logits as training scores them, which may have more columns; see Student."""
        return self.logits(states, batch, chosen)

    def normed(self, x: Tensor) -> Tensor:
        """What the head reads."""
        return F.rms_norm(x, x.shape[-1:], self.norm, self.config.norm_eps)

    def weights(self) -> list[LayerWeights]:
        """The own layers."""
        return [LayerWeights.of(part) for part in self.parts]

    def tensors(self) -> dict[str, torch.nn.Parameter]:
        """Parameters by their names in a draft file."""
        return {'norm': self.norm,
                **{f'layers.{index}.{name}': tensor for index, part in enumerate(self.parts)
                   for name, tensor in part.items()}}

    def export(self) -> dict[str, Tensor]:
        """Tensors as a draft file holds them, bfloat16."""
        return {name: tensor.detach().to('cpu', torch.bfloat16).contiguous()
                for name, tensor in self.tensors().items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from an exported draft (a general one into a domain)."""
        for name, tensor in self.tensors().items():
            tensor.copy_(state[name])


class FeatureTop(Top):
    """Own layers, norm and mixer of a ``feature`` draft."""

    def __init__(self, target: Llama, shape: TopShape, vocabulary: Sequence[int]):
        super().__init__(target, shape, vocabulary)
        count, width = len(shape.features), target.config.hidden_size
        # Next to nothing at first: the top begins as that of a shared_layers draft.
        generator = torch.Generator().manual_seed(0)
        self.scales = torch.nn.Parameter(torch.ones(count, width))
        self.blocks = torch.nn.ParameterList(
            torch.randn(width, width, generator=generator) * 0.002 for _ in range(count))
        self.carry = torch.nn.Parameter(torch.ones(width))

    def steps(self, batch: Batch, count: int) -> list[Tensor]:
        mixer = Mixer(self.scales, list(self.blocks), self.carry)
        outputs = unroll(self.config, self.weights(), mixer, batch.lower.float(),
                         batch.features.float(), self.rope.at(0, batch.lower.shape[1]), count)
        return [self.normed(output) for output in outputs]

    def tensors(self) -> dict[str, torch.nn.Parameter]:
        return {**super().tensors(), 'mixer.scales': self.scales, 'mixer.carry': self.carry,
                **{f'mixer.{index}': block for index, block in enumerate(self.blocks)}}


class Exits(Top):
    """
    Adapters and norms of the exits of ``self_speculation``.

    Its steps are its exits, the uppermost first: it counts most.
    """

    def __init__(self, target: Llama, shape: ExitShape, vocabulary: Sequence[int]):
        super().__init__(target, shape, vocabulary)
        del self.norm  # each exit has its own
        width = target.config.hidden_size
        generator = torch.Generator().manual_seed(0)
        self.exits = torch.nn.ModuleDict()
        for depth in shape.features:
            # The target's own norm and head at first: what an exit without weights is.
            self.exits[str(depth)] = torch.nn.ParameterDict({
                'norm': torch.nn.Parameter(target.norm.float().clone()),
                'input_norm': torch.nn.Parameter(torch.ones(width)),
                'gate_up': torch.nn.Parameter(
                    torch.randn(2 * shape.rank, width, generator=generator) * width ** -0.5),
                'down': torch.nn.Parameter(torch.zeros(width, shape.rank))})

    def steps(self, batch: Batch, count: int) -> list[Tensor]:
        eps, states = self.config.norm_eps, []
        for index, part in enumerate(self.exits.values()):
            adapter = Adapter(*(part[name] for name in Adapter.NAMES))
            x = adapter(batch.features[:, :, index].float(), eps)
            states.append(F.rms_norm(x, x.shape[-1:], part['norm'], eps))
        return states

    def tensors(self) -> dict[str, torch.nn.Parameter]:
        return {f'{depth}.{name}': tensor for depth, part in self.exits.items()
                for name, tensor in part.items()}


def make_top(target: Llama, shape: TopShape | ExitShape | StudentShape,
             vocabulary: Sequence[int]) -> Top | Student:
    """An untrained draft of that shape, on the target's device."""
    kinds = {'causal_lm': Student, 'feature': FeatureTop, 'shared_layers': Top,
             'self_speculation': Exits}
    return kinds[shape.kind](target, shape, vocabulary).to(target.device)


def draft_shape(kind: str, depth: int, layers: int, features: Sequence[int],
                width: int, check: int = 0,
                rank: int = 256) -> TopShape | ExitShape | StudentShape:
    """The shape that command-line options describe."""
    if kind == 'causal_lm':
        return StudentShape(kind, width, layers)
    if kind == 'self_speculation':
        return ExitShape(kind, tuple(sorted({depth, check} - {0}, reverse=True)), rank)
    return TopShape(kind, depth, layers, tuple(features))


def save_draft(path: Path, top: Top | Student, metadata: Mapping[str, str],
               tokenizer: Path | None = None) -> None:
    """
    Write a draft as a bundle holds it: a file, or of a Student a directory.

    ``tokenizer``: directory of the target's, which a Student brings along.
    """
    if isinstance(top, Student):
        if tokenizer is None:
            raise ValueError('a causal_lm draft brings its tokenizer: say where it is')
        save_student(path, top, tokenizer, metadata)
    else:
        write_whole(path, top.export(), dict(metadata))


def read_draft(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors of a draft, to continue from, and how it was made."""
    if path.is_dir():
        path = path / 'model.safetensors'
    return read_tensors(path), dict(read_metadata(path))
