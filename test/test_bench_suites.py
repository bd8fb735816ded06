# SPDX-License-Identifier: Apache-2.0
"""Suites: outcomes summed up beside the paper's figures, and the commands that show them."""

from dataclasses import replace
import json
import math
import sys

import numpy as np
import pytest
from replay_maker import drafts_of, FixedRanker, profile_of, random_trace, replayer_of
from trace_maker import DRAFTS, header, trace_of, write

from memspec_ros.bench.oracles import oracle_static, OracleDynamicPolicy
from memspec_ros.bench.profile import load_profile
from memspec_ros.bench.replay import Scenario, take_per_domain
from memspec_ros.bench.replay_source import ReplaySource
from memspec_ros.bench.source import BASELINE, policy_names
from memspec_ros.bench.suites import SUITES
from memspec_ros.bench.suites.base import Table
from memspec_ros.bench.suites.comparison import Bench
from memspec_ros.bench.suites.policies import shares
from memspec_ros.bench.suites.report import run_all
from memspec_ros.bench.suites.sums import geometric_mean
from memspec_ros.cli import main
from memspec_ros.models.errors import BundleError, InvalidRequestError
from memspec_ros.runtime.policies import POLICY_NAMES, StaticPolicy
from memspec_ros.training.conversations import pair
from memspec_ros.training.trace_store import TraceStore

TIME = ('desired', 'fallback', 'prediction', 'load_wait', 'catch_up', 'other')
RANKER = FixedRanker({'near': 0.4, 'far': 0.5, 'top': 0.6})


def source_of(conversations=None, drafts=DRAFTS, profile=None, ranker=RANKER, **scenario):
    conversations = conversations or [[random_trace(seed)] for seed in range(4)]
    return ReplaySource(conversations, header(drafts), drafts_of(drafts),
                        Scenario(profile_of(**(profile or {})), **{'gamma': 3, **scenario}),
                        ranker)


class Counting:
    """A source that says other things every time, as where time is measured, and counts."""

    deterministic = False

    def __init__(self, inner, faster):
        self._inner, self._faster = inner, list(faster)
        self.asked = []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def run(self, contenders, scenario):
        contenders = list(contenders)
        self.asked.append((len(contenders), scenario.interval))
        factor = self._faster.pop(0)
        for contender, outcome in self._inner.run(contenders, scenario):
            if contender.policy != BASELINE:
                stats = replace(outcome.stats, **{
                    f'{share}_sec': getattr(outcome.stats, f'{share}_sec') / factor
                    for share in TIME})
                outcome = replace(outcome, stats=stats)
            yield contender, outcome


# --- policies ---

@pytest.fixture(scope='module')
def result():
    return SUITES['policies'].run(Bench(source_of()))


def test_policies_compares_everything(result):
    data, names = result.data, set(policy_names())
    assert names == {*POLICY_NAMES, 'oracle_static', 'oracle_dynamic', 'bound'}
    assert set(data['normalised']) == names
    for name, rates in data['normalised'].items():
        assert set(rates) == {'domain0', 'domain1', 'gmean'}
        assert rates['gmean'] == pytest.approx(math.sqrt(rates['domain0'] * rates['domain1']))
        assert all(rates[key] <= data['normalised']['bound'][key] for key in rates), name
    assert set(data['normalised'][BASELINE].values()) == {1.0}
    assert data['normalised']['oracle_static']['gmean'] >= 1
    assert set(data['acceptance']) == set(data['breakdown']) == names - {'bound'}
    for name, time in data['breakdown'].items():
        assert set(time) == set(TIME)
        assert sum(time.values()) == pytest.approx(1) and min(time.values()) >= 0
        assert 0 <= data['acceptance'][name]['gmean'] <= 1
    speeds = data['tokens_per_sec'][BASELINE]
    assert data['plain'] == {place: pytest.approx(1e3 / 102 / speed)
                             for place, speed in speeds.items()}
    assert set(data['blind']) == {'domain0', 'domain1', 'gmean'}
    assert all(rate <= data['normalised']['bound'][place] for place, rate in data['blind'].items())
    assert data['breakdown']['memspec']['load_wait'] == 0
    assert data['breakdown']['ucb_sync']['load_wait'] > 0
    assert data['prompts'] == {'domain0': 2, 'domain1': 2}
    assert set(data['prompt_tokens_per_sec']['memspec']) == {'r0', 'r1', 'r2', 'r3'}
    assert data['runs'] == 1 and data['deterministic'] is True
    assert data['spread']['memspec'] == (data['normalised']['memspec']['gmean'],) * 2
    assert json.loads(json.dumps(data))['normalised'] == data['normalised']


