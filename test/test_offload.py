# SPDX-License-Identifier: Apache-2.0
"""Layers left in storage: the same logits, bounded memory, read while others compute."""

import threading
import time

from conftest import build_llama, PROMPTS
import pytest
import torch

from memspec_ros.bench import measure_memory as measuring
from memspec_ros.cli import main
from memspec_ros.memory.allocator import MIB
from memspec_ros.memory.footprint import Demand, FootprintModel
from memspec_ros.models.bundle import load_bundle
from memspec_ros.models.errors import BundleError, UnsupportedModelError
from memspec_ros.models.layer_stack import LayerStack
from memspec_ros.models.llama_config import LlamaConfig
from memspec_ros.models.offload import layer_bytes, LayerStream, Offload
from memspec_ros.models.target import load_target, read_config
from memspec_ros.models.target_files import locate_target
from memspec_ros.runtime.requests import Finish, GenerationRequest
from memspec_ros.runtime.runtime import Runtime, RuntimeOptions
from memspec_ros.runtime.settings import Settings
from memspec_ros.runtime.storage import StorageLimits

CPU = torch.device('cpu')


@pytest.fixture(scope='module')
def config(model_dirs):
    return LlamaConfig.from_hf(read_config(model_dirs / 'target'))


def offload(config, cache, resident, dtype=torch.float32, **options):
    """That many of four layers in memory, beside the two buffers."""
    return Offload(int((resident + 2) * layer_bytes(config, dtype)), cache, **options)


class Counted:
    """A store that notes what it reads."""

    def __init__(self, inner):
        self.inner, self.names = inner, []

    def read(self, name, progress, cancelled):
        self.names.append(int(name))
        return self.inner.read(name, progress, cancelled)


def logits(target, ids, steps=3):
    state = target.new_state(64)
    rows = [target.forward(state, ids)]
    state.hold(len(ids))
    for token in range(steps):
        rows.append(target.forward(state, [token]))
        state.hold(state.held + 1)
    return torch.cat(rows)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_logits_are_those_of_the_target_in_memory(model_dirs, config, tmp_path, dtype):
    # Streamed layers are multiplied as dense ones are.
    held = load_target(model_dirs / 'target', dtype, CPU, 64, 'dense')
    expected = logits(held, PROMPTS[0])
    # One layer too many for the buffers and all in memory: one is left out.
    for resident in (1, 1.9):
        target = load_target(model_dirs / 'target', dtype, CPU, 64,
                             offload=offload(config, tmp_path, resident, dtype))
        found = logits(target, PROMPTS[0])
        # bfloat16 has three digits, and layers apart are multiplied by other kernels.
        torch.testing.assert_close(found, expected, rtol=0,
                                   atol=1e-5 if dtype is torch.float32 else 0.2)
        assert len(target.model.held_layers) == 1 and target.layers == 4
        # Three layers have become two buffers.
        assert target.weight_bytes < held.weight_bytes
    whole = load_target(model_dirs / 'target', dtype, CPU, 64,
                        offload=offload(config, tmp_path, 2, dtype))
    assert whole.weight_bytes == held.weight_bytes and isinstance(whole.model.layers, LayerStack)


def test_each_pass_reads_each_layer_once_and_the_next_pass_finds_the_first_one(
        model_dirs, config, tmp_path):
    stores = []

    def counted(store):
        stores.append(Counted(store))
        return stores[0]
    target = load_target(model_dirs / 'target', torch.float32, CPU, 64,
                         offload=offload(config, tmp_path, 1, limit=counted))
    state = target.new_state(64, frozenset(), frozenset({1, 2}))
    for passes in range(1, 4):
        target.forward(state, PROMPTS[0])
        target.model.layers._stream._read._thread.join()
        assert stores[0].names == [1, 2, 3] * passes + [1]
    # Drafting with the layers in memory reads nothing; pausing half-way up goes on.
    target.run_to(state, PROMPTS[0], 1)
    assert len(stores[0].names) == 10
    target.run_to(state, PROMPTS[0], 2)
    target.forward(state, PROMPTS[0])
    target.model.layers._stream._read._thread.join()
    assert stores[0].names == [1, 2, 3] * 4 + [1]


