# SPDX-License-Identifier: Apache-2.0
"""
Going on from the drafts of a bundle: what they know stays, new outputs are added.

A draft and its continuation on new outputs are averaged weight by weight. The
mean does better on held-out prompts than either (a "model soup", Wortsman et
al., 2022), at no cost in memory or time; docs/training.md has figures.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..models.bundle import Bundle, DraftSpec
from ..models.errors import BundleError
from .bundle_writer import copy_into
from .lessons import TopShape

KINDS = ('feature', 'shared_layers')


def shape_of_drafts(bundle: Bundle) -> TopShape:
    """Shape of the bundle's drafts on the target; BundleError where there is not one for all."""
    shapes = {spec.id: _shape(spec) for spec in bundle.drafts if spec.kind in KINDS}
    if not shapes or bundle.head_path is None:
        raise BundleError(f'bundle {bundle.name!r} has no draft to continue: expected one of kind '
                          f'{" or ".join(KINDS)}; leave --continue out to make drafts')
    first, *others = shapes
    for other in others:
        if shapes[other] != shapes[first]:
            raise BundleError(f'drafts {first!r} and {other!r} differ in kind or shape; only '
                              'drafts of one shape can be continued together')
    return shapes[first]


def _shape(spec: DraftSpec) -> TopShape:
    options = spec.options
    return TopShape(spec.kind, options['depth'], options['layers'],
                    tuple(options.get('features', ())))


def draft_to_continue(bundle: Bundle, domain: str) -> DraftSpec:
    """The domain's draft, for a new domain the general one."""
    specs = [spec for spec in bundle.drafts if spec.kind in KINDS]
    for wanted in (domain, 'general'):
        for spec in specs:
            if spec.domain == wanted:
                return spec
    raise BundleError(f'bundle {bundle.name!r} has neither a draft of domain {domain!r} nor a '
                      'general one to continue')


def mean(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors half-way between two drafts of one shape."""
    return {name: torch.lerp(tensor.float(), second[name].float(), 0.5).to(tensor.dtype)
            for name, tensor in first.items()}


def carry_over(bundle: Bundle, directory: Path, made: Container[str]) -> list[dict[str, Any]]:
    """Copy the bundle's drafts that were not ``made`` anew; their manifest entries."""
    entries = []
    for spec in bundle.drafts:
        if spec.kind not in KINDS or spec.id in made:
            continue
        entries.append({key: value for key, value in asdict(spec).items() if value})
        entries[-1]['path'] = copy_into(directory, bundle.weight_file(spec)).name
    return entries
