# SPDX-License-Identifier: Apache-2.0
"""What is given back under memory pressure, in which order, and how it comes back."""

from __future__ import annotations

import threading

from fakes import Bench, counting, FakeDrafter, FakeKind
import pytest
import torch

from memspec_ros.memory.pressure import PressureReading
from memspec_ros.models.state import ParkedState
from memspec_ros.runtime.memory_guard import Level, MemoryGuard, NO_LIMIT, Thresholds
from memspec_ros.runtime.requests import Finish
from memspec_ros.runtime.worker import GenerationWorker, Job, JobState

MIN_FREE = 1000
PLENTY, SHORT = PressureReading(10_000), PressureReading(MIN_FREE - 1)


class Watched(Bench):
    """A controller of three drafts and a lookup, with a guard over it."""

    def __init__(self, capacity=3, gamma=4, bytes_each=500, **thresholds):
        super().__init__(
            {**{name: FakeKind(lambda: FakeDrafter(counting)) for name in 'abc'},
             'lookup': FakeKind(lambda: FakeDrafter(counting), slot_free=True)},
            capacity=capacity, gamma=gamma, bytes_each=bytes_each, step_sec=0.5, interval=1)
        self.thresholds = Thresholds(MIN_FREE, **{'recover_sec': 5.0, **thresholds})
        self.guard = MemoryGuard(self.controller, lambda: self.thresholds, self.clock)
        self.run(max_new_tokens=30)  # all drafts are loaded
        assert len(self.residency.resident) == capacity

    def park(self, name='talk', size=300):
        if self.controller.limits.sessions:
            self.controller.sessions.put(
                name, ParkedState([1], [torch.zeros(size, dtype=torch.uint8)]))

    def check(self, reading, seconds=0.5):
        self.clock.advance(seconds)
        return self.guard.check(reading)

    def given(self):
        limits = self.guard.limits
        return (len(self.controller.sessions), limits.drafts, limits.gamma, limits.requests)

    def until(self, reading, level, most=200):
        """Levels met on the way to ``level``."""
        met = []
        while self.guard.level is not level:
            if self.check(reading):
                met.append(self.guard.level)
            assert (most := most - 1)
        return met


@pytest.fixture
def watched():
    return Watched()


def test_one_step_a_check_in_order(watched):
    watched.park()
    seen = []
    for _ in range(8):
        watched.check(SHORT)
        watched.controller.settle()
        seen.append((*watched.given(), len(watched.residency.resident)))
    assert seen[:6] == [
        (0, NO_LIMIT, NO_LIMIT, True, 3),
        (0, 2, NO_LIMIT, True, 2),
        (0, 1, NO_LIMIT, True, 1),
        (0, 1, 2, True, 1),
        (0, 1, 1, True, 1),
        (0, 1, 1, False, 0)]  # nobody is served by the last one any more
    assert seen[6:] == seen[5:6] * 2 and not watched.check(SHORT)
    assert watched.guard.given_up == ['idle conversations', 'drafts beyond 1',
                                      'drafting beyond 1', 'new requests']
    assert '0 MiB available (system), memory.min_free_mib is 0' in watched.guard.reason


def test_everything_comes_back_step_by_step_the_last_first(watched):
    watched.park()
    down = watched.until(SHORT, Level.REQUESTS)
    assert down == [Level.SESSIONS, Level.DRAFTS, Level.DRAFTS, Level.GAMMA, Level.GAMMA,
                    Level.REQUESTS]
    start = watched.clock()
    assert watched.until(PLENTY, Level.NORMAL) == [*down[-2::-1], Level.NORMAL]
    # The first step after recover_sec, each further one after as long again.
    assert watched.clock() - start == pytest.approx(6 * 5.0, abs=1.0)
    assert watched.given() == (0, NO_LIMIT, NO_LIMIT, True) and watched.guard.given_up == []
    watched.run(max_new_tokens=30)
    assert len(watched.residency.resident) == 3


def test_what_is_not_there_is_passed_over():
    """No conversation is kept and one draft is in memory: the drafts' length is what is left."""
    watched = Watched(capacity=1)
    assert watched.check(SHORT) and watched.given() == (0, NO_LIMIT, 2, True)
    watched.park()
    assert len(watched.controller.sessions) == 0  # what would be kept is none of the spare
    watched = Watched(capacity=0, gamma=1)
    assert watched.check(SHORT) and not watched.guard.limits.requests


def test_between_calm_and_pressure_nothing_moves(watched):
    """No flapping: from just below the limit to just above it is no recovery."""
    watched.check(SHORT)
    before = watched.given()
    for _ in range(200):
        assert not watched.check(PressureReading(int(MIN_FREE * 1.2)))
    assert watched.given() == before


def test_calm_must_last(watched):
    watched.until(SHORT, Level.GAMMA)
    for _ in range(20):
        for _ in range(9):
            assert not watched.check(PLENTY)
        assert not watched.check(PressureReading(int(MIN_FREE * 1.1)))
    assert watched.guard.level is Level.GAMMA


