# SPDX-License-Identifier: Apache-2.0
"""Options that several subcommands share, and output as JSON."""

from __future__ import annotations

import argparse
from collections.abc import Callable
import json
from pathlib import Path
import sys
from typing import Any, TYPE_CHECKING

from ..models.errors import InvalidRequestError

if TYPE_CHECKING:
    from ..models.kv_options import KVOptions
    from ..runtime.runtime import RuntimeOptions

# Fields of decoding.sampling.Sampling, which are not looked up there: a help text needs no torch.
_SAMPLING: dict[str, tuple[type, str]] = {
    'temperature': (float, 'softmax temperature; 0, the default: greedy'),
    'top_k': (int, 'keep the k most probable tokens'),
    'top_p': (float, 'keep the fewest tokens whose probabilities add up to this'),
    'min_p': (float, 'keep tokens of this share of the largest probability at least'),
    'repetition_penalty': (float, 'on tokens in prompt or output; 1: off'),
    'presence_penalty': (float, 'on tokens in the output'),
    'frequency_penalty': (float, 'on tokens in the output, once per time'),
    'min_tokens': (int, 'no end-of-sequence before so many'),
    'seed': (int, 'the same seed gives the same answer; 0, the default: another one each time')}


def add_runtime_options(parser: argparse.ArgumentParser) -> None:
    """What decides how a bundle is run; the names are those of the node's parameters."""
    add_engine_options(parser)
    # The defaults are those that it sets.
    parser.add_argument('--cache-capacity', type=int, metavar='K',
                        help='most drafts in memory (default: %(default)s)')
    parser.add_argument('--scheduling-interval', type=int, metavar='N',
                        help='iterations between rankings (default: %(default)s)')
    parser.add_argument('--policy', help='how drafts are scheduled')
    parser.add_argument('--merge', action=argparse.BooleanOptionalAction,
                        help='verify what two drafts propose in one pass where that pays '
                             '(default: %(default)s)')


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Those of them that say nothing of how drafts are scheduled."""
    # Those that do, which ``runtime_options`` wants too where a command does not offer them.
    parser.set_defaults(cache_capacity=2, scheduling_interval=4, policy='memspec', merge=False,
                        storage_mb_per_sec=0.0, storage_latency_ms=0.0, cold_storage=False,
                        kv_int8_after=0, kv_window=0, kv_sinks=4)
    parser.add_argument('--bundle', default='', metavar='DIR',
                        help='model bundle (default: the installed one)')
    parser.add_argument('--device', default='auto', help='auto, cpu, cuda or cuda:N')
    parser.add_argument('--dtype', default='auto',
                        help='auto, bfloat16, float16 or float32 (default: auto)')
    parser.add_argument('--weights', default='auto',
                        help="what the target's layers are held as: auto (as the checkpoint has "
                             'them), dense, int8, int4 or library (default: auto)')
    parser.add_argument('--layers-mib', type=float, default=0.0, metavar='MIB',
                        help="most memory for the target's layers; the others are read from "
                             'storage for every pass (default: all in memory)')
    parser.add_argument('--threads', type=int, default=0,
                        help='CPU threads (0: as many as are fastest, measured)')
    parser.add_argument('--context', type=int, default=2048, metavar='TOKENS',
                        help='most tokens of prompt and output together (default: %(default)s)')
    parser.add_argument('--draft-tokens', type=int, default=4, metavar='GAMMA',
                        help='most tokens drafted per iteration, 0: no speculation '
                             '(default: %(default)s)')
    parser.add_argument('--branches', type=int, default=4, metavar='TOKENS',
                        help='most second choices of a draft that are verified beside its '
                             'tokens, where they pay (default: %(default)s)')
    parser.add_argument('--fixed-draft-length', action='store_true',
                        help='always draft that many, whether it pays or not')
    parser.add_argument('--min-confidence', type=float, default=0.0, metavar='PROBABILITY',
                        help='a draft proposes no more once its next token has less than this '
                             '(0, the default: off)')


def add_kv_options(parser: argparse.ArgumentParser) -> None:
    """How keys and values of old positions are kept."""
    parser.add_argument('--kv-int8-after', type=int, default=0, metavar='TOKENS',
                        help='keep keys and values in INT8 but for the last TOKENS, or more; 0: '
                             'all as they are (default: %(default)s)')
    parser.add_argument('--kv-window', type=int, default=0, metavar='TOKENS',
                        help='drop old positions but for the last TOKENS, or more, and go on '
                             'beyond the context; -1: when it is full, 0: never '
                             '(default: %(default)s)')
    parser.add_argument('--kv-sinks', type=int, default=4, metavar='TOKENS',
                        help='first positions, which are neither (default: %(default)s)')


def kv_options(arguments: argparse.Namespace) -> KVOptions:
    """Check and collect what ``add_kv_options`` parsed; raises InvalidRequestError."""
    from ..models.kv_options import KVOptions
    check_between(arguments, kv_int8_after=(0, 1 << 20), kv_window=(-1, 1 << 20),
                  kv_sinks=(0, 1 << 10))
    return KVOptions(arguments.kv_int8_after, arguments.kv_sinks, arguments.kv_window)


def add_storage_options(parser: argparse.ArgumentParser) -> None:
    """At what pace drafts, and layers in storage, are read: a board's storage elsewhere."""
    parser.add_argument('--storage-mb-per-sec', type=float, metavar='RATE',
                        help='read drafts no faster than that (0: as fast as the storage goes)')
    parser.add_argument('--storage-latency-ms', type=float, metavar='MS',
                        help='wait that long before the first byte of every load')
    parser.add_argument('--cold-storage', action='store_true',
                        help='have the page cache let go of a draft before it is read')


