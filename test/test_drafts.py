# SPDX-License-Identifier: Apache-2.0
"""Each draft kind by itself: what it proposes, what it leaves alone, how it catches up."""

from conftest import PROMPTS, REAL_VOCABULARY
from hypothesis import given, settings
from hypothesis import strategies as st
import pytest
import torch

from memspec_ros.models.bundle import load_bundle
from memspec_ros.models.drafts import KINDS
from memspec_ros.models.drafts.prompt_lookup import PromptLookupDrafter
from memspec_ros.models.drafts.shared_layers import JUDGED_ROWS
from memspec_ros.models.drafts.vocabulary import TextVocabulary
from memspec_ros.models.state import DecodeState, TargetRun
from memspec_ros.models.target_files import locate_target
from memspec_ros.models.weights import read_tensors

NAMES = ('near', 'far', 'top', 'noise', 'feature', 'embedded')


class _Cache:
    def set_length(self, length):
        pass


def state_of(tokens):
    state = DecodeState(_Cache(), {}, 1000)
    state.tokens = list(tokens)
    return state


@pytest.fixture(scope='module')
def kinds(full_bundle, target):
    bundle = load_bundle(full_bundle)
    locate_target(bundle)
    return bundle, {spec.id: KINDS[spec.kind](spec, bundle, target, 200)
                    for spec in bundle.drafts}


@pytest.fixture
def make(kinds):
    bundle, by_name = kinds

    def make(name):
        return by_name[name].attach(read_tensors(bundle.weight_file(bundle.draft(name))))
    return make


@pytest.fixture
def prefilled(target):
    """A state in which a prompt has been run up to its last token."""
    def run(ids):
        state = target.new_state(200, frozenset({1, 2}))
        state.tokens = list(ids)
        target.forward(state, ids[:-1])
        state.hold(len(ids) - 1)
        return state
    return run


def test_which_kinds_need_a_slot(kinds):
    _, by_name = kinds
    assert {name for name, kind in by_name.items() if kind.slot_free} == {'lookup'}
    assert by_name['top'].depths == {2} and by_name['noise'].depths == {1}
    assert by_name['near'].depths == frozenset()
    assert by_name['lookup'].attach({}).lag(state_of([1, 2])) == 0


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('gamma', [0, 1, 4])
def test_a_proposal_is_no_longer_than_asked_and_changes_nothing_committed(
        make, prefilled, target, name, gamma):
    state = prefilled(PROMPTS[1])
    held = state.held
    kept = [state.kv.keys[..., :held, :].clone(), state.kv.values[..., :held, :].clone(),
            *(h[:held].clone() for h in state.hidden.values())]
    drafter = make(name)
    drafter.catch_up(state, 1000)
    proposal = drafter.propose(state, gamma)
    assert len(proposal.tokens) == gamma and proposal.probs is None
    assert all(0 <= token < REAL_VOCABULARY for token in proposal.tokens)
    assert state.tokens == PROMPTS[1] and state.held == held
    assert set(state.kv.lengths) == {held}
    now = [state.kv.keys[..., :held, :], state.kv.values[..., :held, :],
           *(h[:held] for h in state.hidden.values())]
    assert all(torch.equal(a, b) for a, b in zip(kept, now))


@pytest.mark.parametrize('name', NAMES)
def test_catching_up_in_any_steps_is_the_same(make, prefilled, name):
    state = prefilled(PROMPTS[3])
    expected = None
    for limit in (1000, 1, 7, 44):
        drafter = make(name)
        assert drafter.lag(state) == len(PROMPTS[3]) - 1
        assert drafter.propose(state, 3).tokens == []  # cold: it would only guess
        while lag := drafter.lag(state):
            drafter.catch_up(state, limit)
            assert drafter.lag(state) == max(0, lag - limit)
        proposal = drafter.propose(state, 5).tokens
        expected = expected or proposal
        assert proposal == expected


@pytest.mark.parametrize('name', NAMES)
def test_asking_twice_gives_the_same_proposal(make, prefilled, name):
    state = prefilled(PROMPTS[1])
    drafter = make(name)
    drafter.catch_up(state, 1000)
    first = drafter.propose(state, 6).tokens
    drafter.update(state, 0) if name not in ('near', 'far') else drafter.restart(state.held)
    drafter.catch_up(state, 1000)
    assert drafter.propose(state, 6).tokens == first
    assert drafter.propose(state, 2).tokens == first[:2] or name in ('near', 'far')


