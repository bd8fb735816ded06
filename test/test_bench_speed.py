# SPDX-License-Identifier: Apache-2.0
"""``memspec bench floor``, ``peers`` and ``gamma``: what they measure, and how they fail."""

import json
from pathlib import Path
import sys
import types

from conftest import build_llama, REAL_VOCABULARY
import pytest
import torch

from memspec_ros.bench import floor, gamma, peers
from memspec_ros.bench.floor import Memory
from memspec_ros.bench.gamma import judge, needed_acceptance, StepCost
from memspec_ros.bench.gguf_export import write_gguf
from memspec_ros.cli import main
from memspec_ros.models.bundle import load_bundle
from memspec_ros.models.errors import UnsupportedModelError

SMALL = ['--dtype', 'float32', '--threads', '1', '--context', '160']
HEAD = 64 * 4  # bytes of a row of the tiny target's head, float32


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    monkeypatch.setattr(floor, '_BUFFER_BYTES', {'cpu': 1 << 24})
    monkeypatch.setattr(floor, '_READS', 2)
    monkeypatch.setattr(gamma, '_STEP_ROUNDS', 2)


def bench(suite, bundle, *more):
    return main(['bench', suite, '--bundle', str(bundle), *SMALL, *map(str, more)])


# --- floor ---

def test_floor(full_bundle, tmp_path, capfd):
    file = tmp_path / 'floor.json'
    assert bench('floor', full_bundle, '--rounds', '2', '--json', file) == 0
    result = json.loads(file.read_text())
    assert set(result['read_gb_per_sec']) == {'1'}
    rate = 1e9 * result['read_gb_per_sec']['1']
    assert [entry['rows'] for entry in result['verify']] == list(range(1, 10))
    for entry in (result['target'], *result['verify'], *result['drafts'].values()):
        assert entry['least_ms'] == pytest.approx(1e3 * entry['bytes'] / rate)
        assert 0 < entry['ms'] <= entry['median_ms']
        if entry['bytes']:
            assert entry['share'] == pytest.approx(entry['least_ms'] / entry['ms'])
    assert result['verify'][0]['over_one_row'] == 1
    assert set(result['drafts']) == {spec.id for spec in load_bundle(full_bundle).drafts}
    assert result['drafts']['lookup']['share'] is None
    out = capfd.readouterr().out
    assert 'draft embedded' in out and 'verify 9' in out


