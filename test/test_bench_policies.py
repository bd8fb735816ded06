# SPDX-License-Identifier: Apache-2.0
"""Cost profiles, oracles and the bound."""

from functools import cache
import json
import math

import pytest
from replay_maker import drafts_of, FixedRanker, profile_of, random_trace, replayer_of
from trace_maker import DRAFTS, trace_of

from memspec_ros.bench.bound import bound, least_ms
from memspec_ros.bench.oracles import BlindOraclePolicy, oracle_static, OracleDynamicPolicy
from memspec_ros.bench.profile import load_profile, profile_names, ProfileError
from memspec_ros.bench.replay_source import answer
from memspec_ros.bench.source import BOUND, policy_names, variants
from memspec_ros.bench.trace_costs import PLAIN, TraceCosts
from memspec_ros.runtime.policies import StaticPolicy

# Nanoseconds of the clock are whole, milliseconds of the bound are not.
CLOSE = 1e-6


# --- profiles ---

def test_what_differs_between_drafts_goes_by_id_then_kind_then_default():
    near, far, top = drafts_of()
    profile = profile_of(draft_step_ms={'near': 1, 'shared_layers': 2},
                         catch_up_row_ms={'default': 3}, load_ms={'far': 7},
                         load_mb_per_sec=0.5, load_latency_ms=4)
    assert [profile.draft_step(spec) for spec in (near, far, top)] == [1, 2, 2]
    assert profile.catch_up_row(near) == 3
    assert profile.iteration(far, 3) == 3 * 2 + 115 + 2
    # 1000 bytes at half a megabyte a second.
    assert profile.load(far, 3) == 7 and profile.load(near, 3) == 4 + 2
    assert profile.with_load_ratio(2).load(far, 3) == 2 * (6 + 115 + 2)
    assert profile_of(load_ms={}).load(far, 2) == pytest.approx(2.7 * (20 + 110 + 2))


def test_a_profile_is_read_back(tmp_path):
    path = tmp_path / 'p.json'
    path.write_text(json.dumps(profile_of(load_ratio=1.5).as_dict()))
    profile = load_profile(str(path))
    assert profile.name == str(path) and profile.verify(5) == 120 and profile.load_ratio == 1.5


@pytest.mark.parametrize('text, words', [
    ('', 'not JSON'), ('[' * 100000, 'not JSON'), ('[]', 'expected a mapping, got list'),
    ('{}', 'verify_ms is missing'), ('{"verify_ms": [1]}', 'draft_step_ms is missing')])
def test_a_malformed_file_is_named(tmp_path, text, words):
    path = tmp_path / 'mine.json'
    path.write_text(text)
    with pytest.raises(ProfileError, match=f'mine.json: {words}'):
        load_profile(str(path))


@pytest.mark.parametrize('changes, words', [
    ({'verify_ms': []}, 'verify_ms: expected a list'),
    ({'verify_ms': 3}, 'verify_ms: expected a list'),
    ({'verify_ms': [1, 0]}, 'verify_ms of 2 rows: is 0, expected a positive number'),
    ({'verify_ms': [1, '2']}, 'verify_ms of 2 rows'),
    ({'draft_step_ms': 3}, 'draft_step_ms: expected a mapping'),
    ({'draft_step_ms': {'near': -1}}, "draft_step_ms of 'near': is -1"),
    ({'load_ms': {'near': math.inf}}, "load_ms of 'near': is inf"),
    ({'rank_ms': math.nan}, 'rank_ms: is nan'), ({'rank_ms': True}, 'rank_ms: is True'),
    ({'overhead_ms': None}, 'overhead_ms: is None'), ({'load_ratio': 'x'}, "load_ratio: is 'x'"),
    ({'about': 'me'}, 'about: expected a mapping')])
def test_a_malformed_profile_names_the_field(tmp_path, changes, words):
    path = tmp_path / 'mine.json'
    path.write_text(json.dumps({**profile_of().as_dict(), **changes}))
    with pytest.raises(ProfileError, match=f'mine.json: {words}'):
        load_profile(str(path))


def test_unknown_names_and_keys_are_errors(tmp_path):
    with pytest.raises(ProfileError, match='profile jetson: No such file.*jetson_orin_nano'):
        load_profile('jetson')
    path = tmp_path / 'mine.json'
    path.write_text(json.dumps({**profile_of().as_dict(), 'verifyms': 1}))
    with pytest.raises(ProfileError, match="unknown key 'verifyms'"):
        load_profile(str(path))
    near = drafts_of()[0]
    with pytest.raises(ProfileError, match="has neither draft 'near' nor its kind"):
        profile_of(draft_step_ms={}).draft_step(near)
    with pytest.raises(ProfileError, match='holds up to 5 rows, 6 are needed'):
        profile_of().verify(6)