class Slow:
    """A store that takes its time, and says when it is read."""

    def __init__(self):
        self.names = []

    def read(self, name, progress, cancelled):
        time.sleep(0.03)
        self.names.append(name)
        return {name: torch.zeros(2) for name in (
            'input_norm', 'qkv', 'out', 'post_norm', 'gate_up', 'down')}


def test_the_next_layer_is_read_while_one_computes():
    store = Slow()
    stream = LayerStream(store, 1, 3, 0, CPU)
    stream.layer(1)
    began = time.perf_counter()
    while len(store.names) < 2:  # the one that computes asks for nothing
        assert time.perf_counter() - began < 5
        time.sleep(0.002)
    stream.layer(2)
    stream.stop()
    assert store.names[:2] == ['1', '2'] and '2' not in store.names[2:]  # that was it


def test_a_layer_out_of_turn_is_read_anew():
    stream = LayerStream(Slow(), 1, 5, 0, CPU)
    for place in (1, 2, 4, 1, 3):
        assert stream.layer(place).qkv.shape == (2,)
    stream.stop()


def runtime_of(bundle_maker, config, tmp_path, monkeypatch, **options):
    monkeypatch.setenv('MEMSPEC_CACHE', str(tmp_path / 'cache'))
    bundle_maker.manifest['self_speculation'] = {
        'licence': 'MIT', 'provenance': 'none', 'options': {'depth': 1}}
    return Runtime.open(bundle_maker.write(), RuntimeOptions(
        device='cpu', dtype='float32', context=200, adaptive=False, threads=1,
        layers_mib=3.2 * layer_bytes(config, torch.float32) / MIB,
        settings=Settings(cache_capacity=0, self_speculation=True), **options))


def answer(runtime, count=24):
    request = runtime.prepare(GenerationRequest(prompt='the robot', max_new_tokens=count))
    chunks = list(runtime.controller.generate(request))
    return request, [token for chunk in chunks for token in chunk.token_ids], chunks[-1]


def test_a_runtime_streams_at_the_pace_of_storage_and_speculates(
        bundle_maker, config, tmp_path, monkeypatch, greedy):
    runtime = runtime_of(bundle_maker, config, tmp_path, monkeypatch,
                         storage=StorageLimits(latency_ms=3.0))
    try:
        start = time.perf_counter()
        request, ids, last = answer(runtime)
        assert ids == greedy(request.prompt_ids, 24) and last.finish is Finish.LENGTH
        # Three layers wait 3 ms each in every verification.
        assert time.perf_counter() - start > last.stats.iterations * 3 * 0.003 * 0.9
        assert last.stats.drafts['self'].proposed > 0
    finally:
        runtime.close()


def test_layers_that_vanish_or_are_damaged_end_the_request_and_no_more(
        bundle_maker, config, tmp_path, monkeypatch, greedy):
    runtime = runtime_of(bundle_maker, config, tmp_path, monkeypatch)
    try:
        file, = tmp_path.glob('cache/layers/*/2.safetensors')
        whole = file.read_bytes()
        for harm in (file.unlink, lambda: file.write_bytes(whole[:1000]),
                     lambda: file.write_bytes(whole + bytes(9000))):
            answer(runtime)
            harm()
            _, _, last = answer(runtime)
            assert last.finish is Finish.INTERNAL and str(file) in last.message
            file.write_bytes(whole)
            request, ids, last = answer(runtime)
            assert last.finish is Finish.LENGTH and ids == greedy(request.prompt_ids, 24)
    finally:
        runtime.close()
    assert not [t for t in threading.enumerate() if t.name == 'memspec-layers']


def test_files_of_layers_are_made_once_and_belong_to_the_weights(model_dirs, config, tmp_path):
    import shutil
    source = tmp_path / 'target'
    shutil.copytree(model_dirs / 'target', source)

    def load():
        load_target(source, torch.float32, CPU, 64, offload=offload(config, tmp_path, 1))
        return {path: path.stat().st_mtime_ns for path in tmp_path.glob('layers/*/*')}
    made = load()
    assert len(made) == 3 and load() == made
    build_llama(seed=5).save_pretrained(source)
    other = load()
    assert len(other) == 6 and made.items() <= other.items()


