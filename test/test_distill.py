# SPDX-License-Identifier: Apache-2.0
"""Lessons from the target, and drafts that learn from them."""

import errno
import math

from conftest import PROMPTS, REAL_VOCABULARY
import pytest
import torch

from memspec_ros.memory.allocator import compact, MIB
from memspec_ros.memory.process import resident_bytes
from memspec_ros.models.errors import MemSpecError
from memspec_ros.models.weights import read_metadata, read_tensors
from memspec_ros.training import teacher as teacher_module
from memspec_ros.training.distill import (
    agreement,
    Distillation,
    DistillOptions,
    distribution_loss,
    load_training,
    save_training,
)
from memspec_ros.training.lessons import Lessons, TopShape
from memspec_ros.training.outputs import content_key, fill_store, OutputRecord, OutputStore
from memspec_ros.training.teacher import TeacherStore, weights_sha256, write_whole
from memspec_ros.training.tops import make_top, read_draft, save_draft

VOCABULARY = list(range(REAL_VOCABULARY))
SHARED = TopShape('shared_layers', 2, 1)
FEATURE = TopShape('feature', 1, 1, (1, 3, 4))
CPU = torch.device('cpu')


@pytest.fixture(scope='module')
def records(greedy):
    return [OutputRecord(content_key(p), 'code' if i % 2 else 'general', p, greedy(p, 12))
            for i, p in enumerate(PROMPTS)]


@pytest.fixture(scope='module')
def store(trainable, records, tmp_path_factory):
    store = TeacherStore(tmp_path_factory.mktemp('lessons'), 'tiny', (1, 2, 3, 4), top=8)
    store.fill(trainable.model, records)
    return store


@pytest.fixture(scope='module')
def lessons_of(trainable, records, store):
    def make(shape):
        return Lessons(trainable.model, [store.lesson(r) for r in records], shape, VOCABULARY)
    return make


def test_a_lesson_is_what_the_target_thinks(trainable, records, store):
    for record in records:
        lesson = store.lesson(record)
        tokens = record.prompt_ids + record.output_ids
        assert lesson.tokens.tolist() == tokens and lesson.first == len(record.prompt_ids)
        assert lesson.output_tokens == len(record.output_ids)
        state = trainable.new_state(len(tokens), frozenset({1, 2, 3, 4}))
        logits = trainable.forward(state, tokens)
        best, ids = logits.log_softmax(-1).topk(8)
        assert torch.equal(lesson.top_ids[:, 0].long(), ids[:, 0])
        assert torch.allclose(lesson.top_logprobs.float(), best, atol=5e-3)
        for depth in (1, 2, 3, 4):
            assert torch.allclose(lesson.hidden[depth].float(), state.hidden[depth].float(),
                                  rtol=1e-2, atol=1e-2)
        # Greedy outputs are what it expects most.
        expected = lesson.top_ids[lesson.first - 1:-1, 0].tolist()
        assert expected == record.output_ids


def test_lessons_are_made_once_and_read_back(tmp_path, trainable, records, store):
    first = TeacherStore(tmp_path, 'tiny', (1, 2), top=8)
    assert first.missing([*records, records[0]]) == records
    told = []
    first.fill(trainable.model, records, lambda done, total: told.append((done, total)))
    assert told == [(len(records), len(records))]
    again = TeacherStore(tmp_path, 'tiny', (2, 1), top=8)
    assert again.missing(records) == []
    assert torch.equal(again.lesson(records[1]).hidden[2], store.lesson(records[1]).hidden[2])
    assert again.bytes_needed(records[:1], 64) == 8 * 0 + (
        len(records[0].prompt_ids) + 12) * (2 * 64 * 2 + 6 * 8 + 4)
    # Another target, other depths: other lessons.
    assert len(TeacherStore(tmp_path, 'other', (1, 2), top=8).missing(records)) == len(records)
    assert len(TeacherStore(tmp_path, 'tiny', (1,), top=8).missing(records)) == len(records)


def test_lessons_are_taken_down_while_outputs_are_made(tmp_path, trainable, greedy):
    """The same as those of a second pass, without it; prompts of all lengths in one batch."""
    stops = frozenset({greedy(PROMPTS[0], 12)[4]})
    prompts = [('code', prompt) for prompt in PROMPTS]
    watched = TeacherStore(tmp_path / 'a', 'tiny', (1, 3, 4), top=8)
    store = OutputStore(tmp_path / 'outputs.jsonl')
    fill_store(store, trainable.model, prompts, 12, stops, 8, teacher=watched)
    records = list(store)
    assert len({len(record.output_ids) for record in records}) > 1
    assert watched.missing(records) == []
    after = TeacherStore(tmp_path / 'b', 'tiny', (1, 3, 4), top=8)
    after.fill(trainable.model, records)
    for record in records:
        one, other = watched.lesson(record), after.lesson(record)
        assert torch.equal(one.tokens, other.tokens) and len(one.top_ids) == len(one)
        # Nothing is learned at the last position.
        assert torch.equal(one.top_ids[:-1, 0], other.top_ids[:-1, 0])
        assert torch.allclose(one.top_logprobs[:-1].float(), other.top_logprobs[:-1].float(),
                              atol=1e-2)
        for depth in (1, 3, 4):
            assert torch.allclose(one.hidden[depth][:-1].float(),
                                  other.hidden[depth][:-1].float(), rtol=2e-2, atol=2e-2)


