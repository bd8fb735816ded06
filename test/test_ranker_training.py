# SPDX-License-Identifier: Apache-2.0
"""Rankers learn from traces what is to be learned, and are judged by the right figures."""

from dataclasses import replace
from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest
import torch
from trace_maker import GAMMA, header, ranks_of, separable, trace_of, write

from memspec_ros.models.errors import InvalidRequestError
from memspec_ros.models.ranking_head import read_head, save_head
from memspec_ros.training.ranker import (
    Examples,
    HiddenInputs,
    make_examples,
    RankerOptions,
    ranking_loss,
    read_traces,
    scores_of,
    train_head,
    utilities,
)
from memspec_ros.training.ranker_quality import chance, domain_scores, evaluate, quality
from memspec_ros.training.trace_store import Trace, TraceError

# Shorter than what follows the change half-way.
HORIZON = 4
OPTIONS = RankerOptions(layers=(0, 8), epochs=25, batch=64, learning_rates=(1e-2,))


def examples_of(traces, drafts=('near', 'far', 'top'), width=16, **changes):
    head = header(drafts, **changes)
    return make_examples(head, traces, drafts, HiddenInputs(head, width), 4, GAMMA, HORIZON)


def trained(traces, inputs='combined', options=OPTIONS, **kwargs):
    return train_head(examples_of(traces, **kwargs), inputs, GAMMA, HORIZON, options)


def top1(head, traces, **kwargs):
    examples = examples_of(traces, **kwargs)
    with torch.no_grad():
        scores = scores_of(head, examples, torch.arange(len(examples)))
    return quality(scores, examples.utilities)['top1']


# --- utility ---

def test_utility_is_tokens_per_iteration_of_decoding_from_there():
    right = np.array([[True] * 10, [False] * 10, [True, False] * 5])
    table = utilities(trace_of('k', right), [0, 1, 2], np.array([0, 4, 8, 9]), 4, 16)
    # Always right: 5 + 5 tokens; from 4: 5 + 1; from 8 two are left, and the last one alone.
    assert table[:, 0].tolist() == [5.0, 3.0, 2.0, 1.0]
    assert table[:, 1].tolist() == [1.0] * 4
    # One accepted and one of the target's own, every time.
    assert table[:, 2].tolist() == [2.0, 2.0, 2.0, 1.0]


def test_the_horizon_ends_it():
    right = np.array([[True] * 5 + [False] * 15])
    at = np.array([0])
    assert utilities(trace_of('k', right), [0], at, 4, 1)[0, 0] == 5.0
    assert utilities(trace_of('k', right), [0], at, 4, 3)[0, 0] == pytest.approx(7 / 3)
    assert utilities(trace_of('k', right), [0], at, 4, 99)[0, 0] == pytest.approx(20 / 16)
    assert utilities(trace_of('k', right), [0], at, 2, 1)[0, 0] == 3.0  # a shorter chain


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 4), st.integers(1, 20))
def test_utility_equals_that_of_decoding_step_by_step(right, gamma, horizon):
    trace = trace_of('k', [right])
    places = np.arange(len(right))
    found = utilities(trace, [0], places, gamma, horizon)[:, 0]
    for start in places:
        place, iterations = start, 0
        while place < len(right) and iterations < horizon:
            accepted = 0
            while (accepted < gamma and place + accepted < len(right)
                   and right[place + accepted]):
                accepted += 1
            place = min(len(right), place + accepted + 1)
            iterations += 1
        assert found[start] == pytest.approx((place - start) / iterations)


# --- figures ---

def test_recall_and_share_of_utility_by_hand():
    wanted = torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.0, 2.0], [2.0, 1.0, 4.0]])
    scores = torch.tensor([[9.0, 1.0, 0.0], [0.0, 2.0, 5.0], [2.0, 3.0, 1.0]])
    # Picked first: 3 of 3; 2 of 2, tied for the best; 1 of 4.
    found = quality(scores, wanted)
    assert found == pytest.approx({'top1': 2 / 3, 'top2': 2 / 3, 'utility1': 6 / 9,
                                   'utility2': 7 / 9})


