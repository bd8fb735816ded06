# SPDX-License-Identifier: Apache-2.0
"""``memspec distill`` from prompts to a bundle that runs, on the tiny target."""

import json

import pytest
from safetensors.torch import load_file
import torch

from memspec_ros.cli import main
from memspec_ros.models.bundle import load_bundle
from memspec_ros.runtime.requests import GenerationRequest
from memspec_ros.runtime.runtime import Runtime, RuntimeOptions


@pytest.fixture
def prompts(tmp_path):
    def write(name, count):
        path = tmp_path / name
        path.write_text(''.join(
            json.dumps({'domain': domain, 'prompt': f'{domain} {i} tells'}) + '\n'
            for i in range(count) for domain in ('general', 'code')))
        return path
    return write


def run(bundle, work, train, held_out, *more):
    return main(['distill', '--bundle', str(bundle), '--work', str(work), '--prompts', str(train),
                 '--eval-prompts', str(held_out), '--output-tokens', '12', '--vocabulary', '40',
                 '--depth', '2', '--layers', '1', '--epochs', '2', '--domain-epochs', '1',
                 '--batch', '4', '--threads', '1', '--device', 'cpu', *more])


def test_it_makes_a_bundle_that_decodes_as_the_target_does(full_bundle, tmp_path, prompts, capsys):
    work = tmp_path / 'work'
    assert run(full_bundle, work, prompts('train.jsonl', 6), prompts('eval.jsonl', 2)) == 0
    assert 'held out' in capsys.readouterr().out
    bundle = load_bundle(work)
    assert [spec.id for spec in bundle.drafts] == ['general', 'code', 'lookup']
    assert set(bundle.draft('code').acceptance) == {'general', 'code'}

    def answer(path, gamma):
        runtime = Runtime.open(path, RuntimeOptions(dtype='float32', context=128,
                                                    max_gamma=gamma, adaptive=False))
        try:
            request = runtime.prepare(GenerationRequest('code 9 tells', max_new_tokens=24,
                                                        ignore_eos=True))
            chunks = list(runtime.controller.generate(request))
            return [t for chunk in chunks for t in chunk.token_ids], chunks[-1].stats
        finally:
            runtime.close()

    expected, _ = answer(full_bundle, 0)
    tokens, stats = answer(work, 3)
    assert tokens == expected and stats.drafted > 0


def test_a_second_run_makes_only_what_is_missing(full_bundle, tmp_path, prompts, capsys):
    work, train, held_out = tmp_path / 'work', prompts('train.jsonl', 4), prompts('eval.jsonl', 1)
    run(full_bundle, work, train, held_out)
    first = load_file(work / 'code.safetensors')
    (work / 'code.safetensors').unlink()
    capsys.readouterr()
    run(full_bundle, work, train, held_out)
    output = capsys.readouterr().out
    assert 'generating' not in output and 'general.safetensors is there already' in output
    # The same seed and data: the same draft, to the last bit.
    again = load_file(work / 'code.safetensors')
    assert set(again) == set(first)
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())


def test_a_malformed_line_is_named(full_bundle, tmp_path, prompts, capsys):
    bad = tmp_path / 'bad.jsonl'
    bad.write_text('{"prompt": "a", "domain": "code"}\n{"prompt": 5, "domain": "code"}\n')
    assert run(full_bundle, tmp_path / 'work', bad, prompts('eval.jsonl', 1)) == 1
    assert 'bad.jsonl, line 2' in capsys.readouterr().err


def test_a_domain_draft_needs_the_general_one(full_bundle, tmp_path, prompts, capsys):
    assert run(full_bundle, tmp_path / 'work', prompts('train.jsonl', 2),
               prompts('eval.jsonl', 1), '--domain', 'code') == 1
    assert 'general' in capsys.readouterr().err
