# SPDX-License-Identifier: Apache-2.0
"""Options of keys and values on the command line, and what is measured of them."""

from __future__ import annotations

import json

import pytest

from memspec_ros.bench import equivalence, exact
from memspec_ros.cli import main
from memspec_ros.decoding import engine as engine_module

RUN = ['--dtype', 'float32', '--threads', '1']


@pytest.fixture
def texts(tmp_path):
    file = tmp_path / 'texts.jsonl'
    file.write_text(''.join(json.dumps({'prompt': f'the robot {i} picks up the red cube ' * 4,
                                        'reference': 'def add'}) + '\n' for i in range(12)))
    return file


def as_json(arguments, tmp_path, status=0):
    file = tmp_path / 'result.json'
    assert main([*map(str, arguments), '--json', str(file)]) == status
    return json.loads(file.read_text())


def test_generate_goes_on_beyond_the_context_and_says_that_it_is_not_exact(full_bundle,
                                                                           tmp_path):
    asked = ['generate', '--bundle', full_bundle, '--prompt', 'the robot', '--ignore-eos',
             '--context', 160, '--max-new-tokens', 200, *RUN]
    answers = [as_json([*asked, '--kv-window', -1, '--kv-int8-after', 16, '--draft-tokens', count],
                       tmp_path) for count in (4, 0)]
    assert answers[0]['token_ids'] == answers[1]['token_ids']
    assert len(answers[0]['token_ids']) == 200 and answers[0]['stats']['accepted'] > 0
    assert answers[0]['exact'] is False and answers[0]['kv_dropped'] >= 64
    assert answers[0]['kv'] == 'int8 after 16, 4 sinks and a window of the context'
    short = [*asked[:-6], '--max-new-tokens', 20, *RUN]
    assert as_json(short, tmp_path)['exact'] is True


@pytest.mark.parametrize(('options', 'complaint'), [
    (['--kv-window', '-2'], '--kv-window is -2, expected -1 to'),
    (['--kv-int8-after', '-1'], '--kv-int8-after is -1'),
    (['--kv-window', '500', '--context', '256'], 'kv.window is 500 and kv.sinks 4')])
@pytest.mark.parametrize('command', [['generate', '--prompt', 'x', '--bundle'], ['plan']])
def test_what_cannot_be_is_named(full_bundle, capfd, command, options, complaint):
    assert main([*command, str(full_bundle), *options]) != 0
    assert complaint in capfd.readouterr().err


def test_a_plan_knows_them(full_bundle, tmp_path, capfd):
    plans = [as_json(['plan', full_bundle, '--context', 512, '--dtype', 'float32', *options],
                     tmp_path) for options in ([], ['--kv-int8-after', 32],
                                               ['--kv-window', 128])]
    sizes = [plan['footprint_mib']['kv_cache'] for plan in plans]
    assert sizes[1] < 0.9 * sizes[0] and sizes[2] < 0.5 * sizes[0]
    assert 'not exactly what the target says' in capfd.readouterr().out


def test_verify_holds_speculation_against_plain_decoding(full_bundle, tmp_path, capfd,
                                                         monkeypatch):
    """And says that the exact target is another thing; a tampered verifier fails."""
    everything = list(exact.combinations())
    monkeypatch.setattr(exact, 'combinations', lambda: everything[::170])
    monkeypatch.setattr(exact, '_DRAWS', 500)
    asked = ['verify', '--bundle', full_bundle, '--context', 200, '--count', 2,
             '--max-new-tokens', 100, '--tokens', 200, '--threads', 1, '--kv-window', 40,
             '--kv-int8-after', 16]
    result = as_json(asked, tmp_path)
    assert result['greedy']['equal'] == 2 and result['accepted'] > 0
    assert result['exact_target'] is False and result['reference'] == 'plain decoding'
    out = capfd.readouterr().out
    assert 'NOT that of the exact target' in out and 'those of plain decoding' in out

    def verify(self, proposal):
        rows, tokens = original(self, proposal)
        return rows, [*tokens[:-1], 7] if proposal.tokens else tokens
    original = engine_module.Engine._verify
    monkeypatch.setattr(engine_module.Engine, '_verify', verify)
    monkeypatch.setattr(equivalence._PlainContest, '_gap', lambda *arguments: 1.0)
    assert as_json(asked, tmp_path, 1)['greedy']['pass'] is False


def test_bench_kv(full_bundle, texts, tmp_path):
    result = as_json(['bench', 'kv', '--bundle', full_bundle, '--prompts', texts, '--context',
                      400, '--texts', 1, '--rounds', 2, *RUN], tmp_path)
    exact_way, int8, window, both = result['ways'].values()
    assert exact_way['agreement'] == exact_way['kv_share'] == 1 and not exact_way['divergence']
    assert both['kv_share'] < int8['kv_share'] < 1 and window['kv_share'] < 0.6
    assert 0.8 < int8['agreement'] and 0 < int8['divergence'] < window['divergence']
    assert result['judged_tokens'] == 99
    assert all(way['throughput_ratio'] > 0 and way['perplexity'] > 1
               for way in result['ways'].values())


def test_bench_kv_says_what_is_missing(full_bundle, texts, tmp_path, capfd):
    for options, complaint in ((['--texts', '50'], 'texts of 400 tokens are missing'),
                               (['--texts', '1', '--kv-window', '390'],
                                'kv.window is 390')):
        assert main(['bench', 'kv', '--bundle', str(full_bundle), '--prompts', str(texts),
                     '--context', '400', *RUN, *options]) != 0
        assert complaint in capfd.readouterr().err
    texts.write_text('{"prompt": "x"}\n[1]\n')
    assert main(['bench', 'kv', '--bundle', str(full_bundle), '--prompts', str(texts)]) != 0
    assert 'line 2: no JSON object' in capfd.readouterr().err


def test_bench_turns(full_bundle, tmp_path, capfd):
    file = tmp_path / 'turns.jsonl'
    file.write_text(''.join(json.dumps({'turns': [f'the robot {i} ' * 6, 'and puts it down']})
                            + '\n' for i in range(2)))
    result = as_json(['bench', 'turns', '--bundle', full_bundle, '--prompts', file, '--context',
                      400, '--max-new-tokens', 40, '--runs', 1, *RUN], tmp_path)
    assert len(result['conversations']) == 2 and result['ratio'] > 0
    for entry in result['conversations']:
        assert 40 < entry['cached_tokens'] < entry['prompt_tokens']
        assert entry['kept_ms'] > 0 and entry['read_again_ms'] > 0
    assert 'read again' in capfd.readouterr().out
    file.write_text('{"turns": ["one"]}\n')
    assert main(['bench', 'turns', '--prompts', str(file)]) != 0
    assert 'no lines with two "turns"' in capfd.readouterr().err
