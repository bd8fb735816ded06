# SPDX-License-Identifier: Apache-2.0
"""Figures of traces, from ranks made by hand."""

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from memspec_ros.training.trace_figures import (
    chain_accepted,
    choose_share,
    choose_tree,
    format_tables,
    iterations,
    measure,
    merged_accepted,
    tree_accepted,
)
from memspec_ros.training.trace_store import Trace, TraceHeader


def windows(ranks, gamma):
    """Ranks that depend on the position alone, as most drafts' do: [T, gamma]."""
    padded = [*ranks, *[0] * gamma]
    return np.array([padded[t:t + gamma] for t in range(len(ranks))], np.uint8)


def header(*drafts, gamma=4):
    return TraceHeader('b' * 64, drafts, gamma, 8, 0, 'float32', 128)


def trace(key, domain, *ranks):
    return Trace(key, domain, '', np.array([1], np.int32),
                 np.arange(len(ranks[0]), dtype=np.int32), np.stack(ranks))


def test_a_chain_emits_what_is_accepted_and_one_more():
    ranks = windows([1, 1, 2, 1, 1, 1, 1, 1, 1, 0], 4)
    assert chain_accepted(ranks, 4).tolist() == [2, 1, 0, 4, 4, 4, 3, 2, 1, 0]
    assert chain_accepted(ranks, 2).tolist() == [2, 1, 0, 2, 2, 2, 2, 2, 1, 0]
    # 0-2 (two accepted, the third the target's own), 3-7, 8-9.
    assert iterations([2, 1, 0, 4, 4, 4, 3, 2, 1, 0]) == 3


@pytest.mark.parametrize('accepted, count', [
    ([], 0), ([0], 1), ([1], 1), ([0, 0, 0], 3), ([3, 2, 1], 1), ([1, 9, 0], 2)])
def test_the_last_iteration_is_cut_at_the_end(accepted, count):
    assert iterations(accepted) == count


def test_a_tree_is_walked_along_the_true_ranks():
    tree = [(1,), (2,), (1, 1), (2, 3), (2, 3, 1)]
    ranks = np.array([[1, 1, 1], [2, 3, 1], [2, 1, 1], [1, 3, 1], [3, 1, 1], [0, 1, 1],
                      [2, 3, 2]], np.uint8)
    assert tree_accepted(ranks, tree).tolist() == [2, 3, 1, 1, 0, 0, 2]
    assert tree_accepted(ranks, []).tolist() == [0] * 7


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 6))
@settings(max_examples=100)
def test_a_tree_that_is_a_chain_does_what_the_chain_does(ranks, gamma):
    rows = windows(ranks, 6)
    chain = [(1,) * depth for depth in range(1, gamma + 1)]
    accepted = chain_accepted(rows, gamma)
    assert tree_accepted(rows, chain).tolist() == accepted.tolist()
    # The loop of the engine, written out.
    position = count = emitted = 0
    while position < len(ranks):
        run = 0
        while run < gamma and position + run < len(ranks) and ranks[position + run] == 1:
            run += 1
        step = min(run + 1, len(ranks) - position)
        position, count, emitted = position + step, count + 1, emitted + step
    assert iterations(accepted) == count and emitted == len(ranks)


def test_the_best_nodes_are_chosen_best_first():
    # At depth 0: rank 1 at 6 of 10 positions, rank 2 at 3; at depth 1: rank 1 at 7, rank 3 at 2
    # of the 9 whose first token was within the ranks and that are not the last: beyond the end
    # there is nothing to count.
    first = [1] * 6 + [2] * 3 + [0]
    second = [1, 1, 1, 1, 1, 1, 1, 3, 3, 1]
    ranks = np.array([first, second], np.uint8).T
    shares = {(1,): 0.6, (2,): 0.3, (1, 1): 0.6 * 7 / 9, (1, 3): 0.6 * 2 / 9, (2, 1): 0.3 * 7 / 9,
              (2, 3): 0.3 * 2 / 9}
    expected = sorted(shares, key=shares.get, reverse=True)
    for nodes in range(8):
        assert choose_tree([ranks], nodes) == expected[:nodes]
    assert choose_tree([ranks[:5], ranks[5:]], 3) == [(1,), (1, 1), (2,)]


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=12), max_size=4),
       st.integers(1, 4), st.integers(0, 9))
def test_a_tree_holds_the_parents_of_its_nodes(lists, gamma, nodes):
    tree = choose_tree([windows(ranks, gamma) for ranks in lists], nodes)
    assert len(tree) == len(set(tree)) <= nodes
    for place, path in enumerate(tree):
        assert 1 <= len(path) <= gamma and min(path) >= 1
        assert len(path) == 1 or path[:-1] in tree[:place]


def test_nothing_to_choose_from_is_no_tree():
    assert choose_tree([]) == []
    assert choose_tree([np.zeros((5, 4), np.uint8)]) == []


