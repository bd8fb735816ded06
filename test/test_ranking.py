# SPDX-License-Identifier: Apache-2.0
"""Who is expected to be accepted most, what the policies make of it, and how much to draft."""

from hypothesis import given
from hypothesis import strategies as st
import pytest

from memspec_ros.decoding.draft_length import DraftLength
from memspec_ros.decoding.stats import GenerationStats, StepRecord
from memspec_ros.models.bundle import DraftSpec, RankerSpec
from memspec_ros.models.errors import BundleError, InvalidRequestError
from memspec_ros.runtime.policies import make_policy, Plan, POLICY_NAMES
from memspec_ros.runtime.ranking import Acceptance, blend, make_ranker, RankingContext


def spec(draft, domain='', path=None, **acceptance):
    return DraftSpec(draft, 'shared_layers', domain, 'MIT', 'here', path=path,
                     acceptance=acceptance)


DRAFTS = [spec('general', 'general', 'g', general=0.6, code=0.4, math=0.4),
          spec('code', 'code', 'c', general=0.4, code=0.8, math=0.5),
          spec('math', 'math', 'm', general=0.3, code=0.3, math=0.8)]
WORDS = {'code': ['def', 'return', '{', 'python'], 'math': ['solve', '+', 'equation']}
OPTIONS = {'words': WORDS, 'default_domain': 'general'}


def step(drafted, accepted, draft='d', **times):
    return StepRecord(draft, draft, 0, drafted, accepted, accepted + 1, **times)


@pytest.fixture
def ranker():
    return make_ranker(RankerSpec('domain_words', OPTIONS), DRAFTS)


def ranked(ranker, prompt, **context):
    context = RankingContext([], prompt, **context)
    ranker.begin(context)
    return ranker.rank(context)


@pytest.mark.parametrize('prompt, best', [
    ('Write a python function: def add(a, b)', 'code'), ('DEF RETURN DEF', 'code'),
    ('solve the equation x + 2', 'math'), ('Tell me about cats', 'general'), ('', 'general'),
    ('default returns', 'general')])
def test_the_domain_is_told_from_words(ranker, prompt, best):
    order = ranked(ranker, prompt)
    assert order[0][0] == best and len(order) == 3
    assert [score for _, score in order] == sorted((s for _, s in order), reverse=True)
    assert all(0.0 <= score <= 1.0 for _, score in order)


def test_recent_text_can_change_the_mind(ranker):
    assert ranked(ranker, 'Tell me about cats')[0][0] == 'general'
    assert ranked(ranker, 'Tell me about cats',
                  recent_text='def cat(): return { python }')[0][0] == 'code'


def test_what_was_accepted_outweighs_the_prior(ranker):
    seen = {'code': Acceptance(), 'math': Acceptance()}
    for _ in range(30):
        seen['code'].add(step(4, 0))
        seen['math'].add(step(4, 4))
    assert ranked(ranker, 'def def return', acceptance=seen)[0][0] == 'math'


def test_a_new_prompt_forgets_the_last_ones_words(ranker):
    assert ranked(ranker, 'def def return')[0][0] == 'code'
    assert ranked(ranker, 'hello')[0][0] == 'general'


def test_ties_keep_the_bundles_order():
    ranker = make_ranker(RankerSpec('domain_words'), [spec('b'), spec('a'), spec('c')])
    assert [draft for draft, _ in ranked(ranker, 'hello')] == ['b', 'a', 'c']


def test_drafts_without_figures_are_guessed_by_their_domain():
    ranker = make_ranker(RankerSpec('domain_words', OPTIONS),
                         [spec('x', 'general'), spec('y', 'code')])
    assert ranked(ranker, 'def return')[0][0] == 'y'
    assert ranked(ranker, 'hello')[0][0] == 'x'


@pytest.mark.parametrize('options, message', [
    ({'word': {}}, "unknown key 'word'"), ({'words': []}, 'words must map'),
    ({'words': {'code': [1]}}, 'words must map')])
def test_options_of_the_ranker_are_checked(options, message):
    with pytest.raises(BundleError, match=message):
        make_ranker(RankerSpec('domain_words', options), DRAFTS)


def test_an_unknown_ranker_is_named():
    with pytest.raises(BundleError, match="kind 'crystal_ball' is not known; there are: bert, "
                                          'domain_words, hidden'):
        make_ranker(RankerSpec('crystal_ball'), DRAFTS)