def test_of_the_bandits_the_best_variant_is_reported(result):
    for name in ('ucb_sync', 'ucb_async'):
        ways = result.data['variants'][name]
        assert len(ways) == 10 and result.data['best_variant'][name] in ways
        assert max(ways.values()) == pytest.approx(result.data['normalised'][name]['gmean'])


def test_the_shares_are_those_of_the_room(result):
    gain = {name: rates['gmean'] for name, rates in result.data['normalised'].items()}
    found = result.data['shares']
    for key, least in (('room_over_general_static', 1.0),
                       ('room_over_ucb_async', gain['ucb_async'])):
        assert found[key] == pytest.approx(
            (gain['memspec'] - least) / (gain['oracle_dynamic'] - least))
    assert found['of_oracle_dynamic'] == gain['memspec'] / gain['oracle_dynamic']
    for name in ('fallback', 'prediction'):
        assert found[name] == result.data['breakdown']['memspec'][name]
    assert found['blind_of_oracle_dynamic'] == (
        result.data['blind']['gmean'] / gain['oracle_dynamic'])
    assert found['blind_room_over_general_static'] == pytest.approx(
        (result.data['blind']['gmean'] - 1) / (gain['oracle_dynamic'] - 1))
    assert shares({BASELINE: {'gmean': 1.0}, 'memspec': {'gmean': 1.2}, 'oracle_dynamic':
                   {'gmean': 1.0}}, {})['room_over_general_static'] is None
    assert set(shares({BASELINE: {'gmean': 1.0}}, {}).values()) == {None}


def test_the_tables_name_everything_and_the_paper(result):
    text = result.text()
    for word in (*policy_names(), *TIME, 'domain0', 'gmean', 'the best of 10', 'paper',
                 '1.588', '95.0 % to 97.0 %', 'deterministic'):
        assert word in text
    row = next(line for line in text.splitlines() if line.startswith('oracle_static'))
    assert row.endswith('1.225')


def test_with_no_slot_nothing_is_drafted_and_all_are_alike():
    result = SUITES['policies'].run(Bench(source_of(profile={'rank_ms': 0}, ranker=None,
                                                    cache_capacity=0)))
    for name, rates in result.data['normalised'].items():
        assert rates['gmean'] == pytest.approx(1) == result.data['plain']['gmean'], name
    assert set(result.data['acceptance']['memspec'].values()) == {None}
    assert result.data['shares']['room_over_general_static'] is None
    assert '-' in result.text()


def test_suites_say_what_they_cannot_do():
    with pytest.raises(InvalidRequestError, match="policy 'best' is not known; there are: gen"):
        Bench(source_of(), policies=['best'])
    with pytest.raises(InvalidRequestError, match='no traces to replay'):
        ReplaySource([], header(), drafts_of(), Scenario(profile_of()))
    first, *others = drafts_of()
    source = ReplaySource([[random_trace(0)]], header(), others, Scenario(profile_of()))
    with pytest.raises(BundleError, match='needs a draft of domain "general"'):
        SUITES['policies'].run(Bench(source))
    some = SUITES['policies'].run(Bench(source_of(), policies=['hedge']))
    assert list(some.data['normalised']) == [BASELINE, 'hedge']
    with pytest.raises(InvalidRequestError, match='no conversations'):
        SUITES['multiturn'].run(Bench(source_of()))


# --- runs ---

def test_where_runs_differ_the_geometric_mean_is_shown_and_the_spread():
    plain = Bench(source_of(), policies=['memspec']).compare([BASELINE, 'memspec'])
    once = plain.relative('memspec')['gmean']
    source = Counting(source_of(), [1.0, 2.0, 4.0])
    bench = Bench(source, policies=['memspec'], runs=3)
    compared = bench.compare([BASELINE, 'memspec'])
    assert compared.relative('memspec')['gmean'] == pytest.approx(2 * once)
    assert compared.spread('memspec') == (pytest.approx(once), pytest.approx(4 * once))
    assert sum(compared.breakdown('memspec').values()) == pytest.approx(1)
    assert source.asked == [(2, 4)] * 3 and '3 runs' in bench.note()


