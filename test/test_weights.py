# SPDX-License-Identifier: Apache-2.0
"""Reading safetensors: whole, checked, and a named error for everything else."""

import hashlib
import json
import struct

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest
from safetensors.torch import save_file
import torch

from memspec_ros.models.errors import BundleError
from memspec_ros.models.reading import CHUNK_BYTES, LoadCancelled, read_file
from memspec_ros.models.target import load_target, open_checkpoint
from memspec_ros.models.weights import (
    Checkpoint,
    file_sha256,
    parse_tensors,
    read_metadata,
    read_tensors,
)

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
          torch.int16, torch.int8, torch.uint8, torch.bool]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / 'x.safetensors'
    tensors = {str(dtype): (torch.arange(6).reshape(2, 3) % 2).to(dtype) for dtype in DTYPES}
    tensors['empty'] = torch.zeros(0, 4)
    tensors['scalar'] = torch.tensor(3.5)
    save_file(tensors, path, metadata={'made': 'here'})
    return path


def expected_of(path):
    from safetensors.torch import load_file
    return load_file(path)


@pytest.mark.parametrize('reader', ['read_tensors', 'checkpoint'])
def test_every_type_is_read_as_the_reference_reads_it(file, reader):
    if reader == 'read_tensors':
        read = read_tensors(file)
    else:
        with Checkpoint([file]) as checkpoint:
            read = {name: checkpoint[name] for name in checkpoint}
            assert checkpoint.elements == sum(t.numel() for t in read.values())
    expected = expected_of(file)
    assert set(read) == set(expected)
    for name, tensor in expected.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name


def test_metadata_is_read_without_the_tensors(file):
    assert read_metadata(file) == {'made': 'here'}


def with_header(path, header, data=b''):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack('<Q', len(text)) + text + data)
    return path


def test_data_that_another_writer_left_unaligned(tmp_path):
    header = {'x': {'dtype': 'F32', 'shape': [2], 'data_offsets': [1, 9]}}
    text = json.dumps(header).encode()
    path = with_header(tmp_path / 'x', text + b' ' * (-(8 + len(text)) % 8),
                       b'\0' + struct.pack('<2f', 1.5, -2.0))
    assert read_tensors(path)['x'].tolist() == [1.5, -2.0]


def entry(**changes):
    return {'x': {'dtype': 'F32', 'shape': [2], 'data_offsets': [0, 8], **changes}}


BAD = {
    'empty file': b'', 'a few bytes': b'\x01\x02', 'only a size': struct.pack('<Q', 100),
    'a huge header': struct.pack('<Q', 2 ** 62) + b'{}', 'no json': struct.pack('<Q', 4) + b'{{{{',
    'not utf-8': struct.pack('<Q', 4) + b'"\xff\xfe"'}
BAD_HEADERS = {
    'a list': [1, 2], 'a number entry': {'x': 5}, 'no dtype': {'x': {'shape': [2]}},
    'unknown dtype': entry(dtype='F8_E4M3'), 'beyond the end': entry(data_offsets=[0, 80]),
    'negative': entry(data_offsets=[-8, 0]), 'backwards': entry(data_offsets=[8, 0]),
    'wrong shape': entry(shape=[3]), 'wrong size': entry(data_offsets=[0, 7]),
    'text offsets': entry(data_offsets=['0', '8']), 'one offset': entry(data_offsets=[0]),
    'float offsets': entry(data_offsets=[0.0, 8.0]), 'text shape': entry(shape='2'),
    'deep': None}


@pytest.mark.parametrize('name', [*BAD, *BAD_HEADERS])
def test_a_damaged_file_is_named(tmp_path, name):
    """Pitfall 25."""
    path = tmp_path / 'bad.safetensors'
    if name in BAD:
        path.write_bytes(BAD[name])
    elif name == 'deep':
        with_header(path, b'[' * 100_000, b'\0' * 8)
    else:
        with_header(path, BAD_HEADERS[name], b'\0' * 8)
    with pytest.raises(BundleError, match='bad.safetensors'):
        read_tensors(path)
    with pytest.raises(BundleError, match='bad.safetensors'):
        Checkpoint([path])


@pytest.mark.parametrize('name', ['a few bytes', 'a huge header', 'no json', 'not utf-8'])
def test_metadata_of_a_damaged_file_is_a_named_error(tmp_path, name):
    (tmp_path / 'bad').write_bytes(BAD[name])
    with pytest.raises(BundleError, match='bad'):
        read_metadata(tmp_path / 'bad')
    with pytest.raises(BundleError, match='bad'):
        read_metadata(with_header(tmp_path / 'bad', [1]))


