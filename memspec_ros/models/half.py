# SPDX-License-Identifier: Apache-2.0
"""
Matrices of 16 bits a weight, multiplied in float32.

FBGEMM, which comes with PyTorch on x86, reads weights as float16 and computes in
float32. It fetches ahead what it will read, and so streams a matrix from memory
about twice as fast as oneDNN's bfloat16 does; with many rows, arithmetic decides,
of which bfloat16 does twice as much. What a bfloat16 weight stands for is kept
(float16 has three bits more; below 2 ** -17 it is rounded by at most 3e-8), and
activations are not rounded to 16 bits on their way: the result is that of float32
with these weights. A row's sums do not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
import torch.nn.functional as F

from .quantized import Matrix, StackedMatrix

_MOST = 65504.0
# Packing passes through float32: of large matrices, so many weights at a time.
_BLOCK_ELEMENTS = 1 << 22
_ROW_MULTIPLE = 64
# FBGEMM lays a matrix out in blocks of so many columns, and fills the last one up.
_COLUMNS = 512


class HalfMatrix(Matrix):
    """
    float16 in FBGEMM's layout; ``half`` makes it.

    Attributes
    ----------
    packed: the matrix as FBGEMM's products take it

    """

    kind = 'float16'

    def __init__(self, weight: Tensor):
        self.shape = tuple(weight.shape)
        self.nbytes = 2 * weight.numel()
        self.padding = half_padding(self.shape)
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None)

    def multiply(self, x: Tensor) -> Tensor:
        if x.dim() == 1:
            return self.multiply(x[None])[0]
        return torch.ops.quantized.linear_dynamic_fp16(x.float(), self.packed).to(x.dtype)


def half_padding(shape: Sequence[int]) -> int:
    """Bytes that a matrix [out, in] takes in FBGEMM's layout beside those of its weights."""
    return 2 * shape[0] * (-shape[1] % _COLUMNS)


def half(weight: Tensor) -> Matrix | None:
    """The matrix [out, in] for FBGEMM, or None where that cannot hold it."""
    if not has_half(weight.device, weight.dtype):
        return None
    return half_of(weight.shape, lambda rows: weight[rows.start:rows.stop])


def half_of(shape: Sequence[int], read: Callable[[range], Tensor]) -> Matrix | None:
    """
    A matrix [out, in] of which ``read`` gives rows: it need not be in memory whole.

    None where values are no numbers, or too large.
    """
    step = max(1, _BLOCK_ELEMENTS // (shape[1] * _ROW_MULTIPLE)) * _ROW_MULTIPLE
    parts = []
    for first in range(0, shape[0], step):
        part = read(range(first, min(first + step, shape[0])))
        if not float(part.abs().max()) <= _MOST:
            return None
        parts.append(HalfMatrix(part))
    return parts[0] if len(parts) == 1 else StackedMatrix(parts)


def has_half(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights of ``dtype`` can be held so on ``device``, and come out right."""
    return (device.type == 'cpu' and dtype in (torch.bfloat16, torch.float16)
            and _half_works())


@lru_cache
def _half_works() -> bool:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).bfloat16()
    x = torch.randn(3, 64, generator=generator)
    try:
        result = HalfMatrix(weight).multiply(x)
    except (AttributeError, RuntimeError):
        return False
    return torch.allclose(result, F.linear(x, weight.float()), rtol=1e-3, atol=1e-3)
