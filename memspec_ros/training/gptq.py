# SPDX-License-Identifier: Apache-2.0
"""
The GPTQ algorithm for one matrix (Frantar et al., arXiv:2210.17323).

Inputs are rounded one after another; what a rounding does wrong is made up for
by the inputs still to come, as the second moments of what the matrix reads (the
Hessian of its squared error) say.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
import torch.nn.functional as F

from ..models.gptq import pack_words
from ..models.quantized import Matrix

_BLOCK = 128
# The least float16 above zero: a group of zeros needs some scale.
_LEAST_SCALE = 2.0 ** -24


class ObservedMatrix(Matrix):
    """A plain matrix [out, in] that adds up the second moments [in, in] of what it reads."""

    kind = 'observed'

    def __init__(self, weight: Tensor):
        self.weight = weight
        self.shape = tuple(weight.shape)
        self.nbytes = weight.nbytes
        self.moments = torch.zeros(weight.shape[1], weight.shape[1], device=weight.device)
        self.rows = 0

    def multiply(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).float()
        self.moments.addmm_(rows.t(), rows)
        self.rows += len(rows)
        return F.linear(x, self.weight)


@dataclass(frozen=True)
class Scheme:
    """
    How to round: bits a weight, inputs a group (-1: all), order and range.

    ``act_order`` rounds the inputs that matter most first; ``symmetric`` puts
    zero in the middle of the levels. ``damping`` is a share of the moments'
    mean diagonal, added to it so that they can be inverted.
    """

    bits: int = 4
    group_size: int = 128
    act_order: bool = False
    symmetric: bool = False
    damping: float = 0.01


@dataclass(frozen=True)
class Quantised:
    """Levels [out, in], scales (float16) and zeros [groups, out], groups [in] of one matrix."""

    levels: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor
    bits: int

    def dequantize(self) -> Tensor:
        """The weights [out, in] in float32."""
        index = self.groups
        return ((self.levels.t() - self.zeros[index]) * self.scales.float()[index]).t()

    def tensors(self, first: int, count: int) -> dict[str, Tensor]:
        """Tensors of checkpoint format ``gptq`` for ``count`` outputs from ``first``."""
        part = slice(first, first + count)
        zeros = self.zeros[:, part].int() - 1
        return {
            'qweight': pack_words(self.levels[part].t(), self.bits).contiguous().cpu(),
            'qzeros': pack_words(zeros.t(), self.bits).t().contiguous().cpu(),
            'scales': self.scales[:, part].contiguous().cpu(),
            'g_idx': self.groups.int().cpu(),
        }


def quantise(weight: Tensor, moments: Tensor, scheme: Scheme) -> Quantised:
    """
    Round ``weight`` [out, in], which reads inputs of second moments ``moments`` [in, in].

    Raises torch.linalg.LinAlgError where the moments cannot be inverted.
    """
    weight, moments = weight.float().clone(), moments.float().clone()
    out, width = weight.shape
    size = width if scheme.group_size == -1 else scheme.group_size
    diagonal = moments.diagonal()
    unused = diagonal == 0
    diagonal[unused] = 1
    weight[:, unused] = 0
    order = (diagonal.argsort(descending=True, stable=True) if scheme.act_order
             else torch.arange(width, device=weight.device))
    weight, moments = weight[:, order], moments[order][:, order]
    moments.diagonal().add_(scheme.damping * moments.diagonal().mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments))
    inverse = torch.linalg.cholesky(inverse, upper=True)

    levels = torch.empty_like(weight, dtype=torch.int32)
    scales, zeros = [], []
    # Whole groups in a block, so that a group's weights are up to date when its range is taken.
    block = _BLOCK if size == width else size * max(1, _BLOCK // size)
    for start in range(0, width, block):
        end = min(start + block, width)
        errors = torch.empty(out, end - start, device=weight.device)
        for i in range(start, end):
            if i % size == 0:
                scale, zero = _range(weight[:, i:i + size], scheme)
                scales.append(scale)
                zeros.append(zero)
            levels[:, i], rounded = _round(weight[:, i], scale, zero, scheme.bits)
            errors[:, i - start] = (weight[:, i] - rounded) / inverse[i, i]
            weight[:, i + 1:end] -= errors[:, i - start, None] * inverse[i, i + 1:end]
        weight[:, end:] -= errors @ inverse[start:end, end:]
    groups = torch.empty(width, dtype=torch.long, device=weight.device)
    groups[order] = torch.arange(width, device=weight.device) // size
    unsorted = torch.empty_like(levels)
    unsorted[:, order] = levels
    return Quantised(unsorted, torch.stack(scales).half(), torch.stack(zeros), groups, scheme.bits)


def _range(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Scale (as float16 holds it) and zero level [out] of a group of weights [out, size]."""
    top = 2 ** scheme.bits - 1
    low, high = weight.amin(1).clamp_max(0), weight.amax(1).clamp_min(0)
    if scheme.symmetric:
        high = torch.maximum(-low, high)
        low = -high
    scale = ((high - low) / top).clamp_min(_LEAST_SCALE).half().float()
    if scheme.symmetric:
        return scale, torch.full_like(scale, (top + 1) // 2)
    # Not 0: less one, as the format wants it, readers take that for different things.
    return scale, (-low / scale).round().clamp(1, top)


def _round(column: Tensor, scale: Tensor, zero: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    level = (column / scale + zero).round().clamp(0, 2 ** bits - 1)
    return level.int(), (level - zero) * scale
