# SPDX-License-Identifier: Apache-2.0
"""Tiny GPTQ checkpoints, written bit by bit and independently of the code under test."""

from __future__ import annotations

import json
from pathlib import Path

from conftest import build_llama
import numpy as np
import torch


def build_tied_qwen2():
    """A Qwen2 with biases and tied embeddings, in sizes that INT4 kernels take."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    torch.manual_seed(4)
    model = Qwen2ForCausalLM(Qwen2Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=160, max_position_embeddings=256,
        initializer_range=0.2, tie_word_embeddings=True, eos_token_id=None,
        bos_token_id=None)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith('bias'):
                p.normal_(std=0.3)
    return model


def build_small_llama():
    return build_llama(5, num_hidden_layers=2)


MODELS = {'llama': build_small_llama, 'qwen2': build_tied_qwen2}


def words(values: np.ndarray, bits: int) -> np.ndarray:
    """Pack along the first axis, lowest bits first, with Python's own integers."""
    per = 32 // bits
    result = np.zeros((len(values) // per, values.shape[1]), np.int64)
    for i, row in enumerate(values):
        result[i // per] |= row.astype(np.int64) << bits * (i % per)
    return result.astype(np.uint32).view(np.int32)


def round_matrix(weight: torch.Tensor, bits: int, group: int, symmetric: bool,
                 index: torch.Tensor):
    """Levels [in, out], scales and zeros [groups, out], and the weights that they stand for."""
    out, width = weight.shape
    top = 2 ** bits - 1
    count = int(index.max()) + 1
    scales = torch.empty(count, out, dtype=torch.float16)
    zeros = torch.empty(count, out, dtype=torch.int64)
    for g in range(count):
        part = weight[:, index == g]
        if symmetric:
            scales[g] = (2 * part.abs().amax(1) / top).half()
            zeros[g] = 2 ** (bits - 1)
        else:
            low, high = part.amin(1).clamp_max(0), part.amax(1).clamp_min(0)
            scales[g] = ((high - low) / top).half()
            zeros[g] = (-low / scales[g].float()).round().clamp(0, top).long()
    spread, middle = scales.float()[index].t(), zeros[index].t()
    levels = (weight / spread + middle).round().clamp(0, top).long()
    return levels.t(), scales, zeros, (levels - middle) * spread


def write_gptq(model, directory: Path, bits: int = 4, group: int = 32, symmetric: bool = False,
               act_order: bool = False, v2: bool = False, shuffle_each: bool = False,
               zero_biases: bool = False, **config) -> dict[str, torch.Tensor]:
    """
    Save ``model`` as a GPTQ checkpoint; returns the state dict that it stands for.

    ``shuffle_each``: matrices that read the same inputs differ in their order.
    """
    from safetensors.torch import save_file
    model.save_pretrained(directory)
    tensors, meant = {}, {}
    for number, (name, tensor) in enumerate(model.state_dict().items()):
        if name == 'lm_head.weight' and model.config.tie_word_embeddings:
            continue
        if 'proj.weight' not in name:
            tensors[name] = meant[name] = tensor.clone()
            continue
        width = tensor.shape[1]
        size = width if group == -1 else group
        index = torch.arange(width) // size
        if act_order:
            seed = number if shuffle_each else width
            index = index[torch.randperm(width, generator=torch.Generator().manual_seed(seed))]
        levels, scales, zeros, meant[name] = round_matrix(tensor, bits, size, symmetric, index)
        stored = zeros.numpy()
        if not v2:
            # The words as numbers, less a one in every field: a zero of 0 borrows.
            one = sum(1 << shift for shift in range(0, 32, bits))
            packed = words(stored.T, bits).view(np.uint32) - np.uint32(one)
            packed = packed.view(np.int32)
        else:
            packed = words(stored.T, bits)
        base = name.removesuffix('.weight')
        tensors |= {f'{base}.qweight': torch.from_numpy(words(levels.numpy(), bits)),
                    f'{base}.qzeros': torch.from_numpy(np.ascontiguousarray(packed.T)),
                    f'{base}.scales': scales, f'{base}.g_idx': index.int()}
        if zero_biases and f'{base}.bias' not in model.state_dict():
            tensors[f'{base}.bias'] = torch.zeros(len(tensor), dtype=torch.float16)
    save_file(tensors, directory / 'model.safetensors', {'format': 'pt'})
    raw = json.loads((directory / 'config.json').read_text())
    raw['quantization_config'] = {
        'quant_method': 'gptq', 'bits': bits, 'group_size': group, 'desc_act': act_order,
        'sym': symmetric, 'checkpoint_format': 'gptq_v2' if v2 else 'gptq', **config}
    (directory / 'config.json').write_text(json.dumps(raw))
    return meant
