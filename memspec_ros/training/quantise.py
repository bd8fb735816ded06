# SPDX-License-Identifier: Apache-2.0
"""
A target to a GPTQ checkpoint, one layer in memory at a time.

Two streams of hidden states run through the layers side by side: the quantised
model's, which calibrate (each layer learns to live with what the ones below do
wrong), and on held-out text also the unquantised model's, so that the distance
between them is known at the end without loading either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
import json
import math
from pathlib import Path

import torch
from torch import Tensor
import torch.nn.functional as F

from ..models.errors import InvalidRequestError, UnsupportedModelError
from ..models.layers import causal_mask, LayerWeights, Rope, run_layer_uncached
from ..models.llama_config import LlamaConfig
from ..models.weights import Checkpoint
from .gptq import ObservedMatrix, quantise, Quantised, Scheme

_SHARD_BYTES = 1 << 30
_PARTS = {'qkv': ('self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj'),
          'out': ('self_attn.o_proj',), 'gate_up': ('mlp.gate_proj', 'mlp.up_proj'),
          'down': ('mlp.down_proj',)}


@dataclass(frozen=True)
class Distance:
    """The quantised model beside the unquantised one, on held-out tokens."""

    tokens: int
    perplexity: float
    perplexity_quantised: float
    greedy_agreement: float


class ShardWriter:
    """Writes tensors to safetensors files of about 1 GiB, and an index where there are several."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._pending: dict[str, Tensor] = {}
        self._shards: list[tuple[Path, list[str]]] = []
        self._total = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Take tensors over; written once there are enough of them."""
        self._pending.update(tensors)
        if sum(tensor.nbytes for tensor in self._pending.values()) >= _SHARD_BYTES:
            self._flush()

    def finish(self) -> None:
        """Write the rest, and give the files their names."""
        self._flush()
        count = len(self._shards)
        if count == 1:
            self._shards[0][0].replace(self._directory / 'model.safetensors')
            return
        places = {}
        for number, (path, names) in enumerate(self._shards, 1):
            final = f'model-{number:05d}-of-{count:05d}.safetensors'
            path.replace(self._directory / final)
            places.update(dict.fromkeys(names, final))
        (self._directory / 'model.safetensors.index.json').write_text(json.dumps(
            {'metadata': {'total_size': self._total}, 'weight_map': places}, indent=2))

    def _flush(self) -> None:
        from safetensors.torch import save_file
        if not self._pending:
            return
        path = self._directory / f'shard-{len(self._shards)}.partial'
        save_file(self._pending, path, {'format': 'pt'})
        self._total += sum(tensor.nbytes for tensor in self._pending.values())
        self._shards.append((path, list(self._pending)))
        self._pending = {}


def fitting_group(config: LlamaConfig, group_size: int | None) -> int:
    """
    The size of a group that divides the inputs of every matrix.

    None: 128 if it does, else the next smaller. Raises InvalidRequestError for
    one that does not.
    """
    widths = sorted({config.hidden_size, config.intermediate_size,
                     config.heads * config.head_dim})

    def fits(size: int) -> bool:
        return size == -1 or size > 0 and all(width % size == 0 for width in widths)

    fitting = [size for size in (128, 64, 32, -1) if fits(size)]
    if group_size is None:
        return fitting[0]
    if not fits(group_size):
        raise InvalidRequestError(
            f'--group-size {group_size} does not divide the widths '
            f'{", ".join(map(str, widths))} of this model; use one of '
            f'{", ".join(map(str, fitting))}')
    return group_size


def quantise_model(config: LlamaConfig, weights: Checkpoint, scheme: Scheme,
                   calibration: Sequence[Sequence[int]], held_out: Sequence[Sequence[int]],
                   directory: Path, device: torch.device,
                   progress: Callable[[int, int], None]) -> Distance:
    """
    Quantise the layers' matrices, write the tensors to ``directory``, measure the distance.

    ``calibration`` and ``held_out`` are token ids; ``progress(layers done, of)``.
    Raises UnsupportedModelError naming a tensor that is missing or broken.
    """
    writer, written = ShardWriter(directory), set()
    embedding = _tensor(weights, 'model.embed_tokens.weight', device)
    streams = [[F.embedding(torch.tensor([ids], device=device), embedding).float()
                for ids in texts] for texts in (calibration, held_out, held_out)]
    learning, judged, reference = streams
    longest = max(map(len, [*calibration, *held_out]))
    rope = Rope(config, longest, device)
    for index in range(config.layers):
        prefix = f'model.layers.{index}.'
        plain = LayerWeights.from_hf(
            lambda name: _tensor(weights, name, device) if name in weights else None, prefix)
        observed = {name: ObservedMatrix(getattr(plain, name)) for name in LayerWeights.MATRICES}
        _run(config, LayerWeights(**{**vars(plain), **observed}), learning, rope, False)
        rounded = {}
        for field, matrix in observed.items():
            try:
                result = quantise(matrix.weight, matrix.moments / matrix.rows, scheme)
            except torch.linalg.LinAlgError as error:
                raise UnsupportedModelError(
                    f'{prefix}{field}: the moments of its inputs cannot be inverted ({error}); '
                    'give more prompts, or a greater --damping') from error
            rounded[field] = result.dequantize()
            for name, tensors in _split(config, field, result):
                writer.add({f'{prefix}{name}.{part}': t for part, t in tensors.items()})
                written.add(f'{prefix}{name}.weight')
        small = LayerWeights(**{**vars(plain), **rounded})
        for stream, layer in ((learning, small), (judged, small), (reference, plain)):
            _run(config, layer, stream, rope, True)
        progress(index + 1, config.layers)
    norm = _tensor(weights, 'model.norm.weight', device)
    head = embedding if config.tied_embeddings else _tensor(weights, 'lm_head.weight', device)
    for name in weights:  # all that is not quantised, as it is
        if name not in written:
            writer.add({name: weights[name]})
    writer.finish()
    return _distance(config, norm, head, held_out, judged, reference)


def _tensor(weights: Checkpoint, name: str, device: torch.device) -> Tensor:
    if name not in weights:
        raise UnsupportedModelError(f'tensor {name} is missing')
    tensor = weights[name].to(device).float()
    if not bool(torch.isfinite(tensor).all()):
        raise UnsupportedModelError(
            f'tensor {name} holds values that are no numbers (NaN or infinite): the checkpoint '
            'is damaged; fetch it again')
    return tensor


def _run(config: LlamaConfig, layer: LayerWeights, stream: list[Tensor], rope: Rope,
         keep: bool) -> None:
    """Run a layer over each text of ``stream``, keeping what comes out where ``keep``."""
    with torch.inference_mode():
        for place, x in enumerate(stream):
            length = x.shape[1]
            result = run_layer_uncached(config, layer, x, rope.at(0, length),
                                        causal_mask(length, length, x.device))
            if keep:
                stream[place] = result


def _split(config: LlamaConfig, field: str,
           matrix: Quantised) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The checkpoint's tensors of a fused matrix, by the names of its parts."""
    heads, kv_heads = (count * config.head_dim for count in (config.heads, config.kv_heads))
    sizes = {'qkv': (heads, kv_heads, kv_heads), 'out': (config.hidden_size,),
             'gate_up': (config.intermediate_size,) * 2, 'down': (config.hidden_size,)}
    first = 0
    for name, size in zip(_PARTS[field], sizes[field]):
        yield name, matrix.tensors(first, size)
        first += size


@torch.inference_mode()
def _distance(config: LlamaConfig, norm: Tensor, head: Tensor, texts: Sequence[Sequence[int]],
              judged: Sequence[Tensor], reference: Sequence[Tensor]) -> Distance:
    losses, agreed, count = [0.0, 0.0], 0, 0
    for ids, *states in zip(texts, judged, reference):
        wanted = torch.tensor(ids[1:], device=norm.device)
        choices = []
        for place, x in enumerate(states):
            logits = F.linear(F.rms_norm(x[0, :-1], x.shape[-1:], norm, config.norm_eps), head)
            losses[place] += float(F.cross_entropy(logits, wanted, reduction='sum'))
            choices.append(logits.argmax(-1))
        agreed += int((choices[0] == choices[1]).sum())
        count += len(wanted)
    return Distance(count, math.exp(losses[1] / count), math.exp(losses[0] / count),
                    agreed / count)
