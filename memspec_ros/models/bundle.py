# SPDX-License-Identifier: Apache-2.0
"""
The model bundle: one directory, one manifest, parsed once and strictly.

``bundle.yaml`` names the target, its tokenizer, the drafts and the ranker, with
licence, provenance and the sha256 of every file. Whatever is unknown, missing,
damaged or unfit is an error that names it: a typing error must not become a
node that silently runs without its drafts. docs/bundle.md describes the format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
import os
from pathlib import Path
import re
from typing import Any

from torch import Tensor
import yaml

from .errors import BundleError
from .packing import pack
from .verified import has_sha256
from .weights import read_metadata, read_tensors

MANIFEST_NAME = 'bundle.yaml'
FORMAT = 1
_KINDS_WITHOUT_FILE = ('prompt_lookup',)
SELF_ID = 'self'
_SELF_KIND = 'self_speculation'
_RANKERS_WITH_FILE = ('hidden', 'bert')
_ID = re.compile(r'[a-z0-9][a-z0-9_.-]{0,62}')
_SHA256 = re.compile(r'[0-9a-f]{64}')


def default_bundle_path() -> Path:
    """The bundle that ships with the package: installed, or in the source tree."""
    source = Path(__file__).resolve().parents[2] / 'models'
    candidates = [source]
    for prefix in os.environ.get('AMENT_PREFIX_PATH', '').split(os.pathsep):
        candidates.append(Path(prefix) / 'share' / 'memspec_ros' / 'models')
    # <prefix>/lib/python3.x/site-packages/memspec_ros/models -> <prefix>
    candidates += [parent / 'share' / 'memspec_ros' / 'models'
                   for parent in Path(__file__).resolve().parents[3:8]]
    for candidate in candidates:
        if (candidate / MANIFEST_NAME).is_file():
            return candidate
    raise BundleError('the default bundle is not installed; name one with the parameter "bundle"')


@dataclass(frozen=True)
class DraftSpec:
    """One draft of the manifest; ``options`` are the keys its kind defines."""

    id: str
    kind: str
    domain: str
    licence: str
    provenance: str
    path: str | None = None
    sha256: str | None = None
    bytes: int = 0
    acceptance: Mapping[str, float] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TargetSpec:
    """Where the target's weights are: a Hugging Face directory, or a GGUF file to convert."""

    name: str
    licence: str
    provenance: str
    path: str | None = None
    sha256: Mapping[str, str] = field(default_factory=dict)
    gguf: str | None = None
    gguf_sha256: str | None = None
    package: str | None = None
    package_sha256: str | None = None


@dataclass(frozen=True)
class RankerSpec:
    """
    Which ranker, and its settings; trained kinds have a file instead.

    prior: what a trained one believes of a prompt that nothing has been seen of yet.
    """

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    path: str | None = None
    sha256: str | None = None
    prior: RankerSpec | None = None


class _Section:
    """A mapping of the manifest that knows its place and refuses what nobody asked for."""

    def __init__(self, raw: Any, where: str):
        if not isinstance(raw, dict):
            raise BundleError(f'{where}: expected a mapping, got {type(raw).__name__}')
        self.raw = dict(raw)
        self.where = where

    def take(self, key: str, kind: type, default: Any = None, required: bool = False) -> Any:
        if key not in self.raw:
            if required:
                raise BundleError(f'{self.where}: {key} is missing')
            return default
        value = self.raw.pop(key)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise BundleError(
                f'{self.where}: {key} must be {kind.__name__}, got {value!r}')
        return value

    def text(self, key: str, required: bool = True, default: str | None = None) -> str | None:
        value = self.take(key, str, default, required)
        if required and not value.strip():
            raise BundleError(f'{self.where}: {key} is empty')
        return value

    def sha256(self, key: str, required: bool = True) -> str | None:
        value = self.text(key, required)
        if value is not None and not _SHA256.fullmatch(value):
            raise BundleError(f'{self.where}: {key} is not 64 hexadecimal digits: {value!r}')
        return value

    def finish(self) -> None:
        if self.raw:
            raise BundleError(f'{self.where}: unknown key {sorted(map(str, self.raw))[0]!r}')