def test_tokens_after_the_first_rejected_one_are_not_judged():
    seen = Acceptance()
    seen.add(step(4, 1))
    assert (seen.judged, seen.accepted) == (2, 1)
    seen = Acceptance()
    seen.add(step(4, 4))
    assert (seen.judged, seen.accepted) == (4, 4)
    seen = Acceptance()
    seen.add(step(0, 0))  # asked, and had nothing to say
    assert (seen.judged, seen.accepted) == (1, 0)


def used(draft, accepted, judged):
    return {draft: Acceptance(judged, accepted)}


def test_text_that_is_hard_for_the_draft_in_use_is_hard_for_all():
    expected = [('best', 0.75), ('other', 0.52)]
    for judged in range(1, 60):
        # Half as good as expected: by its own figures alone it would fall behind.
        seen = used('best', 0.5 * 0.75 * judged, judged)
        order = blend(expected, seen)
        assert order[0][0] == 'best', judged
        assert order[1][1] < 0.52
    assert seen['best'].blended(0.75, 12.0) < 0.52


def test_text_that_is_easy_for_the_draft_in_use_is_easy_for_all():
    order = blend([('a', 0.5), ('b', 0.45), ('c', 0.9)], used('a', 40.0, 40.0))
    scores = dict(order)
    assert [draft for draft, _ in order] == ['c', 'a', 'b']
    assert 0.45 < scores['b'] < scores['a'] <= 1.0 and scores['c'] == 1.0


def test_a_draft_that_is_nearly_never_right_is_soon_overtaken():
    expected = [('misled', 0.75), ('other', 0.52)]
    for share in (0.0, 0.05):
        judged = next(n for n in range(100)
                      if blend(expected, used('misled', share * n, n))[0][0] == 'other')
        assert judged <= 8


def test_what_is_expected_without_any_evidence_stands():
    expected = [('b', 0.2), ('a', 0.7), ('c', 0.2)]
    assert blend(expected, {}) == [('a', pytest.approx(0.7)), ('b', pytest.approx(0.2)),
                                   ('c', pytest.approx(0.2))]
    # The common factor never changes the order of drafts that were not used.
    order = blend([*expected, ('d', 0.1)], used('d', 50.0, 50.0))
    assert [draft for draft, _ in order if draft != 'd'] == ['a', 'b', 'c']


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 50)), max_size=5))
def test_blended_acceptance_stays_a_share(drafts):
    expected = [(str(i), prior) for i, (prior, _, _) in enumerate(drafts)]
    seen = {str(i): Acceptance(judged, share * judged)
            for i, (_, share, judged) in enumerate(drafts) if judged > 1}
    order = blend(expected, seen)
    assert sorted(draft for draft, _ in order) == sorted(draft for draft, _ in expected)
    assert all(0.0 <= score <= 1.0 for _, score in order)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=50),
       st.floats(0, 1), st.floats(0.1, 50))
def test_expected_acceptance_stays_a_share(steps, prior, weight):
    seen = Acceptance()
    for drafted, accepted in steps:
        seen.add(step(drafted, min(drafted, accepted)))
    assert 0.0 <= seen.blended(prior, weight) <= 1.0
    assert Acceptance().blended(prior, weight) == pytest.approx(prior)


def test_policies_by_name(ranker):
    context = RankingContext([], 'def return')
    for name in POLICY_NAMES:
        policy = make_policy(name, DRAFTS, ranker)
        policy.begin(context)
        assert isinstance(policy.plan(context), Plan)
    memspec, on_demand, static = (make_policy(n, DRAFTS, ranker) for n in POLICY_NAMES[:3])
    ranked = ranker.rank(context)
    assert memspec.plan(context) == Plan(ranked, 1, True, [draft for draft, _ in ranked])
    assert on_demand.plan(context) == Plan(ranker.rank(context), 1, False)
    assert static.plan(context) == Plan([('general', 1.0)], 1, False)
    assert static.plan(context).desired == 'general' and Plan([]).desired == ''


def test_policies_that_cannot_be_had(ranker):
    with pytest.raises(InvalidRequestError, match="'oracle' is not known; there are: memspec"):
        make_policy('oracle', DRAFTS, ranker)
    with pytest.raises(BundleError, match='general'):
        make_policy('general_static', DRAFTS[1:], ranker)


