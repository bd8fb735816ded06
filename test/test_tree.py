# SPDX-License-Identifier: Apache-2.0
"""Branches of a chain of drafted tokens: which ones, and that they change no output."""

from conftest import PROMPTS
from fakes import counting, FakeClock, FakeDrafter, FakeTarget
from hypothesis import given
from hypothesis import strategies as st
import pytest
import torch

from memspec_ros.decoding.draft_length import DraftLength
from memspec_ros.decoding.engine import Engine
from memspec_ros.decoding.sampling import Sampling
from memspec_ros.decoding.stats import StepRecord
from memspec_ros.decoding.verification import descend
from memspec_ros.models.state import Branching, Proposal
from memspec_ros.models.tree import choose_branches, depths_of, parents_of, tree_mask

NAMES = ('near', 'far', 'top', 'noise', 'feature', 'embedded')
EVERY = Branching(4)
CPU = torch.device('cpu')
LENGTH = 28


# --- which ---

@given(st.data())
def test_the_likeliest_alternatives_are_chosen(data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    length, size = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 9))
    most, least = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([0.0, 0.05, 0.3]))
    logits = torch.randn(length, size, generator=generator) * 2
    ids = torch.randperm(50, generator=generator)[:size]
    places = torch.randint(size, (length,), generator=generator)
    if data.draw(st.booleans()):
        places = logits.argmax(-1)  # as greedy drafts choose
    chain = ids[places].tolist()
    probs, reach, worth = logits.softmax(-1), 1.0, {}
    for depth in range(length):
        # What is not among the most + 1 best of its row is never among the most best of all.
        for place in probs[depth].argsort(descending=True)[:most + 1].tolist():
            if place != places[depth]:
                worth[depth, int(ids[place])] = reach * float(probs[depth, place])
        reach *= float(probs[depth, places[depth]])
    chosen = choose_branches(list(logits), chain, ids, Branching(most, least))
    assert all(chance == pytest.approx(worth[pair], rel=1e-4)
               for pair, chance in chosen.items())
    found = list(chosen)
    assert len(found) == len(set(found)) <= most and all(found[i] < found[i + 1]
                                                         for i in range(len(found) - 1))
    assert all(worth[pair] >= least - 1e-6 for pair in found)
    if torch.equal(places, logits.argmax(-1)):
        best = sorted((value for value in worth.values() if value >= least), reverse=True)[:most]
        assert sorted((worth[pair] for pair in found), reverse=True) == pytest.approx(best)


def test_nothing_branches_unless_told_to():
    logits = [torch.tensor([1.0, 0.5])]
    assert choose_branches(logits, [0], None, None) == {}
    assert choose_branches([], [], None, EVERY) == {}
    assert choose_branches(logits, [0], None, EVERY) == {
        (0, 1): pytest.approx(float(logits[0].softmax(-1)[1]))}


def test_rows_see_their_ancestors_and_stand_where_they_stand_in_for():
    """Pitfall 18: by depth, not in the order in which they are run."""
    parents = parents_of(2, [(0, 7), (1, 8), (1, 9)])
    assert parents == [-1, 0, 1, 0, 1, 1] and depths_of(parents) == [0, 1, 2, 1, 2, 2]
    seen = tree_mask(parents, 2, CPU) == 0
    assert seen.int().tolist() == [
        [1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0, 1, 0, 0], [1, 1, 1, 1, 0, 0, 1, 0], [1, 1, 1, 1, 0, 0, 0, 1]]


# --- how they are verified ---

