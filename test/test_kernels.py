# SPDX-License-Identifier: Apache-2.0
"""16-bit matrices for FBGEMM, the choice of a kernel, the embedding that stays in its file."""

import json

from conftest import build_llama, PROMPTS
import pytest
import torch
import torch.nn.functional as F

from memspec_ros.models import half as half_module
from memspec_ros.models import kernel_choice, packing
from memspec_ros.models.errors import BundleError
from memspec_ros.models.half import half, HalfMatrix, has_half
from memspec_ros.models.packing import linear, pack
from memspec_ros.models.quantized import StackedMatrix
from memspec_ros.models.target import load_reference, load_target
from memspec_ros.models.weights import Checkpoint

CPU = torch.device('cpu')
needs_half = pytest.mark.skipif(not has_half(CPU, torch.bfloat16),
                                reason='no FBGEMM in this PyTorch')


@pytest.fixture
def chosen(monkeypatch):
    """Decide which kernel is thought to be faster; returns how."""
    def choose(half_is_faster):
        monkeypatch.setattr(packing, 'half_pays',
                            lambda dtype, device, other: half_is_faster
                            and has_half(device, dtype))
    return choose


def target_of(model, directory, dtype=torch.bfloat16, **options):
    model.save_pretrained(directory)
    return load_target(directory, dtype, CPU, 64, **options)


def logits(target, ids, chunks=(45,)):
    state, rows, place = target.new_state(60), [], 0
    for size in chunks:
        rows.append(target.forward(state, ids[place:place + size]))
        place += size
        state.hold(place)
    return torch.cat(rows)


# --- matrices ---

@needs_half
@pytest.mark.parametrize('rows', [1, 2, 5, 9, 64])
def test_they_multiply_as_float32_does(rows):
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(96, 160, generator=generator).bfloat16()
    bias = torch.randn(96, generator=generator)
    x = torch.randn(2, rows, 160, generator=generator)
    matrix = half(weight)
    assert matrix.shape == (96, 160) and matrix.nbytes == weight.nbytes
    for b in (None, bias):
        torch.testing.assert_close(linear(x, matrix, b), F.linear(x, weight.float(), b),
                                   rtol=1e-5, atol=1e-4)
    assert torch.equal(linear(x[1, 0], matrix), linear(x, matrix)[1, 0])
    # What comes in another type goes out in it.
    assert linear(x.bfloat16(), matrix).dtype == torch.bfloat16


@needs_half
def test_a_row_does_not_depend_on_the_rows_beside_it():
    generator = torch.Generator().manual_seed(0)
    matrix = half(torch.randn(320, 1536, generator=generator).bfloat16())
    x = torch.randn(1, 40, 1536, generator=generator)
    whole = linear(x, matrix)
    for first, last in ((0, 1), (3, 5), (7, 16), (20, 40)):
        assert torch.equal(linear(x[:, first:last], matrix), whole[:, first:last])


@needs_half
def test_large_ones_are_packed_in_parts(monkeypatch):
    monkeypatch.setattr(half_module, '_BLOCK_ELEMENTS', 64 * 64)
    weight = torch.randn(200, 64).bfloat16()
    matrix = half(weight)
    assert isinstance(matrix, StackedMatrix) and len(matrix.parts) == 4
    assert matrix.kind == 'float16' and matrix.shape == (200, 64)
    x = torch.randn(1, 3, 64)
    torch.testing.assert_close(linear(x, matrix), F.linear(x, weight.float()))


@needs_half
def test_values_that_float16_has_not_got_are_held_otherwise(chosen):
    chosen(True)
    weight = torch.ones(32, 32).bfloat16()
    assert isinstance(pack(weight, 'auto'), HalfMatrix)
    weight[3, 4] = 1e5
    assert half(weight) is None
    x = torch.ones(1, 1, 32, dtype=torch.bfloat16)
    assert float(linear(x, pack(weight, 'auto'))[0, 0, 3]) == pytest.approx(1e5, rel=0.01)
    # float32 would lose digits.
    assert half(torch.ones(32, 32)) is None