def test_a_draft_comes_back_only_where_it_fits(watched):
    watched.until(SHORT, Level.DRAFTS)
    assert watched.guard.limits.drafts == 2
    for _ in range(100):  # 500 bytes more would be within the margin
        assert not watched.check(PressureReading(int(MIN_FREE * 1.25) + 499))
    assert watched.until(PressureReading(int(MIN_FREE * 1.25) + 500), Level.SESSIONS)


def test_what_is_regretted_comes_back_later_and_later(watched):
    """Memory that is there only while we do not take it: ever rarer attempts, not a flap."""
    waits = []
    for _ in range(8):
        watched.park()
        watched.check(SHORT)
        start = watched.clock()
        watched.until(PLENTY, Level.NORMAL)
        waits.append(watched.clock() - start)
    assert waits == pytest.approx([5.0, 10.0, 20.0, 40.0, 80.0, 80.0, 80.0, 80.0], abs=0.6)
    # Forgotten after a real calm.
    watched.until(PLENTY, Level.NORMAL, 1000)
    for _ in range(200):
        watched.check(PLENTY)
    watched.park()
    watched.check(SHORT)
    start = watched.clock()
    watched.until(PLENTY, Level.NORMAL)
    assert watched.clock() - start == pytest.approx(5.0, abs=0.6)


def stalls(percent, seconds):
    return PressureReading(1 << 40, 'system', percent, seconds)


def test_waiting_programs_are_pressure_too(watched):
    assert not watched.check(stalls(9.9, 0.0))
    assert watched.check(stalls(10.0, 0.1))
    assert 'waited for memory 10 % of the time, memory.stall_percent is 10' in watched.guard.reason
    for _ in range(100):  # less, but not calm
        assert not watched.check(stalls(5.0, 0.1))
    watched.until(stalls(4.9, 0.1), Level.NORMAL)


def test_the_mean_of_ten_seconds_does_not_lead_on_when_nobody_waits_any_more(watched):
    assert watched.check(stalls(40.0, 5.0))
    assert watched.check(stalls(45.0, 5.2))
    for _ in range(20):
        assert not watched.check(stalls(30.0, 5.2)), watched.guard.reason
    assert watched.guard.level is Level.DRAFTS


def test_stalls_can_be_disregarded():
    watched = Watched(stall_percent=0.0)
    for second in range(20):
        assert not watched.check(stalls(100.0, second))


def test_thresholds_are_read_at_every_check(watched):
    watched.thresholds = Thresholds(1 << 20)
    assert watched.check(PLENTY)
    watched.thresholds = Thresholds(0, recover_sec=0.0)
    watched.until(PLENTY, Level.NORMAL)
    assert not watched.check(PressureReading(0))  # nothing is to be left free


# --- what the controller makes of it ---

def test_the_running_request_ends_as_it_would_have(watched):
    expected, *_ = watched.run(max_new_tokens=60)
    ids, drafted, held = [], [], []
    for count, chunk in enumerate(watched.controller.generate(
            watched.request(max_new_tokens=60))):
        watched.check(SHORT, 0.0)
        ids += chunk.token_ids
        if chunk.step is not None:
            drafted.append(chunk.step.drafted)
            held.append(len(watched.residency.resident))
            if count > 1:
                assert chunk.step.draft == watched.controller.active != ''
    assert chunk.finish is Finish.LENGTH and ids == expected
    assert not watched.guard.limits.requests
    assert held[0] == 3 and held[-1] == 1 and held == sorted(held, reverse=True)
    assert drafted[0] == 4 and set(drafted[8:-1]) == {1}


def test_one_parked_in_that_very_moment_goes_with_the_next_check(watched):
    watched.check(SHORT)
    watched.controller.sessions.put('late', ParkedState([1], [torch.zeros(9)]))
    watched.check(SHORT)
    assert len(watched.controller.sessions) == 0


def test_a_load_in_flight_between_requests_is_given_up(watched):
    watched.residency.release('a')
    watched.residency.update([('a', 1.0)], None)
    assert watched.residency.loading == 'a'
    watched.until(SHORT, Level.REQUESTS)
    watched.controller.settle()
    watched.controller.settle()
    assert watched.residency.resident == [] and watched.residency.loading is None


# --- errands of the worker ---

def test_an_errand_runs_on_the_worker_between_requests(watched):
    told = []
    worker = GenerationWorker(watched.controller, lambda: 4, told.append)
    where, done = [], threading.Event()

    def note():
        where.append(threading.current_thread().name)
        done.set()
    worker.between(note)
    assert done.wait(10) and where == ['memspec-worker']
    gate, order = threading.Event(), []

    def held():
        gate.wait(10)
        return watched.request()
    for name in 'xy':
        worker.submit(Job(name, watched.request(), prepare=held, on_chunk=lambda job, chunk: (
            order.append(job.id) if chunk.last else None)))
    while worker.running is None:
        done.wait(0.01)
    worker.between(lambda: order.append('replaced'))
    worker.between(lambda: order.append('errand'))
    worker.between(lambda: (order.append('errand'), 1 / 0))
    gate.set()
    for _ in range(1000):
        if worker.find('y').state is JobState.ENDED:
            break
        done.clear()
        done.wait(0.01)
    worker.close()
    assert order == ['x', 'errand', 'y'] and 'ZeroDivisionError' in told[0]