def test_nothing_is_run_twice():
    source = Counting(source_of(), [1.0] * 9)
    bench = Bench(source, runs=1)
    bench.compare([BASELINE, 'memspec'])
    bench.compare([BASELINE, 'memspec'], interval=source.scenario.interval)
    bench.compare([BASELINE, 'memspec', 'hedge'], interval=8)
    bench.compare([BASELINE, 'hedge'], drafts=['near'], interval=8)
    assert source.asked == [(2, 4), (3, 8), (1, 8)]


def test_a_run_with_a_spread_shows_it():
    source = Counting(source_of(), [1.0, 1.5])
    result = SUITES['policies'].run(Bench(source, policies=['memspec'], runs=2))
    low, high = result.data['spread']['memspec']
    assert f'{low:.3f} to {high:.3f}' in result.text() and high == pytest.approx(1.5 * low)


# --- the other suites ---

def test_a_load_is_held_against_an_iteration():
    source = source_of(profile={'load_ms': {'default': 300}, 'load_ratio': 2.0})
    result = SUITES['switch-cost'].run(Bench(source))
    near = result.data['drafts_ms']['near']
    assert near == {'draft': 'near', 'iteration_ms': 3 * 10 + 115 + 2, 'load_ms': 300,
                    'set_load_ms': 2 * 147}
    row = next(line for line in result.text().splitlines() if line.startswith('near'))
    assert row.split()[1:] == ['147.0', '300.0', '2.04', '294.0', '2.00', '2.70']


def test_acceptance_is_that_of_every_draft_alone():
    traces = [[trace_of('0a', [[0, 1, 1] * 8, [1] * 24, [0] * 24])]]
    result = SUITES['acceptance'].run(Bench(source_of(traces)))
    # near emits 1, then 3 (two of three accepted), and so on; far all it drafts.
    each = result.data['accepted_per_iteration']
    assert each['far']['general'] == pytest.approx(3) and each['top']['general'] == 0
    assert result.data['drafts_alone']['far']['general'] == pytest.approx(
        3 / each['near']['general'])
    assert result.data['drafts_alone']['near']['gmean'] == 1
    assert result.data['normalised']['oracle_static'] == result.data['drafts_alone']['far']
    assert result.data['normalised'][BASELINE]['gmean'] == 1 and '1.403' in result.text()


def test_the_breakdown_is_that_of_the_policies(result):
    found = SUITES['breakdown'].run(Bench(source_of()))
    assert found.data['breakdown'] == result.data['breakdown']
    assert '49.4 %' in found.text() and '< 5.5 %' in found.text()


@pytest.mark.parametrize('suite, field, values', [
    ('interval', 'interval', [1, 4]), ('capacity', 'cache_capacity', [1, 2]),
    ('length', 'max_new_tokens', [8, 32])])
def test_a_sweep_is_the_same_as_run_by_run(suite, field, values):
    bench = Bench(source_of(), policies=['memspec'], values=values)
    result = SUITES[suite].run(bench)
    for value in values:
        alone = Bench(source_of(**{field: value}), policies=['memspec'])
        expected = SUITES['policies'].run(alone).data['normalised']['memspec']
        assert result.data['normalised']['memspec'][str(value)] == expected
    best = result.data['best']['memspec']
    assert best in values and result.data['swept'] == field
    assert f' = {values[0]}' in result.text()


def test_sweeps_have_values_of_their_own_and_check_others():
    names = {'interval': [1, 2, 4, 8, 16], 'capacity': [1, 2, 3], 'length': [32, 64]}
    for suite, expected in names.items():
        assert SUITES[suite].run(Bench(source_of(), policies=['memspec'])
                                 ).data['values'] == expected
    for suite, value, words in (('interval', 0, 'at least 1'), ('length', 65, 'up to 64'),
                                ('capacity', -1, 'at least 0')):
        with pytest.raises(InvalidRequestError, match=words):
            SUITES[suite].run(Bench(source_of(), values=[value]))


