# SPDX-License-Identifier: Apache-2.0
"""
Matrices in the layout their kernels want, so that no step rearranges them.

On a CPU, oneDNN multiplies a plain bfloat16 matrix only after bringing it into
blocks, at every call. Packed once, one row costs about two thirds, and nine
rows hardly more than one: what speculative decoding lives on. Measure with
``memspec bench quick``; results are the plain ones bit for bit in bfloat16.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
import torch.nn.functional as F

# Rows the layout is chosen for. Decoding verifies few, prefill runs many: measured, the layout
# for this many is the best or next to it from 1 to 64.
_ROWS = 16


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] times weight [out, in] transposed, packed or plain."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, 'none', [], '')
    return F.linear(x, weight, bias)


def pack(weight: Tensor) -> Tensor:
    """The matrix packed, or as it is where packing is not to be had (CUDA, other builds)."""
    if weight.device.type != 'cpu' or not _available(weight.dtype):
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)


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
