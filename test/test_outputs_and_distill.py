# SPDX-License-Identifier: Apache-2.0
"""Training data from the target itself, and a draft that learns from it."""

import json

from conftest import PROMPTS, REAL_VOCABULARY
import pytest
import torch

from memspec_ros.models.weights import read_metadata, read_tensors
from memspec_ros.training.distill import (
    agreement,
    choose_vocabulary,
    coverage,
    distill,
    DistillOptions,
    Examples,
    save_draft,
    Top,
)
from memspec_ros.training.outputs import (
    content_key,
    fill_store,
    generate_batch,
    OutputRecord,
    OutputStore,
    PromptFileError,
    read_prompts,
)

RECORDS = [OutputRecord('a', 'code', [1, 2, 3], [7, 7, 9]),
           OutputRecord('b', 'general', [4], [7, 8])]


def test_batched_outputs_equal_those_of_transformers_one_by_one(target, greedy):
    assert generate_batch(target.model, PROMPTS, 12, frozenset()) == [
        greedy(prompt, 12) for prompt in PROMPTS]
    assert generate_batch(target.model, PROMPTS[2:3], 5, frozenset()) == [greedy(PROMPTS[2], 5)]


def test_each_output_ends_with_its_stop_token(target, greedy):
    plain = [greedy(prompt, 12) for prompt in PROMPTS]
    stops = frozenset({plain[0][3], plain[1][6]})
    expected = []
    for output in plain:
        ends = [i for i, token in enumerate(output) if token in stops]
        expected.append(output[:ends[0] + 1] if ends else output)
    assert generate_batch(target.model, PROMPTS, 12, stops) == expected
    assert len({len(output) for output in expected}) > 1


def test_rows_that_have_ended_are_not_run_to_the_limit(target, greedy):
    """However far apart they end: a straggler alone must not carry all others along."""
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[0][:3], PROMPTS[1][:4]]
    plain = [greedy(prompt, 40) for prompt in prompts]
    stops = frozenset(output[4 + 3 * i] for i, output in enumerate(plain))
    widths = []
    original = type(target.model).logits

    def counted(self, x):
        widths.append(x.shape[0])
        return original(self, x)
    type(target.model).logits = counted
    try:
        outputs = generate_batch(target.model, prompts, 40, stops)
    finally:
        type(target.model).logits = original
    assert len(widths) == max(map(len, outputs)) < 40
    assert widths[-1] == 1 and widths == sorted(widths, reverse=True)


def test_the_store_is_appended_to_and_read_back(tmp_path):
    store = OutputStore(tmp_path / 'deep' / 'outputs.jsonl')
    assert list(store) == []
    store.append(RECORDS[:1])
    store.append(RECORDS[1:])
    assert list(store) == RECORDS


def test_a_record_that_an_interruption_cut_short_is_made_again(tmp_path):
    store = OutputStore(tmp_path / 'outputs.jsonl')
    store.append(RECORDS)
    whole = store.path.read_bytes()
    for cut in range(1, len(whole.splitlines()[1])):
        store.path.write_bytes(whole[:-cut])
        assert list(store) == RECORDS[:1]
        store.append(RECORDS[1:])
        assert store.path.read_bytes() == whole


def test_a_store_is_filled_once(tmp_path, target, greedy):
    store = OutputStore(tmp_path / 'outputs.jsonl')
    prompts = [('code', PROMPTS[0]), ('general', PROMPTS[1]), ('code', PROMPTS[0])]
    reports = []
    fill_store(store, target.model, prompts, 4, frozenset(), 8,
               lambda done, all_of: reports.append((done, all_of)))
    assert reports == [(2, 2)]
    assert {tuple(r.output_ids) for r in store} == {
        tuple(greedy(p, 4)) for p in PROMPTS[:2]}
    before = store.path.read_bytes()
    fill_store(store, target.model, prompts, 4, frozenset(), 8)
    assert store.path.read_bytes() == before
    assert {r.key for r in store} == {content_key(p) for p in PROMPTS[:2]}


def test_prompt_files(tmp_path):
    file = tmp_path / 'prompts.jsonl'
    file.write_text('{"prompt": "hi", "domain": "general", "more": 1}\n\n'
                    '{"prompt": "é", "domain": "code"}\n', encoding='utf-8')
    assert list(read_prompts(file)) == [('general', 'hi'), ('code', 'é')]