def test_ties_of_scores_go_to_the_bundles_order_and_ties_of_utility_are_all_right():
    equal = torch.zeros(1, 3)
    assert quality(equal, torch.tensor([[2.0, 1.0, 1.0]]))['top1'] == 1.0
    assert quality(equal, torch.tensor([[1.0, 1.0, 2.0]]))['top2'] == 0.0
    assert quality(equal, torch.tensor([[2.0, 1.0, 2.0]]))['top1'] == 1.0
    # Nearer than any two quotients can be.
    assert quality(equal, torch.tensor([[2.0, 1.0, 2.0 + 1e-7]]))['top1'] == 1.0
    assert quality(equal, torch.tensor([[2.0, 1.0, 2.01]]))['top1'] == 0.0


@pytest.mark.parametrize('row', [[3.0, 2.0, 1.0], [2.0, 2.0, 1.0], [1.0, 1.0, 1.0],
                                 [5.0, 1.0, 1.0, 2.0], [1.0, 2.0]])
def test_chance_is_the_mean_over_all_rankings(row):
    wanted = torch.tensor([row])
    every = [quality(torch.tensor([order], dtype=torch.float32), wanted)
             for order in permutations(range(len(row)))]
    for key, value in chance(wanted).items():
        assert value == pytest.approx(sum(found[key] for found in every) / len(every)), key


def test_the_ceiling_is_the_mean_of_the_prompts_domain():
    """Two domains of two boundaries: the ceiling picks each domain's best on the whole."""
    wanted = torch.tensor([[3.0, 1.0], [1.0, 2.0], [1.0, 4.0], [2.0, 3.0]])
    examples = Examples(('a', 'b'), 'hidden', torch.zeros(2, 4), torch.zeros(4, 4), wanted,
                        torch.tensor([0, 0, 1, 1]), torch.tensor([0, 4, 0, 4]), ['x', 'y'],
                        ['code', 'math'])
    scores, means = domain_scores(examples)
    assert means['code'].tolist() == [2.0, 1.5] and means['math'].tolist() == [1.5, 3.5]
    assert scores.tolist() == [[2.0, 1.5]] * 2 + [[1.5, 3.5]] * 2
    # Wrong once, at the second boundary: 1 instead of 2.
    result = evaluate({}, {'hidden': examples})
    assert result['ceiling'] == pytest.approx(
        {'top1': 0.75, 'top2': 1.0, 'utility1': 11 / 12, 'utility2': 1.0})
    # Draft b on the whole: wrong at the first, 1 instead of 3.
    assert result['static'] == pytest.approx(
        {'top1': 0.75, 'top2': 1.0, 'utility1': 10 / 12, 'utility2': 1.0})
    assert result['domains']['code']['ceiling']['top1'] == 0.5
    assert result['domains']['math']['static']['top1'] == 1.0
    assert (result['prompts'], result['boundaries']) == (2, 4)


# --- training ---

def test_it_learns_what_the_hidden_state_tells():
    head = trained(separable(60, 1))
    assert top1(head, separable(30, 2)) > 0.9


def test_nothing_is_learned_from_shuffled_labels():
    """The test above must not be passed by whatever the traces are."""
    traces = separable(60, 1, shuffled=True)
    expected = chance(examples_of(separable(30, 2)).utilities)['top1']
    assert top1(trained(traces), separable(30, 2)) < expected + 0.15


def test_each_input_is_worth_what_it_tells():
    """What changes half-way is told by the recent output alone, not by the prompt."""
    traces, others = separable(60, 1), separable(30, 2)
    prompt, recent = (top1(trained(traces, inputs), others)
                      for inputs in ('prompt_only', 'recent_only'))
    assert recent > 0.9 and prompt < recent - 0.15
    same, others = separable(60, 3, by='prompt'), separable(30, 4, by='prompt')
    assert top1(trained(same, 'prompt_only'), others) > 0.9


