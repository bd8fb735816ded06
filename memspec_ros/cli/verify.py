# SPDX-License-Identifier: Apache-2.0
"""``memspec verify``: proof that a bundle's drafts do not change what its target says."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..models.errors import InvalidRequestError
from .options import (
    add_json_option,
    add_kv_options,
    add_runtime_options,
    present,
    runtime_options,
)


def register(commands) -> None:
    parser = commands.add_parser(
        'verify', help='check that drafts do not change what the target says',
        description='Holds speculative decoding against transformers on the same target: greedy '
                    'answers, the distribution of sampled ones, and exact distributions on a '
                    'small vocabulary. With --kv-int8-after or --kv-window, against plain '
                    'decoding with the same option. Exit status 0: all passed. See '
                    'docs/sampling.md.')
    parser.add_argument('--prompts', metavar='FILE',
                        help='JSON lines with "prompt" (default: a dozen of its own)')
    parser.add_argument('--count', type=int, default=12, metavar='PROMPTS',
                        help='how many of them (default: %(default)s)')
    parser.add_argument('--max-new-tokens', type=int, default=64, metavar='TOKENS',
                        help='length of a greedy answer (default: %(default)s)')
    parser.add_argument('--tokens', type=int, default=9200, metavar='TOKENS',
                        help='sampled by each method (default: about %(default)s)')
    parser.add_argument('--verification', default='coupled', choices=('coupled', 'rejection'),
                        help='how drafted tokens are judged when sampling (default: %(default)s)')
    add_runtime_options(parser)
    add_kv_options(parser)
    add_json_option(parser)
    # The proof is of the algorithm: half precision adds the noise of its kernels.
    parser.set_defaults(run=run, dtype='float32')


def run(arguments: argparse.Namespace) -> int:
    from ..bench.equivalence import format_report, verify
    for name in ('count', 'max_new_tokens', 'tokens'):
        if getattr(arguments, name) < 1:
            raise InvalidRequestError(f'--{name.replace("_", "-")} is {getattr(arguments, name)}, '
                                      'expected 1 or more')
    options = runtime_options(arguments)
    options.settings.verification = arguments.verification
    prompts = Path(arguments.prompts) if arguments.prompts else None
    result = present(arguments, format_report, lambda report: verify(
        options, arguments.bundle, prompts, arguments.count, arguments.max_new_tokens,
        arguments.tokens, report=report))
    return 0 if result['pass'] else 1
