# SPDX-License-Identifier: Apache-2.0
"""``memspec bench``: measurements, each with a table and a JSON file."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..models.errors import InvalidRequestError
from . import bench_replay
from .options import (
    add_engine_options,
    add_json_option,
    add_runtime_options,
    runtime_options,
    write_json,
)


def register(commands) -> None:
    parser = commands.add_parser('bench', help='measure')
    suites = parser.add_subparsers(dest='suite', required=True, metavar='SUITE')
    quick = suites.add_parser(
        'quick', help='tokens/s with and without speculation and of transformers, interleaved')
    quick.add_argument('--prompts', required=True, metavar='FILE',
                       help='JSON lines with "prompt" and "domain"')
    quick.add_argument('--per-domain', type=int, default=4, metavar='COUNT',
                       help='prompts of each domain (default: %(default)s)')
    quick.add_argument('--max-new-tokens', type=int, default=96, metavar='TOKENS')
    add_runtime_options(quick)
    add_json_option(quick)
    quick.set_defaults(run=run_quick)
    frontier = suites.add_parser(
        'frontier', help='speed-up of every draft alone against the memory it takes',
        description='Runs every draft of one or several bundles of the same target, each as the '
                    'only one, and plain decoding beside them, on one engine and in turn.')
    frontier.add_argument('--drafts', nargs='+', action='extend', default=[], metavar='DIR',
                          help='further bundles whose drafts are to be compared')
    frontier.add_argument('--prompts', required=True, metavar='FILE',
                          help='JSON lines with "prompt" and "domain"')
    frontier.add_argument('--prompts-per-domain', type=int, default=0, metavar='COUNT',
                          help='0: all')
    frontier.add_argument('--max-new-tokens', type=int, default=96, metavar='TOKENS',
                          help='length of answers (default: %(default)s)')
    frontier.add_argument('--out', metavar='DIR',
                          help='draw frontier.png there (needs matplotlib)')
    add_engine_options(frontier)
    add_json_option(frontier)
    frontier.set_defaults(run=run_frontier)
    bench_replay.register(suites)


def run_quick(arguments: argparse.Namespace) -> int:
    from ..bench.quick import format_table, measure
    _check_at_least(arguments, per_domain=1, max_new_tokens=1)
    result = measure(Path(arguments.prompts), runtime_options(arguments), arguments.bundle,
                     arguments.per_domain, arguments.max_new_tokens)
    # The table first: a file that cannot be written must not lose minutes of measuring.
    if arguments.json != '-':
        print(format_table(result))
    if arguments.json:
        write_json(arguments.json, result)
    return 0


def run_frontier(arguments: argparse.Namespace) -> int:
    from ..bench.frontier import measure
    from ..bench.frontier_figure import check_plotting, draw, format_table, PICTURE_NAME
    _check_at_least(arguments, prompts_per_domain=0, max_new_tokens=1, draft_tokens=1)
    if arguments.out:
        # Before minutes of measuring, not after.
        check_plotting()
        _make_directory(Path(arguments.out))
    quiet = arguments.json == '-'
    result = measure(Path(arguments.prompts), arguments.bundle, arguments.drafts,
                     runtime_options(arguments), arguments.prompts_per_domain,
                     arguments.max_new_tokens, (lambda line: None) if quiet else print)
    if not quiet:
        print(format_table(result))
    if arguments.json:
        write_json(arguments.json, result)
    if arguments.out:
        draw(result, Path(arguments.out) / PICTURE_NAME)
    return 0


def _check_at_least(arguments: argparse.Namespace, **least: int) -> None:
    for name, value in least.items():
        if getattr(arguments, name) < value:
            raise InvalidRequestError(f'--{name.replace("_", "-")} is {getattr(arguments, name)}, '
                                      f'expected at least {value}')


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequestError(f'--out {path}: {error.strerror or error}') from error
