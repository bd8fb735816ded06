# SPDX-License-Identifier: Apache-2.0
"""
How soon a second turn of a conversation is answered, kept and read again.

The first turn is answered; then the second is begun twice, in turn which way
first: from the keys and values of the first, and from nothing. Time counts
from the request to its first token, tokenising included, as the node does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
import statistics

import torch

from ..models.errors import InvalidRequestError, MemSpecError
from ..runtime.requests import Chunk, Finish, GenerationRequest
from ..runtime.runtime import Runtime, RuntimeOptions
from .json_lines import read_objects

_SESSION = 'conversation'
_WAYS = ('kept', 'read again')


def read_conversations(path: Path, count: int) -> list[tuple[str, str]]:
    """The first two turns of ``count`` conversations (0: all); raises InvalidRequestError."""
    every = (entry.get('turns') for entry in read_objects(path))
    found = [(str(turns[0]), str(turns[1])) for turns in every
             if isinstance(turns, list) and len(turns) > 1]
    if not found:
        raise InvalidRequestError(f'{path}: no lines with two "turns" in it')
    return found[:count or None]


def measure(path: Path, options: RuntimeOptions, bundle: str, count: int, max_new_tokens: int,
            runs: int, report: Callable[[str], None] = print) -> dict:
    """
    Time the second turns; ``report`` receives a line for each conversation.

    max_new_tokens: of the first answer. Returns, of each conversation, its tokens,
    how many were kept, both times (medians of ``runs``) and their ratio. Raises MemSpecError.
    """
    conversations = read_conversations(path, count)
    runtime = Runtime.open(bundle or None, options)
    try:
        _answer(runtime, GenerationRequest(conversations[0][0], max_new_tokens=8))
        _load_all(runtime)
        entries = []
        for first, second in conversations:
            entry = _second_turn(runtime, first, second, max_new_tokens, runs)
            entries.append(entry)
            report(f'{len(entries)} of {len(conversations)}: {entry["prompt_tokens"]} tokens, '
                   f'{entry["cached_tokens"]} kept: first token after {entry["kept_ms"]:.0f} ms, '
                   f'{entry["read_again_ms"]:.0f} ms without; {entry["ratio"]:.1f} times')
        return {
            'conversations': entries, 'runs': runs, 'max_new_tokens': max_new_tokens,
            'kept_ms': statistics.median(entry['kept_ms'] for entry in entries),
            'read_again_ms': statistics.median(entry['read_again_ms'] for entry in entries),
            'ratio': statistics.median(entry['ratio'] for entry in entries),
            'least_ratio': min(entry['ratio'] for entry in entries),
            'bundle': runtime.bundle.name, 'dtype': str(runtime.target.dtype),
            'device': str(runtime.target.device), 'torch': torch.__version__,
            'torch_threads': torch.get_num_threads()}
    finally:
        runtime.close()


def _second_turn(runtime: Runtime, first: str, second: str, max_new_tokens: int,
                 runs: int) -> dict:
    controller = runtime.controller
    controller.reset()
    text, _ = _answer(runtime, GenerationRequest(first, max_new_tokens=max_new_tokens))
    _load_all(runtime)
    parked = controller.engine.state.park()
    request = GenerationRequest(second, history=(('user', first), ('assistant', text)),
                                max_new_tokens=2)
    times: dict[str, list[float]] = {way: [] for way in _WAYS}
    cached = 0
    for number in range(runs):
        for way in _WAYS if number % 2 else _WAYS[::-1]:
            state = controller.engine.state
            state.hold(0)
            for drafter in controller.residency.drafters():
                drafter.restart(0)
            if way == 'kept':
                state.resume(parked)
                for drafter in controller.residency.drafters():
                    # As after the first turn, of which it was part.
                    drafter.begin(state)
                    drafter.catch_up(state, len(state.tokens))
            _, last = _answer(runtime, request)
            times[way].append(1e3 * last.stats.time_to_first_token_sec)
            if way == 'kept':
                cached, tokens = last.stats.cached_tokens, last.stats.prompt_tokens
    kept, again = (statistics.median(times[way]) for way in _WAYS)
    return {'prompt_tokens': tokens, 'cached_tokens': cached, 'kept_ms': kept,
            'read_again_ms': again, 'ratio': again / kept}


def _answer(runtime: Runtime, request: GenerationRequest) -> tuple[str, Chunk]:
    """(text, last chunk) of a turn."""
    text = ''
    for chunk in runtime.controller.generate(runtime.prepare(request, _SESSION)):
        text += chunk.text
    if chunk.finish not in (Finish.STOP, Finish.LENGTH):
        raise MemSpecError(f'an answer ended with {chunk.finish.value}: {chunk.message}')
    return text, chunk


def _load_all(runtime: Runtime) -> None:
    """Let loads end: they would run beside what is timed."""
    residency = runtime.controller.residency
    while residency.loading is not None:
        residency.wait(1.0)
        residency.poll()


def format_table(result: dict) -> str:
    """The result as text."""
    return (f'first token of a second turn, medians of {len(result["conversations"])} '
            f'conversations: {result["kept_ms"]:.0f} ms kept, {result["read_again_ms"]:.0f} ms '
            f'read again; {result["ratio"]:.1f} times sooner (at least '
            f'{result["least_ratio"]:.1f})')
