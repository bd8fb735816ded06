# SPDX-License-Identifier: Apache-2.0
"""``memspec bench memory``: generation memory against naive speculative decoding."""

from __future__ import annotations

import argparse
from pathlib import Path

from .options import add_json_option, check_between, present


def register(suites) -> None:
    parser = suites.add_parser(
        'memory', help='memory of generation against naive speculative decoding',
        description='Weighs and times the engine against a speculative decoder that grows its '
                    'buffers, copies its caches and keeps all logits, with the same target, '
                    'draft, gamma and prompts.')
    parser.add_argument('--prompts', required=True, metavar='FILE',
                        help='JSON lines with "prompt" and "domain"')
    parser.add_argument('--per-domain', type=int, default=1, metavar='COUNT',
                        help='prompts of each domain (default: %(default)s)')
    parser.add_argument('--max-new-tokens', type=int, default=128, metavar='TOKENS',
                        help='length of answers (default: %(default)s)')
    parser.add_argument('--rounds', type=int, default=3, metavar='COUNT',
                        help='how often everything is timed (default: %(default)s)')
    parser.add_argument('--gamma', type=int, default=4, metavar='TOKENS',
                        help='tokens drafted in every iteration (default: %(default)s)')
    parser.add_argument('--draft', default='', metavar='ID',
                        help='a shared_layers draft (default: the first)')
    parser.add_argument('--bundle', default='', metavar='DIR',
                        help='model bundle (default: the installed one)')
    parser.add_argument('--device', default='cpu',
                        help='where memory is weighed as that of the process (default: cpu)')
    parser.add_argument('--dtype', default='auto', help='auto, bfloat16, float16 or float32')
    parser.add_argument('--threads', type=int, default=0, help='CPU threads (0: as PyTorch likes)')
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..bench.memory import format_table, measure, prepare
    check_between(arguments, per_domain=(1, 1 << 20), max_new_tokens=(1, 1 << 20),
                  rounds=(1, 1000), gamma=(1, 16), threads=(0, 256))
    race = prepare(arguments.bundle, arguments.draft, arguments.device, arguments.dtype,
                   arguments.threads, arguments.gamma, arguments.max_new_tokens,
                   Path(arguments.prompts), arguments.per_domain)
    present(arguments, format_table, lambda report: measure(race, arguments.rounds, report))
    return 0
