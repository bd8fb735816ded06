# SPDX-License-Identifier: Apache-2.0
"""
What holding the target's weights in fewer bits, or for another kernel, changes.

Every kind reads the same texts, prompts as the chat template makes them, and is
compared with the unquantised target in float32: perplexity, and at how many
positions its most probable token is the same. One model is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
import math
from pathlib import Path

import torch
from torch import Tensor
import torch.nn.functional as F

from ..models.errors import InvalidRequestError, UnsupportedModelError
from ..models.packing import WEIGHT_KINDS
from ..models.target import load_target, Target
from ..models.tokenizer import Tokenizer
from ..runtime.runtime import choose_device, choose_dtype, RuntimeOptions
from .contest import open_bundles
from .race import choose_prompts, conditions

# A library's kernels are not ours to judge.
KINDS = tuple(kind for kind in WEIGHT_KINDS if kind != 'library')


@dataclass
class _Reading:
    """What a target made of the texts."""

    choices: list[Tensor]
    perplexity: float


def measure(bundle: str, options: RuntimeOptions, prompts: Path, per_domain: int,
            prompt_tokens: int, kinds: Sequence[str] = KINDS,
            report: Callable[[str], None] = print) -> dict:
    """
    Distances of ``kinds`` from the unquantised target; a kind without a kernel says so.

    ``prompt_tokens``: where texts are cut off. Raises MemSpecError.
    """
    wrong = [kind for kind in kinds if kind not in KINDS]
    if wrong:
        raise InvalidRequestError(f'--kinds names {wrong[0]!r}, expected some of '
                                  f'{", ".join(KINDS)}')
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, device)
    if options.threads:
        torch.set_num_threads(options.threads)
    opened = open_bundles([bundle])[0]
    tokenizer = Tokenizer(opened.tokenizer_path)
    texts = [tokenizer.encode_chat([{'role': 'user', 'content': prompt}])[:prompt_tokens]
             for _, prompt in choose_prompts(prompts, per_domain)]
    texts = [ids for ids in texts if len(ids) > 1]

    def read(kind: str, as_type: torch.dtype) -> tuple[Target, _Reading]:
        report(f'{kind} in {str(as_type).removeprefix("torch.")} reads {len(texts)} texts')
        target = load_target(opened.target_path, as_type, device, prompt_tokens,
                             options.generic_target, weights=kind)
        return target, _read(target, texts, prompt_tokens)

    target, reference = read('dense', torch.float32)
    result = {'reference': {'perplexity': reference.perplexity,
                            'bytes': target.weight_bytes},
              'tokens': sum(len(ids) - 1 for ids in texts), 'weights': {}}
    for kind in kinds:
        del target
        try:
            target, reading = read(kind, dtype)
        except UnsupportedModelError as error:
            target = None
            result['weights'][kind] = {'unavailable': str(error)}
            continue
        same = sum(int((ours == theirs).sum())
                   for ours, theirs in zip(reading.choices, reference.choices))
        result['weights'][kind] = {
            'held_as': list(target.weight_kinds), 'bytes': target.weight_bytes,
            'perplexity': reading.perplexity, 'greedy_agreement': same / result['tokens']}
        result.update(conditions(target, prompts))
    return result


@torch.inference_mode()
def _read(target: Target, texts: Sequence[list[int]], longest: int) -> _Reading:
    state, choices, loss, count = target.new_state(longest), [], 0.0, 0
    for ids in texts:
        state.hold(0)
        logits = target.forward(state, ids)[:-1]
        wanted = torch.tensor(ids[1:], device=logits.device)
        loss += float(F.cross_entropy(logits, wanted, reduction='sum'))
        count += len(wanted)
        choices.append(logits.argmax(-1).cpu())
    return _Reading(choices, math.exp(loss / count))


def format_table(result: dict) -> str:
    """The result as text."""
    reference = result['reference']
    lines = [f'{"weights":10}{"held as":>18}{"MB":>8}{"perplexity":>12}{"same token":>12}'
             f'   (over {result["tokens"]} tokens)',
             f'{"reference":10}{"float32":>18}{reference["bytes"] / 1e6:8.1f}'
             f'{reference["perplexity"]:12.4f}{"":>12}']
    for kind, entry in result['weights'].items():
        if 'unavailable' in entry:
            lines.append(f'{kind:10}   {entry["unavailable"]}')
            continue
        lines.append(f'{kind:10}{", ".join(entry["held_as"]):>18}{entry["bytes"] / 1e6:8.1f}'
                     f'{entry["perplexity"]:12.4f}{entry["greedy_agreement"]:12.2%}')
    return '\n'.join(lines)
