# SPDX-License-Identifier: Apache-2.0
"""Runs of layers as one call: the same numbers as layer by layer, whatever the layers are."""

from conftest import build_llama
import pytest
import torch

from memspec_ros.models import layer_stack, packing
from memspec_ros.models.half import has_half
from memspec_ros.models.kv_cache import KVCache
from memspec_ros.models.layer_stack import LayerStack, run_layers
from memspec_ros.models.target import load_target
from memspec_ros.models.tree import tree_mask

CPU = torch.device('cpu')
LAYERS = 4
MODELS = {'grouped': {}, 'one head each': {'num_key_value_heads': 4},
          'biases': {'attention_bias': True}}


@pytest.fixture(params=MODELS)
def directory(request, tmp_path):
    build_llama(1, **MODELS[request.param]).save_pretrained(tmp_path)
    return tmp_path


def model_of(directory, dtype, weights, monkeypatch, packed=True):
    monkeypatch.setattr(packing, 'half_pays',
                        lambda kind, device, other: weights == 'half' and has_half(device, kind))
    kind = weights if weights in ('int8', 'dense') else 'auto'
    return load_target(directory, dtype, CPU, 64, packed=packed, weights=kind).model


def passes(model, layers):
    """Hidden states of a prefill, a step, a verify and a tree, and the keys and values left."""
    config = model.config
    cache = KVCache(config.layers, config.kv_heads, 40, config.head_dim, torch.float32, CPU)
    generator = torch.Generator().manual_seed(3)
    found, start = [], 0
    for rows in (20, 1, 5):
        x = torch.randn(1, rows, config.hidden_size, generator=generator).to(model.stream_dtype)
        rope = model.rope.at(start, rows)
        found.append(run_layers(config, layers, x, cache, start, rope))
        start += rows
    parents, places = [-1, 0, 1, 0], torch.tensor([[0, 1, 2, 1]]) + start
    x = torch.randn(1, 4, config.hidden_size, generator=generator).to(model.stream_dtype)
    found.append(run_layers(config, layers, x, cache, start, model.rope.gather(places),
                            tree_mask(parents, start, CPU)))
    return [*found, cache.keys, cache.values]


@pytest.mark.parametrize('dtype, weights', [
    (torch.float32, 'dense'), (torch.bfloat16, 'dense'), (torch.bfloat16, 'half'),
    (torch.float32, 'plain')])
@torch.inference_mode()
def test_one_call_gives_the_numbers_of_many(directory, dtype, weights, monkeypatch):
    model = model_of(directory, dtype, weights, monkeypatch, packed=weights != 'plain')
    if weights == 'half' and not has_half(CPU, dtype):
        pytest.skip('no FBGEMM in this PyTorch')
    assert isinstance(model.layers, LayerStack) and model.layers.run is not None
    # A plain list has no program: it goes layer by layer.
    for one, many in zip(passes(model, model.layers), passes(model, list(model.layers))):
        assert torch.equal(one, many)


@torch.inference_mode()
def test_a_slice_is_a_stack_of_its_own(directory, monkeypatch):
    model = model_of(directory, torch.float32, 'dense', monkeypatch)
    config, x = model.config, torch.randn(1, 7, model.config.hidden_size)
    whole, parts = (KVCache(LAYERS, config.kv_heads, 9, config.head_dim, torch.float32, CPU)
                    for _ in range(2))
    expected = model.run_layers(x, 0, LAYERS, whole, 0)
    halfway = model.run_layers(x, 0, 3, parts, 0)
    assert torch.equal(model.run_layers(halfway, 3, LAYERS, parts, 0), expected)
    assert torch.equal(parts.keys, whole.keys) and torch.equal(parts.values, whole.values)
    assert model.layers[0:3] is model.layers[:3] and model.layers[:LAYERS] is model.layers
    assert len(model.layers[1:3]) == 2 and model.layers[1:3][1] is model.layers[2]
    assert model.layers[::2] == [model.layers[0], model.layers[2]]


@torch.inference_mode()
def test_layers_without_a_program_run_one_by_one(directory, monkeypatch):
    int8 = model_of(directory, torch.float32, 'int8', monkeypatch)
    assert int8.layers.run is None
    mixed = list(model_of(directory, torch.float32, 'dense', monkeypatch).layers)
    mixed[1] = int8.layers[1]
    assert LayerStack(mixed).run is None and LayerStack([]).run is None
    for one, many in zip(passes(int8, int8.layers), passes(int8, list(int8.layers))):
        assert torch.equal(one, many)


def test_an_older_pytorch_has_no_program(directory, monkeypatch):
    monkeypatch.setattr(layer_stack, 'GROUPED_KERNEL', False)
    assert model_of(directory, torch.float32, 'dense', monkeypatch).layers.run is None
