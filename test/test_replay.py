# SPDX-License-Identifier: Apache-2.0
"""Replay: the time and the tokens of tiny traces by hand, and what the real engine does."""

from dataclasses import replace

from fakes import Bench, FakeDrafter, FakeKind, scripted
from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
from replay_maker import (
    drafts_of,
    FixedRanker,
    profile_of,
    random_trace,
    replayer_of,
)
from trace_maker import DRAFTS, header, trace_of

from memspec_ros.bench.replay import Replayer, Scenario
from memspec_ros.bench.virtual import VirtualClock, VirtualLoader
from memspec_ros.models.bundle import load_bundle
from memspec_ros.models.errors import InvalidRequestError, MemSpecError
from memspec_ros.models.target_files import locate_target
from memspec_ros.runtime.policies import make_policy, Plan, Policy, POLICY_NAMES, StaticPolicy
from memspec_ros.runtime.requests import GenerationRequest
from memspec_ros.runtime.runtime import Runtime, RuntimeOptions
from memspec_ros.runtime.settings import Settings
from memspec_ros.training.traces import TracePrompt, Tracer

SHARES = ('desired', 'fallback', 'prediction', 'load_wait', 'catch_up', 'other')


def static(draft):
    return lambda world: StaticPolicy(draft)


def ms(outcome):
    """The shares in milliseconds, those of 0 left out."""
    stats = outcome.stats
    shares = {share: round(1e3 * getattr(stats, f'{share}_sec'), 6) for share in SHARES}
    # All of the clock's time is in them, and no more.
    assert sum(shares.values()) == pytest.approx(1e3 * (stats.total_sec - stats.prefill_sec))
    return {share: value for share, value in shares.items() if value}


# --- by hand ---

def test_a_draft_that_is_there_costs_its_steps_and_the_verify():
    # A right token at 0, 1, then one of the target's own, then three more.
    trace = trace_of('0a', [[1, 1, 0, 1, 1, 1]])
    outcome = replayer_of(['near']).run(trace, static('near'))
    assert outcome.ids == trace.output_ids.tolist() == [20, 21, 22, 23, 24, 25]
    assert [(s.position, s.drafted, s.accepted, s.emitted) for s in outcome.steps] == [
        (5, 2, 2, 3), (8, 2, 2, 3)]
    # Twice two draft steps and three rows; overhead twice.
    assert ms(outcome) == {'desired': 2 * (20 + 110), 'other': 4}
    # The clock of decoding began when the first load had ended.
    assert outcome.stats.prefill_sec == pytest.approx(0.3) and outcome.stats.loads == 1


def test_while_the_first_load_counts_decoding_is_plain():
    trace = trace_of('0a', [[1, 1, 1, 1, 1, 1, 0, 0]])
    outcome = replayer_of(['near'], first_load_counts=True).run(trace, static('near'))
    # 102 ms an iteration: the fourth one begins at 306, when the load of 300 has ended.
    assert [(s.draft, s.accepted, s.emitted) for s in outcome.steps] == [
        ('', 0, 1)] * 3 + [('near', 2, 3), ('near', 0, 1), ('near', 0, 1)]
    assert ms(outcome) == {'fallback': 300, 'desired': 3 * (20 + 110), 'other': 6 * 2}


def test_an_independent_draft_catches_up_row_by_row():
    trace = trace_of('0a', [[1, 1, 1, 1, 0, 1, 1, 1]])
    outcome = replayer_of(['near'], 'causal_lm').run(trace, static('near'))
    # The prompt but its last token; one row after a round that was accepted whole.
    assert [1e3 * step.t_catch_up for step in outcome.steps] == pytest.approx([4, 1, 0])
    assert [step.accepted for step in outcome.steps] == [2, 1, 2]
    assert ms(outcome) == {'catch_up': 5, 'desired': 3 * 130, 'other': 6}