class TestDraftLength:
    """E(g) / (g c + v(g + 1)), from what was measured."""

    def observe(self, length, drafted, accepted, count=200, draft_sec=0.0, verify=None,
                catch_up=0.0):
        for _ in range(count):
            rows = drafted + 1
            length.observe(step(drafted, accepted, t_draft=draft_sec * drafted,
                                t_catch_up=catch_up,
                                t_verify=1.0 + 0.01 * rows if verify is None else verify))

    def test_all_accepted_and_cheap_drafts_as_many_as_allowed(self):
        length = DraftLength(5)
        self.observe(length, 5, 5, draft_sec=0.01)
        assert length.choose('d') == 5

    def test_never_accepted_drafts_none_but_probes(self):
        length = DraftLength(5)
        self.observe(length, 5, 0, draft_sec=0.2)
        choices = [length.choose('d') for _ in range(240)]
        # Two tokens drafted and verified cost half a step more: every 26th iteration, for 2 %.
        assert choices.count(0) == 231 and set(choices) == {0, 2}

    def test_too_dear_a_draft_is_not_asked(self):
        length = DraftLength(4)
        self.observe(length, 4, 4, draft_sec=2.0)
        assert length.choose('d') == 0
        # Nor again, however right it is: what it says costs more than decoding it does.
        asked = 0
        for _ in range(2000):
            if length.choose('d'):
                asked += 1
                self.observe(length, 2, 2, count=1, draft_sec=1.0)
        assert 0 < asked < 25

    def test_acceptance_that_falls_with_depth_ends_the_block_there(self):
        length = DraftLength(6)
        for _ in range(300):
            self.observe(length, 6, 2, count=1, draft_sec=0.1)
        assert length.choose('d') == 2
        assert length.expected_tokens('d', 2) == pytest.approx(3.0, abs=0.4)

    def test_a_probe_lets_a_draft_come_back(self):
        length = DraftLength(4)
        self.observe(length, 4, 0, draft_sec=0.05)
        assert length.choose('d') == 0
        for _ in range(2000):
            gamma = length.choose('d')
            if gamma:
                self.observe(length, gamma, gamma, count=1, draft_sec=0.05)
        assert length.choose('d') > 0

    def test_an_unlucky_answer_does_not_silence_the_next(self):
        length = DraftLength(4)
        length.begin()
        self.observe(length, 4, 3, draft_sec=0.3)
        length.begin()
        self.observe(length, 4, 0, count=60, draft_sec=0.3)
        assert length.choose('d') == 0
        length.begin()
        assert length.choose('d') > 0

    def test_drafts_are_told_apart(self):
        length = DraftLength(4)
        for _ in range(100):
            length.observe(step(4, 4, 'good', t_draft=0.04, t_verify=1.0))
            length.observe(step(4, 0, 'bad', t_draft=0.8, t_verify=1.0))
        assert length.choose('good') == 4 and length.choose('bad') == 0

    def test_the_catch_up_of_a_switch_is_no_running_cost(self):
        length = DraftLength(4)
        self.observe(length, 4, 4, count=1, draft_sec=0.01, catch_up=9.0)
        assert length.choose('d') == 4

    def test_the_expectation_of_the_best_is_that_of_the_formula(self):
        length = DraftLength(3)
        self.observe(length, 3, 3, draft_sec=0.1)
        tokens = length.expected_tokens('d', 3)
        assert 3.0 < tokens <= 4.0
        assert length.speed('d', 3) == pytest.approx(
            tokens / (3 * 0.1 + length.verify_cost(4)), rel=1e-6)
        assert length.speed('d', 3) >= max(length.speed('d', g) for g in range(4))

    def test_fixed_length(self):
        length = DraftLength(3, adaptive=False)
        self.observe(length, 3, 0, draft_sec=5.0)
        assert length.choose('d') == 3

    def test_no_speculation_at_all(self):
        assert DraftLength(0).choose('d') == 0

    def test_a_verify_size_that_was_never_seen_is_scaled_from_the_nearest(self):
        length = DraftLength(6)
        assert length.verify_cost(1) == 1.0
        length.calibrate(1, 0.010)
        length.calibrate(4, 0.020)
        assert length.verify_cost(4) == 0.020
        assert 0.020 < length.verify_cost(6) < 0.023

    def test_a_clock_that_stands_still_is_no_division_by_zero(self):
        length = DraftLength(4)
        self.observe(length, 4, 4, verify=0.0)
        for rows in range(1, 6):
            length.calibrate(rows, 0.0)
        assert 0 <= length.choose('d') <= 4


def test_quantiles_of_the_time_between_tokens():
    stats = GenerationStats(gaps=[float(i) for i in range(100)])
    assert (stats.inter_token(0.5), stats.inter_token(0.95)) == (50.0, 95.0)
    assert GenerationStats().inter_token(0.5) is None
    assert GenerationStats().as_dict()['tokens_per_sec'] is None
