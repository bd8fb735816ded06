# SPDX-License-Identifier: Apache-2.0
"""The draft-verify loop: the same tokens as plain greedy decoding, whoever drafts."""

from dataclasses import replace

from conftest import build_llama, PADDED_VOCABULARY, PROMPTS, REAL_VOCABULARY
from fakes import (
    counting,
    DraftTrouble,
    EOS,
    FakeClock,
    FakeDrafter,
    FakeTarget,
    scripted,
    VOCABULARY,
)
from hypothesis import given
from hypothesis import strategies as st
import pytest
import torch

from memspec_ros.bench.exact import by_transformers
from memspec_ros.decoding.chance import Chance
from memspec_ros.decoding.engine import DraftFailure, Engine
from memspec_ros.decoding.sampling import Prefix, Sampling
from memspec_ros.decoding.verification import verify_greedy
from memspec_ros.models.bundle import load_bundle
from memspec_ros.models.drafts import KINDS
from memspec_ros.models.drafts.shared_layers import SharedLayersDrafter
from memspec_ros.models.state import Proposal
from memspec_ros.models.target import load_target
from memspec_ros.models.target_files import locate_target

LENGTH = 28
KIND_NAMES = ('none', 'near', 'far', 'top', 'noise', 'lookup')


def decode(engine, drafter, prompt, count, gamma, stop_ids=frozenset(), records=None):
    """Decode as the controller does, with one draft or none; the tokens put out."""
    kept = next(chunks := engine.prefill(list(prompt)))
    if drafter is not None:
        drafter.restart(kept)
    for _ in chunks:
        pass
    output = []
    while len(output) < count and not (output and output[-1] in stop_ids):
        tokens, record = engine.step(drafter, gamma, count - len(output), stop_ids)
        assert 1 <= len(tokens) == record.emitted <= gamma + 1
        assert record.accepted <= record.drafted <= gamma
        assert engine.state.held == len(engine.state.tokens) - 1
        output += tokens
        if records is not None:
            records.append(record)
    assert engine.state.output == output
    return output


@pytest.fixture(scope='module')
def kinds(full_bundle, target):
    bundle = load_bundle(full_bundle)
    locate_target(bundle)
    return {spec.id: KINDS[spec.kind](spec, bundle, target, 512 + 7) for spec in bundle.drafts}


@pytest.fixture(scope='module')
def engine(target, kinds):
    depths = frozenset().union(*(kind.depths for kind in kinds.values()))
    return Engine(target, 500, 6, depths, FakeClock())


@pytest.fixture(scope='module')
def make_drafter(full_bundle, kinds):
    from memspec_ros.models.weights import read_tensors
    bundle = load_bundle(full_bundle)

    def make(name):
        if name == 'none':
            return None
        path = bundle.weight_file(bundle.draft(name))
        return kinds[name].attach({} if path is None else read_tensors(path))
    return make


@pytest.mark.parametrize('gamma', range(7))
@pytest.mark.parametrize('name', KIND_NAMES)
def test_every_draft_kind_and_gamma_equals_transformers_greedy(
        engine, make_drafter, greedy, name, gamma):
    prompt = PROMPTS[gamma % 2]
    output = decode(engine, make_drafter(name), prompt, LENGTH, gamma)
    assert output == greedy(prompt, LENGTH)


EVERY_KIND = (*KIND_NAMES, 'feature', 'embedded')
SAMPLING = Sampling(temperature=0.8, top_k=30, top_p=0.95, min_p=0.01, repetition_penalty=1.2,
                    presence_penalty=0.3, frequency_penalty=0.2, logit_bias=((7, 1.0),))


@pytest.fixture
def sampling_engine(engine):
    """The engine, which goes back to greedy decoding after the test."""
    yield engine
    engine.use(Sampling())


