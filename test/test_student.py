# SPDX-License-Identifier: Apache-2.0
"""Independent students: they learn, are saved as the decoder reads them, and say known tokens."""

import json

from conftest import BundleMaker, PADDED_VOCABULARY, PROMPTS
import pytest
import torch
import torch.nn.functional as F

from memspec_ros.models.bundle import load_bundle
from memspec_ros.models.drafts import KINDS
from memspec_ros.models.errors import MemSpecError
from memspec_ros.models.target_files import locate_target
from memspec_ros.models.weights import read_tensors
from memspec_ros.training import student as student_module
from memspec_ros.training.bundle_writer import draft_entry
from memspec_ros.training.distill import agreement, Distillation, DistillOptions
from memspec_ros.training.lessons import Lessons
from memspec_ros.training.outputs import content_key, OutputRecord
from memspec_ros.training.student import project_embedding, Student, StudentShape
from memspec_ros.training.teacher import TeacherStore
from memspec_ros.training.tops import draft_shape, make_top, read_draft, save_draft

SHAPE = StudentShape('causal_lm', 32, 2)
OPTIONS = DistillOptions(epochs=15, batch=2, learning_rate=1e-2, ahead=1)


@pytest.fixture(scope='module')
def records(greedy):
    return [OutputRecord(content_key(p), 'code' if i % 2 else 'general', p, greedy(p, 24))
            for i, p in enumerate(PROMPTS)]


@pytest.fixture(scope='module')
def vocabulary(records):
    return sorted({token for record in records for token in record.output_ids})


@pytest.fixture(scope='module')
def teach(trainable, vocabulary, tmp_path_factory):
    store = TeacherStore(tmp_path_factory.mktemp('lessons'), 'tiny', SHAPE.depths, top=8)

    def lessons_of(records):
        store.fill(trainable.model, records)
        return Lessons(trainable.model, [store.lesson(record) for record in records], SHAPE,
                       vocabulary)
    return lessons_of


@pytest.fixture(scope='module')
def lessons(teach, records):
    return teach(records)


@pytest.fixture(scope='module')
def held_out(teach, vocabulary):
    """Texts that nobody has trained on, of the tokens that the student knows."""
    generator = torch.Generator().manual_seed(9)
    places = torch.randint(len(vocabulary), (8, 32), generator=generator).tolist()
    texts = [[vocabulary[place] for place in row] for row in places]
    return teach([OutputRecord(content_key(text), 'code', text[:8], text[8:]) for text in texts])


@pytest.fixture(scope='module')
def trained(trainable, lessons, vocabulary):
    losses = []
    run = Distillation(trainable.model, lessons, vocabulary, OPTIONS)
    run.run(lambda step, steps, loss, right: losses.append(loss))
    return run.top, losses


def everything(student, batch):
    """Logits [B, T, V] over the whole vocabulary, as the decoder sees it."""
    with torch.no_grad():
        return F.linear(student.steps(batch, 1)[0], student.embedding)


def outside(student, lessons, vocabulary):
    """Share of the positions at which the best token of all is not one of ``vocabulary``."""
    batch = lessons.batch(range(len(lessons.lessons)))
    said = everything(student, batch).flatten(0, 1)[batch.place].argmax(-1)
    return float((~torch.isin(said, torch.tensor(vocabulary))).float().mean())


def same(first, second):
    return all(torch.equal(a, second[name]) for name, a in first.items())


# --- shape ---

def test_a_student_reads_nothing_of_the_target(lessons):
    assert SHAPE.depths == frozenset() and SHAPE.options == {}
    batch = lessons.batch([0, 1])
    assert batch.lower is None and batch.features is None


@pytest.mark.parametrize('width, heads, head_dim', [(32, 2, 16), (192, 3, 64), (16, 2, 8),
                                                    (96, 3, 32), (576, 9, 64)])
def test_sizes_follow_from_the_width(trainable, width, heads, head_dim):
    shape = draft_shape('causal_lm', depth=2, layers=3, features=(), width=width)
    config = shape.config(trainable.model.config)
    assert (config.heads, config.kv_heads, config.head_dim) == (heads, heads, head_dim)
    assert config.vocab_size == PADDED_VOCABULARY and config.tied_embeddings
    student = make_top(trainable.model, StudentShape('causal_lm', width, 1), [1, 2])
    assert sum(p.numel() for p in student.parameters()) == StudentShape(
        'causal_lm', width, 1).parameters(trainable.model.config)