def test_rankings_take_their_time_at_boundaries():
    trace = trace_of('0a', [[0] * 5])
    replayer = replayer_of(['near'], ranker=FixedRanker({'near': 0.5}))
    outcome = replayer.run(trace, lambda world: make_policy('memspec', world.drafts,
                                                            world.ranker))
    judged = round(5 + 10 / 6, 6)  # the draft has run its rows, and needs only the head
    assert [round(1e3 * step.t_predict, 6) for step in outcome.steps] == [
        5, 0, judged, 0, 5]
    assert ms(outcome)['prediction'] == pytest.approx(15 + 10 / 6)
    # The last token but one leaves room for nothing, where the answer is cut.
    cut = replace(replayer.scenario, max_new_tokens=5)
    steps = Replayer(replayer.header, replayer.drafts, cut).run(trace, static('near')).steps
    assert [step.drafted for step in steps] == [2, 2, 2, 1, 0]
    assert [step.drafted for step in outcome.steps] == [2] * 5


def test_a_policy_that_waits_pays_for_it():
    class Waiting(Policy):
        def plan(self, context):
            wanted = 'far' if context.position > 5 else 'near'
            return Plan([(wanted, 1.0)], wait=True, working_set=1, prefetch=False)

    trace = trace_of('0a', [[0] * 4, [1] * 4])
    outcome = replayer_of(['near', 'far']).run(trace, lambda world: Waiting())
    # At 264 ms, when two tokens are written, near gives way to far.
    assert [(s.draft, s.emitted) for s in outcome.steps] == [('near', 1)] * 2 + [('far', 2)]
    assert ms(outcome) == {'desired': 3 * 130, 'load_wait': 300, 'other': 6}


def test_rejected_beyond_the_end_and_cut_at_the_limit():
    trace = trace_of('0a', [[1] * 7])
    whole = replayer_of(['near'], gamma=4)
    assert [s.emitted for s in whole.run(trace, static('near')).steps] == [5, 2]
    cut = replayer_of(['near'], gamma=4, max_new_tokens=3)
    outcome = cut.run(trace, static('near'))
    assert [s.emitted for s in outcome.steps] == [3] and outcome.ids == [20, 21, 22]


def test_a_lookup_copies_at_its_own_cost():
    from memspec_ros.models.bundle import DraftSpec
    lookup = DraftSpec('lookup', 'prompt_lookup', '', 'Apache-2.0', 'none')
    output = np.array([7, 8, 9, 7, 8, 9, 7, 8, 9, 4], np.int32)
    trace = replace(trace_of('0a', [[0] * 10]), output_ids=output)
    scenario = Scenario(profile_of(draft_step_ms={'prompt_lookup': 1}), gamma=3)
    outcome = Replayer(header(['lookup']), [lookup], scenario).run(trace, static('lookup'))
    assert outcome.ids == output.tolist() and outcome.stats.loads == 0
    # 7 8 9 7 8: two tokens that stood there before; three are copied.
    assert [(s.drafted, s.accepted) for s in outcome.steps] == [(0, 0)] * 5 + [(3, 3), (3, 0)]
    assert ms(outcome) == {'desired': 5 * 100 + 2 * (3 + 115), 'other': 7 * 2}


# --- the exactness contract ---

class Rotating(Policy):
    """Wants another draft at every boundary."""

    def __init__(self, drafts):
        self._drafts, self._turn = list(drafts), 0

    def plan(self, context):
        self._turn += 1
        shift = self._turn % len(self._drafts)
        order = self._drafts[shift:] + self._drafts[:shift]
        return Plan([(draft, 0.9 - i / 10) for i, draft in enumerate(order)])