def test_predictions_are_tokens_per_iteration():
    head, examples = trained(separable(60, 1)), examples_of(separable(30, 2))
    with torch.no_grad():
        scores = scores_of(head, examples, torch.arange(len(examples)))
    assert (scores - examples.utilities).mean().abs() < 0.15
    spread = examples.utilities.std()
    assert (scores - examples.utilities).square().mean().sqrt() < 0.7 * spread


def test_the_scale_of_the_hidden_states_does_not_matter():
    head, traces = trained(separable(40, 1)), separable(4, 2)
    grown = [replace(trace, hidden=trace.hidden * 40) for trace in traces]
    with torch.no_grad():
        one, other = (scores_of(head, examples_of(t), torch.arange(48)) for t in (traces, grown))
    assert torch.allclose(one, other, atol=1e-2)


def test_the_same_seed_gives_the_same_file(tmp_path):
    for name, seed in (('a', 0), ('b', 0), ('c', 1)):
        save_head(tmp_path / name, trained(separable(12, 1), options=replace(
            OPTIONS, seed=seed, epochs=3, layers=(8,))))
    one, same, other = ((tmp_path / name).read_bytes() for name in 'abc')
    assert one == same and one != other


def test_a_head_survives_its_file(tmp_path):
    head = trained(separable(12, 1), options=replace(OPTIONS, epochs=2))
    save_head(tmp_path / 'head', head)
    again = read_head(tmp_path / 'head')
    hidden = torch.randn(16)
    assert torch.equal(again.predict(hidden, hidden), head.predict(hidden, hidden))
    assert again.drafts == head.drafts and again.about['prompts'] == 12
    assert again.about['prompts_sha256'] and again.trained_on.shape == (12,)


def test_the_better_architecture_is_kept():
    """The right draft depends on the product of two inputs: no linear head can tell."""
    generator = np.random.default_rng(0)
    traces = []
    for number in range(120):
        signs = generator.choice([-1.0, 1.0], size=2)
        best = int(signs.prod() > 0)
        right = np.zeros((2, 32), bool)
        right[best] = True
        hidden = 0.05 * generator.standard_normal((8, 8))
        hidden[:, :2] += signs
        traces.append(trace_of(f'x{number}', right, hidden=hidden.astype(np.float16)))
    head = train_head(examples_of(traces, ('near', 'far'), 8), 'recent_only', GAMMA, 16,
                      replace(OPTIONS, layers=(0, 16), epochs=60))
    assert head.about['hidden_layer'] == 16 and len(head.layers) == 2
    assert top1(head, traces[:40], drafts=('near', 'far'), width=8) > 0.95


def test_the_loss_is_least_where_the_scores_are_the_utilities():
    wanted = torch.tensor([[1.0, 2.0, 1.5]])
    right = ranking_loss(wanted, wanted, 0.2, 1.0)
    for other in ([[2.0, 1.0, 1.5]], [[1.0, 2.5, 1.5]], [[2.0, 3.0, 2.5]]):
        assert ranking_loss(torch.tensor(other), wanted, 0.2, 1.0) > right


def test_a_draft_may_be_left_out():
    head = trained(separable(20, 1), options=replace(OPTIONS, epochs=1))
    assert head.drafts == ('near', 'far', 'top')
    examples = examples_of(separable(20, 1))
    fewer = make_examples(header(), separable(20, 1), ('near', 'top'),
                          HiddenInputs(header(), 16), 4, GAMMA, HORIZON)
    assert torch.equal(fewer.utilities, examples.utilities[:, [0, 2]])


def test_boundaries_can_be_thinned_out():
    def positions(count):
        return make_examples(header(), separable(1, 1), ('near',), HiddenInputs(header(), 16), 4,
                             GAMMA, 16, count).positions.tolist()
    assert positions(0) == list(range(0, 48, 4))
    assert positions(3) == [0, 24, 44] and positions(99) == positions(0)


