# SPDX-License-Identifier: Apache-2.0
"""``memspec trace``: what every draft of a bundle would have had accepted, prompt by prompt."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..models.errors import InvalidRequestError
from .options import add_json_option, check_between, present


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
    check_between(arguments, threads=(0, 256), prompts_per_domain=(0, 1 << 30),
                  prompt_tokens=(1, 1 << 20), max_new_tokens=(1, 1 << 20), gamma=(1, 64),
                  hidden_every=(0, 1 << 20))
    given = {}
    for path in map(Path, arguments.outputs):
        if not path.exists():
            raise InvalidRequestError(f'--outputs {path}: no such file')
        given.update(read_outputs(path))
    tracer, prompts = _open(arguments)
    store = TraceStore(Path(arguments.out))
    with progress() as bar:
        task = bar.add_task('tracing', total=None)
        fill_traces(store, tracer, prompts, given,
                    report=lambda done, total: bar.update(task, completed=done, total=total))
    present(arguments, format_tables, lambda report: measure(
        tracer.header, (store.read(prompt.key) for prompt in prompts), tracer.copiers))
    return 0


def _open(arguments: argparse.Namespace):
    """The tracer of the bundle, and the prompts."""
    from ..models.bundle import load_bundle
    from ..training.traces import collect_prompts
    bundle = load_bundle(arguments.bundle or None)
    tokenizer = open_tokenizer(bundle)

    def encode(prompt: str) -> list[int]:
        return tokenizer.encode_chat([{'role': 'user', 'content': prompt}])

    prompts = collect_prompts(map(Path, arguments.prompts), encode, arguments.prompt_tokens,
                              arguments.prompts_per_domain)
    if not prompts:
        raise InvalidRequestError(
            f'--prompts: no prompt of at most {arguments.prompt_tokens} tokens')
    return open_tracer(arguments, bundle, max(len(prompt.ids) for prompt in prompts)), prompts


def open_tokenizer(bundle):
    """The tokenizer of a bundle's target."""
    from ..models.target_files import locate_target
    from ..models.tokenizer import Tokenizer
    locate_target(bundle)
    return Tokenizer(bundle.tokenizer_path)


def open_tracer(arguments: argparse.Namespace, bundle, prompt_tokens: int):
    """
    A tracer for prompts of at most ``prompt_tokens`` tokens.

    ``arguments``: threads, device, dtype, max_new_tokens, gamma, hidden_every.
    """
    import torch

    from ..models.target import load_target
    from ..models.target_files import locate_target
    from ..runtime.runtime import choose_device, DTYPES, stop_ids_of
    from ..training.traces import Tracer
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    directory = locate_target(bundle)
    capacity = prompt_tokens + arguments.max_new_tokens
    target = load_target(directory, DTYPES[arguments.dtype], choose_device(arguments.device),
                         capacity + arguments.gamma + 1)
    if capacity > target.max_positions:
        raise too_long(capacity, target)
    return Tracer(bundle, target, stop_ids_of(directory, open_tokenizer(bundle)), arguments.dtype,
                  capacity, arguments.max_new_tokens, arguments.gamma, arguments.hidden_every)


def too_long(capacity: int, target) -> InvalidRequestError:
    """What to raise where the target has no ``capacity`` positions."""
    return InvalidRequestError(
        f'prompt and output have {capacity} tokens, the target was made for '
        f'{target.max_positions}; lower --prompt-tokens or --max-new-tokens')


def progress():
    """A bar on standard error, gone when it is full: the JSON may go to standard output."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )
    return Progress(TextColumn('{task.description}'), BarColumn(), MofNCompleteColumn(),
                    TimeRemainingColumn(), console=Console(stderr=True), transient=True)
