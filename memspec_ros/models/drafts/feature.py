# SPDX-License-Identifier: Apache-2.0
"""
Feature draft: a small top that also reads what the target thought one token before.

Verification leaves the target's hidden states of every committed position
behind. Those of a low, a middle and a high layer together say more about what
comes next than the lower layers alone do: the top's input at a position is the
target's hidden state after its lower ``depth`` layers (the embedding for 0)
plus a learned mix of these features of the position before. Drafting on, where
the target has not been yet, the top's own output takes their place, and it was
trained to cope with that. After EAGLE-3 (Li et al. 2025), which draws its
features so and trains on its own outputs; shared lower layers are ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
import torch.nn.functional as F

from ..errors import BundleError
from ..layers import attend, finish_layer, LayerWeights, project_qkv
from ..llama_config import LlamaConfig
from ..packing import linear, pack
from ..quantized import Matrix
from ..state import DecodeState, TargetRun
from .base import Drafter
from .shared_layers import SharedLayersDrafter, SharedLayersKind


@dataclass
class Mixer:
    """
    What turns features into a share of the top's input.

    scales: Tensor [F, H], of the elements of the normed features. blocks: F
    Tensors [H, H], one a feature. carry: Tensor [H], the scales of the top's own
    output where it stands in for the last feature: both are what the head reads.
    """

    scales: Tensor
    blocks: Sequence[Tensor]
    carry: Tensor

    def of_target(self, features: Tensor) -> Tensor:
        """Features [..., F, H] -> share of the input [..., H]."""
        normed = F.rms_norm(features, features.shape[-1:]) * self.scales
        return sum(linear(normed[..., index, :], block)
                   for index, block in enumerate(self.blocks))

    def of_top(self, output: Tensor) -> Tensor:
        """The top's output [..., H], before its norm -> share of the input [..., H]."""
        return linear(F.rms_norm(output, output.shape[-1:], self.carry), self.blocks[-1])


def unroll(config: LlamaConfig, layers: Sequence[LayerWeights], mixer: Mixer, lower: Tensor,
           features: Tensor, rope: tuple[Tensor, Tensor], steps: int) -> list[Tensor]:
    """
    Draft ``steps`` deep from every position of whole sequences at once, along their own tokens.

    lower [B, T, H]: the target's hidden states after the shared layers; features
    [B, T, F, H]. Returns one [B, T, H] a step, before the norm: row t of step j
    (from 0) is what the draft makes of position t when it began to draft at
    position t - j, hence read the target's features up to position t - j - 1.
    Rows before position j mean nothing.

    In step j, keys of position s come from step 0 up to where drafting began
    (s <= t - j), from the step in which they were drafted after it.
    """
    length = lower.shape[1]
    shift = F.pad(mixer.of_target(features), (0, 0, 1, 0))[:, :-1]
    past: list[list[tuple[Tensor, Tensor]]] = [[] for _ in layers]
    outputs = []
    for step in range(steps):
        mask = _step_mask(length, step, lower.device)
        x = lower + shift
        for layer, held in zip(layers, past):
            query, key, value = project_qkv(config, layer, x, rope, torch.float32)
            held.append((key, value))
            keys, values = (torch.cat(rows, dim=2) for rows in zip(*held))
            x = finish_layer(config, layer, x, attend(query, keys, values, mask))
        outputs.append(x)
        shift = F.pad(mixer.of_top(x), (0, 0, 1, 0))[:, :-1]
    return outputs


def _step_mask(length: int, step: int, device: torch.device) -> Tensor:
    """Additive mask [T, (step + 1) * T] over the keys of all steps up to ``step``."""
    row = torch.arange(length, device=device)[:, None]
    column = torch.arange(length, device=device)
    # Rows before ``step`` mean nothing, but must see something: a softmax of nothing is NaN.
    blocks = [column <= (row - step).clamp(min=0)]
    blocks += [column == row - step + index for index in range(1, step + 1)]
    seen = torch.cat(blocks, dim=1)
    return torch.zeros(seen.shape, device=device).masked_fill_(~seen, -torch.inf)


