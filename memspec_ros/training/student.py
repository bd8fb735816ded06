# SPDX-License-Identifier: Apache-2.0
"""
An independent small Llama, trained from the same lessons: a ``causal_lm`` draft.

It shares the tokenizer with the target and nothing else, and most of its memory
is an embedding of the whole vocabulary: what drafts that live on the target are
to be measured against. The embedding, tied to the head, starts from the
target's, projected to the student's width: tokens that are alike to the target
are alike from the start (measured: 0.26 against 0.22 agreement with a random
one of the same size, after three epochs over 31 thousand tokens).

Lessons name tokens of a trimmed vocabulary only, but the student decodes over
all of it. So each training step also scores some tokens drawn from the rest,
each in the name of as many as it was drawn from: an estimate of the softmax
over the whole vocabulary (Jean et al. 2015), that pushes all of them down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
import json
import math
from pathlib import Path
import shutil
from typing import Any, ClassVar

import torch
from torch import Tensor
import torch.nn.functional as F

from ..models.errors import MemSpecError
from ..models.layers import (
    causal_mask,
    layer_elements,
    layer_shapes,
    LayerWeights,
    Rope,
    run_layer_uncached,
)
from ..models.llama import Llama
from ..models.llama_config import LlamaConfig
from .lessons import Batch, SCORED
from .teacher import write_whole

# Tokens outside of the trimmed vocabulary that a training step scores.
NEGATIVES = 4096
# Length of the embedding's rows at first. Smaller ones are forgotten within the first steps.
_EMBEDDING_LENGTH = 1.0
_TOKENIZER_FILES = ('tokenizer.json', 'tokenizer_config.json', 'special_tokens_map.json',
                    'added_tokens.json', 'chat_template.jinja')
_HEAD_DIMS = (64, 32, 16, 8)
_WEIGHTS = 'model.safetensors'


@dataclass(frozen=True)
class StudentShape:
    """What an independent draft is made of. width: hidden size. layers: decoder layers."""

    kind: str = 'causal_lm'
    width: int = 192
    layers: int = 2

    # Of the target's hidden states it reads none.
    depth: ClassVar[int | None] = None
    features: ClassVar[tuple[int, ...]] = ()
    depths: ClassVar[frozenset[int]] = frozenset()

    @property
    def options(self) -> dict:
        """Options of the draft in a manifest: none, the draft's own ``config.json`` says all."""
        return {}

    def products(self, config: LlamaConfig, vocabulary: int) -> float:
        """Multiply-adds of training on a position, about; ``vocabulary``: the trimmed one."""
        own = self.config(config)
        return 3 * (own.layers * layer_elements(own)
                    + SCORED * (vocabulary + NEGATIVES) * own.hidden_size)

    def parameters(self, config: LlamaConfig) -> int:
        """Parameters that are trained, for a target of ``config``."""
        own = self.config(config)
        return (own.vocab_size * own.hidden_size + own.layers * layer_elements(own)
                + own.hidden_size)

    def problem(self, layers: int) -> str:
        """What is wrong with it; '' for nothing. ``layers``: those of the target."""
        if self.width < 16 or self.width % 16:
            return f'width is {self.width}, expected a multiple of 16'
        if not 1 <= self.layers <= layers:
            return f'layers is {self.layers}, expected 1..{layers}'
        return ''

    def config(self, target: LlamaConfig) -> LlamaConfig:
        """Sizes and constants of the student of a target of that configuration."""
        # At least two heads: one can look at one place only.
        head_dim = next(size for size in _HEAD_DIMS
                        if self.width % size == 0 and self.width >= 2 * size)
        heads = self.width // head_dim
        return LlamaConfig(
            vocab_size=target.vocab_size, hidden_size=self.width,
            intermediate_size=32 * math.ceil(self.width / 12),  # 8/3 of the width, as usual
            layers=self.layers, heads=heads, kv_heads=heads, head_dim=head_dim,
            norm_eps=target.norm_eps, rope_theta=target.rope_theta, rope_scaling=None,
            max_positions=target.max_positions, tied_embeddings=True)


