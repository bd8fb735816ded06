# SPDX-License-Identifier: Apache-2.0
"""Preallocated keys and values of attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

# Turns keys [..., D] back by a number of positions (Rope.turn_back).
Turn = Callable[[Tensor, int], Tensor]


class RollbackCache:
    """
    A cache of one sequence that is rolled back by setting its length.

    Attributes
    ----------
    capacity: positions that fit
    floor: least length, beside 0, that it can be rolled back to
    mark: what a copy of its views has to be told to be understood (``arrange``)

    """

    capacity: int
    floor = 0
    mark = 0

    def reach(self, length: int) -> int:
        """How many rows may run together after ``length`` positions."""
        return self.capacity - length

    def arrange(self, length: int, mark: int) -> None:
        """Expect ``length`` positions copied into ``views``, from a cache with that ``mark``."""


class KVBuffers:
    """
    Keys and values of several layers, for a batch.

    Attributes
    ----------
    keys, values: Tensor [layers, B, KV heads, capacity, head width]
    plain: whether position p stands in row p, to be read as it is

    """

    plain = True

    def __init__(self, keys: Tensor, values: Tensor):
        self.keys = keys
        self.values = values

    @property
    def dtype(self) -> torch.dtype:
        """Type that attention runs in."""
        return self.keys.dtype

    def extend(self, layer: int, start: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """
        Hold new rows [B, KV heads, T, head width] of a layer from position ``start`` on.

        Returns keys and values [B, KV heads, start + T, head width] to attend to.
        """
        end = start + key.shape[2]
        keys, values = self.keys[layer], self.values[layer]
        keys[:, :, start:end] = key
        values[:, :, start:end] = value
        return keys[:, :, :end], values[:, :, :end]


class KVCache(KVBuffers, RollbackCache):
    """
    Keys and values of one sequence, with one length per group of layers.

    Attributes
    ----------
    groups: layer ranges (first, last exclusive), lowest first
    lengths: positions held, one a group

    """

    def __init__(self, layers: int, kv_heads: int, capacity: int, head_dim: int,
                 dtype: torch.dtype, device: torch.device, boundaries: Iterable[int] = ()):
        shape = (layers, 1, kv_heads, capacity, head_dim)
        super().__init__(torch.zeros(shape, dtype=dtype, device=device),
                         torch.zeros(shape, dtype=dtype, device=device))
        edges = [0, *sorted(set(boundaries) - {0, layers}), layers]
        self.groups = tuple(zip(edges, edges[1:]))
        self.lengths = [0] * len(self.groups)

    @property
    def capacity(self) -> int:
        """Positions that fit."""
        return self.keys.shape[3]

    @property
    def bytes(self) -> int:
        """Bytes allocated."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def position_bytes(self) -> int:
        """Bytes of the keys and values of one position, all layers."""
        return self.bytes // self.capacity

    def read_bytes(self, length: int) -> int:
        """Bytes that attending to ``length`` positions reads, all layers."""
        return self.position_bytes * length

    def set_length(self, length: int, group: int | None = None) -> None:
        """
        Say how many positions a group (or every group) holds from now on.

        What is said of every group is committed: it is rolled back to ``floor`` at most.
        """
        if not 0 <= length <= self.capacity:
            raise ValueError(f'length {length} outside 0..{self.capacity}')
        for index in range(len(self.lengths)) if group is None else (group,):
            self.lengths[index] = length

    def move(self, start: int, rows: Sequence[int]) -> None:
        """Bring positions ``start + rows[i]`` to ``start + i``, in all layers."""
        source = torch.tensor(rows, device=self.keys.device) + start
        for cached in (self.keys, self.values):
            cached[:, :, :, start:start + len(rows)] = cached[:, :, :, source]

    def drop(self, first: int, count: int, length: int, turn: Turn) -> None:
        """
        Drop ``count`` positions from ``first`` on, of ``length`` that are held.

        Those behind move up, their keys turned back to the positions they then stand at.
        """
        shift_rows(self.keys, self.values, slice(first, length - count),
                   slice(first + count, length), lambda keys: turn(keys, count))
        self.set_length(length - count)

    def views(self, length: int) -> list[Tensor]:
        """The first ``length`` positions of all that is kept, writable."""
        return [self.keys[:, :, :, :length], self.values[:, :, :, :length]]

    def groups_below(self, depth: int) -> Iterable[int]:
        """Indices of the groups that make up the lowest ``depth`` layers."""
        return (index for index, (_, last) in enumerate(self.groups) if last <= depth)


def shift_rows(keys: Tensor, values: Tensor, to: slice, source: slice,
               turn: Callable[[Tensor], Tensor]) -> None:
    """Bring rows ``source`` of caches to ``to``, layer by layer; their keys are turned."""
    for layer_keys, layer_values in zip(keys, values):
        layer_keys[:, :, to] = turn(layer_keys[:, :, source])
        layer_values[:, :, to] = layer_values[:, :, source].clone()
