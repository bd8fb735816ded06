# SPDX-License-Identifier: Apache-2.0
"""Policies run for real: on fakes that cost what a profile says, and on a tiny model."""

from dataclasses import replace
import json

from fakes import Bench, EOS, FakeDrafter, FakeKind, ScriptedLoader
import numpy as np
import pytest
from replay_maker import drafts_of, FixedRanker, profile_of, random_trace
from trace_maker import DRAFTS, header

from memspec_ros.bench.real import check_load_ratio, load_rates, Machine, RealRunner
from memspec_ros.bench.real_source import RealSource
from memspec_ros.bench.replay import Replayer, Scenario
from memspec_ros.bench.replay_source import answer, ReplaySource
from memspec_ros.bench.source import BASELINE, Contender, PLAIN, policy_names
from memspec_ros.bench.suites import SUITES
from memspec_ros.bench.suites.comparison import Bench as SuiteBench
from memspec_ros.bench.suites.policies import MARGIN, replay_over_real
from memspec_ros.cli import main
from memspec_ros.decoding.stats import TIME_SHARES
from memspec_ros.models.errors import InvalidRequestError, MemSpecError
from memspec_ros.runtime.drafting import Drafting
from memspec_ros.runtime.policies import POLICY_NAMES
from memspec_ros.runtime.residency import Residency
from memspec_ros.runtime.storage import PacedStore

# What steps and loads of the fakes take; loads end between iterations, ties would be chance.
PROFILE = profile_of(verify_ms=[100 + 10 * rows for rows in range(1, 6)], rank_ms=0,
                     overhead_ms=0, prefill_row_ms=(100 + 4 * 10) / 4, load_ms={'default': 703.37})
EXPECTED = {draft: 0.5 + 0.1 * index for index, draft in enumerate(DRAFTS)}
PROMPT = 5


def traces_of(count, tokens=40):
    """Of prompts that are told apart by their first token."""
    return [replace(random_trace(seed, tokens=tokens), prompt_ids=np.array(
        [200 + seed, 1, 2, 3, 4], np.int32)) for seed in range(count)]


class Keeping(FakeDrafter):
    """Keeps what it drafted and was accepted, as an independent model does."""

    drafted = 0

    def propose(self, state, gamma):
        proposal = super().propose(state, gamma)
        self.drafted = len(proposal.tokens)
        return proposal

    def update(self, state, accepted):
        if self.drafted:
            self.cached = min(self.cached + 1 + min(accepted, self.drafted - 1),
                              len(state.tokens) - 1)
        self.drafted = 0


class Moving(ScriptedLoader):
    """Whose bytes come evenly."""

    @property
    def bytes_read(self):
        if self.loading is None:
            return 0
        left = max(0.0, self._due - self.clock())
        return 1000 * (1.0 - left / (PROFILE.load_ms['default'] / 1e3))

    @bytes_read.setter
    def bytes_read(self, value):
        pass


