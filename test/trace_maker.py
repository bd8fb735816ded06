# SPDX-License-Identifier: Apache-2.0
"""Acceptance traces made by hand, with known figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from memspec_ros.training.trace_store import Trace, TraceHeader, TraceStore

DRAFTS = ('near', 'far', 'top')
GAMMA = 4


def header(drafts: Sequence[str] = DRAFTS, **changes) -> TraceHeader:
    return TraceHeader(**{
        'bundle': 'b' * 64, 'drafts': tuple(drafts), 'gamma': GAMMA, 'ranks': 8,
        'hidden_every': 4, 'dtype': 'float32', 'max_new_tokens': 64, **changes})


def ranks_of(right: np.ndarray, gamma: int = GAMMA) -> np.ndarray:
    """Ranks [D, T, gamma] of drafts that say token t rightly (rank 1) where ``right[d, t]``."""
    drafts, tokens = right.shape
    padded = np.concatenate([np.where(right, 1, 2), np.zeros((drafts, gamma), int)], 1)
    return np.stack([padded[:, j:j + tokens] for j in range(gamma)], -1).astype(np.uint8)


def trace_of(key: str, right, domain: str = 'general', hidden=None, prompt: str = 'p') -> Trace:
    right = np.array(right, bool)
    return Trace(key, domain, prompt, np.arange(5, dtype=np.int32),
                 np.arange(20, 20 + right.shape[1], dtype=np.int32), ranks_of(right), hidden)


def separable(count: int, seed: int, width: int = 16, drafts: int = 3, tokens: int = 48,
              shuffled: bool = False, by: str = 'recent', noise: float = 0.3) -> list[Trace]:
    """
    Traces in which one direction of the hidden state names the draft that is mostly right.

    by: 'prompt', where it is the same at the whole trace (so that the first
    boundary tells too), or 'recent', where it changes half-way. shuffled: the
    right draft is drawn anew, with no relation to the hidden states.
    """
    generator = np.random.default_rng(seed)
    traces = []
    for number in range(count):
        phases = generator.integers(drafts, size=2)
        if by == 'prompt':
            phases[1] = phases[0]
        told = np.repeat(phases, tokens // 2)
        best = np.repeat(generator.integers(drafts, size=2), tokens // 2) if shuffled else told
        chances = np.where(best[None] == np.arange(drafts)[:, None], 0.95, 0.3)
        right = generator.random((drafts, tokens)) < chances
        hidden = noise * generator.standard_normal((tokens // 4, width))
        hidden[np.arange(tokens // 4), told[::4]] += 3.0
        # The prompt must not tell how the second half will be.
        traces.append(trace_of(f's{seed}-{number}', right, f'domain{phases[0]}',
                               hidden.astype(np.float16)))
    return traces


def write(directory: Path, traces: Sequence[Trace], **changes) -> Path:
    """A trace directory with these traces."""
    store = TraceStore(directory)
    store.create(header(**changes))
    for trace in traces:
        store.add(trace)
    return directory
