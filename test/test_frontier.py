# SPDX-License-Identifier: Apache-2.0
"""``memspec bench frontier``: every draft alone, its gain and its memory; and how it fails."""

import json
import shutil
import sys

from conftest import build_llama, build_tokenizer, BundleMaker, REAL_VOCABULARY, sha256_of
import pytest

from memspec_ros.bench import frontier as bench
from memspec_ros.bench.contest import Contest
from memspec_ros.bench.frontier_figure import draw, format_table, frontier
from memspec_ros.cli import main
from memspec_ros.decoding.draft_length import DraftLength
from memspec_ros.runtime import drafting

SMALL = ['--dtype', 'float32', '--threads', '1', '--context', '160', '--max-new-tokens', '10',
         '--fixed-draft-length', '--draft-tokens', '3']
FIELDS = {'draft', 'kind', 'extra_bytes', 'extra_percent', 'speedup', 'tokens_per_iteration',
          'draft_step_over_target_step'}


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    monkeypatch.setattr(bench, '_STEP_ROUNDS', 5)


@pytest.fixture(scope='module')
def second_bundle(tmp_path_factory, full_bundle, model_dirs):
    """One with drafts of the same names: a causal_lm, a shared_layers one, a lookup."""
    maker = BundleMaker(tmp_path_factory.mktemp('more') / 'other', model_dirs / 'target')
    maker.directory.mkdir()
    maker.add_head(list(range(0, REAL_VOCABULARY, 2)))
    shutil.copytree(model_dirs / 'far', maker.directory / 'far')
    shutil.copy(full_bundle / 'top.safetensors', maker.directory)
    maker.add_draft('far', 'causal_lm', 'far')
    maker.add_draft('top', 'shared_layers', 'top.safetensors',
                    options={'depth': 2, 'layers': 2})
    maker.add_draft('lookup', 'prompt_lookup')
    return maker.write()


def run(bundle, prompts, *more):
    return main(['bench', 'frontier', '--bundle', str(bundle), '--prompts', str(prompts),
                 '--prompts-per-domain', '1', *SMALL, *map(str, more)])


# --- what it measures ---

def test_every_draft_of_all_bundles_is_measured_alone(full_bundle, second_bundle, prompts,
                                                      tmp_path, target, capfd):
    file = tmp_path / 'frontier.json'
    # The first bundle once more: it counts once.
    assert run(full_bundle, prompts, '--drafts', second_bundle, full_bundle, '--json', file) == 0
    result = json.loads(file.read_text())
    points = {point['draft']: point for point in result['points']}
    name = full_bundle.name
    manifest = json.loads((full_bundle / 'bundle.yaml').read_text())
    expected = [f'{name}/{draft["id"]}' for draft in manifest['drafts']]
    # Lookup is the same in both.
    assert list(points) == [*expected, 'other/far', 'other/top']
    for point in result['points']:
        assert FIELDS <= set(point)
        assert point['speedup'] > 0 and point['tokens_per_iteration'] >= 1
        assert point['draft_step_over_target_step'] > 0
        assert set(point['speedup_by_domain']) == {'general', 'code'}
        assert point['outputs_differing_from_plain'] == 0
        assert point['extra_percent'] == pytest.approx(
            100 * point['extra_bytes'] / target.weight_bytes)
    # All but the lookup keep their weights in memory, as float32 here.
    assert points[f'{name}/lookup']['extra_bytes'] == 0
    assert 0.7 < points[f'{name}/near']['extra_bytes'] / target.weight_bytes < 1.3
    assert points['other/top']['extra_bytes'] == points[f'{name}/top']['extra_bytes'] > 0
    # Made of the target's own layers, with its whole vocabulary: it is right more than once.
    assert points[f'{name}/top']['tokens_per_iteration'] > 1.5
    assert points['other/top']['tokens_per_iteration'] < points[
        f'{name}/top']['tokens_per_iteration']
    heads = result['shared_heads']
    assert heads[name]['bytes'] == REAL_VOCABULARY * 64 * 4 == 2 * heads['other']['bytes']
    assert points['other/top']['shared_head_percent'] == heads['other']['percent'] > 0
    assert points['other/far']['shared_head_percent'] == 0
    assert result['prompts'] == 2 and result['prompts_sha256'] == sha256_of(prompts)
    assert result['dtype'] == 'torch.float32' and result['torch_threads'] == 1
    assert result['floor']['share'] > 0
    out = capfd.readouterr().out
    for word in ('other/top', 'speed-up', 'shared head of other', 'step/step', 'code: 2 of 2'):
        assert word in out