def runtime_options(arguments: argparse.Namespace) -> RuntimeOptions:
    """Check and collect what ``add_runtime_options`` parsed; raises InvalidRequestError."""
    from ..models.packing import WEIGHT_KINDS
    from ..runtime.policies import POLICY_NAMES
    from ..runtime.runtime import RuntimeOptions
    from ..runtime.settings import Settings
    from ..runtime.storage import StorageLimits
    check_between(arguments, threads=(0, 256), context=(16, 1 << 20), cache_capacity=(0, 64),
                  scheduling_interval=(1, 1024), draft_tokens=(0, 16), branches=(0, 16),
                  layers_mib=(0, 1 << 24), min_confidence=(0, 1))
    if arguments.policy not in POLICY_NAMES:
        raise InvalidRequestError(
            f'--policy is {arguments.policy!r}, expected one of {", ".join(POLICY_NAMES)}')
    if arguments.weights not in WEIGHT_KINDS:
        raise InvalidRequestError(
            f'--weights is {arguments.weights!r}, expected one of {", ".join(WEIGHT_KINDS)}')
    return RuntimeOptions(
        device=arguments.device, dtype=arguments.dtype, weights=arguments.weights,
        context=arguments.context, max_gamma=arguments.draft_tokens,
        max_branches=arguments.branches, adaptive=not arguments.fixed_draft_length,
        policy=arguments.policy, threads=arguments.threads, layers_mib=arguments.layers_mib,
        kv=kv_options(arguments),
        settings=Settings(arguments.cache_capacity, arguments.scheduling_interval,
                          self_speculation=True, merge=arguments.merge,
                          min_confidence=arguments.min_confidence),
        storage=StorageLimits(arguments.storage_mb_per_sec, arguments.storage_latency_ms,
                              arguments.cold_storage))


def check_at_least(arguments: argparse.Namespace, **least: int) -> None:
    """Refuse options (by their attribute) below what they may be; InvalidRequestError."""
    for name, value in least.items():
        if getattr(arguments, name) < value:
            raise InvalidRequestError(f'--{name.replace("_", "-")} is {getattr(arguments, name)}, '
                                      f'expected at least {value}')


def check_between(arguments: argparse.Namespace, **bounds: tuple[float, float]) -> None:
    """Refuse options (by their attribute) outside of (least, most); InvalidRequestError."""
    for name, (low, high) in bounds.items():
        value = getattr(arguments, name)
        if not low <= value <= high:
            raise InvalidRequestError(
                f'--{name.replace("_", "-")} is {value}, expected {low} to {high}')


def add_prompt_options(parser: argparse.ArgumentParser, per_domain: int, tokens: int) -> None:
    """Prompts to answer, how many of each domain and how far, with these defaults."""
    parser.add_argument('--prompts', required=True, metavar='FILE',
                        help='JSON lines with "prompt" and "domain"')
    parser.add_argument('--prompts-per-domain', type=int, default=per_domain, metavar='COUNT',
                        help='0: all (default: %(default)s)')
    parser.add_argument('--max-new-tokens', type=int, default=tokens, metavar='TOKENS',
                        help='length of answers (default: %(default)s)')


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen; see msg/SamplingParams.msg."""
    group = parser.add_argument_group('sampling')
    for name, (kind, text) in _SAMPLING.items():
        group.add_argument(f'--{name.replace("_", "-")}', type=kind, help=text,
                           metavar='VALUE' if kind is float else 'N')
    group.add_argument('--logit-bias', type=_bias, action='append', metavar='ID=BIAS',
                       help='added to the logit of that token (may be given several times)')


def sampling_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of a Sampling that were given."""
    names = [*_SAMPLING, 'logit_bias']
    given = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition('=')
    return int(token), float(value)


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """``--json FILE``, '-' for standard output."""
    parser.add_argument('--json', metavar='FILE', help='write the result as JSON (-: to stdout)')


def write_json(destination: str, data: Any) -> None:
    """Write ``data``; raises InvalidRequestError where the file cannot be written."""
    text = json.dumps(data, indent=2, ensure_ascii=False) + '\n'
    if destination == '-':
        sys.stdout.write(text)
        return
    try:
        Path(destination).write_text(text, encoding='utf-8')
    except OSError as error:
        raise InvalidRequestError(f'--json {destination}: {error.strerror or error}') from error


def present(arguments: argparse.Namespace, format_result: Callable[[Any], str],
            measure: Callable[[Callable[[str], None]], Any],
            as_data: Callable[[Any], Any] = lambda result: result) -> Any:
    """
    Measure, print the result as text and write it as ``--json`` says; returns the result.

    measure: gets a function that shows a line of progress.
    """
    quiet = arguments.json == '-'
    result = measure((lambda line: None) if quiet else print)
    # The text first: a file that cannot be written must not lose minutes of measuring.
    if not quiet:
        print(format_result(result))
    if arguments.json:
        write_json(arguments.json, as_data(result))
    return result


def make_directory(out: str) -> Path:
    """The directory of ``--out``, made where it is not there; raises InvalidRequestError."""
    path = Path(out)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequestError(f'--out {path}: {error.strerror or error}') from error
    return path
