# SPDX-License-Identifier: Apache-2.0
"""
The target's own greedy outputs, the data drafts are distilled from.

A draft is judged by how often it says what the target says next, so it is
trained on text the target itself wrote. Outputs are kept in a JSON-lines store,
one record a prompt, appended as batches finish: an interrupted run loses at
most the batch it was in, and a second run over the same prompts does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
import hashlib
import json
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..models.errors import MemSpecError
from ..models.kv_cache import KVBuffers
from ..models.llama import Llama


@dataclass(frozen=True)
class OutputRecord:
    """One prompt and what the target answered; token ids, ``key`` names the content."""

    key: str
    domain: str
    prompt_ids: list[int]
    output_ids: list[int]


class PromptFileError(MemSpecError):
    """A line of a prompt file is not what it should be."""


def read_lines(path: Path) -> list[str]:
    """Lines of a text file; raises PromptFileError."""
    try:
        # Not splitlines: it also breaks at signs that may stand within a JSON string.
        return path.read_text(encoding='utf-8').split('\n')
    except (OSError, UnicodeDecodeError) as error:
        raise PromptFileError(f'{path}: {getattr(error, "strerror", None) or error}') from error


def read_fields(path: Path, name: str) -> Iterator[tuple[int, Any, Any]]:
    """
    Yield (line number, field ``name``, field ``domain``) from a JSON-lines file.

    Raises PromptFileError naming the line.
    """
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            value, domain = record[name], record['domain']
        except (ValueError, KeyError, TypeError) as error:
            raise PromptFileError(
                f'{path}, line {number}: expected a JSON object with "{name}" and '
                f'"domain" ({type(error).__name__}: {error})') from error
        yield number, value, domain


def read_prompts(path: Path) -> Iterator[tuple[str, str]]:
    """
    Yield (domain, prompt) from a JSON-lines file with fields ``prompt`` and ``domain``.

    Raises PromptFileError naming the line.
    """
    for number, prompt, domain in read_fields(path, 'prompt'):
        if not (isinstance(prompt, str) and isinstance(domain, str)):
            raise PromptFileError(
                f'{path}, line {number}: "prompt" and "domain" must be strings')
        yield domain, prompt


def content_key(prompt_ids: list[int]) -> str:
    """Name of a prompt by its tokens, so that a reworded prompt is a new record."""
    return hashlib.sha256(json.dumps(prompt_ids).encode()).hexdigest()[:16]


class Observer(Protocol):
    """Sees a batch being generated."""

    depths: Sequence[int]

    def see(self, rows: Sequence[int], skip: Sequence[int], hidden: Mapping[int, Tensor],
            logits: Tensor) -> None:
        """
        New positions of the prompts ``rows``, without the first ``skip`` of each, its padding.

        hidden: at ``depths`` and after the last layer, [B, T, H]; logits [B, V]
        of the last position.
        """


class Teacher(Protocol):
    """Keeps what an Observer saw."""

    def observer(self, target: Llama, count: int) -> Observer:
        """For a batch of ``count`` prompts."""

    def keep(self, records: Sequence[OutputRecord], observer: Observer) -> None:
        """Lessons of a batch, in the order of its prompts."""


class OutputStore:
    """Append-only JSON-lines file of OutputRecord."""

    def __init__(self, path: Path):
        self.path = path

    def __iter__(self) -> Iterator[OutputRecord]:
        if not self.path.exists():
            return
        with self.path.open(encoding='utf-8') as lines:
            for line in lines:
                if not line.endswith('\n'):
                    break  # the last write was cut short: that record is made again
                raw = json.loads(line)
                yield OutputRecord(raw.get('key') or content_key(raw['prompt_ids']),
                                   raw['domain'], raw['prompt_ids'], raw['output_ids'])

    def append(self, records: Iterable[OutputRecord]) -> None:
        """Write records at the end, dropping a line that an interruption cut short."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open('a+b') as file:
            file.seek(0)
            whole = file.read().rfind(b'\n') + 1
            file.truncate(whole)
            for record in records:
                file.write(json.dumps(vars(record), separators=(',', ':')).encode() + b'\n')


