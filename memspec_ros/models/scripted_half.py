# SPDX-License-Identifier: Apache-2.0
"""
Layers for TorchScript whose matrices FBGEMM holds (``half.py``).

In a module of its own: a PyTorch without FBGEMM need not know the class.
"""

from typing import List, Optional, Tuple

import torch
from torch import Tensor

from .scripted import attention, Cache, gated, Heads, normed, Turns, Vectors

HalfMatrices = Tuple[List[torch.classes.quantized.LinearPackedParamsBase],
                     List[torch.classes.quantized.LinearPackedParamsBase],
                     List[torch.classes.quantized.LinearPackedParamsBase],
                     List[torch.classes.quantized.LinearPackedParamsBase]]


def run_half(x: Tensor, vectors: Vectors, matrices: HalfMatrices, cache: Cache, turns: Turns,
             mask: Optional[Tensor], heads: Heads, eps: float) -> Tensor:
    """Hidden states [B, T, H] in float32 -> [B, T, H]."""
    before, between, biases = vectors
    qkv, out, gate_up, down = matrices
    keys, values, start = cache
    for i in range(len(qkv)):
        fused = torch.ops.quantized.linear_dynamic_fp16(normed(x, before[i], eps), qkv[i])
        read = attention(fused, biases[i], keys[i], values[i], start, turns, mask, heads)
        x = x + torch.ops.quantized.linear_dynamic_fp16(read, out[i])
        both = torch.ops.quantized.linear_dynamic_fp16(normed(x, between[i], eps), gate_up[i])
        x = x + torch.ops.quantized.linear_dynamic_fp16(gated(both), down[i])
    return x