def test_bytes_of_a_step_are_those_it_touches(full_bundle, tmp_path):
    """Counted here once more from the files and the sizes of the tiny target."""
    file = tmp_path / 'floor.json'
    assert bench('floor', full_bundle, '--rounds', '2', '--json', file) == 0
    result = json.loads(file.read_text())
    held = result['context']
    layer = 4 * (64 * 2 + (4 + 2 * 2) * 16 * 64 + 64 * 64 + 3 * 96 * 64)
    kv = 2 * 2 * 16 * held * 4  # of one layer
    table = 320 * HEAD
    norm = HEAD
    # The embedding of its own is no part of it.
    assert result['target']['bytes'] == 4 * (layer + kv) + norm + table
    drafts = {name: entry['bytes'] for name, entry in result['drafts'].items()}
    head = REAL_VOCABULARY * HEAD
    assert drafts['top'] == 4 * (layer + kv) + norm + head
    assert drafts['noise'] == 2 * (layer + kv) + norm + head
    # Of two feature blocks, drafting on needs the last.
    assert drafts['feature'] == drafts['top'] + 64 * HEAD + HEAD
    assert drafts['embedded'] == layer + kv + norm + head + 64 * HEAD + HEAD
    # A causal LM like the target; and one whose head is its embedding (width 32, two layers).
    assert drafts['near'] == pytest.approx(result['target']['bytes'], abs=4 * kv // held)
    assert drafts['lookup'] == 0
    assert drafts['far'] > 320 * 32 * 4 and drafts['far'] < drafts['near'] / 2


def test_bandwidth_leaves_the_threads_as_they_were():
    before = torch.get_num_threads()
    assert Memory(torch.device('cpu')).bandwidth(before + 1) > 0
    assert torch.get_num_threads() == before


def test_floor_of_a_bundle_without_drafts(bundle_maker, capfd):
    assert bench('floor', bundle_maker.write(), '--rounds', '2', '--json', '-') == 0
    assert json.loads(capfd.readouterr().out)['drafts'] == {}
    assert bench('floor', bundle_maker.directory, '--rounds', '1') == 1
    assert '1 rounds' in capfd.readouterr().err


# --- peers ---

class FakeLlama:
    """llama.cpp as the binding shows it; it says what ``next_ids`` says, and never stops."""

    next_ids = None
    opened: list = []

    def __init__(self, path, n_ctx, draft_model, n_threads, **options):
        assert Path(path).stat().st_size > 100_000 and n_threads == torch.get_num_threads()
        self.n_ctx, self.held = n_ctx, 0
        type(self).opened.append((self, draft_model))

    def reset(self):
        self.held = 0

    def generate(self, tokens, temp, repeat_penalty):
        assert self.held == 0 and temp == 0.0 and repeat_penalty == 1.0
        self.held = len(tokens)
        yield from type(self).next_ids(tokens, 40)

    def close(self):
        self.held = None


@pytest.fixture
def llama_cpp(monkeypatch, greedy):
    """Installed, as far as the package can tell."""
    module, speculative = types.ModuleType('llama_cpp'), types.ModuleType('speculative')
    module.Llama = FakeLlama
    speculative.LlamaPromptLookupDecoding = lambda num_pred_tokens: num_pred_tokens
    monkeypatch.setitem(sys.modules, 'llama_cpp', module)
    monkeypatch.setitem(sys.modules, 'llama_cpp.llama_speculative', speculative)
    monkeypatch.setattr(FakeLlama, 'next_ids', staticmethod(
        lambda tokens, count: greedy(tokens, count)))
    monkeypatch.setattr(FakeLlama, 'opened', [])


def run_peers(bundle, prompts, tmp_path, *more):
    file = tmp_path / 'peers.json'
    status = bench('peers', bundle, '--prompts', prompts, '--prompts-per-domain', '1',
                   '--max-new-tokens', '10', '--json', file, *more)
    return json.loads(file.read_text()) if status == 0 else status


def test_peers_on_the_same_weights(full_bundle, prompts, tmp_path, llama_cpp, capfd,
                                   monkeypatch):
    pytest.importorskip('accelerate')
    monkeypatch.setenv('MEMSPEC_CACHE', str(tmp_path / 'cache'))
    result = run_peers(full_bundle, prompts, tmp_path)
    assert result['skipped'] == {} and set(result['ratios']) == set(peers.PEERS)
    for name in peers.PEERS:
        speeds = [result['tokens_per_sec'][domain] for domain in ('general', 'code')]
        ratios = [speed['memspec'] / speed[name] for speed in speeds]
        assert result['ratios'][name] == pytest.approx((ratios[0] * ratios[1]) ** 0.5)
        # In float32 all say the same, hence as much.
        assert result['outputs_differing_from_memspec'][name] == 0
        assert result['tokens'][name] == result['tokens']['memspec'] > 0
    assert Path(result['assistant']).name == 'near'
    assert result['weights'] == {'memspec': 'float32', 'transformers': 'float32',
                                 'llama_cpp': "F32, the target's own"}
    assert [lookup for _, lookup in FakeLlama.opened] == [None, 2]
    # All of it is let go of.
    assert all(model.held is None for model, _ in FakeLlama.opened)
    assert [file.name for file in (tmp_path / 'cache').iterdir()] == ['verified.json']
    out = capfd.readouterr().out
    assert 'transformers_prompt_lookup' in out and 'floor: ' in out and 'code: 2 of 2' in out


def test_answers_that_differ_are_counted(full_bundle, prompts, tmp_path, llama_cpp, monkeypatch):
    monkeypatch.setattr(FakeLlama, 'next_ids', staticmethod(lambda tokens, count: [7] * count))
    result = run_peers(full_bundle, prompts, tmp_path, '--gguf',
                       full_bundle / 'near' / 'model.safetensors')
    assert result['outputs_differing_from_memspec']['llama_cpp'] == 2
    assert result['tokens']['llama_cpp'] == 20
    assert result['weights']['llama_cpp'] == 'those of model.safetensors'


def test_what_is_not_there_is_skipped_with_the_reason(bundle_maker, prompts, tmp_path,
                                                      monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, 'llama_cpp', None)
    bundle_maker.add_draft('lookup', 'prompt_lookup')
    result = run_peers(bundle_maker.write(), prompts, tmp_path)
    for name in ('llama_cpp', 'llama_cpp_prompt_lookup', 'transformers_assisted'):
        assert result['ratios'][name] is None
    assert result['ratios']['transformers_greedy'] > 0
    assert "extra 'peers'" in result['skipped']['llama_cpp']
    assert '--assistant' in result['skipped']['transformers_assisted']
    assert 'without llama_cpp: ' in capfd.readouterr().out


def test_a_peer_that_fails_is_skipped(bundle_maker, prompts, tmp_path, llama_cpp, monkeypatch):
    def fail(*arguments, **options):
        raise ValueError('no such instruction')

    monkeypatch.setattr(FakeLlama, '__init__', fail)
    result = run_peers(bundle_maker.write(), prompts, tmp_path)
    assert result['skipped']['llama_cpp'] == 'ValueError: no such instruction'


def test_a_target_that_no_gguf_is_written_of(tmp_path):
    scaled = {'rope_type': 'linear', 'factor': 2.0, 'rope_theta': 10000.0}
    build_llama(seed=1, rope_parameters=scaled).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match='scaled rope'):
        write_gguf(tmp_path, tmp_path / 'x.gguf', torch.float32)


