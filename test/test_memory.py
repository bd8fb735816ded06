# SPDX-License-Identifier: Apache-2.0
"""What a bundle takes, and what is refused before anything is loaded."""

import subprocess
import sys

import pytest
import torch

from memspec_ros.memory import preflight
from memspec_ros.memory.footprint import affordable_capacity, draft_bytes, estimate, MIB
from memspec_ros.models.bundle import load_bundle
from memspec_ros.models.errors import InsufficientMemoryError
from memspec_ros.models.target_files import locate_target
from memspec_ros.runtime.runtime import Runtime, RuntimeOptions

CPU = torch.device('cpu')


@pytest.fixture(scope='module')
def bundle(full_bundle):
    bundle = load_bundle(full_bundle)
    locate_target(bundle)
    return bundle


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_footprint_is_what_is_allocated(bundle, full_bundle, dtype):
    footprint = estimate(bundle, dtype, CPU, context=100, max_gamma=4, capacity=2)
    name = str(dtype).removeprefix('torch.')
    runtime = Runtime.open(full_bundle, RuntimeOptions(dtype=name, context=100))
    try:
        state = runtime.controller.engine.state
        assert footprint.weights == runtime.target.weight_bytes
        assert footprint.kv_cache == state.kv.bytes
        assert footprint.hidden_states == sum(
            rows.numel() * rows.element_size() for rows in state.hidden.values())
    finally:
        runtime.close()


def test_a_draft_takes_twice_as_much_in_float32(bundle):
    spec = bundle.draft('top')
    half, full = (draft_bytes(bundle, spec, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert full == 2 * half
    # The file has a header besides its weights.
    assert half < spec.bytes < half + 4096
    assert draft_bytes(bundle, bundle.draft('lookup'), torch.float32) == 0


def test_footprint_grows_with_k_by_the_largest_drafts(bundle):
    totals = [estimate(bundle, torch.float32, CPU, 100, 4, capacity).total
              for capacity in range(6)]
    steps = [after - before for before, after in zip(totals, totals[1:])]
    sizes = sorted((draft_bytes(bundle, spec, torch.float32) for spec in bundle.drafts),
                   reverse=True)
    assert steps == sizes[:5]


def test_capacity_from_a_budget():
    assert affordable_capacity(100, [10, 30, 20, 0], budget=0) == 3
    assert affordable_capacity(100, [10, 30, 20, 0], budget=160) == 3
    assert affordable_capacity(100, [10, 30, 20, 0], budget=159) == 2
    # Whichever drafts come to be resident: the two smallest would fit, the two largest do not.
    assert affordable_capacity(100, [10, 30, 20, 0], budget=149) == 1
    assert affordable_capacity(100, [10], budget=50) == 0


def test_what_does_not_fit_is_refused_with_both_numbers(bundle):
    footprint = estimate(bundle, torch.float32, CPU, 100, 4, 2)
    needed = footprint.total
    preflight.check(footprint, available=needed + 5 * MIB, budget=needed, min_free=5 * MIB)
    with pytest.raises(InsufficientMemoryError, match=rf'{needed / MIB:.0f} MiB.*budget_mib'):
        preflight.check(footprint, available=1 << 40, budget=needed - 1, min_free=0)
    with pytest.raises(InsufficientMemoryError, match=r'5 MiB left free.* are available'):
        preflight.check(footprint, available=needed + 5 * MIB - 1, budget=0, min_free=5 * MIB)


def test_available_memory_is_read_from_the_system():
    available = preflight.available_bytes(CPU)
    assert 16 * MIB < available < 1 << 50


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
