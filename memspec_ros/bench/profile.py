# SPDX-License-Identifier: Apache-2.0
"""
What decoding costs on a machine, as data: the virtual clock of a replay runs by it.

A JSON file, measured by ``memspec bench profile`` or derived from published
figures (``profiles/``). Times are in milliseconds. What differs between drafts
is given by the draft's id, else by its kind, else as ``default``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
import json
import math
from pathlib import Path
from typing import Any, NoReturn

from ..models.bundle import DraftSpec
from ..models.errors import MemSpecError

# A load takes so many iterations of a 400M draft on a Jetson Orin Nano (MemSpec, Fig. 2).
PAPER_LOAD_RATIO = 2.7
DEFAULT = 'default'
_DIRECTORY = Path(__file__).resolve().parent / 'profiles'
_BY_DRAFT = ('draft_step_ms', 'catch_up_row_ms', 'load_ms')


class ProfileError(MemSpecError):
    """A cost profile is not what it should be; the message names it and the field."""


@dataclass(frozen=True)
class CostProfile:
    """
    Milliseconds of everything an iteration is made of.

    verify_ms: of a verify pass, by its rows (1, 2, …). draft_step_ms: of one
    drafted token. catch_up_row_ms: of one position that a draft catches up
    with. rank_ms: of one ranking. overhead_ms: of an iteration beside all that.
    prefill_row_ms: of one position of the prompt.

    How long a load takes is said by load_ratio, in iterations of the draft at
    the full draft length; else by load_ms; else by load_mb_per_sec and
    load_latency_ms, from the bytes of the draft's file; else the paper's ratio
    holds. about: where the figures come from.
    """

    name: str
    verify_ms: Sequence[float]
    draft_step_ms: Mapping[str, float]
    catch_up_row_ms: Mapping[str, float] = field(default_factory=lambda: {DEFAULT: 0.0})
    rank_ms: float = 0.0
    overhead_ms: float = 0.0
    prefill_row_ms: float = 0.0
    load_ms: Mapping[str, float] = field(default_factory=dict)
    load_mb_per_sec: float = 0.0
    load_latency_ms: float = 0.0
    load_ratio: float | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _BY_DRAFT:
            self._check_table(name, getattr(self, name))
        if not isinstance(self.verify_ms, (list, tuple)) or not self.verify_ms:
            self._refuse('verify_ms', 'expected a list of milliseconds, one a number of rows')
        for rows, value in enumerate(self.verify_ms, 1):
            self._check(f'verify_ms of {rows} rows', value, positive=True)
        for name in ('rank_ms', 'overhead_ms', 'prefill_row_ms', 'load_mb_per_sec',
                     'load_latency_ms'):
            self._check(name, getattr(self, name))
        if self.load_ratio is not None:
            self._check('load_ratio', self.load_ratio)
        if not isinstance(self.about, dict):
            self._refuse('about', 'expected a mapping')

    def verify(self, rows: int) -> float:
        """Milliseconds of a verify pass of ``rows`` rows; ProfileError beyond what it knows."""
        if rows > len(self.verify_ms):
            self._refuse('verify_ms', f'holds up to {len(self.verify_ms)} rows, {rows} are needed '
                         f'(drafting {rows - 1} tokens)')
        return self.verify_ms[rows - 1]

    def draft_step(self, draft: DraftSpec) -> float:
        """Milliseconds of one token that ``draft`` proposes."""
        return self._of(draft, 'draft_step_ms')

    def catch_up_row(self, draft: DraftSpec) -> float:
        """Milliseconds of one position that ``draft`` catches up with."""
        return self._of(draft, 'catch_up_row_ms')

    def iteration(self, draft: DraftSpec, gamma: int) -> float:
        """Milliseconds of an iteration in which ``draft`` proposes ``gamma`` tokens."""
        return gamma * self.draft_step(draft) + self.verify(gamma + 1) + self.overhead_ms

    def load(self, draft: DraftSpec, gamma: int) -> float:
        """Milliseconds of a load of ``draft``; ``gamma``: the draft length of a ratio."""
        ratio = self.load_ratio
        if ratio is None:
            if self._has(draft, self.load_ms):
                return self._of(draft, 'load_ms')
            if self.load_mb_per_sec:
                return self.load_latency_ms + draft.bytes / 1e3 / self.load_mb_per_sec
            ratio = PAPER_LOAD_RATIO
        return ratio * self.iteration(draft, gamma)

    def with_load_ratio(self, ratio: float | None) -> CostProfile:
        """The same machine with loads of that many iterations; None: as its storage has it."""
        return replace(self, load_ratio=ratio)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as in a profile's file."""
        return {**asdict(self), 'verify_ms': list(self.verify_ms)}

    @staticmethod
    def _has(draft: DraftSpec, table: Mapping[str, float]) -> bool:
        return any(name in table for name in (draft.id, draft.kind, DEFAULT))

    def _of(self, draft: DraftSpec, name: str) -> float:
        table = getattr(self, name)
        for key in (draft.id, draft.kind, DEFAULT):
            if key in table:
                return table[key]
        self._refuse(name, f'has neither draft {draft.id!r} nor its kind {draft.kind!r} nor '
                     f'{DEFAULT!r}')

    def _check_table(self, name: str, table: Any) -> None:
        if not isinstance(table, dict):
            self._refuse(name, f'expected a mapping of drafts or kinds (or {DEFAULT!r}) to '
                         'milliseconds')
        for key, value in table.items():
            self._check(f'{name} of {key!r}', value)

    def _check(self, name: str, value: Any, positive: bool = False) -> None:
        if (type(value) not in (int, float) or not math.isfinite(value) or value < 0
                or (positive and not value)):
            kind = 'a positive number' if positive else 'a number of at least 0'
            self._refuse(name, f'is {value!r}, expected {kind}')

    def _refuse(self, name: str, why: str) -> NoReturn:
        raise ProfileError(f'profile {self.name}: {name}: {why}')


def profile_names() -> list[str]:
    """Profiles that come with the package."""
    return sorted(path.stem for path in _DIRECTORY.glob('*.json'))


def load_profile(name: str) -> CostProfile:
    """The profile of that name, or in that file. Raises ProfileError."""
    path = _DIRECTORY / f'{name}.json' if name in profile_names() else Path(name)
    try:
        raw = json.loads(path.read_text(encoding='utf-8'))
    except OSError as error:
        raise ProfileError(f'profile {name}: {error.strerror or error}; there are '
                           f'{", ".join(profile_names())}, and what memspec bench profile '
                           'writes') from error
    except (ValueError, RecursionError) as error:
        raise ProfileError(f'profile {name}: not JSON ({error})') from error
    if not isinstance(raw, dict):
        raise ProfileError(f'profile {name}: expected a mapping, got {type(raw).__name__}')
    known = {entry.name for entry in fields(CostProfile)}
    if unknown := sorted(set(raw) - known):
        raise ProfileError(f'profile {name}: unknown key {unknown[0]!r}')
    for key in ('verify_ms', 'draft_step_ms'):
        if key not in raw:
            raise ProfileError(f'profile {name}: {key} is missing')
    # Named as it was asked for, so that an error says which of several it is about.
    return CostProfile(**{**raw, 'name': name})