def test_latency_counts_the_prefill_and_the_first_load():
    source = source_of(profile={'prefill_row_ms': 50, 'load_ratio': None})
    result = SUITES['latency'].run(Bench(source, policies=['memspec']))
    seconds = {key: result.data[key]['latency_sec'][BASELINE]['domain0']
               for key in ('paper_setting', 'node')}
    replayer = replayer_of(gamma=3, interval=4, profile_changes={'prefill_row_ms': 50})
    stats = [replayer.run(random_trace(seed), lambda world: StaticPolicy('near')).stats
             for seed in (0, 2)]
    # The load (300 ms) is longer than the prefill.
    assert seconds['paper_setting'] == pytest.approx(sum(s.decode_sec for s in stats) + 2 * 0.3)
    assert result.data['node']['first_token_sec'][BASELINE] < (
        result.data['paper_setting']['first_token_sec'][BASELINE])
    rates = result.data['node']['latency']['memspec']['gmean']
    assert result.data['node']['memspec'] == {BASELINE: pytest.approx(rates - 1)}
    assert '-32.3 %' in result.text()


def test_the_ranker_is_judged_at_boundaries():
    traces = [[trace_of('0a', [[1] * 24, [0] * 24, [0, 1] * 12], 'a')],
              [trace_of('0b', [[0] * 24, [1] * 24, [0, 1] * 12], 'b')]]
    result = SUITES['predictor'].run(Bench(source_of(
        traces, ranker=FixedRanker({'near': 0.9, 'far': 0.1, 'top': 0.5})), runs=2))
    found = result.data['rankers']
    # Right on the first prompt, second best on the other.
    assert found['bundle']['top1'] == 0.5 and found['bundle']['top2'] == 0.5
    assert found['ceiling']['top1'] == 1 and 0.3 < found['chance']['top1'] < 0.4
    assert found['bundle']['ms'] > 0 and len(found['bundle']['ms_spread']) == 2
    assert result.data['boundaries'] == 12 and '95.7 %' in result.text()
    with pytest.raises(InvalidRequestError, match='nothing to rank'):
        SUITES['predictor'].run(Bench(source_of(traces, ranker=None)))


# --- conversations ---

def conversation(second=(0, 1, 0)):
    """In the first turn near is always right, in the second those of ``second``."""
    one = trace_of('0a', [[1] * 30, [0] * 30, [0] * 30], 'a')
    two = trace_of('0b', [[right] * 30 for right in second], 'b')
    said = [*one.prompt_ids.tolist(), *one.output_ids.tolist(), 7, 8]
    return [one, replace(two, prompt_ids=np.array(said, np.int32))]


def test_drafts_and_prompt_stay_from_turn_to_turn():
    turns = conversation((1, 0, 0))
    replayer = replayer_of(profile_changes={'prefill_row_ms': 10}, first_load_counts=True)
    first, second = replayer.converse(turns, lambda world: StaticPolicy('near'))
    assert first == replayer.run(turns[0], lambda world: StaticPolicy('near'))
    assert [outcome.stats.loads for outcome in (first, second)] == [1, 0]
    # Of 37 positions 34 were held, and the last one is run with the first iteration.
    assert second.stats.prefill_sec == pytest.approx(0.020)
    assert first.stats.prefill_sec == pytest.approx(0.040)
    assert second.ids == turns[1].output_ids.tolist()
    assert {step.draft for step in second.steps} == {'near'} and second.stats.accepted == 20


def test_the_oracles_see_the_turn_that_is_answered():
    replayer = replayer_of(first_load_counts=True)
    turns = conversation()
    outcomes = replayer.converse(turns, OracleDynamicPolicy)
    used = [[step.draft for step in outcome.steps] for outcome in outcomes]
    assert used[0][-1] == 'near' and used[1][-1] == 'far'
    best = oracle_static(replayer, turns)
    assert len({step.draft for outcome in best for step in outcome.steps} - {''}) == 1
    assert sum(outcome.stats.decode_sec for outcome in outcomes) < sum(
        outcome.stats.decode_sec for outcome in best)