def test_an_assistant_of_ones_own(bundle_maker, model_dirs, prompts, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'llama_cpp', None)
    used = []
    load = peers.TransformersPeer.load
    monkeypatch.setattr(peers.TransformersPeer, 'load', lambda self, directory: (
        used.append(load(self, directory)), used[-1])[1])
    result = run_peers(bundle_maker.write(), prompts, tmp_path, '--assistant',
                       model_dirs / 'far', '--assistant-tokens', '3')
    assert result['assistant'] == str(model_dirs / 'far')
    assert result['ratios']['transformers_assisted'] > 0
    assert used[-1].generation_config.num_assistant_tokens == 3


@pytest.mark.parametrize('more, words', [
    (['--assistant', '/none'], '--assistant /none: no config.json'),
    (['--gguf', '/none.gguf'], '--gguf /none.gguf: no such file'),
    (['--assistant-tokens', '-1'], '--assistant-tokens is -1'),
    (['--max-new-tokens', '0'], '--max-new-tokens is 0')])
def test_wrong_arguments_of_peers(bundle_maker, prompts, tmp_path, capfd, more, words):
    assert run_peers(bundle_maker.write(), prompts, tmp_path, *more) == 1
    error = capfd.readouterr().err
    assert words in error and 'Traceback' not in error


def test_the_best_causal_lm_is_the_assistant(bundle_maker, model_dirs):
    for name, acceptance in (('far', 0.2), ('near', 0.6), ('twin', 0.4)):
        (bundle_maker.directory / name).symlink_to(model_dirs / name)
        bundle_maker.add_draft(name, 'causal_lm', name, acceptance={'code': acceptance})
    assert peers.best_causal_lm(load_bundle(bundle_maker.write())).id == 'near'


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_the_exported_weights_are_the_targets(model_dirs, reference, tmp_path, dtype):
    """Read back by transformers, which undoes llama.cpp's order of rows."""
    reader = pytest.importorskip('gguf').GGUFReader
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING  # noqa: F401 (it reads GGUF)
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    file = tmp_path / 'target.gguf'
    write_gguf(model_dirs / 'target', file, dtype)
    read = load_gguf_checkpoint(file, return_tensors=True, model_to_load=reference)
    state = reference.state_dict()
    assert set(read['tensors']) == set(state)
    for name, tensor in read['tensors'].items():
        expected = state[name].to(dtype) if state[name].dim() > 1 else state[name]
        assert torch.equal(tensor.float(), expected.float()), name
    assert {'num_hidden_layers': 4, 'num_key_value_heads': 2, 'vocab_size': 320}.items() <= (
        read['config'].items())
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader(file).tensors}
    assert kinds['blk.0.attn_q.weight'] == {torch.float32: 'F32', torch.bfloat16: 'BF16'}[dtype]
    assert kinds['output_norm.weight'] == 'F32'


