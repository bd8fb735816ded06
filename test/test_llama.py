# SPDX-License-Identifier: Apache-2.0
"""The lean path computes what ``transformers`` computes, or refuses."""

import json

from conftest import build_llama, PADDED_VOCABULARY, PROMPTS
import pytest
import torch

from memspec_ros.models.errors import UnsupportedModelError
from memspec_ros.models.kv_cache import KVCache
from memspec_ros.models.layers import attend, causal_mask, Rope, run_layer_uncached
from memspec_ros.models.llama import Llama
from memspec_ros.models.llama_config import LlamaConfig
from memspec_ros.models.packing import linear, pack
from memspec_ros.models.target import load_target, read_config, TransformersTarget

CPU = torch.device('cpu')
ROPE_LLAMA3 = {'rope_type': 'llama3', 'rope_theta': 10000.0, 'factor': 8.0,
               'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
               'original_max_position_embeddings': 32}
ROPE_LINEAR = {'rope_type': 'linear', 'rope_theta': 500.0, 'factor': 4.0}


def build_qwen2(**changes):
    from transformers import Qwen2Config, Qwen2ForCausalLM
    torch.manual_seed(4)
    model = Qwen2ForCausalLM(Qwen2Config(**{
        'hidden_size': 48, 'intermediate_size': 80, 'num_hidden_layers': 3,
        'num_attention_heads': 6, 'num_key_value_heads': 2, 'vocab_size': 130,
        'max_position_embeddings': 256, 'initializer_range': 0.2, **changes})).eval()
    with torch.no_grad():  # biases begin at zero, which would hide a forgotten one
        for name, p in model.named_parameters():
            if name.endswith('bias'):
                p.normal_(std=0.3)
    return model


MODELS = {
    'llama': lambda: build_llama(1),
    'llama tied': lambda: build_llama(1, tie_word_embeddings=True),
    'llama without grouping': lambda: build_llama(1, num_key_value_heads=4),
    'llama with one kv head': lambda: build_llama(1, num_key_value_heads=1),
    'llama with wide heads': lambda: build_llama(1, head_dim=32),
    'llama with attention bias': lambda: build_llama(1, attention_bias=True),
    'llama theta': lambda: build_llama(1, rope_parameters={'rope_type': 'default',
                                                           'rope_theta': 300.0}),
    'llama3 rope': lambda: build_llama(1, rope_parameters=ROPE_LLAMA3),
    'linear rope': lambda: build_llama(1, rope_parameters=ROPE_LINEAR),
    'qwen2': lambda: build_qwen2(),
    'qwen2 tied': lambda: build_qwen2(tie_word_embeddings=True),
}


def logits_of(model, ids):
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def run(target, ids, chunks, depths=frozenset()):
    """Logits of all positions, run in chunks of those sizes."""
    state = target.new_state(len(ids) + 4, depths)
    state.tokens = list(ids)
    rows, place = [], 0
    for size in chunks:
        rows.append(target.forward(state, ids[place:place + size]))
        place += size
        state.hold(place)
    assert place == len(ids)
    return torch.cat(rows), state


@pytest.mark.parametrize('generic', [False, True], ids=['lean', 'generic'])
@pytest.mark.parametrize('name', MODELS)
def test_logits_equal_those_of_transformers(tmp_path, name, generic):
    model = MODELS[name]()
    if name == 'llama with attention bias':  # the output projection's has no lean path
        with torch.no_grad():
            for layer in model.model.layers:
                for part in ('q_proj', 'k_proj', 'v_proj', 'o_proj'):
                    getattr(layer.self_attn, part).bias.normal_(std=0.3)
    model.save_pretrained(tmp_path)
    if name == 'llama with attention bias' and not generic:
        with pytest.raises(UnsupportedModelError, match='o_proj.bias'):
            load_target(tmp_path, torch.float32, CPU, 64)
        return
    target = load_target(tmp_path, torch.float32, CPU, 64, generic)
    assert isinstance(target, TransformersTarget) == generic
    ids = [(7 * i * i + 3 * i + 5) % 128 for i in range(40)]
    expected = logits_of(model, ids)
    for chunks in ([40], [1] * 40, [13, 1, 1, 5, 20]):
        logits, _ = run(target, ids, chunks)
        assert logits.dtype == torch.float32 and logits.shape == expected.shape
        assert torch.allclose(logits, expected, atol=1e-4), (logits - expected).abs().max()


