# SPDX-License-Identifier: Apache-2.0
"""
Prompts that the target writes itself, in the user's place.

A model tuned on conversations, given its template up to where the user speaks,
goes on with what users said in them (Magpie, Xu et al., 2024). That is what a
general draft needs most and files of prompts lack: requests of every sort.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
import json
from pathlib import Path

import torch

from ..models.errors import MemSpecError
from ..models.llama import Llama
from ..models.tokenizer import Tokenizer
from .outputs import generate_batch

_BATCH = 64
_MOST_TOKENS = 128
_LEAST_TOKENS = 4
# Hot enough for variety, not so hot that the requests lose their sense.
_TEMPERATURE = 0.85


def user_opening(tokenizer: Tokenizer) -> list[int]:
    """Token ids of the chat template up to where the user's words begin."""
    first, second = (tokenizer.encode_chat([{'role': 'user', 'content': text}])
                     for text in ('a', '7'))
    opening = []
    for left, right in zip(first, second):
        if left != right:
            break
        opening.append(left)
    return opening


def write_prompts(target: Llama, tokenizer: Tokenizer, stop_ids: frozenset[int], count: int,
                  seed: int, first: int = 0,
                  report: Callable[[int], None] | None = None) -> Iterator[list[str]]:
    """
    Yield prompts in batches until there are ``count``, all different within a batch.

    Batch n of a seed is always the same; ``first``: batch to begin with.
    ``report`` gets the number of prompts so far. MemSpecError where the target
    does not end what it says: it is no model for conversations.
    """
    opening = user_opening(tokenizer)
    if not opening:
        raise MemSpecError("the target's tokenizer has no chat template: it writes no prompts of "
                           'its own; give some with --prompts')
    made, vain = 0, 0
    for batch in range(first, first + count):  # each has one prompt at least, or is in vain
        generator = torch.Generator().manual_seed((seed << 20) + batch)
        outputs = generate_batch(target, [opening] * _BATCH, _MOST_TOKENS, stop_ids, _TEMPERATURE,
                                 generator)
        ended = (output[:-1] for output in outputs
                 if output[-1] in stop_ids and len(output) > _LEAST_TOKENS)
        prompts = [text for text in dict.fromkeys(tokenizer.decode(ids).strip() for ids in ended)
                   if text]
        vain = 0 if prompts else vain + 1
        if vain == 3:
            break
        made += len(prompts)
        yield prompts[:len(prompts) - max(0, made - count)]
        if report:
            report(min(made, count))
        if made >= count:
            return
    raise MemSpecError('the target writes no prompts of its own: what it says in the place of a '
                       'user does not end; give some with --prompts')


def fill_prompt_file(path: Path, count: int, target: Llama, tokenizer: Tokenizer,
                     stop_ids: frozenset[int], seed: int,
                     progress: Callable[..., AbstractContextManager[Callable]]) -> None:
    """
    See to it that ``path`` (JSON lines, domain ``general``) has ``count`` prompts or more.

    ``progress``: (title, in all, done) -> a context that gives a function of
    (done, in all). Interrupted, it goes on with the batch after the last written.
    """
    lines = path.read_text(encoding='utf-8').splitlines(True) if path.exists() else []
    known = [json.loads(line) for line in lines if line.endswith('\n')]
    if len(known) >= count:
        return
    with path.open('w', encoding='utf-8') as file:  # without a line that was cut short
        file.writelines(json.dumps(record) + '\n' for record in known)
    batch = known[-1]['batch'] + 1 if known else 0
    with progress(f'writing prompts into {path}', count, len(known)) as advance:
        for prompts in write_prompts(target, tokenizer, stop_ids, count - len(known), seed, batch,
                                     lambda made: advance(len(known) + made, count)):
            with path.open('a', encoding='utf-8') as file:
                file.writelines(json.dumps({'domain': 'general', 'prompt': prompt,
                                            'batch': batch}) + '\n' for prompt in prompts)
            batch += 1
