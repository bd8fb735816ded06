# SPDX-License-Identifier: Apache-2.0
"""Conversations keep what the target has read of them, with speculation on."""

from __future__ import annotations

import threading

from fakes import Bench
import pytest
import torch

from memspec_ros.decoding.engine import CATCH_UP_ROWS
from memspec_ros.models.state import ParkedState
from memspec_ros.runtime.memory_guard import Limits
from memspec_ros.runtime.requests import Finish, PreparedRequest
from memspec_ros.runtime.runtime import Runtime, RuntimeOptions
from memspec_ros.runtime.sessions import SessionStore
from memspec_ros.runtime.settings import Settings
from memspec_ros.runtime.worker import GenerationWorker, Job, JobState

FIRST = {'a': list(range(30, 75)), 'b': [200, 3, 3, 7, 60, 61, 62, 60, 61, 62, 11]}
NEW = 30


def open_runtime(full_bundle, **options):
    return Runtime.open(full_bundle, RuntimeOptions(
        dtype='float32', context=448, adaptive=False, settings=Settings(1, 2), **options))


@pytest.fixture(scope='module')
def runtime(full_bundle):
    runtime = open_runtime(full_bundle)
    yield runtime
    runtime.close()


@pytest.fixture
def controller(runtime):
    runtime.controller.reset()
    runtime.controller.sessions = SessionStore()
    return runtime.controller


def ask(controller, prompt, session='', count=NEW):
    """(output ids, statistics) of a request."""
    chunks = list(controller.generate(PreparedRequest(
        list(prompt), '', count, ignore_eos=True, session=session)))
    assert chunks[-1].finish is Finish.LENGTH, chunks[-1].message
    return [token for chunk in chunks for token in chunk.token_ids], chunks[-1].stats


def talk(controller, turns, greedy=None):
    """Turns of two conversations one after the other: the statistics of each."""
    texts, stats = {name: [] for name in FIRST}, []
    for turn in range(turns):
        for name, first in FIRST.items():
            texts[name] += first if turn == 0 else [40 + turn, 9, 17]
            output, figures = ask(controller, texts[name], name)
            if greedy is not None:
                assert output == greedy(texts[name], NEW)
            texts[name] += output
            stats.append((name, turn, len(texts[name]), figures))
    return stats


def test_a_turn_begins_where_the_last_one_ended(controller, greedy):
    for _, turn, length, stats in talk(controller, 3, greedy):
        # Held is all but the last token of the answer before; then come three new ones.
        assert stats.cached_tokens == (length - NEW - 3 - 1 if turn else 0)
        assert stats.drafted > 0
    assert len(controller.sessions) == 1 and controller.sessions.evictions == 0


def test_the_first_token_of_a_turn_takes_one_pass_over_what_is_new(controller, monkeypatch,
                                                                   greedy):
    """Neither a draft's proposal nor a pass of its own stands before it."""
    texts = [*FIRST['a'], *ask(controller, FIRST['a'], 'a')[0], 40, 9, 17]
    passes = []
    forward = controller.engine.target.forward

    def watch(state, tokens, *args, **kwargs):
        passes.append(len(tokens))
        return forward(state, tokens, *args, **kwargs)
    monkeypatch.setattr(controller.engine.target, 'forward', watch)
    request = PreparedRequest(texts, '', NEW, ignore_eos=True, session='a')
    output, rows = [], []
    for chunk in controller.generate(request):
        rows.append(len(passes))
        output += chunk.token_ids
    # The last token of the answer before, and what was said since.
    assert passes[0] == 4 and rows[0] == 1 and chunk.stats.drafted > 0
    assert output == greedy(texts, NEW)
    engine, drafter = controller.engine, controller.residency.drafters()[0]
    *_, held = engine.prefill([*texts, *output, 5, 6], opening=True)
    assert engine.opening and held == engine.state.held
    # Whoever is asked then must not declare rows held that have not run.
    assert engine.ask(drafter, 3) == [] and engine.state.held == held and engine.opening
    long = [*texts, *output, *range(20, 150)]
    assert ask(controller, long, 'a')[0] == greedy(long, NEW)
    assert ask(controller, long)[0] == greedy(long, NEW)


def test_a_target_through_transformers_keeps_conversations_too(full_bundle, model_dirs,
                                                               bundle_maker, greedy):
    import shutil
    shutil.copytree(model_dirs / 'near', bundle_maker.directory / 'near')
    bundle_maker.add_draft('near', 'causal_lm', 'near')
    runtime = open_runtime(bundle_maker.write(), generic_target=True)
    try:
        for _, turn, length, stats in talk(runtime.controller, 2, greedy):
            assert stats.cached_tokens == (length - NEW - 4 if turn else 0)
    finally:
        runtime.close()


def test_requests_without_a_session_take_nothing_from_one(controller, greedy):
    talk(controller, 1)
    other = [5, 17, 40, 8, 99]
    assert ask(controller, other)[0] == greedy(other, NEW)
    assert len(controller.sessions) == 2
    assert ask(controller, FIRST['a'])[1].cached_tokens == 0


def test_what_is_parked_is_no_longer_than_what_was_read(controller):
    talk(controller, 1)
    state = controller.engine.state
    whole = state.kv.bytes + sum(rows.nbytes for rows in state.hidden.values())
    held = len(FIRST['a']) + NEW - 1
    assert controller.sessions.bytes == pytest.approx(whole * held / state.capacity)


def test_without_room_a_conversation_is_read_again(controller, greedy):
    controller.sessions.room = lambda: 1000
    assert all(stats.cached_tokens <= 1 for *_, stats in talk(controller, 2, greedy))
    assert len(controller.sessions) == 0


