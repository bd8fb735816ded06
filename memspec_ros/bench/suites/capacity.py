# SPDX-License-Identifier: Apache-2.0
"""Suite ``capacity``: more drafts in memory (MemSpec, Fig. 12)."""

from __future__ import annotations

from .base import Result, Suite
from .comparison import Bench
from .paper import CAPACITY
from .sweep import sweep

MOST = 5


def run(bench: Bench) -> Result:
    """K from 1 to the number of drafts that need a place, five at most."""
    count = sum(bool(spec.path) for spec in bench.source.drafts)
    values = bench.sweep_values(range(1, max(1, min(MOST, count)) + 1), 0)
    return sweep(bench, 'cache_capacity', 'K', values, 'capacity',
                 'drafts in memory (Fig. 12)', CAPACITY)


SUITE = Suite('capacity', 'Fig. 12', run)
