# SPDX-License-Identifier: Apache-2.0
"""The queue and its one thread: order, limits, cancellation, kept results, faults survived."""

import threading

from fakes import FakeClock
import pytest

from memspec_ros.decoding.stats import GenerationStats
from memspec_ros.models.errors import InvalidRequestError
from memspec_ros.runtime.requests import Chunk, Finish, PreparedRequest
from memspec_ros.runtime.worker import (
    GenerationWorker,
    Job,
    JobState,
    KEPT_RESULTS,
    KEPT_SEC,
    QueueFullError,
)

PATIENCE = 10.0


class SteppingController:
    """Answers with one chunk for each permit of ``gate``, and then the last one."""

    def __init__(self, pieces=2):
        self.clock = FakeClock()
        self.pieces = pieces
        self.gate = threading.Semaphore(0)
        self.served = []
        self.threads = set()
        self.fail = None

    def generate(self, request, cancelled):
        self.served.append(request.prompt_text)
        self.threads.add(threading.current_thread().name)
        for seq in range(self.pieces):
            while not self.gate.acquire(timeout=0.002):
                if cancelled():
                    yield self._last(seq, Finish.CANCELED)
                    return
            if self.fail is not None:
                raise self.fail
            yield Chunk(seq, 'ab', [seq])
        yield self._last(self.pieces, Finish.LENGTH)

    @staticmethod
    def _last(seq, finish):
        return Chunk(seq, '.', [9], last=True, finish=finish, stats=GenerationStats())

    def let_through(self, answers=1):
        self.gate.release(answers * self.pieces)


class House:
    def __init__(self, max_queue=8):
        self.controller = SteppingController()
        self.logs = []
        self.max_queue = max_queue
        self.worker = GenerationWorker(self.controller, lambda: self.max_queue,
                                       self.logs.append)
        self.ended = threading.Semaphore(0)
        self.chunks = []

    def submit(self, name, on_chunk=None, **options):
        def note(job, chunk):
            self.chunks.append((job.id, chunk))
            if chunk.last:
                self.ended.release()
        job = Job(name, PreparedRequest([1], name, 4), on_chunk=on_chunk or note, **options)
        return job, self.worker.submit(job)

    def wait(self, count=1):
        for _ in range(count):
            assert self.ended.acquire(timeout=PATIENCE)

    def until_running(self, name):
        for _ in range(5000):
            running = self.worker.running
            if running is not None and running.id == name:
                return
            threading.Event().wait(0.002)
        raise AssertionError(f'{name} does not run')


@pytest.fixture
def house():
    house = House()
    yield house
    house.worker.close()
    assert not house.worker.alive


def test_an_answer_arrives_in_chunks_and_is_kept(house):
    job, position = house.submit('a')
    house.controller.let_through()
    house.wait()
    assert position == 0 and house.controller.threads == {'memspec-worker'}
    assert [chunk.text for _, chunk in house.chunks] == ['ab', 'ab', '.']
    assert (job.text, job.token_ids, job.finish) == ('abab.', [0, 1, 9], Finish.LENGTH)
    assert job.state is JobState.ENDED and house.worker.find('a') is job
    assert house.worker.find('b') is None


def test_a_full_queue_refuses_at_once(house):
    """Pitfall 32."""
    house.submit('a')
    house.until_running('a')
    house.max_queue = 2
    assert house.submit('b')[1] == 1 and house.submit('c')[1] == 2
    with pytest.raises(QueueFullError, match='2 requests wait'):
        house.submit('d')
    house.controller.let_through(3)
    house.wait(3)
    assert house.controller.served == ['a', 'b', 'c']


def test_an_id_in_use_is_refused_waiting_running_or_kept(house):
    house.submit('a')
    house.until_running('a')
    house.submit('b')
    for name in 'ab':
        with pytest.raises(InvalidRequestError, match=f"'{name}' is in use"):
            house.submit(name)
    house.controller.let_through(2)
    house.wait(2)
    with pytest.raises(InvalidRequestError, match='still kept'):
        house.submit('a')


