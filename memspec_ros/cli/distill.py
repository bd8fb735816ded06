# SPDX-License-Identifier: Apache-2.0
"""``memspec distill``: make drafts from prompts, as those in models/ were made."""

from __future__ import annotations

import argparse
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
import json
from pathlib import Path

from ..models.errors import InvalidRequestError

# Shares of a domain's data that a curve shows.
_CURVE_SHARES = (0.125, 0.25, 0.5, 1.0)


def register(commands) -> None:
    parser = commands.add_parser(
        'distill', help="train drafts on the target's own outputs",
        description='Generates outputs of the target for the prompts, has the target say what '
                    'it expects at each of their positions, trains a base draft on the general '
                    'domain and continues it into every domain. All of it is kept in --work: '
                    'what an interrupted run has made is not made again.')
    parser.add_argument('--bundle', default='', metavar='DIR',
                        help='whose target to distil (default: the installed bundle)')
    parser.add_argument('--prompts', action='append', default=[], metavar='FILE',
                        help='JSON lines with "prompt" and "domain" (may be given several times)')
    parser.add_argument('--eval-prompts', action='append', default=[], metavar='FILE',
                        help='held-out prompts for the acceptance figures')
    parser.add_argument('--eval-per-domain', type=int, default=24, metavar='COUNT')
    parser.add_argument('--outputs', action='append', default=[], metavar='FILE',
                        help='stores of target outputs made before')
    parser.add_argument('--work', required=True, metavar='DIR',
                        help='where outputs, lessons and drafts are kept')
    parser.add_argument('--resume', action='store_true',
                        help='go on with a training that was interrupted; without it, such a '
                             'training begins anew (outputs and lessons are always kept)')
    parser.add_argument('--continue', action='store_true', dest='further',
                        help="go on from the bundle's own drafts, with their shape and "
                             'vocabulary (a new domain from the general one): weights are '
                             'averaged with what they were, drafts of other domains stay')
    parser.add_argument('--domain', action='append', default=[], metavar='NAME',
                        help='drafts to make (default: every domain there are outputs of)')
    parser.add_argument('--curve', action='append', default=[], metavar='DOMAIN',
                        help='also train that draft on an eighth, a quarter and a half of its '
                             'data, and show what more of it brings (needs --eval-prompts)')
    data = parser.add_argument_group('data')
    data.add_argument('--prompts-per-domain', type=int, default=0, metavar='COUNT', help='0: all')
    data.add_argument('--tokens-per-domain', type=int, default=0, metavar='TOKENS',
                      help='output tokens each draft learns from, beside those of the base '
                           '(default: 0, all)')
    data.add_argument('--own-prompts', type=int, default=0, metavar='COUNT',
                      help='have the target write so many prompts itself, as users of its chat '
                           'template, for the general domain')
    data.add_argument('--samples', type=int, default=1, metavar='COUNT',
                      help='outputs a prompt: the first is greedy, further ones are sampled '
                           '(default: %(default)s)')
    data.add_argument('--temperature', type=float, default=0.7,
                      help='of sampled outputs (default: %(default)s)')
    data.add_argument('--reuse-only', action='store_true',
                      help='train on the outputs there are, generate none for --prompts')
    data.add_argument('--prompt-tokens', type=int, default=256, metavar='TOKENS',
                      help='skip longer prompts (default: %(default)s)')
    data.add_argument('--output-tokens', type=int, default=160, metavar='TOKENS')
    shape = parser.add_argument_group('draft')
    shape.add_argument('--kind', default='feature',
                       choices=['feature', 'shared_layers', 'causal_lm', 'self_speculation'])
    shape.add_argument('--vocabulary', type=int, default=4096, metavar='SIZE',
                       help='tokens of the head all drafts share (default: %(default)s)')
    shape.add_argument('--depth', type=int, metavar='LAYERS',
                       help='target layers reused (default: 2)')
    shape.add_argument('--layers', type=int, default=1, help='own layers')
    shape.add_argument('--features', default='', metavar='L,L,…',
                       help='after which target layers a feature draft reads hidden states '
                            '(default: a third, two thirds, all)')
    shape.add_argument('--check', type=int, default=0, metavar='DEPTH',
                       help='self_speculation: after how many layers the exit is that checks '
                            'what the one after --depth has drafted (default: two thirds of the '
                            'layers; --depth: a third)')
    shape.add_argument('--rank', type=int, default=256, help='self_speculation: of each exit')
    shape.add_argument('--width', type=int, default=192, help='of a causal_lm draft')
    training = parser.add_argument_group('training')
    training.add_argument('--epochs', type=float, default=4.0, help='of the base draft')
    training.add_argument('--domain-epochs', type=float, default=4.0,
                          help='of each draft, continued from the base')
    training.add_argument('--learning-rate', type=float, default=2e-3)
    training.add_argument('--ahead', type=int, default=2,
                          help='steps a feature draft drafts in training')
    training.add_argument('--batch', type=int, default=16, metavar='SEQUENCES')
    training.add_argument('--checkpoint-steps', type=int, default=50, metavar='STEPS')
    training.add_argument('--seed', type=int, default=0)
    training.add_argument('--threads', type=int, default=0)
    training.add_argument('--device', default='auto')
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import torch

    from ..training.distill_job import BASE, DistillJob, JobOptions
    from .progress import ProgressBar
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    _check(arguments)
    options = JobOptions(**{field.name: getattr(arguments, field.name)
                            for field in fields(JobOptions)})
    job = DistillJob(options, partial(_shape, arguments), ProgressBar, _say)
    records = job.training_outputs(arguments.prompts, arguments.prompts_per_domain)
    held_out = job.held_out_outputs(arguments.eval_prompts, arguments.eval_per_domain)
    vocabulary = job.vocabulary(records, held_out)
    if arguments.kind == 'self_speculation':
        return _train_exits(job, records, held_out, vocabulary)
    # The general draft first: it is what a request without a telling word begins with.
    domains = arguments.domain or sorted({record.domain for record in records},
                                         key=lambda domain: (domain != 'general', domain))
    for domain in arguments.curve:
        if domain not in domains:
            raise InvalidRequestError(f'--curve {domain}: no such draft is made; there are: '
                                      f'{", ".join(domains)}')
    plan = job.plan(records, domains)
    used = {record.key: record for part in plan.values() for record in part}
    job.announce(used.values(), held_out, plan)
    job.think([*used.values(), *held_out])
    if BASE in plan:
        job.draft(BASE, plan.pop(BASE), held_out, vocabulary, None)
    figures = {domain: job.draft(domain, part, held_out, vocabulary, job.start_of(domain))
               for domain, part in plan.items()}
    _print_agreement(figures)
    manifest = job.write_bundle(figures, held_out)
    _say(f'\n{job.work} is a bundle now ({manifest.name} written)')
    for domain in arguments.curve:
        points = job.curve(domain, _CURVE_SHARES, plan[domain], held_out, vocabulary)
        _write_curve(domain, points, job.work)
    return 0


