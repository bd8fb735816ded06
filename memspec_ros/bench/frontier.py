# SPDX-License-Identifier: Apache-2.0
"""
Speed-up against memory: what each of many drafts gains alone, and what it takes.

The drafts of one or several bundles of the same target run on one engine, one
at a time, each the only draft of its whole answer. Every prompt is answered by
all of them and without any in turn, in rotating order, so that whatever else
the machine does hits all alike. All are in memory before anything is timed.
After the figure in "Speculative Decoding Under Memory Constraints" (2026).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
import hashlib
import json
from pathlib import Path
import statistics
import time

import torch

from ..decoding.draft_length import DraftLength
from ..decoding.engine import Engine
from ..memory.footprint import draft_bytes
from ..models.bundle import Bundle, DraftSpec, load_bundle
from ..models.drafts import KINDS
from ..models.errors import BundleError, InvalidRequestError, MemSpecError
from ..models.state import DecodeState
from ..models.target import load_target, Target
from ..models.target_files import locate_target
from ..models.tokenizer import Tokenizer
from ..models.weights import file_sha256
from ..runtime.controller import Controller, Settings
from ..runtime.loader import FileStore, ThreadLoader
from ..runtime.policies import Plan, Policy
from ..runtime.ranking import RankingContext
from ..runtime.requests import Finish, GenerationRequest
from ..runtime.residency import Residency, SlotState
from ..runtime.runtime import choose_device, choose_dtype, Runtime, RuntimeOptions, stop_ids_of
from ..training.outputs import read_prompts

PLAIN = 'plain'
_KINDS_WITH_SHARED_HEAD = ('feature', 'shared_layers')
# Draft steps and target steps timed for their ratio.
_STEP_ROUNDS = 40
# Tokens the step times are taken after: the middle of an answer.
_STEP_CONTEXT = 128


@dataclass
class _Entrant:
    """One draft, with the bundle that its head and its files are of."""

    id: str
    spec: DraftSpec
    bundle: Bundle


@dataclass
class _Score:
    """What was counted of one contender; by domain, times in seconds."""

    tokens: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    iterations: int = 0
    differing: int = 0

    def speed(self, domain: str | None = None) -> float:
        """Tokens per second, prefill included; over all domains for None."""
        if domain is not None:
            return self.tokens[domain] / self.seconds[domain]
        return sum(self.tokens.values()) / sum(self.seconds.values())


class OneDraft(Policy):
    """Wants one draft, whatever happens; '' for none."""

    draft = ''

    def plan(self, context: RankingContext) -> Plan:
        ranked = [(self.draft, 1.0)] if self.draft else []
        return Plan(ranked, working_set=1, prefetch=False)


def measure(prompts: Path, bundle: str, more: Sequence[str], options: RuntimeOptions,
            per_domain: int, max_new_tokens: int, report: Callable[[str], None] = print) -> dict:
    """
    Run every draft of ``bundle`` and of the bundles ``more`` on the prompts.

    per_domain: prompts of each domain, 0 for all. ``report`` receives a line a
    prompt. Returns ``points``, one a draft (see docs/benchmarks.md), and what
    was run on what. Raises MemSpecError.
    """
    texts = _choose(prompts, per_domain)
    bundles = _open_bundles([bundle, *more])
    contest = _Contest(bundles, _entrants(bundles), options)
    try:
        scores = contest.race(texts, max_new_tokens, report)
        steps = contest.step_times(texts[0][1])
        target_bytes = contest.target.weight_bytes
        plain = scores[PLAIN]
        points = [_point(entrant, contest, scores[entrant.id], plain, steps)
                  for entrant in contest.entrants]
        return {
            'points': points,
            'shared_heads': contest.head_bytes(),
            'target': {'name': bundles[0].target.name, 'bytes': target_bytes,
                       'step_sec': steps[PLAIN], 'plain_tps': plain.speed()},
            'prompts': len(texts), 'max_new_tokens': max_new_tokens,
            'prompts_sha256': hashlib.sha256(prompts.read_bytes()).hexdigest(),
            'max_draft_tokens': options.max_gamma, 'adaptive_draft_length': options.adaptive,
            'dtype': str(contest.target.dtype), 'device': str(contest.target.device),
            'processor': processor(), 'torch': torch.__version__,
            'torch_threads': torch.get_num_threads()}
    finally:
        contest.close()


def _choose(prompts: Path, per_domain: int) -> list[tuple[str, str]]:
    """(domain, prompt), the domains in turn."""
    groups: dict[str, list[str]] = defaultdict(list)
    for domain, prompt in read_prompts(prompts):
        if not per_domain or len(groups[domain]) < per_domain:
            groups[domain].append(prompt)
    chosen = [(domain, text) for domain, texts in groups.items() for text in texts]
    if not chosen:
        raise InvalidRequestError(f'{prompts}: no prompts in it')
    return chosen


def _open_bundles(paths: Sequence[str]) -> list[Bundle]:
    """Bundles of one target, each once, their targets located."""
    bundles: dict[Path, Bundle] = {}
    for path in paths:
        bundle = load_bundle(path or None)
        bundles.setdefault(bundle.directory.resolve(), bundle)
    opened = list(bundles.values())
    first = locate_target(opened[0])
    for bundle in opened[1:]:
        directory = locate_target(bundle)
        if directory != first and _weights(directory) != _weights(first):
            raise BundleError(f'{bundle.directory}: its target {bundle.target.name!r} has other '
                              f'weights than that of {opened[0].directory}; drafts can be '
                              'compared on one target only')
    return opened


def _weights(directory: Path) -> set[str]:
    return {file_sha256(file) for file in directory.glob('*.safetensors')}


def _entrants(bundles: Sequence[Bundle]) -> list[_Entrant]:
    """Every draft once, named by its bundle too where there are several bundles."""
    names = _names(bundles)
    entrants, free = [], set()
    for bundle, name in zip(bundles, names):
        for spec in bundle.drafts:
            if KINDS[spec.kind].slot_free:
                # Made of nothing, it is the same in every bundle.
                made = json.dumps([spec.kind, spec.options], sort_keys=True, default=str)
                if made in free:
                    continue
                free.add(made)
            draft = spec.id if len(bundles) == 1 else f'{name}/{spec.id}'
            entrants.append(_Entrant(draft, spec, bundle))
    if not entrants:
        raise InvalidRequestError('there is no draft in '
                                  + ', '.join(str(bundle.directory) for bundle in bundles))
    return entrants


def _names(bundles: Sequence[Bundle]) -> list[str]:
    """Names of the bundles' directories, made different where they are alike."""
    names: list[str] = []
    for bundle in bundles:
        name = base = bundle.directory.resolve().name
        count = 1
        while name in names:
            count += 1
            name = f'{base}-{count}'
        names.append(name)
    return names