@dataclass
class Bundle:
    """A parsed manifest with the directory it lies in."""

    directory: Path
    name: str
    description: str
    target: TargetSpec
    tokenizer: str | None
    drafts: tuple[DraftSpec, ...]
    ranker: RankerSpec
    head_path: str | None = None
    head_sha256: str | None = None
    # Exits of the target itself; no draft that anybody ranks or loads.
    self_speculation: DraftSpec | None = None
    # Filled by target_files.locate_target: the directory the target is loaded from.
    target_path: Path | None = None
    _head_rows: Tensor | None = field(default=None, repr=False)

    @property
    def drafting(self) -> tuple[DraftSpec, ...]:
        """All that drafts: the drafts and, where the target does for itself, its exits."""
        exits = self.self_speculation
        return self.drafts if exits is None else (*self.drafts, exits)

    @property
    def tokenizer_path(self) -> Path:
        """Directory of the tokenizer: its own, or the target's."""
        if self.tokenizer is not None:
            return self.directory / self.tokenizer
        if self.target_path is None:
            raise BundleError('the target has not been located yet')
        return self.target_path

    def draft(self, draft_id: str) -> DraftSpec:
        """The draft of that id; BundleError naming the known ones where there is none."""
        for spec in self.drafts:
            if spec.id == draft_id:
                return spec
        known = ', '.join(spec.id for spec in self.drafts)
        raise BundleError(f'no draft {draft_id!r} in this bundle; there are: {known}')

    def directory_of(self, spec: DraftSpec) -> Path:
        """Directory of a draft that is a Hugging Face directory."""
        return self.directory / spec.path

    def weight_file(self, spec: DraftSpec) -> Path | None:
        """The file a load of this draft reads; None for drafts without one."""
        if spec.path is None:
            return None
        path = self.directory / spec.path
        return path / 'model.safetensors' if spec.kind == 'causal_lm' else path

    @property
    def ranker_file(self) -> Path | None:
        """The trained ranker's file; None for rankers without one."""
        return None if self.ranker.path is None else self.directory / self.ranker.path

    @cached_property
    def _head_ids(self) -> list[int] | None:
        if self.head_path is None:
            return None
        path = self.directory / self.head_path
        ids = read_tensors(path, self.head_sha256).get('token_ids')
        if ids is None or ids.dim() != 1 or not ids.numel() or ids.is_floating_point():
            raise BundleError(
                f'{path}: expected a one-dimensional tensor "token_ids" of integers')
        return ids.tolist()

    def head_token_ids(self) -> list[int] | None:
        """Token ids of the trimmed vocabulary that the shared head covers."""
        return self._head_ids

    def shared_head_of(self, target) -> Tensor:
        """
        Rows of the target's head for the trimmed vocabulary [len(ids), H].

        Made once for all drafts of the bundle.
        """
        if self._head_rows is None:
            ids = self.head_token_ids()
            wrong = [i for i in ids if not 0 <= i < target.vocab_size]
            if wrong:
                raise BundleError(f'shared_head: token id {wrong[0]} does not exist in the '
                                  f'target ({target.vocab_size} ids)')
            self._head_rows = pack(target.model.head_rows(ids), 'auto')
        return self._head_rows


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a key given twice is an error, where others let the last one win."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # refused below: it cannot be a key in Python
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f'key {key.value!r} is there twice', key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_bundle(path: Path | str | None = None, verify: bool = True,
                again: bool = True) -> Bundle:
    """
    Parse the manifest of ``path`` ("" or None: the installed default) and check its files.

    Sizes are always checked, hashes where ``verify``, and unless ``again`` only of files that
    are new or have changed since. Raises BundleError.
    """
    directory = Path(path).expanduser() if path else default_bundle_path()
    if directory.name == MANIFEST_NAME:
        directory = directory.parent
    manifest = directory / MANIFEST_NAME
    try:
        raw = yaml.load(manifest.read_text(encoding='utf-8'), Loader=_StrictLoader)
    except FileNotFoundError as error:
        raise BundleError(
            f'{manifest}: no such file; a bundle is a directory with a {MANIFEST_NAME}') from error
    except OSError as error:
        raise BundleError(f'{manifest}: {error.strerror or error}') from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BundleError(f'{manifest}: not valid YAML ({error})') from error
    bundle = parse_manifest(raw, directory)
    for spec in bundle.drafting:
        _check_file(bundle, spec, verify, again)
    _check_ranker(bundle, verify, again)
    return bundle