@pytest.mark.parametrize('chunks', [[40], [13, 1, 1, 5, 20]])
def test_both_paths_keep_the_hidden_states_before_the_final_norm(model_dirs, reference, chunks):
    ids = [(7 * i * i + 3 * i + 5) % 128 for i in range(40)]
    kept = []
    for generic in (False, True):
        target = load_target(model_dirs / 'target', torch.float32, CPU, 64, generic)
        assert target.hidden_before_norm
        _, state = run(target, ids, chunks)
        kept.append(state.hidden[4][:40])
    assert torch.allclose(kept[0], kept[1], atol=1e-4)
    with torch.inference_mode():
        logits = reference.lm_head(reference.model.norm(kept[1]))
    assert torch.allclose(logits, logits_of(reference, ids), atol=1e-4)
    assert not torch.allclose(kept[1], reference.model.norm(kept[1]), atol=1e-2)


@pytest.mark.parametrize('last_only', [False, True])
def test_a_family_without_lean_path_keeps_them_too(tmp_path, last_only):
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=128, n_positions=64, n_embd=32, n_layer=3, n_head=4, initializer_range=0.3))
    model.eval().save_pretrained(tmp_path)
    target = load_target(tmp_path, torch.float32, CPU, 64)
    state, ids = target.new_state(60), list(range(3, 40))
    target.forward(state, ids, last_only)
    with torch.inference_mode():
        logits = model.lm_head(model.transformer.ln_f(state.hidden[3][:len(ids)]))
    assert torch.allclose(logits, logits_of(model, ids), atol=1e-4)
    # Nothing stays on the model: it would keep its memory.
    layers = target._lm.model.transformer.h
    assert not layers[-1]._forward_hooks


@pytest.mark.parametrize('generic', [False, True], ids=['lean', 'generic'])
def test_a_rollback_leaves_no_trace(model_dirs, reference, generic):
    target = load_target(model_dirs / 'target', torch.float32, CPU, 64, generic)
    state = target.new_state(60)
    target.forward(state, PROMPTS[0])
    state.hold(3)
    target.forward(state, [1, 2, 3, 4, 5, 6])  # rejected, all of it
    state.hold(3)
    ids = [*PROMPTS[0][:3], 9, 8, 7]
    assert torch.allclose(target.forward(state, ids[3:]), logits_of(reference, ids)[3:],
                          atol=1e-4)
    assert torch.allclose(target.forward(state, ids[3:], last_only=True),
                          logits_of(reference, ids)[-1:], atol=1e-4)


def test_hidden_states_are_kept_at_the_depths_asked_for(target, reference):
    ids = PROMPTS[1]
    _, state = run(target, ids, [4, 1, len(ids) - 5], frozenset({1, 3}))
    with torch.inference_mode():
        hidden = reference(torch.tensor([ids]), output_hidden_states=True).hidden_states
    assert set(state.hidden) == {1, 3, 4}
    for depth in (1, 3):
        assert torch.allclose(state.hidden[depth][:len(ids)], hidden[depth][0], atol=1e-4)
    # Before the final norm: the head's norm brings it to what transformers calls the last state.
    normed = reference.model.norm(state.hidden[4][:len(ids)])
    assert torch.allclose(normed, hidden[4][0], atol=1e-4)
    with pytest.raises(UnsupportedModelError, match='after layer 5'):
        target.new_state(8, frozenset({5}))


def test_run_lower_equals_the_lower_part_of_a_forward_pass(target):
    ids = PROMPTS[1]
    _, whole = run(target, ids, [len(ids)], frozenset({2}))
    _, state = run(target, ids[:-2], [len(ids) - 2], frozenset({2}))
    for i in (-2, -1):
        x = target.run_lower(state, ids[i], len(ids) + i, 2)
        assert torch.allclose(x[0, 0], whole.hidden[2][len(ids) + i], atol=1e-5)
    assert state.kv.lengths == [len(ids), len(ids) - 2]


