# SPDX-License-Identifier: Apache-2.0
"""Sampled output has the target's distribution, whatever is drafted, and is keyed by its seed."""

from dataclasses import replace
import itertools

from fakes import FakeClock, FakeDrafter, FakeTarget
from hypothesis import given
from hypothesis import strategies as st
import pytest
import torch

from memspec_ros.bench.chi_square import goodness_of_fit, two_samples
from memspec_ros.bench.exact import (
    by_transformers,
    check,
    coupled_differs,
    outcomes,
    output_error,
    random_logits,
    state_of,
    TOLERANCE,
)
from memspec_ros.decoding import sampler as sampler_module
from memspec_ros.decoding.chance import Chance, Purpose
from memspec_ros.decoding.engine import Engine
from memspec_ros.decoding.sampler import CoupledSampler, make_sampler, RejectionSampler, Sampler
from memspec_ros.decoding.sampling import Prefix, process, Sampling
from memspec_ros.decoding.verification import residual, verify_coupled, verify_rejection
from memspec_ros.models.state import Proposal

PLAIN = Sampling(temperature=1.0, seed=5)
EVERYTHING = Sampling(
    temperature=0.8, top_k=4, top_p=0.9, min_p=0.05, repetition_penalty=1.3,
    presence_penalty=0.4, frequency_penalty=0.3, min_tokens=4, stop_ids=frozenset({4}),
    logit_bias=((2, 0.7),))


# --- the rejection rule, exactly ---

@pytest.mark.parametrize('params', [PLAIN, EVERYTHING, replace(PLAIN, top_k=2),
                                    replace(PLAIN, frequency_penalty=2.0)], ids=range(4))
@pytest.mark.parametrize('gamma', [1, 2, 3])
def test_rejection_sampling_keeps_the_distribution(params, gamma):
    """Pitfalls 11 and 13: q as sampled from, penalties that see the drafts before."""
    vocabulary = 5 if gamma < 3 else 4
    if gamma == 3:
        params = replace(params, stop_ids=frozenset({3} if params.stop_ids else ()))
    target, draft = (random_logits(seed, vocabulary) for seed in (1, 2))
    assert output_error(params, target, draft, gamma) < TOLERANCE


def test_a_trimmed_vocabulary_keeps_the_distribution():
    """The draft knows three of five tokens; its logits are in an order of its own."""
    ids = torch.tensor([4, 0, 3])
    target, whole = random_logits(1), random_logits(2)
    for params in (PLAIN, EVERYTHING):
        assert output_error(params, target, lambda prefix: whole(prefix)[ids], 2, ids) < TOLERANCE


def test_a_confidence_cut_off_keeps_the_distribution():
    target, draft = random_logits(1), random_logits(2)
    lengths = set()
    for least in (0.3, 0.5, 0.7, 1.0):
        assert output_error(PLAIN, target, draft, 2, min_confidence=least) < TOLERANCE
        sampler = RejectionSampler(PLAIN, 5, least)
        choice = sampler.choose(state_of([0, 3], [1]), draft([3, 1]), [])
        lengths.add(choice is None)
    assert lengths == {True, False}


def test_a_draft_that_is_right_or_that_never_is_keeps_the_distribution():
    target = random_logits(1)
    assert output_error(PLAIN, target, target, 2) < TOLERANCE

    def wrong(prefix):  # likes best what the target hardly ever says
        return -3 * target(prefix)
    assert output_error(replace(PLAIN, top_k=2), target, wrong, 2) < TOLERANCE


@pytest.mark.parametrize('token', range(5))
def test_a_one_hot_draft_keeps_the_distribution(token):
    """An n-gram has no distribution: q is 1 for its token."""
    p = torch.stack([random_logits(1)([0, t]).softmax(-1) for t in (1, token)])
    found = outcomes(lambda chance: tuple(
        verify_rejection(p, Proposal([token]), chance, 7)[1]))
    first = [sum(chance for block, chance in found.items() if block[0] == x) for x in range(5)]
    assert torch.allclose(torch.tensor(first), p[0], atol=1e-6)
    second = torch.tensor([found.get((token, x), 0.0) for x in range(5)])
    assert torch.allclose(second / second.sum(), p[1], atol=1e-6)