def test_multiturn_holds_choices_against_the_best_single_draft():
    source = source_of([conversation()] * 2 + [conversation((0, 0, 1))])
    assert source.prompts == {'turn 1': 3, 'turn 2': 3} and 'bound' not in source.policies
    result = SUITES['multiturn'].run(Bench(None, source))
    rates = result.data['normalised']
    assert set(rates['memspec']) == {'turn 1', 'turn 2', 'gmean'}
    assert result.data['best_static'] in DRAFTS
    best = result.data['drafts_alone'][result.data['best_static']]['gmean']
    assert rates['oracle_dynamic']['gmean'] > best >= 1
    assert 'best static' in result.text() and '3 conversations' in result.text()


def test_prompts_make_conversations_that_change_domain():
    prompts = [(domain, f'{domain}{number}') for domain in 'abc' for number in range(3)]
    made = pair([*prompts, ('a', 'a3')])
    assert [each.turns for each in made] == [('a0', 'b0'), ('b1', 'c1'), ('c2', 'a2')]
    assert all(each.domains == tuple(turn[0] for turn in each.turns) for each in made)
    assert pair([('a', 'one'), ('a', 'two')]) == pair([]) == []


# --- the commands ---

@pytest.fixture(scope='module')
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp('prompts') / 'prompts.jsonl'
    path.write_text(''.join(json.dumps({'domain': domain, 'prompt': f'{domain} {i} a b a b'})
                            + '\n' for i in range(2) for domain in ('general', 'code')))
    return path


@pytest.fixture(scope='module')
def traced(full_bundle, prompts, tmp_path_factory):
    """Traces of the bundle with a draft of every kind."""
    root = tmp_path_factory.mktemp('traced')
    assert main(['trace', '--bundle', str(full_bundle), '--prompts', str(prompts), '--out',
                 str(root / 'out'), '--max-new-tokens', '16', '--gamma', '4', '--threads', '1',
                 '--device', 'cpu', '--json', str(root / 'figures.json')]) == 0
    return root / 'out'


def bench(suite, bundle, *more):
    return main(['bench', suite, '--bundle', str(bundle), *map(str, more)])


def policies(bundle, traces, *more):
    return bench('policies', bundle, '--traces', traces, *more)


def test_the_command_prints_a_table_and_writes_json(full_bundle, traced, tmp_path, capfd):
    file = tmp_path / 'policies.json'
    assert policies(full_bundle, traced, '--mode', 'replay', '--json', file) == 0
    shown = capfd.readouterr().out
    assert 'jetson_orin_nano' in shown and 'oracle_dynamic' in shown
    result = json.loads(file.read_text())
    assert set(result['normalised']) == set(policy_names())
    assert result['scenario']['profile']['load_ratio'] == 2.7
    assert policies(full_bundle, traced, '--json', '-') == 0
    assert json.loads(capfd.readouterr().out) == result
    assert policies(full_bundle, traced, '--json', '-', '--policy', 'memspec', '--k', '1', '--n',
                    '2', '--gamma', '3', '--load-ratio', '0', '--prompts-per-domain', '1',
                    '--without', 'lookup', '--profile', 'jetson_agx_orin') == 0
    result = json.loads(capfd.readouterr().out)
    assert result['scenario']['profile']['load_ratio'] is None and 'lookup' not in result['drafts']
    assert result['prompts'] == {'code': 1, 'general': 1}
    assert list(result['normalised']) == [BASELINE, 'memspec']


@pytest.mark.parametrize('suite', [name for name in SUITES if name != 'multiturn'])
def test_every_suite_is_a_command(full_bundle, traced, capfd, suite):
    assert bench(suite, full_bundle, '--traces', traced, '--policy', 'memspec', '--runs', '1',
                 '--prompts-per-domain', '1') == 0
    shown = capfd.readouterr().out
    assert 'replay, profile jetson_orin_nano' in shown and 'paper' in shown