def test_bfloat16_follows_float32(model_dirs, target):
    """Pitfall 14: other kernels may flip near-ties, so what is asked is closeness."""
    half = load_target(model_dirs / 'target', torch.bfloat16, CPU, 64)
    a, _ = run(half, PROMPTS[3], [45])
    b, _ = run(target, PROMPTS[3], [45])
    assert a.dtype == torch.float32 and half.dtype == torch.bfloat16
    # FBGEMM fills its columns up.
    dense = load_target(model_dirs / 'target', torch.bfloat16, CPU, 64, weights='dense')
    assert target.weight_bytes == 2 * dense.weight_bytes
    assert (a.argmax(-1) == b.argmax(-1)).float().mean() > 0.8
    assert (a - b).abs().mean() < 0.1 * b.std()


def test_a_context_of_the_models_full_length_can_be_run(tmp_path):
    model = build_llama(2, max_position_embeddings=24)
    model.save_pretrained(tmp_path)
    target = load_target(tmp_path, torch.float32, CPU, 4096)
    assert target.max_positions == 24
    ids = list(range(24))
    assert torch.allclose(run(target, ids, [24])[0], logits_of(model, ids), atol=1e-4)


BASE = {'model_type': 'llama', 'vocab_size': 10, 'hidden_size': 8, 'intermediate_size': 8,
        'num_hidden_layers': 1, 'num_attention_heads': 2}


@pytest.mark.parametrize('changes, message', [
    ({'model_type': 'mistral'}, "model_type 'mistral'"),
    ({'model_type': None}, 'model_type None'),
    ({'use_sliding_window': True, 'sliding_window': 16}, 'sliding-window'),
    ({'hidden_act': 'gelu'}, "hidden_act 'gelu'"),
    ({'mlp_bias': True}, 'mlp_bias'),
    ({'rope_scaling': {'type': 'dynamic', 'factor': 2.0}}, "rope type 'dynamic'"),
    ({'rope_parameters': {'rope_type': 'yarn', 'factor': 2.0}}, "rope type 'yarn'"),
    ({'partial_rotary_factor': 0.5}, 'partial rotary'),
    ({'rope_parameters': {'rope_type': 'default', 'partial_rotary_factor': 0.25}},
     'partial rotary'),
    ({'hidden_size': None}, 'hidden_size is None'),
    ({'num_attention_heads': '2'}, "num_attention_heads is '2'")])
def test_what_the_lean_path_cannot_do_is_refused(changes, message):
    """Pitfall 8, and its kind: wrong numbers must never be the silent alternative."""
    with pytest.raises(UnsupportedModelError, match=message):
        LlamaConfig.from_hf({**BASE, **changes})


def test_configurations_of_older_releases_are_read(tmp_path):
    config = LlamaConfig.from_hf({**BASE, 'rope_theta': 5e5, 'rope_scaling': {
        'type': 'linear', 'factor': 2.0}})
    assert (config.rope_theta, config.rope_scaling['factor']) == (5e5, 2.0)
    assert config.kv_heads == 2 and config.head_dim == 4 and not config.tied_embeddings
    build_llama(1, rope_parameters=ROPE_LINEAR).save_pretrained(tmp_path)
    new = read_config(tmp_path)
    old = {**new, 'rope_theta': 500.0, 'rope_scaling': {'type': 'linear', 'factor': 4.0}}
    del old['rope_parameters']
    a, b = (Rope(LlamaConfig.from_hf(raw), 50, CPU) for raw in (new, old))
    assert torch.equal(a.cos, b.cos) and torch.equal(a.sin, b.sin)


@pytest.mark.parametrize('kind, changes', [
    ('mistral', {'sliding_window': 16}), ('qwen2', {'use_sliding_window': True,
                                                    'sliding_window': 16,
                                                    'layer_types': ['sliding_attention'] * 4}),
    ('mamba', {})])
def test_sliding_window_and_recurrent_models_are_refused_with_the_reason(
        tmp_path, model_dirs, kind, changes):
    """Pitfall 8, on both paths."""
    raw = {**read_config(model_dirs / 'target'), 'model_type': kind, **changes}
    raw.pop('architectures')
    (tmp_path / 'config.json').write_text(json.dumps(raw))
    for generic in (False, True):
        with pytest.raises(UnsupportedModelError, match='sliding|roll|cache|full attention'):
            load_target(tmp_path, torch.float32, CPU, 64, generic)


