# SPDX-License-Identifier: Apache-2.0
"""
Matrices of fewer bits, multiplied by PyTorch's own kernels.

The sums of a row do not depend on the rows beside it: a token verified among
others gets the logits it would get alone. INT8 therefore scales activations per
row and sums whole numbers, which is exact in any order; the INT4 kernel of the
CPU runs through a row in one order, whatever the number of rows (tested).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
import torch.nn.functional as F

# Sizes of a group (weights that share a scale) that PyTorch's kernels know, best first.
KERNEL_GROUPS = (256, 128, 64, 32)
_LEAST_SCALE = 1e-12


class Matrix(ABC):
    """
    A weight matrix that is no plain tensor.

    Attributes
    ----------
    shape: (out, in)
    nbytes: bytes that a product reads
    padding: further bytes in memory
    kind: what it is made of, such as int4

    """

    shape: tuple[int, int]
    nbytes: int
    padding: int = 0
    kind: str

    @abstractmethod
    def multiply(self, x: Tensor) -> Tensor:
        """x [..., in] times the matrix transposed: [..., out] in the type of x."""


class StackedMatrix(Matrix):
    """Matrices that read the same input, one above the other."""

    def __init__(self, parts: Sequence[Matrix]):
        self.parts = tuple(parts)
        self.shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        self.nbytes = sum(part.nbytes for part in parts)
        self.padding = sum(part.padding for part in parts)
        self.kind = parts[0].kind

    def multiply(self, x: Tensor) -> Tensor:
        return torch.cat([part.multiply(x) for part in self.parts], -1)


class Int8Matrix(Matrix):
    """INT8 with one scale an output, activations rounded to INT8 with one scale a row."""

    kind = 'int8'

    def __init__(self, weight: Tensor):
        scales = weight.float().abs().amax(1).clamp_min(_LEAST_SCALE) / 127
        levels = (weight.float() / scales[:, None]).round_().to(torch.int8)
        self.shape = tuple(weight.shape)
        self.nbytes = weight.numel() + 8 * len(scales)
        self._levels = torch.ops.onednn.qlinear_prepack(levels, None)
        self._scales = scales
        self._zeros = torch.zeros(len(scales), dtype=torch.int32)

    def multiply(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        scales = rows.abs().amax(1, keepdim=True).float().mul_(1 / 127).clamp_min_(_LEAST_SCALE)
        # Unsigned with 128 for zero: oneDNN has no fast path for signed activations.
        levels = (rows / scales).round_().add_(128).to(torch.uint8)
        result = torch.ops.onednn.qlinear_pointwise(
            levels, 1.0, 128, self._levels, self._scales, self._zeros, None, 1.0, 0,
            torch.float32, 'none', [], '')
        return result.mul_(scales).to(x.dtype).view(*x.shape[:-1], -1)


class Int4Matrix(Matrix):
    """
    INT4 with a scale and a zero for each group of inputs.

    ``order`` [in] sorts the inputs so that those of a group are neighbours
    (act-order); None where they are.
    """

    kind = 'int4'

    def __init__(self, levels: Tensor, scales: Tensor, zeros: Tensor, group: int,
                 dtype: torch.dtype, order: Tensor | None = None):
        """levels [out, in] of 0 to 15; scales and zeros (levels) [in / group, out] float32."""
        self.shape = tuple(levels.shape)
        self.group, self.order = group, order
        # The kernels compute (level - 8) * scale + zero.
        self._scales = torch.stack([scales, (8 - zeros) * scales], -1).to(dtype).contiguous()
        self._levels, self._kernel = _pack_int4(levels)
        self.nbytes = levels.numel() // 2 + self._scales.nbytes

    def multiply(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self.order is not None:
            rows = rows.index_select(1, self.order)
        result = self._kernel(rows.contiguous(), self._levels, self.group, self._scales)
        return result.view(*x.shape[:-1], -1)


def _pack_int4(levels: Tensor):
    """Levels in the layout of the device's kernel, and the kernel."""
    if levels.device.type == 'cpu':
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels.int(), 1)
        return packed, torch.ops.aten._weight_int4pack_mm_for_cpu
    levels = levels.to(torch.uint8)
    pairs = (levels[:, ::2] << 4 | levels[:, 1::2]).contiguous()
    tiles = next(tiles for tiles in (8, 4, 2) if levels.shape[1] % (16 * tiles) == 0)
    return (torch.ops.aten._convert_weight_to_int4pack(pairs, tiles),
            torch.ops.aten._weight_int4pack_mm)


def int4_bytes(out: int, width: int, group: int, dtype: torch.dtype) -> int:
    """Bytes of an Int4Matrix."""
    return out * width // 2 + 2 * out * (width // group) * dtype.itemsize


def int8_bytes(out: int, width: int) -> int:
    """Bytes of an Int8Matrix."""
    return out * (width + 8)


def round_to_int4(weight: Tensor, group: int) -> Int4Matrix:
    """Each weight to the nearest of 16 levels between the least and the greatest of its group."""
    out, width = weight.shape
    grouped = weight.float().view(out, width // group, group)
    low, high = grouped.amin(-1).clamp_max(0), grouped.amax(-1).clamp_min(0)
    scales = ((high - low) / 15).clamp_min(_LEAST_SCALE)
    zeros = (-low / scales).round()
    levels = (grouped / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
    return Int4Matrix(levels.view(out, width).to(torch.int32), scales.t(), zeros.t(), group,
                      weight.dtype)


def kernel_group(width: int, group: int | None = None) -> int | None:
    """The largest group of the kernels that divides ``width`` inputs, and ``group``; or None."""
    return next((size for size in KERNEL_GROUPS
                 if width % size == 0 and (group is None or group % size == 0)), None)


def has_int8(device: torch.device) -> bool:
    """Whether INT8 is to be had on ``device``, and right."""
    return device.type == 'cpu' and _int8_works()


def has_int4(device: torch.device, dtype: torch.dtype, out: int) -> bool:
    """Whether matrices of ``out`` outputs can be INT4 on ``device``, computing in ``dtype``."""
    if device.type == 'cuda':  # compute capability 8.0 or more; an Orin is 8.7
        return (dtype is torch.bfloat16 and out % 8 == 0
                and torch.cuda.get_device_capability(device) >= (8, 0)
                and _int4_works(device, dtype))
    return device.type == 'cpu' and out % 16 == 0 and _int4_works(device, dtype)


@lru_cache
def _int8_works() -> bool:
    # Ones and extremes: without VNNI, sums of two products overflow 16 bits.
    weight, x = torch.ones(32, 64), torch.ones(3, 64)
    try:
        return torch.allclose(Int8Matrix(weight).multiply(x), F.linear(x, weight), rtol=1e-3)
    except (AttributeError, RuntimeError):
        return False


@lru_cache
def _int4_works(device: torch.device, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    levels = torch.randint(0, 16, (64, 128), generator=generator)
    scales = torch.rand(4, 64, generator=generator) + 0.5
    zeros = torch.randint(0, 16, (4, 64), generator=generator).float()
    x = torch.randn(3, 128, generator=generator).to(dtype)
    spread = [part.repeat_interleave(32, 0).t() for part in (zeros, scales)]
    try:
        result = Int4Matrix(levels.to(device), scales.to(device), zeros.to(device), 32,
                            dtype).multiply(x.to(device))
    except (AttributeError, RuntimeError):
        return False
    expected = F.linear(x.float(), (levels - spread[0]) * spread[1])
    return torch.allclose(result.float().cpu(), expected, atol=0.02 * expected.abs().max())
