# SPDX-License-Identifier: Apache-2.0
"""
Files whose hash was found right before, and which have not changed since.

To hash all drafts of a bundle reads all of them, the first time a node starts and
every time after. What a start has found right the next one takes on trust, as long
as size, inode and times of change say that it is the same file. Only for files
that are hashed again as they are read: storage that changes bits behind the file
system's back is found then.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from .cache import cache_directory, read_notes, write_notes
from .weights import file_sha256

_FILE = 'verified.json'


def has_sha256(path: Path, sha256: str, again: bool = True) -> bool:
    """
    Whether a file has that hash; BundleError where it cannot be read.

    again: hash it even if it was found right before. A cache that cannot be read
    or written costs time, nothing else.
    """
    name, identity = str(path.resolve()), [sha256, *_identity(path)]
    if not again and read_notes(cache_directory() / _FILE).get(name) == identity:
        return True
    if file_sha256(path) != sha256:
        return False
    # As it was before it was read: had it changed meanwhile, it would be read again.
    _remember(name, identity)
    return True


def _identity(path: Path) -> list[int]:
    with contextlib.suppress(OSError):
        found = path.stat()
        return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
    return []


def _remember(name: str, identity: list) -> None:
    file = cache_directory() / _FILE
    known = read_notes(file)
    if known.get(name) != identity:
        kept = {other: found for other, found in known.items() if Path(other).is_file()}
        write_notes(file, {**kept, name: identity})
