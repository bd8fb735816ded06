# SPDX-License-Identifier: Apache-2.0
"""Sizes and constants of a Llama-family model, and which of them the lean path can run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .errors import UnsupportedModelError

SUPPORTED_MODEL_TYPES = ('llama', 'qwen2')


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