class _Contest:
    """The target with all drafts in memory, and a controller to run any one of them."""

    def __init__(self, bundles: Sequence[Bundle], entrants: Sequence[_Entrant],
                 options: RuntimeOptions):
        options = replace(options)
        self.entrants = entrants
        self._bundles = bundles
        device = choose_device(options.device)
        dtype = choose_dtype(options.dtype, device)
        if options.threads:
            torch.set_num_threads(options.threads)
        directory, tokenizer = bundles[0].target_path, Tokenizer(bundles[0].tokenizer_path)
        self.target: Target = load_target(directory, dtype, device, options.context)
        options.context = min(options.context, self.target.max_positions)
        capacity = options.context + options.max_gamma + 1
        kinds = {e.id: (KINDS[e.spec.kind](e.spec, e.bundle, self.target, capacity), e.spec.bytes)
                 for e in entrants}
        self.memory = {e.id: draft_bytes(e.bundle, e.spec, dtype) for e in entrants}
        depths = frozenset().union(*(kind.depths for kind, _ in kinds.values()))
        engine = Engine(self.target, options.context, options.max_gamma, depths,
                        time.perf_counter)
        loader = ThreadLoader(FileStore({e.id: (e.bundle.weight_file(e.spec), e.spec.sha256)
                                         for e in entrants if e.spec.path}))
        self._residency = Residency(kinds, loader, len(entrants), engine.clock, self.memory)
        self._policy = OneDraft()
        # No copying: every draft is to show what it is worth by itself.
        settings = Settings(len(entrants), options.settings.scheduling_interval, copy=False)
        controller = Controller(engine, tokenizer, self._residency, self._policy,
                                DraftLength(options.max_gamma, options.adaptive), settings,
                                stop_ids_of(directory, tokenizer))
        self._runtime = Runtime(bundles[0], options, self.target, tokenizer, loader, controller)
        self._controller = controller
        try:
            self._runtime.warm_up()
            self._load(loader)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the loader and let go of all weights."""
        self._runtime.close()

    def _load(self, loader: ThreadLoader) -> None:
        ranked = [(entrant.id, 1.0) for entrant in self.entrants]
        while True:
            failed = [view for view in self._residency.view() if view.state is SlotState.FAILED]
            if failed:
                raise MemSpecError(f'draft {failed[0].id!r}: {failed[0].reason}')
            if all(self._residency.is_ready(draft) for draft, _ in ranked):
                return
            self._residency.update(ranked, None)
            loader.wait()
            self._residency.poll()

    def head_bytes(self) -> dict[str, dict[str, float]]:
        """Bytes of the head that drafts of a bundle share, by bundle; none without such drafts."""
        heads = {}
        for bundle, name in zip(self._bundles, _names(self._bundles)):
            size = max(self.head_size(e) for e in self.entrants if e.bundle is bundle)
            if size:
                heads[name] = {'bytes': size, 'percent': self.percent(size)}
        return heads

    def head_size(self, entrant: _Entrant) -> int:
        """Bytes of the shared head that the draft proposes from, 0 if it has its own or none."""
        if entrant.spec.kind not in _KINDS_WITH_SHARED_HEAD:
            return 0
        return (len(entrant.bundle.head_token_ids()) * self.target.hidden_size
                * self.target.dtype.itemsize)

    def percent(self, size: int) -> float:
        """Bytes as a share of the target's weights."""
        return 100 * size / self.target.weight_bytes

    def race(self, texts: Sequence[tuple[str, str]], limit: int,
             report: Callable[[str], None]) -> dict[str, _Score]:
        """Have every draft, and none, answer every prompt; what each took."""
        names = [PLAIN, *(entrant.id for entrant in self.entrants)]
        scores = {name: _Score() for name in names}
        for name in names:  # the first answer of each pays for its kernels
            self._answer(name, texts[0][1], limit)
        for turn, (domain, text) in enumerate(texts):
            outputs = {}
            for shift in range(len(names)):
                name = names[(turn + shift) % len(names)]
                outputs[name], seconds, iterations = self._answer(name, text, limit)
                score = scores[name]
                score.tokens[domain] += len(outputs[name])
                score.seconds[domain] += seconds
                score.iterations += iterations
            for name in names:
                scores[name].differing += outputs[name] != outputs[PLAIN]
            report(f'{domain}: {turn + 1} of {len(texts)}')
        return scores

    def _answer(self, name: str, text: str, limit: int) -> tuple[list[int], float, int]:
        """Token ids, seconds from the prompt to the last of them, iterations."""
        controller = self._controller
        self._policy.draft = '' if name == PLAIN else name
        controller.settings.speculate = name != PLAIN
        # No prompt of the run before is left in the cache: every contender computes its own.
        controller.engine.state.hold(0)
        start = time.perf_counter()
        request = self._runtime.prepare(GenerationRequest(text, max_new_tokens=limit))
        chunks = list(controller.generate(request))
        seconds = time.perf_counter() - start
        if chunks[-1].finish not in (Finish.STOP, Finish.LENGTH):
            raise MemSpecError(f'{name}: {chunks[-1].message or chunks[-1].finish.value}')
        if name != PLAIN and not self._residency.is_ready(name):
            reason = next(view.reason for view in self._residency.view() if view.id == name)
            raise MemSpecError(f'draft {name!r} failed while it decoded: {reason}')
        ids = [token for chunk in chunks for token in chunk.token_ids]
        return ids, seconds, chunks[-1].stats.iterations

    def step_times(self, text: str) -> dict[str, float]:
        """
        Median seconds of one drafted token by draft, and of a one-row step of the target.

        In turn on the same text: the drafts propose and nothing is committed.
        """
        engine = self._controller.engine
        state, gamma = engine.state, engine.max_gamma
        room = max(1, engine.context - gamma - 1)
        prompt = self._runtime.prepare(GenerationRequest(text, max_new_tokens=1)).prompt_ids
        prompt = (prompt * (_STEP_CONTEXT // len(prompt) + 1))[:min(_STEP_CONTEXT, room)]
        state.hold(0)
        for _ in engine.prefill(prompt):
            pass
        drafters = {e.id: self._residency.drafter(e.id) for e in self.entrants}
        for drafter in drafters.values():
            drafter.restart(0)
            drafter.catch_up(state, len(prompt))
        times: dict[str, list[float]] = defaultdict(list)
        for _ in range(_STEP_ROUNDS + 1):
            times[PLAIN].append(self._target_step(state))
            for name, drafter in drafters.items():
                start = time.perf_counter()
                proposed = len(drafter.propose(state, gamma).tokens)
                seconds = time.perf_counter() - start
                drafter.update(state, 0)
                times[name].append(seconds / max(1, proposed))
        # The first round also caught up with the last position.
        return {name: statistics.median(measured[1:]) for name, measured in times.items()}

    def _target_step(self, state: DecodeState) -> float:
        held = state.held
        start = time.perf_counter()
        # Reading a result back waits for the device.
        self.target.forward(state, [state.tokens[-1]])[-1].argmax().item()
        seconds = time.perf_counter() - start
        state.hold(held)
        return seconds


def _point(entrant: _Entrant, contest: _Contest, score: _Score, plain: _Score,
           steps: Mapping[str, float]) -> dict:
    size = contest.memory[entrant.id]
    return {
        'draft': entrant.id, 'kind': entrant.spec.kind, 'domain': entrant.spec.domain,
        'extra_bytes': size, 'extra_percent': contest.percent(size),
        'shared_head_percent': contest.percent(contest.head_size(entrant)),
        'speedup': score.speed() / plain.speed(),
        'speedup_by_domain': {domain: score.speed(domain) / plain.speed(domain)
                              for domain in score.tokens},
        'tokens_per_iteration': sum(score.tokens.values()) / score.iterations,
        'draft_step_sec': steps[entrant.id],
        'draft_step_over_target_step': steps[entrant.id] / steps[PLAIN],
        'outputs_differing_from_plain': score.differing}


def processor() -> str:
    """Model name of the CPU, '' where the system does not say."""
    try:
        lines = Path('/proc/cpuinfo').read_text().splitlines()
    except OSError:
        return ''
    names = [line.partition(':')[2].strip() for line in lines if line.startswith('model name')]
    return names[0] if names else ''
