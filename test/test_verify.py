# SPDX-License-Identifier: Apache-2.0
"""``memspec verify``: passes on what is right, and fails on what was tampered with."""

from __future__ import annotations

import copy
import json
import shutil

from gptq_maker import write_gptq
import pytest
import torch

from memspec_ros.bench import equivalence, exact
from memspec_ros.cli import main
from memspec_ros.decoding import engine as engine_module
from memspec_ros.decoding import sampler as sampler_module

SMALL = ['--threads', '1', '--context', '256', '--count', '3', '--max-new-tokens', '24']


@pytest.fixture(autouse=True)
def few_combinations(monkeypatch):
    """All 512 are a slow test of their own (test_verification.py)."""
    everything = list(exact.combinations())
    monkeypatch.setattr(exact, 'combinations', lambda: everything[::73])
    monkeypatch.setattr(exact, '_DRAWS', 2000)


@pytest.fixture
def verify(full_bundle, tmp_path, capfd):
    """Run the command; (exit status, result, what was printed)."""
    def run(*arguments, bundle=full_bundle):
        file = tmp_path / 'verify.json'
        status = main(['verify', '--bundle', str(bundle), '--json', str(file), *SMALL,
                       *arguments])
        return status, json.loads(file.read_text()), capfd.readouterr().out
    return run


@pytest.fixture
def far_bundle(bundle_maker, model_dirs):
    """A draft that says other things than the target: what it says must not come out."""
    shutil.copytree(model_dirs / 'far', bundle_maker.directory / 'far')
    bundle_maker.add_draft('far', 'causal_lm', 'far')
    return bundle_maker.write()


@pytest.mark.parametrize('verification', ['coupled', 'rejection'])
def test_a_bundle_passes(verify, verification):
    status, result, out = verify('--tokens', '900', '--merge', '--verification', verification)
    # Beforehand: what is going to be done, and for how long.
    plan = next(line for line in out.splitlines() if line.startswith('to do: '))
    assert '3 prompts with 75 continuations' in plan and plan.endswith(' min.')
    assert out.index(plan) < out.index('exact') < out.index('greedy: 1 of 3')
    assert status == 0 and result['pass'] is True
    assert result['greedy']['equal'] == result['greedy']['total'] == 3
    assert 0.001 < result['chi_square']['p'] <= 1 and result['chi_square']['tokens'] == 900
    assert result['chi_square']['degrees'] > 10
    assert result['exact']['largest_error'] < exact.TOLERANCE
    assert 0 < result['accepted'] < result['drafted']
    assert result['dtype'] == 'torch.float32' and result['verification'] == verification
    assert out.rstrip().endswith('PASS') and '3 of 3 answers equal' in out


def test_a_gptq_target_passes(verify, bundle_maker, model_dirs, reference):
    """Against the weights that it stands for."""
    target = bundle_maker.directory / 'gptq'
    shutil.copytree(model_dirs / 'target', target)
    write_gptq(copy.deepcopy(reference), target, act_order=True)
    shutil.copytree(model_dirs / 'near', bundle_maker.directory / 'near')
    bundle_maker.manifest['target']['path'] = 'gptq'
    bundle_maker.add_draft('near', 'causal_lm', 'near')
    bundle = bundle_maker.write()
    status, result, _ = verify('--tokens', '900', '--dtype', 'float32', bundle=bundle)
    assert status == 0 and result['greedy']['equal'] == 3 and result['accepted'] > 0


def test_weights_rounded_on_load_are_not_compared(full_bundle, capfd):
    assert main(['verify', '--bundle', str(full_bundle), '--weights', 'int4', *SMALL]) == 1
    assert 'its own reference' in capfd.readouterr().err


@pytest.mark.parametrize('name, wrong', [
    ('verify_coupled', lambda p, drafted, chance, position: (
        len(drafted), [*drafted, chance.draw(p[-1], position + len(drafted))])),
    ('verify_rejection', lambda p, proposal, chance, position: (
        len(proposal.tokens),
        [*proposal.tokens, chance.draw(p[-1], position + len(proposal.tokens))]))])