@pytest.mark.parametrize('width, layers, words', [
    (30, 1, 'width is 30'), (0, 1, 'width is 0'), (8, 1, 'width is 8'), (32, 0, 'layers is 0'),
    (32, 5, 'layers is 5, expected 1..4')])
def test_impossible_shapes(width, layers, words):
    assert words in StudentShape('causal_lm', width, layers).problem(4)
    assert not StudentShape('causal_lm', 32, 4).problem(4)


# --- the embedding it begins with ---

@pytest.mark.parametrize('width', [16, 64, 96])
def test_the_embedding_begins_as_the_targets(width):
    generator = torch.Generator().manual_seed(5)
    # Every token has a twin; what all have in common says nothing.
    table = torch.randn(400, 64, generator=generator)
    table = torch.cat([table, table + 0.1 * torch.randn(400, 64, generator=generator)]) + 7.0
    made = project_embedding(table, width, torch.Generator().manual_seed(0))
    assert made.shape == (800, width)
    assert torch.allclose(made.norm(dim=1), torch.tensor(1.0))
    assert torch.equal(made, project_embedding(table, width, torch.Generator().manual_seed(0)))
    likeness = (made @ made.T).fill_diagonal_(-1)
    twins = (likeness.argmax(1) == torch.arange(800).roll(400)).float().mean()
    assert twins > 0.95


def test_an_embedding_with_empty_rows_or_directions_is_no_trouble():
    table = torch.randn(50, 64, generator=torch.Generator().manual_seed(1))
    table[:, 4:] = 0.0
    table[40:] = table[:40].mean(0)
    made = project_embedding(table, 16, torch.Generator().manual_seed(0))
    assert made.isfinite().all() and made.norm(dim=1).max() < 1.001
    assert project_embedding(torch.zeros(9, 64), 16, torch.Generator()).abs().max() == 0


def test_a_projected_embedding_learns_faster_than_a_random_one(trainable, lessons, vocabulary,
                                                               trained):
    run = Distillation(trainable.model, lessons, vocabulary, OPTIONS)
    with torch.no_grad():
        table, generator = run.top.embedding, torch.Generator().manual_seed(2)
        table.copy_(torch.randn(table.shape, generator=generator) * table.std())
    losses = []
    run.run(lambda step, steps, loss, right: losses.append(loss))
    assert sum(trained[1]) < sum(losses)


# --- training ---

def test_it_learns(trained, trainable, lessons, vocabulary):
    student, losses = trained
    assert len(losses) == 30 and sum(losses[-4:]) < 0.75 * sum(losses[:4])
    before = agreement(make_top(trainable.model, SHAPE, vocabulary), lessons,
                       torch.device('cpu'))
    after = agreement(student, lessons, torch.device('cpu'))
    assert len(after) == 1 and set(after[0]) == {'code', 'general'}
    assert min(after[0].values()) > max(before[0].values())


def test_training_is_deterministic_and_resumes_to_the_same(trained, trainable, lessons,
                                                           vocabulary):
    class Enough(Exception):
        pass

    def interrupt(run):
        states.append(run.state())
        raise Enough

    states = []
    options = DistillOptions(**{**vars(OPTIONS), 'checkpoint_steps': 11})
    with pytest.raises(Enough):
        Distillation(trainable.model, lessons, vocabulary, options).run(checkpoint=interrupt)
    again = Distillation(trainable.model, lessons, vocabulary, options)
    again.resume(states[0])
    assert again.step == 11
    assert same(again.run().export(), trained[0].export())


def test_the_decoder_hardly_ever_says_what_training_did_not_name(
        trained, trainable, lessons, held_out, vocabulary, monkeypatch):
    def train():
        return Distillation(trainable.model, lessons, vocabulary, OPTIONS).run()

    assert len(trained[0].others) > 200
    assert outside(trained[0], held_out, vocabulary) < 0.03
    # Fewer than there are: some are drawn at every step.
    monkeypatch.setattr(student_module, 'NEGATIVES', 40)
    student = train()
    assert outside(student, held_out, vocabulary) < 0.03
    assert outside(student, lessons, vocabulary) < 0.01
    # It is the negatives that see to it.
    monkeypatch.setattr(Student, 'training_logits',
                        lambda self, states, batch, chosen, generator:
                        self.logits(states, batch, chosen))
    assert outside(train(), held_out, vocabulary) > 0.1