def test_with_one_bundle_drafts_keep_their_names(second_bundle, prompts, capfd):
    assert run(second_bundle, prompts, '--json', '-') == 0
    # Nothing else is on standard output.
    result = json.loads(capfd.readouterr().out)
    assert [point['draft'] for point in result['points']] == ['far', 'top', 'lookup']
    assert {'max_new_tokens': 10, 'max_draft_tokens': 3,
            'adaptive_draft_length': False}.items() <= result.items()


def test_a_draft_is_never_helped_by_another(second_bundle, prompts, monkeypatch):
    # Where a lookup may step in for another draft, it now would, everywhere.
    monkeypatch.setattr(drafting, 'LEAST_MATCH', 0)
    monkeypatch.setattr(DraftLength, 'speed', lambda self, draft, gamma: draft == 'lookup')
    asked = []
    answer = Contest.answer

    def watch(self, name, text, limit):
        before = len(self.controller.recent_steps)
        result = answer(self, name, text, limit)
        steps = list(self.controller.recent_steps)[before:]
        asked.append((name, {step.draft for _, step in steps}))
        return result

    monkeypatch.setattr(Contest, 'answer', watch)
    assert run(second_bundle, prompts) == 0
    assert {name for name, _ in asked} == {'plain', 'far', 'top', 'lookup'}
    for name, drafts in asked:
        assert drafts == ({''} if name == 'plain' else {name})


def test_the_order_rotates(second_bundle, prompts, monkeypatch):
    order = []
    answer = Contest.answer
    monkeypatch.setattr(Contest, 'answer', lambda self, name, text, limit: (
        order.append(name), answer(self, name, text, limit))[1])
    assert run(second_bundle, prompts) == 0
    assert order[4:] == ['plain', 'far', 'top', 'lookup', 'far', 'top', 'lookup', 'plain']


# --- the picture ---

RESULT = {
    'points': [
        {'draft': 'a', 'kind': 'shared_layers', 'extra_bytes': 30, 'extra_percent': 3.0,
         'speedup': 1.9, 'tokens_per_iteration': 2.5, 'draft_step_over_target_step': 0.09,
         'shared_head_percent': 3.5},
        {'draft': 'small', 'kind': 'causal_lm', 'extra_bytes': 20, 'extra_percent': 2.0,
         'speedup': 1.1, 'tokens_per_iteration': 1.5, 'draft_step_over_target_step': 0.1,
         'shared_head_percent': 0.0},
        {'draft': 'large', 'kind': 'causal_lm', 'extra_bytes': 110, 'extra_percent': 11.0,
         'speedup': 1.4, 'tokens_per_iteration': 2.0, 'draft_step_over_target_step': 0.2,
         'shared_head_percent': 0.0}],
    'shared_heads': {'here': {'bytes': 35, 'percent': 3.5}},
    'target': {'name': 'tiny', 'bytes': 1000, 'step_sec': 0.01, 'plain_tps': 80.0},
    'floor': {'bytes': 2e6, 'read_gb_per_sec': 20.0, 'torch_threads': 2, 'least_ms': 0.1,
              'ms': 0.4, 'share': 0.25}}


def test_the_table_is_in_order_of_memory():
    lines = format_table(RESULT).splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ['small', 'a', 'large']
    assert lines[-1].endswith('reads 2 MB, at 20.0 GB/s (2 threads) 0.10 ms; it takes 0.40 ms, '
                              '25% of the bandwidth')
    assert '1.90' in lines[2] and '9.0%' in lines[2] and 'shared head of here: 3.50%' in lines[4]