class Stage:
    """A machine of fakes that answer the prompts of ``traces``, and the replay of the same."""

    def __init__(self, traces, decode_sec=0.0, outcome='ok', **scenario):
        self.traces = traces
        self.scenario = Scenario(PROFILE, **{'cache_capacity': 2, 'interval': 2, 'gamma': 3,
                                             'max_new_tokens': 40, **scenario})
        by_first = {int(trace.prompt_ids[0]): trace for trace in traces}

        def following(prefix):
            trace, place = by_first[prefix[0]], len(prefix) - PROMPT
            return trace, place, int(trace.output_ids[place]) if place < len(
                trace.output_ids) else EOS

        def drafter_of(index):
            def guess(prefix):
                trace, place, token = following(prefix)
                right = token != EOS and trace.ranks[index, place, 0] == 1
                return token if right else 250
            return lambda: Keeping(guess, step_sec=PROFILE.draft_step_ms['default'] / 1e3,
                                   row_sec=PROFILE.catch_up_row_ms['default'] / 1e3)
        bench = Bench({name: FakeKind(drafter_of(index)) for index, name in enumerate(DRAFTS)},
                      gamma=4, next_token=lambda prefix: following(prefix)[2], step_sec=0.1,
                      row_sec=0.01, decode_sec=decode_sec)
        bench.loader = Moving(bench.clock, {name: [(PROFILE.load_ms['default'] / 1e3, outcome)]
                                            for name in DRAFTS})
        bench.loader.may_wait = True
        bench.controller.residency = Residency(
            {name: (kind, 1000) for name, kind in bench.kinds.items()}, bench.loader, 2,
            bench.clock)
        bench.controller.drafting = Drafting(bench.engine, bench.controller.residency)
        self.bench, self.drafts = bench, drafts_of(kind='causal_lm')
        self.ranker, self.header = FixedRanker(EXPECTED), header(max_new_tokens=40)
        self.machine = Machine(bench.controller, self.drafts, self.ranker, lambda: PROFILE)
        self.replayer = Replayer(self.header, self.drafts, self.scenario, self.ranker)

    def answer(self, name, *traces, scenario=None, **options):
        """Outcomes of a conversation, or of the one prompt."""
        runner = RealRunner(self.machine, self.header, scenario or self.scenario)
        return answer(runner, traces, Contender(name, tuple(options.items())))

    def source(self, *conversations, **options):
        conversations = conversations or [[trace] for trace in self.traces]
        return RealSource(self.machine, conversations, self.header, self.scenario, self.ranker,
                          report=lambda line: None, **options)

    def replay(self, *conversations):
        """The source of replays of the same."""
        return ReplaySource(conversations or [[trace] for trace in self.traces], self.header,
                            self.drafts, self.scenario, self.ranker)

    def policies(self, runs=1, policies=(), **options):
        return SUITES['policies'].run(SuiteBench(self.source(**options), policies=policies,
                                                 runs=runs))


@pytest.fixture(scope='module')
def traces():
    return traces_of(4)


@pytest.mark.parametrize('first_load_counts', [False, True])
@pytest.mark.parametrize('name', [*POLICY_NAMES, 'oracle_static', 'oracle_dynamic'])
def test_what_is_run_is_what_is_replayed(traces, name, first_load_counts):
    stage = Stage(traces, first_load_counts=first_load_counts)
    for trace in traces:
        real, = stage.answer(name, trace)
        replayed, = answer(stage.replayer, [trace], Contender(name))
        assert (real.key, real.domain, real.ids) == (trace.key, trace.domain, replayed.ids)
        assert [(s.draft, s.desired, s.position, s.drafted, s.accepted) for s in real.steps] == [
            (s.draft, s.desired, s.position, s.drafted, s.accepted) for s in replayed.steps]
        assert real.stats.decode_sec == pytest.approx(replayed.stats.decode_sec, abs=1e-5)
        assert real.stats.loads == replayed.stats.loads


def test_the_first_load_is_waited_for_before_the_clock_starts(traces):
    waited, began = (Stage(traces, first_load_counts=counts).answer(
        BASELINE, traces[0])[0].stats for counts in (False, True))
    assert waited.prefill_sec == pytest.approx(0.703, abs=1e-3)
    assert began.prefill_sec < 0.2 and waited.fallback_sec == 0 < began.fallback_sec
    assert waited.loads == began.loads == 1


def test_every_prompt_begins_as_new(traces):
    """Cache, bandit and context state: no outcome depends on what was run before."""
    stage = Stage(traces)
    alone = {name: Stage(traces).answer(name, traces[1])[0] for name in POLICY_NAMES}
    for name in (*POLICY_NAMES, *reversed(POLICY_NAMES)):
        stage.answer(name, traces[0])
        again, = stage.answer(name, traces[1])
        assert [(s.draft, s.position, s.accepted) for s in again.steps] == [
            (s.draft, s.position, s.accepted) for s in alone[name].steps]
        assert again.stats.decode_sec == pytest.approx(alone[name].stats.decode_sec, abs=1e-6)


def test_drafts_stay_in_memory_from_turn_to_turn(traces):
    stage = Stage(traces)
    first, second = stage.answer(BASELINE, *traces[:2])
    assert (first.key, second.key) == (traces[0].key, traces[1].key)
    assert [outcome.stats.loads for outcome in (first, second)] == [1, 0]
    assert second.ids == traces[1].output_ids.tolist()
    replayed = answer(stage.replayer, traces[:2], Contender('oracle_dynamic'))
    for real, other in zip(stage.answer('oracle_dynamic', *traces[:2]), replayed):
        assert [(s.draft, s.accepted) for s in real.steps] == [
            (s.draft, s.accepted) for s in other.steps]