@pytest.mark.parametrize('sabotage', ['accepts_all', 'recovers_from_p', 'halves_q', 'last_row'])
def test_the_exact_check_sees_a_wrong_rule(monkeypatch, sabotage):
    target, draft = random_logits(1), random_logits(2)
    right = sampler_module.verify_rejection

    def wrong(p, proposal, chance, position):
        tokens, q = proposal.tokens, proposal.probs
        if sabotage == 'accepts_all':
            return len(tokens), [*tokens, chance.draw(p[-1], position + len(tokens))]
        if sabotage == 'recovers_from_p':
            monkeypatch.setattr('memspec_ros.decoding.verification.residual', lambda p, q: p)
        if sabotage == 'halves_q':
            q = q / 2
        if sabotage == 'last_row':
            p = p[[0, *range(len(p) - 1)]]
        return right(p, Proposal(tokens, q), chance, position)
    monkeypatch.setattr(sampler_module, 'verify_rejection', wrong)
    assert output_error(PLAIN, target, draft, 2) > 100 * TOLERANCE


def test_what_the_target_gives_no_chance_is_never_accepted():
    """Pitfall 12: u may be 0, and 0 <= 0 would let it through."""
    chance = Chance(1)

    class Zero:
        def random(self):
            return 0.0
    chance._generator = lambda position, purpose: Zero()
    assert not chance.accepts(0.0, 0.5, 3) and not chance.accepts(0.0, 1.0, 3)
    assert chance.accepts(1e-30, 1.0, 3)


def test_the_residual():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.7, 0.1])
    assert torch.allclose(residual(p, q), torch.tensor([0.75, 0.0, 0.25]))
    assert torch.allclose(residual(p, 0), torch.tensor([0.0, 0.6, 0.4]))
    assert torch.equal(residual(p, p), p)  # nothing is left: the target's own
    assert torch.equal(residual(torch.tensor([1.0, 0.0]), 0), torch.tensor([1.0, 0.0]))


# --- coupling ---

def test_coupled_output_is_plain_sampling_for_all_seeds_and_drafts():
    for params in (PLAIN, EVERYTHING):
        for draft in (random_logits(2), random_logits(1)):
            assert not coupled_differs(params, random_logits(1), draft, 3)


def test_the_check_of_coupling_sees_a_wrong_rule(monkeypatch):
    monkeypatch.setattr(sampler_module, 'verify_coupled', lambda p, drafted, chance, position: (
        len(drafted), [*drafted, chance.draw(p[-1], position + len(drafted))]))
    assert coupled_differs(PLAIN, random_logits(1), random_logits(2), 2)


def test_coupling_accepts_what_the_target_draws_and_little_less_than_is_possible():
    """At least (1 - TV) / (1 + TV) (Daliri et al. 2024); never more than 1 - TV."""
    p, q = (random_logits(seed)([0, 1]).softmax(-1) for seed in (1, 2))
    distance = float((p - q).abs().sum() / 2)
    count = 4000
    same = sum(verify_coupled(torch.stack([p, p]), [Chance(s).draw(q, 3)], Chance(s), 3)[0]
               for s in range(1, count + 1)) / count
    assert (1 - distance) / (1 + distance) - 0.03 < same < 1 - distance + 0.03


# --- whole outputs, by the engine ---

def model(seed, vocabulary=4, spread=1.5):
    logits = random_logits(seed, vocabulary, spread)
    return lambda prefix: logits([0, *prefix]).softmax(-1)


def sampled(params, drafter_of, verification, count=6, gamma=3, prompt=(0, 1, 2), vocabulary=4,
            stop_ids=frozenset()):
    """Output of the engine; ``drafter_of(engine)`` makes its draft, or None."""
    engine = Engine(FakeTarget(model(1, vocabulary), vocabulary), 64, gamma, frozenset(),
                    FakeClock())
    engine.use(params, verification)
    drafter = drafter_of(engine)
    list(engine.prefill(list(prompt)))
    output = []
    while len(output) < count and not (output and output[-1] in stop_ids):
        output += engine.step(drafter, gamma, count - len(output), stop_ids)[0]
    return output


class SamplingDrafter(FakeDrafter):
    """A draft with a model of its own, that chooses as it is told to."""

    def __init__(self, model):
        super().__init__(None)
        self.model = model

    def lag(self, state):
        return 0

    def propose(self, state, gamma):
        choices = []
        for _ in range(gamma):
            drafted = [token for token, _ in choices]
            choices.append(state.choose(self.model([*state.tokens, *drafted]).log(), drafted,
                                        None))
        return Proposal.of(choices)


DRAFTS = {'none': lambda engine: None, 'own': lambda engine: SamplingDrafter(model(2)),
          'twin': lambda engine: SamplingDrafter(model(1)),
          'one_hot': lambda engine: FakeDrafter(lambda prefix: (prefix[-1] + 1) % 4)}


