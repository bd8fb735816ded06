# SPDX-License-Identifier: Apache-2.0
"""From storage into memory: no second copy, flat memory, any pace, and faults that stay small."""

import errno
import gc
import hashlib
import os
from pathlib import Path
import shutil
import threading
import time

from fakes import FakeClock, FakeKind, GatedStore
import pytest
from safetensors.torch import save_file
import torch

from memspec_ros.models import packing, reading
from memspec_ros.models.drafts import FeatureKind
from memspec_ros.models.errors import BundleError, InvalidRequestError
from memspec_ros.models.half import has_half
from memspec_ros.models.reading import (
    cached_bytes,
    CHUNK_BYTES,
    DirectFile,
    LoadCancelled,
    read_file,
)
from memspec_ros.models.weights import read_tensors
from memspec_ros.runtime.loader import ThreadLoader
from memspec_ros.runtime.requests import GenerationRequest
from memspec_ros.runtime.residency import Residency, SlotState
from memspec_ros.runtime.runtime import file_store, Runtime, RuntimeOptions
from memspec_ros.runtime.settings import Settings
from memspec_ros.runtime.slots import DeviceStaging, SlotPool, slots_for
from memspec_ros.runtime.storage import FileStore, PacedStore, StorageLimits

CPU = torch.device('cpu')


def never():
    return False


def quiet(count):
    pass


def write(path, chunks, seed=0):
    generator = torch.Generator().manual_seed(seed)
    save_file({'x': torch.randint(0, 256, (chunks * CHUNK_BYTES + 1234,), dtype=torch.uint8,
                                  generator=generator)}, path)
    return path


@pytest.fixture
def file(tmp_path):
    """A file on storage, with its pages in the cache."""
    path = write(tmp_path / 'x.safetensors', 5)
    with path.open('rb') as opened:
        os.fsync(opened.fileno())
        reading.drop_pages(opened.fileno())
    if cached_bytes(path) != 0:
        pytest.skip('the temporary directory lies in memory')
    path.read_bytes()
    assert cached_bytes(path) >= path.stat().st_size
    return path


# --- no second copy ---

@pytest.fixture(params=['direct', 'not offered', 'refused at open', 'refused at read'])
def access(request, monkeypatch):
    """Ways in which a file system has direct I/O, or has not."""
    if request.param == 'not offered':
        monkeypatch.delattr(os, 'O_DIRECT')
    elif request.param == 'refused at open':
        real = os.open

        def refuse(path, flags, *more, **keys):
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, 'Invalid argument')
            return real(path, flags, *more, **keys)
        monkeypatch.setattr(os, 'open', refuse)
    elif request.param == 'refused at read':
        real_open = reading._open

        class Refusing:
            def __init__(self, file):
                self.file, self.fileno, self.close = file, file.fileno, file.close

            def readinto(self, window):
                import fcntl
                if fcntl.fcntl(self.file.fileno(), fcntl.F_GETFL) & os.O_DIRECT:
                    raise OSError(errno.EINVAL, 'Invalid argument')
                return self.file.readinto(window)

        def opened(path):
            file, direct = real_open(path)
            assert direct
            return Refusing(file), direct
        monkeypatch.setattr(reading, '_open', opened)
    return request.param


def test_a_load_leaves_nothing_in_the_page_cache(file, access):
    """Pitfall 20."""
    expected, seen = file.read_bytes(), []
    digest = hashlib.sha256(expected).hexdigest()
    with file.open('rb') as opened:
        reading.drop_pages(opened.fileno())
    assert cached_bytes(file) == 0
    buffer = read_file(file, digest, lambda done: seen.append(cached_bytes(file)))
    assert buffer.numpy().tobytes() == expected
    # Read-ahead is bounded, and what was read is let go of at once.
    assert len(seen) == 6 and max(seen) <= (0 if access == 'direct' else 2 * CHUNK_BYTES)
    assert cached_bytes(file) == 0


def test_pages_that_others_have_cached_are_let_go_of_too(file):
    assert cached_bytes(file)
    read_file(file)
    assert cached_bytes(file) == 0


def test_what_is_cached_is_counted(tmp_path, file):
    assert cached_bytes(tmp_path / 'gone') is None
    (tmp_path / 'empty').touch()
    assert cached_bytes(tmp_path / 'empty') == 0


def test_a_load_given_up_or_failed_closes_its_file(file, monkeypatch):
    def descriptors():
        return len(os.listdir('/proc/self/fd'))
    before = descriptors()
    with pytest.raises(LoadCancelled):
        read_file(file, cancelled=lambda: True)
    with pytest.raises(BundleError, match='sha256'):
        read_file(file, '0' * 64)

    def broken(self, window):
        raise OSError(errno.EIO, 'Input/output error')
    monkeypatch.setattr(DirectFile, 'read_into', broken)
    with pytest.raises(BundleError, match='x.safetensors: Input/output error'):
        read_file(file)
    assert descriptors() == before


