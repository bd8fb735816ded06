# SPDX-License-Identifier: Apache-2.0
"""Two drafts in one tree: which rows, that no output changes, who is credited, when it pays."""

from collections import Counter

from conftest import PROMPTS
from fakes import Bench, counting, FakeDrafter, FakeKind, TreeTarget
from hypothesis import given
from hypothesis import strategies as st
import pytest
import torch

from memspec_ros.bench.chi_square import two_samples
from memspec_ros.decoding.draft_length import DraftLength
from memspec_ros.decoding.engine import Engine, Second
from memspec_ros.decoding.merging import Merging
from memspec_ros.decoding.sampler import CoupledSampler
from memspec_ros.decoding.sampling import Sampling
from memspec_ros.decoding.stats import GenerationStats, StepRecord
from memspec_ros.decoding.verification import descend
from memspec_ros.models.drafts.prompt_lookup import PromptLookupDrafter
from memspec_ros.models.state import Branching, DecodeState, Proposal
from memspec_ros.models.tree import depths_of, graft, parents_of

LENGTH = 28
EVERY = Branching(4)
PAIRS = [('near', 'lookup'), ('far', 'near'), ('feature', 'noise'), ('lookup', 'top')]


# --- which rows ---

@given(st.data())
def test_a_tree_of_two_proposals(data):
    token = st.integers(0, 2)
    chain, other = (data.draw(st.lists(token, min_size=low, max_size=4)) for low in (1, 0))
    own = {(depth, said): chance for depth, said, chance in sorted(data.draw(st.lists(
        st.tuples(st.integers(0, 3), token, st.floats(0.0, 1.0)), max_size=4,
        unique_by=lambda item: item[:2]))) if depth < len(chain) and said != chain[depth]}
    shared = next((i for i, pair in enumerate(zip(chain, other)) if pair[0] != pair[1]),
                  min(len(chain), len(other)))
    chances = sorted(data.draw(st.lists(st.floats(0.0, 1.0), min_size=len(other) - shared,
                                        max_size=len(other) - shared)), reverse=True)
    branching = Branching(data.draw(st.integers(0, 8)), data.draw(st.sampled_from([0.0, 0.4])))
    merged = graft(Proposal(chain, None, own), other, chances, branching)
    branches = list(merged.proposal.branches)
    assert merged.proposal.tokens == chain and len(branches) <= branching.most
    # A tree: each row follows an earlier one, and no row has two children of one token.
    run = [None, *chain, *(said for _, said in branches)]
    parents = parents_of(len(chain), branches)
    children = [(parent, run[row]) for row, parent in enumerate(parents)][1:]
    assert len(set(children)) == len(children)
    assert all(parent < row for row, parent in enumerate(parents))
    # What was placed of the second chain can be walked down to, and nothing more of it.
    followed, rows = 0, {child: row for row, child in enumerate(children, 1)}
    row = 0
    while followed < len(other) and (row, other[followed]) in rows:
        row, followed = rows[row, other[followed]], followed + 1
    assert followed == merged.placed >= shared
    # Every other row is the first draft's own.
    assert len(branches) - merged.alone == sum(branch in own for branch in branches)
    assert all(chance >= branching.least for branch, chance in merged.proposal.branches.items()
               if branch not in own)
    if branching.most == 8 and not branching.least:
        assert merged.placed == len(other) and own.keys() <= set(branches)


def test_rows_go_to_the_likeliest_whoever_proposed_them():
    first = Proposal([1, 2, 3], None, {(0, 7): 0.3, (1, 8): 0.05, (2, 9): 0.2})
    merged = graft(first, [1, 5, 6, 4], [0.25, 0.1, 0.01], Branching(4, 0.02))
    assert dict(merged.proposal.branches) == {(0, 7): 0.3, (2, 9): 0.2, (1, 5): 0.25,
                                              (6, 6): 0.1}
    assert merged.placed == 3 and merged.alone == 2
    # An alternative that both see is one row, which what follows it hangs on.
    merged = graft(first, [1, 8, 6], [0.25, 0.1], EVERY)
    assert list(merged.proposal.branches) == [(0, 7), (2, 9), (1, 8), (6, 6)]
    assert merged.proposal.branches[1, 8] == 0.25 and merged.alone == 1
    # Where the second goes on after the end of the first there is no fork.
    merged = graft(Proposal([1, 2]), [1, 2, 3, 4], [0.5, 0.4], EVERY)
    assert list(merged.proposal.branches) == [(2, 3), (3, 4)] and merged.placed == 4