@pytest.mark.parametrize('name', EVERY_KIND)
def test_sampled_output_is_plain_sampling_whoever_drafts(sampling_engine, make_drafter, reference,
                                                         name):
    """Pitfall 11; drafts with a trimmed head among them (300 of 320 ids)."""
    for seed, gamma in ((3, 1), (4, 4)):
        chance, tokens = Chance(seed), list(PROMPTS[0])
        while len(tokens) < len(PROMPTS[0]) + 20:
            with torch.inference_mode():
                row = reference(torch.tensor([tokens])).logits[0, -1]
            probs = by_transformers(row, Prefix(tokens, len(PROMPTS[0])), SAMPLING)[1]
            tokens.append(chance.draw(probs, len(tokens)))
        sampling_engine.use(replace(SAMPLING, seed=seed))
        records = []
        output = decode(sampling_engine, make_drafter(name), PROMPTS[0], 20, gamma,
                        records=records)
        assert output == tokens[len(PROMPTS[0]):]
        if name in ('near', 'top', 'feature'):
            assert sum(r.accepted for r in records) > 0


@pytest.mark.parametrize('name', EVERY_KIND)
def test_rejection_sampling_with_every_draft_kind(sampling_engine, make_drafter, name):
    """What is proposed has a distribution (of its own head), and the limit is met."""
    sampling_engine.use(replace(SAMPLING, seed=5), 'rejection')
    outputs = [decode(sampling_engine, make_drafter(name), PROMPTS[0], 15, 4) for _ in range(2)]
    assert outputs[0] == outputs[1] and len(outputs[0]) == 15
    if name in ('none', 'lookup'):
        return
    drafter = make_drafter(name)
    drafter.catch_up(sampling_engine.state, 1000)
    proposal = drafter.propose(sampling_engine.state, 3)
    assert proposal.probs.shape == (3, PADDED_VOCABULARY)
    assert torch.allclose(proposal.probs.sum(-1), torch.ones(3))
    assert (proposal.probs[range(3), proposal.tokens] > 0).all()
    assert (proposal.probs[:, REAL_VOCABULARY:] == 0).all()


@pytest.mark.parametrize('name', EVERY_KIND)
def test_greedy_with_a_penalty_equals_transformers_with_it(sampling_engine, make_drafter,
                                                           reference, name):
    """Pitfall 13: each row of a block sees the drafts before it."""
    with torch.inference_mode():
        ids = reference.generate(
            torch.tensor([PROMPTS[1]]), do_sample=False, max_new_tokens=30,
            repetition_penalty=1.3, pad_token_id=0,
            attention_mask=torch.ones(1, len(PROMPTS[1]), dtype=torch.long))
    sampling_engine.use(Sampling(repetition_penalty=1.3))
    for gamma in (1, 5):
        assert decode(sampling_engine, make_drafter(name), PROMPTS[1], 30, gamma) == ids[
            0, len(PROMPTS[1]):].tolist()


def test_a_cut_off_ends_a_proposal_early_and_changes_no_output(sampling_engine, make_drafter,
                                                              greedy):
    for name in ('near', 'top', 'feature'):
        drafted = {}
        for least in (0.0, 0.1, 0.4):
            sampling_engine.use(Sampling(), min_confidence=least)
            records = []
            assert decode(sampling_engine, make_drafter(name), PROMPTS[0], 30, 4,
                          records=records) == greedy(PROMPTS[0], 30)
            drafted[least] = sum(r.drafted for r in records)
        assert drafted[0.0] > drafted[0.1] > drafted[0.4], (name, drafted)


@pytest.mark.parametrize('prompt', PROMPTS, ids=len)
def test_one_drafter_serves_prompt_after_prompt(engine, make_drafter, greedy, prompt):
    for name in KIND_NAMES[1:]:
        drafter = make_drafter(name)
        for text in (PROMPTS[1], prompt, [*prompt, 9, 9]):
            assert decode(engine, drafter, text, 12, 4) == greedy(text, 12), name


def test_acceptance_is_partial_so_that_both_branches_are_tested(engine, make_drafter):
    for name, least, most in (('near', 0.2, 0.95), ('top', 0.2, 1.0), ('far', 0.0, 0.5),
                              ('noise', 0.0, 0.5)):
        records = []
        decode(engine, make_drafter(name), PROMPTS[0], 60, 4, records=records)
        rate = sum(r.accepted for r in records) / sum(r.drafted for r in records)
        assert least <= rate <= most, (name, rate)