def test_one_draft_or_none(traces):
    stage = Stage(traces)
    plain, = stage.answer(PLAIN, traces[0])
    assert plain.stats.drafted == plain.stats.loads == 0 and len(plain.ids) == 40
    assert plain.stats.decode_sec == pytest.approx(40 * 0.11, abs=1e-6)
    alone = [stage.answer('static', traces[0], draft=draft)[0] for draft in DRAFTS]
    assert {step.draft for step in alone[1].steps if step.drafted} == {DRAFTS[1]}
    best, = stage.answer('oracle_static', traces[0])
    assert best.stats.tokens_per_sec == pytest.approx(
        max(outcome.stats.tokens_per_sec for outcome in alone))


def test_a_scenario_of_its_own(traces):
    stage = Stage(traces)
    short = replace(stage.scenario, max_new_tokens=7, gamma=1)
    outcome, = stage.answer('memspec', traces[0], scenario=short)
    assert len(outcome.ids) == 7 and max(step.drafted for step in outcome.steps) == 1
    assert len(stage.answer('memspec', traces[0])[0].ids) == 40


def test_what_cannot_be_run_is_said(traces):
    stage = Stage(traces, outcome='no such sector')
    with pytest.raises(MemSpecError, match="draft 'near': no such sector"):
        stage.answer(BASELINE, traces[0])
    stage = Stage(traces)
    stage.bench.target.fail = lambda: 1 / 0
    with pytest.raises(MemSpecError, match='ZeroDivisionError'):
        stage.answer('memspec', traces[0])


# --- pace ---

def test_storage_is_paced_so_that_a_load_takes_the_ratio():
    drafts = [replace(spec, bytes=1000 * (1 + index))
              for index, spec in enumerate(drafts_of(kind='causal_lm'))]
    scenario = Scenario(PROFILE.with_load_ratio(2.7), gamma=3)
    rates = load_rates(scenario, drafts)
    for spec in drafts:
        assert spec.bytes / rates[spec.id] == pytest.approx(
            2.7 * PROFILE.iteration(spec, 3) / 1e3)
    assert load_rates(Scenario(PROFILE), drafts) == {}


def test_the_store_is_paced_by_the_scenario(traces):
    stage = Stage(traces)
    stage.machine.store = store = PacedStore(None)
    for ratio in (2.7, 10.0, None):
        scenario = replace(stage.scenario, profile=PROFILE.with_load_ratio(ratio))
        stage.answer(PLAIN, traces[0], scenario=scenario)
        assert store.rates == load_rates(scenario, stage.drafts)


def test_a_ratio_that_storage_is_too_slow_for_is_refused():
    drafts = drafts_of(kind='causal_lm')
    check_load_ratio(PROFILE, drafts, 5.0, 3)
    check_load_ratio(PROFILE, drafts, None, 3)
    # 703 ms over three tokens of 10 ms and a verify of 140 ms.
    with pytest.raises(InvalidRequestError, match=r'takes 4\.14 iterations.*2\.7 cannot be had'):
        check_load_ratio(PROFILE, drafts, 2.7, 3)


# --- the source ---

@pytest.fixture(scope='module')
def result(traces):
    return Stage(traces).policies(runs=2)


def test_policies_has_the_figures_of_a_replay(result, traces):
    stage, found = Stage(traces), result.data
    replayed = SUITES['policies'].run(SuiteBench(stage.replay())).data
    # Without foresight is only what is replayed.
    assert set(found) == {*replayed, 'replay_over_real', 'outputs_differing_from_trace'} - {
        'blind'}
    assert found['mode'] == 'real' and found['deterministic'] is False and found['runs'] == 2
    assert found['scenario']['profile']['name'] == 'test'
    for name, rates in found['normalised'].items():
        assert rates['gmean'] == pytest.approx(replayed['normalised'][name]['gmean'], rel=1e-4)
        # The fakes' clock does the same twice.
        assert found['spread'][name] == pytest.approx((rates['gmean'],) * 2)
    for name, shares in found['breakdown'].items():
        assert set(shares) == set(TIME_SHARES) and sum(shares.values()) == pytest.approx(1), name
    assert found['loads'] == replayed['loads']
    assert not any(found['outputs_differing_from_trace'].values())
    json.dumps(found)
    text = result.text()
    assert 'oracle_dynamic' in text and 'they agree to 10.0 %' in text and '2 runs' in text


