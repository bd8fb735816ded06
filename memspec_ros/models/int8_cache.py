# SPDX-License-Identifier: Apache-2.0
"""
A cache whose old positions are kept in INT8, with a scale per head and position.

Which positions a row reads in INT8 follows from the row's own position: all
before the last block boundary that lies ``recent`` or more positions behind it,
but for the first few, which attention leans on. ``reach`` keeps rows that run
together on one side of a boundary. So a row reads the same, whether it is run
alone or verified with others. Exact rows stay for a block longer than they are
read, so that a text may be taken back a little, as the tail of a chat template
is; what has been let go of is never made exact again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .kv_cache import KVCache, shift_rows, Turn
from .kv_options import BLOCK

_LARGEST = 127.0


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """INT8 rows [..., D] and their scales [..., 1] in float32; rows of zeros stay zeros."""
    rows = rows.float()
    scales = rows.abs().amax(-1, keepdim=True).clamp_min(1e-30) / _LARGEST
    return (rows / scales).round_().to(torch.int8), scales


def exact_rows(capacity: int, recent: int, sinks: int, spare: int) -> int:
    """Of ``capacity`` positions, how many have a place for exact rows; see Int8KVCache."""
    return min(capacity, sinks + recent + 2 * BLOCK + spare)


def int8_cache_bytes(layers: int, row: int, heads: int, capacity: int, number: int, recent: int,
                     sinks: int, spare: int) -> tuple[int, int]:
    """
    Bytes that an Int8KVCache takes: (what holds positions, what makes a layer readable).

    row: numbers in a position's keys of a layer, of ``heads`` heads; number: bytes of one.
    """
    exact = exact_rows(capacity, recent, sinks, spare) * row * number
    shadow = old_positions(capacity, recent, sinks) * (row + 4 * heads)
    return 2 * layers * (exact + shadow), 2 * capacity * row * number


def old_positions(position: int, recent: int, sinks: int) -> int:
    """How many positions behind the sinks a row at ``position`` reads in INT8."""
    return max(0, (position - sinks - recent) // BLOCK * BLOCK)


class Int8KVCache(KVCache):
    """
    A KVCache whose old positions take a byte a number.

    Parameters, beside those of KVCache
    -----------------------------------
    recent: positions before a row that it reads exactly, at least
    sinks: first positions, which are always exact
    spare: most rows verified at once

    """

    plain = False

    def __init__(self, layers: int, kv_heads: int, capacity: int, head_dim: int,
                 dtype: torch.dtype, device: torch.device, boundaries: Iterable[int] = (), *,
                 recent: int, sinks: int, spare: int):
        super().__init__(layers, kv_heads, exact_rows(capacity, recent, sinks, spare), head_dim,
                         dtype, device, boundaries)
        self._capacity = capacity
        self.recent, self.sinks = recent, sinks
        old = self._old(capacity)
        shape = (layers, 1, kv_heads, old, head_dim)
        # Keys, then values.
        self._shadows = [torch.zeros(shape, dtype=torch.int8, device=device) for _ in range(2)]
        self._scales = [torch.zeros((*shape[:-1], 1), device=device) for _ in range(2)]
        # One layer at a time is made readable.
        self._scratch = [torch.zeros(1, kv_heads, capacity, head_dim, dtype=dtype, device=device)
                         for _ in range(2)]
        # Behind the sinks: positions in INT8, and positions whose exact rows are gone.
        self._quantised = self._gone = 0

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def bytes(self) -> int:
        return super().bytes + sum(tensor.nbytes for tensor in (
            *self._shadows, *self._scales, *self._scratch))

    def read_bytes(self, length: int) -> int:
        exact = (self.keys.nbytes + self.values.nbytes) // self.keys.shape[3]
        old = min(self._old(length), self._quantised)
        shadow = sum(tensor.nbytes // max(1, tensor.shape[3])
                     for tensor in (*self._shadows, *self._scales))
        return exact * (length - old) + shadow * old

    @property
    def floor(self) -> int:
        return self.sinks + self.recent + self._gone if self._gone else 0

    @property
    def mark(self) -> int:
        return self._gone

    def reach(self, length: int) -> int:
        boundary = self.sinks + self.recent + self._old(length) + BLOCK
        return min(boundary, self.capacity) - length

    def extend(self, layer: int, start: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        exact = super().extend(layer, start - self._gone, key, value)
        old = min(self._old(start), self._quantised)
        if not old:
            return exact
        first, end = self.sinks, start + key.shape[2]
        for rows, scratch, shadow, scale in zip(exact, self._scratch, self._shadows,
                                                self._scales):
            scratch[:, :, :first] = rows[:, :, :first]
            torch.mul(shadow[layer, :, :, :old], scale[layer, :, :, :old],
                      out=scratch[:, :, first:first + old])
            scratch[:, :, first + old:end] = rows[:, :, first + old - self._gone:]
        keys, values = self._scratch
        return keys[:, :, :end], values[:, :, :end]

    def set_length(self, length: int, group: int | None = None) -> None:
        super().set_length(length, group)
        if group is not None:
            return
        if not length:
            self._gone = 0
        if length < self.floor:
            raise ValueError(f'length {length} below {self.floor}: exact keys and values of '
                             f'positions before are gone')
        old = self._old(length)
        self._quantised = min(self._quantised, old)
        while self._quantised < old:
            self._quantise_block(length)

    def move(self, start: int, rows: Sequence[int]) -> None:
        super().move(start - self._gone, rows)

    def drop(self, first: int, count: int, length: int, turn: Turn) -> None:
        if first != self.sinks or count % BLOCK:
            raise ValueError(f'whole blocks behind {self.sinks} positions are dropped, not '
                             f'{count} behind {first}')
        kept = max(0, self._quantised - count)
        for layer in range(self.keys.shape[0]):
            for turned, (shadow, scale) in zip((True, False), zip(self._shadows, self._scales)):
                source = slice(count, count + kept)
                rows, scales = (t[layer, :, :, source] for t in (shadow, scale))
                if turned:
                    rows, scales = quantise(turn(rows * scales, count))
                shadow[layer, :, :, :kept] = rows.clone()
                scale[layer, :, :, :kept] = scales.clone()
        # In the buffer of exact rows, those of blocks that are gone have no place.
        end = length - self._gone
        ahead = max(0, count - self._gone)
        shift_rows(self.keys, self.values, slice(first, end - ahead), slice(first + ahead, end),
                   lambda keys: turn(keys, count))
        self._quantised, self._gone = kept, max(0, self._gone - count)
        self.set_length(length - count)

    def views(self, length: int) -> list[Tensor]:
        exact = length - self._gone
        return [self.keys[:, :, :, :exact], self.values[:, :, :, :exact],
                *(tensor[:, :, :, :self._quantised]
                  for tensor in (*self._shadows, *self._scales))]

    def arrange(self, length: int, mark: int) -> None:
        self._gone, self._quantised = mark, self._old(length)

    def _old(self, position: int) -> int:
        return old_positions(position, self.recent, self.sinks)

    def _quantise_block(self, length: int) -> None:
        """Round the next block, and let go of the exact rows of the one before it."""
        block = slice(self._quantised, self._quantised + BLOCK)
        start = self.sinks + self._quantised - self._gone
        for cached, shadow, scale in zip((self.keys, self.values), self._shadows, self._scales):
            for layer, rows in enumerate(cached):
                shadow[layer, :, :, block], scale[layer, :, :, block] = quantise(
                    rows[:, :, start:start + BLOCK])
        self._quantised += BLOCK
        ahead = self._quantised - BLOCK - self._gone
        if ahead > 0:
            end = length - self._gone
            shift_rows(self.keys, self.values, slice(self.sinks, end - ahead),
                       slice(self.sinks + ahead, end), lambda keys: keys.clone())
            self._gone += ahead
