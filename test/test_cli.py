# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints, what it writes, and how it fails."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
import subprocess
import sys

import pytest

from memspec_ros.cli import main

ROOT = Path(__file__).resolve().parents[1]
PROMPT = 'the robot picks up the red cube'
SMALL = ['--dtype', 'float32', '--threads', '1', '--context', '256']


def memspec(*arguments: str, **options) -> subprocess.CompletedProcess:
    """Run the command in a process of its own."""
    paths = [str(ROOT), *filter(None, os.environ.get('PYTHONPATH', '').split(os.pathsep))]
    return subprocess.run(
        [sys.executable, '-m', 'memspec_ros.cli', *arguments], capture_output=True, text=True,
        timeout=120, env={**os.environ, 'PYTHONPATH': os.pathsep.join(paths),
                          'OMP_NUM_THREADS': '1'}, **options)


@pytest.fixture(scope='module')
def bundle(full_bundle) -> str:
    return str(full_bundle)


@pytest.fixture
def prompts(tmp_path) -> Path:
    file = tmp_path / 'prompts.jsonl'
    lines = [{'domain': domain, 'prompt': f'{text} {i}'} for i in range(3)
             for domain, text in (('general', 'the robot'), ('code', 'def add'))]
    file.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    return file


# --- generate ---

def test_generate_as_json_is_what_greedy_decoding_gives(bundle, greedy):
    done = memspec('generate', '--bundle', bundle, '--prompt', PROMPT, '--max-new-tokens', '40',
                   '--scheduling-interval', '2', '--cache-capacity', '2', '--ignore-eos',
                   '--fixed-draft-length', '--json', '-', *SMALL)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result) == {'text', 'prompt_ids', 'token_ids', 'finish', 'message', 'stats',
                           'exact', 'kv', 'kv_dropped'}
    assert result['exact'] and not result['kv_dropped']
    assert result['finish'] == 'length' and not result['message']
    assert result['token_ids'] == greedy(result['prompt_ids'], 40)
    stats = result['stats']
    assert {'drafted', 'accepted', 'iterations', 'switches', 'output_tokens',
            'prompt_tokens'} <= set(stats)
    assert stats['output_tokens'] == 40 and stats['drafted'] >= stats['accepted'] > 0
    assert stats['prompt_tokens'] == len(result['prompt_ids'])
    assert 0 < stats['iterations'] < 40


def test_generate_prints_the_text_and_writes_the_file(bundle, tmp_path, capfd):
    file = tmp_path / 'out.json'
    assert main(['generate', '--bundle', bundle, '--prompt', PROMPT, '--max-new-tokens', '12',
                 '--stop', 'no such text', '--json', str(file), *SMALL]) == 0
    result = json.loads(file.read_text())
    assert capfd.readouterr().out.rstrip('\n') == result['text'].rstrip('\n')
    assert result['finish'] in ('length', 'stop') and len(result['token_ids']) <= 12


def test_generate_reads_the_prompt_from_standard_input(bundle):
    done = memspec('generate', '--bundle', bundle, '--prompt', '-', '--max-new-tokens', '4',
                   '--json', '-', *SMALL, input=PROMPT)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)['prompt_ids']) > 10


@pytest.mark.parametrize('policy, capacity', [
    *itertools.product(['memspec', 'prediction_only', 'general_static', 'ucb_sync', 'ucb_async',
                        'hedge'], ['0', '1']), ('ucb_async', '2'), ('hedge', '4')])