def _train_exits(job, records, held_out, vocabulary) -> int:
    """The target has one set of exits, for all domains."""
    from ..models.bundle import SELF_ID
    job.announce(records, held_out, {SELF_ID: records})
    job.think([*records, *held_out])
    scores = job.draft(SELF_ID, records, held_out, vocabulary, None)
    for depth, row in zip(job.shape.features, scores):
        _say(f'\nagreement with the target on held-out outputs, after {depth} layers: '
             + '  '.join(f'{name} {value:.3f}' for name, value in row.items()))
    manifest = job.write_exits(held_out)
    _say(f'\n{job.work} is a bundle that self-speculates now ({manifest.name} written)')
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


def _check(arguments: argparse.Namespace) -> None:
    least = {'vocabulary': 2, 'output_tokens': 1, 'prompt_tokens': 2, 'batch': 1, 'samples': 1,
             'own_prompts': 0, 'checkpoint_steps': 1, 'ahead': 1, 'prompts_per_domain': 0,
             'tokens_per_domain': 0, 'eval_per_domain': 1, 'layers': 1, 'width': 8,
             'check': 0, 'rank': 1}
    for name, value in least.items():
        if getattr(arguments, name) < value:
            raise InvalidRequestError(
                f'--{name.replace("_", "-")} is {getattr(arguments, name)}, expected {value} '
                'or more')
    if not (arguments.prompts or arguments.own_prompts or arguments.outputs):
        raise InvalidRequestError('nothing to learn from: give --prompts FILE, '
                                  '--own-prompts COUNT or --outputs FILE')
    if arguments.further and arguments.kind == 'self_speculation':
        raise InvalidRequestError('--continue goes on from drafts; --kind self_speculation trains '
                                  'exits anew: leave it out')
    if arguments.curve and not arguments.eval_prompts:
        raise InvalidRequestError('--curve needs --eval-prompts: it shows figures on held-out '
                                  'outputs')
    for name in ('epochs', 'domain_epochs', 'learning_rate', 'temperature'):
        if not 0 < getattr(arguments, name) < 1e6:
            raise InvalidRequestError(
                f'--{name.replace("_", "-")} is {getattr(arguments, name)}, expected more than 0')