def parse_manifest(raw: Any, directory: Path) -> Bundle:
    """Turn the manifest's data into a Bundle; touches no file but names ``directory``."""
    top = _Section(raw, MANIFEST_NAME)
    version = top.take('format', int, required=True)
    if version != FORMAT:
        raise BundleError(f'{MANIFEST_NAME}: format {version} is not known here (known: {FORMAT})')
    name, description = top.text('name'), top.text('description', False, '')
    target = _parse_target(_Section(top.take('target', dict, required=True), 'target'))
    tokenizer = top.take('tokenizer', dict)
    if tokenizer is not None:
        section = _Section(tokenizer, 'tokenizer')
        tokenizer = section.text('path')
        section.finish()
    head = top.take('shared_head', dict)
    head_path = head_sha256 = None
    if head is not None:
        section = _Section(head, 'shared_head')
        head_path, head_sha256 = section.text('path'), section.sha256('sha256')
        section.finish()
    drafts = tuple(_parse_draft(entry, f'drafts[{i}]')
                   for i, entry in enumerate(top.take('drafts', list, required=True)))
    seen: set[str] = set()
    for spec in drafts:
        if spec.id in seen:
            raise BundleError(f'drafts: id {spec.id!r} is there twice')
        seen.add(spec.id)
    exits = top.take('self_speculation', dict)
    exits = None if exits is None else _parse_self(_Section(exits, 'self_speculation'))
    if exits is not None and SELF_ID in seen:
        raise BundleError(f'drafts: the id {SELF_ID!r} belongs to self_speculation')
    section = _Section(top.take('ranker', dict, {'kind': 'domain_words'}), 'ranker')
    ranker = _parse_ranker(section)
    top.finish()
    return Bundle(directory, name, description, target, tokenizer, drafts, ranker,
                  head_path, head_sha256, exits)


def _parse_self(section: _Section) -> DraftSpec:
    from .drafts import KINDS
    path = section.text('path', False)
    spec = DraftSpec(
        id=SELF_ID, kind=_SELF_KIND, domain='', licence=section.text('licence'),
        provenance=section.text('provenance'), path=path,
        sha256=None if path is None else section.sha256('sha256'),
        bytes=0 if path is None else section.take('bytes', int, required=True),
        options=section.take('options', dict, {}, required=True))
    section.finish()
    KINDS[_SELF_KIND].check_options(spec)
    return spec


def _parse_ranker(section: _Section) -> RankerSpec:
    kind = section.text('kind')
    if kind not in _RANKERS_WITH_FILE:
        return RankerSpec(kind, section.raw)
    path, sha256 = section.text('path'), section.sha256('sha256')
    prior = section.take('prior', dict)
    section.finish()
    return RankerSpec(kind, path=path, sha256=sha256,
                      prior=None if prior is None else _parse_prior(prior))


def _parse_prior(raw: Mapping[str, Any]) -> RankerSpec:
    section = _Section(raw, 'ranker.prior')
    kind = section.text('kind')
    if kind in _RANKERS_WITH_FILE:
        raise BundleError(f'ranker.prior: kind {kind!r} is a trained one; it has to be a kind '
                          'that reads the prompt and has no file, such as domain_words')
    return RankerSpec(kind, section.raw)


