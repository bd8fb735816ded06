# SPDX-License-Identifier: Apache-2.0
"""What tokens are drawn from: processors as in ``transformers``, every row with its prefix."""

from dataclasses import replace
import itertools
import math

from hypothesis import given
from hypothesis import strategies as st
import pytest
import torch

from memspec_ros.bench.exact import by_transformers
from memspec_ros.decoding.sampling import Prefix, process, RANGES, Sampling, warp
from memspec_ros.models.errors import InvalidRequestError

VOCABULARY = 60
PREFIX = Prefix([3, 4, 4, 7, 9, 9, 9, 3, 11], 4)
STOPS = frozenset({1, 2})
BIAS = ((5, 4.0), (9, -6.0), (20, 100.0), (21, -100.0))


def logits(rows=1, seed=0, spread=3.0, vocabulary=VOCABULARY):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator) * spread


def assert_as_transformers(rows, prefix, drafted, params):
    scores, probs = (f(rows, prefix, params, drafted) for f in (process, warp))
    assert scores.dtype == probs.dtype == torch.float32
    for i, row in enumerate(rows):
        before = Prefix([*prefix.tokens, *drafted[:i]], prefix.prompt_length)
        expected_scores, expected = by_transformers(row, before, params)
        assert torch.allclose(scores[i], expected_scores, atol=1e-5)
        assert torch.allclose(probs[i], expected, atol=1e-6)
        assert torch.equal(probs[i] > 0, expected > 0)


@pytest.mark.parametrize('params', [
    Sampling(temperature=1.0), Sampling(temperature=0.3), Sampling(temperature=5.0),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=1.0, top_k=7), Sampling(temperature=1.0, top_k=10 ** 6),
    Sampling(temperature=1.0, top_p=0.9), Sampling(temperature=1.0, top_p=0.1),
    Sampling(temperature=1.0, top_p=1e-9), Sampling(temperature=1.0, min_p=0.05),
    Sampling(temperature=1.0, min_p=1.0), Sampling(temperature=1.0, repetition_penalty=1.3),
    Sampling(temperature=1.0, repetition_penalty=0.5),
    Sampling(temperature=1.0, presence_penalty=1.5),
    Sampling(temperature=1.0, frequency_penalty=-0.7),
    Sampling(temperature=1.0, logit_bias=BIAS),
    Sampling(temperature=1.0, min_tokens=7, stop_ids=STOPS),
    Sampling(temperature=1.0, min_tokens=2, stop_ids=STOPS)], ids=repr)
def test_each_processor_is_that_of_transformers(params):
    """Pitfall 13 too: each row has the drafts before it in its prefix."""
    for seed in range(20):
        assert_as_transformers(logits(5, seed), PREFIX, [9, 30, 3, 30], params)


def test_every_combination_of_processors_is_that_of_transformers():
    changes = [{'logit_bias': BIAS[:2]}, {'repetition_penalty': 1.4}, {'presence_penalty': 0.6},
               {'frequency_penalty': 0.4}, {'min_tokens': 6, 'stop_ids': STOPS},
               {'temperature': 0.7}, {'top_k': 12}, {'top_p': 0.8}, {'min_p': 0.03}]
    for seed, chosen in enumerate(itertools.product([False, True], repeat=len(changes))):
        params = Sampling(temperature=1.0)
        for change in itertools.compress(changes, chosen):
            params = replace(params, **change)
        assert_as_transformers(logits(3, seed), PREFIX, [12, 12], params)


def test_a_nucleus_larger_than_the_first_guess():
    """Most of a large vocabulary: the flat row needs far more tokens than the peaked one."""
    rows = torch.cat([logits(1, 1, 0.01, 9000), logits(1, 2, 5.0, 9000)])
    for top_p in (0.5, 0.99, 0.998):
        probs = warp(rows, Prefix([1], 1), Sampling(temperature=1.0, top_p=top_p))
        plain = rows.softmax(-1)
        for row, kept in zip(plain, probs > 0):
            ordered = row.double().sort(descending=True).values.cumsum(0)
            count = int((ordered < top_p).sum()) + 1
            assert abs(int(kept.sum()) - count) <= 2  # float32 adds up to a little more or less
            assert kept.all() or row[kept].min() >= row[~kept].max()