def test_the_way_down_a_tree_with_long_branches():
    chain, branches = [1, 2], {(0, 5): 1.0, (3, 6): 1.0, (4, 7): 1.0, (2, 8): 1.0}
    assert depths_of(parents_of(2, branches)) == [0, 1, 2, 1, 2, 3, 3]
    said = {0: 5, 3: 6, 4: 7, 5: 9, 1: 2, 2: 8, 6: 4}
    assert descend(chain, branches, lambda row, depth: said[row]) == ([3, 4, 5], [5, 6, 7, 9])
    said[0] = 1
    assert descend(chain, branches, lambda row, depth: said[row]) == ([1, 2, 6], [1, 2, 8, 4])


def test_every_row_is_scored_as_if_its_path_were_all_there_is(target):
    chain, branches = [5, 17, 40], [(0, 9), (4, 33), (5, 34), (3, 8)]
    state = target.new_state(64, frozenset({2}))
    state.restart(PROMPTS[1])
    target.forward(state, state.tokens[:-1])
    state.hold(len(state.tokens) - 1)
    run = [state.tokens[-1], *chain, *(token for _, token in branches)]
    logits, parents = target.forward(state, run, branches=branches), parents_of(3, branches)
    for row in range(len(run)):
        path, at = [run[row]], row
        while parents[at] >= 0:
            at = parents[at]
            path.insert(0, run[at])
        torch.testing.assert_close(logits[row], target.forward(state, path)[-1], atol=2e-4,
                                   rtol=1e-4)


# --- on a real target ---

@pytest.fixture
def make_drafter(make_drafter):
    def make(name):
        # Whatever was said before: random outputs seldom repeat more.
        return PromptLookupDrafter((1,)) if name == 'lookup' else make_drafter(name)
    return make


def beside(drafter, gamma=4, most=6):
    """The drafter as a second one, all of whose tokens get a row."""
    return Second('second', drafter, gamma, Branching(most),
                  lambda chain, other: [1.0] * len(other))


def decode(engine, first, second, prompt, count, gamma=4):
    """Output of ``count`` tokens and the records of its steps."""
    kept = next(chunks := engine.prefill(list(prompt)))
    for drafter in (first, second and second.drafter):
        if drafter is not None:
            drafter.restart(kept)
    for _ in chunks:
        pass
    output, records = [], []
    while len(output) < count:
        tokens, record = engine.step(first, gamma, count - len(output), frozenset(), EVERY, second)
        assert engine.state.held == len(engine.state.tokens) - 1
        assert not record.draft_error and not record.second_error
        for drafted, accepted in ((record.drafted, record.accepted),
                                  (record.second_drafted, record.second_accepted)):
            assert 0 <= accepted <= min(drafted, record.emitted)
        # Whatever was accepted, somebody had proposed.
        assert max(record.accepted, record.second_accepted) >= record.emitted - 1
        output += tokens
        records.append(record)
    return output, records


@pytest.mark.parametrize(('first', 'second'), PAIRS)
def test_greedy_output_is_the_targets_whichever_two_drafts_are_merged(engine, make_drafter, greedy,
                                                                      first, second):
    rows = 0
    for prompt in ([*prompt, *prompt] for prompt in PROMPTS):
        output, records = decode(engine, make_drafter(first), beside(make_drafter(second)),
                                 prompt, LENGTH)
        assert output == greedy(prompt, LENGTH)
        assert all(record.rows <= 1 + record.drafted + 6 for record in records)
        rows += sum(record.grafted for record in records)
    assert rows


def test_two_drafts_save_iterations_where_each_is_right_at_times(engine, make_drafter):
    alone, together = (sum(len(decode(engine, make_drafter('far'), second, prompt, LENGTH)[1])
                           for prompt in PROMPTS)
                       for second in (None, beside(make_drafter('near'))))
    assert together < alone


@pytest.mark.parametrize(('first', 'second'), PAIRS[:3])
def test_sampled_output_is_plain_sampling_with_two_drafts_too(engine, make_drafter, first, second):
    try:
        engine.use(Sampling(temperature=0.9, top_k=20, seed=4))
        plain, _ = decode(engine, None, None, PROMPTS[0], 20, 0)
        output, records = decode(engine, make_drafter(first), beside(make_drafter(second)),
                                 PROMPTS[0], 20)
        assert output == plain
        assert any(record.grafted for record in records)
    finally:
        engine.use(Sampling())


def test_sampled_trees_give_the_targets_distribution():
    """Two tokens over a vocabulary of three, by seeds: a tree of two chains against no draft."""
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4]])
    chain, other = [0, 1], [1, 2]
    tree = graft(Proposal(chain), other, [1.0, 1.0], EVERY).proposal
    run = [2, *chain, *(token for _, token in tree.branches)]
    drawn = Counter(), Counter()
    for seed in range(1, 3001):
        for side, proposal, rows in ((0, tree, run), (1, Proposal([]), [2])):
            state = DecodeState(None, {}, 8)
            state.tokens, state.prompt_length = [2], 1
            sampler = CoupledSampler(Sampling(temperature=1.0, seed=seed + 10000 * side), 3)
            _, tokens = sampler.verify_tree(state, p[rows].log(), proposal)
            if len(tokens) == 1:
                state.tokens += tokens
                tokens += sampler.verify_tree(state, p[tokens].log(), Proposal([]))[1]
            drawn[side][tuple(tokens[:2])] += 1
    assert two_samples([drawn]).p > 0.001
    expected = Counter({(a, b): round(3000 * float(p[2, a] * p[a, b]))
                        for a in range(3) for b in range(3)})
    assert two_samples([(drawn[0], expected)]).p > 0.001