def test_a_short_read_that_leaves_the_blocks_goes_on_buffered(file, monkeypatch):
    real = DirectFile.read_into
    monkeypatch.setattr(DirectFile, 'read_into', lambda self, window: real(self, window[:5001]))
    assert read_file(file).numpy().tobytes() == file.read_bytes()


# --- slots ---

def resident_bytes():
    return int(Path('/proc/self/statm').read_text().split()[1]) * os.sysconf('SC_PAGE_SIZE')


class Keeping(FakeKind):
    """Uses its weights as they are in the slot."""

    def attach(self, tensors):
        drafter = super().attach(tensors)
        self.attached.clear()
        drafter.weights = tensors['x'].view(torch.uint8)
        return drafter


def test_memory_is_flat_over_fifty_swaps(tmp_path):
    size = 8 * CHUNK_BYTES
    files = {draft: (write(tmp_path / draft, 8, seed), None) for seed, draft in enumerate('abc')}
    pool = SlotPool(size + 4096)
    loader = ThreadLoader(FileStore(files, pool))
    residency = Residency({draft: (Keeping(), size) for draft in files}, loader, 2, time.monotonic)
    try:
        seen, allocated = [], 0
        for turn in range(60):
            wanted = [('abc'[(turn + i) % 3], 1.0 - i / 10) for i in range(2)]
            while not all(residency.is_ready(draft) for draft, _ in wanted):
                residency.update(wanted, None)
                assert loader.wait(20.0)
                residency.poll()
            if turn >= 10:
                seen.append(resident_bytes())
            allocated = allocated or (turn == 10 and pool.allocated)
        assert residency.counters.evictions >= 50
        assert max(seen) - min(seen) < size / 4, seen
        # As many slots as drafts that keep theirs, allocated once.
        assert pool.allocated == allocated <= 3
        residency.clear()
        gc.collect()
        assert pool.free == 1
    finally:
        loader.close()


def test_a_slot_is_used_again_when_its_last_tensor_is_gone(tmp_path):
    pool = SlotPool(3 * CHUNK_BYTES)
    store = FileStore({name: (write(tmp_path / name, chunks, chunks), None)
                       for name, chunks in (('small', 1), ('large', 2), ('huge', 4))}, pool)

    def read(name):
        return store.read(name, quiet, never)['x']
    first = read('large')
    kept = first[:10]
    place = first.data_ptr()
    del first
    second = read('large')
    assert second.data_ptr() != place and pool.allocated == 2 and torch.equal(second[:10], kept)
    del kept
    third = read('small')
    assert third.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    assert pool.allocated == 2 and pool.free == 0
    del second, third
    assert pool.free == 1
    # Larger than the pool was made for: a slot of its own.
    assert read('huge').numel() == 4 * CHUNK_BYTES + 1234 and pool.allocated == 3


def test_free_slots_are_given_back_when_memory_is_short(tmp_path):
    pool = SlotPool(32 * CHUNK_BYTES)
    store = PacedStore(FileStore({'x': (write(tmp_path / 'x', 31), None)}, pool))
    store.read('x', quiet, never)
    before = resident_bytes()
    assert pool.free == 1
    store.give_back()
    assert pool.free == 0 and before - resident_bytes() > 25 * CHUNK_BYTES
    assert store.read('x', quiet, never)['x'].numel() == 31 * CHUNK_BYTES + 1234
    FileStore({}).give_back()  # nothing is kept


def test_a_smaller_file_holds_no_more_memory_than_it_needs(tmp_path):
    pool = SlotPool(32 * CHUNK_BYTES)
    store = FileStore({name: (write(tmp_path / name, chunks), None)
                       for name, chunks in (('large', 31), ('small', 1))}, pool)
    store.read('large', quiet, never)
    before = resident_bytes()
    small = store.read('small', quiet, never)
    assert before - resident_bytes() > 25 * CHUNK_BYTES and pool.allocated == 1
    assert small['x'].numel() == CHUNK_BYTES + 1234


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
def test_on_a_gpu_weights_pass_through_two_pinned_chunks(tmp_path):
    device = torch.device('cuda:0')
    path = write(tmp_path / 'x', 5)
    staging = slots_for(device, path.stat().st_size)
    assert isinstance(staging, DeviceStaging) and all(c.is_pinned() for c in staging.chunks)
    store = FileStore({'x': (path, hashlib.sha256(path.read_bytes()).hexdigest())}, staging)
    expected = FileStore({'x': (path, None)}).read('x', quiet, never)['x']
    for _ in range(20):
        read = store.read('x', quiet, never)['x']
        assert read.device == device and torch.equal(read.cpu(), expected)
        del read
        torch.cuda.synchronize()
        memory = torch.cuda.memory_allocated(device)
    assert memory == 0  # pitfall 23


