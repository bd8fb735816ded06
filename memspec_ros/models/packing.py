# SPDX-License-Identifier: Apache-2.0
"""
Matrices in the layout their kernels want, so that no step rearranges them.

On a CPU, oneDNN multiplies a plain bfloat16 matrix only after bringing it into
blocks, at every call. Packed once, one row costs about two thirds; results are
the plain ones bit for bit in bfloat16. Where FBGEMM is faster (``half.py``),
matrices are held for that: one row then costs about half.

A matrix can also be INT8 or INT4 (``quantized.py``), which reads a half or a
quarter of the bytes. By how many rows they gain is a matter of shape: INT8
rounds its activations at every call, which only large matrices repay, and INT4
favours few rows. What a verify of each size costs is measured when a bundle is
opened, and drafts are made as long as pays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
import torch.nn.functional as F

from .errors import UnsupportedModelError
from .gptq import GptqMatrix
from .half import half, HalfMatrix
from .kernel_choice import half_pays
from .quantized import (
    has_int4,
    has_int8,
    Int8Matrix,
    kernel_group,
    Matrix,
    round_to_int4,
    StackedMatrix,
)

# How the matrices of layers can be held. auto: as the checkpoint has them, those of a GPTQ
# checkpoint in INT4 where a kernel takes them, 16-bit ones for the kernel that is faster here;
# dense: in the type that is computed in; library: by an installed GPTQ library.
WEIGHT_KINDS = ('auto', 'dense', 'int8', 'int4', 'library')
# A group of INT4 that is rounded here, without calibration: small, for precision.
ROUNDED_GROUP = 64
# Rows the layout is chosen for. Decoding verifies few, prefill runs many: measured, the layout
# for this many is the best or next to it from 1 to 64.
_ROWS = 16


def linear(x: Tensor, weight: Tensor | Matrix, bias: Tensor | None = None) -> Tensor:
    """
    x [..., in] times weight [out, in] transposed: plain, packed or quantised.

    Computed in the type of the weight; the result has that of x.
    """
    if isinstance(weight, Matrix):
        result = weight.multiply(x)
        return result if bias is None else result + bias
    if x.dtype != weight.dtype:
        return linear(x.to(weight.dtype), weight, bias).to(x.dtype)
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, 'none', [], '')
    return F.linear(x, weight, bias)


def fuse(parts: Sequence[Tensor | Matrix]) -> Tensor | Matrix:
    """One matrix of several that read the same input, one above the other."""
    if all(isinstance(part, GptqMatrix) for part in parts):
        return GptqMatrix.fuse(parts)
    return torch.cat([dense(part) for part in parts])


def dense(weight: Tensor | Matrix) -> Tensor:
    """The matrix as a plain tensor; of a quantised one, what it stands for."""
    if isinstance(weight, GptqMatrix):
        return weight.dequantize()
    if isinstance(weight, StackedMatrix):
        return torch.cat([dense(part) for part in weight.parts])
    return weight


def pack(weight: Tensor | Matrix, kind: str = 'dense') -> Tensor | Matrix:
    """
    The matrix as it is best multiplied, held as ``kind`` (of WEIGHT_KINDS).

    As it is where packing is not to be had (CUDA, other builds), or was done before.
    Raises UnsupportedModelError where ``kind`` asks for a kernel that does not take
    the matrix.
    """
    if isinstance(weight, HalfMatrix) or isinstance(weight, Tensor) and weight.is_mkldnn:
        return weight
    if isinstance(weight, StackedMatrix):
        parts = [pack(part, kind) for part in weight.parts]
        if all(isinstance(part, Matrix) for part in parts):
            return StackedMatrix(parts)
        return pack(dense(weight), 'dense')
    if isinstance(weight, GptqMatrix):
        packed = weight.int4() if kind in ('auto', 'int4') else None
        if packed is None and kind == 'int4':
            raise UnsupportedModelError(
                f'{weight.name}: {weight.bits} bits, {weight.shape[0]} x {weight.shape[1]} in '
                f'groups of {weight.shape[1] // len(weight.scales)} fits no INT4 kernel on '
                f'{weight.scales.device.type}; use weights auto')
        if packed is not None:
            return packed
        weight = weight.dequantize()
    if kind == 'int8':
        if not has_int8(weight.device):
            raise UnsupportedModelError(f'no INT8 kernel for {weight.device.type} in this '
                                        'PyTorch; use weights auto')
        return Int8Matrix(weight)
    if kind == 'int4':
        group = kernel_group(weight.shape[1], ROUNDED_GROUP)
        if group is None or not has_int4(weight.device, weight.dtype, weight.shape[0]):
            raise UnsupportedModelError(
                f'a matrix of {weight.shape[0]} x {weight.shape[1]} in {weight.dtype} fits no '
                f'INT4 kernel on {weight.device.type}; use weights auto')
        return round_to_int4(weight, group)
    if kind == 'auto' and prefers_half(weight.dtype, weight.device):
        held = half(weight)
        if held is not None:
            return held
    if weight.device.type != 'cpu' or not _available(weight.dtype):
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)


def prefers_half(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether matrices of ``dtype`` are best held for FBGEMM on ``device``."""
    return half_pays(dtype, device, _multiplier)


def _multiplier(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """What multiplies rows with ``weight`` where FBGEMM does not."""
    packed = pack(weight)
    return lambda x: linear(x, packed)


@lru_cache
def _available(dtype: torch.dtype) -> bool:
    """Whether this PyTorch packs ``dtype`` and computes right with it: tried, not guessed."""
    if not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).to(dtype)
    x = torch.randn(1, 3, 64, generator=generator).to(dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
        result = torch.ops.mkldnn._linear_pointwise(x, packed, None, 'none', [], '')
    except (AttributeError, RuntimeError):
        return False
    return torch.allclose(result.float(), F.linear(x, weight).float(), rtol=2e-2, atol=2e-2)
