# SPDX-License-Identifier: Apache-2.0
"""Algorithm 2: at most K drafts in memory, prefetched one at a time, the active one safe."""

import threading
import time

from fakes import counting, FakeClock, FakeDrafter, FakeKind, GatedStore, ScriptedLoader
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule, RuleBasedStateMachine
import pytest

from memspec_ros.runtime.loader import ThreadLoader
from memspec_ros.runtime.residency import Residency, SlotState
from memspec_ros.runtime.storage import FileStore

ABSENT, LOADING, READY, FAILED = SlotState


class House:
    """A residency over drafts a, b, c, d and a slot-free one."""

    def __init__(self, capacity, script=None, drafts='abcd', slot_free=True, size=1000):
        self.clock = FakeClock()
        self.loader = ScriptedLoader(self.clock, script or {})
        self.kinds = {draft: FakeKind() for draft in drafts}
        kinds = {draft: (kind, size) for draft, kind in self.kinds.items()}
        if slot_free:
            self.kinds['lookup'] = FakeKind(slot_free=True)
            kinds['lookup'] = (self.kinds['lookup'], 0)
        self.residency = Residency(kinds, self.loader, capacity, self.clock)

    def state(self, draft):
        return next(view.state for view in self.residency.view() if view.id == draft)

    def view(self, draft):
        return next(view for view in self.residency.view() if view.id == draft)

    def update(self, order, active=None, **options):
        """Rank the drafts named in ``order``, best first."""
        ranked = [(draft, 1.0 - i / 10) for i, draft in enumerate(order)]
        self.residency.update(ranked, active, **options)

    def later(self, seconds=1.0):
        self.clock.advance(seconds)
        return self.residency.poll()

    def load(self, order, active=None):
        """Update and let loads end until nothing more happens."""
        self.update(order, active)
        while self.loader.loading is not None:
            self.later()
            self.update(order, active)

    @property
    def ready(self):
        return {view.id for view in self.residency.view()
                if view.state is READY and not view.slot_free}


def test_loads_the_top_k_in_rank_order_one_at_a_time():
    house = House(2)
    house.update('cab')
    assert house.loader.loading == 'c' and house.state('c') is LOADING
    house.update('cab')
    assert house.loader.started == [(100.0, 'c')]
    assert house.later() and house.state('c') is READY
    house.update('cab')
    assert house.loader.loading == 'a'
    house.later()
    house.update('cab')
    assert house.loader.loading is None and house.ready == {'a', 'c'}


def test_nothing_changes_until_the_bytes_have_arrived():
    house = House(1, {'a': [(5.0, 'ok')]})
    house.update('a')
    for _ in range(4):
        assert not house.later(1.0)
        assert house.state('a') is LOADING and house.residency.drafter('a') is None
        assert not house.residency.is_ready('a')
    assert house.later(1.0)
    assert house.residency.drafter('a') is house.kinds['a'].attached[0]


def test_evicts_the_lowest_scored_draft_outside_the_working_set():
    house = House(3)
    house.load('abc')
    house.update('dabc', active='a')  # W = d, a, b: c has to go
    assert house.ready == {'a', 'b'} and house.loader.loading == 'd'
    assert house.residency.drafter('c') is None


def test_scores_of_a_draft_that_is_ranked_no_more_are_its_last():
    house = House(2)
    house.load('ab')
    house.residency.update([('c', 0.99), ('b', 0.95)], None)
    assert house.ready == {'b'}


def test_never_evicts_the_active_draft():
    house = House(2)
    house.load('ab')
    house.update('cdab', active='b')
    assert house.ready == {'b'} and house.loader.loading == 'c'
    house.later()
    house.update('cdab', active='b')
    # d is wanted and b is not, but b is at work: there is no victim, hence no load.
    assert house.ready == {'b', 'c'} and house.loader.loading is None
    house.update('cdab', active='c')
    assert house.ready == {'c'} and house.loader.loading == 'd'


