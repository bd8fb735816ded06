# SPDX-License-Identifier: Apache-2.0
"""``memspec plan``: the prediction against a measured peak, and what a budget buys."""

from __future__ import annotations

import json

from conftest import build_tokenizer, BundleMaker, REAL_VOCABULARY
import pytest
import torch

from memspec_ros.cli import main
from memspec_ros.memory.allocator import MIB
from memspec_ros.memory.footprint import Demand, FootprintModel
from memspec_ros.memory.planner import KEPT_SPEED, make_plan, SpeedModel
from memspec_ros.models.bundle import load_bundle
from memspec_ros.models.target_files import locate_target

CPU = torch.device('cpu')


def make_bundle(directory, dtype=torch.bfloat16, drafts=2, **sizes):
    """A bundle of a random target of the sizes asked for, and shared-layer drafts."""
    from safetensors.torch import save_file

    from memspec_ros.models.llama import Llama
    from memspec_ros.models.llama_config import LlamaConfig
    from memspec_ros.training.lessons import TopShape
    from memspec_ros.training.teacher import write_whole
    from memspec_ros.training.tops import make_top
    config = {'model_type': 'llama', 'hidden_size': 512, 'intermediate_size': 1536,
              'num_hidden_layers': 6, 'num_attention_heads': 8, 'num_key_value_heads': 4,
              'vocab_size': 4096, 'max_position_embeddings': 1024,
              'tie_word_embeddings': True, **sizes}
    width, kv = config['hidden_size'], config['num_key_value_heads'] * (
        config['hidden_size'] // config['num_attention_heads'])
    wide = config['intermediate_size']
    shapes = {'model.embed_tokens.weight': (config['vocab_size'], width),
              'model.norm.weight': (width,)}
    for i in range(config['num_hidden_layers']):
        shapes |= {f'model.layers.{i}.{name}.weight': shape for name, shape in {
            'input_layernorm': (width,), 'post_attention_layernorm': (width,),
            'self_attn.q_proj': (width, width), 'self_attn.k_proj': (kv, width),
            'self_attn.v_proj': (kv, width), 'self_attn.o_proj': (width, width),
            'mlp.gate_proj': (wide, width), 'mlp.up_proj': (wide, width),
            'mlp.down_proj': (width, wide)}.items()}
    target = directory / 'target'
    target.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    weights = {name: (0.03 * torch.randn(shape, generator=generator)).to(dtype)
               for name, shape in shapes.items()}
    save_file(weights, target / 'model.safetensors')
    (target / 'config.json').write_text(json.dumps(config))
    build_tokenizer(target)
    model = Llama.from_state(LlamaConfig.from_hf(config), weights, dtype, CPU)
    maker = BundleMaker(directory, target)
    maker.add_head(list(range(REAL_VOCABULARY)))
    for index in range(drafts):
        top = make_top(model, TopShape('shared_layers', 1, 1), range(REAL_VOCABULARY))
        write_whole(directory / f'd{index}.safetensors', top.export(), {})
        maker.add_draft(f'd{index}', 'shared_layers', f'd{index}.safetensors',
                        options={'depth': 1, 'layers': 1})
    maker.add_draft('lookup', 'prompt_lookup')
    return maker


SIZES = {
    'narrow': ({}, ['--dtype', 'bfloat16', '--context', '512', '--sessions', '3']),
    'wide': ({'hidden_size': 1024, 'intermediate_size': 2816, 'num_hidden_layers': 8,
              'num_attention_heads': 16, 'tie_word_embeddings': True},
             ['--dtype', 'bfloat16', '--context', '1024', '--k', '1']),
    'int8': ({'hidden_size': 1024, 'intermediate_size': 2816, 'num_hidden_layers': 8,
              'num_attention_heads': 16},
             ['--dtype', 'bfloat16', '--context', '512', '--weights', 'int8']),
    # Much of it keys and values: three conversations, old positions in INT8 …
    'rounded': ({'num_hidden_layers': 12, 'num_key_value_heads': 8},
                ['--dtype', 'bfloat16', '--context', '1024', '--sessions', '3',
                 '--kv-int8-after', '128']),
    # … or no more than a window of them, or both, …
    'window': ({'num_hidden_layers': 12, 'num_key_value_heads': 8},
               ['--dtype', 'bfloat16', '--context', '1024', '--sessions', '4',
                '--kv-window', '512']),
    'both': ({'num_hidden_layers': 12, 'num_key_value_heads': 8},
             ['--dtype', 'float32', '--context', '1024', '--sessions', '2',
              '--kv-int8-after', '128', '--kv-window', '512']),
    # … or all as they are.
    'talks': ({'num_hidden_layers': 12, 'num_key_value_heads': 8},
              ['--dtype', 'bfloat16', '--context', '1024', '--sessions', '4']),
    # Kept in another type than the files hold.
    'converted': ({'hidden_size': 768, 'intermediate_size': 2048, 'num_attention_heads': 12,
                   'num_key_value_heads': 12, 'vocab_size': 16384},
                  ['--dtype', 'float32', '--context', '256']),
}


@pytest.mark.parametrize('name', SIZES)
def test_the_prediction_is_within_five_percent_of_the_peak(tmp_path, name):
    sizes, options = SIZES[name]
    bundle = make_bundle(tmp_path / 'bundle', **sizes).write()
    out = tmp_path / 'plan.json'
    assert main(['plan', str(bundle), '--measure', '--threads', '1', '--json', str(out),
                 *options]) == 0
    result = json.loads(out.read_text())
    predicted, measured = result['predicted_peak_mib'], result['measured_peak_mib']
    assert predicted == pytest.approx(measured, rel=0.05)
    assert result['measured']['resident_drafts'] == result['demand']['capacity'] > 0
    # What the libraries take is measured, not predicted: the rest has to be right too.
    runtime = result['measured']['runtime_mib']
    assert predicted - runtime == pytest.approx(measured - runtime, rel=0.15)


@pytest.fixture(scope='module')
def small(tmp_path_factory):
    """Drafts that are each good at something: (bundle directory, its footprint model)."""
    directory = tmp_path_factory.mktemp('plan')
    maker = make_bundle(directory, drafts=3, hidden_size=64, intermediate_size=96,
                        num_hidden_layers=12, num_attention_heads=4, num_key_value_heads=2,
                        vocab_size=320)
    for entry, declared in zip(maker.manifest['drafts'], (
            {'code': 0.8, 'math': 0.3}, {'code': 0.3, 'math': 0.8}, {'code': 0.31, 'math': 0.3})):
        entry['acceptance'] = declared
    bundle = load_bundle(maker.write())
    locate_target(bundle)
    return directory, FootprintModel(bundle, torch.float32, CPU, runtime=100 * MIB)


def test_the_best_drafts_are_those_that_complement_each_other(small):
    speed = SpeedModel(small[1])
    assert speed.domains == ['code', 'math'] and not speed.assumed
    one, two, three = (speed.best_drafts(capacity, 4) for capacity in (1, 2, 3))
    assert set(two[1]) == {'d0', 'd1'}
    assert 1.0 < one[0] < two[0] == three[0]
    assert speed.best_drafts(0, 4) == speed.best_drafts(2, 0) == (1.0, ())
    lengths = [speed.best_drafts(2, gamma)[0] for gamma in range(9)]
    assert lengths == sorted(lengths)


def test_the_speed_is_the_one_that_is_stated(small):
    model = small[1]
    cost = model.step_share(model.bundle.draft('d0'))
    by_hand = max((1 + sum(0.8 ** d for d in range(1, g + 1))) / (g * cost + 1 + 0.03 * g)
                  for g in range(5))
    other = max(1.0, *((1 + sum(0.3 ** d for d in range(1, g + 1))) / (g * cost + 1 + 0.03 * g)
                       for g in range(5)))
    assert SpeedModel(model).best_drafts(1, 4)[0] == pytest.approx((by_hand + other) / 2)


def test_what_fits_is_the_largest_that_fits(small):
    model = small[1]
    demand = Demand(256, 4, 2)
    for budget in (model.of(Demand(256, 4, 1)).total, model.of(Demand(100, 2, 2)).total,
                   model.of(demand).total):
        plan = make_plan(model, demand, budget)
        for value, field, limit in ((plan.largest_capacity, 'capacity', 3),
                                    (plan.largest_gamma, 'gamma', 16),
                                    (plan.largest_context, 'context', 1024)):
            def total(size, field=field):
                return model.of(Demand(**{**vars(demand), field: size})).total

            assert value is None or total(value) <= budget
            assert value is not None or total(16 if field == 'context' else 0) > budget
            assert value in (None, limit) or total(value + 1) > budget
        assert plan.fits == (model.of(demand).total <= budget)


def test_the_least_budget_keeps_the_speed_and_nothing_cheaper_does(small):
    plan = make_plan(small[1], Demand(256, 4, 3), 0)
    fastest = plan.steps[-1].speed_up
    assert plan.least.speed_up >= KEPT_SPEED * fastest
    assert all(step.speed_up < KEPT_SPEED * fastest for step in plan.steps
               if step.bytes < plan.least.bytes)
    sizes = [step.bytes for step in plan.steps]
    speeds = [step.speed_up for step in plan.steps]
    assert sizes == sorted(sizes) and speeds == sorted(set(speeds)) and len(speeds) > 2
    # The third draft is never worth its memory.
    assert plan.steps[-1].capacity == 2
    assert make_plan(small[1], Demand(256, 4, 3), plan.least.bytes).affordable == plan.least


def test_plan_prints_what_a_budget_buys(small, capsys):
    directory = str(small[0])
    assert main(['plan', directory, '--dtype', 'float32', '--context', '256']) == 0
    text = capsys.readouterr().out
    assert 'K = 2, gamma = 4, context 256, 1 session\n' in text
    assert 'least that keeps 96 % of the speed' in text and 'budget' not in text
    assert main(['plan', directory, '--dtype', 'float32', '--budget', '100']) == 1
    assert '100 MiB are too little: the least that works is' in capsys.readouterr().out
    assert main(['plan', directory, '--dtype', 'float32', '--budget', '4000']) == 0
    text = capsys.readouterr().out
    assert 'fits 4000 MiB' in text and 'largest K with the rest as asked for: 3' in text
    assert 'largest context with the rest as asked for: 1024' in text


@pytest.mark.parametrize('options, complaint', [
    (['--budget', '-1'], '--budget is -1.0, expected 0 to'),
    (['--budget', 'nan'], '--budget is nan, expected 0 to'),
    (['--gamma', '17'], '--gamma is 17, expected 0 to 16'),
    (['--sessions', '0'], '--sessions is 0, expected 1 to 64'),
    (['--context', '4'], '--context is 4, expected 16 to'),
    (['--weights', 'int3'], "--weights is 'int3', expected one of auto"),
    (['--branches', '99'], '--branches is 99, expected 0 to 16'),
    (['--dtype', 'int3'], "dtype 'int3'")])
def test_wrong_options_are_named(small, capsys, options, complaint):
    assert main(['plan', str(small[0]), *options]) == 1
    assert complaint in capsys.readouterr().err


def test_what_the_measuring_process_says_is_passed_on(tmp_path):
    import memspec_ros.bench.measure_memory as measuring
    subject = measuring.Subject(str(tmp_path / 'nowhere'), 'float32', 'auto', 'cpu', 1, Demand(64))
    with pytest.raises(measuring.MemSpecError, match='measuring process failed: .*nowhere'):
        measuring.measure(subject)