def test_a_window_that_is_switched_off_is_no_window(tmp_path):
    model = build_qwen2(sliding_window=4, use_sliding_window=False)
    model.save_pretrained(tmp_path)
    for generic in (False, True):
        target = load_target(tmp_path, torch.float32, CPU, 64, generic)
        ids = list(range(20))
        assert torch.allclose(run(target, ids, [20])[0], logits_of(model, ids), atol=1e-4)


def test_missing_tensors_are_named(target):
    config = target.model.config
    with pytest.raises(UnsupportedModelError, match='model.embed_tokens.weight is missing'):
        Llama.from_state(config, {}, torch.float32, CPU)


@pytest.mark.parametrize('grouped_kernel', [True, False])
def test_attention_equals_the_reference_kernel(monkeypatch, grouped_kernel):
    monkeypatch.setattr('memspec_ros.models.layers.GROUPED_KERNEL', grouped_kernel)
    torch.manual_seed(0)
    for new, seen in ((1, 9), (4, 9), (9, 9)):
        query, key, value = (torch.randn(2, n, h, 8) for n, h in ((new, 6), (seen, 2), (seen, 2)))
        keys, values = key.transpose(1, 2), value.transpose(1, 2)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2), keys.repeat_interleave(3, 1), values.repeat_interleave(3, 1),
            attn_mask=torch.ones(new, seen, dtype=torch.bool).tril(seen - new)).transpose(1, 2)
        mask = causal_mask(new, seen, CPU)
        assert torch.allclose(attend(query, keys, values, mask), expected, atol=1e-5)


def test_a_layer_without_cache_equals_one_with(target):
    """Training and decoding must see the same layer."""
    model, ids = target.model, torch.tensor([PROMPTS[1]])
    count = ids.shape[1]
    x = model.embed(ids)
    rope, mask = model.rope.at(0, count), causal_mask(count, count, CPU)
    kv = KVCache(4, 2, count, model.config.head_dim, torch.float32, CPU)
    cached = model.run_layers(x, 0, 4, kv, 0)
    for weights in model.layers:
        x = run_layer_uncached(model.config, weights, x, rope, mask)
    assert torch.allclose(x, cached, atol=1e-5)


def test_cache_groups_and_lengths():
    """Pitfall 22: a cache is as large as its key/value heads, not its query heads."""
    cache = KVCache(6, 2, 10, 4, torch.float32, CPU, {2, 4, 0, 6})
    assert cache.groups == ((0, 2), (2, 4), (4, 6)) and cache.lengths == [0, 0, 0]
    assert cache.bytes == 2 * 6 * 2 * 10 * 4 * 4
    cache.set_length(7)
    cache.set_length(9, 0)
    assert cache.lengths == [9, 7, 7] and list(cache.groups_below(4)) == [0, 1]
    assert list(cache.groups_below(3)) == [0]
    for wrong in (-1, 11):
        with pytest.raises(ValueError, match='outside 0..10'):
            cache.set_length(wrong)


def test_the_vocabulary_of_a_target_may_be_padded(target):
    assert target.vocab_size == PADDED_VOCABULARY and target.layers == 4


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('rows', [1, 2, 5, 9, 64])
def test_packed_matrices_multiply_like_plain_ones(dtype, rows):
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(192, 128, generator=generator).to(dtype)
    bias = torch.randn(192, generator=generator).to(dtype)
    x = torch.randn(1, rows, 128, generator=generator).to(dtype)
    packed = pack(weight)
    for b in (None, bias):
        plain = torch.nn.functional.linear(x, weight, b)
        result = linear(x, packed, b)
        assert result.shape == plain.shape and result.dtype == dtype
        torch.testing.assert_close(result, plain, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5,
                                   atol=2e-2 if dtype == torch.bfloat16 else 1e-4)


def test_packing_is_left_out_where_it_is_not_to_be_had(monkeypatch):
    weight = torch.randn(32, 16)
    monkeypatch.setattr('memspec_ros.models.packing._available', lambda dtype: False)
    assert pack(weight) is weight