def test_without_the_operator_the_other_kernel_is_taken(monkeypatch, model_dirs):
    class Broken:
        def __init__(self, weight):
            raise RuntimeError("Didn't find engine for operation quantized::linear_prepack_fp16")
    monkeypatch.setattr(half_module, 'HalfMatrix', Broken)
    half_module._half_works.cache_clear()
    try:
        assert not has_half(CPU, torch.bfloat16)
        target = load_target(model_dirs / 'target', torch.bfloat16, CPU, 64)
        assert target.weight_kinds == ('bfloat16',)
        assert target.model.stream_dtype is torch.bfloat16
        assert logits(target, PROMPTS[3]).isfinite().all()
    finally:
        monkeypatch.undo()
        half_module._half_works.cache_clear()


def test_a_kernel_that_computes_wrongly_is_not_used(monkeypatch):
    class Wrong(HalfMatrix):
        def multiply(self, x):
            return super().multiply(x) * 1.01
    if not has_half(CPU, torch.bfloat16):
        pytest.skip('no FBGEMM in this PyTorch')
    monkeypatch.setattr(half_module, 'HalfMatrix', Wrong)
    half_module._half_works.cache_clear()
    try:
        assert not has_half(CPU, torch.bfloat16)
    finally:
        monkeypatch.undo()
        half_module._half_works.cache_clear()


# --- targets ---

@needs_half
@pytest.mark.parametrize('tied', [False, True])
def test_logits_are_those_of_float32_with_the_same_weights(tmp_path, chosen, tied):
    """Stated in docs/benchmarks.md: 1e-3 of a logit, where bfloat16 is off by tenths."""
    chosen(True)
    model = build_llama(1, tie_word_embeddings=tied).bfloat16()
    target = target_of(model, tmp_path)
    assert target.weight_kinds == ('float16',) and target.model.stream_dtype is torch.float32
    ids = PROMPTS[3]
    # Loaded anew: as bfloat16 the model above also rounded what rotates its positions.
    reference = load_reference(tmp_path, torch.float32, CPU)
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    for chunks in ((45,), (40, 1, 1, 3)):
        assert (logits(target, ids, chunks) - expected).abs().max() < 1e-3
    chosen(False)
    other = load_target(tmp_path, torch.bfloat16, CPU, 64)
    assert other.weight_kinds == ('bfloat16',)
    assert (logits(other, ids) - expected).abs().max() > 1e-3


@needs_half
@pytest.mark.parametrize('packed', [False, True])
def test_float16_is_held_so_too_and_plain_tensors_of_it_are_not_taken_for_it(model_dirs, chosen,
                                                                             packed):
    chosen(True)
    target = load_target(model_dirs / 'target', torch.float16, CPU, 64, packed=packed)
    assert target.model.stream_dtype is (torch.float32 if packed else torch.float16)
    full = load_target(model_dirs / 'target', torch.float32, CPU, 64)
    ids = PROMPTS[3]
    assert (logits(target, ids) - logits(full, ids)).abs().mean() < 0.05


@needs_half
def test_a_tied_table_is_in_memory_once(tmp_path, chosen):
    chosen(True)
    model = build_llama(1, tie_word_embeddings=True).bfloat16()
    target = target_of(model, tmp_path)
    table = model.model.embed_tokens.weight.detach()
    assert target.model.embedding.nbytes == 0 and target.model.head.nbytes == table.nbytes
    assert torch.equal(target.model.embed(torch.tensor([[5, 3], [0, 5]])),
                       F.embedding(torch.tensor([[5, 3], [0, 5]]), table))
    assert torch.equal(target.model.head_rows([7, 7, 1]), table[[7, 7, 1]])
    plain = load_target(tmp_path, torch.bfloat16, CPU, 64, packed=False)
    assert torch.equal(plain.model.head_rows([7, 7, 1]), table[[7, 7, 1]])


def test_rows_of_an_untied_head_are_to_be_had_too(tmp_path):
    model = build_llama(1).bfloat16()
    target = target_of(model, tmp_path)
    assert torch.equal(target.model.head_rows([2, 9]), model.lm_head.weight.detach()[[2, 9]])


# --- a table in its file ---

