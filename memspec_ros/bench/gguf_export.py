# SPDX-License-Identifier: Apache-2.0
"""
A target's weights as a GGUF file, unchanged in type, so that llama.cpp runs the same ones.

There is no tokenizer in it: prompts are given as ids, and answers taken as ids.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ..models.errors import UnsupportedModelError
from ..models.llama_config import LlamaConfig
from ..models.packing import dense
from ..models.target import open_weights, read_config

PRECISIONS = {torch.bfloat16: 'BF16', torch.float16: 'F16', torch.float32: 'F32'}


def write_gguf(directory: Path, file: Path, dtype: torch.dtype) -> None:
    """
    Write the Llama or Qwen2 of a Hugging Face directory to ``file``, matrices as ``dtype``.

    Raises UnsupportedModelError, ImportError without the package ``gguf``.
    """
    import gguf
    raw = read_config(directory)
    config = LlamaConfig.from_hf(raw)
    if config.rope_scaling is not None:
        raise UnsupportedModelError(f'{directory}: a scaled rope is not exported to GGUF')
    precision = PRECISIONS[dtype]
    architecture = gguf.MODEL_ARCH[raw['model_type'].upper()]
    names = gguf.get_tensor_name_map(architecture, config.layers)
    writer = gguf.GGUFWriter(file, raw['model_type'])
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType['ALL_F32' if precision == 'F32'
                                            else f'MOSTLY_{precision}'])
    writer.add_tokenizer_model('none')
    with open_weights(directory) as weights:
        for name in weights:
            if name == 'lm_head.weight' and config.tied_embeddings:
                continue
            tensor = dense(weights[name]).float()
            if raw['model_type'] == 'llama' and name.endswith(('q_proj.weight', 'k_proj.weight')):
                heads = config.heads if 'q_proj' in name else config.kv_heads
                tensor = interleave_halves(tensor, heads)
            # llama.cpp wants norms and biases in float32.
            kind = gguf.GGMLQuantizationType[precision if tensor.dim() > 1 else 'F32']
            writer.add_tensor(names.get_name(name, try_suffixes=('.weight', '.bias')),
                              gguf.quantize(tensor.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleave_halves(weight: Tensor, heads: int) -> Tensor:
    """
    Rows [heads * D, H] in the order of llama.cpp's rotary embedding for ``llama``.

    It rotates neighbours, Hugging Face row i of a head with row i + D / 2.
    """
    rows, width = weight.shape
    return (weight.view(heads, 2, rows // heads // 2, width).transpose(1, 2)
            .reshape(rows, width).contiguous())
