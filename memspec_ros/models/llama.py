# SPDX-License-Identifier: Apache-2.0
"""
A lean forward pass for the Llama family (Llama 2/3, SmolLM2, Qwen2).

Decoding a small model one token at a time through a general-purpose model
class spends most of its time in overhead. This module holds the weights as
plain tensors (``layers.py``) and runs any range of layers on preallocated
key/value buffers (``layer_stack.py``), so that a draft can reuse the target's
lower layers.

Shapes: B sequences, T new positions, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
import torch.nn.functional as F

from .errors import UnsupportedModelError
from .gptq import GptqCheckpoint
from .half import half_of
from .kv_cache import KVBuffers
from .layer_stack import LayerStack, of_one_stream, run_layers
from .layers import layer_shapes, LayerWeights, Rope
from .llama_config import LlamaConfig
from .packing import dense, linear, prefers_half
from .quantized import Matrix
from .weights import Checkpoint, StoredTable


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
        self.layers = LayerStack(layers) if isinstance(layers, list) else layers
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
        if place is None:
            layers, norm = of_one_stream(layers, norm)
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
        layers, holds ``start`` positions already and receives the new ones. What comes
        out is of ``stream_dtype``. By default positions are consecutive and attention
        causal; a batch with padding gives its own ``rope`` and ``mask``.
        """
        return run_layers(self.config, self.layers[first:last], x.to(self.stream_dtype), cache,
                          start, rope or self.rope.at(start, x.shape[1]), mask, first)

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