def test_what_cannot_be_left_in_storage_is_refused(model_dirs, config, tmp_path):
    size = layer_bytes(config, torch.float32)
    with pytest.raises(BundleError, match=r'too little: one layer in memory and 2 buffers take'):
        load_target(model_dirs / 'target', torch.float32, CPU, 64,
                    offload=Offload(3 * size - 1, tmp_path))
    for options in ({'generic': True}, {'weights': 'int8'}):
        with pytest.raises(UnsupportedModelError, match='keep all layers of this one in memory'):
            load_target(model_dirs / 'target', torch.float32, CPU, 64,
                        offload=offload(config, tmp_path, 1), **options)
    (tmp_path / 'layers').write_text('in the way')
    with pytest.raises(BundleError, match='could not be written'):
        load_target(model_dirs / 'target', torch.float32, CPU, 64,
                    offload=offload(config, tmp_path, 1))


def test_the_command_line_says_what_is_wrong(bundle_maker, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv('MEMSPEC_CACHE', str(tmp_path / 'cache'))
    arguments = ['plan', str(bundle_maker.write()), '--dtype', 'float32', '--layers-mib']
    assert main([*arguments, '0.001']) == 1
    assert 'one layer in memory and 2 buffers' in capsys.readouterr().err
    assert main([*arguments, '-1']) == 1
    assert '--layers-mib is -1' in capsys.readouterr().err


# --- memory ---

SIZES = {'hidden_size': 512, 'intermediate_size': 1536, 'num_hidden_layers': 12,
         'num_attention_heads': 8, 'num_key_value_heads': 4, 'vocab_size': 2048}


@pytest.fixture
def sized(bundle_maker, tokenizer_dir, tmp_path):
    """A bundle of a target of 170 MB, nearly all of it layers."""
    import shutil
    directory = tmp_path / 'sized'
    build_llama(seed=1, **SIZES).save_pretrained(directory)
    for file in tokenizer_dir.iterdir():
        shutil.copy(file, directory)
    bundle_maker.manifest['target']['path'] = str(directory)
    return bundle_maker


def measured(bundle, layers_mib=0.0):
    return measuring.measure(measuring.Subject(
        str(bundle), 'float32', 'dense', 'cpu', 1, Demand(128, 4, 0), layers_mib))


@pytest.mark.slow
def test_self_speculation_takes_no_memory_and_offloading_gives_it_back(
        sized, tmp_path, monkeypatch):
    """Peak memory is that of the target alone within 1 %, and that of the budget where it is."""
    monkeypatch.setenv('MEMSPEC_CACHE', str(tmp_path / 'cache'))
    alone = measured(sized.write())
    sized.manifest['self_speculation'] = {
        'licence': 'MIT', 'provenance': 'none', 'options': {'depth': 2, 'check': 6}}
    drafting = measured(sized.write())
    assert drafting['measured_peak_mib'] == pytest.approx(alone['measured_peak_mib'], rel=0.01)
    config = LlamaConfig.from_hf(read_config(tmp_path / 'sized'))
    load_target(tmp_path / 'sized', torch.float32, CPU, 64, offload=Offload(
        64 * MIB, tmp_path / 'cache'))  # the first time, layers are written
    streamed = measured(sized.write(), 64.0)
    saved = 12 * layer_bytes(config, torch.float32) / MIB - 64
    found = drafting['measured_peak_mib'] - streamed['measured_peak_mib']
    assert saved - 8 < found < saved + 24  # a whole layer may be left over
    for figures in (alone, drafting, streamed):
        assert abs(figures['relative_error']) < 0.05


def test_the_footprint_counts_exits_and_what_stays_in_storage(sized, tmp_path):
    bundle = load_bundle(sized.write())
    locate_target(bundle)
    whole = FootprintModel(bundle, torch.float32, CPU)
    part = FootprintModel(bundle, torch.float32, CPU, layers_bytes=64 * MIB)
    config = LlamaConfig.from_hf(read_config(bundle.target_path))
    size = layer_bytes(config, torch.float32)
    kept = 64 * MIB // size
    assert whole.weight_bytes - part.weight_bytes == (12 - kept) * size
