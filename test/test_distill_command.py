# SPDX-License-Identifier: Apache-2.0
"""``memspec distill`` from prompts to a bundle that runs, on the tiny target."""

import json
import shutil

import pytest
from safetensors import safe_open
from safetensors.torch import load_file
import torch

from memspec_ros.cli import main
from memspec_ros.models.bundle import load_bundle
from memspec_ros.runtime.requests import GenerationRequest
from memspec_ros.runtime.runtime import Runtime, RuntimeOptions
from memspec_ros.training.outputs import OutputStore


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
                 '--batch', '4', '--threads', '1', '--device', 'cpu',
                 *(more or ('--kind', 'shared_layers'))])


def drafted_tokens(bundle):
    """Tokens that the bundle's drafts propose in two answers: the first may end before a load."""
    runtime = Runtime.open(bundle, RuntimeOptions(dtype='float32', context=128, max_gamma=3,
                                                  adaptive=False, policy='general_static'))
    try:
        drafted = 0
        for _ in range(2):
            request = runtime.prepare(GenerationRequest('code 9 tells', max_new_tokens=16,
                                                        ignore_eos=True))
            drafted += list(runtime.controller.generate(request))[-1].stats.drafted
            runtime._loader.wait(30.0)
        return drafted
    finally:
        runtime.close()


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


def test_feature_drafts_are_the_default(full_bundle, tmp_path, prompts, capsys):
    work = tmp_path / 'work'
    assert run(full_bundle, work, prompts('train.jsonl', 3), prompts('eval.jsonl', 1),
               '--kind', 'feature') == 0
    draft = load_bundle(work).draft('code')
    assert draft.kind == 'feature' and draft.options == {
        'depth': 2, 'layers': 1, 'features': [1, 2, 4]}
    said = capsys.readouterr().out
    assert 'lessons: ' in said and 'GB of disk' in said and 'GB of memory' in said
    assert 'the next token' in said and '2 tokens ahead' in said
    assert drafted_tokens(work) > 0


def test_interrupted_and_resumed_it_makes_the_same_drafts(full_bundle, tmp_path, prompts, capsys,
                                                          monkeypatch):
    """Wherever it is stopped: in the outputs, in the lessons, in the base, in a draft."""
    from memspec_ros.training import distill, distill_job, outputs, teacher
    train, held_out = prompts('train.jsonl', 6), prompts('eval.jsonl', 1)
    more = ('--kind', 'feature', '--checkpoint-steps', '1', '--resume')
    work = tmp_path / 'work'

    class Stopped(Exception):
        pass

    def interrupt(owner, name, after, before=False):
        original, calls = getattr(owner, name), []

        def stopping(*args, **kwargs):
            calls.append(1)
            if before and len(calls) == after:
                raise Stopped
            result = original(*args, **kwargs)
            if len(calls) == after:
                raise Stopped
            return result

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, stopping)
            with pytest.raises(Stopped):
                run(full_bundle, work, train, held_out, *more)
        return len(calls)

    interrupt(outputs.OutputStore, 'append', 1)
    interrupt(teacher.TeacherStore, '_write', 1, before=True)
    interrupt(teacher.TeacherStore, '_write', 1)
    # What outputs and lessons are, to the last bit, depends on who was in a batch together; the
    # training on them does not depend on interruptions.
    interrupt(distill.Distillation, '_learn', 1, before=True)
    shutil.copytree(work, tmp_path / 'whole')
    assert run(full_bundle, tmp_path / 'whole', train, held_out, *more) == 0
    interrupt(distill_job, 'save_training', 1)  # in the base
    interrupt(distill_job, 'save_training', 1)
    capsys.readouterr()
    interrupt(distill.Distillation, '_learn', 1, before=True)
    assert 'base: resumed at step 2' in capsys.readouterr().out
    assert run(full_bundle, work, train, held_out, *more) == 0
    assert not list(work.glob('*.state')) and not list(work.glob('**/*.partial'))
    for name in ('base', 'general', 'code'):
        whole = load_file(tmp_path / 'whole' / f'{name}.safetensors')
        resumed = load_file(work / f'{name}.safetensors')
        assert all(torch.equal(whole[key], tensor) for key, tensor in resumed.items())


