# SPDX-License-Identifier: Apache-2.0
"""``memspec trace``: what every draft of a bundle would have had accepted, prompt by prompt."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..models.errors import InvalidRequestError
from .options import add_json_option, write_json


def register(commands) -> None:
    parser = commands.add_parser(
        'trace', help="hold every draft against the target's own outputs, and keep the traces")
    parser.add_argument('--bundle', default='', metavar='DIR',
                        help='model bundle (default: the installed one)')
    parser.add_argument('--prompts', action='append', required=True, metavar='FILE',
                        help='JSON lines with "prompt" and "domain" (may be given several times)')
    parser.add_argument('--out', required=True, metavar='DIR',
                        help='where traces and outputs are kept; run again to resume')
    parser.add_argument('--outputs', action='append', default=[], metavar='STORE',
                        help='target outputs made before (each is checked, and corrected in the '
                             'trace where it is not what the target says here)')
    parser.add_argument('--dtype', default='float32', choices=('float32', 'bfloat16'),
                        help='of target and drafts; only in float32 does the output not depend '
                             'on the drafts (default: %(default)s)')
    parser.add_argument('--prompts-per-domain', type=int, default=0, metavar='COUNT',
                        help='0: all')
    parser.add_argument('--prompt-tokens', type=int, default=256, metavar='TOKENS',
                        help='skip longer prompts (default: %(default)s)')
    parser.add_argument('--max-new-tokens', type=int, default=128, metavar='TOKENS',
                        help='length of outputs (default: %(default)s)')
    parser.add_argument('--gamma', type=int, default=8, metavar='TOKENS',
                        help='deepest draft position recorded (default: %(default)s)')
    parser.add_argument('--hidden-every', type=int, default=4, metavar='TOKENS',
                        help="keep the target's hidden state that often, 0: never "
                             '(default: %(default)s)')
    parser.add_argument('--threads', type=int, default=0, help='CPU threads (0: as PyTorch likes)')
    parser.add_argument('--device', default='auto', help='auto, cpu, cuda or cuda:N')
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..training.trace_figures import format_tables, measure
    from ..training.trace_store import TraceStore
    from ..training.traces import fill_traces, read_outputs
    _check(arguments)
    given = {}
    for path in map(Path, arguments.outputs):
        if not path.exists():
            raise InvalidRequestError(f'--outputs {path}: no such file')
        given.update(read_outputs(path))
    tracer, prompts = _open(arguments)
    store = TraceStore(Path(arguments.out))
    with _progress() as bar:
        task = bar.add_task('tracing', total=None)
        fill_traces(store, tracer, prompts, given,
                    report=lambda done, total: bar.update(task, completed=done, total=total))
    figures = measure(tracer.header, (store.read(prompt.key) for prompt in prompts))
    # The tables first: a file that cannot be written must not lose them.
    if arguments.json != '-':
        print(format_tables(figures))
    if arguments.json:
        write_json(arguments.json, figures)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    for name, low, high in (('threads', 0, 256), ('prompts_per_domain', 0, 1 << 30),
                            ('prompt_tokens', 1, 1 << 20), ('max_new_tokens', 1, 1 << 20),
                            ('gamma', 1, 64), ('hidden_every', 0, 1 << 20)):
        if not low <= getattr(arguments, name) <= high:
            raise InvalidRequestError(f'--{name.replace("_", "-")} is {getattr(arguments, name)}, '
                                      f'expected {low} to {high}')


def _open(arguments: argparse.Namespace):
    """The tracer of the bundle, and the prompts."""
    import torch

    from ..models.bundle import load_bundle
    from ..models.target import load_target
    from ..models.target_files import locate_target
    from ..models.tokenizer import Tokenizer
    from ..runtime.runtime import choose_device, DTYPES, stop_ids_of
    from ..training.traces import collect_prompts, Tracer
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    bundle = load_bundle(arguments.bundle or None)
    directory = locate_target(bundle)
    tokenizer = Tokenizer(bundle.tokenizer_path)

    def encode(prompt: str) -> list[int]:
        return tokenizer.encode_chat([{'role': 'user', 'content': prompt}])

    prompts = collect_prompts(map(Path, arguments.prompts), encode, arguments.prompt_tokens,
                              arguments.prompts_per_domain)
    if not prompts:
        raise InvalidRequestError(
            f'--prompts: no prompt of at most {arguments.prompt_tokens} tokens')
    capacity = max(len(prompt.ids) for prompt in prompts) + arguments.max_new_tokens
    target = load_target(directory, DTYPES[arguments.dtype], choose_device(arguments.device),
                         capacity + arguments.gamma + 1)
    if capacity > target.max_positions:
        raise InvalidRequestError(
            f'prompt and output have {capacity} tokens, the target was made for '
            f'{target.max_positions}; lower --prompt-tokens or --max-new-tokens')
    tracer = Tracer(bundle, target, stop_ids_of(directory, tokenizer), arguments.dtype, capacity,
                    arguments.max_new_tokens, arguments.gamma, arguments.hidden_every)
    return tracer, prompts


def _progress():
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )
    # On standard error: the JSON may go to standard output.
    return Progress(TextColumn('{task.description}'), BarColumn(), MofNCompleteColumn(),
                    TimeRemainingColumn(), console=Console(stderr=True), transient=True)
