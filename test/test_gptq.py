# SPDX-License-Identifier: Apache-2.0
"""GPTQ checkpoints are read as what they stand for, or refused with the reason."""

import itertools
import json

from gptq_maker import build_small_llama, MODELS, write_gptq
import pytest
from safetensors.torch import load_file, save_file
import torch

from memspec_ros.models.errors import MemSpecError
from memspec_ros.models.gptq import GptqMatrix, pack_words, unpack
from memspec_ros.models.gptq_library import installed_library
from memspec_ros.models.llama import Llama
from memspec_ros.models.llama_config import LlamaConfig
from memspec_ros.models.packing import dense, linear, pack
from memspec_ros.models.quantized import (
    has_int4,
    has_int8,
    Int4Matrix,
    Int8Matrix,
    round_to_int4,
    StackedMatrix,
)
from memspec_ros.models.target import load_target, open_weights, read_config, stored_bytes

CPU = torch.device('cpu')
IDS = [(7 * i * i + 3 * i + 5) % 128 for i in range(40)]
needs_int4 = pytest.mark.skipif(not has_int4(CPU, torch.float32, 16),
                                reason='this PyTorch has no INT4 kernel for the CPU')
needs_int8 = pytest.mark.skipif(not has_int8(CPU), reason='no INT8 kernel that is exact here')


def expected_logits(model, meant):
    """What ``transformers`` computes with the weights that the checkpoint stands for."""
    model.load_state_dict(meant, strict=False)
    with torch.inference_mode():
        return model(torch.tensor([IDS])).logits[0]


def logits(target, ids=IDS):
    return target.forward(target.new_state(len(ids)), ids)


FORMATS = {
    'asymmetric': {}, 'symmetric': {'symmetric': True}, 'act-order': {'act_order': True},
    'act-order of each matrix': {'act_order': True, 'shuffle_each': True},
    'one group': {'group': -1}, 'one group, act-order': {'group': -1, 'act_order': True},
    'v2': {'v2': True}, 'v2 act-order symmetric': {'v2': True, 'act_order': True,
                                                   'symmetric': True},
    'groups of 48': {'group': 48}, 'a last group that is smaller': {'group': 40},
    '2 bits': {'bits': 2}, '8 bits': {'bits': 8}, '8 bits act-order': {'bits': 8,
                                                                       'act_order': True},
    'biases of zeros': {'zero_biases': True}}


@pytest.mark.parametrize('family, form', [
    *itertools.product(['llama', 'qwen2'], FORMATS)])
def test_every_path_computes_what_the_checkpoint_stands_for(tmp_path, family, form):
    model = MODELS[family]()
    meant = write_gptq(model, tmp_path, **FORMATS[form])
    expected = expected_logits(model, meant)
    for options in ({}, {'weights': 'dense'}, {'packed': False}, {'generic': True}):
        target = load_target(tmp_path, torch.float32, CPU, 64, **options)
        torch.testing.assert_close(logits(target), expected, atol=2e-4, rtol=1e-4)


@needs_int4
@pytest.mark.parametrize('form, kinds', [
    ('asymmetric', {'int4'}), ('act-order', {'int4'}), ('2 bits', {'int4'}),
    ('one group, act-order', {'int4'}), ('act-order of each matrix', {'int4'}),
    ('8 bits', {'float32'}), ('groups of 48', {'float32'})])
def test_kernels_take_what_they_can(tmp_path, form, kinds):
    write_gptq(build_small_llama(), tmp_path, **FORMATS[form])
    target = load_target(tmp_path, torch.float32, CPU, 64)
    assert set(target.weight_kinds) == kinds
    if kinds == {'int4'}:
        plain = load_target(tmp_path, torch.float32, CPU, 64, weights='dense')
        assert set(plain.weight_kinds) == {'float32'}
        assert target.weight_bytes < plain.weight_bytes * 0.6
    else:
        with pytest.raises(MemSpecError, match=r'q_proj: .* fits no INT4 kernel .* weights auto'):
            load_target(tmp_path, torch.float32, CPU, 64, weights='int4')


@needs_int4
def test_bfloat16_is_near(tmp_path):
    model = build_small_llama()
    expected = expected_logits(model, write_gptq(model, tmp_path, act_order=True))
    for weights in ('auto', 'dense'):
        target = load_target(tmp_path, torch.bfloat16, CPU, 64, weights=weights)
        error = (logits(target) - expected).abs().max() / expected.abs().max()
        assert error < 0.05, weights