def test_all_traces_the_prompts_and_writes_a_report(full_bundle, prompts, tmp_path, capfd,
                                                    monkeypatch):
    pytest.importorskip('matplotlib')
    monkeypatch.setattr('memspec_ros.bench.suites.length.VALUES', (8, 16))
    out = tmp_path / 'out'
    command = ['--prompts', prompts, '--out', out, '--json', tmp_path / 'all.json', '--policy',
               'memspec', '--threads', '1', '--device', 'cpu', '--max-new-tokens', '12',
               '--prompt-tokens', '60', '--k', '1']
    assert bench('all', full_bundle, *command) == 0
    printed, progress = capfd.readouterr()
    report = (out / 'report.md').read_text()
    data = json.loads((tmp_path / 'all.json').read_text())
    assert set(data['suites']) == set(SUITES) and data['environment']['torch']
    for name in SUITES:
        assert f'## {name} (' in report and name in progress
    for word in (data['prompts_sha256'], data['bundle'], 'seeds', 'Python', 'cores'):
        assert word in report
    pictures = {path.name for path in out.glob('*.png')}
    assert pictures == {line.split('(')[-1].rstrip(')') for line in report.splitlines()
                        if line.startswith('![')} and len(pictures) == len(SUITES) + 1
    assert all((out / name).read_bytes()[:4] == b'\x89PNG' for name in pictures)
    assert 'written' in printed
    # The traces are found again.
    stores = list((out / 'traces').iterdir())
    assert sorted((store / 'conversations.json').exists() for store in stores) == [False, True]
    before = {file: file.stat().st_mtime_ns for store in stores for file in store.glob('*.npz')}
    assert bench('length', full_bundle, *command) == 0
    assert list((out / 'traces').iterdir()) == stores
    assert before == {file: file.stat().st_mtime_ns for file in before}


def test_all_leaves_out_what_the_prompts_cannot_serve():
    said = []
    results = run_all(Bench(source_of(ranker=None)), {
        name: SUITES[name] for name in ('switch-cost', 'predictor', 'multiturn')}, said.append)
    assert list(results) == ['switch-cost']
    assert any('predictor: left out, there is nothing to rank' in line for line in said)
    assert any('multiturn: left out, there are no conversations' in line for line in said)


def test_conversations_of_a_file_are_traced_and_replayed(full_bundle, tmp_path, capfd,
                                                         monkeypatch):
    monkeypatch.setenv('MEMSPEC_CACHE', str(tmp_path / 'cache'))
    file = tmp_path / 'turns.jsonl'
    file.write_text(''.join(json.dumps({'id': str(n), 'domain': 'general', 'source': 'own',
                                        'turns': [f'say {n}', 'again', 'and again'][:2 + n]})
                            + '\n' for n in range(2)))
    assert bench('multiturn', full_bundle, '--prompts', file, '--device', 'cpu', '--threads', '1',
                 '--max-new-tokens', '12', '--prompt-tokens', '60', '--json', '-') == 0
    data = json.loads(capfd.readouterr().out)
    assert data['prompts'] == {'turn 1': 2, 'turn 2': 2, 'turn 3': 1}
    store = next((tmp_path / 'cache' / 'traces').glob('conversations-*'))
    index = json.loads((store / 'conversations.json').read_text())
    one, two = (TraceStore(store).read(key) for key in index[0])
    begun = len(one.prompt_ids)
    # What was said before, and more than the turn's own template around it.
    assert two.prompt_ids[:begun].tolist() == one.prompt_ids.tolist()
    assert two.prompt == 'again' and len(two.prompt_ids) > begun + len(one.output_ids)
    assert bench('multiturn', full_bundle, '--traces', store, '--max-new-tokens', '12', '--json',
                 '-') == 0
    assert json.loads(capfd.readouterr().out) == data
    # Other suites want prompts.
    assert bench('policies', full_bundle, '--prompts', file) == 1
    assert '--prompts: no prompt' in capfd.readouterr().err


@pytest.mark.parametrize('text, words', [
    ('{"turns": []}', 'line 1'), ('{"turns": ["a", 1], "domain": "x"}', 'list of strings'),
    ('{"turns": ["a"], "domain": "x"}\n[', 'line 2'),
    ('{"prompt": "a", "domain": "x"}', 'at least two domains')])
def test_malformed_conversations_are_named(full_bundle, tmp_path, capfd, text, words):
    file = tmp_path / 'turns.jsonl'
    file.write_text(text)
    assert bench('multiturn', full_bundle, '--prompts', file, '--device', 'cpu',
                 '--max-new-tokens', '4', '--prompt-tokens', '60') == 1
    error = capfd.readouterr().err.strip()
    assert words in error and '\n' not in error


