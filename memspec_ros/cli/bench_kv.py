# SPDX-License-Identifier: Apache-2.0
"""``memspec bench turns`` and ``memspec bench kv``: what is kept of a text, and what that does."""

from __future__ import annotations

import argparse
from pathlib import Path

from .options import (
    add_engine_options,
    add_json_option,
    add_kv_options,
    check_between,
    kv_options,
    present,
    runtime_options,
)


def register(suites) -> None:
    turns = suites.add_parser(
        'turns', help='time to the first token of a second turn, kept and read again',
        description='Answers first turns of conversations, then times second ones: from the '
                    "first's keys and values, and from nothing.")
    turns.add_argument('--prompts', required=True, metavar='FILE',
                       help='JSON lines with "turns"')
    turns.add_argument('--count', type=int, default=0, metavar='COUNT',
                       help='conversations (0: all)')
    turns.add_argument('--max-new-tokens', type=int, default=256, metavar='TOKENS',
                       help='length of first answers (default: %(default)s)')
    turns.add_argument('--runs', type=int, default=3, metavar='COUNT',
                       help='how often each is timed (default: %(default)s)')
    add_engine_options(turns)
    add_json_option(turns)
    turns.set_defaults(run=run_turns)
    kv = suites.add_parser(
        'kv', help='INT8 and eviction of old keys and values: memory, quality, speed',
        description='Reads long texts with all keys and values as they are and with old ones in '
                    'INT8, evicted, and both: bytes, perplexity, agreement with the exact cache '
                    'and the time of a step.')
    kv.add_argument('--prompts', required=True, metavar='FILE',
                    help='JSON lines with "prompt", and "reference" if there is one: texts are '
                         'made of them')
    kv.add_argument('--texts', type=int, default=3, metavar='COUNT',
                    help='texts that fill the context (default: %(default)s)')
    kv.add_argument('--rounds', type=int, default=5, metavar='COUNT',
                    help='how often everything is timed behind each text (default: %(default)s)')
    add_engine_options(kv)
    add_kv_options(kv)
    add_json_option(kv)
    # No draft is asked.
    kv.set_defaults(run=run_kv, cache_capacity=0, draft_tokens=0)


def run_turns(arguments: argparse.Namespace) -> int:
    from ..bench.turns import format_table, measure
    check_between(arguments, count=(0, 1 << 20), max_new_tokens=(1, 1 << 20), runs=(1, 1000))
    present(arguments, format_table, lambda report: measure(
        Path(arguments.prompts), runtime_options(arguments), arguments.bundle, arguments.count,
        arguments.max_new_tokens, arguments.runs, report))
    return 0


def run_kv(arguments: argparse.Namespace) -> int:
    from ..bench.kv import format_table, measure
    check_between(arguments, texts=(1, 1 << 16), rounds=(1, 1000))
    asked = kv_options(arguments)
    # What is compared is said to the measurement: the runtime itself keeps all as it is.
    arguments.kv_int8_after = arguments.kv_window = 0
    present(arguments, format_table, lambda report: measure(
        Path(arguments.prompts), runtime_options(arguments), arguments.bundle, arguments.texts,
        arguments.rounds, [] if asked.exact else [asked], report))
    return 0