@pytest.mark.parametrize('line', ['{', '[]', '5', '{"prompt": "x"}',
                                  '{"prompt": 5, "domain": "code"}'])
def test_a_wrong_line_of_a_prompt_file_is_named(tmp_path, line):
    file = tmp_path / 'prompts.jsonl'
    file.write_text(json.dumps({'prompt': 'a', 'domain': 'b'}) + '\n' + line + '\n')
    with pytest.raises(PromptFileError, match='prompts.jsonl, line 2'):
        list(read_prompts(file))


def test_the_trimmed_vocabulary_is_the_most_frequent_tokens():
    assert choose_vocabulary(RECORDS, 2, always=[0]) == [0, 7]
    assert choose_vocabulary(RECORDS, 99) == [7, 8, 9]
    assert coverage(RECORDS, [7]) == pytest.approx(3 / 5)
    assert coverage([], [7]) == 0.0


@pytest.fixture(scope='module')
def examples(trainable, greedy):
    records = [OutputRecord(content_key(p), 'code' if i % 2 else 'general', p, greedy(p, 12))
               for i, p in enumerate(PROMPTS)]
    return Examples(trainable.model, records, 2, list(range(REAL_VOCABULARY)))


def test_labels_are_the_outputs_and_ignored_outside_the_vocabulary(target, examples):
    hidden, positions, tokens = examples.batch([0, 3])
    assert tokens.tolist() == [*examples.records[0].output_ids, *examples.records[3].output_ids]
    assert len(positions) == len(tokens) == 24 and hidden.shape[0] == 2
    first = len(PROMPTS[0]) - 1
    assert positions[:3].tolist() == [first, first + 1, first + 2]
    assert examples.labels(torch.tensor([5, REAL_VOCABULARY])).tolist() == [5, -100]
    assert examples.output_tokens == 48


def test_a_top_of_all_remaining_layers_agrees_with_the_target_before_training(trainable, examples):
    everything = agreement(trainable.model, Top(trainable.model, 2, 2), examples,
                           list(range(REAL_VOCABULARY)))
    assert set(everything) == {'code', 'general'} and min(everything.values()) > 0.6


def test_distilling_learns_and_is_deterministic(trainable, examples):
    vocabulary = list(range(REAL_VOCABULARY))
    options = DistillOptions(depth=2, layers=1, epochs=30, batch=2, learning_rate=3e-3)
    losses, checkpoints = [], []
    before = agreement(trainable.model, Top(trainable.model, 2, 1), examples, vocabulary)
    top = distill(trainable.model, examples, vocabulary, options,
                  report=lambda step, steps, loss, right: losses.append(loss),
                  checkpoint=lambda top, step: checkpoints.append(step))
    assert len(losses) == 60 and checkpoints == list(range(2, 61, 2))
    assert sum(losses[-4:]) < 0.5 * sum(losses[:4])
    after = agreement(trainable.model, top, examples, vocabulary)
    assert sum(after.values()) > sum(before.values())
    again = distill(trainable.model, examples, vocabulary, options)
    assert all(torch.equal(a, b) for a, b in zip(top.export().values(),
                                                 again.export().values()))
    continued = distill(trainable.model, examples, vocabulary,
                        DistillOptions(depth=2, layers=1, epochs=0.1, learning_rate=0.0,
                                       weight_decay=0.0), start=top.export())
    assert agreement(trainable.model, continued, examples, vocabulary) == pytest.approx(
        after, abs=0.1)


def test_the_target_is_left_as_it_was(trainable, examples, greedy):
    before = trainable.model.layers[3].down.clone()
    distill(trainable.model, examples, list(range(REAL_VOCABULARY)),
            DistillOptions(depth=2, layers=1, epochs=1, batch=4))
    assert torch.equal(trainable.model.layers[3].down, before)
    assert not trainable.model.norm.requires_grad


def test_a_saved_draft_carries_how_it_was_made(tmp_path, trainable):
    path = tmp_path / 'new' / 'draft.safetensors'
    tensors = Top(trainable.model, 2, 2).export()
    save_draft(path, tensors, {'seed': '0'})
    assert read_metadata(path) == {'seed': '0'}
    read = read_tensors(path)
    assert set(read) == set(tensors) and read['norm'].dtype == torch.bfloat16
    assert [p.name for p in path.parent.iterdir()] == ['draft.safetensors']
    top = Top(trainable.model, 2, 2)
    top.load(read)
    assert all(torch.equal(a, b) for a, b in zip(top.export().values(), tensors.values()))
