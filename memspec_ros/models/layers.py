# SPDX-License-Identifier: Apache-2.0
"""
A decoder layer of the Llama family: its weights and its arithmetic.

Projections are fused (q, k, v in one matrix; gate and up in one). Shapes: B
sequences, T new positions, S = positions seen so far including the new ones, H
hidden width, D head width, Q query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
import math

import torch
from torch import Tensor
import torch.nn.functional as F

from .errors import UnsupportedModelError
from .llama_config import LlamaConfig
from .packing import fuse, linear, pack
from .quantized import Matrix

# Older releases (JetPack 6.0) have no grouped heads in the kernel.
GROUPED_KERNEL = tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 5)


@dataclass
class LayerWeights:
    """
    One decoder layer.

    ``qkv`` [(Q + 2 KV) * D, H], ``qkv_bias`` the same rows or None (Qwen2 has
    one), ``out`` [H, Q * D], ``gate_up`` [2 * intermediate, H], ``down``
    [H, intermediate], norms [H]. Matrices may be quantised.
    """

    input_norm: Tensor
    qkv: Tensor | Matrix
    qkv_bias: Tensor | None
    out: Tensor | Matrix
    post_norm: Tensor
    gate_up: Tensor | Matrix
    down: Tensor | Matrix

    NAMES = ('input_norm', 'qkv', 'qkv_bias', 'out', 'post_norm', 'gate_up', 'down')
    MATRICES = ('qkv', 'out', 'gate_up', 'down')

    @classmethod
    def from_hf(cls, get: Callable[[str], Tensor | Matrix | None], prefix: str) -> LayerWeights:
        """Fuse one layer's Hugging Face tensors; ``get`` returns None for an absent name."""

        def need(name: str) -> Tensor | Matrix:
            tensor = get(prefix + name)
            if tensor is None:
                raise UnsupportedModelError(f'tensor {prefix + name} is missing')
            return tensor

        heads = ('q_proj', 'k_proj', 'v_proj')
        biases = [get(f'{prefix}self_attn.{name}.bias') for name in heads]
        if get(f'{prefix}self_attn.q_norm.weight') is not None:
            raise UnsupportedModelError(f'tensor {prefix}self_attn.q_norm.weight has no lean path')
        # GPTQ checkpoints of older tools have a bias everywhere, of zeros.
        for name in ('self_attn.o_proj', 'mlp.gate_proj', 'mlp.up_proj', 'mlp.down_proj'):
            bias = get(f'{prefix}{name}.bias')
            if bias is not None and bool(bias.any()):
                raise UnsupportedModelError(f'tensor {prefix}{name}.bias has no lean path')
        return cls(
            input_norm=need('input_layernorm.weight'),
            qkv=fuse([need(f'self_attn.{name}.weight') for name in heads]),
            qkv_bias=(torch.cat([need(f'self_attn.{name}.bias') for name in heads])
                      if any(bias is not None for bias in biases) else None),
            out=need('self_attn.o_proj.weight'),
            post_norm=need('post_attention_layernorm.weight'),
            gate_up=fuse([need('mlp.gate_proj.weight'), need('mlp.up_proj.weight')]),
            down=need('mlp.down_proj.weight'),
        )

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> LayerWeights:
        """From tensors by field name, as ``tensors`` gives them."""
        return cls(**{name: tensors[name] if name in tensors else None for name in cls.NAMES})

    def packed(self, kind: str = 'dense') -> LayerWeights:
        """The same layer with its matrices packed for decoding, as ``kind`` (see ``pack``)."""
        return replace(self, **{name: pack(getattr(self, name), kind) for name in self.MATRICES})

    def streaming(self, dtype: torch.dtype) -> LayerWeights:
        """The same layer with its vectors in ``dtype``, to run hidden states of that type."""
        vectors = (name for name in self.NAMES
                   if name not in self.MATRICES and getattr(self, name) is not None)
        return replace(self, **{name: getattr(self, name).to(dtype) for name in vectors})

    def tensors(self) -> dict[str, Tensor | Matrix]:
        """Tensors and matrices by field name, without the absent ones."""
        return {name: getattr(self, name) for name in self.NAMES
                if getattr(self, name) is not None}

    @property
    def kinds(self) -> set[str]:
        """What its matrices are made of: quantised kinds, or types."""
        return {matrix.kind if isinstance(matrix, Matrix)
                else str(matrix.dtype).removeprefix('torch.') for matrix in self.matrices()}

    def matrices(self) -> list[Tensor | Matrix]:
        """Its matrices, in the order of MATRICES."""
        return [getattr(self, name) for name in self.MATRICES]

    @property
    def bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    def padding(self) -> int:
        """Bytes that its matrices take in memory beside those."""
        return sum(matrix.padding for matrix in self.matrices() if isinstance(matrix, Matrix))


def layer_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's tensors, by field name of LayerWeights."""
    qkv = (config.heads + 2 * config.kv_heads) * config.head_dim
    hidden, wide = config.hidden_size, config.intermediate_size
    return {
        'input_norm': (hidden,), 'qkv': (qkv, hidden), 'qkv_bias': (qkv,),
        'out': (hidden, config.heads * config.head_dim), 'post_norm': (hidden,),
        'gate_up': (2 * wide, hidden), 'down': (hidden, wide),
    }


