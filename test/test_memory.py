# SPDX-License-Identifier: Apache-2.0
"""What a bundle takes, and what is refused before anything is loaded."""

from contextlib import contextmanager
import math
import subprocess
import sys

import pytest
import torch

from memspec_ros.memory import preflight
from memspec_ros.memory.allocator import MIB
from memspec_ros.memory.footprint import Demand, draft_bytes, Footprint, FootprintModel
from memspec_ros.memory.pressure import gauge_of
from memspec_ros.models.bundle import load_bundle
from memspec_ros.models.errors import InsufficientMemoryError
from memspec_ros.models.half import has_half
from memspec_ros.models.target_files import locate_target
from memspec_ros.models.weights import Checkpoint
from memspec_ros.runtime.runtime import Runtime, RuntimeOptions

CPU = torch.device('cpu')
PACKED = """
import torch
from memspec_ros.memory import allocator, process
from memspec_ros.models.half import HalfMatrix
weight = torch.ones(4096, 576)
HalfMatrix(weight)
with allocator.compact():
    allocator.trim()
    before = process.resident_bytes()
    held = [HalfMatrix(weight) for _ in range(16)]
    allocator.trim()
    taken = process.resident_bytes() - before
print(taken / sum(one.nbytes + one.padding for one in held))
"""


@pytest.fixture(scope='module')
def bundle(full_bundle):
    bundle = load_bundle(full_bundle)
    locate_target(bundle)
    return bundle


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_footprint_is_what_is_allocated(bundle, full_bundle, dtype):
    footprint = FootprintModel(bundle, dtype, CPU).of(Demand(100, 4, 2))
    name = str(dtype).removeprefix('torch.')
    runtime = Runtime.open(full_bundle, RuntimeOptions(dtype=name, context=100, max_gamma=4))
    try:
        state = runtime.controller.engine.state
        assert footprint.weights == runtime.target.weight_bytes
        assert footprint.kv_cache == state.kv.bytes
        assert footprint.hidden_states == sum(
            rows.numel() * rows.element_size() for rows in state.hidden.values())
    finally:
        runtime.close()


def test_a_draft_takes_twice_as_much_in_float32(bundle, monkeypatch):
    monkeypatch.setattr('memspec_ros.memory.footprint.prefers_half', lambda *given: False)
    spec = bundle.draft('top')
    half, full = (draft_bytes(bundle, spec, dtype, CPU)
                  for dtype in (torch.bfloat16, torch.float32))
    assert full == 2 * half
    # The file has a header besides its weights.
    assert half < spec.bytes < half + 4096
    assert draft_bytes(bundle, bundle.draft('lookup'), torch.float32, CPU) == 0


@contextmanager
def drafter_in_memory(directory, bundle, kind, dtype):
    """Load the first draft of that kind; gives its spec and its drafter."""
    spec = next(spec for spec in bundle.drafts if spec.kind == kind)
    runtime = Runtime.open(directory, RuntimeOptions(dtype=dtype, context=100))
    try:
        residency = runtime.controller.residency
        residency.update([(spec.id, 1.0)], None)
        assert residency.wait(20.0) is not False and residency.poll()
        yield spec, residency.drafter(spec.id)
    finally:
        runtime.close()


@pytest.mark.skipif(not has_half(CPU, torch.bfloat16), reason='no FBGEMM here')
@pytest.mark.parametrize('kind', ['shared_layers', 'feature'])
def test_what_fbgemm_fills_up_is_counted(full_bundle, bundle, monkeypatch, kind):
    monkeypatch.setattr('memspec_ros.models.packing.half_pays', lambda *given: True)
    with drafter_in_memory(full_bundle, bundle, kind, 'bfloat16') as (spec, drafter):
        matrices = [matrix for layer in drafter.layers for matrix in layer.matrices()]
        if kind == 'feature':
            matrices += drafter.mixer.blocks
        padding = sum(matrix.padding for matrix in matrices)
        with Checkpoint([bundle.weight_file(spec)]) as weights:
            assert draft_bytes(bundle, spec, torch.bfloat16, CPU) == 2 * weights.elements + padding
        # Columns are laid out in blocks of 512.
        assert padding == sum(2 * matrix.shape[0] * (-matrix.shape[1] % 512)
                              for matrix in matrices) > 0


@pytest.mark.skipif(not has_half(CPU, torch.bfloat16), reason='no FBGEMM here')
def test_fbgemm_takes_what_is_counted():
    """Of the system, in a process whose allocator keeps nothing back."""
    said = subprocess.run([sys.executable, '-c', PACKED], check=True, capture_output=True,
                          text=True).stdout
    assert float(said) == pytest.approx(1.0, rel=0.02)


@pytest.fixture(scope='module')
def model(bundle):
    return FootprintModel(bundle, torch.float32, CPU, runtime=300 * MIB)


