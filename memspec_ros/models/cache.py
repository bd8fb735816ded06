# SPDX-License-Identifier: Apache-2.0
"""Where this package keeps what it made, fetched or found out once."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
import tempfile
from typing import Any


def cache_directory() -> Path:
    """Where downloads and conversions are kept: $MEMSPEC_CACHE, or ~/.cache/memspec_ros."""
    if own := os.environ.get('MEMSPEC_CACHE'):
        return Path(own).expanduser()
    base = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
    return Path(base).expanduser() / 'memspec_ros'


def read_notes(file: Path) -> dict[str, Any]:
    """What ``write_notes`` kept; nothing where the file is not there or damaged."""
    try:
        known = json.loads(file.read_text(encoding='utf-8'))
    except (OSError, ValueError, RecursionError):
        return {}
    return known if isinstance(known, dict) else {}


def write_notes(file: Path, known: dict[str, Any]) -> None:
    """Keep what can be found out again; a directory that takes nothing costs that, no more."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        # Another process may read meanwhile.
        descriptor, name = tempfile.mkstemp(prefix=f'{file.stem}-', dir=file.parent)
        with os.fdopen(descriptor, 'w', encoding='utf-8') as work:
            json.dump(known, work, indent=1)
        os.replace(name, file)
