# SPDX-License-Identifier: Apache-2.0
"""``memspec bench``: measurements, each with a table and a JSON file."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..models.errors import InvalidRequestError
from . import bench_kv, bench_memory, bench_self, bench_speed, bench_suites
from .options import (
    add_engine_options,
    add_json_option,
    add_prompt_options,
    add_runtime_options,
    add_storage_options,
    check_at_least,
    make_directory,
    present,
    runtime_options,
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
    add_storage_options(quick)
    add_json_option(quick)
    quick.set_defaults(run=run_quick)
    frontier = suites.add_parser(
        'frontier', help='speed-up of every draft alone against the memory it takes',
        description='Runs every draft of one or several bundles of the same target, each as the '
                    'only one, and plain decoding beside them, on one engine and in turn.')
    frontier.add_argument('--drafts', nargs='+', action='extend', default=[], metavar='DIR',
                          help='further bundles whose drafts are to be compared')
    add_prompt_options(frontier, 0, 96)
    frontier.add_argument('--out', metavar='DIR',
                          help='draw frontier.png there (needs matplotlib)')
    add_engine_options(frontier)
    add_json_option(frontier)
    frontier.set_defaults(run=run_frontier)
    prefetch = suites.add_parser(
        'prefetch', help='time between tokens with a load in flight and with none',
        description='Decodes with one draft while others are loaded one after another, and '
                    'while nothing is, in turn.')
    add_prompt_options(prefetch, 1, 96)
    prefetch.add_argument('--runs', type=int, default=3, metavar='COUNT',
                          help='how often everything is run (default: %(default)s)')
    prefetch.add_argument('--load-ratio', type=float, default=2.7, metavar='RATIO',
                          help="how many iterations a load takes (default: the paper's 2.7; 0: "
                               'as long as the storage takes)')
    add_engine_options(prefetch)
    add_storage_options(prefetch)
    add_json_option(prefetch)
    prefetch.set_defaults(run=run_prefetch)
    profile = suites.add_parser(
        'profile', help='what every part of an iteration costs on this machine',
        description='Measures a cost profile for replays: verify passes, draft steps, catching '
                    'up, ranking, loads. Give it to other suites as --profile FILE.')
    profile.add_argument('--rounds', type=int, default=24, metavar='COUNT',
                         help='how often everything is timed (default: %(default)s)')
    add_engine_options(profile)
    profile.set_defaults(draft_tokens=8, run=run_profile)
    add_json_option(profile)
    bench_speed.register(suites)
    bench_suites.register(suites)
    bench_memory.register(suites)
    bench_self.register(suites)
    bench_kv.register(suites)


def run_quick(arguments: argparse.Namespace) -> int:
    from ..bench.quick import format_table, measure
    check_at_least(arguments, per_domain=1, max_new_tokens=1)
    present(arguments, format_table, lambda report: measure(
        Path(arguments.prompts), runtime_options(arguments), arguments.bundle,
        arguments.per_domain, arguments.max_new_tokens))
    return 0


def run_frontier(arguments: argparse.Namespace) -> int:
    from ..bench.frontier import measure
    from ..bench.frontier_figure import draw, format_table, PICTURE_NAME
    from ..bench.plotting import check_plotting
    check_at_least(arguments, prompts_per_domain=0, max_new_tokens=1, draft_tokens=1)
    if arguments.out:
        # Before minutes of measuring, not after.
        check_plotting()
        make_directory(arguments.out)
    result = present(arguments, format_table, lambda report: measure(
        Path(arguments.prompts), arguments.bundle, arguments.drafts,
        runtime_options(arguments), arguments.prompts_per_domain, arguments.max_new_tokens,
        report))
    if arguments.out:
        draw(result, Path(arguments.out) / PICTURE_NAME)
    return 0


def run_prefetch(arguments: argparse.Namespace) -> int:
    from ..bench.prefetch import format_table, measure
    check_at_least(arguments, prompts_per_domain=0, max_new_tokens=1, runs=1, draft_tokens=1)
    if not 0 <= arguments.load_ratio < float('inf'):
        raise InvalidRequestError(f'--load-ratio is {arguments.load_ratio}, expected at least 0')
    present(arguments, format_table, lambda report: measure(
        Path(arguments.prompts), runtime_options(arguments), arguments.bundle,
        arguments.prompts_per_domain, arguments.max_new_tokens, arguments.runs,
        arguments.load_ratio, report))
    return 0


def run_profile(arguments: argparse.Namespace) -> int:
    from ..bench.measure_profile import format_table, measure
    present(arguments, format_table, lambda report: measure(
        arguments.bundle, runtime_options(arguments), arguments.rounds, report),
        as_data=lambda profile: profile.as_dict())
    return 0