def test_output_does_not_depend_on_how_drafts_are_scheduled(bundle, greedy, capfd, policy,
                                                            capacity):
    assert main(['generate', '--bundle', bundle, '--prompt', PROMPT, '--max-new-tokens', '20',
                 '--policy', policy, '--cache-capacity', capacity, '--ignore-eos', '--json', '-',
                 *SMALL]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result['token_ids'] == greedy(result['prompt_ids'], 20)


def test_drafts_are_read_at_the_pace_of_slower_storage(bundle, greedy, capfd, caplog):
    command = ['generate', '--bundle', bundle, '--prompt', PROMPT, '--max-new-tokens', '20',
               '--ignore-eos', '--json', '-', *SMALL]
    assert main([*command, '--storage-mb-per-sec', '0.05', '--storage-latency-ms', '50']) == 0
    result = json.loads(capfd.readouterr().out)
    assert result['token_ids'] == greedy(result['prompt_ids'], 20)
    # Seconds a load: the first one is still on its way when the answer ends.
    assert result['stats']['loads'] == 1 and result['stats']['desired_sec'] == 0
    assert main([*command, '--cold-storage']) == 0
    assert main([*command, '--storage-mb-per-sec', '-1']) == 1
    assert 'mb_per_sec is -1.0' in capfd.readouterr().err


SAMPLED = ['--temperature', '1.2', '--top-k', '40', '--top-p', '0.95', '--min-p', '0.001',
           '--repetition-penalty', '1.1', '--presence-penalty', '0.2', '--frequency-penalty',
           '0.1', '--min-tokens', '3', '--logit-bias', '70=2.5', '--logit-bias', '71=-1']


def generate(capfd, bundle, *arguments) -> list[int]:
    assert main(['generate', '--bundle', bundle, '--prompt', PROMPT, '--max-new-tokens', '24',
                 '--ignore-eos', '--json', '-', *SMALL, *arguments]) == 0
    return json.loads(capfd.readouterr().out)['token_ids']


def test_generate_samples_by_seed_whoever_drafts(bundle, capfd):
    first = generate(capfd, bundle, *SAMPLED, '--seed', '4')
    assert first == generate(capfd, bundle, *SAMPLED, '--seed', '4', '--draft-tokens', '0')
    assert first == generate(capfd, bundle, *SAMPLED, '--seed', '4', '--cache-capacity', '1',
                             '--fixed-draft-length', '--scheduling-interval', '1')
    assert first != generate(capfd, bundle, *SAMPLED, '--seed', '5')
    assert generate(capfd, bundle, *SAMPLED) != generate(capfd, bundle, *SAMPLED)
    rejected = generate(capfd, bundle, *SAMPLED, '--seed', '4', '--verification', 'rejection',
                        '--fixed-draft-length')
    assert len(rejected) == 24


def test_generate_with_merged_drafts_says_the_same(bundle, capfd, greedy, monkeypatch):
    from memspec_ros.runtime.drafting import Drafting
    prompt = 'the robot picks up the red cube and the robot picks up the red cube and'
    outputs, told, choose = [], [], Drafting.choose

    def listen(self, length, active, others, copy, merge, *more):
        told.append(merge)
        return choose(self, length, active, others, copy, merge, *more)

    monkeypatch.setattr(Drafting, 'choose', listen)
    for more in ([], ['--merge'], ['--merge', '--temperature', '1', '--seed', '3'],
                 ['--temperature', '1', '--seed', '3']):
        assert main(['generate', '--bundle', bundle, '--prompt', prompt, '--max-new-tokens', '32',
                     '--ignore-eos', '--fixed-draft-length', '--json', '-', *SMALL, *more]) == 0
        outputs.append(json.loads(capfd.readouterr().out))
        assert set(told) == {'--merge' in more}
        told.clear()
    ids = [output['token_ids'] for output in outputs]
    assert ids[0] == ids[1] == greedy(outputs[0]['prompt_ids'], 32) and ids[2] == ids[3] != ids[0]


def test_a_draft_that_is_never_sure_enough_drafts_nothing(bundle, capfd):
    drafted = []
    for least in ('0', '1'):
        assert main(['generate', '--bundle', bundle, '--prompt', PROMPT, '--max-new-tokens', '12',
                     '--ignore-eos', '--fixed-draft-length', '--min-confidence', least, '--json',
                     '-', *SMALL]) == 0
        drafts = json.loads(capfd.readouterr().out)['stats']['drafts']
        # What is copied has no confidence.
        drafted.append(sum(count['proposed'] for name, count in drafts.items()
                           if name != 'lookup'))
    assert drafted[0] > 0 == drafted[1]


def test_names_of_sampling_options_are_those_of_the_decoder():
    from memspec_ros.cli.options import _SAMPLING
    from memspec_ros.decoding.sampler import VERIFICATIONS
    from memspec_ros.decoding.sampling import NUMBERS
    assert {name: kind for name, (kind, _) in _SAMPLING.items()} == {
        field.name: type(field.default) for field in NUMBERS}
    assert VERIFICATIONS == ('coupled', 'rejection')


# --- info ---

def test_info_as_json(bundle, capfd):
    assert main(['info', '--bundle', bundle, '--json', '-']) == 0
    info = json.loads(capfd.readouterr().out)
    assert info['name'] == 'tiny' and info['ranker'] == 'domain_words'
    target = info['target']
    assert Path(target['path']).is_dir() and target['licence'] == 'Apache-2.0'
    assert target['bytes'] == (Path(target['path']) / 'model.safetensors').stat().st_size
    assert [draft['id'] for draft in info['drafts']] == [
        'near', 'far', 'top', 'noise', 'feature', 'embedded', 'lookup']
    for draft in info['drafts']:
        if draft['path'] is None:
            assert draft['kind'] == 'prompt_lookup' and draft['bytes'] == 0
        else:
            assert Path(draft['path']).stat().st_size == draft['bytes']
    assert info['drafts'][2]['made'] == {'made': 'by a test'}


def test_info_for_people(bundle, capfd):
    assert main(['info', '--bundle', bundle]) == 0
    out = capfd.readouterr().out
    for word in ('tiny-llama', 'top', 'shared_layers', 'domain_words', 'Apache-2.0'):
        assert word in out


# --- bench ---

def test_bench_quick(bundle, prompts, tmp_path):
    pytest.importorskip('accelerate')
    file = tmp_path / 'bench.json'
    done = memspec('bench', 'quick', '--bundle', bundle, '--prompts', str(prompts),
                   '--per-domain', '2', '--max-new-tokens', '16', '--json', str(file), *SMALL)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert set(result['domains']) == {'general', 'code'} and result['prompts'] == 4
    for figures in result['domains'].values():
        assert {'memspec_tps', 'plain_tps', 'transformers_tps', 'ratio'} <= set(figures)
        assert all(value > 0 for value in figures.values())
        assert figures['ratio'] == pytest.approx(figures['memspec_tps'] / figures['plain_tps'])
    ratios = [figures['ratio'] for figures in result['domains'].values()]
    assert result['gmean_ratio'] == pytest.approx((ratios[0] * ratios[1]) ** 0.5)
    assert result['outputs_differing_from_transformers'] == 0
    for domain in result['domains']:
        assert domain in done.stdout
    assert result['floor']['read_gb_per_sec'] > 0 and 'floor: a target step' in done.stdout


# --- errors ---

GENERATE = ['generate', '--prompt', PROMPT]


@pytest.mark.parametrize('arguments, words', [
    ([*GENERATE, '--max-new-tokens', '-1'], ['max_new_tokens', '-1']),
    ([*GENERATE, '--max-new-tokens', '0'], ['max_new_tokens']),
    ([*GENERATE, '--max-new-tokens', '1000000'], ['context', '256']),
    ([*GENERATE, '--cache-capacity', '-2'], ['--cache-capacity', '-2']),
    ([*GENERATE, '--scheduling-interval', '0'], ['--scheduling-interval']),
    ([*GENERATE, '--draft-tokens', '-1'], ['--draft-tokens']),
    ([*GENERATE, '--min-confidence', '1.5'], ['--min-confidence', '1.5', '0 to 1']),
    ([*GENERATE, '--min-confidence', 'nan'], ['--min-confidence', 'nan']),
    ([*GENERATE, '--policy', 'oracle'], ['--policy', 'oracle', 'memspec']),
    ([*GENERATE, '--dtype', 'float13'], ['float13', 'bfloat16']),
    ([*GENERATE, '--device', 'tpu'], ['tpu']),
    ([*GENERATE, '--timeout', '-1'], ['timeout_sec']),
    ([*GENERATE, '--timeout', 'nan'], ['timeout_sec']),
    ([*GENERATE, '--stop', ''], ['stop']),
    ([*GENERATE, '--temperature', 'nan'], ['sampling.temperature', 'nan']),
    ([*GENERATE, '--temperature', '-1'], ['sampling.temperature', '-1']),
    ([*GENERATE, '--top-p', '1.5'], ['sampling.top_p', '1.5']),
    ([*GENERATE, '--logit-bias', '999999=1'], ['sampling.logit_bias_ids', '999999']),
    (['generate', '--prompt', ' '], ['prompt']),
    ([*GENERATE, '--json', '/no/such/folder/out.json'], ['/no/such/folder/out.json']),
], ids=lambda value: ' '.join(value[-2:]) if value[0] == 'generate' else None)
def test_generate_errors_are_one_line_on_standard_error(bundle, capfd, arguments, words):
    assert main([*arguments, '--bundle', bundle, '--threads', '1', '--dtype', 'float32',
                 '--context', '256'] if '--dtype' not in arguments else
                [*arguments, '--bundle', bundle]) == 1
    captured = capfd.readouterr()
    line = captured.err.strip().splitlines()[-1]
    assert line.startswith('memspec generate: ')
    for word in words:
        assert word in line
    assert 'Traceback' not in captured.err


def test_wrong_bundle(tmp_path, capfd):
    for command in (['info'], GENERATE):
        assert main([*command, '--bundle', str(tmp_path)]) == 1
        assert str(tmp_path / 'bundle.yaml') in capfd.readouterr().err


def test_error_of_the_real_command():
    done = memspec('info', '--bundle', '/no/such/bundle')
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.startswith('memspec info: /no/such/bundle')
    assert 'Traceback' not in done.stderr


@pytest.mark.parametrize('arguments', [
    [], ['no-such-command'], ['generate'], ['bench', 'quick'],
    ['generate', '--prompt', 'x', '--cache-capacity', 'two'],
    ['generate', '--prompt', 'x', '--logit-bias', '5'],
    ['generate', '--prompt', 'x', '--verification', 'none'], ['verify', '--count', 'x']])
def test_usage_errors(arguments, capfd):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert 'usage: memspec' in capfd.readouterr().err


def bench(prompts: Path, bundle: str, *more: str) -> int:
    return main(['bench', 'quick', '--prompts', str(prompts), '--bundle', bundle, *SMALL, *more])


def test_bench_shows_what_it_measured_where_the_file_cannot_be_written(
        bundle, prompts, tmp_path, capfd):
    assert bench(prompts, bundle, '--per-domain', '1', '--max-new-tokens', '4',
                 '--json', str(tmp_path / 'none' / 'bench.json')) == 1
    out, err = capfd.readouterr()
    assert 'gmean' in out and 'none/bench.json' in err


def test_bench_with_prompts_that_are_no_text(bundle, tmp_path, capfd):
    (tmp_path / 'bytes.jsonl').write_bytes(b'\xff\xfe')
    assert bench(tmp_path / 'bytes.jsonl', bundle) == 1
    assert 'bytes.jsonl' in capfd.readouterr().err


def test_bench_without_its_prompts(bundle, tmp_path, capfd):
    assert bench(tmp_path / 'none.jsonl', bundle) == 1
    assert 'none.jsonl' in capfd.readouterr().err


@pytest.mark.parametrize('line', [
    'not json', '[1, 2]', '{"domain": "code"}', '{"prompt": 5, "domain": "code"}', '"text"'])
def test_bench_names_the_malformed_line(bundle, prompts, capfd, line):
    prompts.write_text(prompts.read_text() + line + '\n')
    assert bench(prompts, bundle) == 1
    error = capfd.readouterr().err
    assert 'prompts.jsonl' in error and '7' in error and 'Traceback' not in error


def test_bench_of_nothing(bundle, prompts, capfd):
    prompts.write_text('\n')
    assert bench(prompts, bundle) == 1
    assert 'no prompts' in capfd.readouterr().err


@pytest.mark.parametrize('option', ['--per-domain', '--max-new-tokens'])
@pytest.mark.parametrize('value', ['0', '-3'])
def test_bench_with_impossible_numbers(bundle, prompts, capfd, option, value):
    assert bench(prompts, bundle, option, value) == 1
    error = capfd.readouterr().err
    assert f'{option} is {value}' in error and 'Traceback' not in error