# --- what is refused ---

def test_one_prompt_is_too_few():
    with pytest.raises(InvalidRequestError, match='at least two prompts'):
        trained(separable(1, 1))


def test_a_head_is_not_judged_by_what_it_was_trained_on():
    traces = separable(12, 1)
    head = trained(traces, options=replace(OPTIONS, epochs=1))
    with pytest.raises(InvalidRequestError, match='combined ranker was trained on 2 of these 7'):
        evaluate({'combined': head},
                 {'hidden': examples_of([*traces[:2], *separable(5, 2)])})


@pytest.mark.parametrize('changes, message', [
    ({'drafts': ('near', 'moon')}, "no draft 'moon'; they hold: near, far, top"),
    ({'gamma': 5}, 'chains of 4 tokens, not of 5')])
def test_examples_that_the_traces_do_not_hold(changes, message):
    arguments = {'drafts': ('near',), 'gamma': 4, **changes}
    with pytest.raises(InvalidRequestError, match=message):
        make_examples(header(), separable(1, 1), arguments['drafts'], HiddenInputs(header(), 16),
                      4, arguments['gamma'], 16)


def test_traces_without_hidden_states_train_no_hidden_ranker():
    with pytest.raises(InvalidRequestError, match='no hidden states'):
        HiddenInputs(header(hidden_every=0), 16)


GOOD = separable(1, 1)[0]


@pytest.mark.parametrize('changes, message', [
    ({'ranks': GOOD.ranks[:2]}, 'ranks'), ({'ranks': GOOD.ranks.astype(np.int64)}, 'ranks'),
    ({'output_ids': GOOD.output_ids[:9]}, 'ranks'),
    ({'output_ids': GOOD.output_ids[None]}, 'not a trace'),
    ({'hidden': None}, ''), ({'hidden': GOOD.hidden[:5]}, ''),
    ({'hidden': GOOD.hidden[0]}, ''), ({'hidden': GOOD.hidden * np.float16(np.inf)}, '')])
def test_a_malformed_trace_is_named(tmp_path, changes, message):
    write(tmp_path, [*separable(2, 5), replace(GOOD, key='bad', **changes)])
    with pytest.raises(TraceError, match=f'bad.npz: .*{message or "hidden"}'):
        read_traces([tmp_path])


def test_a_file_that_is_no_trace_is_named(tmp_path):
    write(tmp_path, separable(2, 5))
    (tmp_path / 'broken.npz').write_bytes(b'PK nothing')
    with pytest.raises(TraceError, match='broken.npz'):
        read_traces([tmp_path])


def test_directories_that_do_not_belong_together(tmp_path):
    one = write(tmp_path / 'one', separable(2, 5))
    for name, value in (('bundle', 'c' * 64), ('hidden_every', 8)):
        other = write(tmp_path / name, [], **{name: value})
        with pytest.raises(TraceError, match=f'another {name} than those of .*one'):
            read_traces([one, other])
    with pytest.raises(TraceError, match='no traces there'):
        read_traces([write(tmp_path / 'empty', [])])
    with pytest.raises(TraceError, match='traces.json'):
        read_traces([tmp_path / 'none'])


def test_a_prompt_in_two_directories_counts_once(tmp_path):
    one, two = (write(tmp_path / name, separable(2, 5)) for name in ('one', 'two'))
    assert [trace.key for trace in read_traces([one, two])[1]] == ['s5-0', 's5-1']


def test_an_output_without_tokens_is_no_example():
    empty = Trace('e', 'd', 'p', np.zeros(1, np.int32), np.zeros(0, np.int32),
                  ranks_of(np.zeros((3, 0), bool)), np.zeros((0, 16), np.float16))
    assert examples_of([empty, GOOD]).keys == [GOOD.key]
    with pytest.raises(InvalidRequestError, match='no output'):
        examples_of([empty])