def test_figures_by_domain_and_draft():
    good, bad = windows([1] * 10, 4), windows([0, 1] * 5, 4)
    figures = measure(header('a', 'b'), [
        trace('0', 'law', good, bad), trace('1', 'law', bad[:6], bad[:6]),
        trace('f', 'code', bad, good)])
    assert figures['prompts'] == {'code': 1, 'law': 2}
    assert figures['agreement'] == {'code': {'a': 0.5, 'b': 1.0},
                                    'law': {'a': 13 / 16, 'b': 0.5}}
    # All right: 5 and 5. Every second one: 1, then 2 each, the last cut; six of these: 1 2 2 1.
    assert iterations(chain_accepted(good)) == 2 and iterations(chain_accepted(bad)) == 6
    assert iterations(chain_accepted(windows([0, 1] * 3, 4))) == 4
    assert figures['tokens_per_iteration']['code'] == {'a': 10 / 6, 'b': 5.0}
    assert figures['tokens_per_iteration']['law']['b'] == 16 / 10
    assert figures['gamma'] == 4 and figures['tree_rows'] == 9


def test_a_tree_is_measured_on_prompts_it_was_not_chosen_on():
    """Even keys know rank 1 alone, odd ones rank 2 alone: each half's tree fails on the other."""
    ones, twos = windows([1] * 8, 4), windows([2] * 8, 4)
    figures = measure(header('a'), [trace('10', 'law', ones), trace('11', 'code', twos)])
    assert figures['trees'] == {'a': {'even': [[2] * n for n in (1, 2, 3, 4)],
                                      'odd': [[1] * n for n in (1, 2, 3, 4)]}}
    assert figures['tree_tokens_per_iteration'] == {'code': {'a': 1.0}, 'law': {'a': 1.0}}
    figures = measure(header('a'), [trace('10', 'law', ones), trace('21', 'law', ones)])
    assert figures['tree_tokens_per_iteration'] == {'law': {'a': 4.0}}


def test_without_another_half_there_is_no_figure_of_a_tree():
    figures = measure(header('a'), [trace('2', 'law', windows([1] * 8, 4))])
    assert figures['tree_tokens_per_iteration'] == {'law': {'a': None}}
    assert figures['tokens_per_iteration'] == {'law': {'a': 4.0}}
    assert ' - ' in format_tables(figures) or ' -\n' in format_tables(figures) + '\n'


def test_a_tree_may_be_shared_with_a_draft_that_copies():
    """Where one of two is right they are both heard, whichever it is, in no more rows."""
    draft, copier = windows([1] * 10 + [0] * 10, 4), windows([0] * 10 + [1] * 10, 4)
    pair = [trace('10', 'law', draft, copier), trace('11', 'law', draft, copier)]
    figures = measure(header('a', 'lookup'), pair, {'lookup'})
    # Alone each is right in one half: 10 tokens by five at a time, 10 one by one.
    assert figures['tree_tokens_per_iteration']['law']['a'] == 20 / 12
    assert figures['merged_tree_tokens_per_iteration'] == {'law': {'a': 5.0}}
    assert figures['copied_tokens'] == {'a': {'even': 4, 'odd': 4}}
    assert 'what the text before says' in format_tables(figures)
    alone = measure(header('a', 'lookup'), pair)
    assert alone['merged_tree_tokens_per_iteration'] == alone['copied_tokens'] == {}
    assert 'what the text before says' not in format_tables(alone)
    del figures['merged_tree_tokens_per_iteration'], figures['copied_tokens']
    assert figures.items() <= alone.items()


def test_a_copied_token_takes_the_row_of_a_drafted_one():
    draft, nothing = windows([1] * 10, 8), windows([0] * 10, 8)
    tree = choose_tree([draft])
    for tokens, left in ((0, 8), (3, 5), (8, 0)):
        assert merged_accepted(draft, nothing, tree, tokens)[0] == left
        assert merged_accepted(nothing, draft, tree, tokens)[0] == tokens
    assert choose_share([(draft, nothing)], tree) == 0


def test_no_traces_and_no_drafts_are_no_error():
    assert measure(header('a'), [])['agreement'] == {}
    assert format_tables(measure(header('a'), []))
    assert measure(header(), [])['trees'] == {}


def test_the_best_draft_of_a_domain_is_marked():
    good, bad = windows([1] * 10, 4), windows([0, 1] * 5, 4)
    text = format_tables(measure(header('alpha', 'b'), [
        trace('0', 'law', bad, good), trace('1', 'a-long-domain', good, bad)]))
    lines = text.splitlines()
    assert lines[1].split() == ['prompts', 'alpha', 'b']
    assert lines[2].split() == ['a-long-domain', '1', '1.000*', '0.500']
    assert lines[3].split() == ['law', '1', '0.500', '1.000*']
    assert lines[2].index('1.000*') + 5 == lines[3].index('0.500') + 5