# --- pace ---

class Instant:
    """A store of ``size`` bytes that takes ``sec`` of ``clock`` a chunk."""

    def __init__(self, clock, size, chunk=100, sec=0.0):
        self.clock, self.size, self.chunk, self.sec = clock, size, chunk, sec

    def read(self, draft, progress, cancelled):
        for done in range(self.chunk, self.size + 1, self.chunk):
            self.clock.advance(self.sec)
            progress(done)
        return {}


def paced(size, *, sec=0.0, oversleep=0.0, **limits):
    clock = FakeClock()

    def sleep(seconds):
        clock.advance(seconds + oversleep)
    return clock, PacedStore(Instant(clock, size, sec=sec), clock=clock, sleep=sleep, **limits)


@pytest.mark.parametrize('limits, seconds', [
    ({'bytes_per_sec': 500.0}, 2.0), ({'bytes_per_sec': 500.0, 'latency_sec': 0.3}, 2.3),
    ({'latency_sec': 0.3}, 0.3), ({'bytes_per_sec': 500.0, 'rates': {'a': 1000.0}}, 1.0),
    ({'bytes_per_sec': 500.0, 'rates': {'b': 1.0}}, 2.0)])
@pytest.mark.parametrize('oversleep', [0.0, 0.003])
def test_bytes_come_at_the_pace_of_the_limits(limits, seconds, oversleep):
    clock, store = paced(1000, oversleep=oversleep, **limits)
    seen = []
    store.read('a', lambda count: seen.append((clock() - 100.0, count)), never)
    # An inexact sleep does not add up over the chunks.
    assert clock() - 100.0 == pytest.approx(seconds, abs=oversleep + 1e-9)
    counts = [count for _, count in seen]
    assert counts == sorted(counts) and counts[-1] == 1000
    rate = limits.get('rates', {}).get('a', limits.get('bytes_per_sec'))
    for at, count in seen if rate else ():
        assert count <= max(0.0, at - limits.get('latency_sec', 0.0)) * rate + 1e-6


def test_storage_that_is_slower_than_the_limit_is_not_slowed_down():
    clock, store = paced(1000, sec=1.0, bytes_per_sec=500.0)
    store.read('a', quiet, never)
    assert clock() - 100.0 == pytest.approx(10.0)


@pytest.mark.parametrize('when', ['latency', 'between chunks'])
def test_a_load_that_is_held_back_can_be_given_up(when):
    clock, store = paced(1000, bytes_per_sec=100.0, latency_sec=5.0)
    until = 102.0 if when == 'latency' else 109.0
    with pytest.raises(LoadCancelled):
        store.read('a', quiet, lambda: clock() >= until)
    assert clock() - until <= 0.011


def test_a_real_load_is_paced(file):
    store = StorageLimits(mb_per_sec=20.0, latency_ms=30.0).limit(FileStore({'x': (file, None)}))
    start = time.monotonic()
    store.read('x', quiet, never)
    assert time.monotonic() - start >= 0.03 + file.stat().st_size / 20e6


def test_without_limits_nothing_is_in_between():
    store = FileStore({})
    assert StorageLimits().limit(store) is store


@pytest.mark.parametrize('name', ['mb_per_sec', 'latency_ms'])
@pytest.mark.parametrize('value', [-1.0, float('nan'), float('inf')])
def test_limits_that_make_no_sense_are_refused(name, value):
    with pytest.raises(InvalidRequestError, match=name):
        StorageLimits(**{name: value})


@pytest.mark.parametrize('cold', [False, True])
def test_a_cold_store_reads_from_the_storage(file, cold):
    seen = []

    def slot(size):
        seen.append(cached_bytes(file))
        return reading.new_slot(size)
    FileStore({'x': (file, None)}, slot, cold).read('x', quiet, never)
    assert (seen[0] == 0) is cold


def test_a_cold_read_that_is_none_says_so(file, monkeypatch, caplog):
    monkeypatch.setattr('memspec_ros.runtime.storage.drop_pages', lambda descriptor: None)
    FileStore({'x': (file, None)}, cold=True).read('x', quiet, never)
    assert 'stay in memory' in caplog.text and str(file) in caplog.text
    with pytest.raises(BundleError, match='gone: No such file'):
        FileStore({'x': (file.parent / 'gone', None)}, cold=True).read('x', quiet, never)