def test_of_the_bandits_the_best_variant_of_a_replay_is_run(result, traces):
    replayed = SUITES['policies'].run(SuiteBench(Stage(traces).replay())).data
    assert result.data['best_variant'] == replayed['best_variant']
    assert all(len(ways) == 1 for ways in result.data['variants'].values())
    assert 'the best of 10 in a replay' in result.text()
    every = Stage(traces[:1]).policies(policies=['ucb_async'], all_variants=True)
    assert len(every.data['variants']['ucb_async']) == 10
    assert 'the best of 10;' in every.text()


def test_replays_and_runs_agree_where_the_profile_is_right(result):
    check = result.data['replay_over_real']
    assert check['within'] and check['margin'] == MARGIN
    assert set(check['by_policy']) == set(policy_names()) - {'bound'}
    for name, ratio in check['by_policy'].items():
        assert ratio == pytest.approx(1, abs=1e-4), name


def test_they_do_not_where_an_iteration_takes_what_the_profile_does_not_know(traces):
    # Text is decoded at 100 ms an iteration.
    result = Stage(traces, decode_sec=0.05).policies(policies=['memspec', 'bound'])
    check = result.data['replay_over_real']
    assert check['gmean'] > 1.2 and not check['within']
    assert 'DO NOT AGREE' in result.text()
    # The bound is held against the baseline at the pace that it really has.
    expected = Stage(traces).policies(policies=['bound']).data['normalised']['bound']
    assert result.data['normalised']['bound'] == pytest.approx(expected, rel=0.05)


def test_agreement_is_of_medians_by_prompt():
    check = replay_over_real({'memspec': [{'a': 1e6, 'b': 1.0}, {'a': 1.1, 'b': 1.0},
                                          {'a': 1.1, 'b': 1.0}]})
    assert check['by_policy'] == {'memspec': pytest.approx(1.1 ** 0.5)} and check['within']
    assert not replay_over_real({'memspec': [{'a': 0.8}]})['within']


def test_a_machine_that_becomes_slower_is_measured_anew(traces):
    stage = Stage(traces[:2])
    slower = replace(PROFILE, verify_ms=[2 * value for value in PROFILE.verify_ms])

    def measure():  # before the second run everything has become twice as slow
        if not measured:
            measured.append(PROFILE)
            return PROFILE
        stage.bench.target.step_sec, stage.bench.target.row_sec = 0.2, 0.02
        return slower
    measured = []
    stage.machine.measure = measure
    result = stage.policies(runs=2, policies=['memspec'])
    assert result.data['replay_over_real']['gmean'] == pytest.approx(1, abs=0.02)
    # Where nothing is measured anew, that shows.
    stage.machine.measure = lambda: PROFILE
    result = stage.policies(policies=['memspec'])
    assert not result.data['replay_over_real']['within']


def test_contenders_take_turns_in_rotating_order(traces):
    stage, order = Stage(traces[:2]), []
    begin = stage.machine.begin
    stage.machine.begin = lambda policy, scenario: (order.append(type(policy).__name__),
                                                    begin(policy, scenario))
    stage.policies(runs=2, policies=['memspec'])
    turns = ['GeneralStaticPolicy', 'MemSpecPolicy', 'PlainPolicy']
    assert order == [*turns, *turns[1:], *turns[:1],
                     *turns[1:], *turns[:1], *turns[2:], *turns[:2]]


@pytest.mark.parametrize('suite', [name for name in SUITES if name != 'multiturn'])
def test_every_suite_runs_for_real(traces, suite):
    stage = Stage(traces[:2])
    values = {'interval': [2, 4], 'capacity': [1, 2], 'length': [8, 40]}.get(suite, [])
    bench = SuiteBench(stage.source(), policies=['memspec'], runs=1, values=values)
    result = SUITES[suite].run(bench)
    assert result.data['mode'] == 'real' and result.tables and result.charts
    if values:
        replayed = SUITES[suite].run(SuiteBench(
            stage.replay(), policies=['memspec'], values=values)).data
        for value, rates in result.data['normalised']['memspec'].items():
            assert rates['gmean'] == pytest.approx(
                replayed['normalised']['memspec'][value]['gmean'], rel=1e-3)


