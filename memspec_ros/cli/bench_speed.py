# SPDX-License-Identifier: Apache-2.0
"""``memspec bench`` suites about speed and what it costs: limits, peers, lengths, weights."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..models.errors import InvalidRequestError
from .options import (
    add_engine_options,
    add_json_option,
    add_prompt_options,
    add_runtime_options,
    check_at_least,
    make_directory,
    present,
    runtime_options,
)


def register(suites) -> None:
    floor = suites.add_parser(
        'floor', help='how near target and drafts come to what the memory allows',
        description='Measures how fast this machine reads memory, and what share of that a '
                    'target step, verify passes of 1 to 9 rows and draft steps achieve.')
    floor.add_argument('--rounds', type=int, default=24, metavar='COUNT',
                       help='how often everything is timed (default: %(default)s)')
    add_engine_options(floor)
    add_json_option(floor)
    floor.set_defaults(run=run_floor)
    peers = suites.add_parser(
        'peers', help='against transformers and llama.cpp on the same weights',
        description='Races this package against greedy, assisted and prompt-lookup generation of '
                    'transformers and, where llama-cpp-python is installed, llama.cpp.')
    add_prompt_options(peers, 2, 96)
    peers.add_argument('--assistant', default='', metavar='DIR',
                       help='model that drafts in assisted generation (default: the best '
                            'causal_lm draft of the bundle)')
    peers.add_argument('--assistant-tokens', type=int, default=0, metavar='COUNT',
                       help='tokens it drafts (0: as transformers likes)')
    peers.add_argument('--gguf', default='', metavar='FILE',
                       help="weights for llama.cpp (default: the target's own, same type)")
    add_runtime_options(peers)
    add_json_option(peers)
    peers.set_defaults(run=run_peers)
    trees = suites.add_parser(
        'trees', help='chains, branches and merged drafts against plain decoding',
        description='Races verifying chains, branching chains and trees that two drafts share '
                    'against plain decoding, on one engine and in turn.')
    add_prompt_options(trees, 2, 96)
    add_runtime_options(trees)
    add_json_option(trees)
    trees.set_defaults(run=run_trees)
    gamma = suites.add_parser(
        'gamma', help='acceptance and speed-up over the draft length, and why some pairs lose',
        description='Every draft of one or several bundles decodes alone with each fixed draft '
                    'length up to --draft-tokens; beside that, what a drafted token and a verify '
                    'of n rows cost.')
    gamma.add_argument('--configurations', nargs='+', action='extend', default=[],
                       metavar='[DIR][:DTYPE][:WEIGHTS][@[DIR/]DRAFT]',
                       help='target (of a bundle, "" for the default one), type and weights to '
                            'hold it in, and the draft to sweep on it, perhaps of another bundle '
                            '(default: --bundle with all its drafts)')
    gamma.add_argument('--draft', action='append', default=[], metavar='ID',
                       help='sweep this one (may be given several times; default: all)')
    add_prompt_options(gamma, 1, 64)
    gamma.add_argument('--out', metavar='DIR', help='draw gamma.png there (needs matplotlib)')
    add_engine_options(gamma)
    add_json_option(gamma)
    gamma.set_defaults(draft_tokens=8, run=run_gamma)
    weights = suites.add_parser(
        'weights', help='how far the target is from its unquantised self, by how it is held',
        description='Has the target read prompts with its weights held in every way, and says how '
                    'far perplexity and most probable tokens are from those of the unquantised '
                    'target in float32.')
    weights.add_argument('--prompts', required=True, metavar='FILE',
                         help='JSON lines with "prompt" and "domain"')
    weights.add_argument('--prompts-per-domain', type=int, default=0, metavar='COUNT',
                         help='0: all (default: %(default)s)')
    weights.add_argument('--prompt-tokens', type=int, default=256, metavar='TOKENS',
                         help='where longer prompts are cut off (default: %(default)s)')
    weights.add_argument('--kinds', nargs='+', default=['auto', 'dense', 'int8', 'int4'],
                         metavar='KIND', help='values of --weights to judge (default: all)')
    add_engine_options(weights)
    add_json_option(weights)
    weights.set_defaults(run=run_weights)


def run_weights(arguments: argparse.Namespace) -> int:
    from ..bench.weights import format_table, measure
    check_at_least(arguments, prompts_per_domain=0, prompt_tokens=2)
    present(arguments, format_table, lambda report: measure(
        arguments.bundle, runtime_options(arguments), Path(arguments.prompts),
        arguments.prompts_per_domain, arguments.prompt_tokens, arguments.kinds, report))
    return 0


def run_floor(arguments: argparse.Namespace) -> int:
    from ..bench.floor import format_table, measure
    present(arguments, format_table, lambda report: measure(
        arguments.bundle, runtime_options(arguments), arguments.rounds, report))
    return 0


def run_peers(arguments: argparse.Namespace) -> int:
    from ..bench.peers import format_table, measure
    check_at_least(arguments, prompts_per_domain=0, max_new_tokens=1, assistant_tokens=0)
    present(arguments, format_table, lambda report: measure(
        Path(arguments.prompts), runtime_options(arguments), arguments.bundle,
        arguments.prompts_per_domain, arguments.max_new_tokens, arguments.assistant,
        arguments.assistant_tokens, arguments.gguf, report))
    return 0


def run_trees(arguments: argparse.Namespace) -> int:
    from ..bench.trees import format_table, measure
    check_at_least(arguments, prompts_per_domain=0, max_new_tokens=1)
    present(arguments, format_table, lambda report: measure(
        Path(arguments.prompts), runtime_options(arguments), arguments.bundle,
        arguments.prompts_per_domain, arguments.max_new_tokens, report))
    return 0


def run_gamma(arguments: argparse.Namespace) -> int:
    from ..bench.gamma import measure
    from ..bench.gamma_configuration import Configuration
    from ..bench.gamma_figure import draw, format_table, PICTURE_NAME
    from ..bench.plotting import check_plotting
    check_at_least(arguments, prompts_per_domain=0, max_new_tokens=1, draft_tokens=1)
    if arguments.bundle and arguments.configurations:
        raise InvalidRequestError('--bundle and --configurations exclude each other')
    if arguments.out:
        # Before minutes of measuring, not after.
        check_plotting()
        make_directory(arguments.out)
    configurations = [Configuration.parse(text, arguments.dtype, arguments.weights)
                      for text in arguments.configurations or [arguments.bundle]]
    options = runtime_options(arguments)
    result = present(arguments, format_table, lambda report: measure(
        Path(arguments.prompts), configurations, options, arguments.prompts_per_domain,
        arguments.max_new_tokens, arguments.draft, report))
    if arguments.out:
        draw(result, Path(arguments.out) / PICTURE_NAME)
    return 0