def test_without_resume_an_interrupted_training_begins_anew(full_bundle, tmp_path, prompts,
                                                            capsys, monkeypatch):
    from memspec_ros.training import distill_job
    original = distill_job.save_training

    def stopping(path, state):
        original(path, state)
        raise KeyboardInterrupt

    train, held_out = prompts('train.jsonl', 4), prompts('eval.jsonl', 1)
    more = ('--kind', 'feature', '--checkpoint-steps', '1')
    with monkeypatch.context() as patch:
        patch.setattr(distill_job, 'save_training', stopping)
        assert run(full_bundle, tmp_path / 'work', train, held_out, *more) != 0
    assert (tmp_path / 'work' / 'base.state').exists()
    assert run(full_bundle, tmp_path / 'work', train, held_out, *more) == 0
    assert 'resumed' not in capsys.readouterr().out


def test_drafts_learn_from_as_many_tokens_each(full_bundle, tmp_path, prompts, capsys):
    work = tmp_path / 'work'
    assert run(full_bundle, work, prompts('train.jsonl', 8), prompts('eval.jsonl', 1),
               '--kind', 'feature', '--tokens-per-domain', '36', '--samples', '2') == 0
    from memspec_ros.models.fingerprint import target_fingerprint, TARGET_KEY
    from memspec_ros.models.weights import read_metadata
    made = {name: read_metadata(work / f'{name}.safetensors')
            for name in ('base', 'general', 'code')}
    assert {name: about['training_tokens'] for name, about in made.items()} == {
        'base': '36', 'general': '36', 'code': '36'}
    target = target_fingerprint(load_bundle(full_bundle).directory / load_bundle(
        full_bundle).target.path)
    assert {about[TARGET_KEY] for about in made.values()} == {target}


def test_a_work_directory_belongs_to_one_target(full_bundle, tmp_path, prompts, capsys):
    work, train, held_out = tmp_path / 'work', prompts('train.jsonl', 2), prompts('eval.jsonl', 1)
    assert run(full_bundle, work, train, held_out) == 0
    named = json.loads((work / 'target.json').read_text())
    (work / 'target.json').write_text(json.dumps({**named, 'sha256': '0' * 64}))
    assert run(full_bundle, work, train, held_out) == 1
    assert 'another target' in capsys.readouterr().err


@pytest.mark.parametrize(('wrong', 'said'), [
    (('--kind', 'feature', '--features', '1,9'), 'features are'),
    (('--kind', 'feature', '--features', 'all'), '--features'),
    (('--kind', 'shared_layers', '--depth', '0'), 'depth is 0'),
    (('--kind', 'feature', '--epochs', '0'), '--epochs'),
    (('--kind', 'self_speculation', '--check', '2'), '--check is 2, expected more than --depth'),
    (('--kind', 'self_speculation', '--check', '4'), 'exits are after [4, 2] layers'),
    (('--kind', 'self_speculation', '--rank', '0'), '--rank'),
    (('--kind', 'self_speculation', '--continue'), '--continue goes on from drafts'),
    (('--kind', 'feature', '--batch', '0'), '--batch'),
    (('--kind', 'feature', '--prompt-tokens', '2'), 'no prompt is left'),
    (('--kind', 'feature', '--domain', 'law'), 'law'),
])
def test_what_cannot_be_trained_is_refused(full_bundle, tmp_path, prompts, capsys, wrong, said):
    assert run(full_bundle, tmp_path / 'work', prompts('train.jsonl', 2),
               prompts('eval.jsonl', 1), *wrong) == 1
    assert said in capsys.readouterr().err


def test_fifty_prompts_take_less_than_a_minute(full_bundle, tmp_path, prompts):
    import time
    start = time.monotonic()
    assert run(full_bundle, tmp_path / 'work', prompts('train.jsonl', 25),
               prompts('eval.jsonl', 2), '--kind', 'feature') == 0
    assert time.monotonic() - start < 60.0


def test_independent_drafts_are_directories_of_their_own(full_bundle, tmp_path, prompts, capsys):
    work = tmp_path / 'work'
    assert run(full_bundle, work, prompts('train.jsonl', 4), prompts('eval.jsonl', 1),
               '--kind', 'causal_lm', '--width', '16', '--layers', '1', '--resume') == 0
    draft = load_bundle(work).draft('code')
    assert draft.kind == 'causal_lm' and (work / 'code' / 'tokenizer.json').is_file()
    assert drafted_tokens(work) > 0
    capsys.readouterr()
    assert run(full_bundle, work, prompts('train.jsonl', 4), prompts('eval.jsonl', 1),
               '--kind', 'causal_lm', '--width', '16', '--layers', '1') == 0
    assert 'is there already' in capsys.readouterr().out


