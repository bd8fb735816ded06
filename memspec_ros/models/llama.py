# SPDX-License-Identifier: Apache-2.0
"""
A lean forward pass for the Llama family (Llama 2/3, SmolLM2, Qwen2).

Decoding a small model one token at a time through a general-purpose model
class spends most of its time in overhead. This module holds the weights as
plain tensors with the projections fused (q, k, v in one matrix; gate and up
in one), and runs any range of layers on preallocated key/value buffers, so
that a draft can reuse the target's lower layers.

Shapes: B sequences, T new positions, S = positions seen so far including the
new ones, H hidden width, D head width, Q query heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
import math

import torch
from torch import Tensor
import torch.nn.functional as F

from .errors import UnsupportedModelError
from .gptq import GptqCheckpoint
from .half import half_of, HalfMatrix
from .kv_cache import KVBuffers
from .packing import dense, fuse, linear, pack, prefers_half
from .quantized import Matrix
from .weights import Checkpoint, StoredTable

SUPPORTED_MODEL_TYPES = ('llama', 'qwen2')
# Older releases (JetPack 6.0) have no grouped heads in the kernel.
_GROUPED_KERNEL = tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 5)


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and constants of a Llama-family model, read from ``config.json``."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Mapping | None
    max_positions: int
    tied_embeddings: bool

    @classmethod
    def from_hf(cls, raw: Mapping) -> LlamaConfig:
        """
        Build from a Hugging Face ``config.json`` mapping.

        Raises UnsupportedModelError where the lean path would compute something
        else than the reference does (sliding window, unknown rope, other
        activation): wrong numbers must never be the silent alternative.
        """
        kind = raw.get('model_type')
        if kind not in SUPPORTED_MODEL_TYPES:
            raise UnsupportedModelError(
                f'model_type {kind!r} has no lean path (supported: '
                f'{", ".join(SUPPORTED_MODEL_TYPES)})')
        if raw.get('hidden_act', 'silu') != 'silu':
            raise UnsupportedModelError(f'hidden_act {raw["hidden_act"]!r} has no lean path')
        if raw.get('use_sliding_window'):
            raise UnsupportedModelError(
                'sliding-window attention cannot be rolled back beyond its window; '
                'set use_sliding_window to false in config.json if the context fits the window')
        if raw.get('mlp_bias'):
            raise UnsupportedModelError('mlp_bias is not supported')
        rope = dict(raw.get('rope_parameters') or raw.get('rope_scaling') or {})
        rope_type = rope.get('rope_type', rope.get('type', 'default'))
        if rope_type not in ('default', 'linear', 'llama3'):
            raise UnsupportedModelError(f'rope type {rope_type!r} has no lean path')
        for where in (rope, raw):
            if where.get('partial_rotary_factor', 1.0) != 1.0:
                raise UnsupportedModelError('partial rotary embedding has no lean path')
        names = ('num_attention_heads', 'vocab_size', 'hidden_size', 'intermediate_size',
                 'num_hidden_layers')
        for name in names:
            if not isinstance(raw.get(name), int):
                raise UnsupportedModelError(f'config.json: {name} is {raw.get(name)!r}')
        heads = raw['num_attention_heads']
        return cls(
            vocab_size=raw['vocab_size'],
            hidden_size=raw['hidden_size'],
            intermediate_size=raw['intermediate_size'],
            layers=raw['num_hidden_layers'],
            heads=heads,
            kv_heads=raw.get('num_key_value_heads') or heads,
            head_dim=raw.get('head_dim') or raw['hidden_size'] // heads,
            norm_eps=raw.get('rms_norm_eps', 1e-6),
            rope_theta=rope.get('rope_theta', raw.get('rope_theta', 10000.0)),
            rope_scaling=rope if rope_type != 'default' else None,
            max_positions=raw.get('max_position_embeddings', 2048),
            tied_embeddings=raw.get('tie_word_embeddings', False),
        )


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
    if _GROUPED_KERNEL:
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


class Llama:
    """
    Weights and forward pass of a Llama-family model.

    Attributes
    ----------
    config: LlamaConfig
    embedding: Tensor [V, H], or a table that stays in its file
    layers: the LayerWeights; those beyond ``held_layers`` are read when they are used
    norm: Tensor [H]
    head: Tensor [V, H] (the embedding itself where tied), or a packed matrix

    ``table`` has the head's rows where ``head`` itself gives none.

    """

    def __init__(self, config: LlamaConfig, embedding: Tensor | StoredTable,
                 layers: Sequence[LayerWeights], norm: Tensor, head: Tensor | Matrix,
                 context: int | None = None, table: StoredTable | None = None):
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head
        self._table = table
        self.rope = Rope(config, min(context or config.max_positions, config.max_positions),
                         embedding.device)

    @property
    def held_layers(self) -> Sequence[LayerWeights]:
        """The layers that are in memory: all, or the lowest."""
        return getattr(self.layers, 'resident', self.layers)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights, and of hidden states that are kept."""
        return self.embedding.dtype

    @property
    def stream_dtype(self) -> torch.dtype:
        """Type of hidden states on their way through the layers: what these multiply in."""
        return self.norm.dtype

    @property
    def attention_dtype(self) -> torch.dtype:
        """
        Type of keys, values and attention.

        float32 on CPU, where PyTorch's bfloat16 attention is several times slower
        than its float32 one; the model's own type elsewhere.
        """
        return torch.float32 if self.device.type == 'cpu' else self.dtype

    @classmethod
    def from_state(cls, config: LlamaConfig, state: Mapping[str, Tensor | Matrix],
                   dtype: torch.dtype, device: torch.device, context: int | None = None,
                   packed: bool = False, weights: str = 'auto',
                   place: Callable[..., Sequence[LayerWeights]] | None = None) -> Llama:
        """
        Build from a Hugging Face state dict (names ``model.layers.0.…``).

        ``packed`` layers are faster to decode with, but cannot be trained on;
        ``weights`` says what their matrices are held as (see ``pack``). ``place``
        gets two functions, one that makes the layer of a number and one that packs
        it, and says where the layers are; by default all are in memory.
        """

        def get(name: str) -> Tensor | Matrix | None:
            tensor = state.get(name)
            if tensor is None:
                return None
            tensor = tensor.to(device=device, dtype=dtype)
            if not isinstance(tensor, Matrix):
                _check_finite(name, tensor)
            return tensor if packed else dense(tensor)

        def need(name: str) -> Tensor:
            tensor = get(name)
            if tensor is None:
                raise UnsupportedModelError(f'tensor {name} is missing')
            return dense(tensor)

        def check(name: str, tensor, shape: tuple[int, ...]):
            if tuple(tensor.shape) != shape:
                raise UnsupportedModelError(
                    f'{name} is {tuple(tensor.shape)}, config.json says {shape}')
            return tensor

        size = (config.vocab_size, config.hidden_size)
        names = ('model.embed_tokens.weight',
                 'model.embed_tokens.weight' if config.tied_embeddings else 'lm_head.weight')
        # Packed, a head gives no single rows; they are read from the file where they are wanted.
        table = packed_head = None
        if (packed and weights != 'dense' and prefers_half(dtype, device)
                and isinstance(state, (Checkpoint, GptqCheckpoint)) and names[1] in state):
            table = state.table(names[1], dtype)
            check(names[1], table, size)
            packed_head = half_of(size, table.rows)
        if packed_head is None:
            table = None
        embedding = (table if table is not None and config.tied_embeddings
                     else check(names[0], need(names[0]), size))
        shapes = layer_shapes(config)

        def make(i: int) -> LayerWeights:
            layer = LayerWeights.from_hf(get, f'model.layers.{i}.')
            for field, tensor in layer.tensors().items():
                check(f'{field} of layer {i}', tensor, shapes[field])
            return layer

        def finish(layer: LayerWeights) -> LayerWeights:
            return layer.packed(weights) if packed else layer

        # One after another: two copies of one layer at a time, not of the model.
        layers = (place(make, finish) if place is not None
                  else [finish(make(i)) for i in range(config.layers)])
        norm = check('model.norm.weight', need('model.norm.weight'), (config.hidden_size,))
        head = packed_head
        if head is None:
            head = (embedding if config.tied_embeddings
                    else check(names[1], need(names[1]), size))
        # Layers that are read for every pass stay as they come, and so does the stream.
        if place is None and all(
                isinstance(matrix, Matrix) and matrix.kind == HalfMatrix.kind
                for layer in layers for matrix in layer.matrices()):
            norm = norm.float()
            layers = [layer.streaming(norm.dtype) for layer in layers]
        return cls(config, embedding, layers, norm, head, context, table)

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [B, T] -> hidden states [B, T, H]."""
        if isinstance(self.embedding, Tensor):
            return F.embedding(tokens, self.embedding)
        return self.embedding.rows(tokens.flatten().tolist()).view(*tokens.shape, -1)

    def head_rows(self, ids: Sequence[int]) -> Tensor:
        """Rows of the head [len(ids), H]."""
        return self.head[ids] if self._table is None else self._table.rows(ids)

    def run_layers(self, x: Tensor, first: int, last: int, cache: KVBuffers, start: int,
                   rope: tuple[Tensor, Tensor] | None = None,
                   mask: Tensor | None = None) -> Tensor:
        """
        Run layers ``first`` to ``last`` (exclusive) over new positions.

        x [B, T, H] stands at positions start … start + T - 1; the cache, of all
        layers, holds ``start`` positions already and receives the new ones. By default
        positions are consecutive and attention causal; a batch with padding gives its
        own ``rope`` and ``mask``.
        """
        return run_layers(self.config, self.layers[first:last], x, cache, start,
                          rope or self.rope.at(start, x.shape[1]), mask, first)

    def logits(self, x: Tensor) -> Tensor:
        """Hidden states after the last layer [..., H] -> logits [..., V] in float32."""
        normed = F.rms_norm(x, x.shape[-1:], self.norm, self.config.norm_eps)
        return linear(normed, self.head).float()


def _check_finite(name: str, tensor: Tensor) -> None:
    # A sum is a NaN where one of its terms is; float32 holds the sum of what is sound.
    if not bool(torch.isfinite(tensor.sum(dtype=torch.float32))):
        raise UnsupportedModelError(
            f'tensor {name} holds values that are no numbers (NaN or infinite): the checkpoint '
            f'is damaged, or was made for a wider type than {tensor.dtype}')


def run_layers(config: LlamaConfig, layers: Iterable[LayerWeights], x: Tensor, cache: KVBuffers,
               start: int, rope: tuple[Tensor, Tensor], mask: Tensor | None = None,
               first: int = 0) -> Tensor:
    """Run ``layers``, which are the cache's from ``first`` on, over x; see Llama.run_layers."""
    if mask is None:
        mask = causal_mask(x.shape[1], start + x.shape[1], x.device)
    for layer, w in enumerate(layers, first):
        query, key, value = project_qkv(config, w, x, rope, cache.dtype)
        keys, values = cache.extend(layer, start, key, value)
        x = finish_layer(config, w, x, attend(query, keys, values, mask))
    return x