def _shape(arguments: argparse.Namespace, config):
    """The shape of the drafts for a target of ``config``."""
    from ..training.tops import draft_shape
    features = ()
    if arguments.features:
        try:
            features = tuple(sorted({int(part) for part in arguments.features.split(',')}))
        except ValueError as error:
            raise InvalidRequestError(f'--features is {arguments.features!r}, expected '
                                      'numbers of layers, as 10,20,30') from error
    elif arguments.kind == 'feature':
        third = max(1, config.layers // 3)
        features = tuple(sorted({third, min(2 * third, config.layers), config.layers}))
    depth, check = arguments.depth, arguments.check
    if depth is None:
        exits = arguments.kind == 'self_speculation'
        depth = max(1, config.layers // 3) if exits else 2
        check = check or (2 * config.layers // 3 if exits else 0)
    if arguments.kind == 'self_speculation' and check and check <= depth:
        raise InvalidRequestError(f'--check is {check}, expected more than --depth, {depth}')
    shape = draft_shape(arguments.kind, depth=depth, layers=arguments.layers, features=features,
                        width=arguments.width, check=check, rank=arguments.rank)
    if problem := shape.problem(config.layers):
        raise InvalidRequestError(f'--kind {arguments.kind}: {problem}')
    return shape


def _print_agreement(figures) -> None:
    for step in range(max((len(scores) for scores in figures.values()), default=0)):
        where = 'the next token' if step == 0 else f'{step + 1} tokens ahead'
        print(f'\nagreement with the target on held-out outputs, {where} '
              '(rows: draft, columns: domain)')
        for domain, scores in figures.items():
            print(f'{domain:10} ' + '  '.join(
                f'{name} {value:.3f}' for name, value in scores[step].items()))


def _write_curve(domain: str, points, work: Path) -> None:
    from ..training.curve_figure import draw_curve
    path = work / f'curve-{domain}.json'
    path.write_text(json.dumps({'domain': domain, 'points': [
        {'training_tokens': tokens, 'agreement': scores[0]} for tokens, scores in points]},
        indent=1))
    _say(f'\nagreement of the {domain} draft on held-out {domain} outputs, by training tokens')
    for tokens, scores in points:
        _say(f'{tokens:9}  {scores[0][domain]:.3f}')
    if find_spec('matplotlib'):
        draw_curve(domain, points, path.with_suffix('.png'))
    else:
        _say("no picture: matplotlib is not installed (the package's extra 'plots')")