def test_the_real_engines_decisions_replay_to_the_same_tokens(full_bundle, target):
    texts = ['the red cube', 'def add(a, b): return a + b', 'a b a b a b a b', 'grüße 😀']
    gamma, limit = 5, 50
    bundle = load_bundle(full_bundle)
    locate_target(bundle)
    runtime = Runtime.open(full_bundle, RuntimeOptions(
        device='cpu', dtype='float32', context=200, max_gamma=gamma, adaptive=False,
        max_branches=0, settings=Settings(3, 2)))
    try:
        controller = runtime.controller
        tracer = Tracer(bundle, target, controller.stop_ids, 'float32', 200, limit, gamma)
        replayer = Replayer(tracer.header, bundle.drafts,
                            Scenario(profile_of(verify_ms=[1.0] * (gamma + 1)), gamma=gamma))
        used, accepted = set(), 0
        for text in texts:
            controller.policy = Rotating(tracer.header.drafts)
            request = runtime.prepare(GenerationRequest(text, max_new_tokens=limit))
            ids, steps = [], []
            for chunk in controller.generate(request):
                ids += chunk.token_ids
                steps.append(chunk.step)
                runtime._loader.wait(10.0)
            trace = tracer.trace(TracePrompt('code', text, request.prompt_ids), [])
            followed = replayer.follow(trace, [(s.draft, s.drafted) for s in steps if s])
            assert trace.output_ids.tolist() == ids
            assert [(s.position, s.drafted, s.accepted, s.emitted) for s in followed] == [
                (s.position, s.drafted, s.accepted, s.emitted) for s in steps if s]
            used |= {step.draft for step in steps if step and step.drafted}
            accepted += sum(step.accepted for step in steps if step)
        assert len(used) >= 4 and accepted > 20
    finally:
        runtime.close()


class Keeping(FakeDrafter):
    """Keeps what it drafted and was accepted, as an independent model does."""

    def propose(self, state, gamma):
        proposal = super().propose(state, gamma)
        self._drafted = len(proposal.tokens)
        return proposal

    def update(self, state, accepted):
        drafted, self._drafted = getattr(self, '_drafted', 0), 0
        if drafted:
            self.cached = min(self.cached + 1 + min(accepted, drafted - 1), len(state.tokens) - 1)


def over_fakes(trace, policy, scenario):
    """The real controller over fakes: costs are the profile's, what they say the trace's."""
    profile, prompt = scenario.profile, trace.prompt_ids.tolist()
    output = trace.output_ids.tolist()

    def drafter_of(index):
        def guess(prefix):
            place = len(prefix) - len(prompt)
            right = place < len(output) and trace.ranks[index, place, 0] == 1
            return output[place] if right else 250
        return lambda: Keeping(guess, step_sec=profile.draft_step_ms['default'] / 1e3,
                               row_sec=profile.catch_up_row_ms['default'] / 1e3)

    bench = Bench({name: FakeKind(drafter_of(index)) for index, name in enumerate(DRAFTS)},
                  scenario.cache_capacity, scenario.interval, scenario.gamma,
                  next_token=scripted(len(prompt), output), step_sec=0.1, row_sec=0.01,
                  script={name: [(profile.load_ms['default'] / 1e3, 'ok')] for name in DRAFTS})
    bench.loader.may_wait = True
    bench.controller.settings = Settings(scenario.cache_capacity, scenario.interval, copy=False)
    for rows in range(1, scenario.gamma + 2):
        bench.controller.draft_length.calibrate(rows, profile.verify(rows) / 1e3)
    bench.controller.policy = policy
    return bench.run(prompt, len(output), ignore_eos=True)


@given(st.sampled_from(('rotating', *POLICY_NAMES)), st.integers(0, 3), st.integers(1, 5),
       st.integers(1, 4), st.integers(0, 60), st.integers(0, 99))
