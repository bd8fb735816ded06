# SPDX-License-Identifier: Apache-2.0
"""Files of JSON lines, whatever they hold."""

from __future__ import annotations

from collections.abc import Iterator
import json
from pathlib import Path

from ..models.errors import InvalidRequestError


def read_objects(path: Path) -> Iterator[dict]:
    """The objects of a file, one a line; raises InvalidRequestError naming the first bad line."""
    try:
        lines = path.read_text(encoding='utf-8').splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(
            f'{path}: {getattr(error, "strerror", None) or error}') from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise InvalidRequestError(f'{path}, line {number}: no JSON ({error})') from error
        if not isinstance(entry, dict):
            raise InvalidRequestError(f'{path}, line {number}: no JSON object')
        yield entry