@given(st.data())
def test_the_way_down_is_that_of_the_targets_own_tokens(data):
    token = st.integers(0, 3)
    chain = data.draw(st.lists(token, max_size=4))
    branches = sorted({(depth, other) for depth, other in data.draw(
        st.lists(st.tuples(st.integers(0, 3), token), max_size=5))
        if depth < len(chain) and other != chain[depth]})
    said = data.draw(st.lists(token, min_size=12, max_size=12))
    rows, tokens = descend(chain, branches, lambda row, depth: said[row])
    assert len(tokens) == len(rows) + 1
    # A path of the tree, along which each token is what the target said one row before.
    parents = parents_of(len(chain), branches)
    run = [None, *chain, *(other for _, other in branches)]
    for place, row in enumerate(rows):
        before = rows[place - 1] if place else 0
        assert parents[row] == before and run[row] == said[before] == tokens[place]
    last = rows[-1] if rows else 0
    assert tokens[-1] == said[last]
    # It ends where no row follows with that token.
    assert not any(parent == last and run[row] == said[last]
                   for row, parent in enumerate(parents) if row)


def test_every_row_is_scored_as_if_its_path_were_all_there_is(target):
    """Pitfall 18: a branch placed by index would stand behind the chain, and be scored so."""
    chain, branches = [5, 17, 40], [(0, 9), (1, 33), (1, 34), (2, 8)]
    state = target.new_state(64, frozenset({2}))
    state.restart(PROMPTS[1])
    target.forward(state, state.tokens[:-1])
    state.hold(len(state.tokens) - 1)
    run = [state.tokens[-1], *chain, *(token for _, token in branches)]
    logits = target.forward(state, run, branches=branches)
    hidden = state.hidden[2][state.held:state.held + len(run)].clone()
    for row in range(len(run)):
        path = run[:row + 1] if row <= len(chain) else (
            run[:branches[row - len(chain) - 1][0] + 1] + [run[row]])
        alone = target.forward(state, path)
        torch.testing.assert_close(logits[row], alone[-1], atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(hidden[row], state.hidden[2][state.held + len(path) - 1],
                                   atol=1e-4, rtol=1e-4)


def decode(engine, drafter, prompt, count, gamma, branching=EVERY):
    """Output of ``count`` tokens and the records of its steps."""
    kept = next(chunks := engine.prefill(list(prompt)))
    if drafter is not None:
        drafter.restart(kept)
    for _ in chunks:
        pass
    output, records = [], []
    while len(output) < count:
        tokens, record = engine.step(drafter, gamma, count - len(output), frozenset(), branching)
        assert record.accepted <= record.drafted <= gamma and record.emitted == len(tokens)
        assert engine.state.held == len(engine.state.tokens) - 1
        output += tokens
        records.append(record)
    return output, records


@pytest.mark.parametrize('gamma', [1, 2, 4, 6])
@pytest.mark.parametrize('name', NAMES)
def test_the_output_is_the_targets_whatever_branches(engine, make_drafter, greedy, name, gamma):
    prompt = PROMPTS[gamma % 3]
    output, records = decode(engine, make_drafter(name), prompt, LENGTH, gamma)
    assert output == greedy(prompt, LENGTH)
    assert any(record.branches for record in records)
    assert all(record.branches <= 4 and record.rows == 1 + record.drafted + record.branches
               for record in records)


def test_alternatives_are_accepted_where_the_chain_is_wrong(engine, make_drafter):
    saved = 0
    for name in NAMES:
        steps = [sum(len(decode(engine, make_drafter(name), prompt, LENGTH, 4, branching)[1])
                     for prompt in PROMPTS) for branching in (None, EVERY)]
        assert steps[1] <= steps[0]
        saved += steps[0] - steps[1]
    assert saved > 3


def test_what_is_held_is_what_a_plain_run_would_hold(engine, make_drafter, target):
    output, records = decode(engine, make_drafter('far'), PROMPTS[1], LENGTH, 4)
    held = engine.state.held
    fresh = target.new_state(200, frozenset(engine.state.hidden) - {target.layers})
    target.forward(fresh, [*PROMPTS[1], *output][:held])
    for depth, states in engine.state.hidden.items():
        torch.testing.assert_close(states[:held], fresh.hidden[depth][:held], atol=1e-3, rtol=1e-3)
    for mine, plain in ((engine.state.kv.keys, fresh.kv.keys),
                        (engine.state.kv.values, fresh.kv.values)):
        torch.testing.assert_close(mine[..., :held, :], plain[..., :held, :], atol=1e-3,
                                   rtol=1e-3)


def test_sampled_output_is_plain_sampling_with_branches_too(engine, make_drafter):
    try:
        engine.use(Sampling(temperature=0.9, top_k=20, seed=4))
        plain, _ = decode(engine, None, PROMPTS[0], 20, 0)
        for name in NAMES:
            output, records = decode(engine, make_drafter(name), PROMPTS[0], 20, 4)
            assert output == plain and any(record.branches for record in records)
    finally:
        engine.use(Sampling())


@pytest.mark.parametrize(('sampling', 'verification'), [
    (Sampling(temperature=0.9, seed=4), 'rejection'),
    (Sampling(temperature=0.9, seed=4, presence_penalty=0.5), 'coupled'),
    (Sampling(repetition_penalty=1.2), 'coupled')])
def test_no_branches_where_rows_depend_on_what_is_beside_them(engine, make_drafter, sampling,
                                                              verification):
    try:
        engine.use(sampling, verification)
        _, records = decode(engine, make_drafter('far'), PROMPTS[0], 12, 4)
        assert not any(record.branches for record in records)
    finally:
        engine.use(Sampling())


def test_a_target_that_verifies_no_trees_gets_none():
    class Doubtful(FakeDrafter):
        def propose(self, state, gamma):
            assert state.branching is None
            return super().propose(state, gamma)

    engine = Engine(FakeTarget(counting), 40, 3, frozenset(), FakeClock(), 4)
    assert engine.max_branches == 0 and engine.state.capacity == 44
    output, _ = decode(engine, Doubtful(counting), [1, 2], 9, 3)
    assert output == list(range(3, 12))


def test_the_limit_and_stop_tokens_cut_an_accepted_branch(engine, make_drafter, greedy):
    """Pitfall: a block cut short must hold no more than was emitted."""
    for count in range(1, 9):
        output, _ = decode(engine, make_drafter('far'), PROMPTS[2], count, 4)
        assert output == greedy(PROMPTS[2], count)
    stop = greedy(PROMPTS[2], 12)[5]
    drafter = make_drafter('far')
    list(engine.prefill(list(PROMPTS[2])))
    output = []
    while stop not in output:
        output += engine.step(drafter, 4, 20, frozenset({stop}), EVERY)[0]
    expected = greedy(PROMPTS[2], 12)
    assert output == expected[:expected.index(stop) + 1]


# --- whether they pay ---

def test_a_row_pays_where_it_is_right_often_enough():
    length = DraftLength(4)
    for rows in range(1, 10):
        length.calibrate(rows, 1.0 + 0.1 * (rows - 1))
    # A token takes about half a second, a row a tenth of one: it is worth 0.2 tokens.
    speed = length.speed('a', 2)
    assert length.worth_of_row(speed) == pytest.approx(0.1 * speed)
    for rows in range(1, 10):
        length.calibrate(rows, 1.0)
    assert length.worth_of_row(length.speed('a', 2)) == 0.0
    length.calibrate(9, 0.9)  # noise must not make rows seem to save time
    assert length.worth_of_row(length.speed('a', 2)) == 0.0


def test_rows_beside_the_chain_count_as_cost():
    length = DraftLength(4)
    for rows in range(1, 10):
        length.calibrate(rows, float(rows))
    before = length.speed('a', 2)
    for _ in range(20):
        length.observe(StepRecord('a', 'a', 5, drafted=2, accepted=1, emitted=2, branches=4,
                                  t_draft=0.2, t_verify=7.0))
    length.begin()
    assert length.speed('a', 2) < before
    assert length.speed('a', 0) == pytest.approx(1.0, rel=1e-6)


def test_a_proposal_is_a_chain_unless_it_branches():
    assert Proposal([1, 2]).branches == {}
