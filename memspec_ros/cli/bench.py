# SPDX-License-Identifier: Apache-2.0
"""``memspec bench``: measurements, each with a table and a JSON file."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..models.errors import InvalidRequestError
from .options import add_json_option, add_runtime_options, runtime_options, write_json


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


def run_quick(arguments: argparse.Namespace) -> int:
    from ..bench.quick import format_table, measure
    for name in ('per_domain', 'max_new_tokens'):
        if getattr(arguments, name) < 1:
            raise InvalidRequestError(f'--{name.replace("_", "-")} is {getattr(arguments, name)}, '
                                      'expected at least 1')
    result = measure(Path(arguments.prompts), runtime_options(arguments), arguments.bundle,
                     arguments.per_domain, arguments.max_new_tokens)
    # The table first: a file that cannot be written must not lose minutes of measuring.
    if arguments.json != '-':
        print(format_table(result))
    if arguments.json:
        write_json(arguments.json, result)
    return 0