def _parse_target(section: _Section) -> TargetSpec:
    name = section.text('name')
    licence, provenance = section.text('licence'), section.text('provenance')
    path, gguf = section.text('path', False), section.take('gguf', dict)
    if (path is None) == (gguf is None):
        raise BundleError('target: give exactly one of "path" and "gguf"')
    if gguf is None:
        hashes = section.take('sha256', dict, {})
        for file, digest in hashes.items():
            if not isinstance(file, str):
                raise BundleError(f'target: sha256 names the file {file!r}, expected text')
            if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
                raise BundleError(f'target: sha256 of {file} is not 64 hexadecimal digits')
        section.finish()
        return TargetSpec(name, licence, provenance, path, hashes)
    section.finish()
    inner = _Section(gguf, 'target: gguf')
    spec = TargetSpec(name, licence, provenance, gguf=inner.text('file'),
                      gguf_sha256=inner.sha256('sha256'), package=inner.text('package', False),
                      package_sha256=inner.sha256('package_sha256', False))
    inner.finish()
    return spec


def _parse_draft(raw: Any, where: str) -> DraftSpec:
    # Here, so that the manifest refuses a kind that does not exist; the kinds import the bundle.
    from .drafts import KINDS
    section = _Section(raw, where)
    draft_id = section.text('id')
    if not _ID.fullmatch(draft_id):
        raise BundleError(f'{where}: id {draft_id!r} is not made of a-z, 0-9, "_", "." and "-"')
    section.where = where = f'draft {draft_id!r}'
    kind = section.text('kind')
    if kind not in KINDS:
        raise BundleError(f'{where}: kind {kind!r} is not known; there are: '
                          f'{", ".join(sorted(KINDS))}')
    if kind == _SELF_KIND:
        raise BundleError(f'{where}: {kind} is no draft to be ranked; give it as the section '
                          f'{_SELF_KIND!r} of the manifest')
    has_file = kind not in _KINDS_WITHOUT_FILE
    acceptance = section.take('acceptance', dict, {})
    for domain, value in acceptance.items():
        if not isinstance(domain, str):
            raise BundleError(f'{where}: acceptance names the domain {domain!r}, expected text')
        if type(value) not in (int, float) or not 0 <= value <= 1:
            raise BundleError(f'{where}: acceptance of {domain!r} is {value!r}, expected 0..1')
    size = section.take('bytes', int, 0, required=has_file)
    if size < 0:
        raise BundleError(f'{where}: bytes is {size}')
    spec = DraftSpec(
        id=draft_id, kind=kind, domain=section.text('domain', False, ''),
        licence=section.text('licence'), provenance=section.text('provenance'),
        path=section.text('path') if has_file else None,
        sha256=section.sha256('sha256') if has_file else None,
        bytes=size, acceptance={k: float(v) for k, v in acceptance.items()},
        options=section.take('options', dict, {}))
    section.finish()
    KINDS[kind].check_options(spec)
    return spec


def _check_file(bundle: Bundle, spec: DraftSpec, verify: bool, again: bool) -> None:
    path = bundle.weight_file(spec)
    if path is None:
        return
    if not path.is_file():
        raise BundleError(f'draft {spec.id!r}: {path} does not exist')
    size = path.stat().st_size
    if size != spec.bytes:
        raise BundleError(f'draft {spec.id!r}: {path} has {size} bytes, the manifest says '
                          f'{spec.bytes}: the file is truncated or was replaced')
    if verify and not has_sha256(path, spec.sha256, again):
        raise BundleError(f'draft {spec.id!r}: {path} does not have the sha256 of the manifest: '
                          'the file is damaged or was replaced')


def _check_ranker(bundle: Bundle, verify: bool, again: bool) -> None:
    path = bundle.ranker_file
    if path is None:
        return
    if not path.is_file():
        raise BundleError(f'ranker: {path} does not exist')
    if verify and not has_sha256(path, bundle.ranker.sha256, again):
        raise BundleError(f'ranker: {path} does not have the sha256 of the manifest: the file is '
                          'damaged or was replaced')


def draft_metadata(bundle: Bundle, spec: DraftSpec) -> Mapping[str, str]:
    """How a draft was made, as its weight file records it."""
    path = bundle.weight_file(spec)
    return {} if path is None else read_metadata(path)