def layer_elements(config: LlamaConfig) -> int:
    """Parameters of a layer without biases."""
    return sum(math.prod(shape) for name, shape in layer_shapes(config).items()
               if name != 'qkv_bias')


class Rope:
    """
    Rotary position embedding tables, in float32.

    Tables for all positions are built once: a decode step then only slices.
    """

    def __init__(self, config: LlamaConfig, positions: int, device: torch.device):
        half = config.head_dim // 2
        inverse = 1.0 / config.rope_theta ** (torch.arange(half, dtype=torch.float32) / half)
        inverse = _scale_frequencies(inverse, config.rope_scaling)
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse)
        # cos twice and (-sin, sin): then rotating is x * cos + swap_halves(x) * sin.
        self.cos = torch.cat([angles.cos(), angles.cos()], -1).to(device)
        self.sin = torch.cat([-angles.sin(), angles.sin()], -1).to(device)

    def at(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [1, T, 1, D], of ``count`` positions from ``start``."""
        span = slice(start, start + count)
        return self.cos[span, None][None], self.sin[span, None][None]

    def gather(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [B, T, 1, D], at positions [B, T]."""
        return self.cos[positions].unsqueeze(-2), self.sin[positions].unsqueeze(-2)

    def turn_back(self, keys: Tensor, count: int) -> Tensor:
        """
        Rotated keys [..., D] of some positions as they were ``count`` positions before.

        Rotations add up: attention sees distances alone, which stay as they are
        among keys that move together.
        """
        rope = self.cos[count], -self.sin[count]
        return rotate(keys.float(), rope).to(keys.dtype)


def _scale_frequencies(inverse: Tensor, scaling: Mapping | None) -> Tensor:
    """Linear and Llama-3 context extension, with the semantics of ``transformers``."""
    if scaling is None:
        return inverse
    factor = scaling['factor']
    if scaling.get('rope_type', scaling.get('type')) == 'linear':
        return inverse / factor
    original = scaling['original_max_position_embeddings']
    low, high = scaling['low_freq_factor'], scaling['high_freq_factor']
    wavelength = 2 * math.pi / inverse
    blend = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return inverse * (blend + (1 - blend) / factor)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary embedding to x [..., D], such as [B, T, heads, D] (float32)."""
    cos, sin = rope
    half = x.shape[-1] // 2
    return x * cos + torch.cat([x[..., half:], x[..., :half]], -1) * sin


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """
    Grouped-query attention.

    query [B, T, Q, D]; keys, values [B, KV, S, D]; mask additive, broadcastable
    to [B, Q, T, S], or None (one new position sees everything). Returns
    [B, T, Q, D]. One fused kernel: on few cores, waking threads for each of
    several small products costs more than the products.
    """
    query = query.transpose(1, 2)
    group = query.shape[1] // keys.shape[1]
    if GROUPED_KERNEL:
        mixed = F.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=group > 1)
    else:
        keys, values = (rows.repeat_interleave(group, 1) for rows in (keys, values))
        mixed = F.scaled_dot_product_attention(query, keys, values, mask)
    return mixed.transpose(1, 2)


def causal_mask(new: int, seen: int, device: torch.device) -> Tensor | None:
    """Additive float32 mask [T, S] for the last ``new`` of ``seen`` positions; None for one."""
    if new == 1:
        return None
    return torch.full((new, seen), -torch.inf, device=device).triu(seen - new + 1)


def project_qkv(config: LlamaConfig, w: LayerWeights, x: Tensor,
                rope: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """
    Rotated query [B, T, Q, D], rotated key and plain value [B, KV, T, D] of x [B, T, H].

    They come out in ``dtype``, the type attention runs in. Rotation is float32.
    """
    batch, new = x.shape[:2]
    normed = F.rms_norm(x, x.shape[-1:], w.input_norm, config.norm_eps)
    fused = linear(normed, w.qkv, w.qkv_bias)
    fused = fused.view(batch, new, config.heads + 2 * config.kv_heads, config.head_dim)
    turning, value = fused.split([config.heads + config.kv_heads, config.kv_heads], dim=2)
    turned = rotate(turning.float(), rope).to(dtype)
    query, key = turned.split([config.heads, config.kv_heads], dim=2)
    return query, key.transpose(1, 2), value.to(dtype).transpose(1, 2)


def finish_layer(config: LlamaConfig, w: LayerWeights, x: Tensor, mixed: Tensor) -> Tensor:
    """Output projection, residual and MLP: x [B, T, H], mixed [B, T, Q, D] -> [B, T, H]."""
    x = x + linear(mixed.flatten(-2).to(x.dtype), w.out)
    normed = F.rms_norm(x, x.shape[-1:], w.post_norm, config.norm_eps)
    gate, up = linear(normed, w.gate_up).chunk(2, dim=-1)
    return x + linear(F.silu(gate) * up, w.down)


def run_layer_uncached(config: LlamaConfig, w: LayerWeights, x: Tensor,
                       rope: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
    """One layer over whole sequences x [B, T, H], keeping no keys and values (training)."""
    query, key, value = project_qkv(config, w, x, rope, torch.float32)
    return finish_layer(config, w, x, attend(query, key, value, mask))