@pytest.mark.parametrize('weights', ['auto', 'dense', 'int8', 'int4'])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('quantised', [False, True])
def test_the_bytes_are_known_beforehand(tmp_path, weights, dtype, quantised):
    if weights == 'int4' and not has_int4(CPU, dtype, 16) or weights == 'int8' and not has_int8(
            CPU):
        pytest.skip('no such kernel')
    model = build_small_llama()
    if quantised:
        write_gptq(model, tmp_path)
    else:
        model.save_pretrained(tmp_path)
    target = load_target(tmp_path, dtype, CPU, 64, weights=weights)
    assert stored_bytes(tmp_path, dtype, CPU, weights) == target.weight_bytes


def test_values_are_packed_lowest_first():
    values = torch.arange(16).reshape(16, 1) % 16
    assert pack_words(values, 4).flatten().tolist() == [0x76543210, 0xfedcba98 - (1 << 32)]
    for bits in (2, 4, 8):
        values = torch.randint(0, 1 << bits, (96, 5), generator=torch.Generator().manual_seed(1))
        assert torch.equal(unpack(pack_words(values, bits), bits), values.int())


# --- rows ---

def matrices(dtype):
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(96, 192, generator=generator).to(dtype)
    made = {}
    if has_int8(CPU):
        made['int8'] = Int8Matrix(weight)
    if has_int4(CPU, dtype, 96):
        made['int4'] = round_to_int4(weight, 64)
        order = torch.randperm(192, generator=generator)
        made['int4 act-order'] = Int4Matrix(
            torch.randint(0, 16, (96, 192), generator=generator),
            torch.rand(6, 96, generator=generator),
            torch.randint(0, 16, (6, 96), generator=generator).float(), 32, dtype, order)
        made['stacked'] = StackedMatrix([made['int4'], made['int4 act-order']])
    return made


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('kind', ['int8', 'int4', 'int4 act-order', 'stacked'])
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype, kind):
    matrix = matrices(dtype).get(kind)
    if matrix is None:
        pytest.skip('no such kernel')
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, 70, 192, generator=generator).to(dtype)
    x[0, 33] *= 1e3  # one loud row must not cost the others their precision
    alone = torch.cat([linear(x[:, i:i + 1], matrix) for i in range(70)], 1)
    for rows in (2, 3, 5, 9, 17, 70):
        for first in (0, 70 - rows):
            together = linear(x[:, first:first + rows], matrix)
            assert torch.equal(together, alone[:, first:first + rows]), (rows, first)


@needs_int8
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_int8_is_near_to_the_plain_product(dtype):
    generator = torch.Generator().manual_seed(5)
    weight, x = (torch.randn(size, generator=generator).to(dtype) for size in ((64, 256),
                                                                             (2, 3, 256)))
    bias = torch.randn(64, generator=generator).to(dtype)
    result = linear(x, pack(weight, 'int8'), bias)
    expected = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    assert result.shape == expected.shape and result.dtype == dtype
    assert (result.float() - expected).abs().max() < 0.03 * expected.abs().max()
    assert torch.equal(linear(torch.zeros(1, 256, dtype=dtype), pack(weight, 'int8')),
                       torch.zeros(1, 64, dtype=dtype))


@needs_int4
def test_int4_rounds_to_the_nearest_level():
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(6))
    matrix = pack(weight, 'int4')
    stands_for = matrix.multiply(torch.eye(128)).t()
    grouped = weight.view(32, -1, 64)
    step = (grouped.amax(-1).clamp_min(0) - grouped.amin(-1).clamp_max(0)) / 15
    error = (stands_for.view(32, -1, 64) - grouped).abs()
    assert bool((error <= step[..., None] * 0.76).all()) and float(error.mean()) > 0


def test_kernels_that_do_not_take_a_matrix_say_so():
    for weight in (torch.randn(24, 64), torch.randn(32, 48)):
        with pytest.raises(MemSpecError, match='fits no INT4 kernel'):
            pack(weight, 'int4')


def test_without_the_kernels_a_checkpoint_is_dequantised(tmp_path, monkeypatch):
    model = build_small_llama()
    expected = expected_logits(model, write_gptq(model, tmp_path))
    monkeypatch.setattr('memspec_ros.models.gptq.has_int4', lambda *_: False)
    monkeypatch.setattr('memspec_ros.models.packing.has_int8', lambda *_: False)
    target = load_target(tmp_path, torch.float32, CPU, 64)
    assert target.weight_kinds == ('float32',)
    torch.testing.assert_close(logits(target), expected, atol=2e-4, rtol=1e-4)
    with pytest.raises(MemSpecError, match='no INT8 kernel'):
        load_target(tmp_path, torch.float32, CPU, 64, weights='int8')