def test_a_sabotaged_verifier_fails(verify, far_bundle, monkeypatch, name, wrong):
    """It lets every drafted token pass."""
    monkeypatch.setattr(sampler_module, name, wrong)
    status, result, out = verify('--tokens', '900', '--verification', name.split('_')[1],
                                 bundle=far_bundle)
    assert status == 1 and result['pass'] is False
    assert result['chi_square']['p'] < 1e-6 and not result['chi_square']['pass']
    assert result['greedy']['pass'] and not result['exact']['pass']
    assert 'chi-square  FAIL' in out and out.rstrip().endswith('FAIL')


def test_a_sabotaged_greedy_verifier_fails(verify, monkeypatch):
    """All that is drafted is believed, in a chain and in one that branches."""
    monkeypatch.setattr(sampler_module, 'verify_greedy', lambda scores, drafted: (
        len(drafted), [*drafted, int(scores[-1].argmax())]))
    monkeypatch.setattr(sampler_module, 'descend', lambda drafted, branches, draw: (
        list(range(1, len(drafted) + 1)), [*drafted, draw(len(drafted), len(drafted))]))
    status, result, out = verify('--tokens', '60')
    assert status == 1 and result['greedy']['equal'] < 3 and not result['greedy']['pass']
    assert max(result['greedy']['gaps']) > 0 and 'greedy      FAIL' in out


def test_near_ties_are_allowed_in_half_precision_and_counted(verify, monkeypatch):
    original = equivalence._Contest._generate

    def other(self, prompt, limit, stop=False, **options):
        ids = original(self, prompt, limit, stop, **options)
        return [[*ids[0][:-1], ids[0][-1] + 1]] if stop else ids
    monkeypatch.setattr(equivalence._Contest, '_generate', other)
    monkeypatch.setattr(equivalence._Contest, '_gap', lambda *arguments: 0.25)
    status, result, out = verify('--dtype', 'bfloat16', '--tokens', '400')
    assert status == 0 and result['greedy']['gaps'] == [0.25] * 3
    assert result['greedy']['equal'] == 0 and '3 part where' in out
    assert verify('--dtype', 'float32', '--tokens', '60')[0] == 1


def test_the_gap_is_what_transformers_prefers_its_token_by(full_bundle, reference):
    """Pitfall 14: in half precision answers may part at a near-tie only, and are counted."""
    from memspec_ros.runtime.runtime import Runtime, RuntimeOptions
    runtime = Runtime.open(full_bundle, RuntimeOptions(dtype='float32', context=64, threads=1))
    try:
        contest = equivalence._Contest(runtime)
        prompt = [5, 6, 7]
        with torch.inference_mode():
            row = reference(torch.tensor([[*prompt, 9]])).logits[0, -1]
        best, second = row.topk(2).indices.tolist()
        assert contest._gap(prompt, [9, second, 4], [9, best, 8]) == pytest.approx(
            float(row[best] - row[second]), abs=1e-3)
        assert contest._gap(prompt, [9], [9, best]) == float('inf')
    finally:
        runtime.close()


@pytest.mark.parametrize('arguments, words', [
    (['--count', '0'], ['--count', '0']), (['--tokens', '-1'], ['--tokens']),
    (['--max-new-tokens', '0'], ['--max-new-tokens']),
    (['--draft-tokens', '0'], ['nothing would be drafted', '--draft-tokens']),
    (['--prompts', '/no/such.jsonl'], ['/no/such.jsonl'])])
def test_what_cannot_be_verified_is_said(full_bundle, capfd, arguments, words):
    assert main(['verify', '--bundle', str(full_bundle), *SMALL, *arguments]) == 1
    line = capfd.readouterr().err.strip().splitlines()[-1]
    assert line.startswith('memspec verify: ') and all(word in line for word in words)


def test_a_bundle_whose_drafts_say_nothing_proves_nothing(full_bundle, capfd, monkeypatch):
    from memspec_ros.models.state import Proposal
    monkeypatch.setattr(engine_module.Engine, '_propose', lambda self, drafter, gamma: (
        Proposal([]), self.clock()))
    assert main(['verify', '--bundle', str(full_bundle), *SMALL, '--tokens', '12']) == 1
    assert 'proposed nothing' in capfd.readouterr().err


def test_own_prompts(verify, tmp_path):
    file = tmp_path / 'prompts.jsonl'
    file.write_text('{"domain": "a", "prompt": "the red cube"}\n')
    _, result, _ = verify('--prompts', str(file), '--tokens', '60')
    assert result['greedy']['total'] == 1 and result['chi_square']['tokens'] == 60
