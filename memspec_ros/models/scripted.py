# SPDX-License-Identifier: Apache-2.0
"""
Layers for TorchScript.

The operations are those of ``layers.py``, in the same order, and so are the
numbers. No postponed annotations here: TorchScript reads them.
"""

from typing import List, Optional, Tuple

import torch
from torch import Tensor
import torch.nn.functional as F

# One entry a layer: norms before attention, norms before the MLP, biases of q, k and v.
Vectors = Tuple[List[Tensor], List[Tensor], List[Optional[Tensor]]]
# qkv, out, gate_up, down; one entry a layer.
DenseMatrices = Tuple[List[Tensor], List[Tensor], List[Tensor], List[Tensor]]
# keys and values [layers, B, KV, capacity, D] and how many positions they hold.
Cache = Tuple[Tensor, Tensor, int]
# cos and sin [B or 1, T, 1, D] in float32.
Turns = Tuple[Tensor, Tensor]
# Query heads, heads of keys and values.
Heads = Tuple[int, int]


def attention(fused: Tensor, bias: Optional[Tensor], keys: Tensor, values: Tensor, start: int,
              turns: Turns, mask: Optional[Tensor], heads: Heads) -> Tensor:
    """
    Projections [B, T, (Q + 2 KV) * D] of a layer -> what its heads read, [B, T, Q * D].

    keys, values [B, KV, capacity, D] receive the new rows from position ``start`` on.
    """
    queries, kept = heads
    cos, sin = turns
    if bias is not None:
        fused = fused + bias
    fused = fused.view(fused.size(0), fused.size(1), queries + 2 * kept, -1)
    turning = fused[:, :, :queries + kept].float()
    turned = turning * cos + torch.roll(turning, turning.size(-1) // 2, -1) * sin
    turned = turned.to(keys.dtype)
    end = start + fused.size(1)
    keys[:, :, start:end].copy_(turned[:, :, queries:].transpose(1, 2))
    values[:, :, start:end].copy_(fused[:, :, queries + kept:].transpose(1, 2))
    read = F.scaled_dot_product_attention(
        turned[:, :, :queries].transpose(1, 2), keys[:, :, :end], values[:, :, :end], mask,
        0.0, False, enable_gqa=queries != kept)
    return read.transpose(1, 2).flatten(2)


def gated(both: Tensor) -> Tensor:
    """Gate and up [..., 2 I] -> input [..., I] of the last projection."""
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


def normed(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x [..., H], normed."""
    return torch.rms_norm(x, [x.size(-1)], scale, eps)


def product(x: Tensor, weight: Tensor, packed: bool) -> Tensor:
    """x [..., in] times weight [out, in] transposed; ``packed``: by oneDNN."""
    if packed:
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, 'none', [], '')
    return F.linear(x, weight)


def run_dense(x: Tensor, vectors: Vectors, matrices: DenseMatrices, packed: bool, cache: Cache,
              turns: Turns, mask: Optional[Tensor], heads: Heads, eps: float) -> Tensor:
    """Layers whose matrices are tensors: hidden states [B, T, H] -> [B, T, H]."""
    before, between, biases = vectors
    qkv, out, gate_up, down = matrices
    keys, values, start = cache
    for i in range(len(qkv)):
        fused = product(normed(x, before[i], eps), qkv[i], packed)
        read = attention(fused, biases[i], keys[i], values[i], start, turns, mask, heads)
        x = x + product(read.to(x.dtype), out[i], packed)
        both = product(normed(x, between[i], eps), gate_up[i], packed)
        x = x + product(gated(both), down[i], packed)
    return x
