# SPDX-License-Identifier: Apache-2.0
"""``memspec plan``: what a bundle takes in memory, and what a budget buys."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ..models.errors import InvalidRequestError
from .options import add_json_option, add_kv_options, check_between, kv_options, write_json

if TYPE_CHECKING:
    from ..memory.planner import Plan

_MIB = 1 << 20
_LABELS = {
    'runtime': 'runtime: libraries and tokenizer', 'weights': 'target',
    'kv_cache': 'keys and values', 'hidden_states': "target's hidden states",
    'logits': 'logits', 'activations': 'activations', 'kernels': 'kernels and scratch',
    'shared_head': 'shared head', 'drafts': 'drafts', 'draft_caches': "drafts' caches",
    'loading': 'a draft being loaded', 'ranker': 'ranker', 'exits': 'exits of the target'}


def register(commands) -> None:
    parser = commands.add_parser(
        'plan', help='what a bundle takes in memory, and what a budget buys',
        description='Predicts the peak memory of a bundle before anything is loaded, says which '
                    'K, gamma and context fit a budget, and from which budget on speculation '
                    'keeps 96 %% of its speed.')
    parser.add_argument('bundle', nargs='?', default='', metavar='BUNDLE',
                        help='model bundle (default: the installed one)')
    parser.add_argument('--budget', type=float, default=0.0, metavar='MIB',
                        help='most memory the process may take (default: no limit)')
    parser.add_argument('--context', type=int, default=2048, metavar='TOKENS',
                        help='most tokens of prompt and output (default: %(default)s)')
    parser.add_argument('--sessions', type=int, default=1, metavar='COUNT',
                        help='conversations whose keys and values are kept (default: %(default)s)')
    parser.add_argument('--gamma', type=int, default=4, metavar='TOKENS',
                        help='most tokens drafted per iteration (default: %(default)s)')
    parser.add_argument('--k', type=int, default=2, metavar='K',
                        help='most drafts in memory (default: %(default)s)')
    parser.add_argument('--device', default='auto', help='auto, cpu, cuda or cuda:N')
    parser.add_argument('--dtype', default='auto', help='auto, bfloat16, float16 or float32')
    parser.add_argument('--weights', default='auto',
                        help="what the target's layers are held as (default: auto)")
    parser.add_argument('--layers-mib', type=float, default=0.0, metavar='MIB',
                        help="most memory for the target's layers, the others stay in storage "
                             '(default: all in memory)')
    parser.add_argument('--branches', type=int, default=4, metavar='TOKENS',
                        help='most second choices verified beside the drafted tokens '
                             '(default: %(default)s)')
    add_kv_options(parser)
    parser.add_argument('--threads', type=int, default=0, help='CPU threads of --measure')
    parser.add_argument('--measure', action='store_true',
                        help='also load and generate in a process of its own, and compare')
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..bench.measure_memory import measure, open_model, Subject
    from ..memory import planner
    from ..memory.footprint import Demand
    from ..models.packing import WEIGHT_KINDS
    check_between(arguments, budget=(0, 1 << 24), layers_mib=(0, 1 << 24),
                  context=(16, 1 << 20), gamma=(0, 16), branches=(0, 16),
                  sessions=(1, 64), k=(0, 64), threads=(0, 256))
    if arguments.weights not in WEIGHT_KINDS:
        raise InvalidRequestError(
            f'--weights is {arguments.weights!r}, expected one of {", ".join(WEIGHT_KINDS)}')
    model = open_model(arguments.bundle, arguments.device, arguments.dtype, arguments.weights,
                       arguments.layers_mib)
    demand = Demand(min(arguments.context, model.most_context), arguments.gamma,
                    min(arguments.k, model.sized_drafts), arguments.sessions, arguments.branches,
                    kv_options(arguments))
    plan = planner.make_plan(model, demand, int(arguments.budget * _MIB))
    name = model.bundle.name
    result = {'bundle': name, 'device': str(model.device),
              'dtype': str(model.dtype).removeprefix('torch.'), **plan.as_dict()}
    if arguments.measure:
        result['measured'] = measure(Subject(
            arguments.bundle, arguments.dtype, arguments.weights, arguments.device,
            arguments.threads, demand, arguments.layers_mib))
        # Of the same process: its runtime is what it measured itself.
        for figure in ('predicted_peak_mib', 'measured_peak_mib', 'relative_error'):
            result[figure] = result['measured'][figure]
    if arguments.json != '-':
        print(format_plan(plan, name, result.get('measured')))
    if arguments.json:
        write_json(arguments.json, result)
    return 0 if plan.affordable else 1


def format_plan(plan: Plan, name: str, measured: dict | None = None) -> str:
    """The plan as text."""
    demand, footprint = plan.demand, plan.footprint
    lines = [f'{name}: K = {demand.capacity}, gamma = {demand.gamma}, context {demand.context}, '
             f'{demand.sessions} session{"s" if demand.sessions > 1 else ""}'
             + ('' if demand.kv.exact else f'; keys and values: {demand.kv}, hence not exactly '
                'what the target says'), '']
    lines += [f'  {label:34}{getattr(footprint, field) / _MIB:9.1f} MiB'
              for field, label in _LABELS.items() if getattr(footprint, field)]
    lines.append(f'  {"peak":34}{footprint.total / _MIB:9.1f} MiB'
                 f'   speed-up {plan.speed_up:.2f} (predicted)')
    if measured:
        lines.append(
            f'  {"measured, in a process of its own":34}{measured["measured_peak_mib"]:9.1f} MiB'
            f'   predicted there {measured["predicted_peak_mib"]:.1f} '
            f'({measured["relative_error"]:+.1%})')
    lines.append('')
    if plan.budget:
        lines += _budget_lines(plan)
    lines.append('What memory buys (the cheapest K and gamma for each speed-up):')
    fastest = plan.steps[-1].speed_up
    for step in plan.steps:
        lost = 1 - step.speed_up / fastest
        mark = '  <- least that keeps 96 % of the speed' if step == plan.least else ''
        lines.append(f'  from {step.bytes / _MIB:8.0f} MiB: K = {step.capacity}, '
                     f'gamma = {step.gamma}, speed-up {step.speed_up:.2f}, '
                     f'{lost:.0%} lost{mark}')
    lines.append(f'Below {plan.least_that_works / _MIB:.0f} MiB the target does not run with this '
                 'context.')
    if plan.assumed_acceptance:
        lines.append('No acceptance is declared for: ' + ', '.join(plan.assumed_acceptance)
                     + '; speed-ups are guesses there.')
    return '\n'.join(lines)


def _budget_lines(plan: Plan) -> list[str]:
    """What fits."""
    budget = f'{plan.budget / _MIB:.0f} MiB'
    if plan.affordable is None:
        return [f'{budget} are too little: the least that works is '
                f'{plan.least_that_works / _MIB:.0f} MiB; lower --context or --sessions', '']
    if plan.fits:
        lines = [f'fits {budget}']
    else:
        step = plan.affordable
        lines = [f'does not fit {budget}; the fastest that does: K = {step.capacity}, '
                 f'gamma = {step.gamma}, speed-up {step.speed_up:.2f}']
    for label, value in (('K', plan.largest_capacity), ('gamma', plan.largest_gamma),
                         ('context', plan.largest_context)):
        lines.append(f'  largest {label} with the rest as asked for: '
                     f'{"none" if value is None else value}')
    return [*lines, '']
