# SPDX-License-Identifier: Apache-2.0
"""How many threads a pass takes: what was faster here, remembered, and only while it runs."""

import json

import pytest
import torch

from memspec_ros.models import kernel_choice, threads
from memspec_ros.models.threads import choose_threads, FEW_ROWS, Threads


@pytest.fixture(autouse=True)
def four_threads(monkeypatch, tmp_path):
    """PyTorch has four threads, and the cache directory is empty."""
    monkeypatch.setenv('MEMSPEC_CACHE', str(tmp_path))
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield tmp_path / kernel_choice.FILE_NAME
    torch.set_num_threads(before)


class Machine:
    """A clock, and passes whose time is ``seconds(rows, threads)``."""

    def __init__(self, seconds):
        self.seconds, self.now, self.passes = seconds, 0.0, []

    def clock(self):
        return self.now

    def forward(self, rows):
        self.passes.append((rows, torch.get_num_threads()))
        self.now += self.seconds(rows, torch.get_num_threads())


def choose(seconds, name='target'):
    machine = Machine(seconds)
    return choose_threads(name, machine.forward, machine.clock), machine


def test_steps_and_prefill_each_take_what_is_fastest():
    # A step of memory that one core saturates, and three wake-ups; a prefill of arithmetic.
    found, machine = choose(lambda rows, count: rows * 1e-3 / count + count * 1e-3)
    assert found == Threads(few=2, many=4)
    assert {count for _, count in machine.passes} == {1, 2, 4}
    assert {rows for rows, _ in machine.passes} == {1, 5, 64}
    assert torch.get_num_threads() == 4


def test_threads_that_gain_nothing_are_left_to_others():
    assert choose(lambda rows, count: 1e-3 - count * 1e-6)[0] == Threads(1, 1)
    assert choose(lambda rows, count: 1e-3 / count, 'other')[0] == Threads(4, 4)


def test_a_long_prefill_is_not_timed():
    found, machine = choose(lambda rows, count: 0.2 * count)
    assert found == Threads(1, 4) and 64 not in {rows for rows, _ in machine.passes}


def test_what_came_out_is_remembered_by_target(four_threads):
    first, _ = choose(lambda rows, count: 1e-3 * count)
    again, machine = choose(lambda rows, count: 1e-3 / count)
    assert again == first == Threads(1, 1) and not machine.passes
    assert choose(lambda rows, count: 1e-3 / count, 'another')[1].passes
    assert len(json.loads(four_threads.read_text())) == 2


@pytest.mark.parametrize('damage', [[1], [0, 4], [1, 5], [True, 1], 'no', [1.5, 2]])
def test_a_damaged_memory_is_measured_anew(four_threads, damage):
    choose(lambda rows, count: 1e-3 * count)
    four_threads.write_text(json.dumps(dict.fromkeys(json.loads(four_threads.read_text()),
                                                     damage)))
    found, machine = choose(lambda rows, count: 1e-3 / count)
    assert found == Threads(4, 4) and machine.passes


def test_one_thread_leaves_nothing_to_choose():
    torch.set_num_threads(1)
    found, machine = choose(lambda rows, count: 1e-3)
    assert found == Threads() and not machine.passes


def test_a_failed_measurement_leaves_the_number_as_it_was():
    def forward(rows):
        raise RuntimeError('no')
    with pytest.raises(RuntimeError, match='no'):
        choose_threads('target', forward)
    assert torch.get_num_threads() == 4


def test_threads_are_set_while_a_pass_runs():
    chosen = Threads(few=1, many=3)
    for rows, count in ((1, 1), (FEW_ROWS, 1), (FEW_ROWS + 1, 3), (64, 3)):
        with chosen.running(rows):
            assert torch.get_num_threads() == count
        assert torch.get_num_threads() == 4
    with pytest.raises(ValueError), chosen.running(1):
        raise ValueError
    assert torch.get_num_threads() == 4
    with Threads().running(1):
        assert torch.get_num_threads() == 4
    assert threads.FEW_ROWS < 64