def test_llama_cpp_itself(full_bundle, prompts, tmp_path):
    pytest.importorskip('llama_cpp')
    result = run_peers(full_bundle, prompts, tmp_path)
    for name in ('llama_cpp', 'llama_cpp_prompt_lookup'):
        assert result['outputs_differing_from_memspec'][name] == 0
        assert result['ratios'][name] > 0


# --- trees ---

def test_trees(full_bundle, prompts, tmp_path, capfd):
    file = tmp_path / 'trees.json'
    assert bench('trees', full_bundle, '--prompts', prompts, '--max-new-tokens', '8',
                 '--fixed-draft-length', '--json', file) == 0
    result = json.loads(file.read_text())
    ways = ['plain', 'chains', 'branches', 'merged']
    for entry in [*result['domains'].values(), result['gmean']]:
        assert list(entry) == ways and entry['plain']['tokens_per_iteration'] == 1.0
        assert all(entry[way]['tokens_per_iteration'] >= 1 for way in ways)
    assert result['outputs_differing_from_plain'] == dict.fromkeys(ways[1:], 0)
    assert 'merged over branches' in capfd.readouterr().out


def test_without_trees_there_is_nothing_to_race(full_bundle, prompts, capfd):
    assert bench('trees', full_bundle, '--prompts', prompts, '--branches', '0') == 1
    assert '--branches 1 or more' in capfd.readouterr().err


# --- gamma ---

def test_gamma(full_bundle, prompts, tmp_path, capfd):
    file = tmp_path / 'gamma.json'
    pytest.importorskip('matplotlib')
    assert main(['bench', 'gamma', '--configurations', str(full_bundle),
                 f'{full_bundle}:bfloat16', '--draft', 'top', '--draft', 'lookup', '--prompts',
                 str(prompts), *SMALL, '--max-new-tokens', '10', '--draft-tokens', '3',
                 '--json', str(file), '--out', str(tmp_path / 'figures')]) == 0
    result = json.loads(file.read_text())
    name = full_bundle.name
    sweeps = {(sweep['name'], sweep['dtype']): sweep for sweep in result['configurations']}
    assert list(sweeps) == [(f'{name}/top', 'float32'), (f'{name}/lookup', 'float32'),
                            (f'{name}/top', 'bfloat16'), (f'{name}/lookup', 'bfloat16')]
    top = sweeps[f'{name}/top', 'float32']
    assert [point['gamma'] for point in top['points']] == [1, 2, 3]
    for point in top['points']:
        assert point['drafted_per_iteration'] <= point['gamma']
        assert point['tokens_per_iteration'] == pytest.approx(
            1 + point['acceptance'] * point['drafted_per_iteration'], abs=1e-6)
    # It is often right: longer drafts bring more.
    tokens = [point['tokens_per_iteration'] for point in top['points']]
    assert 1.2 < tokens[0] <= 2 and tokens[2] > tokens[0]
    assert len(top['verify_cost']) == 4 and top['verify_cost'][0] == 1 and top['draft_cost'] > 0
    assert top['batched_argmax_equal'] and top['batched_logit_difference'] < 1e-3
    assert top['decelerates'] == (top['best_speedup'] < 1)
    assert (tmp_path / 'figures' / 'gamma.png').read_bytes().startswith(b'\x89PNG')
    out = capfd.readouterr().out
    assert 'verify(4)/verify(1)' in out and f'{name}/lookup, bfloat16' in out