def test_rollback_and_hidden_states_are_those_of_the_lean_path(tmp_path):
    write_gptq(build_small_llama(), tmp_path, act_order=True)
    target = load_target(tmp_path, torch.float32, CPU, 64)
    whole = logits(target)
    state = target.new_state(40, frozenset({1}))
    target.forward(state, IDS[:10])
    state.hold(10)
    target.forward(state, [1, 2, 3])  # rejected: not held
    torch.testing.assert_close(target.forward(state, IDS[10:]), whole[10:], atol=1e-4, rtol=1e-4)
    plain = load_target(tmp_path, torch.float32, CPU, 64, weights='dense')
    other = plain.new_state(40, frozenset({1}))
    plain.forward(other, IDS)
    for depth in (1, 2):
        torch.testing.assert_close(state.hidden[depth], other.hidden[depth], atol=1e-3, rtol=1e-3)


# --- damaged and unknown ---

def change(directory, tensors=None, config=None):
    """Edit a checkpoint: tensors by name (None takes one away), keys of quantization_config."""
    file = directory / 'model.safetensors'
    found = load_file(file)
    for name, edit in (tensors or {}).items():
        found[name] = edit(found[name]) if edit else None
    save_file({name: t for name, t in found.items() if t is not None}, file)
    raw = json.loads((directory / 'config.json').read_text())
    raw['quantization_config'] |= config or {}
    (directory / 'config.json').write_text(json.dumps(raw))


def nan(tensor):
    tensor[0, 0] = torch.nan
    return tensor


DOWN = 'model.layers.1.mlp.down_proj'


@pytest.mark.parametrize('tensors, config, message', [
    ({f'{DOWN}.scales': None}, {}, f'{DOWN}.scales is missing.*fetch or quantise'),
    ({f'{DOWN}.qzeros': None}, {}, f'{DOWN}.qzeros is missing'),
    ({f'{DOWN}.qweight': None}, {}, f'{DOWN}.weight is missing'),
    ({'model.norm.weight': None}, {}, 'model.norm.weight is missing'),
    ({f'{DOWN}.scales': nan}, {}, f'{DOWN}.scales holds values that are no numbers'),
    ({f'{DOWN}.scales': lambda t: t / 0}, {}, f'{DOWN}.scales holds values that are no numbers'),
    ({'model.embed_tokens.weight': nan}, {}, 'model.embed_tokens.weight holds values that are no'),
    ({f'{DOWN}.g_idx': lambda t: t + 1}, {}, f'{DOWN}.g_idx does not give'),
    ({f'{DOWN}.g_idx': lambda t: t[:-8]}, {}, f'{DOWN}.g_idx does not give'),
    ({f'{DOWN}.qweight': lambda t: t[:, :-1].clone()}, {}, f'{DOWN}.qweight has 63 outputs'),
    ({f'{DOWN}.qweight': lambda t: t.float()}, {}, f'{DOWN}.qweight is torch.float32'),
    ({f'{DOWN}.qzeros': lambda t: t[:, 1:].clone()}, {}, f'{DOWN}.qzeros is'),
    ({}, {'group_size': 64}, 'scales has 2 groups, with group_size 64 .* 1: set '
                             'quantization_config.bits and group_size'),
    ({}, {'group_size': -1}, 'groups, with group_size -1'),
    ({}, {'bits': 8}, 'quantization_config.bits and group_size'),
    ({}, {'bits': 3}, 'bits is 3, supported are 2, 4, 8'),
    ({}, {'bits': None}, 'bits is None'),
    ({}, {'group_size': 0}, 'group_size is 0'),
    ({}, {'quant_method': 'awq'}, "quant_method 'awq' is not supported"),
    ({}, {'checkpoint_format': 'marlin'}, "checkpoint_format 'marlin' is not supported")])
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path, tensors, config, message):
    write_gptq(build_small_llama(), tmp_path)
    change(tmp_path, tensors, config)
    with pytest.raises(MemSpecError, match=message):
        load_target(tmp_path, torch.float32, CPU, 64)


def test_a_plain_checkpoint_with_nan_is_refused_by_name(tmp_path):
    model = build_small_llama()
    with torch.no_grad():
        nan(model.model.layers[1].mlp.up_proj.weight)
    model.save_pretrained(tmp_path)
    with pytest.raises(MemSpecError, match='layers.1.mlp.up_proj.weight holds values that are no'):
        load_target(tmp_path, torch.float32, CPU, 64)


def test_a_bias_that_counts_is_not_left_out(tmp_path):
    write_gptq(build_small_llama(), tmp_path, zero_biases=True)
    change(tmp_path, {f'{DOWN}.bias': lambda t: t + 1})
    with pytest.raises(MemSpecError, match=f'{DOWN}.bias has no lean path'):
        load_target(tmp_path, torch.float32, CPU, 64)