@pytest.mark.parametrize('params', [PLAIN, EVERYTHING], ids=['plain', 'everything'])
def test_the_engine_gives_plain_sampling_whoever_drafts(params):
    params = replace(params, stop_ids=frozenset({3} if params.stop_ids else ()))
    for seed in range(1, 40):
        params = replace(params, seed=seed)
        outputs = {name: sampled(params, draft, 'coupled', gamma=gamma)
                   for (name, draft), gamma in itertools.product(DRAFTS.items(), (1, 3))}
        assert len(set(map(tuple, outputs.values()))) == 1
        expected, chance = [0, 1, 2], Chance(seed)
        while len(expected) < 9:
            row = model(1)(expected).log()
            probs = by_transformers(row, Prefix(expected, 3), params)[1]
            expected.append(chance.draw(probs, len(expected)))
        assert outputs['none'] == expected[3:]


@pytest.mark.parametrize('verification, draft', [
    ('rejection', 'own'), ('rejection', 'one_hot'), ('coupled', 'own')])
def test_three_tokens_over_several_iterations_have_the_target_s_distribution(
        verification, draft):
    """What was drafted after a rejected token is drawn anew, by the same key: no bias."""
    count, vocabulary = 3000, 4
    counts = torch.zeros(vocabulary ** 3)
    for seed in range(1, count + 1):
        a, b, c = sampled(replace(PLAIN, seed=seed), DRAFTS[draft], verification, count=3)
        counts[(a * vocabulary + b) * vocabulary + c] += 1
    expected = torch.tensor([
        float(model(1)([1, 2])[a] * model(1)([2, a])[b] * model(1)([a, b])[c])
        for a, b, c in itertools.product(range(vocabulary), repeat=3)])
    assert goodness_of_fit(counts, expected).p > 0.001


@pytest.mark.parametrize('verification', ['coupled', 'rejection'])
def test_the_same_seed_gives_the_same_output_and_another_another(verification):
    outputs = [sampled(replace(PLAIN, seed=seed), DRAFTS['own'], verification, count=20)
               for seed in (7, 7, 8, -7, 2 ** 63 - 1)]
    assert outputs[0] == outputs[1] and len(set(map(tuple, outputs))) == 4


@pytest.mark.parametrize('draft', DRAFTS)
def test_greedy_with_penalties_is_plain_decoding_with_the_same_processors(draft):
    """Pitfall 13: without the drafts in its prefix, a row would repeat what they say."""
    params = replace(EVERYTHING, temperature=0.0, stop_ids=frozenset({3}), frequency_penalty=1.0)
    expected = [0, 1, 2]
    while len(expected) < 23:
        scores = process(model(1)(expected).log()[None], Prefix(expected, 3), params)
        expected.append(int(scores.argmax()))
    for gamma in (1, 2, 5):
        assert sampled(params, DRAFTS[draft], 'coupled', 20, gamma) == expected[3:]


@pytest.mark.parametrize('temperature', [0.0, 1.0])
@pytest.mark.parametrize('verification', ['coupled', 'rejection'])
def test_no_end_before_min_tokens_wherever_in_a_block_it_would_fall(verification, temperature):
    stop = frozenset({1})
    for seed, least in itertools.product(range(1, 12), range(9)):
        params = Sampling(temperature=temperature, seed=seed, min_tokens=least, stop_ids=stop,
                          logit_bias=((1, 30.0),))  # it would come at once
        output = sampled(params, DRAFTS['twin'], verification, 30, 3, stop_ids=stop)
        assert output.index(1) == least == len(output) - 1


# --- drafts choose by the same function ---

@given(st.integers(0, 1000), st.booleans())
def test_greedy_drafts_follow_the_penalties(seed, trimmed):
    logits = random_logits(seed)([0, 1])
    ids = torch.tensor([4, 2, 1]) if trimmed else torch.arange(5)
    params = replace(EVERYTHING, temperature=0.0)
    state = state_of([0, 1], [1, 2])
    token, q = Sampler(params, 5).choose(state, logits[ids], [2], ids)
    whole = torch.full((1, 5), -torch.inf)
    whole[0, ids] = logits[ids]
    assert q is None and token == int(
        process(whole, Prefix([0, 1, 1, 2, 2], 2), params).argmax())
    assert Sampler(Sampling(), 5).choose(state, logits[ids], [2], ids)[0] == int(
        ids[logits[ids].argmax()])