def test_k_0_is_legal_and_serves_slot_free_drafts_only():
    house = House(0)
    house.update('ab')
    house.residency.update([('a', 0.9), ('lookup', 0.2)], 'lookup')
    assert house.loader.started == [] and house.residency.resident == []
    assert house.residency.is_ready('lookup') and house.residency.drafter('lookup') is not None
    assert house.residency.used_bytes() == 0


def test_slot_free_drafts_never_count_against_k():
    house = House(1)
    house.load(['lookup', 'a', 'b'])
    assert house.ready == {'a'} and house.residency.resident == ['a']
    assert house.state('lookup') is READY


def test_k_1_with_an_active_draft_loads_nothing_else():
    house = House(1)
    house.load('a')
    house.update('ba', active='a')
    assert house.ready == {'a'} and house.loader.loading is None
    house.residency.release('a')
    house.update('ba', active=None)
    assert house.ready == set() and house.loader.loading == 'b'


def test_k_beyond_the_number_of_drafts_loads_them_all():
    house = House(9)
    house.load('abcd')
    assert house.ready == set('abcd')
    assert house.residency.used_bytes() == 4000


def test_a_negative_capacity_is_refused():
    house = House(1)
    with pytest.raises(ValueError, match='negative'):
        house.residency.set_capacity(-1)
    with pytest.raises(ValueError, match='negative'):
        Residency({}, house.loader, -1, house.clock)


def test_lowering_k_evicts_the_worst_first_and_the_active_last():
    house = House(4)
    house.load('abcd')
    house.residency.set_capacity(3, active='d')
    assert house.ready == {'a', 'b', 'd'}
    house.residency.set_capacity(1, active='d')
    assert house.ready == {'d'}
    house.residency.set_capacity(0, active='d')
    assert house.ready == set() and house.state('lookup') is READY


def test_lowering_k_gives_up_a_load_that_no_longer_fits():
    house = House(2)
    house.load('a')
    house.update('ab', active='a')
    assert house.loader.loading == 'b'
    house.residency.set_capacity(1, active='a')
    assert house.loader.cancels == 1 and house.state('a') is READY
    house.later(0.0)
    assert house.state('b') is ABSENT and house.ready == {'a'}


def test_a_load_given_up_too_late_is_dropped_when_it_arrives():
    house = House(2)
    house.load('a')
    house.update('ab', active='a')
    house.loader.cancel = lambda: None  # the bytes were all there already
    house.residency.set_capacity(1, active='a')
    house.later()
    assert house.state('b') is ABSENT and house.residency.drafter('b') is None
    assert house.residency.resident == ['a']


def test_k_0_during_a_load_leaves_an_active_slot_free_draft_alone():
    house = House(1)
    house.update(['a', 'lookup'], active='lookup')
    assert house.loader.loading == 'a'
    house.residency.set_capacity(0, active='lookup')
    assert house.residency.is_ready('lookup')
    house.later(0.0)
    assert house.residency.resident == []


def test_slot_free_drafts_cannot_be_released():
    house = House(1)
    house.residency.release('lookup')
    assert house.residency.is_ready('lookup')


def test_raising_k_takes_effect_at_the_next_update():
    house = House(1)
    house.load('abc')
    assert house.ready == {'a'}
    house.residency.set_capacity(3)
    house.load('abc')
    assert house.ready == set('abc')


def test_a_failed_load_is_named_skipped_and_tried_again_with_growing_pauses():
    house = House(1, {'a': [(1.0, 'disk on fire')]}, drafts='ab')
    starts = []
    for _ in range(400):
        house.update('a')
        house.later(1.0)
    starts = [at for at, _ in house.loader.started]
    pauses = [round(later - earlier) for earlier, later in zip(starts, starts[1:])]
    assert pauses[0] <= 3 and pauses == sorted(pauses)
    assert pauses[-1] in (60, 61, 62) and len(starts) < 14
    view = house.view('a')
    assert view.state is FAILED and view.reason == 'disk on fire'
    assert house.residency.counters.failures == len(starts)


def test_while_one_draft_is_failed_the_next_best_is_loaded():
    house = House(1, {'a': [(1.0, 'gone')]})
    house.update('ab')
    house.later()
    house.update('ab')
    assert house.loader.loading == 'b'
    house.later()
    assert house.ready == {'b'} and house.state('a') is FAILED


