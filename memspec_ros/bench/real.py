# SPDX-License-Identifier: Apache-2.0
"""
Decoding for real: policies and oracles on the engine, loader and residency of a node.

What a replay computes from traces is run here and timed, storage set to the pace
of a board's by the profile measured beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ..decoding.draft_length import DraftLength
from ..models.bundle import DraftSpec, load_bundle
from ..models.drafts import KINDS
from ..models.errors import InvalidRequestError, MemSpecError
from ..runtime.controller import Controller
from ..runtime.policies import GeneralStaticPolicy, make_policy, Policy
from ..runtime.ranking import make_ranker, Ranker
from ..runtime.requests import Chunk, Finish, PreparedRequest
from ..runtime.residency import SlotState
from ..runtime.runtime import choose_device, file_store, Runtime, RuntimeOptions
from ..runtime.settings import Settings
from ..runtime.storage import PacedStore
from ..training.trace_store import Trace, TraceHeader
from ..training.traces import TracePrompt, Tracer
from .measure_profile import LEAST_CONTEXT, measure_runtime, ROUNDS
from .profile import CostProfile
from .replay import Scenario
from .source import Outcome


@dataclass
class Machine:
    """
    What answers for real: the controller of an opened bundle.

    Attributes
    ----------
    controller: runs everything; its policy, settings and draft length are replaced
    drafts: those that may be used
    ranker: asked by the policies that rank
    measure: the cost profile, as it is now: a machine is not equally fast for minutes
    store: where drafts are read from, to be paced by the profile's load times; None:
        its pace is set already

    """

    controller: Controller
    drafts: Sequence[DraftSpec]
    ranker: Ranker
    measure: Callable[[], CostProfile]
    store: PacedStore | None = None

    def begin(self, policy: Policy, scenario: Scenario) -> None:
        """Make everything as new: no draft and no prompt in memory, nothing learned."""
        controller = self.controller
        controller.policy = policy
        controller.settings = Settings(
            scenario.cache_capacity, scenario.interval, bool(scenario.gamma), scenario.copy,
            wait_for_first_load=not scenario.first_load_counts)
        controller.draft_length = DraftLength(scenario.gamma, scenario.adaptive)
        for rows in range(1, scenario.gamma + 2):
            controller.draft_length.calibrate(rows, scenario.profile.verify(rows) / 1e3)
        controller.residency.set_capacity(scenario.cache_capacity)
        if self.store is not None:
            self.store.rates = load_rates(scenario, self.drafts)
        controller.reset()

    def answer(self, prompt_ids: list[int], text: str, max_new_tokens: int) -> list[Chunk]:
        """
        Answer a prompt on top of what is in memory.

        Raises MemSpecError, also where a draft could not be loaded: such a time
        says nothing.
        """
        controller = self.controller
        failures, chunks = controller.residency.counters.failures, []
        for chunk in controller.generate(PreparedRequest(
                prompt_ids, text, max_new_tokens, accepted_at=controller.clock())):
            chunks.append(chunk)
            if controller.residency.counters.failures > failures:
                failed = next(view for view in controller.residency.view()
                              if view.state is SlotState.FAILED)
                raise MemSpecError(f'draft {failed.id!r}: {failed.reason}')
        last = chunks[-1]
        if last.finish not in (Finish.STOP, Finish.LENGTH):
            raise MemSpecError(last.message or last.finish.value)
        return chunks


class RealRunner:
    """Answers on a Machine what a Replayer replays; the two are used alike."""

    def __init__(self, machine: Machine, header: TraceHeader, scenario: Scenario):
        self.machine, self.header, self.scenario = machine, header, scenario
        self.drafts = machine.drafts

    def converse(self, traces: Sequence[Trace], make: Callable[[RealWorld], Policy]
                 ) -> list[Outcome]:
        """
        Answer the turns of a conversation under a new policy, each as it was traced.

        Drafts stay in memory from turn to turn, and so does what a turn's prompt
        has in common with the text before it. Raises MemSpecError.
        """
        world = RealWorld(self, traces[0])
        self.machine.begin(make(world), self.scenario)
        outcomes = []
        for trace in traces:
            world.trace = trace
            chunks = self.machine.answer(trace.prompt_ids.tolist(), trace.prompt, world.limit)
            outcomes.append(Outcome(trace.key, trace.domain, _ids(chunks),
                                    [chunk.step for chunk in chunks if chunk.step],
                                    chunks[-1].stats))
        return outcomes


class RealWorld:
    """What oracle_dynamic looks at while the engine answers; as World of a replay."""

    def __init__(self, runner: RealRunner, trace: Trace):
        machine, scenario = runner.machine, runner.scenario
        self.header, self.trace, self.scenario = runner.header, trace, scenario
        self.drafts, self.ranker = machine.drafts, machine.ranker
        self.engine, self.residency = machine.controller.engine, machine.controller.residency
        self.limit = scenario.max_new_tokens
        self.load_ms = {spec.id: scenario.profile.load(spec, scenario.gamma)
                        for spec in machine.drafts if not KINDS[spec.kind].slot_free}

    @property
    def loader(self) -> RealWorld:
        """Says what is loaded, and for how long yet."""
        return self

    @property
    def loading(self) -> str | None:
        return self.residency.loading

    @property
    def remaining_ms(self) -> float:
        """Until the load in flight ends, 0 for none; from the bytes that have come."""
        draft = self.loading
        if draft is None:
            return 0.0
        view = next(view for view in self.residency.view() if view.id == draft)
        return self.load_ms[draft] * (1.0 - view.progress)

    @property
    def position(self) -> int:
        """Tokens of the output that are committed."""
        return max(0, len(self.engine.state.tokens) - len(self.trace.prompt_ids))


def _ids(chunks: Sequence[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


class EngineTracer(Tracer):
    """
    Traces of what the engine itself answers.

    In bfloat16 another way of running the target would soon write something else.
    """

    def __init__(self, runtime: Runtime, machine: Machine, scenario: Scenario, capacity: int,
                 max_new_tokens: int):
        super().__init__(runtime.bundle, runtime.target, machine.controller.stop_ids,
                         str(runtime.target.dtype).removeprefix('torch.'), capacity,
                         max_new_tokens, scenario.gamma, hidden_every=1)
        self._machine, self._scenario = machine, scenario

    def outputs(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """What it answers with the general draft."""
        outputs = []
        for prompt in prompts:
            self._machine.begin(GeneralStaticPolicy(self._machine.drafts), self._scenario)
            outputs.append(_ids(self._machine.answer(prompt, '', self.header.max_new_tokens)))
        return outputs

    def trace(self, prompt: TracePrompt, output: list[int], given: bool = True) -> Trace:
        return super().trace(prompt, output, given)


def load_rates(scenario: Scenario, drafts: Sequence[DraftSpec]) -> dict[str, float]:
    """Bytes per second at which a load takes what the profile's ratio says; {} without one."""
    profile = scenario.profile
    if profile.load_ratio is None:
        return {}
    return {spec.id: spec.bytes / max(1e-6, profile.load(spec, scenario.gamma) / 1e3)
            for spec in drafts if not KINDS[spec.kind].slot_free}


