# SPDX-License-Identifier: Apache-2.0
"""Suite ``length``: longer answers (MemSpec, Fig. 11)."""

from __future__ import annotations

from ...models.errors import InvalidRequestError
from .base import Result, Suite
from .comparison import Bench
from .paper import LENGTH_SHAPE
from .sweep import sweep

VALUES = (32, 64, 128, 256)


def run(bench: Bench) -> Result:
    """Answers are cut at each length; those that end before are what they are."""
    most = bench.source.most_tokens
    values = bench.sweep_values([value for value in VALUES if value <= most] or [most], 1)
    if max(values) > most:
        raise InvalidRequestError(f'--values: {max(values)} tokens, but these answers were '
                                  f'written up to {most}')
    return sweep(bench, 'max_new_tokens', 'tokens', values, 'length', 'output length (Fig. 11)',
                 {}, LENGTH_SHAPE)


SUITE = Suite('length', 'Fig. 11', run)