@pytest.mark.parametrize('name', profile_names())
def test_profiles_of_boards_are_what_their_derivation_says(name):
    profile = load_profile(name)
    given = profile.about['inputs']
    bandwidth = given['bandwidth_gb_per_sec'] * 1e6 * given['bandwidth_share']  # bytes a ms
    compute = given['dense_fp16_tflops'] * 1e9 * given['compute_share']
    read, row = (given['target_bytes'] / bandwidth, 2 * given['target_parameters'] / compute)
    assert profile.verify_ms == pytest.approx([read + row * n for n in range(1, 10)], abs=1e-3)
    table = profile.draft_step_ms
    assert table['default'] == pytest.approx(given['draft_bytes'] / bandwidth, abs=1e-3)
    for kind in ('shared_layers', 'feature'):
        assert table[kind] == pytest.approx(read * given[f'{kind}_share'], abs=1e-3)
    assert profile.catch_up_row_ms['default'] == pytest.approx(
        2 * given['draft_parameters'] / compute, abs=1e-3)
    assert profile.load_ms['default'] == pytest.approx(
        given['draft_bytes'] / (given['nvme_gb_per_sec'] * 1e6 * given['storage_share']), abs=1e-2)
    assert set(profile.about) >= {'board', 'sources', 'derivation'}


def test_the_boards_are_there():
    assert {'jetson_orin_nano', 'jetson_agx_orin'} <= set(profile_names())


# --- oracles ---

SWITCHING = [[1] * 12 + [0] * 12, [0] * 12 + [1] * 12, [0, 1] * 12]


def test_the_static_oracle_is_the_best_draft_of_the_prompt():
    replayer = replayer_of()
    trace = trace_of('0a', [[0, 1] * 8, [1] * 16, [0] * 16])
    outcome = oracle_static(replayer, [trace])[0]
    assert {step.draft for step in outcome.steps} == {'far'}
    speeds = [replayer.run(trace, lambda world, draft=draft: StaticPolicy(draft))
              .stats.tokens_per_sec for draft in DRAFTS]
    assert outcome.stats.tokens_per_sec == max(speeds) == speeds[1]


@pytest.mark.parametrize('k', [1, 2, 3])
def test_the_dynamic_oracle_changes_drafts_when_the_text_does(k):
    replayer, trace = replayer_of(cache_capacity=k), trace_of('0a', SWITCHING)
    outcome = replayer.run(trace, OracleDynamicPolicy)
    best = oracle_static(replayer, [trace])[0]
    assert outcome.stats.tokens_per_sec > best.stats.tokens_per_sec
    used = [step.draft for step in outcome.steps]
    assert used[0] == 'near' and used[-1] == 'far'
    if k > 1:  # it was there in time
        assert 'far' in [step.draft for step in outcome.steps if step.position - 5 <= 15]


def test_with_one_slot_it_stays_where_a_load_does_not_pay():
    trace = trace_of('0a', SWITCHING)
    replayer = replayer_of(cache_capacity=1, profile_changes={'load_ms': {'default': 9000}})
    outcome = replayer.run(trace, OracleDynamicPolicy)
    assert outcome.stats.loads == 1


def test_the_blind_oracle_does_not_see_the_coming_interval():
    trace = trace_of('0a', [[0] * 5 + [1] * 19, [1] * 5 + [0] * 19, [0] * 24])
    sees, blind = ([step.draft for step in replayer_of().run(trace, policy).steps]
                   for policy in (OracleDynamicPolicy, BlindOraclePolicy))
    assert sees[0] == 'far' and blind[0] == 'near'
    assert sees[-1] == blind[-1] == 'near'


def test_what_is_around_a_position_leaves_out_the_coming_interval():
    replayer, trace = replayer_of(['near'], gamma=2), trace_of('0a', [[1, 1, 0, 1, 1, 1]])
    costs = TraceCosts(replayer.world(trace))
    # Tokens from 0 to 5 on: 3, 2, 1, 3, 2, 1. An iteration at 1 or 2 tells of the token at 3.
    assert costs.around('near', 3, 1, 2) == pytest.approx(3 / 132)
    assert costs.around('near', 0, 1, 1) == pytest.approx(3 / 132)
    assert costs.around('near', 6, 1, 2) == pytest.approx((1 + 3) / 264)
    assert costs.around('near', 0, 2, 9) == 0