@torch.inference_mode()
def generate_batch(target: Llama, prompts: list[list[int]], max_new_tokens: int,
                   stop_ids: frozenset[int], temperature: float = 0.0,
                   generator: torch.Generator | None = None,
                   observer: Observer | None = None) -> list[list[int]]:
    """
    Outputs of several prompts at once, each ending with its stop token if it stopped.

    Greedy, or sampled at ``temperature`` with ``generator`` (a CPU one).
    ``observer`` is shown all that the target computes on the way.

    Prompts are padded on the left, so that all rows decode at the same buffer
    position; a row's rotary positions start at its first real token. Rows that
    have stopped are removed from the batch, which keeps long stragglers cheap.
    """
    config, device = target.config, target.device
    longest = max(map(len, prompts))
    capacity = longest + max_new_tokens
    pad = torch.tensor([longest - len(p) for p in prompts], device=device)
    tokens = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=device)
    shape = (config.layers, len(prompts), config.kv_heads, capacity, config.head_dim)
    cache = KVBuffers(*(torch.zeros(shape, dtype=target.attention_dtype, device=device)
                        for _ in range(2)))
    rows = list(range(len(prompts)))
    ended: set[int] = set()
    outputs: list[list[int]] = [[] for _ in prompts]
    edges = sorted({0, config.layers, *(observer.depths if observer else ())})
    start = 0
    while rows:
        end = start + tokens.shape[1]
        steps = torch.arange(start, end, device=device)
        rope = target.rope.gather((steps - pad[:, None]).clamp(min=0))
        mask = _padded_mask(steps, end, pad)
        hidden, seen = target.embed(tokens), {}
        for first, last in zip(edges, edges[1:]):
            hidden = seen[last] = target.run_layers(hidden, first, last, cache, start, rope,
                                                    mask)
        logits = target.logits(hidden[:, -1])
        if observer:
            observer.see(rows, [max(0, int(p) - start) for p in pad], seen, logits)
        if temperature:
            chances = torch.rand(logits.shape, generator=generator).clamp_(1e-9, 1 - 1e-7)
            logits = logits / temperature - (-chances.log()).log().to(device)  # Gumbel noise
        chosen = logits.argmax(-1)
        start = end
        for row, token in zip(rows, chosen.tolist()):
            outputs[row].append(token)
            if token in stop_ids or len(outputs[row]) >= max_new_tokens:
                ended.add(row)
        going = [i for i, row in enumerate(rows) if row not in ended]
        # Copying the cache costs; do it only when a quarter of the rows has ended.
        if not going or len(going) <= 0.75 * len(rows):
            kept = torch.tensor(going, dtype=torch.long, device=device)
            cache = KVBuffers(cache.keys[:, kept], cache.values[:, kept])
            pad, chosen = pad[kept], chosen[kept]
            rows = [rows[i] for i in going]
        tokens = chosen[:, None]
        if start == capacity:
            break
    return [_cut(output, stop_ids, max_new_tokens) for output in outputs]


def _padded_mask(steps: Tensor, end: int, pad: Tensor) -> Tensor:
    """Additive causal mask [B, 1, T, S] that hides left padding from real positions."""
    seen = torch.arange(end, device=steps.device)
    visible = (seen <= steps[:, None]) & (seen >= pad[:, None, None])
    # A padding row would see nothing and softmax to NaN: let it see itself.
    visible |= seen == steps[:, None]
    mask = torch.zeros(visible.shape, device=steps.device)
    return mask.masked_fill_(~visible, -torch.inf)[:, None]


def _cut(output: list[int], stop_ids: frozenset[int], limit: int) -> list[int]:
    """End an output at its first stop token (inclusive) and at the limit."""
    for i, token in enumerate(output[:limit]):
        if token in stop_ids:
            return output[:i + 1]
    return output[:limit]


def fill_store(store: OutputStore, target: Llama, prompts: Iterable[tuple[str, list[int]]],
               max_new_tokens: int, stop_ids: frozenset[int], batch_size: int,
               report: Callable[[int, int], None] | None = None, temperature: float = 0.0,
               sample: int = 0, seed: int = 0, teacher: Teacher | None = None) -> None:
    """
    Generate what the store lacks for ``prompts`` (domain, prompt ids).

    Greedy outputs are ``sample`` 0; further ones of a prompt have a number, in
    their key too, and are sampled at ``temperature``. ``teacher`` keeps lessons
    of the outputs as they are made: a second pass costs as much again.

    Prompts of like length are batched together, since padding is work thrown
    away. ``report`` is called with (prompts done, prompts in all).
    """
    have = {record.key for record in store}
    missing = {}
    for domain, ids in prompts:
        key = content_key(ids) + (f'-{sample}' if sample else '')
        if key not in have:
            missing[key] = (domain, ids)
    order = sorted(missing.items(), key=lambda item: len(item[1][1]))
    batches = [order[i:i + batch_size] for i in range(0, len(order), batch_size)]
    # Short and long batches in turn: an interrupted run then holds both.
    batches = batches[0::3] + batches[1::3] + batches[2::3]
    done = 0
    for batch in batches:
        generator = torch.Generator().manual_seed(
            int(hashlib.sha256(f'{seed} {batch[0][0]}'.encode()).hexdigest()[:15], 16))
        observer = teacher.observer(target, len(batch)) if teacher else None
        outputs = generate_batch(target, [ids for _, (_, ids) in batch], max_new_tokens, stop_ids,
                                 temperature, generator, observer)
        records = [OutputRecord(key, domain, ids, output)
                   for (key, (domain, ids)), output in zip(batch, outputs)]
        store.append(records)
        if teacher:
            teacher.keep(records, observer)
        done += len(batch)
        if report:
            report(done, len(order))
