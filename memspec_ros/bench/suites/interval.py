# SPDX-License-Identifier: Apache-2.0
"""Suite ``interval``: how often drafts are ranked anew (MemSpec, Fig. 10)."""

from __future__ import annotations

from .base import Result, Suite
from .comparison import Bench
from .paper import INTERVAL_SHAPE
from .sweep import sweep

VALUES = (1, 2, 4, 8, 16)


def run(bench: Bench) -> Result:
    return sweep(bench, 'interval', 'N', bench.sweep_values(VALUES, 1), 'interval',
                 'iterations between rankings (Fig. 10)', {}, INTERVAL_SHAPE)


SUITE = Suite('interval', 'Fig. 10', run)