@pytest.mark.parametrize('name', KIND_NAMES)
def test_every_limit_is_met_exactly(engine, make_drafter, greedy, name):
    """Pitfalls 3 and 4: no overshoot by gamma, never short, one token included."""
    drafter = make_drafter(name)
    for limit in range(1, 15):
        assert decode(engine, drafter, PROMPTS[0], limit, 4) == greedy(PROMPTS[0], limit)


@pytest.mark.parametrize('name', KIND_NAMES)
def test_every_stop_position_cuts_at_the_first_stop_token(engine, make_drafter, greedy, name):
    """Pitfall 1: wherever in a block the stop token falls, nothing comes after it."""
    drafter, plain = make_drafter(name), greedy(PROMPTS[0], 14)
    for stop in dict.fromkeys(plain):
        expected = plain[:plain.index(stop) + 1]
        assert decode(engine, drafter, PROMPTS[0], 14, 4, frozenset({stop})) == expected
    stop = plain[9]
    assert greedy(PROMPTS[0], 14, eos=(stop,)) == plain[:plain.index(stop) + 1]


@pytest.mark.parametrize('gamma', range(7))
def test_stop_at_every_place_of_an_accepted_block(gamma):
    for place in range(12):
        output = [*range(50, 50 + place), EOS, *range(90, 110)]
        target = FakeTarget(scripted(3, output))
        drafter = FakeDrafter(scripted(3, output))
        engine = Engine(target, 200, 6, frozenset(), FakeClock())
        records = []
        tokens = decode(engine, drafter, [1, 2, 3], 100, gamma, frozenset({EOS}), records)
        assert tokens == output[:place + 1]
        assert sum(r.emitted for r in records) == place + 1
        assert sum(r.accepted for r in records) <= place + 1


def test_without_stop_ids_decoding_goes_on_past_eos():
    output = [5, EOS, 6, EOS, 7, 8]
    engine = Engine(FakeTarget(scripted(1, output)), 100, 4, frozenset(), FakeClock())
    assert decode(engine, FakeDrafter(scripted(1, output)), [1], 6, 4) == output


@pytest.mark.parametrize('name', ['near', 'far', 'top', 'noise', 'lookup'])
@pytest.mark.parametrize('gamma', [1, 3, 6])
def test_proposals_after_many_rejections_equal_those_of_a_fresh_prefill(
        engine, make_drafter, name, gamma):
    """Pitfall 5: a draft cache off by one after a rejection lets acceptance decay."""
    drafter = make_drafter(name)
    decode(engine, drafter, PROMPTS[0], 40, gamma)
    drafter.catch_up(engine.state, 10_000)
    proposal = drafter.propose(engine.state, 6).tokens
    fresh = make_drafter(name)
    fresh.restart(0)
    fresh.catch_up(engine.state, 10_000)
    assert fresh.propose(engine.state, 6).tokens == proposal
    assert len(proposal) in ((6,) if name != 'lookup' else (0, 6))


def test_all_accepted_rounds_catch_up_on_the_last_drafted_token(
        engine, kinds, model_dirs, greedy):
    """Pitfall 6: after an all-accepted round the last draft token has no draft KV yet."""
    from memspec_ros.models.weights import read_tensors
    twin = kinds['near'].attach(read_tensors(model_dirs / 'twin' / 'model.safetensors'))
    records = []
    output = decode(engine, twin, PROMPTS[0], 31, 4, records=records)
    assert output == greedy(PROMPTS[0], 31)
    # The draft is the target itself: a wrong cache position would show as a rejection.
    assert [r.accepted for r in records] == [r.drafted for r in records]
    assert [r.drafted for r in records] == [4] * 6 + [0]


