# SPDX-License-Identifier: Apache-2.0
"""``memspec bench memory``: the naive decoder it compares with, and what it reports."""

from __future__ import annotations

import json

from conftest import PROMPTS
import pytest
import torch

from memspec_ros.bench.memory import prepare
from memspec_ros.bench.naive import NaiveDecoder
from memspec_ros.cli import main
from memspec_ros.models.bundle import load_bundle
from memspec_ros.models.drafts import KINDS
from memspec_ros.models.errors import InvalidRequestError
from memspec_ros.models.weights import read_tensors


def naive(target, full_bundle, draft, gamma):
    bundle = load_bundle(full_bundle)
    spec = bundle.draft(draft)
    kind = KINDS[spec.kind](spec, bundle, target, 1)
    return NaiveDecoder(target, kind.attach(read_tensors(bundle.weight_file(spec))), gamma)


@pytest.mark.parametrize('draft', ['top', 'noise'])
@pytest.mark.parametrize('gamma', [1, 4])
def test_the_naive_decoder_says_what_the_target_says(target, full_bundle, greedy, draft, gamma):
    decoder = naive(target, full_bundle, draft, gamma)
    for prompt in PROMPTS:
        assert decoder.generate(prompt, 25) == greedy(prompt, 25)


def test_a_good_draft_saves_it_passes_and_all_logits_are_kept(target, full_bundle):
    rows = {}
    for draft in ('top', 'noise'):
        decoder = naive(target, full_bundle, draft, 3)
        decoder.generate(PROMPTS[1], 30)
        assert all(kept.dtype == torch.float32 and kept.shape[1] == target.vocab_size
                   for kept in decoder.logits)
        rows[draft] = sum(map(len, decoder.logits))
    assert rows['top'] < rows['noise']
    # Prompt, and at least a row a token of target and draft.
    assert rows['top'] >= len(PROMPTS[1]) - 1 + 30


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / 'prompts.jsonl'
    file.write_text(''.join(json.dumps({'domain': domain, 'prompt': text * 6}) + '\n'
                            for domain, text in (('a', 'the red cube '), ('b', 'def add '))))
    return file


def test_the_report_as_json(full_bundle, prompts, tmp_path):
    out = tmp_path / 'memory.json'
    assert main(['bench', 'memory', '--bundle', str(full_bundle), '--prompts', str(prompts),
                 '--dtype', 'float32', '--threads', '1', '--max-new-tokens', '64', '--rounds', '1',
                 '--draft', 'top', '--json', str(out)]) == 0
    result = json.loads(out.read_text())
    ours, theirs = (result['contenders'][name] for name in ('memspec', 'naive'))
    assert ours['weights_mib'] == theirs['weights_mib'] > 0
    assert ours['tokens_per_sec'] > 0 and theirs['tokens_per_sec'] > 0
    assert result['memory_saved'] == pytest.approx(
        1 - ours['generation_mib'] / theirs['generation_mib'])
    assert result['throughput_ratio'] == pytest.approx(
        ours['tokens_per_sec'] / theirs['tokens_per_sec'])
    assert result['outputs_differing'] == 0 and result['prompts'] == 2
    assert (result['draft'], result['gamma'], result['dtype']) == ('top', 4, 'float32')


def test_only_what_both_can_run_is_compared(full_bundle, prompts, tmp_path):
    def prepared(**changes):
        return prepare(**{'bundle_path': str(full_bundle), 'draft': '', 'device': 'cpu',
                          'dtype': 'float32', 'threads': 1, 'gamma': 4, 'new_tokens': 8,
                          'prompts': prompts, 'per_domain': 1, **changes})

    race = prepared()
    assert race.draft == 'top' and race.context == max(map(len, race.prompts)) + 8
    with pytest.raises(InvalidRequestError, match="'near': .*in this bundle: top, noise"):
        prepared(draft='near')
    empty = tmp_path / 'empty.jsonl'
    empty.write_text('')
    with pytest.raises(InvalidRequestError, match='empty.jsonl: no prompts'):
        prepared(prompts=empty)


def test_wrong_options_are_named(prompts, capsys):
    assert main(['bench', 'memory', '--prompts', str(prompts), '--gamma', '0']) == 1
    assert '--gamma is 0, expected 1 to 16' in capsys.readouterr().err