def test_a_run_that_is_interrupted_loses_at_most_a_chunk(tmp_path, trainable, records,
                                                         monkeypatch):
    monkeypatch.setattr(teacher_module, '_CHUNK_RECORDS', 2)
    store = TeacherStore(tmp_path, 'tiny', (1,), top=8)

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.fill(trainable.model, records, stop)
    again = TeacherStore(tmp_path, 'tiny', (1,), top=8)
    assert len(again.missing(records)) == len(records) - 2
    again.fill(trainable.model, records)
    assert TeacherStore(tmp_path, 'tiny', (1,), top=8).missing(records) == []


def test_a_damaged_chunk_is_named(tmp_path, trainable, records):
    store = TeacherStore(tmp_path, 'tiny', (1,), top=8)
    store.fill(trainable.model, records)
    path, = store.directory.iterdir()
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(MemSpecError, match=path.name):
        TeacherStore(tmp_path, 'tiny', (1,), top=8)


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path, monkeypatch):
    def full(tensors, path, metadata):
        path.write_bytes(b'part')
        raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(teacher_module, 'save_file', full)
    with pytest.raises(MemSpecError, match='disk is full'):
        write_whole(tmp_path / 'x.safetensors', {}, {})
    assert list(tmp_path.iterdir()) == []

    def full_save(state, path):
        path.write_bytes(b'part')
        raise RuntimeError('unexpected pos 64 vs 0')

    monkeypatch.setattr(torch, 'save', full_save)
    with pytest.raises(MemSpecError, match='run.state'):
        save_training(tmp_path / 'run.state', {})
    assert list(tmp_path.iterdir()) == []


def test_lessons_are_of_these_very_weights(trainable, target):
    name = weights_sha256(trainable.model)
    assert name == weights_sha256(trainable.model) and len(name) == 64
    norm = trainable.model.norm
    trainable.model.norm = norm + 1e-3
    try:
        assert weights_sha256(trainable.model) != name
    finally:
        trainable.model.norm = norm


def test_the_loss_is_the_cross_entropy_with_what_can_be_expressed():
    logits = torch.tensor([[1.0, 2.0, 0.0], [0.0, 0.0, 0.0]])
    labels = torch.tensor([[1, -1], [-1, -1]])
    probabilities = torch.tensor([[0.6, 0.4], [0.5, 0.5]])
    loss = distribution_loss(logits, labels, probabilities)
    expected = 0.6 * (math.log(math.e + math.e ** 2 + 1) - 2.0)
    assert loss.tolist() == pytest.approx([expected, 0.0])


def test_a_batch_puts_lessons_side_by_side(lessons_of, records):
    batch = lessons_of(FEATURE).batch([0, 3])
    longest = max(len(records[row].prompt_ids) for row in (0, 3)) + 12
    assert batch.lower.shape == (2, longest, 64) and batch.features.shape == (2, longest, 3, 64)
    lengths = [len(records[row].prompt_ids) + 12 for row in (0, 3)]
    assert len(batch.place) == len(batch.labels) == sum(lengths) - 2
    assert int(batch.in_output.sum()) == 24
    outputs = batch.labels[batch.in_output][:, 0].tolist()
    assert outputs == records[0].output_ids + records[3].output_ids
    assert batch.place[lengths[0] - 1] == longest and batch.row[lengths[0] - 1] == 0
    assert batch.tokens[1, :lengths[1]].tolist() == records[3].prompt_ids + records[3].output_ids


def test_a_top_of_all_remaining_layers_agrees_with_the_target_before_training(
        trainable, lessons_of):
    shape = TopShape('shared_layers', 2, 2)
    everything, = agreement(make_top(trainable.model, shape, VOCABULARY), lessons_of(shape), CPU)
    assert set(everything) == {'code', 'general'} and min(everything.values()) > 0.6


@pytest.mark.parametrize('shape', [SHARED, FEATURE], ids=lambda shape: shape.kind)
def test_distilling_learns_and_is_deterministic(trainable, lessons_of, shape):
    lessons = lessons_of(shape)
    options = DistillOptions(epochs=30, batch=2, learning_rate=3e-3, checkpoint_steps=20)
    reports, checkpoints = [], []
    before = agreement(make_top(trainable.model, shape, VOCABULARY), lessons, CPU, 2)
    top = Distillation(trainable.model, lessons, VOCABULARY, options).run(
        lambda *report: reports.append(report), lambda run: checkpoints.append(run.step))
    losses = [loss for _, _, loss, _ in reports]
    assert [report[:2] for report in reports] == [(step, 60) for step in range(1, 61)]
    assert checkpoints == [20, 40, 60]
    assert sum(losses[-4:]) < sum(losses[:4]) and reports[-1][3] > reports[0][3]
    after = agreement(top, lessons, CPU, 2)
    assert len(after) == (2 if shape.kind == 'feature' else 1)
    for step_before, step_after in zip(before, after):
        assert sum(step_after.values()) > sum(step_before.values()) + 0.2
    again = Distillation(trainable.model, lessons, VOCABULARY, options).run()
    assert all(torch.equal(a, b) for a, b in zip(top.export().values(),
                                                 again.export().values()))


