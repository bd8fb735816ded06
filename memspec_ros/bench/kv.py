# SPDX-License-Identifier: Apache-2.0
"""
What rounding and eviction of old keys and values save, and what they cost.

Long texts are made of prompts and their references, one after the other. The
target reads each with all keys and values as they are, and with every option;
the last part of it says how probable the text is to each (perplexity), and how
often the same token is. Then plain steps behind the whole text are timed, the
ways of keeping it in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
import math
from pathlib import Path
import statistics
import time

import torch
from torch import Tensor

from ..decoding.engine import PREFILL_CHUNK
from ..memory.allocator import MIB
from ..models.errors import InvalidRequestError, MemSpecError
from ..models.kv_options import EXACT, KVOptions
from ..models.state import DecodeState
from ..models.target import Target
from ..runtime.runtime import Runtime, RuntimeOptions
from .json_lines import read_objects

# Of a text, what is judged: it has the most before it.
_JUDGED = 0.25
_STEPS = 8


def default_variants(context: int) -> tuple[KVOptions, ...]:
    """INT8, eviction, and both, by the length of the texts."""
    recent, window = max(16, context // 8), max(16, context // 4)
    return (KVOptions(int8_after=recent), KVOptions(window=window),
            KVOptions(int8_after=recent, window=window))


@dataclass
class _Figures:
    """Of one way of keeping keys and values."""

    bytes: int = 0
    surprise: float = 0.0
    judged: int = 0
    agreeing: int = 0
    divergence: float = 0.0
    steps_ms: list[float] = field(default_factory=list)


def measure(path: Path, options: RuntimeOptions, bundle: str, texts: int, rounds: int,
            variants: Sequence[KVOptions], report: Callable[[str], None] = print) -> dict:
    """
    Judge and time ``variants`` beside the exact cache, on ``texts`` texts that fill the context.

    Returns, by way: bytes of keys and values, perplexity, agreement of the most
    probable token and mean KL divergence from the exact cache, milliseconds of a
    step and how many times its speed. Raises MemSpecError.
    """
    runtime = Runtime.open(bundle or None, options)
    try:
        target, context = runtime.target, runtime.options.context
        if not variants:
            variants = default_variants(context)
        ways = {str(kv): kv for kv in (EXACT, *variants)}
        for kv in ways.values():
            kv.positions(context)  # said before anything is read
        figures = {name: _Figures() for name in ways}
        pieces = list(_texts(path, runtime, context, texts))
        for number, tokens in enumerate(pieces, start=1):
            states = {name: _state(target, kv, context) for name, kv in ways.items()}
            first = int(len(tokens) * (1 - _JUDGED))
            exact = _read(target, states[str(EXACT)], tokens, first)
            for name in ways:
                rows = exact if name == str(EXACT) else _read(target, states[name], tokens, first)
                _judge(figures[name], rows, exact, tokens[first + 1:])
                figures[name].bytes = states[name].kv.bytes
            for turn in range(rounds):
                for name in list(ways)[::1 if turn % 2 else -1]:
                    figures[name].steps_ms.append(_time(target, states[name]))
            report(f'{number} of {len(pieces)} texts of {len(tokens)} tokens')
        base = figures[str(EXACT)]
        return {
            'ways': {name: _as_dict(figures[name], base) for name in ways},
            'context': context, 'texts': len(pieces), 'judged_tokens': base.judged,
            'rounds': rounds, 'bundle': runtime.bundle.name, 'device': str(target.device),
            'dtype': str(target.dtype).removeprefix('torch.'), 'torch': torch.__version__,
            'torch_threads': torch.get_num_threads()}
    finally:
        runtime.close()


def _texts(path: Path, runtime: Runtime, length: int, count: int) -> Iterator[list[int]]:
    """``count`` texts of ``length`` tokens, of prompts and references as they follow."""
    tokens: list[int] = []
    for entry in read_objects(path):
        said = [part for part in (entry.get('prompt'), entry.get('reference')) if part]
        tokens += runtime.tokenizer.encode('\n'.join(map(str, said)) + '\n\n')
        if len(tokens) >= length:
            yield tokens[:length]
            tokens, count = [], count - 1
            if not count:
                return
    raise InvalidRequestError(f'{path}: {count} texts of {length} tokens are missing; lower '
                              '--texts or --context')


def _state(target: Target, kv: KVOptions, context: int) -> DecodeState:
    rows = 1
    return (target.new_state(context + rows) if kv.exact
            else target.new_lossy_state(kv, context, rows))


def _read(target: Target, state: DecodeState, tokens: list[int], first: int) -> Tensor:
    """Read ``tokens`` but the last; log probabilities [N, V] of those after ``first``."""
    state.tokens, rows, place = list(tokens), [], 0
    while state.held < state.last:
        state.make_room()
        end = min(state.held + min(PREFILL_CHUNK, state.reach), state.last)
        count = end - state.held
        judged = place + count > first
        logits = target.forward(state, state.read(state.held, end), last_only=not judged)
        if judged:
            rows.append(logits[max(0, first - place):].log_softmax(-1))
        state.hold(end)
        place += count
    return torch.cat(rows)


def _judge(figures: _Figures, rows: Tensor, exact: Tensor, following: list[int]) -> None:
    said = torch.tensor(following, device=rows.device)[:, None]
    figures.surprise -= float(rows.gather(1, said).double().sum())
    figures.judged += len(following)
    figures.agreeing += int((rows.argmax(-1) == exact.argmax(-1)).sum())
    if rows is not exact:
        figures.divergence += sum(
            float((one.exp() * (one - other)).sum())
            for one, other in zip(exact.split(64), rows.split(64)))


def _time(target: Target, state: DecodeState) -> float:
    """Milliseconds of a step behind the text; what it ran is not kept."""
    start = time.perf_counter()
    for _ in range(_STEPS):
        state.make_room()
        target.forward(state, state.tokens[-1:])[-1].argmax().item()
    return 1e3 * (time.perf_counter() - start) / _STEPS


def _as_dict(figures: _Figures, base: _Figures) -> dict:
    ratios = [other / mine for mine, other in zip(figures.steps_ms, base.steps_ms)]
    if not figures.judged:
        raise MemSpecError('no token was judged')
    return {
        'kv_mib': round(figures.bytes / MIB, 3), 'kv_share': figures.bytes / base.bytes,
        'perplexity': math.exp(figures.surprise / figures.judged),
        'agreement': figures.agreeing / figures.judged,
        'divergence': figures.divergence / figures.judged,
        'step_ms': statistics.median(figures.steps_ms),
        'throughput_ratio': statistics.median(ratios)}


def format_table(result: dict) -> str:
    """The result as text."""
    lines = [f'{"":38} {"KV":>10} {"perplexity":>11} {"agreement":>10} {"KL":>8} {"speed":>6}']
    for name, way in result['ways'].items():
        lines.append(f'{name:38} {way["kv_mib"]:6.1f} MiB {way["perplexity"]:11.3f} '
                     f'{way["agreement"]:10.2%} {way["divergence"]:8.4f} '
                     f'{way["throughput_ratio"]:6.2f}')
    lines.append(f'{result["texts"]} texts of {result["context"]} tokens, the last '
                 f'{result["judged_tokens"]} judged, {result["bundle"]} in {result["dtype"]}; '
                 'speed: of a step behind the text, over that of the exact cache')
    return '\n'.join(lines)
