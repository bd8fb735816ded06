# SPDX-License-Identifier: Apache-2.0
"""
Weight files: read by chunks, checked, and without a second copy in memory.

A memory-mapped load returns before anything was read, and its mapped pages
stand beside the tensors made from them. Here a load has ended when its bytes
are in memory, and the page cache holds nothing of the file (see reading.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import hashlib
import json
import math
import os
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from .errors import BundleError
from .reading import advise_random, CHUNK_BYTES, drop_pages, new_slot, read_file, Slot

_DTYPES = {
    'F64': torch.float64, 'F32': torch.float32, 'F16': torch.float16, 'BF16': torch.bfloat16,
    'I64': torch.int64, 'I32': torch.int32, 'I16': torch.int16, 'I8': torch.int8,
    'U8': torch.uint8, 'BOOL': torch.bool,
}
_HEADER_LIMIT = 100 << 20


def read_tensors(path: Path, sha256: str | None = None,
                 progress: Callable[[int], None] | None = None,
                 cancelled: Callable[[], bool] | None = None,
                 slot: Callable[[int], Slot] = new_slot) -> dict[str, Tensor]:
    """
    Read a safetensors file into memory and return its tensors by name.

    All tensors are views of one buffer, that of the slot. Arguments and errors as
    of ``read_file``; BundleError also where it is no safetensors file.
    """
    return parse_tensors(path, read_file(path, sha256, progress, cancelled, slot))


def parse_tensors(path: Path, buffer: Tensor) -> dict[str, Tensor]:
    """Tensors (views) of a safetensors file held in a uint8 ``buffer``, on any device."""
    try:
        header_size = int.from_bytes(_bytes(buffer[:8]), 'little')
        if not 2 <= header_size <= min(_HEADER_LIMIT, len(buffer) - 8):
            raise ValueError(f'header of {header_size} bytes in a file of {len(buffer)}')
        header = json.loads(_bytes(buffer[8:8 + header_size]))
        data = buffer[8 + header_size:]
        header.pop('__metadata__', None)
        return {name: _tensor(data, entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise BundleError(f'{path}: not a whole safetensors file ({error})') from error


def _bytes(buffer: Tensor) -> bytes:
    return buffer.cpu().numpy().tobytes()


def _tensor(data: Tensor, entry: dict) -> Tensor:
    first, last = entry['data_offsets']
    if not 0 <= first <= last <= data.numel():
        raise ValueError(f'tensor data up to byte {last}, the file holds {data.numel()}')
    dtype, piece = _DTYPES[entry['dtype']], data[first:last]
    if (piece.data_ptr() % dtype.itemsize) != 0:
        piece = piece.clone()  # headers of other writers may leave data unaligned
    return piece.view(dtype).view(entry['shape'])


class Checkpoint(Mapping):
    """
    Tensors of one or several safetensors files, each read when it is asked for.

    A model that fuses its matrices while it loads then never holds more than
    its own weights and one tensor. Headers and sizes are checked at once: a
    truncated file is found before minutes of reading. Use as a context manager.
    """

    def __init__(self, paths: Sequence[Path]):
        self._files: list[tuple[Path, BinaryIO]] = []
        self._entries: dict[str, tuple[Path, BinaryIO, int, dict]] = {}
        for path in paths:
            try:
                file = path.open('rb', buffering=0)
            except OSError as error:
                self.close()
                raise BundleError(f'{path}: {error.strerror or error}') from error
            self._files.append((path, file))
            self._read_header(path, file)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files and of their pages in the cache."""
        for _, file in self._files:
            drop_pages(file.fileno())
            file.close()
        self._files = []

    def __getitem__(self, name: str) -> Tensor:
        shape = self._entries[name][3]['shape']
        return self.values_of(name, 0, math.prod(shape)).view(shape)

    def values_of(self, name: str, first: int, count: int) -> Tensor:
        """``count`` values of a tensor from the ``first`` on: [count]."""
        path, file, base, entry = self._entries[name]
        dtype = _DTYPES[entry['dtype']]
        buffer = torch.empty(count * dtype.itemsize, dtype=torch.uint8)
        view = memoryview(buffer.numpy())
        start = entry['data_offsets'][0] + first * dtype.itemsize
        try:
            file.seek(base + start)
            done = 0
            while done < len(view):
                read = file.readinto(view[done:done + CHUNK_BYTES])
                if not read:
                    raise BundleError(f'{path}: ended within tensor {name}')
                done += read
        except OSError as error:
            raise BundleError(f'{path}: {error.strerror or error}') from error
        return buffer.view(dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return tuple(self._entries[name][3]['shape'])

    def table(self, name: str, dtype: torch.dtype) -> StoredTable:
        """A matrix that stays in its file; see StoredTable."""
        path, _, base, entry = self._entries[name]
        return StoredTable(path, base + entry['data_offsets'][0], tuple(entry['shape']),
                           _DTYPES[entry['dtype']], dtype)

    @property
    def elements(self) -> int:
        """Numbers in all tensors together."""
        return sum(math.prod(entry['shape']) for _, _, _, entry in self._entries.values())

    def _read_header(self, path: Path, file: BinaryIO) -> None:
        size = os.fstat(file.fileno()).st_size
        try:
            header_size = int.from_bytes(file.read(8), 'little')
            if not 2 <= header_size <= min(_HEADER_LIMIT, size - 8):
                raise ValueError(f'header of {header_size} bytes in a file of {size}')
            header = json.loads(file.read(header_size))
            header.pop('__metadata__', None)
            for name, entry in header.items():
                first, last = entry['data_offsets']
                expected = math.prod(entry['shape']) * _DTYPES[entry['dtype']].itemsize
                if {type(n) for n in (first, last, *entry['shape'])} != {int}:
                    raise ValueError(f'tensor {name} has sizes that are no whole numbers')
                if not 0 <= first <= last or last - first != expected:
                    raise ValueError(f'tensor {name} has {last - first} bytes, not {expected}')
                if 8 + header_size + last > size:
                    raise ValueError(f'tensor {name} ends beyond the file: it is truncated')
                self._entries[name] = (path, file, 8 + header_size, entry)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self.close()
            raise BundleError(f'{path}: not a whole safetensors file ({error})') from error


class StoredTable:
    """
    A matrix [N, H] that stays in its file, and gives rows in ``dtype``.

    For an embedding, of which a step needs a row or a few. Rows are read, not
    mapped: a file that shrinks is an error with a name, where a mapping would end
    the process. What was read stays in the page cache as long as there is room.

    Attributes
    ----------
    nbytes: bytes in memory: 0

    """

    nbytes = 0
    device = torch.device('cpu')

    def __init__(self, path: Path, offset: int, shape: tuple[int, int], stored: torch.dtype,
                 dtype: torch.dtype):
        self.shape, self.dtype = shape, dtype
        self._path, self._offset, self._stored = path, offset, stored
        self._row_bytes = shape[1] * stored.itemsize
        try:
            self._file = path.open('rb', buffering=0)
        except OSError as error:
            raise BundleError(f'{path}: {error.strerror or error}') from error
        advise_random(self._file.fileno())

    def rows(self, ids: Sequence[int]) -> Tensor:
        """Rows ``ids``: [len(ids), H]. Raises IndexError, and BundleError naming the file."""
        buffer = torch.empty(len(ids), self._row_bytes, dtype=torch.uint8)
        for row, token in zip(buffer.numpy(), ids):
            if not 0 <= token < self.shape[0]:
                raise IndexError(f'row {token} of a table of {self.shape[0]}')
            try:
                count = os.preadv(self._file.fileno(), [row],
                                  self._offset + token * self._row_bytes)
            except OSError as error:
                raise BundleError(f'{self._path}: {error.strerror or error}') from error
            if count != self._row_bytes:
                raise BundleError(f'{self._path}: it has become shorter since it was opened')
        return buffer.view(self._stored).to(self.dtype)


def read_metadata(path: Path) -> dict[str, str]:
    """The ``__metadata__`` strings of a safetensors file, without reading its tensors."""
    try:
        with path.open('rb') as file:
            size = int.from_bytes(file.read(8), 'little')
            if size > _HEADER_LIMIT:
                raise ValueError(f'header of {size} bytes')
            return json.loads(file.read(size)).get('__metadata__', {})
    except OSError as error:
        raise BundleError(f'{path}: {error.strerror or error}') from error
    except (ValueError, AttributeError, RecursionError) as error:
        raise BundleError(f'{path}: not a safetensors file ({error})') from error


def file_sha256(path: Path) -> str:
    """Hexadecimal sha256 of a file."""
    digest = hashlib.sha256()
    try:
        with path.open('rb') as file:
            while block := file.read(CHUNK_BYTES):
                digest.update(block)
            drop_pages(file.fileno())
    except OSError as error:
        raise BundleError(f'{path}: {error.strerror or error}') from error
    return digest.hexdigest()