def test_holes_in_the_heap_go_back_to_the_system(trainable, lessons_of, monkeypatch):
    """Steps free blocks between others that stay; untrimmed, the heap keeps them all."""
    kept = []

    def learn(self, rows):
        blocks = []
        for _ in range(256):
            blocks.append(torch.ones(1 << 18))  # 1 MiB: below what is mapped apart
            kept.append(torch.ones(64))
        return float(blocks[0][0]), 0.0

    monkeypatch.setattr(Distillation, '_learn', learn)
    options = DistillOptions(epochs=4, batch=2)
    run = Distillation(trainable.model, lessons_of(SHARED), VOCABULARY, options)
    with compact():  # which leaves behind a fixed size from which blocks are mapped
        before = resident_bytes()
    run.run()
    assert run.steps == 8
    assert resident_bytes() - before < 64 * MIB


def test_a_feature_draft_learns_what_lower_layers_do_not_say(trainable, lessons_of):
    """Features of the last layer tell more than one lower layer does."""
    options = DistillOptions(epochs=30, batch=2, learning_rate=3e-3)
    scores = []
    for shape in (TopShape('shared_layers', 1, 1), FEATURE):
        run = Distillation(trainable.model, lessons_of(shape), VOCABULARY, options)
        losses = []
        run.run(lambda step, steps, loss, right, losses=losses: losses.append(loss))
        scores.append(sum(losses[-8:]))
    assert scores[1] < scores[0]


@pytest.mark.parametrize('shape', [SHARED, FEATURE], ids=lambda shape: shape.kind)
def test_an_interrupted_training_goes_on_to_the_same_draft(trainable, lessons_of, shape,
                                                           tmp_path):
    lessons = lessons_of(shape)
    options = DistillOptions(epochs=4, batch=2, checkpoint_steps=3)
    whole = Distillation(trainable.model, lessons, VOCABULARY, options).run().export()
    path = tmp_path / 'run.state'

    def stop(run):
        save_training(path, run.state())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Distillation(trainable.model, lessons, VOCABULARY, options).run(checkpoint=stop)
    again = Distillation(trainable.model, lessons, VOCABULARY, options)
    again.resume(load_training(path))
    assert again.step == 3
    resumed = again.run().export()
    assert all(torch.equal(whole[name], tensor) for name, tensor in resumed.items())
    other = Distillation(trainable.model, lessons, VOCABULARY,
                         DistillOptions(epochs=4, batch=2, learning_rate=1e-4))
    with pytest.raises(MemSpecError, match='another run'):
        other.resume(load_training(path))
    path.write_bytes(b'no checkpoint')
    with pytest.raises(MemSpecError, match='run.state'):
        load_training(path)
    assert load_training(tmp_path / 'none.state') is None


def test_the_target_is_left_as_it_was(trainable, lessons_of):
    before = trainable.model.layers[3].down.clone()
    Distillation(trainable.model, lessons_of(SHARED), VOCABULARY,
                 DistillOptions(epochs=1, batch=4)).run()
    assert torch.equal(trainable.model.layers[3].down, before)
    assert not trainable.model.norm.requires_grad


@pytest.mark.parametrize('shape', [SHARED, FEATURE], ids=lambda shape: shape.kind)
def test_a_saved_draft_carries_how_it_was_made_and_can_be_continued(tmp_path, trainable, shape):
    path = tmp_path / 'new' / 'draft.safetensors'
    top = make_top(trainable.model, shape, VOCABULARY)
    save_draft(path, top, {'seed': '0'})
    assert read_metadata(path) == {'seed': '0'}
    tensors, about = read_draft(path)
    assert about == {'seed': '0'} and tensors['norm'].dtype == torch.bfloat16
    assert set(read_tensors(path)) == set(top.export())
    assert [p.name for p in path.parent.iterdir()] == ['draft.safetensors']
    with torch.no_grad():
        for parameter in top.parameters():
            parameter.zero_()
    top.load(tensors)
    assert all(torch.equal(a, tensors[name]) for name, a in top.export().items())


@pytest.mark.parametrize(('shape', 'problem'), [
    (TopShape('shared_layers', 0, 1), 'depth is 0, expected 1..3'),
    (TopShape('feature', 0, 1, (2,)), ''),
    (TopShape('feature', 4, 1, (2,)), 'depth is 4, expected 0..3'),
    (TopShape('shared_layers', 2, 3), 'layers is 3, expected 1..2'),
    (TopShape('shared_layers', 2, 1, (1,)), 'a feature draft reads features'),
    (TopShape('feature', 2, 1), 'a feature draft reads features'),
    (TopShape('feature', 2, 1, (5,)), 'features are'),
])
def test_what_a_draft_cannot_be_made_of(shape, problem):
    assert shape.problem(4).startswith(problem) and bool(shape.problem(4)) == bool(problem)