@pytest.mark.parametrize('name', ['near', 'far'])
def test_a_causal_lm_proposes_its_own_greedy_continuation(make, prefilled, model_dirs, name):
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(model_dirs / name)
    ids, expected = list(PROMPTS[1]), []
    with torch.inference_mode():
        for _ in range(5):
            row = model(torch.tensor([ids + expected])).logits[0, -1]
            expected.append(int(row[:REAL_VOCABULARY].argmax()))
    drafter = make(name)
    state = prefilled(ids)
    drafter.catch_up(state, 1000)
    assert drafter.propose(state, 5).tokens == expected


def test_a_shared_layers_draft_with_all_of_the_targets_layers_is_the_target(
        make, prefilled, kinds, trainable, greedy):
    """Exported in bfloat16, so equality is asked of the untouched weights."""
    bundle, by_name = kinds
    layers = {f'layers.{i}.{name}': tensor for i, layer in enumerate(trainable.model.layers[2:])
              for name, tensor in layer.tensors().items()}
    drafter = by_name['top'].attach({**layers, 'norm': trainable.model.norm})
    state = prefilled(PROMPTS[0])
    drafter.catch_up(state, 1000)
    assert drafter.propose(state, 6).tokens == greedy(PROMPTS[0], 6)


def test_the_shared_head_is_cut_once_for_all_drafts(kinds, target):
    bundle, by_name = kinds
    assert by_name['top'].head is by_name['noise'].head
    assert by_name['top'].head.shape == (REAL_VOCABULARY, target.hidden_size)
    assert bundle.shared_head_of(target) is by_name['top'].head


@pytest.mark.parametrize('name', NAMES)
def test_a_new_prompt_keeps_what_it_shares_with_the_last(make, prefilled, name):
    drafter = make(name)
    drafter.catch_up(prefilled(PROMPTS[1]), 1000)
    other = [*PROMPTS[1][:6], 99, 98, 97]
    state = prefilled(other)
    drafter.restart(6)
    assert drafter.lag(state) == 2
    drafter.catch_up(state, 1000)
    fresh = make(name)
    fresh.catch_up(state, 1000)
    assert drafter.propose(state, 5).tokens == fresh.propose(state, 5).tokens


@pytest.mark.parametrize('name', NAMES)
def test_at_the_end_of_its_buffers_a_draft_proposes_less(make, prefilled, name):
    ids = [(3 * i + 1) % REAL_VOCABULARY for i in range(198)]
    state = prefilled(ids)
    drafter = make(name)
    drafter.catch_up(state, 1000)
    assert len(drafter.propose(state, 9).tokens) in (2, 3)


def brute_force(tokens, sizes, gamma):
    """What prompt lookup should propose, by searching backwards."""
    for size in sorted(sizes, reverse=True):
        if len(tokens) <= size:
            continue
        tail = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start:start + size] == tail:
                copied = list(tokens)
                place = start + size
                while len(copied) < len(tokens) + gamma:
                    copied.append(copied[place])
                    place += 1
                return copied[len(tokens):]
    return []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40),
       st.lists(st.integers(1, 4), min_size=1, max_size=3, unique=True), st.integers(0, 6),
       st.lists(st.integers(1, 40), max_size=6))
@settings(max_examples=300)
def test_prompt_lookup_finds_the_latest_longest_match(tokens, sizes, gamma, cuts):
    """However many tokens were committed between its turns."""
    drafter = PromptLookupDrafter(tuple(sizes))
    for cut in sorted({min(c, len(tokens)) for c in cuts}):
        drafter.propose(state_of(tokens[:cut]), gamma)
    proposal = drafter.propose(state_of(tokens), gamma).tokens
    assert proposal == (brute_force(tokens, sizes, gamma) if gamma else [])


def test_prompt_lookup_forgets_the_last_prompt():
    drafter = PromptLookupDrafter((2,))
    drafter.propose(state_of([1, 2, 3, 4]), 2)
    drafter.restart(4)
    assert drafter.propose(state_of([9, 8, 1, 2]), 2).tokens == []
    assert drafter.propose(state_of([9, 8, 1, 2, 9, 8]), 2).tokens == [1, 2]