def test_a_draft_recovers_when_its_file_does():
    house = House(1, {'a': [(1.0, 'gone'), (1.0, 'gone'), (1.0, 'ok')]})
    for _ in range(12):
        house.update('a')
        house.later()
    assert house.ready == {'a'} and house.view('a').reason == ''


def test_tensors_that_do_not_fit_are_a_failure_whatever_they_raise():
    house = House(1, {'a': [(1.0, 'corrupt')]})
    house.update('a')
    assert house.later()
    assert house.state('a') is FAILED and 'layers.0.qkv' in house.view('a').reason
    assert house.residency.drafter('a') is None and house.residency.resident == []


def test_thousands_of_failures_do_not_overflow():
    house = House(1)
    house.load('a')
    for _ in range(2000):
        house.residency.fail('a', 'again')
    house.clock.advance(61.0)
    house.update('a')
    assert house.loader.loading == 'a'


def test_a_draft_that_loads_but_keeps_misbehaving_is_asked_less_and_less():
    house = House(1, drafts='a')
    for _ in range(300):
        house.update('a')
        house.later(1.0)
        if house.residency.is_ready('a'):
            house.residency.note_use('a')
            house.residency.fail('a', 'raised in propose')
    assert len(house.loader.started) < 14


def test_a_misbehaving_slot_free_draft_comes_back_after_a_pause():
    house = House(1)
    house.residency.fail('lookup', 'raised')
    house.update(['lookup', 'a'])
    assert not house.residency.is_ready('lookup')
    assert house.view('lookup').reason == 'raised'
    house.clock.advance(1.5)
    house.update(['lookup', 'a'])
    assert house.residency.is_ready('lookup')
    assert len(house.kinds['lookup'].attached) == 2


def test_clear_evicts_everything_and_ends_the_load():
    house = House(2)
    house.load('a')
    house.update('ab')
    house.loader.may_wait = True
    house.residency.clear()
    assert house.residency.resident == [] and house.loader.loading is None
    assert house.residency.is_ready('lookup')
    house.load('ab')
    assert house.ready == {'a', 'b'}


def test_working_set_and_demand_loading():
    house = House(3)
    house.update('abc', working_set=1, prefetch=False)
    house.later()
    house.update('abc', working_set=1, prefetch=False)
    assert house.ready == {'a'} and house.loader.loading is None
    house.residency.note_use('a')
    counters = house.residency.counters
    assert (counters.loads, counters.prefetches_issued, counters.prefetches_used) == (1, 0, 0)
    house.residency.release('a')
    assert counters.prefetches_wasted == 0


def test_counters_tell_hits_misses_and_the_fate_of_prefetches():
    house = House(2)
    counters = house.residency.counters
    house.update('ab')                      # a wanted, absent: a miss, its load begins
    house.update('ab')                      # still loading: a miss, and late (once)
    house.update('ab')
    assert (counters.hits, counters.misses, counters.prefetches_late) == (0, 3, 1)
    house.later()
    house.update('ab')                      # a hit; b is prefetched
    house.residency.note_use('a')
    house.residency.note_use('a')
    house.later()
    house.update('ac', active='a')          # b goes unused, c comes
    house.later()
    assert (counters.hits, counters.misses) == (2, 3)
    assert (counters.prefetches_issued, counters.prefetches_used) == (3, 1)
    assert (counters.prefetches_wasted, counters.evictions, counters.loads) == (1, 1, 3)
    house.update(['lookup', 'a'])
    assert counters.hits == 3               # a slot-free draft is always there


def test_views_show_progress():
    house = House(1, {'a': [(2.0, 'ok')]})
    house.update('a')
    house.loader.bytes_read = 250
    view = house.view('a')
    assert (view.state, view.progress, view.bytes, view.score) == (LOADING, 0.25, 1000, 1.0)
    house.later(2.0)
    assert house.view('a').progress == 1.0 and house.view('b').progress == 0.0
    assert house.view('lookup').slot_free