class Student(torch.nn.Module):
    """
    The student in training; its interface is that of ``tops.Top``.

    ``vocabulary``: token ids of the trimmed vocabulary. Nothing of the target is
    kept. Float32; files are bfloat16.
    """

    def __init__(self, target: Llama, shape: StudentShape, vocabulary: Sequence[int],
                 seed: int = 0):
        super().__init__()
        self.shape = shape
        self.config = config = shape.config(target.config)
        chosen = torch.zeros(config.vocab_size, dtype=torch.bool)
        chosen[torch.tensor(vocabulary)] = True
        self.register_buffer('vocabulary', torch.tensor(vocabulary), persistent=False)
        self.register_buffer('others', torch.nonzero(~chosen)[:, 0], persistent=False)
        positions = len(target.rope.cos)
        self.rope = Rope(config, positions, target.device)
        generator = torch.Generator().manual_seed(seed)
        self.embedding = torch.nn.Parameter(
            project_embedding(target.embedding, shape.width, generator))
        self.norm = torch.nn.Parameter(torch.ones(shape.width))
        self.parts = torch.nn.ModuleList(
            _new_layer(config, generator) for _ in range(config.layers))

    def steps(self, batch: Batch, count: int) -> list[Tensor]:
        """Normed last states [B, T, H], in a list of one: all steps drafted are alike."""
        length = batch.tokens.shape[1]
        rope = self.rope.at(0, length)
        mask = causal_mask(length, length, batch.tokens.device)
        x = F.embedding(batch.tokens, self.embedding)
        for layer in self.weights():
            x = run_layer_uncached(self.config, layer, x, rope, mask)
        return [F.rms_norm(x, x.shape[-1:], self.norm, self.config.norm_eps)]

    def logits(self, states: Tensor, batch: Batch, chosen: Tensor) -> Tensor:
        """Logits of normed states [B, T, H], as Batch.logits has them."""
        return batch.logits(states, chosen, self.embedding[self.vocabulary],
                            self.embedding[batch.further])

    def training_logits(self, states: Tensor, batch: Batch, chosen: Tensor,
                        generator: torch.Generator) -> Tensor:
        """
        Those of ``logits``, and behind them those of NEGATIVES or fewer tokens drawn.

        ``generator`` draws them, on the CPU: the same ones on every device. Where
        there are no more others than that, all of them are taken.
        """
        others, correction = self.others, 0.0
        if len(others) > NEGATIVES:
            drawn = torch.randperm(len(others), generator=generator)[:NEGATIVES]
            others = others[drawn.to(others.device)]
            correction = math.log(len(self.others) / NEGATIVES)
        known = self.logits(states, batch, chosen).float()
        rows = states.flatten(0, 1)[batch.place[chosen]]
        drawn = F.linear(rows, self.embedding[others]).float() + correction
        # One that the text holds counts once, as itself.
        twice, place = torch.where(others[:, None] == batch.further)
        drawn[:, twice] = drawn[:, twice].masked_fill(batch.held(chosen)[:, place], -torch.inf)
        return torch.cat([known, drawn], dim=1)

    def weights(self) -> list[LayerWeights]:
        """The layers."""
        return [LayerWeights.of(part) for part in self.parts]

    def tensors(self) -> dict[str, torch.nn.Parameter]:
        """Parameters by name; those of a file (``export``) are split further."""
        return {'embedding': self.embedding, 'norm': self.norm,
                **{f'layers.{index}.{name}': tensor for index, part in enumerate(self.parts)
                   for name, tensor in part.items()}}

    def export(self) -> dict[str, Tensor]:
        """Tensors as ``transformers`` names them, bfloat16; the head is the embedding."""
        state = {'model.embed_tokens.weight': self.embedding, 'model.norm.weight': self.norm}
        for index, layer in enumerate(self.weights()):
            prefix = f'model.layers.{index}.'
            width = self.config.heads * self.config.head_dim
            state[prefix + 'input_layernorm.weight'] = layer.input_norm
            for name, rows in zip('qkv', layer.qkv.split(width)):
                state[f'{prefix}self_attn.{name}_proj.weight'] = rows
            state[prefix + 'self_attn.o_proj.weight'] = layer.out
            state[prefix + 'post_attention_layernorm.weight'] = layer.post_norm
            gate, up = layer.gate_up.chunk(2)
            state[prefix + 'mlp.gate_proj.weight'] = gate
            state[prefix + 'mlp.up_proj.weight'] = up
            state[prefix + 'mlp.down_proj.weight'] = layer.down
        return {name: tensor.detach().to('cpu', torch.bfloat16).contiguous()
                for name, tensor in state.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from an exported draft (a general one into a domain)."""
        self.embedding.copy_(state['model.embed_tokens.weight'])
        self.norm.copy_(state['model.norm.weight'])
        for index, part in enumerate(self.parts):
            layer = LayerWeights.from_hf(state.get, f'model.layers.{index}.')
            for name, tensor in layer.tensors().items():
                part[name].copy_(tensor)


def project_embedding(embedding: Tensor, width: int, generator: torch.Generator) -> Tensor:
    """
    Rows [V, width] that keep of an ``embedding`` [V, H] what varies most between tokens.

    Principal components, each given the same weight (the first, how frequent a
    token is, would drown the rest), and rows of equal length. Where ``width``
    exceeds H, the columns left over are random.
    """
    table = embedding.detach().float().cpu()
    # What all tokens have in common tells none from another: a softmax does not see it.
    table = table - table.mean(0)
    weights, axes = torch.linalg.eigh(table.T @ table / len(table))
    weights, axes = weights.flip(0)[:width], axes.flip(1)[:, :width]
    # A direction in which next to nothing varies is noise, and not made loud.
    made = table @ axes / weights.clamp(min=1e-6 * float(weights[0]) + 1e-12).sqrt()
    if made.shape[1] < width:
        rest = torch.randn(len(made), width - made.shape[1], generator=generator)
        made = torch.cat([made, rest], dim=1)
    return _EMBEDDING_LENGTH * F.normalize(made, dim=1)


def _new_layer(config: LlamaConfig, generator: torch.Generator) -> torch.nn.ParameterDict:
    """A layer that at first adds little to what passes through."""
    # What all layers together add to the embedding should be no larger than that.
    gentle = _EMBEDDING_LENGTH / math.sqrt(config.hidden_size) / math.sqrt(2 * config.layers)
    tensors = {}
    for name, shape in layer_shapes(config).items():
        if name == 'qkv_bias':
            continue
        if len(shape) == 1:
            tensors[name] = torch.ones(shape)
        else:
            scale = (gentle if name in ('out', 'down') else 1.0) / math.sqrt(shape[1])
            tensors[name] = torch.randn(shape, generator=generator) * scale
    return torch.nn.ParameterDict(
        {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()})


def hf_config(config: LlamaConfig) -> dict[str, Any]:
    """``config.json`` of a student."""
    return {
        'architectures': ['LlamaForCausalLM'], 'model_type': 'llama', 'hidden_act': 'silu',
        'vocab_size': config.vocab_size, 'hidden_size': config.hidden_size,
        'intermediate_size': config.intermediate_size, 'num_hidden_layers': config.layers,
        'num_attention_heads': config.heads, 'num_key_value_heads': config.kv_heads,
        'head_dim': config.head_dim, 'rms_norm_eps': config.norm_eps,
        'max_position_embeddings': config.max_positions, 'rope_theta': config.rope_theta,
        'attention_bias': False, 'mlp_bias': False, 'tie_word_embeddings': True,
        'bos_token_id': None, 'eos_token_id': None, 'torch_dtype': 'bfloat16'}


def save_student(directory: Path, student: Student, tokenizer: Path,
                 metadata: Mapping[str, str]) -> None:
    """
    Write a student as a Hugging Face directory, which appears when it is whole.

    ``tokenizer``: directory of the target's tokenizer, whose files are copied.
    Raises MemSpecError where there is none, or the disk is full.
    """
    if not (tokenizer / 'tokenizer.json').is_file():
        raise MemSpecError(f'{tokenizer}: no tokenizer.json there, which a '
                           'causal_lm draft brings along')
    partial = directory.with_name(directory.name + '.partial')
    shutil.rmtree(partial, ignore_errors=True)
    try:
        # transformers refuses files that do not say which framework they are from.
        write_whole(partial / _WEIGHTS, student.export(), {**metadata, 'format': 'pt'})
        (partial / 'config.json').write_text(
            json.dumps(hf_config(student.config), indent=2) + '\n', encoding='utf-8')
        for name in _TOKENIZER_FILES:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, partial / name)
        if directory.exists():
            shutil.rmtree(directory)
        partial.replace(directory)
    except OSError as error:
        raise MemSpecError(f'{directory}: cannot be written ({error}); make room and run the '
                           'same command again, it goes on from here') from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