def test_priority_first_then_turns_then_arrival(house):
    house.submit('first')
    house.until_running('first')
    for name, client, priority in (('x1', 'x', 0), ('x2', 'x', 0), ('x3', 'x', 0),
                                   ('y1', 'y', 0), ('urgent', 'x', 5), ('y2', 'y', 0)):
        house.submit(name, client=client, priority=priority)
    house.controller.let_through(7)
    house.wait(7)
    order = house.controller.served
    assert order[:2] == ['first', 'urgent']
    # x has been served once already, so y comes next; then they take turns.
    assert order[2:] == ['y1', 'x1', 'y2', 'x2', 'x3']


def test_positions_count_what_is_served_before(house):
    house.submit('a')
    house.until_running('a')
    assert house.submit('b')[1] == 1
    assert house.submit('c', priority=3)[1] == 1
    assert house.submit('d')[1] == 3


def test_cancel_reaches_running_and_waiting_jobs(house):
    jobs = [house.submit(name)[0] for name in 'abc']
    house.until_running('a')
    assert house.worker.cancel('b') == 1 and house.worker.cancel('b') == 0
    assert house.worker.cancel('nobody') == 0
    assert house.worker.cancel('a') == 1
    house.wait(2)
    assert [job.finish for job in jobs] == [Finish.CANCELED, Finish.CANCELED, None]
    house.controller.let_through()
    house.wait()
    assert jobs[2].finish is Finish.LENGTH


def test_a_cancelled_job_is_answered_before_those_that_wait(house):
    for name in 'abc':
        house.submit(name)
    house.until_running('a')
    house.worker.cancel('c')
    house.controller.let_through()
    house.wait(2)
    assert [job for job, chunk in house.chunks if chunk.last] == ['a', 'c']


def test_drain_ends_everything_with_a_last_chunk(house):
    jobs = [house.submit(name)[0] for name in 'abcd']
    assert house.worker.drain(PATIENCE)
    assert [job.finish for job in jobs] == [Finish.CANCELED] * 4
    assert house.worker.waiting == 0 and house.worker.running is None and house.worker.alive


def test_results_are_kept_for_a_bounded_time_and_number(house):
    """Pitfall 30: flat memory, however many requests."""
    house.submit('old')
    house.controller.let_through()
    house.wait()
    house.controller.clock.advance(KEPT_SEC - 1)
    assert house.worker.find('old') is not None
    house.controller.clock.advance(2)
    assert house.worker.find('old') is None
    house.controller.let_through(KEPT_RESULTS + 20)
    for i in range(KEPT_RESULTS + 20):
        house.submit(str(i))
        house.wait()
    assert house.worker.find('5') is None
    assert house.worker.find(str(KEPT_RESULTS + 19)) is not None
    assert len(house.worker._ended) <= KEPT_RESULTS + 1


def test_a_fault_of_the_controller_ends_one_job(house):
    house.controller.fail = ValueError('boom')
    job, _ = house.submit('a')
    house.controller.gate.release()
    house.wait()
    assert job.finish is Finish.INTERNAL and 'boom' in job.message
    assert any('boom' in log for log in house.logs)
    house.controller.fail = None
    good, _ = house.submit('b')
    house.controller.let_through()
    house.wait()
    assert good.finish is Finish.LENGTH


def test_a_fault_of_a_listener_is_not_the_requests(house):
    def broken(job, chunk):
        if chunk.last:
            house.ended.release()
        raise KeyError('listener')
    job, _ = house.submit('a', on_chunk=broken)
    house.controller.let_through()
    house.wait()
    assert job.finish is Finish.LENGTH and job.text == 'abab.'
    assert house.worker.drain(PATIENCE)
    assert len(house.logs) == 3


def test_texts_of_two_clients_do_not_mix(house):
    """Pitfall 31."""
    jobs = [house.submit(f'{client}{i}', client=client)[0] for i in range(2) for client in 'xy']
    house.controller.let_through(4)
    house.wait(4)
    for job in jobs:
        own = [chunk.text for name, chunk in house.chunks if name == job.id]
        assert job.text == ''.join(own) == 'abab.'


def test_a_closed_worker_has_ended_its_thread():
    house = House()
    job, _ = house.submit('a')
    house.worker.close()
    assert not house.worker.alive and job.finish is Finish.CANCELED
