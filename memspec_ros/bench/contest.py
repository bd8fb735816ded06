# SPDX-License-Identifier: Apache-2.0
"""
Every draft of one or several bundles of the same target, alone on one engine.

All are in memory before anything is timed. Whoever measures says which draft
answers, or none, and turns take care that whatever else the machine does hits
all alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
import json
from pathlib import Path
import time

import torch

from ..decoding.draft_length import DraftLength
from ..decoding.engine import Engine
from ..memory.footprint import draft_bytes
from ..models.bundle import Bundle, DraftSpec, load_bundle
from ..models.drafts import Drafter, KINDS
from ..models.errors import BundleError, MemSpecError
from ..models.state import DecodeState
from ..models.target import load_target, Target
from ..models.target_files import locate_target
from ..models.tokenizer import Tokenizer
from ..models.weights import file_sha256
from ..runtime.controller import Controller
from ..runtime.loader import ThreadLoader
from ..runtime.policies import Plan, Policy
from ..runtime.ranking import RankingContext
from ..runtime.requests import GenerationRequest
from ..runtime.residency import Residency, SlotState
from ..runtime.runtime import choose_device, choose_dtype, Runtime, RuntimeOptions, stop_ids_of
from ..runtime.settings import Settings
from ..runtime.storage import FileStore, PreparingStore
from .race import Answer, answer

PLAIN = 'plain'
_KINDS_WITH_SHARED_HEAD = ('feature', 'shared_layers')
# Tokens the step times are taken after: the middle of an answer.
STEP_CONTEXT = 128


@dataclass
class Entrant:
    """One draft, with the bundle that its head and its files are of."""

    id: str
    spec: DraftSpec
    bundle: Bundle


@dataclass(frozen=True)
class StepTimes:
    """Seconds, each a list of repetitions: verify passes by rows (1, 2, …), a token by draft."""

    verify: list[list[float]]
    drafts: dict[str, list[float]]


class OneDraft(Policy):
    """Wants one draft, whatever happens; '' for none."""

    draft = ''

    def plan(self, context: RankingContext) -> Plan:
        ranked = [(self.draft, 1.0)] if self.draft else []
        return Plan(ranked, working_set=1, prefetch=False)


def open_bundles(paths: Sequence[str]) -> list[Bundle]:
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


def enter(bundles: Sequence[Bundle]) -> list[Entrant]:
    """Every draft once, named by its bundle too where there are several bundles."""
    names = bundle_names(bundles)
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
            entrants.append(Entrant(draft, spec, bundle))
    return entrants


def bundle_names(bundles: Sequence[Bundle]) -> list[str]:
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


class Contest:
    """The target with all drafts in memory, and a controller to run any one of them."""

    def __init__(self, bundles: Sequence[Bundle], entrants: Sequence[Entrant],
                 options: RuntimeOptions):
        options = replace(options)
        self.entrants = entrants
        self._bundles = bundles
        device = choose_device(options.device)
        dtype = choose_dtype(options.dtype, device)
        if options.threads:
            torch.set_num_threads(options.threads)
        directory, tokenizer = bundles[0].target_path, Tokenizer(bundles[0].tokenizer_path)
        self.target: Target = load_target(directory, dtype, device, options.context,
                                          weights=options.weights)
        options.context = min(options.context, self.target.max_positions)
        capacity = options.context + options.max_gamma + 1
        kinds = {e.id: (KINDS[e.spec.kind](e.spec, e.bundle, self.target, capacity), e.spec.bytes)
                 for e in entrants}
        self.memory = {e.id: draft_bytes(e.bundle, e.spec, dtype, device) for e in entrants}
        depths = frozenset().union(*(kind.depths for kind, _ in kinds.values()))
        self.engine = Engine(self.target, options.context, options.max_gamma, depths,
                             time.perf_counter, options.max_branches)
        store = FileStore({e.id: (e.bundle.weight_file(e.spec), e.spec.sha256)
                           for e in entrants if e.spec.path})
        loader = ThreadLoader(PreparingStore(store, kinds))
        self._residency = Residency(kinds, loader, len(entrants), self.engine.clock,
                                    self.memory)
        self._policy = OneDraft()
        # No copying: every draft is to show what it is worth by itself.
        settings = Settings(len(entrants), options.settings.scheduling_interval, copy=False,
                            merge=False, min_confidence=options.settings.min_confidence)
        controller = Controller(self.engine, tokenizer, self._residency, self._policy,
                                DraftLength(options.max_gamma, options.adaptive), settings,
                                stop_ids_of(directory, tokenizer))
        self.runtime = Runtime(bundles[0], options, self.target, tokenizer, loader, controller)
        self.controller = controller
        try:
            self.runtime.warm_up()
            self._load(loader)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the loader and let go of all weights."""
        self.runtime.close()

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
        for bundle, name in zip(self._bundles, bundle_names(self._bundles)):
            size = max(self.head_size(e) for e in self.entrants if e.bundle is bundle)
            if size:
                heads[name] = {'bytes': size, 'percent': self.percent(size)}
        return heads

    def head_size(self, entrant: Entrant) -> int:
        """Bytes of the shared head that the draft proposes from, 0 if it has its own or none."""
        if entrant.spec.kind not in _KINDS_WITH_SHARED_HEAD:
            return 0
        return (len(entrant.bundle.head_token_ids()) * self.target.hidden_size
                * self.target.dtype.itemsize)

    def percent(self, size: int) -> float:
        """Bytes as a share of the target's weights."""
        return 100 * size / self.target.weight_bytes

    def answer(self, name: str, text: str, limit: int) -> Answer:
        """That of the draft ``name`` alone, or of none (PLAIN). Raises MemSpecError."""
        self._policy.draft = '' if name == PLAIN else name
        try:
            given = answer(self.runtime, text, limit, name != PLAIN)
        except MemSpecError as error:
            raise MemSpecError(f'{name}: {error}') from error
        if name != PLAIN and not self._residency.is_ready(name):
            reason = next(view.reason for view in self._residency.view() if view.id == name)
            raise MemSpecError(f'draft {name!r} failed while it decoded: {reason}')
        return given

    @contextmanager
    def drafters(self, text: str) -> Iterator[dict[str, Drafter]]:
        """
        The drafters, after STEP_CONTEXT tokens of ``text`` (which repeats itself if it is short).

        They may propose, and nothing is to be committed.
        """
        engine = self.engine
        state, room = engine.state, max(1, engine.context - engine.max_gamma - 1)
        prompt = self.runtime.prepare(GenerationRequest(text, max_new_tokens=1)).prompt_ids
        prompt = (prompt * (STEP_CONTEXT // len(prompt) + 1))[:min(STEP_CONTEXT, room)]
        state.hold(0)
        for _ in engine.prefill(prompt):
            pass
        drafters = {e.id: self._residency.drafter(e.id) for e in self.entrants}
        for drafter in drafters.values():
            drafter.restart(0)
            drafter.catch_up(state, len(prompt))
        yield drafters
        state.hold(0)

    def step_times(self, text: str, rounds: int, rows: int = 1) -> StepTimes:
        """
        What a drafted token and a verify of 1 … ``rows`` rows take, ``rounds`` times each.

        In turn on the same text: the drafts propose and nothing is committed.
        """
        state, gamma = self.engine.state, self.engine.max_gamma
        verify: list[list[float]] = [[] for _ in range(rows)]
        drafts: dict[str, list[float]] = defaultdict(list)
        with self.drafters(text) as drafters:
            for _ in range(rounds + 1):
                for count, measured in enumerate(verify, 1):
                    measured.append(self._verify(state, count))
                for name, drafter in drafters.items():
                    start = time.perf_counter()
                    with self.engine.threads.running(1):
                        proposed = len(drafter.propose(state, gamma).tokens)
                    seconds = time.perf_counter() - start
                    drafter.update(state, 0)
                    drafts[name].append(seconds / max(1, proposed))
        # The first round also caught up with the last position.
        return StepTimes([measured[1:] for measured in verify],
                         {name: measured[1:] for name, measured in drafts.items()})

    def _verify(self, state: DecodeState, rows: int) -> float:
        start = time.perf_counter()
        self.engine.trial(state.tokens[-1:] * rows)
        seconds = time.perf_counter() - start
        state.hold(state.held)
        return seconds