def test_loading_leaves_the_skeleton_empty(kinds, make):
    """Pitfall 19: skeletons are built once, on one thread; a load moves bytes only."""
    _, by_name = kinds
    make('near')
    assert all(p.is_meta for p in by_name['near'].skeleton.parameters())


def test_dropping_a_draft_frees_its_weights(make):
    """Pitfall 23."""
    import gc
    import weakref
    gone = []
    for name in NAMES * 2:
        drafter = make(name)
        gone.append(weakref.ref(drafter))
        if name in ('near', 'far'):
            gone.append(weakref.ref(drafter.lm.model))
        del drafter
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)


def test_a_lookup_says_how_long_its_match_is(make):
    for tokens, size in (([1, 2, 3], 0), ([1, 2, 3, 9, 2, 3], 2),
                         ([1, 2, 3, 4, 5, 9, 1, 2, 3, 4], 4)):
        assert PromptLookupDrafter().match(state_of(tokens)) == size
    assert make('top').match(state_of([1, 1, 1, 1, 1])) == 0


@pytest.mark.parametrize('name', ['top', 'noise', 'feature', 'embedded'])
def test_a_draft_judges_itself_as_a_trace_judges_it(make, kinds, target, prefilled, name):
    """Whether it drafted, caught up, or came late: the answer's tokens that it had right."""
    prompt, answer = PROMPTS[0], [*PROMPTS[1], *PROMPTS[0], *PROMPTS[3]][:60]
    bundle, by_name = kinds
    tokens = [*prompt, *answer]
    whole = prefilled([*tokens, 1])
    run = TargetRun(tokens, {depth: hidden[:len(tokens)].clone()
                             for depth, hidden in whole.hidden.items()})
    ranks = by_name[name].rollout_ranks(
        read_tensors(bundle.weight_file(bundle.draft(name))), run, len(prompt), 4, 8)
    right = (ranks[:, 0] == 1).tolist()
    drafting, late = make(name), make(name)
    state = prefilled(prompt)
    state.prompt_length = len(prompt)
    drafting.catch_up(state, 1000)
    assert drafting.judge(state) == (0, 0)  # of the prompt it says nothing
    found = []
    for place in range(0, len(answer), 5):
        state.tokens = tokens[:len(prompt) + place + 1]
        target.forward(state, tokens[state.held:len(state.tokens) - 1])
        state.hold(len(state.tokens) - 1)
        drafting.propose(state, 3) if place % 2 else drafting.catch_up(state, 1000)
        drafting.propose(state, 2)  # asking again says nothing new
        found.append(drafting.judge(state))
        assert drafting.judge(state) == (0, 0)
    end = place + 1
    assert [count for _, count in found] == [1] + [5] * (len(found) - 1)
    assert [hits for hits, _ in found] == [right[0], *(
        sum(right[first:first + 5]) for first in range(1, end, 5))]
    late.catch_up(state, 1000)
    assert late.judge(state) == (sum(right[:end]), end)
    late.restart(0)
    assert late.judge(state) == (0, 0)


def test_judging_knows_tokens_that_only_the_text_holds(make, target, prefilled, monkeypatch):
    drafter, rare = make('top'), PROMPTS[0][-1]
    trimmed = [token for token in range(target.vocab_size) if token != rare]
    drafter.vocabulary = TextVocabulary(torch.tensor(trimmed), {
        token: place for place, token in enumerate(trimmed)})
    state = prefilled([*PROMPTS[0], rare])
    state.prompt_length = len(PROMPTS[0])
    drafter.catch_up(state, 1000)

    def sure_of_the_last(top, further):
        logits = torch.zeros(len(top), len(trimmed) + len(further))
        logits[:, -1] = 1.0
        return logits

    monkeypatch.setattr(drafter, 'logits', sure_of_the_last)
    assert drafter.judge(state) == (1, 1)


def test_what_is_judged_is_the_latest(make, target, prefilled):
    state, drafter = prefilled(PROMPTS[0]), make('top')
    for _ in range(JUDGED_ROWS + 20):
        state.tokens.append(7)
        target.forward(state, [state.tokens[-2]])
        state.hold(len(state.tokens) - 1)
        drafter.catch_up(state, 1000)
    assert JUDGED_ROWS <= drafter.judge(state)[1] < 2 * JUDGED_ROWS
    late = make('top')
    late.catch_up(state, 1000)
    assert late.judge(state)[1] == JUDGED_ROWS