# --- storage that stalls or goes away ---

class Hanging:
    """Storage that answers for some drafts, and for the others when the test lets it."""

    def __init__(self, inner, drafts):
        self.inner, self.drafts = inner, drafts
        self.answers = threading.Event()

    def read(self, draft, progress, cancelled):
        if draft in self.drafts:
            self.answers.wait(30.0)  # as in the kernel: no cancellation reaches it
        return self.inner.read(draft, progress, cancelled) if self.inner else {}


def test_a_load_that_stalls_is_a_failure_with_its_reason(caplog):
    store, clock = Hanging(None, 'a'), FakeClock()
    loader = ThreadLoader(store, stall_sec=5.0, clock=clock)
    residency = Residency({d: (FakeKind(), 10) for d in 'ab'}, loader, 2, clock)

    def shown():
        return {view.id: (view.state.name, view.reason) for view in residency.view()}
    try:
        residency.update([('a', 1.0), ('b', 0.5)], None)
        clock.advance(4.9)
        assert not residency.poll() and shown()['a'] == ('LOADING', '')
        clock.advance(0.2)
        reason = 'the storage has sent nothing for 5 s, after 0 bytes'
        assert shown()['a'] == ('FAILED', reason)  # also where nobody polls
        assert residency.poll() and not residency.poll()
        assert shown()['a'] == ('FAILED', reason) and residency.loading is None
        assert f'draft a cannot be used: {reason}' in caplog.text
        # One load in flight, also where it hangs: none is begun behind it.
        clock.advance(100.0)
        residency.update([('b', 1.0), ('a', 0.5)], None)
        assert shown()['b'] == ('ABSENT', '') and residency.used_bytes() == 0
        store.answers.set()
        assert loader.wait(20.0) and not residency.poll()
        assert shown()['a'][0] == 'FAILED'
        for draft in 'ba':
            residency.update([('b', 1.0), ('a', 0.5)], None)
            assert residency.loading == draft and loader.wait(20.0) and residency.poll()
        assert residency.is_ready('a') and residency.is_ready('b')
    finally:
        store.answers.set()
        loader.close()


def test_a_slow_load_that_moves_has_not_stalled():
    store, clock = GatedStore(), FakeClock()
    loader = ThreadLoader(store, stall_sec=5.0, clock=clock)
    try:
        loader.start('a')
        for count in range(1, 9):
            clock.advance(4.0)
            loader._progress(count)
            assert loader.stall == ''
        clock.advance(6.0)
        assert 'for 6 s, after 8 bytes' in loader.stall
        store.gate.release()
        assert loader.wait(20.0) and loader.stall == ''
    finally:
        loader.close()


def test_closing_does_not_wait_for_storage_that_hangs(monkeypatch, caplog):
    monkeypatch.setattr('memspec_ros.runtime.loader._CLOSE_SEC', 0.1)
    monkeypatch.setattr('memspec_ros.runtime.residency._CLEAR_SEC', 0.1)
    store = Hanging(None, 'a')
    loader = ThreadLoader(store)
    residency = Residency({'a': (FakeKind(), 10)}, loader, 1, time.monotonic)
    residency.update([('a', 1.0)], None)
    start = time.monotonic()
    residency.clear()
    loader.close()
    assert time.monotonic() - start < 5.0
    assert residency.view()[0].state is SlotState.ABSENT
    assert 'the load of a is left behind' in caplog.text
    store.answers.set()
    loader._thread.join(20.0)
    assert not loader._thread.is_alive()


def options(**changes):
    return RuntimeOptions(**{'device': 'cpu', 'dtype': 'float32', 'context': 200,
                             'adaptive': False, 'settings': Settings(2, 1), **changes})


def answer(runtime, count=24):
    request = runtime.prepare(GenerationRequest('the red cube', max_new_tokens=count))
    chunks = list(runtime.controller.generate(request))
    return [token for chunk in chunks for token in chunk.token_ids], chunks[-1]


def views(runtime):
    return {view.id: view for view in runtime.controller.residency.view()}


@pytest.fixture(scope='module')
def plain(full_bundle):
    runtime = Runtime.open(full_bundle, options(max_gamma=0))
    yield answer(runtime)[0]
    runtime.close()


class Movable:
    """A clock that can be put forward."""

    def __init__(self):
        self.offset = 0.0

    def __call__(self):
        return time.monotonic() + self.offset