@settings(max_examples=40)
def test_the_controller_over_fakes_and_the_replay_decide_alike(name, k, n, gamma, load, seed):
    trace = random_trace(seed, tokens=30)
    expected = {draft: 0.5 + 0.1 * index for index, draft in enumerate(DRAFTS)}
    # Loads that end between iterations: a tie would be decided by the last bit.
    profile = profile_of(verify_ms=[100 + 10 * rows for rows in range(1, 6)], rank_ms=0,
                         overhead_ms=0, prefill_row_ms=(100 + 4 * 10) / 4,
                         load_ms={'default': 20.0 * load + 3.37})
    scenario = Scenario(profile, k, n, gamma, 30, first_load_counts=True)

    def policy(ranker):
        return Rotating(DRAFTS) if name == 'rotating' else make_policy(
            name, drafts_of(kind='causal_lm'), ranker)
    replayer = Replayer(header(), drafts_of(kind='causal_lm'), scenario, FixedRanker(expected))
    outcome = replayer.run(trace, lambda world: policy(world.ranker))
    ids, _, last, chunks = over_fakes(trace, policy(FixedRanker(expected)), scenario)
    steps = [chunk.step for chunk in chunks]
    assert outcome.ids == ids
    assert [(s.draft, s.desired, s.position, s.drafted, s.accepted, s.emitted)
            for s in outcome.steps] == [
        (s.draft, s.desired, s.position, s.drafted, s.accepted, s.emitted) for s in steps]
    for mine, theirs in zip(outcome.steps, steps):
        assert mine.duration == pytest.approx(theirs.duration, abs=1e-6)
    assert outcome.stats.decode_sec == pytest.approx(last.stats.decode_sec, abs=1e-5)
    assert outcome.stats.loads == last.stats.loads


def test_a_replay_is_the_same_twice():
    trace, replayer = random_trace(4), replayer_of(ranker=FixedRanker(dict.fromkeys(DRAFTS, 0.5)))
    for name in POLICY_NAMES:
        first, second = (replayer.run(trace, lambda world, name=name: make_policy(
            name, world.drafts, world.ranker)) for _ in range(2))
        assert first == second


# --- what a ranker sees, and errors ---

def test_the_ranker_is_shown_the_latest_hidden_state_there_is():
    seen = []

    class Looking(Policy):
        def plan(self, context):
            seen.append(None if context.hidden is None else context.hidden.tolist())
            return Plan([])

    hidden = np.arange(6, dtype=np.float16)[:, None] * np.ones((1, 3), np.float16)
    trace = trace_of('0a', [[0] * 11], hidden=hidden)
    replayer = replayer_of(['near'], header_changes={'hidden_every': 2}, interval=3)
    replayer.run(trace, lambda world: Looking())
    # Not before the prefill; then at 0, 3, 6 and 9 tokens of output.
    assert seen == [None, [0.0] * 3, [1.0] * 3, [3.0] * 3, [4.0] * 3]
    seen.clear()
    replayer.run(replace(trace, hidden=None), lambda world: Looking())
    assert seen == [None] * 5


def test_loads_are_one_at_a_time_and_may_be_given_up():
    clock = VirtualClock()
    loader = VirtualLoader(clock, {'a': 10.0, 'b': 5.0})
    assert loader.poll() is None and loader.wait()
    loader.start('a')
    with pytest.raises(RuntimeError, match='a is being loaded'):
        loader.start('b')
    clock.advance(4)
    assert loader.poll() is None and loader.remaining_ms == 6
    assert not loader.wait(0.002) and loader.remaining_ms == 4
    assert loader.wait() and loader.poll().tensors == {} and loader.loading is None
    loader.start('b')
    loader.cancel()
    assert loader.poll().cancelled and clock() == 0.01


def test_traces_that_do_not_fit_are_refused():
    with pytest.raises(InvalidRequestError, match="no draft 'other'; they hold: near, far, top"):
        Replayer(header(), drafts_of(['near', 'other']), Scenario(profile_of()))
    with pytest.raises(InvalidRequestError, match='drafting 5 tokens: the traces hold 4'):
        Replayer(header(), drafts_of(), Scenario(profile_of(), gamma=5))
    for name, value in (('cache_capacity', -1), ('interval', 0), ('gamma', -1),
                        ('max_new_tokens', 0)):
        with pytest.raises(InvalidRequestError, match=f'{name} is {value}'):
            Scenario(profile_of(), **{name: value})
    with pytest.raises(InvalidRequestError, match='no output'):
        replayer_of().run(trace_of('0a', np.zeros((3, 0))), static('near'))


def test_a_policy_that_breaks_is_no_result():
    class Broken(Policy):
        def plan(self, context):
            raise KeyError('none')

    with pytest.raises(MemSpecError, match='replaying 0a: KeyError'):
        replayer_of().run(trace_of('0a', [[1] * 4] * 3), lambda world: Broken())