@pytest.mark.parametrize('arguments, words', [
    (['--k', '-1'], '--k is -1'), (['--n', '0'], '--n is 0'), (['--gamma', '0'], '--gamma is 0'),
    (['--gamma', '5'], 'drafting 5 tokens: the traces hold 4'),
    (['--load-ratio', '-2'], '--load-ratio is -2'), (['--load-ratio', 'nan'], '--load-ratio is'),
    (['--max-new-tokens', '0'], '--max-new-tokens is 0'), (['--runs', '0'], '--runs is 0'),
    (['--profile', '/no/profile'], 'profile /no/profile: No such file'),
    (['--policy', 'best'], "policy 'best' is not known"),
    (['--without', 'other'], '--without other: the traces hold no such draft'),
    (['--traces', '/no/traces'], '/no/traces/traces.json'),
    (['--prompts', '/no/prompts'], 'either --prompts or --traces'),
    (['--bundle', '/no/bundle'], '/no/bundle')])
def test_errors_are_one_line(full_bundle, traced, capfd, arguments, words):
    assert policies(full_bundle, traced, *arguments) == 1
    error = capfd.readouterr().err.strip()
    assert error.startswith('memspec bench: ') and words in error and '\n' not in error


def test_what_is_missing_is_said_before_anything_is_run(full_bundle, traced, tmp_path, capfd,
                                                        monkeypatch):
    assert bench('policies', full_bundle) == 1
    assert 'either --prompts or --traces' in capfd.readouterr().err
    assert bench('multiturn', full_bundle, '--traces', traced) == 1
    assert 'conversations.json' in capfd.readouterr().err
    assert bench('all', full_bundle, '--traces', traced) == 1
    assert '--out DIR' in capfd.readouterr().err
    (tmp_path / 'file').write_text('')
    monkeypatch.setattr('memspec_ros.bench.plotting.check_plotting', lambda: None)
    assert policies(full_bundle, traced, '--out', tmp_path / 'file') == 1
    assert '--out' in capfd.readouterr().err
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    assert policies(full_bundle, traced, '--out', tmp_path / 'out') == 1
    shown = capfd.readouterr()
    assert "extra 'plots'" in shown.err and not shown.out


def test_traces_of_another_kind_are_not_mixed(full_bundle, traced, tmp_path, capfd):
    other = write(tmp_path, [])
    assert policies(full_bundle, traced, '--traces', other) == 1
    assert 'were not made like those of' in capfd.readouterr().err


def test_this_machine_is_measured_and_the_profile_used(full_bundle, traced, tmp_path, capfd):
    file = tmp_path / 'profile.json'
    assert main(['bench', 'profile', '--bundle', str(full_bundle), '--device', 'cpu', '--dtype',
                 'float32', '--threads', '1', '--context', '200', '--draft-tokens', '4',
                 '--rounds', '3', '--json', str(file)]) == 0
    assert 'catch-up' in capfd.readouterr().out
    profile = load_profile(str(file))
    assert len(profile.verify_ms) == 5 and min(profile.verify_ms) > 0
    assert set(profile.draft_step_ms) == set(profile.catch_up_row_ms) > set(profile.load_ms)
    assert profile.catch_up_row_ms['near'] > 0 and profile.rank_ms > 0
    assert policies(full_bundle, traced, '--profile', str(file), '--json', '-') == 0
    assert json.loads(capfd.readouterr().out)['scenario']['profile']['about']['rounds'] == 3
    for wrong, words in ((['--rounds', '1'], '1 rounds'), (['--draft-tokens', '0'], 'at least')):
        assert main(['bench', 'profile', '--bundle', str(full_bundle), *wrong]) == 1
        assert words in capfd.readouterr().err


def test_means_choices_and_tables():
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4)
    assert geometric_mean([]) is geometric_mean([1.0, 0.0]) is geometric_mean([None]) is None
    traces = [random_trace(seed) for seed in range(5)]
    assert [trace.key for trace in take_per_domain(traces, 1)] == ['r0', 'r1']
    assert take_per_domain(traces, 0) == traces
    table = Table('title', ['a|b', 'c'], [['one', '1', '22'], ['three', '', '4']], 'note')
    assert table.text() == 'title\n       a|b   c\none      1  22\nthree        4\nnote'
    assert table.markdown() == ('**title**\n\n|  | a\\|b | c |\n| --- | ---: | ---: |\n'
                                '| one | 1 | 22 |\n| three |  | 4 |\n\nnote')
