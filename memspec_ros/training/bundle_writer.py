# SPDX-License-Identifier: Apache-2.0
"""Writing the manifest of a bundle whose drafts were just made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
import shutil
from typing import Any

import yaml

from ..models.bundle import Bundle, FORMAT, MANIFEST_NAME, RankerSpec
from ..models.drafts.prompt_lookup import PromptLookupDrafter
from ..models.state import DecodeState
from ..models.weights import file_sha256
from .outputs import OutputRecord


def draft_entry(path: Path, kind: str, domain: str, options: Mapping[str, Any],
                acceptance: Mapping[str, float], licence: str,
                provenance: str) -> dict[str, Any]:
    """
    Manifest entry of a draft; its id is the stem of ``path``.

    ``path``: its weight file, or for kinds that need more than weights the
    directory with ``model.safetensors``.
    """
    weights = path / 'model.safetensors' if path.is_dir() else path
    return {'id': path.stem, 'kind': kind, 'domain': domain, 'path': path.name,
            'sha256': file_sha256(weights), 'bytes': weights.stat().st_size, 'licence': licence,
            'provenance': provenance,
            'acceptance': {name: round(value, 3) for name, value in acceptance.items()},
            **({'options': dict(options)} if options else {})}


def lookup_acceptance(records: Iterable[OutputRecord]) -> dict[str, float]:
    """
    Share of the outputs' tokens that a prompt lookup says, by domain.

    Where it finds no match it says nothing, which counts as wrong: that is how
    often it is of use.
    """
    hits: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for record in records:
        drafter, state = PromptLookupDrafter(), DecodeState(None, {}, 0)
        for end, token in enumerate(record.output_ids):
            state.tokens = record.prompt_ids + record.output_ids[:end]
            hits[record.domain] += drafter.propose(state, 1).tokens == [token]
        totals[record.domain] += len(record.output_ids)
    return {domain: hits[domain] / total for domain, total in sorted(totals.items()) if total}


def write_exits(directory: Path, file: Path, options: Mapping[str, Any], licence: str,
                provenance: str) -> Path:
    """
    Have the bundle of ``directory`` self-speculate with the exits in ``file``, which lies there.

    The manifest is written anew: comments in it are lost. Returns its path.
    """
    path = directory / MANIFEST_NAME
    manifest = yaml.safe_load(path.read_text(encoding='utf-8'))
    manifest['self_speculation'] = {
        'path': file.name, 'sha256': file_sha256(file), 'bytes': file.stat().st_size,
        'licence': licence, 'provenance': provenance, 'options': dict(options)}
    _write(path, manifest)
    return path


def copy_into(directory: Path, file: Path) -> Path:
    """Copy a file into a directory, unless it lies there already; its path there."""
    target = directory / file.name
    if target.resolve() != file.resolve():
        shutil.copyfile(file, target)
    return target


def write_ranker(directory: Path, head: Path, kind: str) -> None:
    """
    Have the bundle of ``directory`` use the ranker in file ``head``, which is copied into it.

    The words it went by before become the prior of the new ranker. The manifest
    is written anew: comments in it are lost.
    """
    path = directory / MANIFEST_NAME
    manifest = yaml.safe_load(path.read_text(encoding='utf-8'))
    target = copy_into(directory, head)
    before = manifest.get('ranker', {})
    prior = before.get('prior') if 'path' in before else before
    manifest['ranker'] = {'kind': kind, 'path': head.name, 'sha256': file_sha256(target),
                          **({'prior': prior} if prior else {})}
    _write(path, manifest)


def write_bundle(directory: Path, source: Bundle, head: Path,
                 drafts: Sequence[Mapping[str, Any]],
                 lookup: Mapping[str, float] | None = None) -> Path:
    """
    Write ``bundle.yaml`` into ``directory``: the target and ranker of ``source``, new drafts.

    ``head`` and the drafts' files lie in ``directory`` already. A slot-free
    prompt_lookup draft is added: it bridges loads and costs nothing; ``lookup``
    is its acceptance by domain.
    """
    manifest = {
        'format': FORMAT, 'name': source.name, 'description': source.description,
        'target': _target(source),
        'shared_head': {'path': head.name, 'sha256': file_sha256(head)},
        'drafts': [*map(dict, drafts), _lookup_entry(lookup or {})],
        'ranker': _untrained(source.ranker),
    }
    if source.tokenizer is not None:
        manifest['tokenizer'] = {'path': str((source.directory / source.tokenizer).resolve())}
    path = directory / MANIFEST_NAME
    if exits := _exits(directory, source):
        manifest['self_speculation'] = exits
    _write(path, manifest)
    return path


def write_bare_bundle(directory: Path, target: Mapping[str, Any]) -> None:
    """Write ``bundle.yaml`` into ``directory``: a target, and no draft but a prompt lookup."""
    _write(directory / MANIFEST_NAME,
           {'format': FORMAT, 'name': target['name'].lower(), 'target': dict(target),
            'drafts': [_lookup_entry({})], 'ranker': {'kind': 'domain_words'}})


def _exits(directory: Path, source: Bundle) -> dict[str, Any] | None:
    """Exits trained in the directory, else those of the source: they serve any drafts."""
    path, spec = directory / MANIFEST_NAME, source.self_speculation
    made = (yaml.safe_load(path.read_text(encoding='utf-8')).get('self_speculation')
            if path.exists() else None)
    if made or spec is None:
        return made
    entry = {'licence': spec.licence, 'provenance': spec.provenance, 'options': spec.options}
    if spec.path is not None:
        file = source.weight_file(spec)
        if (directory / file.name).exists():
            return None  # of a training that has just ended: its entry is still to come
        shutil.copyfile(file, directory / file.name)
        entry.update(path=file.name, sha256=spec.sha256, bytes=spec.bytes)
    return entry


def _untrained(ranker: RankerSpec) -> dict[str, Any]:
    """A ranker for new drafts: a trained head ranks those it was trained with, not these."""
    if ranker.path is not None:
        ranker = ranker.prior or RankerSpec('domain_words')
    return {'kind': ranker.kind, **ranker.options}


def _lookup_entry(acceptance: Mapping[str, float]) -> dict[str, Any]:
    return {'id': 'lookup', 'kind': 'prompt_lookup', 'licence': 'Apache-2.0',
            'provenance': 'no weights: n-grams of the text itself',
            'acceptance': {domain: round(value, 3) for domain, value in acceptance.items()}}


def _write(path: Path, manifest: Mapping[str, Any]) -> None:
    partial = path.with_suffix('.partial')
    partial.write_text(yaml.safe_dump(manifest, sort_keys=False, allow_unicode=True, width=98),
                       encoding='utf-8')
    partial.replace(path)


def _target(source: Bundle) -> dict[str, Any]:
    raw = {key: value for key, value in asdict(source.target).items() if value}
    gguf = {key.removeprefix('gguf_'): raw.pop(key)
            for key in ('gguf_sha256', 'package', 'package_sha256') if key in raw}
    if 'gguf' in raw:
        raw['gguf'] = {'file': raw['gguf'], **gguf}
    elif 'path' in raw:
        raw['path'] = str((source.directory / raw['path']).resolve())
    return raw
