# SPDX-License-Identifier: Apache-2.0
"""Writing the manifest of a bundle whose drafts were just made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from ..models.bundle import Bundle, FORMAT, MANIFEST_NAME
from ..models.weights import file_sha256


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


def write_bundle(directory: Path, source: Bundle, head: Path,
                 drafts: Sequence[Mapping[str, Any]]) -> Path:
    """
    Write ``bundle.yaml`` into ``directory``: the target and ranker of ``source``, new drafts.

    ``head`` and the drafts' files lie in ``directory`` already. A slot-free
    prompt_lookup draft is added: it bridges loads and costs nothing.
    """
    manifest = {
        'format': FORMAT, 'name': source.name, 'description': source.description,
        'target': _target(source),
        'shared_head': {'path': head.name, 'sha256': file_sha256(head)},
        'drafts': [*map(dict, drafts),
                   {'id': 'lookup', 'kind': 'prompt_lookup', 'licence': 'Apache-2.0',
                    'provenance': 'no weights: n-grams of the text itself'}],
        # A trained head ranks the drafts it was trained with, not these.
        'ranker': ({'kind': 'domain_words'} if source.ranker.path is not None else
                   {'kind': source.ranker.kind, **source.ranker.options}),
    }
    if source.tokenizer is not None:
        manifest['tokenizer'] = {'path': str((source.directory / source.tokenizer).resolve())}
    path = directory / MANIFEST_NAME
    path.write_text(yaml.safe_dump(manifest, sort_keys=False, allow_unicode=True, width=98),
                    encoding='utf-8')
    return path


def _target(source: Bundle) -> dict[str, Any]:
    raw = {key: value for key, value in asdict(source.target).items() if value}
    gguf = {key.removeprefix('gguf_'): raw.pop(key)
            for key in ('gguf_sha256', 'package', 'package_sha256') if key in raw}
    if 'gguf' in raw:
        raw['gguf'] = {'file': raw['gguf'], **gguf}
    elif 'path' in raw:
        raw['path'] = str((source.directory / raw['path']).resolve())
    return raw