def test_the_frontier_leaves_out_what_is_beaten():
    points = [(2.0, 1.1), (2.0, 1.3), (3.0, 1.2), (4.0, 1.3), (9.0, 1.5)]
    assert frontier(points) == [(2.0, 1.3), (9.0, 1.5)]
    assert frontier([]) == []


def test_the_picture_is_drawn(second_bundle, prompts, tmp_path):
    pytest.importorskip('matplotlib')
    assert run(second_bundle, prompts, '--out', tmp_path / 'a' / 'b') == 0
    assert (tmp_path / 'a' / 'b' / 'frontier.png').read_bytes().startswith(b'\x89PNG')
    draw(RESULT, tmp_path / 'own.png')
    assert (tmp_path / 'own.png').stat().st_size > 5000


def test_without_matplotlib_it_says_so_before_measuring(second_bundle, prompts, tmp_path,
                                                        monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    assert run(second_bundle, prompts, '--out', tmp_path / 'out') == 1
    captured = capfd.readouterr()
    assert "extra 'plots'" in captured.err and 'general: 1' not in captured.out
    assert not (tmp_path / 'out').exists()


# --- errors ---

@pytest.mark.parametrize('option, value, words', [
    ('--max-new-tokens', '0', '--max-new-tokens is 0'),
    ('--prompts-per-domain', '-1', '--prompts-per-domain is -1'),
    ('--draft-tokens', '0', '--draft-tokens is 0'),
    ('--draft-tokens', '99', '--draft-tokens is 99'),
    ('--drafts', '/no/such/bundle', '/no/such/bundle'),
    ('--dtype', 'float13', 'float13')])
def test_wrong_arguments(second_bundle, prompts, capfd, option, value, words):
    assert run(second_bundle, prompts, option, value) == 1
    error = capfd.readouterr().err
    assert words in error and 'Traceback' not in error


def test_wrong_prompts(second_bundle, prompts, tmp_path, capfd):
    assert run(second_bundle, tmp_path / 'none.jsonl') == 1
    assert 'none.jsonl' in capfd.readouterr().err
    prompts.write_text('\n')
    assert run(second_bundle, prompts) == 1
    assert 'no prompts' in capfd.readouterr().err
    prompts.write_text('{"prompt": 5, "domain": "code"}\n')
    assert run(second_bundle, prompts) == 1
    assert 'line 1' in capfd.readouterr().err


def test_out_that_is_a_file(second_bundle, prompts, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr('memspec_ros.bench.plotting.check_plotting', lambda: None)
    assert run(second_bundle, prompts, '--out', prompts) == 1
    assert '--out' in capfd.readouterr().err


def test_the_table_is_shown_even_where_the_file_cannot_be_written(second_bundle, prompts, tmp_path,
                                                                  capfd):
    assert run(second_bundle, prompts, '--json', tmp_path / 'none' / 'x.json') == 1
    out, error = capfd.readouterr()
    assert 'speed-up' in out and 'none/x.json' in error


def test_a_bundle_of_another_target_is_refused(second_bundle, prompts, tmp_path, capfd):
    build_llama(seed=4).save_pretrained(tmp_path / 'target')
    build_tokenizer(tmp_path / 'target')
    maker = BundleMaker(tmp_path, tmp_path / 'target')
    maker.add_draft('lookup', 'prompt_lookup')
    assert run(second_bundle, prompts, '--drafts', maker.write()) == 1
    error = capfd.readouterr().err
    assert str(tmp_path) in error and 'other weights' in error


def test_no_drafts_at_all(bundle_maker, prompts, capfd):
    assert run(bundle_maker.write(), prompts) == 1
    assert 'no draft' in capfd.readouterr().err


def test_a_draft_that_cannot_be_loaded_is_named(full_bundle, prompts, tmp_path, model_dirs, capfd):
    maker = BundleMaker(tmp_path, model_dirs / 'target')
    maker.add_head([1, 2, 3])
    shutil.copy(full_bundle / 'top.safetensors', tmp_path)
    # It has two layers.
    maker.add_draft('bad', 'shared_layers', 'top.safetensors', options={'depth': 1, 'layers': 3})
    assert run(maker.write(), prompts) == 1
    assert "draft 'bad'" in capfd.readouterr().err