def test_a_table_gives_rows_in_the_type_asked_for(tmp_path):
    from safetensors.torch import save_file
    table = torch.randn(10, 6)
    save_file({'before': torch.ones(3), 'x': table}, tmp_path / 'x')
    with Checkpoint([tmp_path / 'x']) as checkpoint:
        stored = checkpoint.table('x', torch.bfloat16)
    assert torch.equal(stored.rows([9, 0, 4, 4]), table[[9, 0, 4, 4]].bfloat16())
    assert stored.rows([]).shape == (0, 6)
    for wrong in (-1, 10):
        with pytest.raises(IndexError, match=f'row {wrong} of a table of 10'):
            stored.rows([wrong])


def test_a_file_that_shrinks_is_named_and_one_that_goes_away_stays_readable(tmp_path):
    from safetensors.torch import save_file
    table = torch.randn(10, 6)
    for name in ('shrinks', 'goes'):
        save_file({'x': table}, tmp_path / name)
    shrinks, goes = (Checkpoint([tmp_path / name]).table('x', torch.float32)
                     for name in ('shrinks', 'goes'))
    (tmp_path / 'goes').unlink()
    assert torch.equal(goes.rows([3]), table[[3]])
    with (tmp_path / 'shrinks').open('r+b') as file:
        file.truncate(150)
    with pytest.raises(BundleError, match='shrinks.*shorter'):
        shrinks.rows([9])


# --- the choice ---

@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """An empty cache directory, and a measurement that is counted; returns (file, calls)."""
    calls = []
    monkeypatch.setenv('MEMSPEC_CACHE', str(tmp_path / 'cache'))
    monkeypatch.setattr(kernel_choice, 'measure', lambda *given: calls.append(given) or True)
    kernel_choice._remembered.cache_clear()
    yield tmp_path / 'cache' / kernel_choice.FILE_NAME, calls
    kernel_choice._remembered.cache_clear()


def ask():
    kernel_choice._remembered.cache_clear()  # as in a new process
    return kernel_choice.half_pays(torch.bfloat16, CPU, packing._multiplier)


@needs_half
def test_it_is_measured_once_on_a_machine(fresh):
    file, calls = fresh
    assert ask() and ask() and len(calls) == 1
    key, = json.loads(file.read_text())
    assert torch.__version__ in key and 'bfloat16' in key
    file.write_text(json.dumps({key: False}))
    assert not ask() and len(calls) == 1
    file.write_text(json.dumps({'another machine': False}))
    assert ask() and len(calls) == 2
    assert set(json.loads(file.read_text())) == {key, 'another machine'}


@needs_half
@pytest.mark.parametrize('damage', [b'', b'{"', b'[1, 2]', b'\xff\xfe', b'null', b'[' * 100_000])
def test_a_damaged_file_is_made_anew(fresh, damage):
    file, calls = fresh
    file.parent.mkdir()
    file.write_bytes(damage)
    assert ask() and len(calls) == 1
    assert list(json.loads(file.read_text()).values()) == [True]
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@needs_half
def test_an_answer_that_is_none_is_not_taken_for_one(fresh):
    file, calls = fresh
    assert ask()
    key, = json.loads(file.read_text())
    file.write_text(json.dumps({key: 'yes'}))
    assert ask() and len(calls) == 2


@needs_half
def test_a_cache_that_cannot_be_written_is_no_obstacle(fresh, monkeypatch, tmp_path):
    (tmp_path / 'occupied').write_text('a file, no directory')
    monkeypatch.setenv('MEMSPEC_CACHE', str(tmp_path / 'occupied'))
    assert ask()


@needs_half
def test_the_measurement_prefers_what_is_faster(monkeypatch):
    import time
    monkeypatch.setattr(kernel_choice, '_SHAPE', (64, 64))
    monkeypatch.setattr(kernel_choice, '_COPIES', 2)
    monkeypatch.setattr(kernel_choice, '_ROUNDS', 2)
    assert kernel_choice.measure(torch.bfloat16, lambda weight: lambda x: time.sleep(0.01))
    monkeypatch.setattr(HalfMatrix, 'multiply', lambda self, x: time.sleep(0.01))
    assert not kernel_choice.measure(torch.bfloat16, lambda weight: lambda x: None)
