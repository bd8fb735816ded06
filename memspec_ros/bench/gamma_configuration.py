# SPDX-License-Identifier: Apache-2.0
"""What ``gamma`` sweeps: draft/target configurations, named on one line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..models.bundle import Bundle
from ..models.errors import InvalidRequestError
from ..models.packing import WEIGHT_KINDS
from ..runtime.runtime import DTYPES
from .contest import bundle_names, enter, Entrant, open_bundles


@dataclass(frozen=True)
class Configuration:
    """
    A target and what drafts for it.

    bundle: whose target, '' for the default one. dtype, weights: as in
    RuntimeOptions. draft: id, '' for all of the bundle. draft_bundle: the
    bundle the draft is of, '' for the same one.
    """

    bundle: str
    dtype: str
    weights: str = 'auto'
    draft: str = ''
    draft_bundle: str = ''

    @classmethod
    def parse(cls, text: str, dtype: str, weights: str = 'auto') -> Configuration:
        """From ``[DIR][:DTYPE][:WEIGHTS][@[DIR/]DRAFT]``; what is not said is as given."""
        rest, draft = text, ''
        if '@' in text and not Path(text).is_dir():
            rest, _, draft = text.rpartition('@')
        while True:
            left, colon, last = rest.rpartition(':')
            if colon and last in DTYPES:
                dtype = last
            elif colon and last in WEIGHT_KINDS:
                weights = last
            else:
                break
            rest = left
        draft_bundle, _, draft = draft.rpartition('/')
        return cls(rest, dtype, weights, draft, draft_bundle)


@dataclass(frozen=True)
class Group:
    """Configurations of one target, held in one way: they share an engine and its plain runs."""

    name: str
    bundle: Bundle
    dtype: str
    weights: str
    entrants: Sequence[Entrant]


def group(configurations: Sequence[Configuration], wanted: Sequence[str] = ()) -> list[Group]:
    """
    Open the bundles and collect what is to be swept, in order.

    wanted: ids of drafts, for configurations that name none; empty for all.
    Raises MemSpecError.
    """
    opened = {path: open_bundles([path])[0]
              for path in dict.fromkeys(configuration.bundle for configuration in configurations)}
    # A bundle at two types keeps its name.
    places = list({bundle.directory.resolve(): bundle for bundle in opened.values()}.items())
    names = dict(zip((place for place, _ in places), bundle_names([b for _, b in places])))
    known = {spec.id for c in configurations if not c.draft for spec in opened[c.bundle].drafts}
    if missing := sorted(set(wanted) - known):
        raise InvalidRequestError(f'--draft {missing[0]}: there are '
                                  f'{", ".join(sorted(known)) or "no drafts"}')
    members: dict[tuple, list[Configuration]] = {}
    for configuration in configurations:
        place = opened[configuration.bundle].directory.resolve()
        members.setdefault((place, configuration.dtype, configuration.weights),
                           []).append(configuration)
    groups = []
    for (place, dtype, weights), same in members.items():
        # Bundles keep what they make for a target: each group has its own.
        own = same[0].bundle
        bundles = {path: open_bundles([path])[0] for path in dict.fromkeys(
            [own, *(c.bundle for c in same), *(c.draft_bundle for c in same if c.draft_bundle)])}
        bundle = bundles[own]
        entrants: list[Entrant] = []
        for configuration in same:
            _add(entrants, _named(configuration, bundles) if configuration.draft else
                 [e for e in enter([bundle]) if not wanted or e.id in wanted])
        if entrants:
            groups.append(Group(names[place], bundle, dtype, weights, entrants))
    return groups


def _named(configuration: Configuration, bundles: Mapping[str, Bundle]) -> list[Entrant]:
    bundle = bundles[configuration.draft_bundle or configuration.bundle]
    specs = {spec.id: spec for spec in bundle.drafts}
    if configuration.draft not in specs:
        raise InvalidRequestError(
            f'{bundle.directory}: no draft {configuration.draft!r}, there are '
            f'{", ".join(sorted(specs)) or "none"}')
    return [Entrant(configuration.draft, specs[configuration.draft], bundle)]


def _add(entrants: list[Entrant], further: Sequence[Entrant]) -> None:
    """Each once, under a name that says its bundle where the id is taken."""
    for entrant in further:
        if any(e.spec.id == entrant.spec.id and e.bundle.directory == entrant.bundle.directory
               for e in entrants):
            continue
        name = entrant.id
        if any(e.id == name for e in entrants):
            name = f'{entrant.bundle.directory.resolve().name}/{name}'
        entrants.append(Entrant(name, entrant.spec, entrant.bundle))