def test_the_rate_of_the_last_load_predicts_the_next():
    house = House(1, {'a': [(4.0, 'ok')]}, size=8000)
    house.update('a')
    house.later(4.0)
    assert house.residency.estimated_load_sec('b') == pytest.approx(4.0)


def test_can_load_only_what_is_absent_while_nothing_is_in_flight():
    house = House(2, {'b': [(1.0, 'gone')]})
    assert house.residency.can_load('a') and not house.residency.can_load('lookup')
    house.update('a')
    assert not house.residency.can_load('a') and not house.residency.can_load('b')
    house.later()
    assert not house.residency.can_load('a') and house.residency.can_load('b')
    house.update('ab')
    house.later()
    house.later(5.0)
    assert not house.residency.can_load('b')  # failed: not worth another one's place
    assert house.residency.can_load('c')


outcomes = st.sampled_from(['ok', 'ok', 'ok', 'gone', 'corrupt'])
loads = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, 7.0]), outcomes), min_size=1,
                 max_size=4)


class AnySchedule(RuleBasedStateMachine):
    """Rankings, delays, failures, capacities and evictions in any order."""

    drafts = ('a', 'b', 'c', 'd', 'lookup')

    @initialize(capacity=st.integers(0, 4), script=st.fixed_dictionaries(
        {draft: loads for draft in 'abcd'}))
    def open(self, capacity, script):
        self.house = House(capacity, script)
        self.residency = self.house.residency
        self.active = None
        self.allowance = 0

    @rule(seconds=st.sampled_from([0.0, 0.3, 1.0, 3.0, 70.0]))
    def time_passes(self, seconds):
        self.house.clock.advance(seconds)

    @rule()
    def poll(self):
        before = self.residency.drafter(self.active) if self.active else None
        self.residency.poll()
        assert before is None or self.residency.drafter(self.active) is before

    @rule(order=st.permutations(drafts), count=st.integers(1, 5), free=st.booleans())
    def interval(self, order, count, free):
        """What the controller does at a boundary: update, then choose the best READY one."""
        ranked = [(draft, 0.9 - i / 10) for i, draft in enumerate(order[:count])]
        before = self.residency.drafter(self.active) if self.active else None
        self.residency.update(ranked, self.active)
        if before is not None and self.residency.capacity > 0:
            assert self.residency.drafter(self.active) is before, 'the active draft was evicted'
        loading = self.residency.loading
        if loading is not None:
            assert self.house.state(loading) is LOADING
        self.active = next((d for d, _ in ranked if self.residency.is_ready(d)), None)
        if self.active:
            self.residency.note_use(self.active)

    @rule(capacity=st.integers(0, 5))
    def new_capacity(self, capacity):
        before = self.residency.drafter(self.active) if self.active else None
        self.residency.set_capacity(capacity, self.active)
        if before is not None and (capacity > 0 or self.active == 'lookup'):
            assert self.residency.drafter(self.active) is before

    @precondition(lambda self: self.active is not None)
    @rule(how=st.sampled_from(['fail', 'release']))
    def lose_the_active_draft(self, how):
        if how == 'fail':
            self.residency.fail(self.active, 'raised')
        else:
            self.residency.release(self.active)
        self.active = None

    @invariant()
    def never_more_than_k(self):
        views = self.residency.view()
        held = [v.id for v in views if not v.slot_free and v.state in (READY, LOADING)]
        assert sorted(held) == sorted(self.residency.resident)
        # A load in flight when K was lowered keeps its slot until it ends, and has been told to.
        excess = len(held) - self.residency.capacity
        if excess > 0:
            assert excess == 1 and self.house.loader.cancels > 0
            assert self.residency.loading in held

    @invariant()
    def states_are_consistent(self):
        loading = [v.id for v in self.residency.view() if v.state is LOADING]
        assert loading == ([self.residency.loading] if self.residency.loading else [])
        for view in self.residency.view():
            assert (self.residency.drafter(view.id) is not None) == (view.state is READY)
            assert (view.reason != '') == (view.state is FAILED)
        counters = self.residency.counters
        assert (counters.prefetches_used + counters.prefetches_wasted
                <= counters.prefetches_issued <= counters.loads == len(self.house.loader.started))


