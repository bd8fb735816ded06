# SPDX-License-Identifier: Apache-2.0
"""A bundle's files are hashed once, and again when they have changed."""

import os
import shutil

from conftest import sha256_of
import pytest

from memspec_ros.models import verified
from memspec_ros.models.bundle import load_bundle
from memspec_ros.models.errors import BundleError
from memspec_ros.models.verified import has_sha256


@pytest.fixture
def hashed(tmp_path, monkeypatch):
    """Provide a cache of the test's own, and the names of the files that are hashed."""
    monkeypatch.setenv('MEMSPEC_CACHE', str(tmp_path / 'cache'))
    names, real = [], verified.file_sha256

    def counted(path):
        names.append(path.name)
        return real(path)
    monkeypatch.setattr(verified, 'file_sha256', counted)
    return names


@pytest.fixture
def file(tmp_path):
    path = tmp_path / 'draft.safetensors'
    path.write_bytes(b'good' * 1000)
    return path


def test_what_was_right_and_has_not_changed_is_not_hashed_again(hashed, file):
    digest = sha256_of(file)
    assert [has_sha256(file, digest, again=False) for _ in range(3)] == [True] * 3
    assert hashed == ['draft.safetensors']
    assert has_sha256(file, digest) and len(hashed) == 2
    assert not has_sha256(file, 'a' * 64, again=False)  # another hash is another question


def test_a_changed_file_is_hashed_even_where_its_times_were_put_back(hashed, file):
    digest, before = sha256_of(file), file.stat()
    assert has_sha256(file, digest, again=False)
    file.write_bytes(b'evil' * 1000)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    for _ in range(2):  # nor is what was found wrong taken for right later
        assert not has_sha256(file, digest, again=False)
    other = file.with_name('other')
    other.write_bytes(b'good' * 1000)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(file)
    assert has_sha256(file, digest, again=False) and len(hashed) == 4


@pytest.mark.parametrize('content', [b'', b'{"', b'[1]', b'{"x": 7}', b'\xff\x00'])
def test_a_damaged_cache_is_made_anew(hashed, file, tmp_path, content):
    (tmp_path / 'cache').mkdir()
    (tmp_path / 'cache' / 'verified.json').write_bytes(content)
    digest = sha256_of(file)
    assert all(has_sha256(file, digest, again=False) for _ in range(2))
    assert len(hashed) == 1


def test_without_a_cache_to_write_to_every_start_hashes(hashed, file, tmp_path):
    (tmp_path / 'cache').write_text('a file is in the way')
    digest = sha256_of(file)
    assert all(has_sha256(file, digest, again=False) for _ in range(2))
    assert len(hashed) == 2


def test_files_that_are_gone_are_forgotten(hashed, file, tmp_path):
    assert has_sha256(file, sha256_of(file))
    other = shutil.move(file, file.with_name('moved.safetensors'))
    assert has_sha256(other, sha256_of(other))
    said = (tmp_path / 'cache' / 'verified.json').read_text()
    assert 'moved.safetensors' in said and 'draft.safetensors' not in said
    assert len(list((tmp_path / 'cache').iterdir())) == 1  # nothing left of the writing


def test_a_bundle_is_hashed_at_the_first_start_and_when_it_has_changed(
        hashed, full_bundle, tmp_path):
    directory = shutil.copytree(full_bundle, tmp_path / 'bundle')
    load_bundle(directory, again=False)
    first = list(hashed)
    assert 'top.safetensors' in first
    load_bundle(directory, again=False)
    assert hashed == first
    load_bundle(directory)
    assert hashed == first * 2
    damaged = directory / 'top.safetensors'
    damaged.write_bytes(damaged.read_bytes()[:-1] + b'\x01')
    with pytest.raises(BundleError, match="draft 'top': .*sha256 of the manifest"):
        load_bundle(directory, again=False)