def test_conversations_are_run_turn_by_turn(traces):
    stage = Stage(traces)
    source = stage.source(traces[:2], traces[2:])
    assert source.prompts == {'turn 1': 2, 'turn 2': 2}
    result = SUITES['multiturn'].run(SuiteBench(None, source, runs=1))
    replayed = SUITES['multiturn'].run(SuiteBench(None, stage.replay(traces[:2], traces[2:]))).data
    for name, rates in result.data['normalised'].items():
        assert rates == pytest.approx(replayed['normalised'][name], rel=1e-4), name


# --- the command ---

@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / 'prompts.jsonl'
    file.write_text(''.join(json.dumps({'domain': domain, 'prompt': f'{domain} a b a b'}) + '\n'
                            for domain in ('general', 'code')))
    return file


def bench(suite, bundle, *more):
    return main(['bench', suite, '--mode', 'real', '--bundle', str(bundle), '--device', 'cpu',
                 '--dtype', 'float32', '--threads', '1', '--prompt-tokens', '60',
                 '--profile-rounds', '2', '--runs', '1', *more])


FEW = [option for draft in ('far', 'noise', 'feature', 'embedded')
       for option in ('--without', draft)]


def test_the_command_runs_a_bundle(full_bundle, prompts, tmp_path, capfd):
    file = tmp_path / 'real.json'
    assert bench('policies', full_bundle, '--prompts', str(prompts), '--max-new-tokens', '16',
                 '--load-ratio', '30', '--json', str(file), *FEW,
                 *(option for policy in ('memspec', 'oracle_static', 'oracle_dynamic', 'bound')
                   for option in ('--policy', policy))) == 0
    shown = capfd.readouterr().out
    assert 'real, profile measured, a load takes 30' in shown and 'replays by the' in shown
    result = json.loads(file.read_text())
    assert result['mode'] == 'real' and result['prompts'] == {'code': 1, 'general': 1}
    assert list(result['normalised']) == ['general_static', 'oracle_static', 'memspec',
                                          'oracle_dynamic', 'bound']
    assert result['scenario']['profile']['load_ratio'] == 30
    # In float32 the output does not depend on who drafts.
    assert not any(result['outputs_differing_from_trace'].values())
    assert result['drafts'] == ['near', 'top', 'lookup']
    assert result['loads']['memspec'] >= 2 and result['acceptance']['general_static']['gmean'] > 0
    assert result['replay_over_real']['gmean'] > 0
    for shares in result['breakdown'].values():
        assert sum(shares.values()) == pytest.approx(1)


def test_conversations_are_made_of_prompts(full_bundle, prompts, capfd):
    assert bench('multiturn', full_bundle, '--prompts', str(prompts), '--max-new-tokens', '8',
                 '--load-ratio', '0', '--policy', 'memspec', *FEW, '--json', '-') == 0
    result = json.loads(capfd.readouterr().out)
    assert result['mode'] == 'real' and result['prompts'] == {'turn 1': 1, 'turn 2': 1}
    assert result['normalised']['memspec']['gmean'] > 0 and result['best_static']


@pytest.mark.parametrize('arguments, words', [
    ([], '--mode real needs --prompts'), (['--traces', 'there'], 'and no --traces'),
    (['--profile', 'here'], '--profile is for replays'), (['--runs', '0'], '--runs is 0'),
    (['--profile-rounds', '1'], '--profile-rounds is 1'),
    (['--load-ratio', 'nan'], '--load-ratio is nan'),
    (['--max-new-tokens', '500'], 'the target was made for 512'),
    (['--without', 'other'], '--without other: the bundle has no such draft'),
    (['--prompts', '/no/prompts'], '/no/prompts'),
    (['--policy', 'best'], "policy 'best' is not known")])
def test_errors_are_one_line(full_bundle, prompts, capfd, arguments, words):
    file = [] if not arguments or arguments[0] == '--prompts' else ['--prompts', str(prompts)]
    assert bench('policies', full_bundle, '--load-ratio', '0', '--json', '-', *file,
                 *arguments) == 1
    # How far it was stands before it.
    error = capfd.readouterr().err.strip().splitlines()[-1]
    assert error.startswith('memspec bench: ') and words in error
