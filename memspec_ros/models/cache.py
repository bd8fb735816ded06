# SPDX-License-Identifier: Apache-2.0
"""Where this package keeps what it made or fetched once."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """Where downloads and conversions are kept: $MEMSPEC_CACHE, or ~/.cache/memspec_ros."""
    if own := os.environ.get('MEMSPEC_CACHE'):
        return Path(own).expanduser()
    base = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
    return Path(base).expanduser() / 'memspec_ros'