def test_footprint_grows_with_k_by_the_largest_drafts(model):
    drafts = [model.of(Demand(100, 4, capacity)).drafts for capacity in range(8)]
    sizes = sorted(model.draft_bytes.values(), reverse=True)
    assert [after - before for before, after in zip(drafts, drafts[1:])] == sizes
    totals = [model.of(Demand(100, 4, capacity)).total for capacity in range(7)]
    assert totals == sorted(set(totals))


def test_without_speculation_no_draft_is_counted(model):
    plain, drafting = model.of(Demand(100, 0, 2)), model.of(Demand(100, 4, 0))
    assert plain.drafts == plain.draft_caches == plain.shared_head == plain.loading == 0
    # Slot-free drafts and the depths that drafts read are there at any K.
    assert drafting.draft_caches > 0 and drafting.hidden_states > 2 * plain.hidden_states


@pytest.mark.parametrize('kind', ['causal_lm', 'shared_layers', 'feature'])
def test_draft_caches_are_what_is_allocated(full_bundle, bundle, model, kind):
    with drafter_in_memory(full_bundle, bundle, kind, 'float32') as (spec, drafter):
        if kind == 'causal_lm':
            drafter.lm.forward([1])  # allocates lazily
            allocated = sum(layer.keys.nbytes + layer.values.nbytes
                            for layer in drafter.lm.cache.layers)
        else:
            allocated = drafter.kv.bytes
        assert model.cache_bytes(spec, 105) == allocated


def test_two_sessions_take_twice_the_keys_and_values(model):
    one, two = (model.of(Demand(100, 4, 2, sessions)) for sessions in (1, 2))
    assert (two.kv_cache, two.hidden_states) == (2 * one.kv_cache, 2 * one.hidden_states)
    assert two.draft_caches == one.draft_caches


def test_no_more_context_than_the_target_was_made_for(model):
    assert model.of(Demand(1 << 20, 4, 2)) == model.of(Demand(512, 4, 2))


def test_the_peak_is_while_loading_or_while_running():
    small = {name: 1 for name in ('kv_cache', 'hidden_states', 'logits', 'activations',
                                  'shared_head', 'drafts', 'draft_caches', 'loading', 'kernels')}
    assert Footprint(weights=100, layer=50, **small).needed == 151  # the shared head counts too
    assert Footprint(weights=100, layer=2, ranker=5, runtime=70, **small).needed == 114
    assert Footprint(weights=100, layer=2, ranker=5, runtime=70, **small).total == 184


def test_capacity_from_the_room_there_is(model):
    demand = Demand(100, 4)
    needed = [model.of(Demand(100, 4, capacity)).needed for capacity in range(7)]
    assert model.affordable_capacity(demand, needed[6] + 1) == 6
    assert [model.affordable_capacity(demand, size) for size in needed] == list(range(7))
    # Whichever drafts come to be resident: the smallest would fit, the largest does not.
    assert model.affordable_capacity(demand, needed[1] - 1) == 0
    assert model.affordable_capacity(demand, -5) == 0


def test_room_is_what_budget_and_free_memory_leave():
    assert preflight.room_bytes(available=1000, runtime=300, budget=0, min_free=100) == 900
    assert preflight.room_bytes(available=1000, runtime=300, budget=700, min_free=100) == 400
    assert preflight.room_bytes(available=450, runtime=300, budget=900, min_free=100) == 350


def test_what_does_not_fit_is_refused_with_both_numbers(model):
    footprint, least = model.of(Demand(100, 4, 2)), model.of(Demand(100, 4, 0))
    total, needed = footprint.total, footprint.needed
    preflight.check(footprint, least, available=needed + 5 * MIB, budget=total, min_free=5 * MIB)
    with pytest.raises(InsufficientMemoryError,
                       match=rf'{total / MIB:.0f} MiB.*budget_mib allows.*cache_capacity.*'
                             rf'{math.ceil(least.total / MIB)} is the least that works'):
        preflight.check(footprint, least, available=1 << 40, budget=total - 1, min_free=0)
    with pytest.raises(InsufficientMemoryError, match=r'5 MiB left free.* are available'):
        preflight.check(footprint, least, available=needed + 5 * MIB - 1, budget=0,
                        min_free=5 * MIB)
    with pytest.raises(InsufficientMemoryError, match='lower context.max_tokens or draft'):
        preflight.check(least, least, available=0, budget=0, min_free=0)


def test_available_memory_is_read_from_the_system():
    reading = gauge_of(CPU).read()
    assert 16 * MIB < reading.available < 1 << 50 and reading.source in ('system', 'control group')


HOLD = """
from memspec_ros.memory.preflight import machine_lock
with machine_lock():
    print('held', flush=True)
    input()
"""


def test_two_processes_do_not_measure_at_once():
    other = subprocess.Popen([sys.executable, '-c', HOLD], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == 'held\n'
        with pytest.raises(InsufficientMemoryError, match='another node'):
            with preflight.machine_lock(timeout_sec=0.2):
                pass
        other.communicate('\n', timeout=20)
        with preflight.machine_lock(timeout_sec=5.0):
            pass
    finally:
        other.kill()
        other.wait()
