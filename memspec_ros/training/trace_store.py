# SPDX-License-Identifier: Apache-2.0
"""
Acceptance traces on disk: what every draft of a bundle would have had accepted, everywhere.

A directory with ``traces.json`` (what made it) and one ``<key>.npz`` a prompt.
In float32 greedy decoding the output does not depend on the draft, so a trace
holds the output once and, for every draft and every position of the output, at
which rank the draft had each of the tokens that follow.

Files get their names when they are whole: an interruption or a full disk leaves
what was written before as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
import json
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..models.errors import MemSpecError

FORMAT = 1
HEADER_NAME = 'traces.json'


class TraceError(MemSpecError):
    """A trace directory is not what it should be; the message names the file."""


@dataclass(frozen=True)
class TraceHeader:
    """
    What a trace directory was made with.

    bundle: sha256 of the bundle's manifest. drafts: ids, in the bundle's order.
    gamma: deepest draft position recorded. ranks: how far down a rank is
    recorded. hidden_every: every how many output positions the target's hidden
    state is kept (0: not at all). dtype: of target and drafts.
    """

    bundle: str
    drafts: tuple[str, ...]
    gamma: int
    ranks: int
    hidden_every: int
    dtype: str
    max_new_tokens: int
    format: int = FORMAT


@dataclass(frozen=True)
class Trace:
    """
    One prompt.

    prompt_ids [P], output_ids [T] int32. ranks uint8 [drafts, T, gamma]:
    ``ranks[d, t, j]`` is the rank (1: first) of ``output_ids[t + j]`` in what
    draft d predicts ``j`` tokens after it began to draft from the committed
    ``output_ids[:t]``, the tokens between being the true ones; 0 where it is
    not among the first ``header.ranks`` or lies beyond the end. hidden float16
    [ceil(T / hidden_every), H]: the target's hidden state after its last layer,
    before the final norm, at the last position run when ``output_ids[:t]`` was
    committed (that of the token before the last), for t = 0, hidden_every, …;
    zeros where there was none (a prompt of one token). It is what rankers are
    shown there.
    """

    key: str
    domain: str
    prompt: str
    prompt_ids: np.ndarray
    output_ids: np.ndarray
    ranks: np.ndarray
    hidden: np.ndarray | None = None

    def accepted(self, draft: int, gamma: int) -> np.ndarray:
        """Tokens accepted [T] of a chain of ``gamma`` drafted from each position, uint8."""
        if not 0 <= gamma <= self.ranks.shape[2]:
            raise ValueError(f'{gamma} drafted tokens: the trace holds {self.ranks.shape[2]}')
        right = self.ranks[draft, :, :gamma] == 1
        return np.cumprod(right, axis=1).sum(axis=1).astype(np.uint8)


class TraceStore:
    """A trace directory; traces are added whole, so that a run can be resumed."""

    def __init__(self, directory: Path):
        self.directory = Path(directory)

    def create(self, header: TraceHeader) -> None:
        """Begin, or go on with what the same header began; TraceError for another's directory."""
        path = self.directory / HEADER_NAME
        if path.exists():
            if (found := self.header()) != header:
                changed = [name for name, value in asdict(header).items()
                           if asdict(found)[name] != value]
                raise TraceError(f'{path}: these traces were made with another '
                                 f'{", ".join(changed)}; choose another directory')
            return
        self.write_json(HEADER_NAME, asdict(header))

    def header(self) -> TraceHeader:
        path = self.directory / HEADER_NAME
        try:
            raw = json.loads(path.read_text(encoding='utf-8'))
            version = raw['format']
            if version == FORMAT:
                header = TraceHeader(**{**raw, 'drafts': tuple(raw['drafts'])})
                _check_types(header)
                return header
        except OSError as error:
            raise TraceError(f'{path}: {error.strerror or error}; make traces with memspec trace'
                             ) from error
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise TraceError(f'{path}: not the header of traces ({type(error).__name__}: {error})'
                             ) from error
        raise TraceError(f'{path}: format {version!r}, this version reads {FORMAT}')

    def keys(self) -> set[str]:
        """Keys of the traces there are."""
        return {path.stem for path in self.directory.glob('*.npz')}

    def add(self, trace: Trace) -> None:
        """Write one trace in one piece; TraceError where there is no room for it, say."""
        # Text as bytes: an array of strings would lose zeros at their ends.
        about = json.dumps([trace.domain, trace.prompt]).encode()
        arrays = {'prompt_ids': trace.prompt_ids, 'output_ids': trace.output_ids,
                  'ranks': trace.ranks, 'about': np.frombuffer(about, np.uint8)}
        if trace.hidden is not None:
            arrays['hidden'] = trace.hidden
        self._write(self.directory / f'{trace.key}.npz',
                    lambda file: np.savez_compressed(file, **arrays))

    def read(self, key: str) -> Trace:
        """The trace of that key; TraceError where it is damaged or is not of these drafts."""
        header, path = self.header(), self.directory / f'{key}.npz'
        try:
            with np.load(path) as raw:
                domain, prompt = json.loads(raw['about'].tobytes())
                trace = Trace(key, domain, prompt, raw['prompt_ids'], raw['output_ids'],
                              raw['ranks'], raw['hidden'] if 'hidden' in raw else None)
            _check_shapes(trace, header)
            return trace
        except Exception as error:  # noqa: BLE001 (what zipfile and numpy raise has no end)
            raise TraceError(f'{path}: not a trace ({type(error).__name__}: {error}); delete '
                             'it and run memspec trace again') from error

    def __iter__(self) -> Iterator[Trace]:
        for key in sorted(self.keys()):
            yield self.read(key)

    def write_json(self, name: str, content: object) -> None:
        """Write a file beside the traces, in one piece; raises TraceError."""
        text = json.dumps(content, indent=1) + '\n'
        self._write(self.directory / name, lambda file: file.write(text.encode()))

    def _write(self, path: Path, write: Callable[[BinaryIO], object]) -> None:
        """Write a file that gets its name when it is whole, and is gone where it is not."""
        partial = path.with_name(f'{path.name}.partial')
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with partial.open('wb') as file:
                    write(file)
                partial.replace(path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise TraceError(
                f'{path}: {error.strerror or error}; traces written before are whole, '
                'run the same command again to go on') from error


def _check_types(header: TraceHeader) -> None:
    """ValueError naming the first field that is not what it should be."""
    for name in ('gamma', 'ranks', 'max_new_tokens'):
        if type(value := getattr(header, name)) is not int or value < 1:
            raise ValueError(f'{name} is {value!r}')
    if type(header.hidden_every) is not int or header.hidden_every < 0:
        raise ValueError(f'hidden_every is {header.hidden_every!r}')
    for value in (header.bundle, header.dtype, *header.drafts):
        if not isinstance(value, str):
            raise ValueError(f'{value!r} is not text')


def _check_shapes(trace: Trace, header: TraceHeader) -> None:
    """ValueError where the arrays do not belong together."""
    expected = [len(header.drafts), len(trace.output_ids), header.gamma]
    if list(trace.ranks.shape) != expected or trace.ranks.dtype != np.uint8:
        raise ValueError(f'ranks are {trace.ranks.dtype} {list(trace.ranks.shape)}, expected '
                         f'uint8 {expected}')
    if trace.prompt_ids.ndim != 1 or trace.output_ids.ndim != 1:
        raise ValueError('token ids are no list')