@given(data=st.data())
@settings(max_examples=200)
def test_any_change_of_bytes_is_read_or_named_never_a_crash(data):
    tensors = {'a': {'dtype': 'F32', 'shape': [2, 2], 'data_offsets': [0, 16]},
               'b': {'dtype': 'I8', 'shape': [3], 'data_offsets': [16, 19]}}
    text = json.dumps(tensors).encode()
    raw = bytearray(struct.pack('<Q', len(text)) + text + bytes(range(19)))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[:data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw
    buffer = torch.tensor(list(raw), dtype=torch.uint8)
    try:
        parse_tensors(__file__, buffer)
    except BundleError:
        pass


@pytest.mark.parametrize('size', [8, 100, 1000, 3000])
def test_a_file_cut_anywhere_is_named(file, tmp_path, size):
    whole = file.read_bytes()
    (tmp_path / 'cut').write_bytes(whole[:min(size, len(whole) - 1)])
    for reader in (read_tensors, lambda path: Checkpoint([path])):
        with pytest.raises(BundleError, match='cut'):
            reader(tmp_path / 'cut')


def test_missing_files_and_directories(tmp_path):
    for reader in (read_tensors, read_metadata, file_sha256, lambda p: Checkpoint([p])):
        with pytest.raises(BundleError, match='gone: No such file'):
            reader(tmp_path / 'gone')
        with pytest.raises(BundleError, match='directory'):
            reader(tmp_path)


def test_the_hash_of_what_was_read_is_checked(file):
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert file_sha256(file) == digest
    assert read_tensors(file, digest)
    with pytest.raises(BundleError, match=f'sha256 is {digest}, the manifest says {"0" * 64}'):
        read_tensors(file, '0' * 64)


def test_a_load_ends_when_all_bytes_are_in_memory(tmp_path):
    """Pitfall 20: nothing is mapped; the file may go, the tensors stay."""
    path = tmp_path / 'big.safetensors'
    save_file({'x': torch.arange(3 * CHUNK_BYTES // 8)}, path)
    progress = []
    tensors = read_tensors(path, progress=progress.append)
    assert len(progress) >= 3 and progress == sorted(progress)
    assert progress[-1] == path.stat().st_size
    path.write_bytes(b'\0' * path.stat().st_size)
    assert torch.equal(tensors['x'], torch.arange(3 * CHUNK_BYTES // 8))
    with open('/proc/self/maps') as maps:
        assert 'big.safetensors' not in maps.read()


def test_all_tensors_share_one_buffer(file):
    """Pitfall 20: no second copy beside the bytes that were read."""
    places = {t.untyped_storage().data_ptr() for t in read_tensors(file).values() if t.numel()}
    assert len(places) == 1


def test_a_load_can_be_given_up_between_chunks(tmp_path):
    path = tmp_path / 'big'
    path.write_bytes(b'\0' * (3 * CHUNK_BYTES))
    reads = []
    with pytest.raises(LoadCancelled):
        read_file(path, progress=reads.append, cancelled=lambda: len(reads) == 1)
    assert reads == [CHUNK_BYTES]


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    path = tmp_path / 'big'
    path.write_bytes(b'\0' * (2 * CHUNK_BYTES))

    def shrink(done):
        with path.open('r+b') as file:
            file.truncate(CHUNK_BYTES)
    with pytest.raises(BundleError, match=f'ended after {CHUNK_BYTES} of {2 * CHUNK_BYTES}'):
        read_file(path, progress=shrink)


def test_a_sharded_checkpoint_is_read_through_its_index(tmp_path, reference, trainable):
    reference.save_pretrained(tmp_path, max_shard_size='100KB')
    assert (tmp_path / 'model.safetensors.index.json').is_file()
    sharded = load_target(tmp_path, torch.float32, torch.device('cpu'), 64, packed=False)
    assert torch.equal(sharded.model.head, trainable.model.head)
    assert torch.equal(sharded.model.layers[3].down, trainable.model.layers[3].down)
    (tmp_path / 'model.safetensors.index.json').write_text('{"weight_map": 5}')
    with pytest.raises(BundleError, match='not a weight index'):
        open_checkpoint(tmp_path)


def test_a_missing_shard_is_named(tmp_path, reference):
    reference.save_pretrained(tmp_path, max_shard_size='100KB')
    victim = sorted(tmp_path.glob('model-*.safetensors'))[1]
    victim.unlink()
    with pytest.raises(BundleError, match=victim.name):
        load_target(tmp_path, torch.float32, torch.device('cpu'), 64)