def test_a_config_that_promises_gptq_over_plain_weights_is_refused(tmp_path):
    model = build_small_llama()
    write_gptq(model, tmp_path)
    save_file({n: t.clone() for n, t in model.state_dict().items()},
              tmp_path / 'model.safetensors')
    with pytest.raises(MemSpecError, match='no tensor is quantised'):
        load_target(tmp_path, torch.float32, CPU, 64)


def test_files_and_settings_as_older_tools_name_them(tmp_path):
    model = build_small_llama()
    expected = expected_logits(model, write_gptq(model, tmp_path))
    raw = json.loads((tmp_path / 'config.json').read_text())
    settings = raw.pop('quantization_config')
    del settings['checkpoint_format'], settings['quant_method']  # auto-gptq's files have neither
    (tmp_path / 'config.json').write_text(json.dumps(raw))
    (tmp_path / 'quantize_config.json').write_text(json.dumps(settings))
    (tmp_path / 'model.safetensors').rename(tmp_path / 'gptq_model-4bit-32g.safetensors')
    target = load_target(tmp_path, torch.float32, CPU, 64)
    torch.testing.assert_close(logits(target), expected, atol=2e-4, rtol=1e-4)


def test_a_checkpoint_without_g_idx_has_its_groups_in_order(tmp_path):
    model = build_small_llama()
    expected = expected_logits(model, write_gptq(model, tmp_path))
    names = [name for name in load_file(tmp_path / 'model.safetensors') if 'g_idx' in name]
    change(tmp_path, dict.fromkeys(names))
    target = load_target(tmp_path, torch.float32, CPU, 64)
    torch.testing.assert_close(logits(target), expected, atol=2e-4, rtol=1e-4)


def test_bits_that_differ_between_matrices(tmp_path):
    """As gptqmodel's ``dynamic`` has it: the shapes say which matrix has how many."""
    (tmp_path / 'other').mkdir()
    model = build_small_llama()
    meant = write_gptq(model, tmp_path, dynamic={'+:.*down_proj': {'bits': 8}})
    eight = write_gptq(model, tmp_path / 'other', bits=8)
    parts = load_file(tmp_path / 'other' / 'model.safetensors')
    change(tmp_path, {name: lambda t, name=name: parts[name] for name in parts
                      if name.startswith(DOWN)})
    meant[f'{DOWN}.weight'] = eight[f'{DOWN}.weight']
    target = load_target(tmp_path, torch.float32, CPU, 64)
    torch.testing.assert_close(logits(target), expected_logits(model, meant), atol=2e-4, rtol=1e-4)


def test_a_target_to_train_on_is_dequantised(tmp_path):
    meant = write_gptq(build_small_llama(), tmp_path)
    with open_weights(tmp_path) as weights:
        assert set(weights) == set(meant) and len(weights) == len(meant)
        assert isinstance(weights[f'{DOWN}.weight'], GptqMatrix)
        assert weights.shape(f'{DOWN}.weight') == (64, 96)
        model = Llama.from_state(LlamaConfig.from_hf(read_config(tmp_path)), weights,
                                 torch.float32, CPU)
    assert torch.allclose(model.layers[1].down, meant[f'{DOWN}.weight'], atol=1e-6)
    assert dense(model.layers[1].down) is model.layers[1].down


# --- through a library ---

def test_a_library_that_is_not_there_is_named(tmp_path, monkeypatch):
    write_gptq(build_small_llama(), tmp_path)
    monkeypatch.setattr('memspec_ros.models.gptq_library.installed_library', lambda: None)
    with pytest.raises(MemSpecError, match='install gptqmodel and optimum'):
        load_target(tmp_path, torch.float32, CPU, 64, weights='library')


def test_a_library_is_for_gptq_only(tmp_path):
    build_small_llama().save_pretrained(tmp_path)
    with pytest.raises(MemSpecError, match='is for GPTQ checkpoints'):
        load_target(tmp_path, torch.float32, CPU, 64, weights='library')


@pytest.mark.skipif(installed_library() is None, reason='needs gptqmodel (or auto-gptq), optimum')
@pytest.mark.parametrize('family', ['llama', 'qwen2'])
@pytest.mark.parametrize('form', ['symmetric', 'asymmetric', 'act-order'])
def test_a_library_computes_the_same(tmp_path, family, form):
    model = MODELS[family]()
    expected = expected_logits(model, write_gptq(model, tmp_path, **FORMATS[form]))
    # Its kernels for the CPU compute in bfloat16, whatever they are given.
    target = load_target(tmp_path, torch.bfloat16, CPU, 64, weights='library')
    assert target.weight_kinds == ('library',)
    own = logits(load_target(tmp_path, torch.bfloat16, CPU, 64))
    for other in (expected, own):
        error = (logits(target) - other).abs().mean() / other.abs().mean()
        assert error < 0.04
