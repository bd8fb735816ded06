# SPDX-License-Identifier: Apache-2.0
"""
The least time in which any schedule could have written an answer.

A dynamic programme over a relaxation of what policies can do: position in the
answer x resident set x load in flight and what remains of it, rounded down. Any
draft length may be used at any iteration, drafts need not catch up, nothing is
spent on ranking, loads begin and drafts change at any iteration, and decoding may
wait for a load. So no policy is faster; a test holds every one against it.

Why what is left out cannot help a policy: time that passes without tokens
(ranking, catching up, a wait that ends early) only brings the load in flight
nearer to its end, and waiting for that end, which is in the programme, does so
too, later and for as long. A smaller resident set, and more that remains of a
load, are never better.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np

from ..models.drafts import KINDS
from ..training.trace_store import Trace
from .replay import Replayer
from .trace_costs import PLAIN, TraceCosts

# Steps of a load that are told apart: more make the bound closer, and slower.
LEVELS = 16
_LEAST_MS = 1e-6


def least_ms(replayer: Replayer, trace: Trace, levels: int = LEVELS) -> float:
    """Milliseconds of decoding that no policy gets below."""
    return _Programme(replayer, trace, levels).solve()


def bound(replayer: Replayer, trace: Trace, levels: int = LEVELS) -> tuple[int, float]:
    """(tokens, seconds) of the answer at the bound."""
    programme = _Programme(replayer, trace, levels)
    return programme.costs.length, programme.solve() / 1e3


class _Programme:
    """Values are milliseconds to the end of the answer, by position from the last one back."""

    def __init__(self, replayer: Replayer, trace: Trace, levels: int):
        world = replayer.world(trace)
        scenario = world.scenario
        self.costs, self._levels = TraceCosts(world), levels
        slot_free = [spec.id for spec in world.drafts if KINDS[spec.kind].slot_free]
        self._drafts = list(world.load_ms) if scenario.gamma else []
        self._free = [PLAIN, *(slot_free if scenario.gamma else [])]
        most = min(scenario.cache_capacity, len(self._drafts))
        self._sets = [frozenset(chosen) for size in range(most + 1)
                      for chosen in combinations(range(len(self._drafts)), size)]
        index = {chosen: place for place, chosen in enumerate(self._sets)}
        count = len(self._drafts)
        # Set with a draft added to it, -1 where it cannot be loaded beside that set.
        self._with = np.array([[index.get(chosen | {d}, -1) if d not in chosen else -1
                                for d in range(count)] for chosen in self._sets],
                              dtype=int).reshape(len(self._sets), count)
        self._subsets = [[index[other] for other in self._sets if other <= chosen]
                         for chosen in self._sets]
        self._members = [np.array([d in chosen for chosen in self._sets]) for d in range(count)]
        load_ms = np.array([max(world.load_ms[d], _LEAST_MS) for d in self._drafts])
        self._grain = load_ms / levels
        self._initial = self._initial_states(scenario, load_ms, world, index)

    def _initial_states(self, scenario, load_ms, world, index) -> list[tuple[int, int, int]]:
        """(set, draft in flight or -1, level) that decoding may begin with."""
        states = [(index[frozenset()], -1, 0)]
        head_start = (len(world.trace.prompt_ids) - 1) * scenario.profile.prefill_row_ms
        for d in range(len(self._drafts) if scenario.cache_capacity else 0):
            remaining = load_ms[d] - head_start
            if not scenario.first_load_counts or remaining <= 0:
                states.append((index[frozenset({d})], -1, 0))
            else:
                states.append((index[frozenset()], d, self._level(d, remaining)))
        return states

    def _level(self, d: int, remaining: float) -> int:
        return min(self._levels, int(remaining / self._grain[d]))

    def solve(self) -> float:
        """Milliseconds of the whole answer, from the best start."""
        length, sets, count = self.costs.length, len(self._sets), len(self._drafts)
        idle = np.zeros((length + 1, sets))
        # [position, set, draft in flight, level of what remains]; level 0: it has ended.
        loading = np.zeros((length + 1, sets, count, self._levels + 1))
        loading[:, self._with < 0] = np.inf
        for position in range(length - 1, -1, -1):
            self._iterate(position, idle, loading)
            self._load(idle[position], loading[position])
        return min(idle[0, s] if d < 0 else loading[0, s, d, level]
                   for s, d, level in self._initial)

    def _iterate(self, position: int, idle: np.ndarray, loading: np.ndarray) -> None:
        """Best iteration from ``position`` on, by state."""
        idle[position] = np.inf
        loading[position] = np.inf
        steps = np.arange(self._levels + 1)
        rows = np.arange(len(self._drafts))[:, None]
        contenders = [(draft, slice(None)) for draft in self._free]
        contenders += [(draft, members) for draft, members in zip(self._drafts, self._members)]
        for draft, members in contenders:
            for emitted, ms in self.costs.choices(draft, position):
                after = position + emitted
                idle[position, members] = np.minimum(idle[position, members],
                                                     ms + idle[after, members])
                # Rounded down: sooner there than in truth.
                left = np.maximum(0, np.floor(steps - ms / self._grain[:, None] + 1e-9))
                value = ms + loading[after][members][:, rows, left.astype(int)]
                loading[position, members] = np.minimum(loading[position, members], value)

    def _load(self, idle: np.ndarray, loading: np.ndarray) -> None:
        """Let loads begin, end and be waited for at one position."""
        possible = self._with >= 0
        wait = self._grain[:, None] * np.arange(self._levels + 1)
        while True:
            ended = np.where(possible, idle[self._with], np.inf)
            np.minimum(loading, ended[:, :, None] + wait, out=loading)
            begun = loading[:, :, -1].min(axis=1, initial=np.inf)
            better = np.array([begun[subsets].min() for subsets in self._subsets])
            if not (better < idle - _LEAST_MS).any():
                break
            np.minimum(idle, better, out=idle)
        loading[:, :, 0] = np.where(possible, idle[self._with], np.inf)