def test_rows_verified_wrongly_are_found(full_bundle, prompts, monkeypatch, capfd):
    from memspec_ros.models.target import LlamaTarget
    forward = LlamaTarget.forward
    monkeypatch.setattr(LlamaTarget, 'forward', lambda self, state, tokens, last_only=False: (
        forward(self, state, tokens[:1] * len(tokens), last_only)
        if len(tokens) > 1 and state.held > 100 else forward(self, state, tokens, last_only)
        ) * (1.0 if len(tokens) == 1 else -1.0))
    assert bench('gamma', full_bundle, '--draft', 'lookup', '--prompts', prompts,
                 '--max-new-tokens', '4', '--draft-tokens', '2', '--json', '-') == 0
    sweep, = json.loads(capfd.readouterr().out)['configurations']
    assert not sweep['batched_argmax_equal'] and sweep['batched_logit_difference'] > 1


def point(gamma_, tokens, speedup, acceptance=0.5, drafted=None):
    return {'gamma': gamma_, 'tokens_per_iteration': tokens, 'speedup': speedup,
            'acceptance': acceptance, 'drafted_per_iteration': drafted or gamma_,
            'predicted_speedup': 1.1}


@pytest.mark.parametrize('tokens, draft, verify, cause', [
    (1.5, 0.4, [1, 1.1, 1.2], 'draft_cost'),
    (1.5, 0.1, [1, 1.9, 2.8], 'verify_cost'),
    (1.1, 0.2, [1, 1.2, 1.4], 'acceptance'),
    (1.9, 0.1, [1, 1.1, 1.2], 'overhead')])
def test_why_a_pair_decelerates(tokens, draft, verify, cause):
    verdict = judge([point(1, 1.0, 0.7), point(2, tokens, 0.9)], StepCost(draft, verify))
    assert verdict['decelerates'] and verdict['best_gamma'] == 2 and verdict['cause'] == cause
    assert verdict['reason']


def test_a_pair_that_gains_needs_no_reason():
    verdict = judge([point(1, 1.5, 1.2), point(2, 1.8, 1.3)], StepCost(0.1, [1, 1.1, 1.2]))
    assert (verdict['decelerates'], verdict['best_gamma'], verdict['cause']) == (False, 2, None)


def test_the_acceptance_it_takes():
    assert needed_acceptance(1, 0.3) == pytest.approx(0.3)
    assert needed_acceptance(2, 0.75) == pytest.approx(0.5)
    assert needed_acceptance(3, 3.0) == pytest.approx(1.0)
    assert needed_acceptance(2, 2.1) is None
    verdict = judge([point(2, 1.5, 0.4)], StepCost(1.2, [1, 1, 1]))
    assert verdict['needed_acceptance'] is None and 'even if all' in verdict['reason']


def test_rows_one_after_another_are_told_from_rows_side_by_side():
    assert StepCost(0.1, [1, 2, 3]).row == 1 > gamma.SERIAL_ROW_COST
    assert StepCost(0.1, [1, 1.02, 1.1]).row == pytest.approx(0.05)


@pytest.mark.parametrize('more, words', [
    (['--draft', 'nobody'], '--draft nobody: there are'),
    (['--draft-tokens', '0'], '--draft-tokens is 0'),
    (['--configurations', '@nobody', '--bundle', ''], "no draft 'nobody', there are"),
    (['--configurations', 'x'], 'exclude each other')])
def test_wrong_arguments_of_gamma(full_bundle, prompts, capfd, more, words):
    assert bench('gamma', full_bundle, '--prompts', prompts, *more) == 1
    assert words in capfd.readouterr().err


def test_gamma_of_a_bundle_without_drafts(bundle_maker, prompts, capfd):
    assert bench('gamma', bundle_maker.write(), '--prompts', prompts) == 1
    assert 'no draft' in capfd.readouterr().err