def test_decoding_goes_on_while_storage_stalls(full_bundle, plain, caplog):
    from memspec_ros.models.bundle import load_bundle
    bundle, clock = load_bundle(full_bundle), Movable()
    store = Hanging(file_store(bundle, CPU, StorageLimits()),
                    {spec.id for spec in bundle.drafts})
    runtime = Runtime.open(full_bundle, options(), clock, store=store)
    runtime._loader._clock = clock
    try:
        start = time.monotonic()
        assert answer(runtime)[0] == plain
        wanted = runtime.controller.residency.loading
        clock.offset += 10.0
        assert answer(runtime)[0] == plain
        view = views(runtime)[wanted]
        assert view.state is SlotState.FAILED and 'sent nothing for' in view.reason
        assert f'draft {wanted} cannot be used: the storage has sent nothing' in caplog.text
        assert time.monotonic() - start < 20.0
        store.answers.set()
        assert runtime._loader.wait(20.0)
        clock.offset += 100.0
        while views(runtime)[wanted].state is not SlotState.READY:
            assert answer(runtime)[0] == plain
            assert runtime._loader.wait(20.0) and time.monotonic() - start < 60.0
    finally:
        store.answers.set()
        runtime.close()


def test_storage_is_removed_and_comes_back(full_bundle, tmp_path, plain, caplog):
    shutil.copytree(full_bundle, tmp_path / 'bundle')
    clock = Movable()
    runtime = Runtime.open(tmp_path / 'bundle', options(), clock)
    pool = runtime._loader._store.store._slot
    try:
        (tmp_path / 'bundle').rename(tmp_path / 'elsewhere')
        before = len(os.listdir('/proc/self/fd'))
        for _ in range(3):
            assert answer(runtime)[0] == plain
            assert runtime._loader.wait(20.0)
            clock.offset += 100.0
        failed = [view for view in views(runtime).values() if view.state is SlotState.FAILED]
        assert failed and all('No such file or directory' in view.reason for view in failed)
        assert failed[0].reason in caplog.text
        assert len(os.listdir('/proc/self/fd')) == before and pool.allocated == 0
        (tmp_path / 'elsewhere').rename(tmp_path / 'bundle')
        start = time.monotonic()
        while len(runtime.controller.residency.resident) < 2:
            assert answer(runtime)[0] == plain
            assert runtime._loader.wait(20.0) and time.monotonic() - start < 60.0
            clock.offset += 100.0
        assert answer(runtime)[1].stats.drafted > 0
    finally:
        runtime.close()


def test_the_loader_yields_to_decoding():
    """Its thread has a lower priority than the one that made it, where the system allows it."""
    nice = []

    class Looking:
        def read(self, draft, progress, cancelled):
            nice.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            return {}
    loader = ThreadLoader(Looking())
    loader.start('a')
    assert loader.wait(20.0)
    loader.close()
    assert nice[0] >= max(5, os.getpriority(os.PRIO_PROCESS, 0))


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_matrices_are_packed_while_decoding_goes_on(full_bundle, monkeypatch, dtype):
    """What is left for the decoding thread makes the same draft of it as raw tensors do."""
    monkeypatch.setattr(packing, 'half_pays', lambda kind, device, other:
                        has_half(device, kind))
    threads, prepare = [], FeatureKind.prepare

    def watched(kind, tensors):
        threads.append(threading.current_thread().name)
        return prepare(kind, tensors)
    monkeypatch.setattr(FeatureKind, 'prepare', watched)
    runtime = Runtime.open(full_bundle, options(dtype=dtype))
    try:
        slots = runtime.controller.residency._slots
        kind = next(slot.kind for slot in slots.values() if type(slot.kind) is FeatureKind)
        raw = read_tensors(runtime.bundle.weight_file(
            next(spec for spec in runtime.bundle.drafts if spec.id == kind.id)))
        prepared = watched(kind, raw)
        for name, tensor in prepared.items():
            assert tuple(tensor.shape) == tuple(raw[name].shape)
            assert (tensor is raw[name]) == (tensor.shape[0] == len(kind.feature_depths)
                                             or len(tensor.shape) == 1)
        with monkeypatch.context() as late:
            late.setattr(packing, 'half', None)  # nothing is left to be packed
            drafter = kind.attach(prepared)
        x = torch.randn(5, kind.target.hidden_size)
        assert torch.equal(drafter.outputs(x), kind.attach(raw).outputs(x))
        while kind.id not in runtime.controller.residency.resident:
            runtime.controller.residency.update([(kind.id, 1.0)], None)
            runtime.controller.residency.wait(20.0)
            runtime.controller.residency.poll()
        assert set(threads[1:]) == {'memspec-loader'}
    finally:
        runtime.close()