def test_pressure_forgets_conversations_and_answers_stay_right(controller, greedy):
    texts = {name: list(first) + ask(controller, first, name)[0] for name, first in FIRST.items()}
    assert controller.sessions.clear() > 0
    prompt = [*texts['a'], 7, 8]
    output, stats = ask(controller, prompt, 'a')
    assert output == greedy(prompt, NEW) and stats.cached_tokens == 0
    # The one in the buffers is nobody's but its own.
    prompt = [*texts['b'], 7, 8]
    output, stats = ask(controller, prompt, 'b')
    assert output == greedy(prompt, NEW) and stats.cached_tokens == len(texts['b']) - 1


def test_nothing_is_kept_while_memory_is_short(controller, greedy):
    controller.limits = Limits(sessions=False)
    try:
        assert all(stats.cached_tokens <= 1 for *_, stats in talk(controller, 2, greedy))
        assert len(controller.sessions) == 0
    finally:
        controller.limits = Limits()


@pytest.mark.parametrize('lost', [False, True])
def test_a_draft_that_was_evicted_meanwhile_warms_within_bounds(controller, monkeypatch, lost,
                                                                greedy):
    """Catching up with a long conversation takes several iterations, and none runs too many."""
    monkeypatch.setattr('memspec_ros.decoding.engine.CATCH_UP_ROWS', 16)
    assert CATCH_UP_ROWS == 256
    prompt = list(range(10, 210))
    texts = prompt + ask(controller, prompt, 'a')[0]
    ask(controller, FIRST['b'], 'b')
    for draft in controller.residency.resident:
        if lost:
            controller.residency.release(draft)
    rows = []
    for drafter in controller.residency.drafters():
        drafter.restart(0)
    texts += [7, 8]
    for chunk in controller.generate(PreparedRequest(texts, '', 60, ignore_eos=True,
                                                     session='a')):
        for drafter in controller.residency.drafters():
            if not drafter.copies:
                rows.append(drafter.cached)
        assert chunk.finish in (None, Finish.LENGTH)
    assert chunk.stats.cached_tokens == len(texts) - 3
    growth = [after - before for before, after in zip(rows, rows[1:])]
    # A bound for catching up, and what an iteration commits beside it.
    assert max(growth) <= 16 + controller.engine.max_gamma + 1 and rows[-1] > len(texts)


# --- the store ---

def parked(size):
    return ParkedState([1], [torch.zeros(size, dtype=torch.uint8)])


def put(store, name, size):
    fits = store.make_room(size)
    if fits:
        store.put(name, parked(size))
    return fits


def test_the_longest_unused_goes_first():
    store = SessionStore(lambda: 100)
    assert put(store, 'a', 40) and put(store, 'b', 40)
    store.put('a', store.take('a'))  # used again
    assert put(store, 'c', 50) and store.bytes == 90 and store.evictions == 1
    assert store.take('b') is None
    assert store.take('a').bytes == 40 and store.take('c').bytes == 50
    assert not put(store, 'd', 101) and store.bytes == 0


def test_room_that_shrinks_is_heeded_with_the_next():
    room = [100]
    store = SessionStore(lambda: room[0])
    put(store, 'a', 60)
    room[0] = 30
    assert put(store, 'b', 20) and len(store) == 1 and store.take('a') is None


def test_no_more_than_so_many():
    store = SessionStore(most=2)
    for name in 'abc':
        put(store, name, 1)
    assert len(store) == 2 and store.take('a') is None
    assert store.clear() == 2 and len(store) == 0 and store.evictions == 3


# --- turns that are sent before the last one ended ---

@pytest.fixture
def bench():
    return Bench()


def test_turns_keep_their_order_whatever_their_priority(bench):
    """And each is made when its turn comes, with what was said until then."""
    worker = GenerationWorker(bench.controller, lambda: 10)
    gate, order = threading.Event(), []

    def blocking():
        gate.wait(10)
        return bench.request()

    worker.submit(Job('first', bench.request(session='talk'), prepare=blocking))
    for name, session, priority in (('second', 'talk', 5), ('third', 'talk', 9),
                                    ('other', '', 7)):
        def prepare(name=name):
            order.append(name)
            return bench.request(max_new_tokens=len(order))
        worker.submit(Job(name, bench.request(session=session), priority=priority,
                          prepare=prepare))
    gate.set()
    for name in ('first', 'second', 'third', 'other'):
        job = worker.find(name)
        deadline = threading.Event()
        for _ in range(1000):
            if job.state is JobState.ENDED:
                break
            deadline.wait(0.01)
    worker.close()
    assert order == ['other', 'second', 'third']
    assert [len(worker.find(name).token_ids) for name in order] == [1, 2, 3]


def test_a_turn_that_no_longer_fits_says_so(bench):
    from memspec_ros.models.errors import ContextOverflowError, InvalidRequestError
    worker = GenerationWorker(bench.controller, lambda: 10)
    ended = []
    for name, error in (('long', ContextOverflowError('too long')),
                        ('wrong', InvalidRequestError('a role'))):
        def prepare(error=error):
            raise error
        done = threading.Event()
        worker.submit(Job(name, bench.request(session=name), prepare=prepare,
                          on_chunk=lambda job, chunk, done=done: done.set()))
        assert done.wait(10)
        ended.append(worker.find(name))
    worker.close()
    assert [(job.finish, job.message) for job in ended] == [
        (Finish.CONTEXT_OVERFLOW, 'too long'), (Finish.INVALID, 'a role')]