def test_exits_are_trained_into_the_bundle_and_self_speculate(
        full_bundle, tmp_path, prompts, capsys):
    from memspec_ros.runtime.settings import Settings
    work, train, held_out = tmp_path / 'work', prompts('train.jsonl', 12), prompts('eval.jsonl', 2)
    exits = ('--kind', 'self_speculation', '--check', '3', '--rank', '8', '--epochs', '8',
             '--learning-rate', '0.005')
    assert run(full_bundle, work, train, held_out, *exits) == 0
    out = capsys.readouterr().out
    assert 'after 3 layers: code' in out and 'after 2 layers: code' in out
    bundle = load_bundle(work)
    assert bundle.self_speculation.options == {'depth': 2, 'check': 3}
    assert [spec.id for spec in bundle.drafts] == ['lookup']
    tensors = load_file(work / 'self.safetensors')
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        f'{depth}.{name}': shape for depth in (2, 3) for name, shape in (
            ('norm', (64,)), ('input_norm', (64,)), ('gate_up', (16, 64)), ('down', (64, 8)))}
    assert all(tensors[f'{depth}.down'].any() for depth in (2, 3))  # it has learned something
    runtime = Runtime.open(work, RuntimeOptions(
        dtype='float32', context=128, adaptive=False,
        settings=Settings(cache_capacity=0, self_speculation=True)))
    try:
        request = runtime.prepare(GenerationRequest('code 9 tells', max_new_tokens=30,
                                                    ignore_eos=True))
        last = list(runtime.controller.generate(request))[-1]
        assert last.stats.drafts['self'].accepted > 0
    finally:
        runtime.close()
    # Drafts made in the same directory later on leave the exits where they are.
    assert run(full_bundle, work, train, held_out, '--kind', 'shared_layers') == 0
    again = load_bundle(work)
    assert again.self_speculation == bundle.self_speculation and len(again.drafts) == 3
    # So do drafts made elsewhere for this bundle's target.
    other = tmp_path / 'other'
    assert run(work, other, train, held_out, '--kind', 'shared_layers') == 0
    carried = load_bundle(other).self_speculation
    assert (carried.sha256, carried.options) == (
        again.self_speculation.sha256, again.self_speculation.options)


def test_a_curve_says_what_more_data_brings(full_bundle, tmp_path, prompts, capsys):
    work, train, held_out = tmp_path / 'work', prompts('train.jsonl', 8), prompts('eval.jsonl', 2)
    shape = ('--kind', 'shared_layers')
    assert run(full_bundle, work, train, held_out, *shape, '--curve', 'code') == 0
    points = json.loads((work / 'curve-code.json').read_text())['points']
    tokens = [point['training_tokens'] for point in points]
    assert len(tokens) == 4 and tokens == sorted(tokens) and tokens[0] < tokens[-1] / 4
    made = {path.name for path in (work / 'curve').iterdir()}
    assert made == {f'code-{share}.safetensors' for share in (0.125, 0.25, 0.5)}
    # The last point is the draft in the bundle, and only it is.
    assert points[-1]['agreement'] == pytest.approx(
        load_bundle(work).draft('code').acceptance, abs=1e-3)
    assert [spec.id for spec in load_bundle(work).drafts] == ['general', 'code', 'lookup']
    out = capsys.readouterr().out
    assert (work / 'curve-code.png').exists() or 'matplotlib' in out
    # What a curve needs is said before anything is made.
    assert run(full_bundle, work, train, held_out, *shape, '--curve', 'cod') != 0
    assert '--curve cod' in capsys.readouterr().err