def test_a_causal_lm_keeps_what_was_accepted_and_runs_nothing_twice(engine, make_drafter):
    drafter = make_drafter('near')
    drafter.restart(next(engine.prefill(PROMPTS[0])))
    list(engine.prefill(PROMPTS[0]))
    seen = set()
    for _ in range(25):
        _, record = engine.step(drafter, 4, 100, frozenset())
        everything = record.accepted == record.drafted
        # Only an all-accepted round leaves a position to catch up with.
        assert drafter.lag(engine.state) == drafter.lm.length - drafter.cached + everything
        assert drafter.lm.length == drafter.cached
        seen.add(everything)
    assert seen == {False, True}


@pytest.mark.parametrize('name', ['near', 'top', 'lookup'])
def test_a_block_cut_at_a_stop_token_leaves_the_draft_in_step(
        engine, kinds, model_dirs, make_drafter, greedy, name):
    """Pitfall 5, where what was accepted ends with the stop token itself."""
    from memspec_ros.models.weights import read_tensors
    plain = greedy(PROMPTS[0], 20)
    for place in range(1, 6):
        drafter = make_drafter(name)
        if name == 'near':  # the target itself: the block is accepted up to the cut
            drafter = kinds['near'].attach(read_tensors(model_dirs / 'twin/model.safetensors'))
        decode(engine, drafter, PROMPTS[0], 20, 6, frozenset({plain[place]}))
        tokens, _ = engine.step(drafter, 4, 10, frozenset())
        assert tokens == plain[place + 1:place + 1 + len(tokens)]
        drafter.catch_up(engine.state, 1000)
        fresh = make_drafter(name)
        if name == 'near':
            assert drafter.propose(engine.state, 3).tokens == greedy(engine.state.tokens, 3)
        else:
            fresh.catch_up(engine.state, 1000)
            assert (drafter.propose(engine.state, 3).tokens
                    == fresh.propose(engine.state, 3).tokens)


def test_a_draft_that_paused_catches_up_and_proposes_as_if_it_had_not(
        engine, make_drafter, greedy):
    for name in ('near', 'top', 'lookup'):
        first, second = make_drafter(name), make_drafter('far')
        output = []
        kept = next(chunks := engine.prefill(PROMPTS[1]))
        for drafter in (first, second):
            drafter.restart(kept)
        list(chunks)
        # First draft, then another, then none (gamma = 0), then the first again.
        for drafter, gamma in [(first, 4)] * 3 + [(second, 3)] * 4 + [(None, 0)] * 3 + [
                (first, 0)] * 2 + [(first, 4)] * 3:
            tokens, _ = engine.step(drafter, gamma, 100, frozenset())
            output += tokens
        assert output == greedy(PROMPTS[1], len(output)), name
        first.catch_up(engine.state, 10_000)
        fresh = make_drafter(name)
        fresh.restart(0)
        fresh.catch_up(engine.state, 10_000)
        assert (first.propose(engine.state, 5).tokens
                == fresh.propose(engine.state, 5).tokens), name


@pytest.mark.parametrize('name', ['near', 'top', 'noise', 'feature', 'embedded', 'lookup'])
def test_drafts_that_are_only_asked_change_nothing(engine, make_drafter, greedy, name):
    """A draft goes on as if neither it nor another had been asked in between."""
    plain, asked = [], []
    decode(engine, make_drafter(name), PROMPTS[1], 30, 4, records=plain)
    engine.state.restart([0])
    drafter, bystander = make_drafter(name), make_drafter('top' if name == 'near' else 'near')
    list(engine.prefill(PROMPTS[1]))
    output = []
    while len(output) < 30:
        state = engine.state
        first = engine.ask(drafter, 2)
        assert len(engine.ask(bystander, 3)) == 3
        assert engine.ask(drafter, 2) == first
        assert set(state.kv.lengths) == {state.held} and state.held == len(state.tokens) - 1
        tokens, record = engine.step(drafter, 4, 30 - len(output), frozenset())
        output += tokens
        asked.append(record)
    assert output == greedy(PROMPTS[1], 30)
    assert [(r.drafted, r.accepted) for r in asked] == [(r.drafted, r.accepted) for r in plain]


