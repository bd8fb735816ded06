# SPDX-License-Identifier: Apache-2.0
"""``memspec bench self-speculation``: the target drafting for itself against plain decoding."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..models.errors import InvalidRequestError
from .options import (
    add_engine_options,
    add_json_option,
    add_storage_options,
    check_at_least,
    present,
    runtime_options,
)


def register(suites) -> None:
    parser = suites.add_parser(
        'self-speculation', help='the target drafting for itself, in memory and from storage',
        description='Decodes plainly, by prompt lookup, by self-speculation and by both, no '
                    'draft being loaded, on one engine and in turn: with all layers in memory, '
                    'and with as many as --offload-mib holds, the others being read at the pace '
                    'of --storage-mb-per-sec for every pass.')
    parser.add_argument('--prompts', required=True, metavar='FILE',
                        help='JSON lines with "prompt" and "domain"')
    parser.add_argument('--per-domain', type=int, default=1, metavar='COUNT',
                        help='prompts of each domain, 0: all (default: %(default)s)')
    parser.add_argument('--max-new-tokens', type=int, default=64, metavar='TOKENS',
                        help='length of answers (default: %(default)s)')
    parser.add_argument('--offload-mib', type=float, nargs='+', action='extend', default=[],
                        metavar='MIB', help='also with so much memory for layers')
    add_engine_options(parser)
    add_storage_options(parser)
    parser.set_defaults(draft_tokens=8, storage_mb_per_sec=0.0, storage_latency_ms=0.0)
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..bench.self_speculation import format_table, measure
    check_at_least(arguments, per_domain=0, max_new_tokens=1, draft_tokens=1)
    for size in arguments.offload_mib:
        if not 0 < size < float('inf'):
            raise InvalidRequestError(f'--offload-mib is {size}, expected more than 0')
    present(arguments, format_table, lambda report: measure(
        Path(arguments.prompts), runtime_options(arguments), arguments.bundle,
        arguments.per_domain, arguments.max_new_tokens, arguments.offload_mib, report))
    return 0