TestAnySchedule = AnySchedule.TestCase
TestAnySchedule.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.integers(1, 4), st.lists(st.permutations('abcd'), min_size=1, max_size=6))
def test_a_steady_ranking_ends_with_exactly_the_top_k(capacity, orders):
    house = House(capacity)
    for order in orders:
        house.load(order)
    assert house.ready == set(orders[-1][:capacity])


# The real loader thread. Its reads are held at a gate, so that nothing here depends on speed.

@pytest.fixture
def gated():
    store = GatedStore(errors={'bad': OSError('no such sector')})
    loader = ThreadLoader(store)
    yield store, loader
    loader.close()
    assert not any(t.name == 'memspec-loader' and t.is_alive() for t in threading.enumerate())


def test_the_loader_thread_reports_each_load_once(gated):
    store, loader = gated
    loader.start('a')
    assert loader.loading == 'a' and loader.poll() is None and not loader.wait(0.0)
    with pytest.raises(RuntimeError, match='a is being loaded'):
        loader.start('b')
    store.gate.release()
    assert loader.wait(10.0)
    result = loader.poll()
    assert result.draft == 'a' and result.error is None and result.tensors == {}
    assert loader.poll() is None and loader.loading is None
    loader.start('b')
    store.gate.release()
    assert loader.wait(10.0) and loader.poll().draft == 'b'
    assert store.reads == ['a', 'b']


def test_the_loader_thread_survives_a_store_that_raises(gated):
    store, loader = gated
    for draft, error in (('bad', 'no such sector'), ('good', None)):
        loader.start(draft)
        store.gate.release()
        assert loader.wait(10.0)
        assert loader.poll().error == error


def test_the_loader_thread_gives_up_when_asked(gated):
    store, loader = gated
    loader.start('a')
    loader.cancel()
    assert loader.wait(10.0)
    result = loader.poll()
    assert result.cancelled and result.tensors is None
    loader.start('b')  # the cancellation was the other load's
    assert not loader.wait(0.05)
    store.gate.release()
    assert loader.wait(10.0) and not loader.poll().cancelled


def test_poll_and_update_never_wait_for_a_store_that_hangs(gated):
    store, loader = gated
    clock = FakeClock()
    residency = Residency({d: (FakeKind(), 10) for d in 'ab'}, loader, 1, clock)
    start = time.monotonic()
    for _ in range(200):
        residency.update([('a', 1.0), ('b', 0.5)], None)
        residency.poll()
        residency.view()
    assert time.monotonic() - start < 5.0
    assert residency.loading == 'a' and store.reads in ([], ['a'])
    store.gate.release()
    assert loader.wait(10.0) and residency.poll() and residency.is_ready('a')


def test_closing_ends_a_load_in_flight():
    store = GatedStore()
    loader = ThreadLoader(store)
    loader.start('a')
    start = time.monotonic()
    loader.close()
    assert time.monotonic() - start < 10.0


def test_the_file_store_reads_what_the_manifest_describes(tmp_path):
    import hashlib

    from safetensors.torch import save_file
    import torch
    file = tmp_path / 'a.safetensors'
    save_file({'x': torch.arange(5)}, file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    seen = []
    store = FileStore({'a': (file, digest), 'b': (file, '0' * 64)})
    assert store.read('a', seen.append, lambda: False)['x'].tolist() == [0, 1, 2, 3, 4]
    assert seen[-1] == file.stat().st_size
    with pytest.raises(Exception, match='sha256'):
        store.read('b', seen.append, lambda: False)


def test_eviction_lets_go_of_the_drafter():
    """Pitfall 23: memory kept after an unload; 20 times in a row, nothing is left over."""
    import gc
    import weakref
    house = House(1, drafts='ab')
    alive = []
    house.kinds['a'].make = lambda: FakeDrafter(counting)
    for _ in range(20):
        house.load('a')
        alive.append(weakref.ref(house.residency.drafter('a')))
        house.kinds['a'].attached.clear()
        house.load('b')
    gc.collect()
    assert [ref() for ref in alive] == [None] * 20