def test_tokens_drawn_stand_for_all_others(trainable, lessons, vocabulary, monkeypatch):
    student = make_top(trainable.model, SHAPE, vocabulary[::2])
    batch = Lessons(trainable.model, lessons.lessons, SHAPE, vocabulary[::2]).batch([0, 1])
    chosen = torch.ones(len(batch.place), dtype=torch.bool)
    assert len(batch.further) > 5 and batch.held(chosen).any() and not batch.held(chosen).all()
    with torch.no_grad():
        states = student.steps(batch, 1)[0]
    whole = everything(student, batch).flatten(0, 1)[batch.place].logsumexp(-1)

    def estimate(seed):
        made = student.training_logits(states, batch, chosen,
                                       torch.Generator().manual_seed(seed))
        known = student.logits(states, batch, chosen)
        assert torch.allclose(made[:, :known.shape[1]], known, atol=1e-5)
        return made.logsumexp(-1)

    with torch.no_grad():
        assert torch.allclose(estimate(0), whole, atol=1e-4)  # all there are
        monkeypatch.setattr(student_module, 'NEGATIVES', 50)
        assert torch.equal(estimate(0), estimate(0)) and not torch.equal(estimate(0), estimate(1))
        drawn = torch.stack([estimate(seed) for seed in range(200)])
    assert torch.allclose(drawn.exp().mean(0), whole.exp(), rtol=0.05)


# --- saving ---

@pytest.fixture
def bundle(trained, model_dirs, tmp_path):
    """A bundle made of the student, as ``memspec distill`` makes one."""
    save_draft(tmp_path / 'general', trained[0], {'kind': 'causal_lm', 'seed': '0'},
               model_dirs / 'target')
    maker = BundleMaker(tmp_path, model_dirs / 'target')
    maker.manifest['drafts'].append(draft_entry(
        tmp_path / 'general', 'causal_lm', 'general', SHAPE.options, {'code': 0.51234},
        'Apache-2.0', 'a test'))
    bundle = load_bundle(maker.write())
    locate_target(bundle)
    return bundle


def test_the_decoder_proposes_what_the_training_module_predicts(bundle, target, trained,
                                                                lessons, trainable, vocabulary):
    student = make_top(trainable.model, SHAPE, vocabulary)
    student.load(trained[0].export())  # with weights rounded as in the file
    spec = bundle.draft('general')
    drafter = KINDS['causal_lm'](spec, bundle, target, 128).attach(
        read_tensors(bundle.weight_file(spec), spec.sha256))
    batch = lessons.batch(range(len(lessons.lessons)))
    expected = everything(student, batch).argmax(-1)
    for row, lesson in enumerate(lessons.lessons):
        scores = drafter.score(lesson.tokens.tolist(), 1)
        assert scores.argmax(-1).tolist() == expected[row, :len(lesson)].tolist()
    state = target.new_state(128)
    state.tokens = lessons.lessons[0].tokens[:20].tolist()
    drafter.restart(0)
    drafter.catch_up(state, 100)
    proposed = drafter.propose(state, 3).tokens
    assert proposed[0] == expected[0, 19] and len(proposed) == 3


def test_a_saved_student_is_a_directory_that_says_what_it_is(bundle, trained, trainable,
                                                             vocabulary):
    transformers = pytest.importorskip('transformers')
    spec = bundle.draft('general')
    directory = bundle.directory_of(spec)
    assert not directory.with_name('general.partial').exists()
    assert spec.acceptance == {'code': 0.512} and (directory / 'tokenizer.json').is_file()
    tensors, about = read_draft(directory)
    assert about['seed'] == '0' and about['kind'] == 'causal_lm'
    assert same(tensors, trained[0].export())
    again = make_top(trainable.model, SHAPE, vocabulary)
    again.load(tensors)
    assert same(again.export(), tensors)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    assert model.config.rope_parameters['rope_theta'] == trainable.model.config.rope_theta
    assert type(model).__name__ == 'LlamaForCausalLM'
    assert json.loads((directory / 'config.json').read_text())['tie_word_embeddings']


def test_saving_again_replaces_and_saving_without_a_tokenizer_is_refused(trained, model_dirs,
                                                                         tmp_path):
    (tmp_path / 'draft').mkdir()
    (tmp_path / 'draft' / 'old.txt').write_text('old')
    save_draft(tmp_path / 'draft', trained[0], {}, model_dirs / 'target')
    assert not (tmp_path / 'draft' / 'old.txt').exists()
    with pytest.raises(MemSpecError, match='no tokenizer.json'):
        save_draft(tmp_path / 'other', trained[0], {}, tmp_path)
    with pytest.raises(ValueError, match='tokenizer'):
        save_draft(tmp_path / 'other', trained[0], {})
    assert not (tmp_path / 'other').exists()
