# SPDX-License-Identifier: Apache-2.0
"""
Measuring a machine's cost profile on a bundle.

Every quantity is a median over rounds in which all of them are taken in turn, so
that whatever else the machine does hits all alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
import statistics
import time

import torch

from ..models.errors import InvalidRequestError, MemSpecError
from ..models.kernel_choice import processor
from ..models.state import DecodeState
from ..runtime.ranking import RankingContext
from ..runtime.requests import Finish, GenerationRequest
from ..runtime.residency import SlotState
from ..runtime.runtime import file_store, Runtime, RuntimeOptions
from .profile import CostProfile

ROUNDS = 24
# Positions that measuring takes.
LEAST_CONTEXT = 256
# Tokens the times are taken after: the middle of an answer.
_CONTEXT = 128
_CATCH_UP_ROWS = 64
_TOKENS = 48
_PROMPT = ('Write a Python function that finds the shortest way through a maze, '
           'and explain what it costs.')


def measure(bundle: str, options: RuntimeOptions, rounds: int = ROUNDS,
            report: Callable[[str], None] = print) -> CostProfile:
    """
    The profile of this machine with ``bundle``, verify sizes up to ``options.max_gamma`` + 1.

    Loads are read from this machine's storage: a board's is set by a ratio
    instead. Raises MemSpecError.
    """
    if options.max_gamma < 1:
        raise InvalidRequestError('a profile needs at least one drafted token')
    if rounds < 2:
        raise InvalidRequestError(f'{rounds} rounds, expected at least 2')
    options = replace(options, adaptive=False, max_branches=0, policy='memspec')
    runtime = Runtime.open(bundle or None, options)
    try:
        return measure_runtime(runtime, rounds, report)
    finally:
        runtime.close()


def measure_runtime(runtime: Runtime, rounds: int = ROUNDS,
                    report: Callable[[str], None] = print) -> CostProfile:
    """
    As ``measure``, of a bundle that is open already.

    Its draft length must be fixed and its policy memspec; it is left with no draft
    in memory. Raises MemSpecError.
    """
    controller, gamma = runtime.controller, runtime.options.max_gamma
    settings = controller.settings
    # All drafts are timed in turn.
    controller.settings = replace(settings, cache_capacity=64, copy=False)
    controller.residency.set_capacity(64)
    try:
        report('loading the drafts')
        _load_all(runtime)
        # Compiled kernels.
        overhead = [_overhead_ms(runtime) for _ in range(4)][1:]
        times = _Rounds(runtime).run(rounds, report)
        drafts = [spec.id for spec in runtime.bundle.drafts]
        return CostProfile(
            name='measured',
            verify_ms=[times[f'verify {n}'] for n in range(1, gamma + 2)],
            draft_step_ms={draft: times[f'step {draft}'] for draft in drafts},
            catch_up_row_ms={draft: times[f'catch-up {draft}'] for draft in drafts},
            rank_ms=times['rank'], overhead_ms=statistics.median(overhead),
            prefill_row_ms=times['prefill'],
            load_ms={spec.id: times[f'load {spec.id}'] for spec in runtime.bundle.drafts
                     if spec.path},
            about={'bundle': runtime.bundle.name, 'processor': processor(),
                   'device': str(runtime.target.device), 'dtype': str(runtime.target.dtype),
                   'torch': torch.__version__, 'torch_threads': torch.get_num_threads(),
                   'rounds': rounds, 'context': _CONTEXT, 'loads': 'from storage'})
    finally:
        controller.reset()
        controller.settings = settings


def _load_all(runtime: Runtime) -> None:
    residency = runtime.controller.residency
    ranked = [(spec.id, 1.0) for spec in runtime.bundle.drafts]
    while not all(residency.is_ready(draft) for draft, _ in ranked):
        failed = [view for view in residency.view() if view.state is SlotState.FAILED]
        if failed:
            raise MemSpecError(f'draft {failed[0].id!r}: {failed[0].reason}')
        residency.update(ranked, None)
        residency.poll() or time.sleep(0.001)


def _overhead_ms(runtime: Runtime) -> float:
    """Of an iteration of a whole answer, beside its step and the ranking."""
    runtime.controller.engine.state.hold(0)
    request = runtime.prepare(GenerationRequest(_PROMPT, max_new_tokens=_TOKENS))
    last = list(runtime.controller.generate(request))[-1]
    if last.finish not in (Finish.STOP, Finish.LENGTH):
        raise MemSpecError(last.message or last.finish.value)
    return 1e3 * last.stats.other_sec / last.stats.iterations


class _Rounds:
    """Times everything once a round."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self._engine = runtime.controller.engine
        self._gamma = self._engine.max_gamma
        self._store = file_store(runtime.bundle, runtime.target.device, runtime.options.storage)
        prompt = runtime.prepare(GenerationRequest(_PROMPT, max_new_tokens=1)).prompt_ids
        room = max(2, min(_CONTEXT, self._engine.context - self._gamma - 1))
        self._prompt = (prompt * (room // len(prompt) + 1))[:room]
        self._times: dict[str, list[float]] = defaultdict(list)

    def run(self, rounds: int, report: Callable[[str], None]) -> dict[str, float]:
        """Medians in milliseconds, by what was timed."""
        state = self._engine.state
        for number in range(rounds):
            state.hold(0)
            rows = len(self._prompt) - 1
            self._time('prefill', lambda: list(self._engine.prefill(self._prompt)), rows)
            for count in range(1, self._gamma + 2):
                self._time(f'verify {count}', lambda count=count: self._verify(state, count))
            for spec in self._runtime.bundle.drafts:
                self._draft(spec.id, state)
                if spec.path:
                    self._time(f'load {spec.id}', lambda draft=spec.id: self._store.read(
                        draft, lambda count: None, lambda: False))
            self._rank(state)
            if number % 8 == 0:
                report(f'round {number + 1} of {rounds}')
        # The first round also paid for kernel set-up.
        return {name: statistics.median(values[1:]) for name, values in self._times.items()}

    def _time(self, name: str, act: Callable[[], object], parts: int = 1) -> object:
        start = time.perf_counter()
        result = act()
        self._times[name].append(1e3 * (time.perf_counter() - start) / parts)
        return result

    def _verify(self, state: DecodeState, count: int) -> None:
        self._engine.trial(self._prompt[-1:] * count)
        state.hold(state.held)

    def _draft(self, draft: str, state: DecodeState) -> None:
        drafter = self._runtime.controller.residency.drafter(draft)
        drafter.restart(0)
        rows = min(_CATCH_UP_ROWS, drafter.lag(state))
        drafter.catch_up(state, len(self._prompt))
        if rows:
            drafter.restart(len(self._prompt) - 1 - rows)
            with self._engine.threads.running(rows):
                self._time(f'catch-up {draft}', lambda: drafter.catch_up(state, rows), rows)
        else:
            self._times[f'catch-up {draft}'].append(0.0)
        drafter.propose(state, 1)
        drafter.update(state, 0)
        start = time.perf_counter()
        with self._engine.threads.running(1):
            proposed = len(drafter.propose(state, self._gamma).tokens)
        seconds = time.perf_counter() - start
        drafter.update(state, 0)
        self._times[f'step {draft}'].append(1e3 * seconds / max(1, proposed))

    def _rank(self, state: DecodeState) -> None:
        recent = self._prompt[-32:]
        context = RankingContext(self._prompt, _PROMPT, recent,
                                 self._runtime.tokenizer.decode(recent), state.last_hidden)
        policy = self._runtime.controller.policy
        policy.begin(context)
        self._time('rank', lambda: policy.plan(context))


def format_table(profile: CostProfile) -> str:
    """The profile as text."""
    lines = ['verify (ms by rows):  ' + '  '.join(f'{value:.2f}' for value in profile.verify_ms),
             f'ranking {profile.rank_ms:.3f} ms, overhead {profile.overhead_ms:.3f} ms an '
             f'iteration, prefill {profile.prefill_row_ms:.3f} ms a token',
             f'{"draft":16}{"token ms":>10}{"catch-up":>10}{"load ms":>10}']
    for draft, step in profile.draft_step_ms.items():
        load = profile.load_ms.get(draft)
        lines.append(f'{draft:16}{step:10.3f}{profile.catch_up_row_ms[draft]:10.3f}'
                     f'{"-" if load is None else f"{load:.1f}":>10}')
    return '\n'.join(lines)