def test_an_oracle_knows_what_iterations_emit_and_cost():
    replayer, trace = replayer_of(['near'], gamma=2), trace_of('0a', [[1, 1, 0, 1, 1, 1]])
    costs = TraceCosts(replayer.world(trace))
    assert costs.interval('near', 0, 1) == pytest.approx(3 / 132)
    assert costs.interval('near', 0, 2, 36) == pytest.approx(6 / 300)
    assert costs.interval(PLAIN, 4, 9) == pytest.approx(2 / 204)
    assert costs.interval('near', 6, 2) == 0
    assert costs.after('near', 0, 1, 1) == 3 and costs.after('near', 0, 133, 1) == 6
    assert costs.after(PLAIN, 0, 1, 4) == 4 and costs.after(PLAIN, 2, 0, 4) == 2
    assert costs.bridged(PLAIN, 0, 103) == (2, 204)
    assert costs.to_the_end('near', 0) == 264
    assert costs.choices('near', 0) == [(2, 10 + 105 + 2), (3, 20 + 110 + 2)]
    assert costs.choices('near', 2) == [(1, 10 + 105 + 2)]
    assert costs.choices(PLAIN, 2) == [(1, 102)]


# --- the bound ---

def best_by_search(replayer, trace):
    """The least milliseconds by trying everything; load times are exact."""
    world = replayer.world(trace)
    costs, capacity = TraceCosts(world), replayer.scenario.cache_capacity
    drafts = list(world.load_ms)

    @cache
    def least(position, there, loading, remaining, waits=0):
        """``waits``: how often it was waited for a load here; twice is never of use."""
        if position >= costs.length:
            return 0.0
        if loading and remaining <= 1e-9:
            return least(position, there | {loading}, '', 0.0, waits)
        ways = [iterate(position, there, loading, remaining)]
        if loading:
            if waits < 2:
                ways.append(remaining + least(position, there | {loading}, '', 0.0, waits + 1))
            return min(ways)
        for draft in set(drafts) - there:
            for kept in (there, *(there - {out} for out in there)):
                if len(kept) < capacity and waits < 2:
                    ways.append(least(position, kept, draft, world.load_ms[draft], waits))
        return min(ways)

    def iterate(position, there, loading, remaining):
        return min(ms + least(min(costs.length, position + emitted), there, loading,
                              round(max(0.0, remaining - ms), 9))
                   for draft in (PLAIN, *there)
                   for emitted, ms in costs.choices(draft, position))

    starts = [frozenset()] + [frozenset({draft}) for draft in drafts if capacity]
    return min(least(0, start, '', 0.0) for start in starts)


@pytest.mark.parametrize('k', [0, 1, 2])
@pytest.mark.parametrize('seed', range(4))
def test_the_bound_is_the_best_there_is_rounded_down(k, seed):
    names = DRAFTS if k < 2 else DRAFTS[:2]
    replayer = replayer_of(names, cache_capacity=k, profile_changes={'load_ms': {'default': 150}})
    trace = random_trace(seed, len(names), 9)
    exact = best_by_search(replayer, trace)
    found = [least_ms(replayer, trace, levels) for levels in (1, 4, 16, 2000)]
    assert all(value <= exact + CLOSE for value in found)
    assert found[-1] == pytest.approx(exact, rel=2e-3)
    assert found[2] >= 0.9 * exact


@pytest.mark.parametrize('first_load_counts', [False, True])
@pytest.mark.parametrize('k', range(4))
@pytest.mark.parametrize('load', [0.5, 2.7, 12])
def test_nothing_is_faster_than_the_bound(k, load, first_load_counts):
    ranker = FixedRanker({'near': 0.4, 'far': 0.5, 'top': 0.6})
    for kind, n, adaptive, seed in (('shared_layers', 1, False, 1), ('causal_lm', 2, True, 2),
                                    ('shared_layers', 3, False, 3)):
        replayer = replayer_of(
            kind=kind, ranker=ranker, cache_capacity=k, interval=n, gamma=3, adaptive=adaptive,
            first_load_counts=first_load_counts, profile_changes={
                'load_ratio': load, 'load_ms': {}, 'rank_ms': 30, 'prefill_row_ms': 20})
        for trace in (random_trace(seed), trace_of('0b', SWITCHING)):
            tokens, seconds = bound(replayer, trace)
            for name in policy_names():
                for contender in variants(name).values() if name != BOUND else ():
                    stats = answer(replayer, [trace], contender)[0].stats
                    assert stats.output_tokens == tokens
                    assert stats.decode_sec >= seconds * (1 - CLOSE), contender