def test_the_target_writes_prompts_itself(full_bundle, tmp_path, capsys):
    def distill(count):
        return main(['distill', '--bundle', str(full_bundle), '--work', str(work),
                     '--own-prompts', str(count), '--output-tokens', '8', '--vocabulary', '40',
                     '--epochs', '1', '--domain-epochs', '1', '--threads', '1', '--device', 'cpu'])

    work = tmp_path / 'work'
    assert distill(5) == 0
    path = work / 'own_prompts.jsonl'
    written = path.read_text()
    assert [json.loads(line)['domain'] for line in written.splitlines()] == ['general'] * 5
    assert {record.domain for record in OutputStore(work / 'outputs.jsonl')} == {'general'}
    assert [spec.id for spec in load_bundle(work).drafts] == ['general', 'lookup']
    # Cut short, as by an interruption: what was there stays, the rest comes on top.
    path.write_text(written[:-3])
    assert distill(7) == 0
    lines = path.read_text().splitlines(True)
    assert len(lines) == 7 and ''.join(lines[:4]) == ''.join(written.splitlines(True)[:4])


def test_a_target_that_never_ends_writes_no_prompts(full_bundle, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr('memspec_ros.training.own_prompts.generate_batch',
                        lambda target, prompts, limit, *_: [[5] * limit for _ in prompts])
    assert main(['distill', '--bundle', str(full_bundle), '--work', str(tmp_path / 'work'),
                 '--own-prompts', '3', '--threads', '1']) == 1
    assert 'give some with --prompts' in capsys.readouterr().err


def test_nothing_to_learn_from_is_said(full_bundle, tmp_path, capsys):
    assert main(['distill', '--bundle', str(full_bundle), '--work', str(tmp_path / 'work')]) == 1
    assert '--own-prompts COUNT' in capsys.readouterr().err


def test_drafts_of_a_bundle_are_continued(full_bundle, tmp_path, prompts, capsys):
    first, held_out = tmp_path / 'first', prompts('eval.jsonl', 2)
    assert run(full_bundle, first, prompts('train.jsonl', 6), held_out,
               '--kind', 'feature') == 0
    before = load_bundle(first)
    new = tmp_path / 'new.jsonl'
    new.write_text(''.join(json.dumps({'domain': domain, 'prompt': f'{domain} wants {i}'}) + '\n'
                           for i in range(6) for domain in ('code', 'kitchen')))

    def further(work, *more):
        return main(['distill', '--continue', '--bundle', str(first), '--work', str(work),
                     '--prompts', str(new), '--eval-prompts', str(held_out), '--output-tokens',
                     '12', '--domain-epochs', '2', '--batch', '4', '--threads', '1',
                     '--device', 'cpu', *more])

    work = tmp_path / 'work'
    assert further(work) == 0
    after = load_bundle(work)
    assert [spec.id for spec in after.drafts] == ['code', 'kitchen', 'general', 'lookup']
    assert after.head_token_ids() == before.head_token_ids()
    assert after.draft('kitchen').options == before.draft('general').options
    assert after.draft('general') == before.draft('general')
    general, code, kitchen = (load_file(work / f'{name}.safetensors')
                              for name in ('general', 'code', 'kitchen'))
    assert all(torch.equal(tensor, load_file(first / 'general.safetensors')[key])
               for key, tensor in general.items())
    for made, start in ((code, load_file(first / 'code.safetensors')), (kitchen, general)):
        assert any(not torch.equal(tensor, start[key]) for key, tensor in made.items())
    origin = safe_open(work / 'kitchen.safetensors', 'pt').metadata()['continued_from']
    assert origin.startswith('general')
    assert drafted_tokens(work) > 0
    # The mean of before and after: half as far from where it began as the training went.
    from memspec_ros.training import distill_job
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distill_job, 'mean', lambda before, after: after)
        assert further(tmp_path / 'whole') == 0
    whole, began = (load_file(path / 'code.safetensors') for path in (tmp_path / 'whole', first))
    for key, tensor in code.items():
        torch.testing.assert_close(tensor.float(), (whole[key].float() + began[key].float()) / 2,
                                   rtol=1e-2, atol=1e-4)


def test_without_drafts_there_is_nothing_to_continue(full_bundle, tmp_path, prompts, capsys):
    (tmp_path / 'bare').mkdir()
    from memspec_ros.training.bundle_writer import write_bare_bundle
    target = load_bundle(full_bundle).target
    write_bare_bundle(tmp_path / 'bare', {
        'name': target.name, 'licence': target.licence, 'provenance': target.provenance,
        'path': str((full_bundle / target.path).resolve())})
    assert main(['distill', '--continue', '--bundle', str(tmp_path / 'bare'), '--work',
                 str(tmp_path / 'work'), '--prompts', str(prompts('train.jsonl', 2))]) == 1
    assert 'no draft to continue' in capsys.readouterr().err
