# SPDX-License-Identifier: Apache-2.0
"""
How near decoding comes to what the memory allows.

A step of batch size one reads all its weights, and the keys and values held,
once: no program does it faster than the memory delivers them. That least time
is measured beside the real ones. Times are the fastest of many repetitions:
what else the machine does only ever adds to them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
import statistics
import time

import torch

from ..decoding.engine import Engine
from ..models.errors import InvalidRequestError
from ..runtime.runtime import RuntimeOptions
from .contest import Contest, enter, open_bundles, STEP_CONTEXT
from .race import conditions

ROUNDS = 24
# Verified rows looked at, and read passes over the buffer.
ROWS = 9
_READS = 12
_GLANCE_ROUNDS = 12
# More than any cache holds.
_BUFFER_BYTES = {'cpu': 1 << 28, 'cuda': 1 << 30}
_PROMPT = ('Write a Python function that finds the shortest way through a maze, '
           'and explain what it costs.')


class Memory:
    """Reads a large buffer, to see how fast the memory of ``device`` delivers."""

    def __init__(self, device: torch.device):
        self._buffer = torch.ones(_BUFFER_BYTES[device.type] // 4, device=device)

    def bandwidth(self, threads: int = 0) -> float:
        """Bytes per second of the fastest read; ``threads``: of the CPU, 0 for those set."""
        before = torch.get_num_threads()
        if threads and threads != before:
            torch.set_num_threads(threads)
        try:
            best = min(self._read() for _ in range(_READS))
        finally:
            if torch.get_num_threads() != before:
                torch.set_num_threads(before)
        return self._buffer.nbytes / best

    def _read(self) -> float:
        start = time.perf_counter()
        # Next to no arithmetic, and a result read back waits for the device.
        self._buffer.amax().item()
        return time.perf_counter() - start


def measure(bundle: str, options: RuntimeOptions, rounds: int = ROUNDS,
            report: Callable[[str], None] = print) -> dict:
    """
    Bandwidth, least times and achieved shares of target and drafts of ``bundle``.

    See docs/benchmarks.md. Raises MemSpecError.
    """
    if rounds < 2:
        raise InvalidRequestError(f'{rounds} rounds, expected at least 2')
    options = replace(options, adaptive=False, max_gamma=max(options.max_gamma, ROWS - 1),
                      max_branches=0)
    bundles = open_bundles([bundle])
    entrants = enter(bundles)
    contest = Contest(bundles, entrants, options)
    try:
        report('reading memory')
        memory = Memory(contest.target.device)
        threads = torch.get_num_threads()
        counts = [1, threads] if contest.target.device.type == 'cpu' else [threads]
        reads = {count: memory.bandwidth(count) for count in counts}
        report('timing steps')
        times = contest.step_times(_PROMPT, rounds, ROWS)
        # Once more: one quiet moment is enough.
        rate = max(reads[threads], memory.bandwidth())
        reads[threads] = rate
        with contest.drafters(_PROMPT) as drafters:
            state = contest.engine.state
            target_bytes, held = contest.target.step_bytes(state), state.held
            draft_bytes = {name: drafter.step_bytes(state) for name, drafter in drafters.items()}
        verify = [_figures(target_bytes, rate, measured) for measured in times.verify]
        step = verify[0]
        drafts = {}
        for entrant in entrants:
            figures = _figures(draft_bytes[entrant.id], rate, times.drafts[entrant.id])
            drafts[entrant.id] = {'kind': entrant.spec.kind, **figures,
                                  'over_target_step': figures['ms'] / step['ms']}
        return {
            'read_gb_per_sec': {str(count): value / 1e9 for count, value in reads.items()},
            'target': {'name': bundles[0].target.name, **step},
            'verify': [{'rows': rows, **figures, 'over_one_row': figures['ms'] / step['ms']}
                       for rows, figures in enumerate(verify, 1)],
            'drafts': drafts, 'context': held, 'rounds': rounds,
            **conditions(contest.target)}
    finally:
        contest.close()


def _figures(size: int, rate: float, seconds: list[float]) -> dict:
    """Of something that reads ``size`` bytes at least; its share is None if it reads nothing."""
    least, fastest = size / rate, min(seconds)
    return {'bytes': size, 'least_ms': 1e3 * least, 'ms': 1e3 * fastest,
            'median_ms': 1e3 * statistics.median(seconds),
            'share': least / fastest if size else None}


def glance(engine: Engine) -> dict:
    """The target step alone, of an engine that is not decoding; its cache is emptied."""
    state = engine.state
    state.hold(0)
    for _ in engine.prefill([0] * max(2, min(STEP_CONTEXT, engine.context))):
        pass
    seconds = []
    for _ in range(_GLANCE_ROUNDS):
        start = time.perf_counter()
        engine.trial(state.tokens[-1:])
        seconds.append(time.perf_counter() - start)
        state.hold(state.held)
    size = engine.target.step_bytes(state)
    state.hold(0)
    rate = Memory(engine.target.device).bandwidth()
    return {'read_gb_per_sec': rate / 1e9, 'torch_threads': torch.get_num_threads(),
            **_figures(size, rate, seconds)}


def format_glance(floor: dict) -> str:
    """One line."""
    return (f'floor: a target step reads {floor["bytes"] / 1e6:.0f} MB, at '
            f'{floor["read_gb_per_sec"]:.1f} GB/s ({floor["torch_threads"]} threads) '
            f'{floor["least_ms"]:.2f} ms; it takes {floor["ms"]:.2f} ms, '
            f'{floor["share"]:.0%} of the bandwidth')


def format_table(result: dict) -> str:
    """The result as text."""
    reads = ', '.join(f'{value:.1f} GB/s with {count}'
                      for count, value in result['read_gb_per_sec'].items())
    width = max(14, *(len(name) + 6 for name in ('', *result['drafts'])))
    lines = [f'memory reads (threads): {reads}; after {result["context"]} tokens:',
             f'{"":{width}}{"MB":>8}{"least ms":>10}{"ms":>9}{"median":>9}{"share":>8}'
             f'{"/target":>9}']
    rows = [(f'verify {entry["rows"]}', entry, entry['over_one_row'])
            for entry in result['verify']]
    rows[0] = ('target step', *rows[0][1:])
    rows += [(f'draft {name}', entry, entry['over_target_step'])
             for name, entry in result['drafts'].items()]
    for name, entry, ratio in rows:
        share = '-' if entry['share'] is None else f'{entry["share"]:.0%}'
        lines.append(f'{name:{width}}{entry["bytes"] / 1e6:8.1f}{entry["least_ms"]:10.3f}'
                     f'{entry["ms"]:9.3f}{entry["median_ms"]:9.3f}{share:>8}{ratio:9.2f}')
    return '\n'.join(lines)