@pytest.mark.parametrize('text, expected', [
    ('a/b', ('a/b', 'auto')), ('a/b:float32', ('a/b', 'float32')), ('', ('', 'auto')),
    ('a:b', ('a:b', 'auto')), ('a/b:bfloat16:int8', ('a/b', 'bfloat16', 'int8')),
    (':int8:float32@x', ('', 'float32', 'int8', 'x')), ('@lookup', ('', 'auto', 'auto', 'lookup')),
    ('a/b:int4@c/d/x', ('a/b', 'auto', 'int4', 'x', 'c/d'))])
def test_configurations_are_parsed(text, expected):
    assert gamma.Configuration.parse(text, 'auto') == gamma.Configuration(*expected)


def test_a_directory_may_have_an_at_sign_in_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'me@home').mkdir()
    assert gamma.Configuration.parse('me@home', 'auto') == gamma.Configuration('me@home', 'auto')


def test_gamma_of_configurations_of_several_targets_and_bundles(full_bundle, bundle_maker, prompts,
                                                                tmp_path, capfd):
    """A target without drafts of its own takes those of another bundle; precisions differ."""
    bare, file = bundle_maker.write(), tmp_path / 'gamma.json'
    assert main(['bench', 'gamma', '--configurations', f'{bare}@{full_bundle}/top',
                 f'{full_bundle}@lookup', f'{full_bundle}:int8@top', f'{full_bundle}@far',
                 '--prompts', str(prompts), *SMALL, '--max-new-tokens', '6', '--draft-tokens', '2',
                 '--json', str(file)]) == 0
    result = json.loads(file.read_text())
    assert [(sweep['name'], sweep['weights']) for sweep in result['configurations']] == [
        (f'{bare.name}/top', 'float32'), (f'{full_bundle.name}/lookup', 'float32'),
        (f'{full_bundle.name}/far', 'float32'), (f'{full_bundle.name}/top', 'int8')]
    assert all(len(sweep['points']) == 2 for sweep in result['configurations'])
    assert f'{full_bundle.name}/top, float32, int8' in capfd.readouterr().out


# --- weights ---

@pytest.fixture
def prompt_file(tmp_path):
    path = tmp_path / 'prompts.jsonl'
    path.write_text(''.join(json.dumps({'domain': domain, 'prompt': f'{domain} a b a b, c d'})
                            + '\n' for domain in ('general', 'code')))
    return path


def weights(bundle, prompt_file, *more):
    return main(['bench', 'weights', '--bundle', str(bundle), '--prompts', str(prompt_file),
                 '--prompts-per-domain', '1', *map(str, more)])


def test_distance_of_weights(full_bundle, prompt_file, capfd):
    assert weights(full_bundle, prompt_file, '--dtype', 'float32', '--json', '-') == 0
    result = json.loads(capfd.readouterr().out)
    assert set(result['weights']) == {'auto', 'dense', 'int8', 'int4'}
    dense = result['weights']['dense']
    # The reference itself, and what is further away with every bit less.
    assert dense['greedy_agreement'] == 1
    assert dense['perplexity'] == pytest.approx(result['reference']['perplexity'])
    coarse = [result['weights'][kind] for kind in ('int8', 'int4')
              if 'unavailable' not in result['weights'][kind]]
    for entry in coarse:
        assert entry['greedy_agreement'] < 1 and entry['bytes'] < dense['bytes']
        assert entry['perplexity'] != pytest.approx(dense['perplexity'], rel=1e-4)
    if len(coarse) == 2:
        assert coarse[1]['greedy_agreement'] < coarse[0]['greedy_agreement']


def test_a_kind_without_a_kernel_says_so(full_bundle, prompt_file, monkeypatch, capfd):
    monkeypatch.setattr('memspec_ros.models.packing.has_int8', lambda device: False)
    assert weights(full_bundle, prompt_file, '--dtype', 'float32', '--kinds', 'int8', 'dense') == 0
    out = capfd.readouterr().out
    assert 'no INT8 kernel' in out and '100.00%' in out


def test_an_unknown_kind_is_named(full_bundle, prompt_file, capfd):
    assert weights(full_bundle, prompt_file, '--kinds', 'int5') != 0
    assert "'int5'" in capfd.readouterr().err