def test_asking_keeps_within_the_context_and_reports_a_failure():
    engine = Engine(FakeTarget(counting), 10, 4, frozenset(), FakeClock())
    list(engine.prefill([1, 2, 3]))
    assert engine.ask(FakeDrafter(counting), 9) == [4, 5, 6, 7]
    list(engine.prefill(list(range(8))))
    assert engine.ask(FakeDrafter(counting), 4) == [8]
    for method in ('catch_up', 'propose', 'update'):
        with pytest.raises(DraftFailure, match=f'{method} failed'):
            engine.ask(FakeDrafter(counting, trouble={method: 0}), 2)
        assert engine.state.held == 7
    list(engine.prefill(list(range(10))))
    assert engine.ask(FakeDrafter(counting), 4) == []


def test_a_cold_draft_warms_over_several_iterations(engine, make_drafter, greedy, monkeypatch):
    monkeypatch.setattr('memspec_ros.decoding.engine.CATCH_UP_ROWS', 10)
    # A prompt this short would otherwise be made up for within two proposals.
    monkeypatch.setattr(SharedLayersDrafter, 'rows_with_proposal', 0)
    for name in ('near', 'top'):
        records = []
        prompt = PROMPTS[3]
        assert decode(engine, make_drafter(name), prompt, 20, 4, records=records) == greedy(
            prompt, 20)
        drafted = [r.drafted for r in records]
        assert drafted[:4] == [0] * 4 and drafted[6] > 0, name


@pytest.mark.parametrize('name', KIND_NAMES)
def test_second_turn_reuses_the_prefix_and_changes_nothing(engine, make_drafter, greedy, name):
    """Pitfall 39: a conversation's earlier turns are not evaluated again."""
    drafter = make_drafter(name)
    first = decode(engine, drafter, PROMPTS[1], 15, 3)
    held = engine.state.held
    second = [*PROMPTS[1], *first, 77, 78, 79]
    kept = next(chunks := engine.prefill(second))
    assert kept == held == len(PROMPTS[1]) + 14
    chunks.close()
    assert decode(engine, drafter, second, 15, 3) == greedy(second, 15)
    # An earlier branching point: only what is common is kept.
    third = [*PROMPTS[1], first[0], (first[1] + 1) % 300, 5]
    assert next(engine.prefill(third)) == len(PROMPTS[1]) + 1
    assert decode(engine, drafter, third, 15, 3) == greedy(third, 15)


def test_the_same_prompt_again_runs_at_least_its_last_token(engine, greedy):
    assert decode(engine, None, PROMPTS[0], 3, 0) == greedy(PROMPTS[0], 3)
    assert next(engine.prefill(PROMPTS[0])) == len(PROMPTS[0]) - 1
    assert decode(engine, None, PROMPTS[0], 3, 0) == greedy(PROMPTS[0], 3)
    assert decode(engine, None, PROMPTS[0][:2], 3, 0) == greedy(PROMPTS[0][:2], 3)


def test_prefill_in_any_chunks_is_the_same(engine, greedy):
    expected = greedy(PROMPTS[3], 5)
    for chunk in (1, 2, 7, 44, 45, 64):
        engine.state.restart([0])
        held = list(engine.prefill(PROMPTS[3], chunk))
        assert held[-1] == len(PROMPTS[3]) - 1 and held == sorted(set(held))
        output = []
        while len(output) < 5:
            output += engine.step(None, 0, 1, frozenset())[0]
        assert output == expected


def test_prefill_interrupted_half_way_leaves_a_usable_state(engine, greedy):
    engine.state.restart([0])
    chunks = engine.prefill(PROMPTS[3], 10)
    assert [next(chunks), next(chunks), next(chunks)] == [0, 10, 20]
    chunks.close()
    assert next(engine.prefill(PROMPTS[3])) == 20
    assert decode(engine, None, PROMPTS[3], 6, 0) == greedy(PROMPTS[3], 6)


def test_rollback_sets_lengths_and_copies_nothing(engine, make_drafter):
    """Pitfall 7: no reallocation of the cache, whatever is rejected."""
    kv, hidden = engine.state.kv, engine.state.hidden
    places = [t.data_ptr() for t in (kv.keys, kv.values, *hidden.values())]
    drafter = make_drafter('noise')
    own = [drafter.kv.keys.data_ptr(), drafter.kv.values.data_ptr()]
    decode(engine, drafter, PROMPTS[0], 20, 6)
    assert engine.state.kv is kv
    assert [t.data_ptr() for t in (kv.keys, kv.values, *hidden.values())] == places
    assert [drafter.kv.keys.data_ptr(), drafter.kv.values.data_ptr()] == own