@pytest.mark.parametrize(('sampling', 'verification'), [
    (Sampling(temperature=0.9, seed=4), 'rejection'),
    (Sampling(repetition_penalty=1.2), 'coupled')])
def test_nothing_is_merged_where_rows_depend_on_what_is_beside_them(engine, make_drafter, sampling,
                                                                    verification):
    try:
        engine.use(sampling, verification)
        _, records = decode(engine, make_drafter('far'), beside(make_drafter('near')),
                            PROMPTS[0], 12)
        assert not engine.merges and not any(record.second for record in records)
    finally:
        engine.use(Sampling())


def test_what_is_held_is_what_a_plain_run_would_hold(engine, make_drafter, target):
    output, _ = decode(engine, make_drafter('far'), beside(make_drafter('near')), PROMPTS[1],
                       LENGTH)
    held = engine.state.held
    fresh = target.new_state(200, frozenset(engine.state.hidden) - {target.layers})
    target.forward(fresh, [*PROMPTS[1], *output][:held])
    for depth, states in engine.state.hidden.items():
        torch.testing.assert_close(states[:held], fresh.hidden[depth][:held], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(engine.state.kv.keys[..., :held, :], fresh.kv.keys[..., :held, :],
                               atol=1e-3, rtol=1e-3)


# --- who is credited ---

def step_of(first, second, chances=lambda chain, other: [1.0] * len(other), limit=9):
    """One iteration of a target that counts from 3 on, with two fake drafts."""
    engine = Engine(TreeTarget(counting), 40, 4, frozenset(), lambda: 0.0, 4)
    list(engine.prefill([1, 2, 3]))
    drafters = [FakeDrafter(guess) for guess in (first, second)]
    told = []
    for drafter in drafters:
        drafter.restart(2)
        drafter.cached = 2
        drafter.update = lambda state, accepted: told.append(accepted)
    tokens, record = engine.step(drafters[0], 3, limit, frozenset(), EVERY, Second(
        'b', drafters[1], 4, Branching(5), chances))
    return tokens, record, told


def until(last):
    """Right up to and including the token ``last``, then wrong."""
    return lambda prefix: counting(prefix) if prefix[-1] < last else 77


@pytest.mark.parametrize(('first', 'second', 'emitted', 'accepted', 'told'), [
    # Both right at first, the second one longer; only it; only the first; neither.
    (until(4), until(6), [4, 5, 6, 7], (1, 3), [1, 3]),
    (until(0), until(5), [4, 5, 6], (0, 2), [0, 2]),
    (until(5), until(0), [4, 5, 6], (2, 0), [2, 0]), (until(0), until(0), [4], (0, 0), [0, 0]),
    # One goes on where the other's chain has ended.
    (counting, counting, [4, 5, 6, 7, 8], (3, 4), [3, 4])])
def test_tokens_count_for_who_proposed_them(first, second, emitted, accepted, told):
    tokens, record, said = step_of(first, second)
    assert tokens == emitted and said == told
    assert (record.accepted, record.second_accepted) == accepted
    assert (record.drafted, record.second_drafted) == (3, 4)
    stats = GenerationStats()
    record.draft = 'a'
    stats.add(record)
    assert [(count.proposed, count.accepted) for count in stats.drafts.values()] == [
        (3, accepted[0]), (4, accepted[1])]
    assert (stats.drafted, stats.accepted) == (7, sum(accepted))


def test_tokens_that_got_no_row_were_not_drafted():
    _, record, told = step_of(until(4), until(6), lambda chain, other: [1.0, -1.0, -1.0])
    assert (record.second_drafted, record.second_accepted, record.grafted) == (2, 2, 1)
    # But that one of them was right all the same is what its cache may keep.
    assert told == [1, 3]


def test_a_second_draft_that_fails_is_named_and_costs_no_token():
    def fails(chain, other):
        raise ValueError('second failed')
    tokens, record, _ = step_of(until(5), until(6), fails)
    assert tokens == [4, 5, 6] and record.second_error == 'second failed' and not record.second


def test_a_limit_cuts_a_tree():
    tokens, record, _ = step_of(until(4), until(6), limit=2)
    assert tokens == [4, 5] and record.second_accepted <= 1


# --- whether it pays ---

def length_of(row_cost=0.03, gamma=4):
    length = DraftLength(gamma)
    for rows in range(1, 10):
        length.calibrate(rows, 1.0 + row_cost * (rows - 1))
    return length


def step(emitted=2, **changes):
    return StepRecord('a', 'a', 5, drafted=4, accepted=emitted - 1, emitted=emitted, t_draft=0.4,
                      t_verify=1.2, second='b', second_drafted=4, branches=4, grafted=4, **changes)


def test_what_the_second_draft_is_worth_is_measured():
    length, merging = length_of(), Merging()
    before = merging.chances(length, 'a', 'b', [1, 2, 3], [1, 5, 6])
    assert len(before) == 2 and 1 > before[0] >= before[1] > 0
    for _ in range(40):
        merging.learn(length, step(), [1, 2, 3], [1, 5, 6], [1, 5, 6, 7])
    good = merging.chances(length, 'a', 'b', [1, 2, 3], [1, 5, 6])
    for _ in range(80):
        merging.learn(length, step(), [1, 2, 3], [1, 5, 6], [1, 9])
    bad = merging.chances(length, 'a', 'b', [1, 2, 3], [1, 5, 6])
    assert good[0] > 1.5 * before[0] and bad[0] < 0.3 * good[0]
    assert merging.chances(length, 'a', 'b', [1, 2], [1, 2]) == []


def test_the_speed_of_a_pair_is_what_it_was_seen_to_be():
    length, merging = length_of(), Merging()
    slow = merging.speed(length, 'a', 4, 'b', 4, 4)
    for _ in range(60):
        merging.learn(length, step(emitted=5), [1, 2, 3, 4], [7, 8, 9, 6], [1, 2, 3, 4, 5])
    assert merging.speed(length, 'a', 4, 'b', 4, 4) > 1.3 * slow


def copying(guess, **options):
    class Copier(FakeDrafter):
        copies = True

        def match(self, state):
            return 4
    return FakeKind(lambda: Copier(guess, **options), slot_free=True)


def bench_of(first, second, row_sec=0.002, **options):
    """A controller whose active draft 'a' and a copier or draft 'b' take turns in being right."""
    bench = Bench({'a': FakeKind(lambda: FakeDrafter(first, step_sec=0.01)), 'b': second},
                  adaptive=True, gamma=4, script={'a': [(0.0, 'ok')], 'b': [(0.0, 'ok')]},
                  target=TreeTarget, row_sec=row_sec, branches=4, **options)
    for rows in range(1, 10):
        bench.controller.draft_length.calibrate(rows, 0.1 + row_sec * rows)
    bench.settings.merge = True
    return bench


def every_other(run, turn):
    """Right for ``run`` tokens, then wrong for as many; ``turn`` 0 begins, 1 is its complement."""
    return lambda prefix: counting(prefix) if prefix[-1] // run % 2 == turn else 0


def test_a_copier_is_heard_beside_the_active_draft_where_both_err_at_times():
    speeds = []
    for merge in (False, True):
        bench = bench_of(every_other(8, 0), copying(every_other(8, 1)))
        bench.settings.merge = merge
        ids, _, last, chunks = bench.run(max_new_tokens=200)
        steps = [chunk.step for chunk in chunks if chunk.step]
        assert any(step.second == 'b' for step in steps) == merge
        speeds.append(last.stats.tokens_per_iteration)
        assert ids == [(4 + i) % 256 for i in range(len(ids))]
    assert speeds[1] > 1.2 * speeds[0]
    assert last.stats.drafts['b'].accepted > 0 and last.stats.drafts['a'].accepted > 0


def test_rows_that_cost_too_much_are_not_given():
    bench = bench_of(every_other(64, 0), copying(every_other(2, 1)), row_sec=0.1)
    steps = [chunk.step for chunk in bench.run(max_new_tokens=200)[3] if chunk.step]
    assert sum(step.grafted for step in steps[40:]) < 10


@pytest.mark.parametrize(('step_sec', 'asked'), [(0.0001, True), (0.05, False)])
def test_a_second_resident_draft_drafts_too_where_it_costs_next_to_nothing(step_sec, asked):
    bench = bench_of(every_other(8, 0), FakeKind(
        lambda: FakeDrafter(every_other(8, 1), step_sec=step_sec)))
    steps = [chunk.step for chunk in bench.run(max_new_tokens=240)[3] if chunk.step]
    assert 0 < sum(step.second == 'b' for step in steps[:30])  # until it is known what it costs
    assert (sum(step.second == 'b' for step in steps[30:]) > 10) == asked


def test_a_second_draft_that_fails_is_given_up():
    bench = bench_of(every_other(8, 0), copying(every_other(8, 1), trouble={'propose': 3}))
    ids, _, last, _ = bench.run(max_new_tokens=60)
    assert len(ids) == 60 and 'b' not in bench.residency.ready
