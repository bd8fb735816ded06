# SPDX-License-Identifier: Apache-2.0
"""``memspec info``: what a bundle holds."""

from __future__ import annotations

import argparse

from .options import add_json_option, write_json


def register(commands) -> None:
    parser = commands.add_parser('info', help='show what a bundle holds')
    parser.add_argument('--bundle', default='', metavar='DIR')
    add_json_option(parser)
    parser.set_defaults(run=run)


def describe(path: str) -> dict:
    """The bundle as plain data; files are checked, the target is converted if need be."""
    from ..models.bundle import draft_metadata, load_bundle
    from ..models.target_files import locate_target
    bundle = load_bundle(path or None)
    target = locate_target(bundle)
    size = sum(file.stat().st_size for file in target.glob('*.safetensors'))
    return {
        'name': bundle.name, 'path': str(bundle.directory.resolve()),
        'description': bundle.description,
        'target': {'name': bundle.target.name, 'path': str(target), 'bytes': size,
                   'licence': bundle.target.licence, 'provenance': bundle.target.provenance},
        'tokenizer': {'path': str(bundle.tokenizer_path)},
        'shared_head': ({'token_ids': len(bundle.head_token_ids())}
                        if bundle.head_path else None),
        'drafts': [{'id': spec.id, 'kind': spec.kind, 'domain': spec.domain,
                    'bytes': spec.bytes,
                    'path': str(bundle.weight_file(spec)) if spec.path else None,
                    'licence': spec.licence, 'provenance': spec.provenance,
                    'acceptance': dict(spec.acceptance),
                    'made': dict(draft_metadata(bundle, spec))} for spec in bundle.drafts],
        'self_speculation': ({'kind': exits.kind, 'bytes': exits.bytes, **exits.options}
                             if (exits := bundle.self_speculation) is not None else None),
        'ranker': bundle.ranker.kind,
    }


def run(arguments: argparse.Namespace) -> int:
    data = describe(arguments.bundle)
    if arguments.json:
        write_json(arguments.json, data)
        return 0
    target = data['target']
    print(f'{data["name"]}  ({data["path"]})\n{data["description"]}\n')
    print(f'target  {target["name"]}, {target["bytes"] / 1e6:.0f} MB, {target["licence"]}')
    print(f'        {target["path"]}')
    for draft in data['drafts']:
        share = draft['bytes'] / target['bytes']
        size = (f'{draft["bytes"] / 1e6:.1f} MB ({share:.1%} of the target)' if share
                else 'no memory')
        print(f'draft   {draft["id"]}: {draft["kind"]}, {draft["domain"] or "any domain"}, '
              f'{size}, {draft["licence"]}')
    exits = data['self_speculation']
    if exits is not None:
        checked = f', checked after {exits["check"]}' if exits.get('check') else ''
        print(f'exits   after {exits["depth"]} layers{checked}, {exits["bytes"] / 1e6:.1f} MB')
    print(f'ranker  {data["ranker"]}')
    return 0