def test_drafting_advances_its_layer_groups_alone_and_takes_them_back(engine, make_drafter):
    drafter = make_drafter('top')
    decode(engine, drafter, PROMPTS[0], 5, 4)
    state = engine.state
    assert state.kv.groups == ((0, 1), (1, 2), (2, 4))
    assert state.kv.lengths == [state.held] * 3
    seen = []
    original = engine.target.run_lower

    def watch(*args):
        result = original(*args)
        seen.append(list(state.kv.lengths))
        return result
    engine.target.run_lower = watch
    try:
        drafter.catch_up(state, 100)
        drafter.propose(state, 3)
    finally:
        del engine.target.run_lower
    held = state.held
    assert seen == [[held + i, held + i, held] for i in (1, 2, 3)]
    assert state.kv.lengths == [held] * 3


def test_hidden_states_are_those_of_the_committed_positions(engine, make_drafter, reference):
    decode(engine, make_drafter('near'), PROMPTS[0], 20, 4)
    tokens, held = engine.state.tokens, engine.state.held
    with torch.inference_mode():
        states = reference(torch.tensor([tokens[:held]]), output_hidden_states=True).hidden_states
    for depth in (1, 2):
        assert torch.allclose(engine.state.hidden[depth][:held], states[depth][0], atol=1e-4)
    assert torch.equal(engine.state.last_hidden, engine.state.hidden[4][held - 1])


def test_the_last_token_of_the_context_can_be_reached(target, kinds, make_drafter, greedy):
    for name in KIND_NAMES:
        engine = Engine(target, 30, 6, frozenset({1, 2}), FakeClock())
        assert decode(engine, make_drafter(name), PROMPTS[0], 25, 6) == greedy(PROMPTS[0], 25)


def test_a_draft_whose_own_context_is_shorter_bows_out(model_dirs, tmp_path, target, engine,
                                                       bundle_maker, greedy):
    """Pitfall 16: the draft's context ends before the target's, decoding goes on without it."""
    import json
    import shutil

    from memspec_ros.models.weights import read_tensors
    shutil.copytree(model_dirs / 'twin', tmp_path / 'short')
    config = json.loads((tmp_path / 'short' / 'config.json').read_text())
    config['max_position_embeddings'] = 16
    (tmp_path / 'short' / 'config.json').write_text(json.dumps(config))
    bundle_maker.add_draft('short', 'causal_lm', 'short')
    bundle = load_bundle(bundle_maker.write())
    locate_target(bundle)
    kind = KINDS['causal_lm'](bundle.drafts[0], bundle, target, 512)
    drafter = kind.attach(read_tensors(tmp_path / 'short' / 'model.safetensors'))
    records = []
    output = decode(engine, drafter, PROMPTS[0], 40, 4, records=records)
    assert output == greedy(PROMPTS[0], 40)
    assert all(r.drafted == r.accepted for r in records)
    assert records[0].drafted == 4 and records[-2].drafted == 0


@pytest.mark.parametrize('drafted', [[], [7], [7, 8, 9], [0, 0, 0, 0]])
def test_verification_accepts_the_longest_prefix_that_is_the_argmax(drafted):
    for agreeing in range(len(drafted) + 1):
        choices = [*drafted[:agreeing], *[50 + i for i in range(len(drafted) + 1 - agreeing)]]
        logits = torch.zeros(len(choices), 60)
        logits[range(len(choices)), choices] = 1.0
        accepted, tokens = verify_greedy(logits, drafted)
        assert accepted == agreeing and tokens == choices[:agreeing + 1]


