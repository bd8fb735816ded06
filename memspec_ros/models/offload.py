# SPDX-License-Identifier: Apache-2.0
"""
Layers that stay in storage: read in every pass, while the one before them computes.

The lowest layers are in memory, as many as a budget holds beside two buffers of
one layer each. The others lie in files of their own, in the type that is
computed in and with their projections fused, so that a pass reads them in long
runs past the page cache. A pass over all layers then takes as long as storage
does, and is worth spending on several tokens: what self-speculation is for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
from dataclasses import dataclass
import hashlib
import json
import mmap
import os
from pathlib import Path
import threading
from typing import Protocol

import numpy as np
from safetensors.torch import save_file
import torch
from torch import Tensor

from .errors import BundleError
from .layers import layer_elements, LayerWeights
from .llama_config import LlamaConfig
from .reading import HostSlot, Slot, whole_blocks
from .weights import read_tensors

BUFFERS = 2
_MIB = 1 << 20


class _Store(Protocol):
    """Where layers lie; a slower one may stand before it (runtime.storage)."""

    def read(self, draft: str, progress: Callable[[int], None],
             cancelled: Callable[[], bool]) -> Mapping[str, Tensor]:
        """Read all tensors of a layer."""


@dataclass(frozen=True)
class Offload:
    """
    layers_bytes: most memory for the target's layers, buffers included. cache: where
    the files of streamed layers are kept. limit: puts slower storage before a store.
    """

    layers_bytes: int
    cache: Path
    limit: Callable[[_Store], _Store] = lambda store: store

    def resident(self, config: LlamaConfig, dtype: torch.dtype) -> int:
        """How many layers stay in memory; BundleError where not even one would."""
        size = layer_bytes(config, dtype)
        if self.layers_bytes >= config.layers * size:
            return config.layers
        count = self.layers_bytes // size - BUFFERS
        if count < 1:
            raise BundleError(
                f'{self.layers_bytes / _MIB:.1f} MiB for layers are too little: one layer in '
                f'memory and {BUFFERS} buffers take {(1 + BUFFERS) * size / _MIB:.1f} MiB')
        return min(count, config.layers - 1)


def layer_bytes(config: LlamaConfig, dtype: torch.dtype) -> int:
    """Bytes of a layer in memory, biases left out."""
    return layer_elements(config) * dtype.itemsize


class StreamedLayers(Sequence):
    """
    Layers of a target of which the lowest are in memory.

    A slice gives its layers one by one, each good until the next is asked for.
    Used by one thread.

    Attributes
    ----------
    resident: the layers in memory
    buffer_bytes: of the buffers that the others pass through

    """

    def __init__(self, resident: Sequence[LayerWeights], count: int, stream: LayerStream):
        self.resident = list(resident)
        self._count = count
        self._stream = stream
        self.buffer_bytes = stream.buffer_bytes

    def close(self) -> None:
        """Read no more: a read in flight is given up and waited for."""
        self._stream.stop()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index):
        if isinstance(index, slice):
            return _Span(self, range(self._count)[index])
        place = range(self._count)[index]
        if place < len(self.resident):
            return self.resident[place]
        return self._stream.layer(place)


class _Span:
    """A run of layers, each fetched when it is its turn."""

    def __init__(self, layers: StreamedLayers, places: range):
        self._layers, self._places = layers, places

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[LayerWeights]:
        return (self._layers[place] for place in self._places)


class LayerStream:
    """
    Reads layers in turn, the next one while the last one given is used.

    After the last comes the first: it is there when the next pass begins.
    Errors of the store come out where the layer is asked for.

    store: has layers by number (as text). first, last (exclusive): those
    streamed. device: where they are used.
    """

    def __init__(self, store: _Store, first: int, last: int, buffer_bytes: int,
                 device: torch.device):
        self._store = store
        self._first, self._last = first, last
        self._device = device
        self._read: _Read | None = None
        self.buffer_bytes = buffer_bytes

    def layer(self, place: int) -> LayerWeights:
        """The layer of that number; the one given before is no longer good."""
        if self._read is None or self._read.place != place:
            self.stop()
            self._read = _Read(self._store, place)
        read, self._read = self._read, None
        tensors = read.result()
        if self._device.type != 'cpu':
            tensors = {name: tensor.to(self._device) for name, tensor in tensors.items()}
        following = place + 1 if place + 1 < self._last else self._first
        self._read = _Read(self._store, following)
        return LayerWeights.of(tensors)

    def stop(self) -> None:
        """Give up the read in flight."""
        if self._read is not None:
            self._read.cancel()
            self._read = None


class _Read:
    """One layer on its way."""

    def __init__(self, store: _Store, place: int):
        self.place = place
        self._store = store
        self._cancelled = threading.Event()
        self._tensors: Mapping[str, Tensor] = {}
        self._error: Exception | None = None
        # A storage that does not answer must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name='memspec-layers', daemon=True)
        self._thread.start()

    def result(self) -> Mapping[str, Tensor]:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._tensors

    def cancel(self) -> None:
        self._cancelled.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._tensors = self._store.read(str(self.place), lambda count: None,
                                             self._cancelled.is_set)
        except Exception as error:  # noqa: BLE001 (raised where the layer is asked for)
            self._error = error


class LayerStore:
    """
    Files of layers, read into two buffers in turn.

    A layer is good until the one after the next is read.
    """

    def __init__(self, files: Mapping[str, Path]):
        self._files = dict(files)
        size = whole_blocks(max(path.stat().st_size for path in files.values()))
        self._memory = [np.frombuffer(mmap.mmap(-1, size), np.uint8) for _ in range(BUFFERS)]
        self._turn = 0

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(len(memory) for memory in self._memory)

    def read(self, draft: str, progress: Callable[[int], None],
             cancelled: Callable[[], bool]) -> Mapping[str, Tensor]:
        """Read the layer of that number; raises BundleError naming its file."""
        path, self._turn = self._files[draft], 1 - self._turn
        memory = self._memory[self._turn]

        def slot(size: int) -> Slot:
            if size > len(memory):
                raise BundleError(f'{path}: has {size} bytes, more than a layer: it was replaced')
            return HostSlot(memory, size)
        return read_tensors(path, None, progress, cancelled, slot)


def place_layers(config: LlamaConfig, offload: Offload, source: Path, dtype: torch.dtype,
                 device: torch.device, make: Callable[[int], LayerWeights],
                 pack: Callable[[LayerWeights], LayerWeights]) -> Sequence[LayerWeights]:
    """
    The layers of the target in directory ``source``, as many in memory as ``offload`` says.

    ``make`` reads a layer; those to be streamed are written to files of their own
    where that has not been done before. Raises BundleError.
    """
    count = offload.resident(config, dtype)
    resident = [pack(make(place)) for place in range(count)]
    if count == config.layers:
        return resident
    directory = offload.cache / 'layers' / _name_of(source, dtype)
    files = {str(place): directory / f'{place}.safetensors'
             for place in range(count, config.layers)}
    for place, path in files.items():
        if not path.exists():
            _write(path, make(int(place)))
    try:
        store = LayerStore(files)
    except OSError as error:
        raise BundleError(f'{directory}: {error.strerror or error}') from error
    return StreamedLayers(resident, config.layers,
                          LayerStream(offload.limit(store), count, config.layers,
                                      store.buffer_bytes, device))


def _name_of(source: Path, dtype: torch.dtype) -> str:
    """Names the files of a target's layers: other weights, other files."""
    stats = {path.name: [path.stat().st_size, path.stat().st_mtime_ns]
             for path in sorted(source.glob('*.safetensors'))}
    made = json.dumps([str(source.resolve()), stats, str(dtype)])
    return hashlib.sha256(made.encode()).hexdigest()[:16]


def _write(path: Path, layer: LayerWeights) -> None:
    """Write a layer in one piece; BundleError where there is no room, say."""
    partial = path.with_suffix(f'.{os.getpid()}.partial')
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.cpu().contiguous() for name, tensor in layer.tensors().items()},
                  partial)
        partial.replace(path)
    except Exception as error:  # the writer has errors of its own for a full disk
        with contextlib.suppress(OSError):
            partial.unlink()
        raise BundleError(f'{path}: a layer to be streamed could not be written ({error}); make '
                          'room there, set MEMSPEC_CACHE, or keep all layers in memory'
                          ) from error