@given(st.data())
def test_a_row_does_not_depend_on_the_rows_beside_it(data):
    params = Sampling(
        temperature=data.draw(st.sampled_from([0.0, 0.5, 1.0])),
        top_k=data.draw(st.sampled_from([0, 9])), top_p=data.draw(st.sampled_from([1.0, 0.8])),
        min_p=data.draw(st.sampled_from([0.0, 0.02])),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.5])),
        presence_penalty=data.draw(st.sampled_from([0.0, 0.5])),
        frequency_penalty=data.draw(st.sampled_from([0.0, 0.5])),
        min_tokens=data.draw(st.integers(0, 9)), stop_ids=STOPS,
        logit_bias=data.draw(st.sampled_from([(), BIAS])))
    drafted = data.draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=5))
    rows = logits(len(drafted) + 1, data.draw(st.integers(0, 100)))
    together = warp(rows, PREFIX, params, drafted)
    for i in range(len(rows)):
        alone = Prefix([*PREFIX.tokens, *drafted[:i]], PREFIX.prompt_length)
        assert torch.equal(warp(rows[i:i + 1], alone, params)[0], together[i])
    assert torch.allclose(together.sum(-1), torch.ones(len(rows)))


def test_the_logits_stay_as_they_are():
    rows = logits(3)
    before = rows.clone()
    for params in (Sampling(logit_bias=BIAS), Sampling(min_tokens=9, stop_ids=STOPS),
                   Sampling(temperature=1.0, top_k=3, top_p=0.5, repetition_penalty=2.0)):
        warp(rows, PREFIX, params, [5, 6])
        assert torch.equal(rows, before)


def test_probabilities_that_half_precision_loses_are_kept():
    """Pitfall 12: e**-15 is 0 in float16 beside 1, and small, not impossible, in float32."""
    rows = torch.zeros(1, 4, dtype=torch.bfloat16)
    rows[0, 0] = 25.0
    probs = warp(rows, Prefix([0], 1), Sampling(temperature=1.0))
    assert probs.dtype == torch.float32 and (probs > 0).all()
    assert probs[0, 1] == pytest.approx(math.exp(-25.0), rel=1e-4)


def test_large_logits_at_a_low_temperature_stay_finite():
    rows = torch.tensor([[3e4, 3e4 - 1.0, -3e4, -torch.inf]])
    probs = warp(rows, Prefix([0], 1), Sampling(temperature=0.001))
    assert probs.tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_greedy_is_the_argmax_of_the_processed_logits():
    rows = logits(4, 5)
    params = Sampling(repetition_penalty=1.5, frequency_penalty=0.5, top_k=1, min_p=0.5,
                      logit_bias=BIAS[:2], min_tokens=8, stop_ids=STOPS)
    probs = warp(rows, PREFIX, params, [9, 9, 9])
    assert (probs.max(-1).values == 1).all() and (probs.sum(-1) == 1).all()
    assert torch.equal(probs.argmax(-1), process(rows, PREFIX, params, [9, 9, 9]).argmax(-1))


@pytest.mark.parametrize('name', RANGES)
def test_what_is_out_of_range_is_refused_by_name(name):
    low, high = RANGES[name]
    wrong = [low - 1, high + 1]
    if isinstance(low, float):
        wrong += [math.nan, math.inf, -math.inf]
    for value in wrong:
        with pytest.raises(InvalidRequestError, match=f'sampling.{name} is .*expected'):
            Sampling(**{name: value}).checked(VOCABULARY)
    for value in (low, high):
        Sampling(**{name: value}).checked(VOCABULARY)


def test_zero_means_off_where_it_is_no_value():
    assert Sampling(top_p=0.0, repetition_penalty=0.0).checked(9) == Sampling()
    for name in ('temperature', 'repetition_penalty'):
        with pytest.raises(InvalidRequestError, match=f'sampling.{name} is 1e-05, expected 0 or'):
            Sampling(**{name: 1e-5}).checked(9)


@pytest.mark.parametrize('bias, word', [
    (((VOCABULARY, 1.0),), 'logit_bias_ids has 60'), (((-1, 1.0),), 'logit_bias_ids has -1'),
    (((1, math.nan),), 'logit_bias_values has nan'), (((1, 101.0),), 'logit_bias_values has 101'),
    (((1, -math.inf),), 'logit_bias_values has -inf')])
def test_a_bias_that_cannot_be_meant_is_refused_by_name(bias, word):
    with pytest.raises(InvalidRequestError, match=word):
        Sampling(logit_bias=bias).checked(VOCABULARY)