@given(st.data())
def test_any_proposals_leave_the_output_of_a_random_target_unchanged(data):
    """The sceptic's case: distributions, proposals, gammas and limits all chosen at random."""
    seed = data.draw(st.integers(0, 10_000))
    vocabulary = 6

    def next_token(prefix):
        generator = torch.Generator().manual_seed(hash((seed, *prefix)) % 2 ** 40)
        return torch.rand(vocabulary, generator=generator).softmax(0)
    prompt = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    count = data.draw(st.integers(1, 25))
    stops = frozenset(data.draw(st.sets(st.integers(0, 5), max_size=1)))
    expected = list(prompt)
    while len(expected) < len(prompt) + count:
        expected.append(int(next_token(expected).argmax()))
        if expected[-1] in stops:
            break
    engine = Engine(FakeTarget(next_token, vocabulary), 64, 6, frozenset(), FakeClock())
    # Right with a probability of one half, so that blocks break anywhere.
    rng = data.draw(st.randoms(use_true_random=False))
    drafter = FakeDrafter(lambda prefix: int(next_token(prefix).argmax())
                          if rng.random() < 0.5 else rng.randrange(vocabulary))
    gamma = data.draw(st.integers(0, 6))
    assert decode(engine, drafter, prompt, count, gamma, stops) == expected[len(prompt):]


@pytest.mark.parametrize('method', ['catch_up', 'propose'])
def test_a_draft_that_raises_leaves_the_state_as_it_was(method):
    engine = Engine(FakeTarget(counting), 100, 4, frozenset(), FakeClock())
    drafter = FakeDrafter(counting, trouble={method: 0})
    list(engine.prefill([1, 2, 3]))
    with pytest.raises(DraftFailure, match=f'{method} failed') as failure:
        engine.step(drafter, 3, 10, frozenset())
    assert isinstance(failure.value.__cause__, DraftTrouble)
    assert engine.state.tokens == [1, 2, 3] and engine.state.held == 2
    assert engine.step(None, 0, 10, frozenset())[0] == [4]


def test_a_draft_that_raises_half_way_takes_its_layer_groups_back(
        engine, make_drafter, monkeypatch):
    drafter, state = make_drafter('top'), engine.state
    expected = decode(engine, None, PROMPTS[0], 8, 0)
    list(engine.prefill(PROMPTS[0]))
    drafter.restart(0)
    run_lower, left = engine.target.run_lower, [2]

    def failing(*args):
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError('no room')
        return run_lower(*args)
    monkeypatch.setattr(engine.target, 'run_lower', failing)
    with pytest.raises(DraftFailure, match='no room'):
        engine.step(drafter, 4, 8, frozenset())
    assert state.kv.lengths == [state.held] * 3 == [len(PROMPTS[0]) - 1] * 3
    output = []
    while len(output) < 8:
        output += engine.step(None, 0, 1, frozenset())[0]
    assert output == expected


def test_a_draft_that_raises_after_verification_costs_no_tokens():
    engine = Engine(FakeTarget(counting), 100, 4, frozenset(), FakeClock())
    list(engine.prefill([1, 2, 3]))
    drafter = FakeDrafter(counting, trouble={'update': 0})
    tokens, record = engine.step(drafter, 3, 10, frozenset())
    assert tokens == [4, 5, 6, 7] and engine.state.tokens == [1, 2, 3, 4, 5, 6, 7]
    assert record.draft_error == 'update failed'


def test_a_draft_with_nothing_to_say_costs_one_row():
    target = FakeTarget(counting)
    engine = Engine(target, 100, 4, frozenset(), FakeClock())
    drafter = FakeDrafter(counting)
    drafter.propose = lambda state, gamma: Proposal([])
    list(engine.prefill([1, 2]))
    tokens, record = engine.step(drafter, 4, 10, frozenset())
    assert tokens == [3] and record.drafted == 0 and target.rows[-1] == 1


def test_gamma_never_exceeds_what_limit_and_context_leave():
    engine = Engine(FakeTarget(counting), 10, 4, frozenset(), FakeClock())
    drafter = FakeDrafter(counting)
    list(engine.prefill([1, 2, 3]))
    drafted = []
    while len(engine.state.tokens) < 10:
        tokens, record = engine.step(drafter, 9, 10, frozenset())
        drafted.append(record.drafted)
    assert drafted == [4, 1] and engine.state.tokens == list(range(1, 11))