@contextmanager
def open_machine(bundle: str, options: RuntimeOptions, rounds: int = ROUNDS,
                 report: Callable[[str], None] = print, without: Sequence[str] = ()
                 ) -> Iterator[tuple[Runtime, Machine]]:
    """
    Open a bundle on storage that can be paced.

    rounds: of a measurement of its cost profile, of which ``report`` is told.
    without: drafts that are left out. Raises MemSpecError.
    """
    described = load_bundle(bundle or None, verify=False)
    for draft in without:
        if draft not in {spec.id for spec in described.drafts}:
            raise InvalidRequestError(f'--without {draft}: the bundle has no such draft')
    store = PacedStore(file_store(described, choose_device(options.device), options.storage))
    # Chains only, as in replays.
    options = replace(options, adaptive=False, max_branches=0, policy='memspec',
                      context=max(options.context, LEAST_CONTEXT))
    runtime = Runtime.open(bundle or None, options, store=store)
    try:
        drafts = [spec for spec in runtime.bundle.drafts if spec.id not in without]
        ranker = make_ranker(runtime.bundle.ranker, drafts, runtime.bundle, runtime.target)

        def measure() -> CostProfile:
            runtime.controller.policy = make_policy('memspec', drafts, ranker)
            runtime.controller.draft_length = DraftLength(options.max_gamma, adaptive=False)
            return measure_runtime(runtime, rounds, report)
        yield runtime, Machine(runtime.controller, drafts, ranker, measure, store)
    finally:
        runtime.close()


def check_load_ratio(profile: CostProfile, drafts: Sequence[DraftSpec], ratio: float | None,
                     gamma: int) -> None:
    """Refuse a ratio that this machine's storage is too slow for."""
    for spec in drafts if ratio is not None else ():
        if KINDS[spec.kind].slot_free:
            continue
        own = profile.load(spec, gamma) / profile.iteration(spec, gamma)
        if own > ratio:
            raise InvalidRequestError(
                f'a load of draft {spec.id!r} takes {own:.2f} iterations from this storage: '
                f'{ratio:g} cannot be had; take more, or 0 for what the storage has')
