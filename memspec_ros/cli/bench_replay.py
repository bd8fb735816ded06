# SPDX-License-Identifier: Apache-2.0
"""``memspec bench`` suites that replay acceptance traces, and the profile they run by."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..models.errors import InvalidRequestError
from .options import add_engine_options, add_json_option, runtime_options, write_json


def register(suites) -> None:
    profile = suites.add_parser(
        'profile', help='what every part of an iteration costs on this machine',
        description='Measures a cost profile for replays: verify passes, draft steps, catching '
                    'up, ranking, loads. Give it to other suites as --profile FILE.')
    profile.add_argument('--rounds', type=int, default=24, metavar='COUNT',
                         help='how often everything is timed (default: %(default)s)')
    add_engine_options(profile)
    profile.set_defaults(draft_tokens=8, run=run_profile)
    add_json_option(profile)
    policies = suites.add_parser(
        'policies', help='every scheduling policy, oracles and the bound beside them',
        description='Replays acceptance traces (memspec trace) under every policy on a virtual '
                    'clock, by the cost profile of a machine.')
    add_replay_options(policies)
    policies.add_argument('--policy', action='append', default=[], metavar='NAME',
                          help='compare only this one with general_static (may be given several '
                               'times; default: all)')
    add_json_option(policies)
    policies.set_defaults(run=run_policies)


def add_replay_options(parser: argparse.ArgumentParser) -> None:
    """What every suite that replays needs."""
    parser.add_argument('--mode', choices=('replay',), default='replay',
                        help='replay: on traces, without running a model')
    parser.add_argument('--traces', action='append', required=True, metavar='DIR',
                        help='traces of memspec trace (may be given several times)')
    parser.add_argument('--bundle', default='', metavar='DIR',
                        help='bundle of the traces: its drafts, ranker and tokenizer (default: '
                             'the installed one)')
    parser.add_argument('--profile', default='jetson_orin_nano', metavar='NAME|FILE',
                        help='cost profile: a name, or a file of memspec bench profile '
                             '(default: %(default)s)')
    parser.add_argument('--load-ratio', type=float, default=2.7, metavar='RATIO',
                        help="how many iterations a load takes (default: the paper's 2.7; 0: as "
                             'long as the profile says)')
    parser.add_argument('--k', type=int, default=2, metavar='K',
                        help='most drafts in memory (default: %(default)s)')
    parser.add_argument('--n', type=int, default=4, metavar='N',
                        help='iterations between rankings (default: %(default)s)')
    parser.add_argument('--gamma', type=int, default=4, metavar='TOKENS',
                        help='tokens drafted in every iteration (default: %(default)s)')
    parser.add_argument('--adaptive', action='store_true',
                        help='draft as many as pay instead, at most that many')
    parser.add_argument('--first-load-counts', action='store_true',
                        help='decoding begins while the first draft loads, as in the node')
    parser.add_argument('--max-new-tokens', type=int, default=128, metavar='TOKENS',
                        help='cut longer answers (default: %(default)s)')
    parser.add_argument('--prompts-per-domain', type=int, default=0, metavar='COUNT',
                        help='0: all')
    parser.add_argument('--without', action='append', default=[], metavar='DRAFT',
                        help='a draft not to be used (may be given several times)')


def run_profile(arguments: argparse.Namespace) -> int:
    from ..bench.measure_profile import format_table, measure
    quiet = arguments.json == '-'
    profile = measure(arguments.bundle, runtime_options(arguments), arguments.rounds,
                      (lambda line: None) if quiet else print)
    if not quiet:
        print(format_table(profile))
    if arguments.json:
        write_json(arguments.json, profile.as_dict())
    return 0


def run_policies(arguments: argparse.Namespace) -> int:
    from ..bench.policies import format_table, run_policies
    scenario = replay_scenario(arguments)
    header, traces, drafts, ranker, tokenizer = open_replay(arguments)
    result = run_policies(traces, header, drafts, scenario, ranker, tokenizer, arguments.policy)
    # The table first: a file that cannot be written must not lose what was replayed.
    if arguments.json != '-':
        print(format_table(result))
    if arguments.json:
        write_json(arguments.json, result)
    return 0


def replay_scenario(arguments: argparse.Namespace):
    """What ``add_replay_options`` parsed, as a Scenario."""
    from ..bench.profile import load_profile
    from ..bench.replay import Scenario
    for name, least in (('k', 0), ('n', 1), ('gamma', 1), ('max_new_tokens', 1),
                        ('prompts_per_domain', 0), ('load_ratio', 0)):
        value = getattr(arguments, name)
        if not least <= value < float('inf'):
            raise InvalidRequestError(f'--{name.replace("_", "-")} is {value}, expected at least '
                                      f'{least}')
    profile = load_profile(arguments.profile)
    if arguments.load_ratio:
        profile = profile.with_load_ratio(arguments.load_ratio)
    return Scenario(profile, arguments.k, arguments.n, arguments.gamma, arguments.max_new_tokens,
                    arguments.adaptive, arguments.first_load_counts)


def open_replay(arguments: argparse.Namespace):
    """(header, traces, drafts, ranker, tokenizer) of what ``add_replay_options`` names."""
    from ..bench.replay import open_ranker, take_per_domain
    from ..models.bundle import load_bundle
    from ..models.target_files import locate_target
    from ..models.tokenizer import Tokenizer
    from ..training.trace_store import TraceStore
    stores = [TraceStore(Path(directory)) for directory in arguments.traces]
    header = stores[0].header()
    for store in stores[1:]:
        if store.header() != header:
            raise InvalidRequestError(f'--traces {store.directory}: these traces were not made '
                                      f'like those of {stores[0].directory}')
    bundle = load_bundle(arguments.bundle or None, verify=False)
    locate_target(bundle)
    for draft in arguments.without:
        if draft not in header.drafts:
            raise InvalidRequestError(f'--without {draft}: the traces hold no such draft; they '
                                      f'hold: {", ".join(header.drafts)}')
    drafts = [bundle.draft(draft) for draft in header.drafts if draft not in arguments.without]
    traces = take_per_domain((trace for store in stores for trace in store),
                             arguments.prompts_per_domain)
    return (header, traces, drafts, open_ranker(bundle, drafts, traces),
            Tokenizer(bundle.tokenizer_path))