class FeatureDrafter(SharedLayersDrafter):
    """Shared lower layers, plus features of the position before."""

    def __init__(self, mixer: Mixer, feature_depths: Sequence[int], *args):
        super().__init__(*args)
        self.mixer = mixer
        self.feature_depths = feature_depths

    def step_bytes(self, state: DecodeState) -> int:
        # Drafting on, its own output stands in for the last feature, and needs that block alone.
        return (super().step_bytes(state) + self.mixer.carry.nbytes
                + self.mixer.blocks[-1].nbytes)

    def _lower(self, state: DecodeState, token: int, position: int) -> Tensor:
        return super()._lower(state, token, position) if self.depth else self._embed([token])

    def _held(self, state: DecodeState, end: int) -> Tensor:
        return (super()._held(state, end) if self.depth
                else self._embed(state.read(self.cached, end)))

    def _after_target(self, state: DecodeState, lower: Tensor) -> Tensor:
        return lower + self._features(state, self.cached, self.cached + lower.shape[1])

    def _after_own(self, lower: Tensor, before: Tensor) -> Tensor:
        return lower + self.mixer.of_top(before)

    def _embed(self, tokens: list[int]) -> Tensor:
        return self.target.model.embed(torch.tensor([tokens], dtype=torch.long,
                                                    device=self.target.device))

    def _features(self, state: DecodeState, start: int, end: int) -> Tensor:
        """Shares of the inputs [1, T, H] of positions from ``start`` up to ``end``."""
        first = max(start, 1)
        rows = torch.stack([state.hidden[depth][first - 1:end - 1]
                            for depth in self.feature_depths], dim=1)
        shares = self.mixer.of_target(rows)[None]
        # Nothing stands before the first position.
        return F.pad(shares, (0, 0, first - start, 0)) if start < first else shares


class FeatureKind(SharedLayersKind):
    """
    Options: ``depth`` (target layers reused, 0 for none), ``layers`` (own ones), ``features``
    (after how many target layers each feature is taken, ascending).

    The file holds what a ``shared_layers`` file holds, and ``mixer.scales``
    [F, H], ``mixer.<i>`` [H, H] and ``mixer.carry`` [H].
    """

    option_names = frozenset({'depth', 'layers', 'features'})
    least_depth = 0

    def __init__(self, spec, bundle, target, capacity):
        super().__init__(spec, bundle, target, capacity)
        features = spec.options.get('features')
        if not (isinstance(features, list) and features
                and all(type(depth) is int and 0 < depth <= target.layers for depth in features)
                and features == sorted(set(features))):
            raise BundleError(f'draft {spec.id!r}: features is {features!r}, expected ascending '
                              f'numbers of layers in 1..{target.layers}')
        self.feature_depths = tuple(features)
        self.depths |= frozenset(features)

    @staticmethod
    def is_matrix(name: str) -> bool:
        mixed, _, index = name.partition('mixer.')
        return SharedLayersKind.is_matrix(name) or (not mixed and index.isdigit())

    def attach(self, tensors: Mapping[str, Tensor | Matrix]) -> Drafter:
        width, count = self.target.model.config.hidden_size, len(self.feature_depths)
        _, _, _, norm, *_ = top = self._top(tensors)
        mixer = Mixer(
            scales=self._tensor(tensors, 'mixer.scales', (count, width)).to(norm.dtype, copy=True),
            blocks=[pack(self._tensor(tensors, f'mixer.{index}', (width, width)), 'auto')
                    for index in range(count)],
            carry=self._tensor(tensors, 'mixer.carry', (width,)).to(norm.dtype))
        return FeatureDrafter(mixer, self.feature_depths, *top)

    @torch.inference_mode()
    def rollout_ranks(self, tensors: Mapping[str, Tensor], run: TargetRun, first: int,
                      gamma: int, top: int) -> Tensor:
        drafter = self.attach(tensors)
        model, count = self.target.model, len(run.tokens)
        lower = (run.hidden[self.depth] if self.depth else
                 model.embed(torch.tensor(run.tokens, device=self.target.device)))
        features = torch.stack([run.hidden[depth] for depth in self.feature_depths], dim=1)
        stream = drafter.norm.dtype
        outputs = unroll(model.config, drafter.layers, drafter.mixer, lower[None].to(stream),
                         features[None].to(stream),
                         model.rope.at(0, count), gamma)
        ranks = torch.zeros(count - first, gamma, dtype=torch.uint8)
        for step, output in enumerate(outputs):
            # Row first + t + step - 1 of this step says which token follows it.
            found = self.ranks(drafter, output[0, first + step - 1:count - 1], run.tokens,
                               first + step, top)
            ranks[:len(found), step] = found
        return ranks