def test_records_say_where_the_time_went():
    clock = FakeClock()
    target = FakeTarget(counting, clock=clock, step_sec=1.0, row_sec=0.25)
    engine = Engine(target, 100, 4, frozenset(), clock)
    drafter = FakeDrafter(counting, clock, step_sec=0.125, row_sec=0.5)
    list(engine.prefill([1, 2, 3]))
    _, record = engine.step(drafter, 2, 10, frozenset())
    assert (record.t_catch_up, record.t_draft, record.t_verify) == (1.0, 0.25, 1.75)
    assert record.duration == 3.0 and record.position == 3 and record.rows == 3


def test_padded_vocabularies_of_target_and_draft_may_differ(
        model_dirs, tmp_path, tokenizer_dir, reference, greedy, bundle_maker, engine, target):
    """Pitfall 10: rows beyond the real ids are padding; a draft never proposes them."""
    import shutil

    from memspec_ros.models.tokenizer import read_vocabulary
    from memspec_ros.models.weights import read_tensors
    real = len(read_vocabulary(tokenizer_dir))
    assert real == REAL_VOCABULARY < PADDED_VOCABULARY
    # One draft padded to fewer rows than the target has, one to more.
    for rows in (real, PADDED_VOCABULARY + 64):
        path = tmp_path / f'draft{rows}'
        model = build_llama(5, vocab_size=rows, num_hidden_layers=1)
        with torch.no_grad():  # its favourites are ids that do not exist
            model.lm_head.weight[real:] *= 50.0
        model.save_pretrained(path)
        shutil.copy(tokenizer_dir / 'tokenizer.json', path)
        bundle_maker.add_draft(path.name, 'causal_lm', path.name)
    bundle = load_bundle(bundle_maker.write())
    locate_target(bundle)
    for spec in bundle.drafts:
        drafter = KINDS['causal_lm'](spec, bundle, target, 512).attach(
            read_tensors(bundle.weight_file(spec)))
        proposed = []
        original = drafter.propose

        def propose(state, gamma, original=original, proposed=proposed):
            proposal = original(state, gamma)
            proposed.extend(proposal.tokens)
            return proposal
        drafter.propose = propose
        # The prompt itself holds a padding id, as a target may put one out.
        prompt = [*PROMPTS[0], PADDED_VOCABULARY - 1, 7]
        assert decode(engine, drafter, prompt, 20, 4) == greedy(prompt, 20)
        assert proposed and max(proposed) < real


def test_a_generic_target_decodes_the_same(model_dirs, greedy, full_bundle):
    target = load_target(model_dirs / 'target', torch.float32, torch.device('cpu'), 512,
                         generic=True)
    engine = Engine(target, 500, 6, frozenset(), FakeClock())
    bundle = load_bundle(full_bundle)
    locate_target(bundle)
    from memspec_ros.models.weights import read_tensors
    near = KINDS['causal_lm'](bundle.draft('near'), bundle, target, 507).attach(
        read_tensors(bundle.weight_file(bundle.draft('near'))))
    for gamma in (0, 2, 5):
        assert decode(engine, near, PROMPTS[0], 20, gamma) == greedy(PROMPTS[0], 20)
    second = [*PROMPTS[0], 4, 4, 4]
    assert decode(engine, near, second, 10, 3) == greedy(second, 10)


def test_the_fake_target_notices_a_cache_that_was_not_rolled_back():
    """Guards this suite: a forgotten rollback must not go unseen."""
    engine = Engine(FakeTarget(lambda prefix: sum(prefix) % VOCABULARY), 100, 4, frozenset(),
                    FakeClock())
    plain = decode(engine, None, [1, 2, 3], 10, 0)
    list(engine.prefill([1, 2, 3]))
    engine.target.forward(engine.state, [3, 200, 201])
    engine.state.held += 2  # a rejected token counted as committed
    engine.state.tokens += plain[:2]
    assert engine.step(None, 0, 1, frozenset())[0] != plain[2:3]