@pytest.mark.parametrize('params', [replace(EVERYTHING, temperature=t) for t in (0.0, 1.0)])
@pytest.mark.parametrize('verification', ['coupled', 'rejection'])
def test_a_draft_that_knows_only_what_is_banned_proposes_nothing(params, verification):
    sampler, state = make_sampler(params, 5, verification), state_of([0, 1], [1])
    assert sampler.choose(state, torch.zeros(1), [], torch.tensor([4])) is None
    assert sampler.choose(state, torch.zeros(2), [], torch.tensor([4, 3]))[0] == 3


def test_greedy_drafts_stop_where_they_are_unsure():
    sampler, state = Sampler(Sampling(), 4, min_confidence=0.6), state_of([0, 1], [])
    assert sampler.choose(state, torch.tensor([0.0, 1.0, 0.0, 0.0]), []) is None
    assert sampler.choose(state, torch.tensor([0.0, 3.0, 0.0, 0.0]), []) == (1, None)


# --- random numbers ---

def test_draws_are_keyed_by_position_and_purpose_and_nothing_else():
    probs = torch.rand(50, generator=torch.Generator().manual_seed(1))
    first = Chance(9)
    drawn = {(position, purpose): first.draw(probs, position, purpose)
             for position in range(20) for purpose in (Purpose.TOKEN, Purpose.DRAFT)}
    again = Chance(9)
    for position in range(5):  # what others drew, or dropped, does not matter
        again.accepts(0.5, 0.7, position)
        again.forget(position)
    assert {key: again.draw(probs, *key) for key in reversed(drawn)} == drawn
    assert len(set(drawn.values())) > 15
    assert any(drawn[i, Purpose.TOKEN] != drawn[i, Purpose.DRAFT] for i in range(5))


def test_draws_of_a_seed_stay_what_they_are():
    """A seed in a log has to give the same answer after an update."""
    chance, probs = Chance(42), torch.full((1000,), 0.001)
    assert [chance.draw(probs, position) for position in range(5)] == [317, 566, 321, 153, 68]


def test_what_has_no_probability_is_never_drawn():
    probs = torch.zeros(30)
    probs[[3, 8]] = torch.tensor([1e-30, 1e-30])
    assert {Chance(seed).draw(probs, 0) for seed in range(50)} == {3, 8}


def test_acceptance_has_the_right_rate():
    rate = sum(Chance(seed).accepts(0.3, 0.5, 4) for seed in range(4000)) / 4000
    assert rate == pytest.approx(0.6, abs=0.03)


# --- the chi-square test itself ---

def test_p_values():
    # Tabulated: 3.841 at one degree of freedom is 5 %, 18.307 at ten too.
    from memspec_ros.bench.chi_square import ChiSquare
    assert ChiSquare(3.841459, 1).p == pytest.approx(0.05, abs=1e-6)
    assert ChiSquare(18.307038, 10).p == pytest.approx(0.05, abs=1e-6)
    assert ChiSquare(0.0, 0).p == 1.0


def test_p_is_uniform_where_both_are_of_one_distribution_and_small_where_not():
    generator = torch.Generator().manual_seed(3)
    probs = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.04, 0.009, 0.001])
    other = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.04, 0.009, 0.001])

    def counts(probs):
        drawn = torch.multinomial(probs, 300, True, generator=generator).tolist()
        return {token: drawn.count(token) for token in set(drawn)}
    ps = sorted(two_samples([(counts(probs), counts(probs)) for _ in range(5)]).p
                for _ in range(200))
    assert all(abs(p - (i + 0.5) / 200) < 0.12 for i, p in enumerate(ps))
    assert two_samples([(counts(probs), counts(other)) for _ in range(9)]).p < 1e-6


def test_strata_that_say_nothing_are_left_out():
    assert two_samples([({1: 3}, {2: 3}), ({1: 50}, {1: 60}), ({1: 9}, {})]).degrees == 0


def test_what_is_impossible_must_not_occur():
    assert goodness_of_fit(torch.tensor([50, 1]), torch.tensor([1.0, 0.0])).p == 0.0
    assert goodness_of_fit(torch.tensor([50, 0]), torch.tensor([1.0, 0.0])).p == 1.0


@pytest.mark.slow
def test_every_combination_of_processors_exactly():
    found = check(report=lambda line: None)
    assert found['combinations'] == 512 and found['largest_error'] < TOLERANCE
    assert found['coupled_differing'] == 0 and found['draws_p'] > 0.001


def test_one_of_two_samplers_by_name():
    assert type(make_sampler(PLAIN, 5, 'coupled')) is CoupledSampler
    assert type(make_sampler(PLAIN, 5, 'rejection')) is RejectionSampler
    assert type(make_sampler(Sampling(), 5, 'rejection')) is Sampler
