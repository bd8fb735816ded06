# SPDX-License-Identifier: Apache-2.0
"""What drafts on the target can say: the trimmed vocabulary, and the text's own tokens."""

from conftest import BundleMaker, PROMPTS, REAL_VOCABULARY
from hypothesis import given
from hypothesis import strategies as st
import pytest
import torch

from memspec_ros.models.bundle import load_bundle
from memspec_ros.models.drafts import KINDS
from memspec_ros.models.drafts import vocabulary as vocabulary_module
from memspec_ros.models.drafts.vocabulary import TextVocabulary
from memspec_ros.models.state import TargetRun
from memspec_ros.models.target_files import locate_target
from memspec_ros.training.distill import agreement
from memspec_ros.training.lessons import Lessons, TopShape
from memspec_ros.training.outputs import content_key, OutputRecord
from memspec_ros.training.teacher import TeacherStore, write_whole
from memspec_ros.training.tops import make_top

TRIMMED = list(range(0, REAL_VOCABULARY, 3))
SHAPES = {'shared_layers': TopShape('shared_layers', 2, 2),
          'feature': TopShape('feature', 2, 2, (1, 4))}
CPU = torch.device('cpu')


def vocabulary_of(trimmed=(2, 4, 6)):
    places = {token: place for place, token in enumerate(trimmed)}
    return TextVocabulary(torch.tensor(trimmed), places)


def said_by(vocabulary):
    return vocabulary.ids.tolist()


def test_tokens_of_the_text_follow_the_trimmed_ones():
    vocabulary = vocabulary_of()
    vocabulary.follow([9, 4, 9])
    assert said_by(vocabulary) == [2, 4, 6, 9]
    vocabulary.follow([9, 4, 9, 7, 2])
    assert said_by(vocabulary) == [2, 4, 6, 9, 7]
    vocabulary.follow([1])
    assert said_by(vocabulary) == [2, 4, 6, 1]


def test_a_text_adds_no_more_than_it_may(monkeypatch):
    monkeypatch.setattr(vocabulary_module, 'MOST_FURTHER', 2)
    vocabulary = vocabulary_of()
    vocabulary.follow([10, 11, 12])
    vocabulary.follow([10, 11, 12, 13])
    assert list(vocabulary.further) == [10, 11]


@given(st.lists(st.lists(st.integers(0, 12), max_size=8), min_size=1, max_size=6))
def test_it_depends_on_the_text_alone(texts):
    vocabulary = vocabulary_of()
    for text in texts:
        fresh = vocabulary_of()
        fresh.follow(text)
        vocabulary.follow(text)
        assert said_by(vocabulary) == said_by(fresh)


@pytest.fixture(scope='module')
def bundle(tmp_path_factory, model_dirs, trainable):
    directory = tmp_path_factory.mktemp('trimmed')
    maker = BundleMaker(directory, model_dirs / 'target')
    maker.add_head(TRIMMED)
    for name, shape in SHAPES.items():
        write_whole(directory / f'{name}.safetensors',
                    make_top(trainable.model, shape, TRIMMED).export(), {})
        maker.add_draft(name, name, f'{name}.safetensors', options=shape.options)
    bundle = load_bundle(maker.write())
    locate_target(bundle)
    return bundle


def kind_and_tensors(bundle, target, name):
    from memspec_ros.models.weights import read_tensors
    spec = bundle.draft(name)
    return KINDS[name](spec, bundle, target, 128), read_tensors(bundle.weight_file(spec))


@pytest.mark.parametrize('name', SHAPES)
def test_traces_hold_what_the_drafter_says_of_the_texts_own_tokens(bundle, target, greedy, name):
    """The output comes twice, so that its second half is of tokens that the text holds."""
    kind, tensors = kind_and_tensors(bundle, target, name)
    output = greedy(PROMPTS[1], 12)
    tokens, first = PROMPTS[1] + output + output, len(PROMPTS[1])
    state = target.new_state(128, kind.depths | {target.layers})
    target.forward(state, tokens)
    run = TargetRun(tokens, {depth: rows[:len(tokens)] for depth, rows in state.hidden.items()})
    ranks = kind.rollout_ranks(tensors, run, first, 1, 255)
    own = 0
    for t, token in enumerate(tokens[first:]):
        state.tokens = tokens[:first + t]
        state.hold(first + t - 1)
        said = kind.attach(tensors)
        said.catch_up(state, 1000)
        proposal = said.propose(state, 1).tokens
        assert (ranks[t, 0] == 1) == (proposal == [token])
        known = token in TRIMMED or token in tokens[:first + t]
        assert bool(ranks[t, 0]) == known
        own += proposal[0] not in TRIMMED
        assert proposal[0] in TRIMMED or proposal[0] in tokens[:first + t]
    assert own


@pytest.fixture(scope='module')
def lessons(trainable, greedy, tmp_path_factory):
    records = [OutputRecord(content_key(p), 'code', p, greedy(p, 12)) for p in PROMPTS]
    store = TeacherStore(tmp_path_factory.mktemp('lessons'), 'tiny', (1, 2, 4), top=8)
    store.fill(trainable.model, records)
    return [store.lesson(record) for record in records]


def test_training_scores_what_the_draft_will_be_able_to_say(trainable, lessons):
    data = Lessons(trainable.model, lessons, SHAPES['shared_layers'], TRIMMED)
    batch = data.batch([0, 3])
    top = make_top(trainable.model, data.shape, TRIMMED)
    chosen = torch.arange(len(batch.place)) % 2 == 0
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
        logits = top.logits(top.steps(batch, 1)[0], batch, chosen)
    assert logits.shape == (int(chosen.sum()), len(TRIMMED) + len(batch.further))
    labels, seen = batch.labels[chosen], 0
    width = batch.tokens.shape[1]
    for line, scores in enumerate(logits):
        place = int(batch.place[chosen][line])
        text = batch.tokens[place // width, :place % width + 1].tolist()
        sayable = {token for token in batch.further.tolist() if token in text}
        open_columns = batch.further[scores[len(TRIMMED):] > -torch.inf]
        assert set(open_columns.tolist()) == sayable
        lesson = lessons[[0, 3][place // width]]
        for label, token in zip(labels[line].tolist(), lesson.top_ids[place % width].tolist()):
            if token in TRIMMED:
                assert TRIMMED[label] == token
            elif token in sayable:
                assert batch.further[label - len(TRIMMED)] == token
                seen += 1
            else:
                assert label == -1
    assert seen


def test_agreement_counts_what_a_drafter_would_get_right(trainable, lessons, bundle, target):
    shape = SHAPES['shared_layers']
    kind, tensors = kind_and_tensors(bundle, target, 'shared_layers')
    hits = total = 0
    for lesson in lessons:
        state = target.new_state(128, kind.depths | {target.layers})
        tokens = lesson.tokens.tolist()
        target.forward(state, tokens)
        run = TargetRun(tokens, {d: rows[:len(tokens)] for d, rows in state.hidden.items()})
        ranks = kind.rollout_ranks(tensors, run, lesson.first, 1, 255)[:, 0]
        hits, total = hits + int((ranks == 1).sum()), total + len(ranks)
    data = Lessons(trainable.model, lessons, shape, TRIMMED)
    share = agreement(make_top(trainable.model, shape, TRIMMED), data, CPU)[0]['code']
    assert share == pytest.approx(hits / total, abs=0.05)  # bfloat16 near-ties
