# SPDX-License-Identifier: Apache-2.0
"""The target's own outputs: generated in batches, kept in a store."""

import json

from conftest import PROMPTS
import pytest
import torch

from memspec_ros.training.lessons import choose_vocabulary, coverage
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
    # A domain with few tokens counts as much as one with many.
    many = [OutputRecord('c', 'code', [1], [5] * 50 + [6] * 40 + [4] * 10)]
    assert choose_vocabulary([*many, OutputRecord('d', 'law', [1], [3, 2, 3])], 2) == [3, 5]
    assert coverage(RECORDS, [7]) == pytest.approx(3 / 5)
    assert coverage([], [7]) == 0.0
    text = OutputRecord('a', 'code', [1, 2], [1, 3, 3, 7, 4])
    assert coverage([text], [7]) == pytest.approx(1 / 5)
    assert coverage([text], [7], text=True) == pytest.approx(3 / 5)


def test_sampled_outputs_are_further_records_of_a_prompt(tmp_path, target, greedy):
    store = OutputStore(tmp_path / 'outputs.jsonl')
    prompts = [('general', PROMPTS[0]), ('general', PROMPTS[1])]
    fill_store(store, target.model, prompts, 12, frozenset(), 8)
    fill_store(store, target.model, prompts, 12, frozenset(), 8, temperature=0.9, sample=1)
    fill_store(store, target.model, prompts, 12, frozenset(), 8, temperature=0.9, sample=2)
    records = {record.key: record.output_ids for record in store}
    assert set(records) == {content_key(p) + end for p in PROMPTS[:2] for end in ('', '-1', '-2')}
    for prompt in PROMPTS[:2]:
        key = content_key(prompt)
        assert records[key] == greedy(prompt, 12)
        assert len({tuple(records[key + end]) for end in ('', '-1', '-2')}) == 3
    again = OutputStore(tmp_path / 'again.jsonl')
    fill_store(again, target.model, prompts, 12, frozenset(), 8, temperature=0.9, sample=2)
    assert all(records[record.key] == record.output_ids for record in again)


def test_sampling_follows_the_distribution(target):
    prompt, count = PROMPTS[0], 400
    state = target.new_state(100)
    logits = target.forward(state, prompt, last_only=True)[0]
    probabilities = (logits / 2.0).softmax(-1)
    firsts = [output[0] for output in generate_batch(
        target.model, [prompt] * count, 1, frozenset(), 2.0, torch.Generator().manual_seed(3))]
    seen = torch.bincount(torch.tensor(firsts), minlength=len(probabilities)) / count
    # Of the events "the likeliest half of the mass" and its complement.
    order = probabilities.argsort(descending=True)
    half = order[probabilities[order].cumsum(0) <= 0.5]
    expected = float(probabilities[half].sum())
    deviation = (expected * (1 - expected) / count) ** 0.5
    assert abs(float(seen[half].sum()) - expected) < 4 * deviation
