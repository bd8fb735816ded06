# SPDX-License-Identifier: Apache-2.0
"""``memspec bench SUITE``: the suites that hold policies against each other and the paper."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..models.errors import InvalidRequestError
from .bench_sources import DEFAULT_PROFILE, MODES, open_sources, say
from .options import add_json_option, make_directory, write_json

# What stands in bench/suites, which is imported only when it is run.
_SUITES = {
    'switch-cost': 'a load against an iteration',
    'policies': 'every scheduling policy, oracles and the bound beside them',
    'acceptance': 'what every draft, and every choice of drafts, has accepted',
    'breakdown': 'where the time goes',
    'interval': 'N, the iterations between rankings, swept',
    'length': 'the length of answers swept',
    'capacity': 'K, the most drafts in memory, swept',
    'predictor': 'how good the ranker is, and what a ranking takes',
    'latency': 'from the prompt to the last token, with prefill and first loads',
    'multiturn': 'conversations that change domain midway',
    'all': 'all of these, and a report of them in --out'}
_SWEEPS = ('interval', 'length', 'capacity')


def register(suites) -> None:
    for name, text in _SUITES.items():
        parser = suites.add_parser(
            name, help=text,
            description=f'{text[0].upper()}{text[1:]}: a table with the figures of the MemSpec '
                        'paper beside it. Replays acceptance traces on a virtual clock, by the '
                        'cost profile of a machine, or (--mode real) runs the engine.')
        _add_options(parser)
        parser.add_argument('--policy', action='append', default=[], metavar='NAME',
                            help='compare only this one with general_static (may be given '
                                 'several times)')
        if name in _SWEEPS:
            parser.add_argument('--values', type=int, nargs='+', default=[], metavar='NUMBER',
                                help='what to sweep over')
        if name in ('predictor', 'all'):
            parser.add_argument('--ranker', action='append', default=[], metavar='FILE',
                                help="a ranker of memspec rank train to judge beside the "
                                     "bundle's (may be given several times)")
        add_json_option(parser)
        parser.set_defaults(run=run)


def _add_options(parser: argparse.ArgumentParser) -> None:
    """What all suites have in common."""
    parser.add_argument('--mode', choices=MODES, default='replay',
                        help='replay: on traces, without running a model; real: on the engine '
                             'itself, and timed (default: %(default)s)')
    parser.add_argument('--prompts', action='append', default=[], metavar='FILE',
                        help='JSON lines with "prompt" and "domain", or of conversations with '
                             '"turns" and "domain": traced first, for replays into --out or the '
                             'cache (may be given several times)')
    parser.add_argument('--traces', action='append', default=[], metavar='DIR',
                        help='replay traces that there are already, of memspec trace (may be '
                             'given several times)')
    parser.add_argument('--bundle', default='', metavar='DIR',
                        help='bundle: its drafts, ranker and tokenizer (default: the installed '
                             'one)')
    parser.add_argument('--out', metavar='DIR', help='draw PNGs there (needs matplotlib)')
    parser.add_argument('--runs', type=int, default=3, metavar='COUNT',
                        help='how often what is measured is measured; what is replayed is the '
                             'same every time, and replayed once (default: %(default)s)')
    parser.add_argument('--profile', default='', metavar='NAME|FILE',
                        help='replay by this cost profile: a name, or a file of memspec bench '
                             f'profile (default: {DEFAULT_PROFILE})')
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
    parser.add_argument('--prompt-tokens', type=int, default=256, metavar='TOKENS',
                        help='with --prompts: skip longer ones (default: %(default)s)')
    parser.add_argument('--without', action='append', default=[], metavar='DRAFT',
                        help='a draft not to be used (may be given several times)')
    parser.add_argument('--threads', type=int, default=0,
                        help='CPU threads of what runs a model (0: as PyTorch likes)')
    parser.add_argument('--device', default='auto',
                        help='auto, cpu, cuda or cuda:N, where a model is run')
    real = parser.add_argument_group('with --mode real')
    real.add_argument('--dtype', default='auto',
                      help='auto, bfloat16, float16 or float32 (default: auto)')
    real.add_argument('--cold-storage', action='store_true',
                      help='have the page cache let go of a draft before it is read')
    real.add_argument('--profile-rounds', type=int, default=12, metavar='COUNT',
                      help='how often everything is timed for the profile by which storage is '
                           'paced, before each run anew (default: %(default)s)')
    real.add_argument('--all-variants', action='store_true',
                      help='run the bandits in every variant, not only in the one that is best '
                           'in a replay of the same prompts')


def run(arguments: argparse.Namespace) -> int:
    from ..bench.source import check_policies
    from ..bench.suites import SUITES
    from ..bench.suites.comparison import Bench
    from ..bench.suites.report import data_of, run_all, write_report
    if arguments.runs < 1:
        raise InvalidRequestError(f'--runs is {arguments.runs}, expected at least 1')
    check_policies(arguments.policy)
    out = _prepare_out(arguments)
    whole = arguments.suite == 'all'
    values = getattr(arguments, 'values', [])
    suites = SUITES if whole else {arguments.suite: SUITES[arguments.suite]}
    with open_sources(arguments, _longest(arguments, values)) as (prompts, conversations):
        bench = Bench(prompts or conversations, conversations, arguments.policy, arguments.runs,
                      values, getattr(arguments, 'ranker', []))
        results = run_all(bench, suites, say if whole else lambda line: None)
    # The tables first: a file that cannot be written must not lose what was measured.
    if arguments.json != '-':
        print('\n\n'.join([bench.source.heading(),
                           *(result.text() for result in results.values())]))
    if arguments.json:
        data = data_of(bench, results)
        write_json(arguments.json, data if whole else results[arguments.suite].data)
    if out:
        report = write_report(bench, results, suites, out)
        if arguments.json != '-':
            print(f'\n{report} written')
    return 0


def _prepare_out(arguments: argparse.Namespace) -> Path | None:
    if not arguments.out:
        if arguments.suite == 'all':
            raise InvalidRequestError('all writes a report: give --out DIR')
        return None
    from ..bench.plotting import check_plotting
    # Before minutes of measuring, not after.
    check_plotting()
    return make_directory(arguments.out)


def _longest(arguments: argparse.Namespace, values: list[int]) -> int:
    """Tokens of the longest answers that the suite asks for."""
    from ..bench.suites.length import VALUES
    swept = values or VALUES if arguments.suite in ('length', 'all') else ()
    return max(1, arguments.max_new_tokens, *swept)
