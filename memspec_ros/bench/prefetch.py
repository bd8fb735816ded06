# SPDX-License-Identifier: Apache-2.0
"""
What prefetching costs decoding: time between tokens with a load in flight and with none.

One draft decodes; beside it, others are loaded one after another without a
pause, or nothing is. Answers of both kinds take turns, so that whatever else the
machine does hits both alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..decoding.stats import GenerationStats
from ..models.bundle import DraftSpec, load_bundle
from ..models.drafts import KINDS
from ..models.errors import InvalidRequestError, MemSpecError
from ..runtime.controller import Controller
from ..runtime.policies import GeneralStaticPolicy, Plan, Policy
from ..runtime.ranking import RankingContext
from ..runtime.requests import Finish, PreparedRequest
from ..runtime.residency import Residency, SlotState
from ..runtime.runtime import choose_device, file_store, Runtime, RuntimeOptions
from ..runtime.settings import Settings
from ..runtime.storage import PacedStore
from ..training.traces import collect_prompts
from .race import conditions

# Prefetching is to cost no more than that.
LIMIT = 1.2
KINDS_OF_ANSWERS = ('idle', 'loading')


class BesideLoads(Policy):
    """Decodes with one draft; where ``loading``, has the others loaded one after another."""

    interval = 1

    def __init__(self, draft: str, others: Sequence[str], residency: Residency, loading: bool):
        self._draft, self._others = draft, list(others)
        self._residency = residency
        self._loading = loading
        self._turn = 0

    def plan(self, context: RankingContext) -> Plan:
        if not self._loading:
            return Plan([(self._draft, 1.0)], working_set=1, prefetch=False)
        wanted = self._others[self._turn % len(self._others)]
        if wanted in context.ready:
            self._residency.release(wanted)
            self._turn += 1
            wanted = self._others[self._turn % len(self._others)]
        return Plan([(self._draft, 1.0), (wanted, 0.5)], use=[self._draft])


def compare(controller: Controller, drafts: Sequence[DraftSpec],
            requests: Sequence[Callable[[], PreparedRequest]], runs: int,
            report: Callable[[str], None] = print) -> dict[str, Any]:
    """
    Answer every request with and without loads beside it, ``runs`` times.

    Decodes with the general draft. Returns ``p95_ms`` and ``p50_ms`` between
    tokens of both kinds of answers, ``ratio`` of the former, and what was done.
    Raises MemSpecError.
    """
    if not requests or runs < 1:
        raise InvalidRequestError(f'{len(requests)} prompts, {runs} runs: there is nothing to run')
    draft, others = _choose(drafts)
    controller.settings = Settings(2, 1, copy=False, merge=False)
    controller.residency.set_capacity(2)
    controller.reset()
    _make_ready(controller.residency, draft)
    gaps: dict[str, list[float]] = {kind: [] for kind in KINDS_OF_ANSWERS}
    loads = iterations = done = 0
    total = runs * len(requests)
    for run in range(runs):
        for number, request in enumerate(requests):
            for turn in range(len(KINDS_OF_ANSWERS)):
                kind = KINDS_OF_ANSWERS[(turn + number + run) % len(KINDS_OF_ANSWERS)]
                stats = _answer(controller, BesideLoads(
                    draft, others, controller.residency, kind == 'loading'), request(), draft)
                gaps[kind] += stats.gaps
                if kind == 'loading':
                    loads += stats.loads
                    iterations += stats.iterations
            done += 1
            report(f'{done} of {total} pairs of answers')
    if not loads or not all(gaps.values()):
        raise InvalidRequestError('the answers were too short for a load beside them; raise '
                                  '--max-new-tokens')
    p95, p50 = ({kind: 1e3 * GenerationStats(gaps=gaps[kind]).inter_token(share)
                 for kind in KINDS_OF_ANSWERS} for share in (0.95, 0.5))
    return {'p95_ms': p95, 'ratio': p95['loading'] / p95['idle'], 'limit': LIMIT,
            'within': p95['loading'] <= LIMIT * p95['idle'], 'p50_ms': p50, 'draft': draft,
            'loaded': others, 'loads': loads, 'loads_per_iteration': loads / iterations,
            'tokens': {kind: len(values) for kind, values in gaps.items()},
            'prompts': len(requests), 'runs': runs}


def _choose(drafts: Sequence[DraftSpec]) -> tuple[str, list[str]]:
    """The draft to decode with, and those to load."""
    draft = GeneralStaticPolicy(drafts).plan(None).desired
    others = [spec.id for spec in drafts if spec.id != draft and not KINDS[spec.kind].slot_free]
    if not others:
        raise InvalidRequestError(f'the bundle has no draft to load beside {draft!r}')
    return draft, others


def _make_ready(residency: Residency, draft: str) -> None:
    while not residency.is_ready(draft):
        _refuse_failed(residency)
        residency.update([(draft, 1.0)], draft, working_set=1, prefetch=False)
        residency.wait(1.0)
        residency.poll()


def _answer(controller: Controller, policy: BesideLoads, request: PreparedRequest,
            draft: str) -> GenerationStats:
    residency = controller.residency
    while residency.loading is not None:  # of the answer before
        residency.wait(1.0)
        residency.poll()
    for other in residency.resident:
        if other != draft:
            residency.release(other)
    controller.policy = policy
    # No prompt of the answer before is left in the cache: each computes its own.
    controller.engine.state.hold(0)
    last = list(controller.generate(request))[-1]
    if last.finish not in (Finish.STOP, Finish.LENGTH):
        raise MemSpecError(last.message or last.finish.value)
    _refuse_failed(residency)
    return last.stats


def _refuse_failed(residency: Residency) -> None:
    for view in residency.view():
        if view.state is SlotState.FAILED:
            raise MemSpecError(f'draft {view.id!r}: {view.reason}')


def measure(prompts: Path, options: RuntimeOptions, bundle: str, per_domain: int,
            max_new_tokens: int, runs: int, load_ratio: float,
            report: Callable[[str], None] = print) -> dict[str, Any]:
    """
    ``compare`` on a bundle; a load is to take ``load_ratio`` iterations.

    0: as long as the storage takes. The draft length is fixed. Raises MemSpecError.
    """
    store = PacedStore(file_store(load_bundle(bundle or None, verify=False),
                                  choose_device(options.device), options.storage),
                       1e6 * options.storage.mb_per_sec, options.storage.latency_ms / 1e3)
    runtime = Runtime.open(bundle or None, replace(options, adaptive=False), store=store)
    try:
        chosen = collect_prompts(
            [prompts],
            lambda text: runtime.tokenizer.encode_chat([{'role': 'user', 'content': text}]),
            runtime.options.context - max_new_tokens, per_domain)
        if not chosen:
            raise InvalidRequestError(f'{prompts}: no prompt that leaves room in the context')
        clock = runtime.controller.clock
        requests = [lambda prompt=prompt: PreparedRequest(
            list(prompt.ids), prompt.text, max_new_tokens, accepted_at=clock())
            for prompt in chosen]
        drafts = runtime.bundle.drafts
        if load_ratio:
            store.rates = _rates(runtime, drafts, requests[0](), load_ratio)
        return {**compare(runtime.controller, drafts, requests, runs, report),
                'load_ratio': load_ratio, 'max_new_tokens': max_new_tokens,
                **conditions(runtime.target, prompts)}
    finally:
        runtime.close()


def _rates(runtime: Runtime, drafts: Sequence[DraftSpec], request: PreparedRequest,
           ratio: float) -> dict[str, float]:
    """Bytes per second at which a load takes so many iterations of the draft that decodes."""
    controller, (draft, others) = runtime.controller, _choose(drafts)
    controller.settings = Settings(2, 1, copy=False, merge=False)
    _make_ready(controller.residency, draft)
    for _ in range(2):  # the first answer sets the kernels up
        policy = BesideLoads(draft, others, controller.residency, loading=False)
        stats = _answer(controller, policy, replace(request, accepted_at=controller.clock()),
                        draft)
    iteration_sec = stats.decode_sec / stats.iterations
    return {spec.id: spec.bytes / (ratio * iteration_sec) for spec in drafts if spec.path}


def format_table(result: dict[str, Any]) -> str:
    """The result as text."""
    lines = [f'{"time between tokens, ms":26}{"p50":>9}{"p95":>9}{"tokens":>9}']
    for kind, name in (('idle', 'nothing is loaded'), ('loading', 'a load in flight')):
        lines.append(f'{name:26}{result["p50_ms"][kind]:9.2f}{result["p95_ms"][kind]:9.2f}'
                     f'{result["tokens"][kind]:9d}')
    lines.append(f'p95 {result["ratio"]:.3f} times as long beside a load (at most '
                 f'{result["limit"]:g} is the aim); {result["loads"]} loads, '
                 f'{result["loads_per_iteration"]:.2f} an iteration')
    return '\n'.join(lines)
