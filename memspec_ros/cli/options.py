# SPDX-License-Identifier: Apache-2.0
"""Options that several subcommands share, and output as JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
import sys
from typing import Any, TYPE_CHECKING

from ..models.errors import InvalidRequestError

if TYPE_CHECKING:
    from ..runtime.runtime import RuntimeOptions


def add_runtime_options(parser: argparse.ArgumentParser) -> None:
    """What decides how a bundle is run; the names are those of the node's parameters."""
    add_engine_options(parser)
    # The defaults are those that it sets.
    parser.add_argument('--cache-capacity', type=int, metavar='K',
                        help='most drafts in memory (default: %(default)s)')
    parser.add_argument('--scheduling-interval', type=int, metavar='N',
                        help='iterations between rankings (default: %(default)s)')
    parser.add_argument('--policy', help='how drafts are scheduled')


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Those of them that say nothing of how drafts are scheduled."""
    # Those that do, which ``runtime_options`` wants too where a command does not offer them.
    parser.set_defaults(cache_capacity=2, scheduling_interval=4, policy='memspec')
    parser.add_argument('--bundle', default='', metavar='DIR',
                        help='model bundle (default: the installed one)')
    parser.add_argument('--device', default='auto', help='auto, cpu, cuda or cuda:N')
    parser.add_argument('--dtype', default='auto',
                        help='auto, bfloat16, float16 or float32 (default: auto)')
    parser.add_argument('--threads', type=int, default=0, help='CPU threads (0: as PyTorch likes)')
    parser.add_argument('--context', type=int, default=2048, metavar='TOKENS',
                        help='most tokens of prompt and output together (default: %(default)s)')
    parser.add_argument('--draft-tokens', type=int, default=4, metavar='GAMMA',
                        help='most tokens drafted per iteration, 0: no speculation '
                             '(default: %(default)s)')
    parser.add_argument('--fixed-draft-length', action='store_true',
                        help='always draft that many, whether it pays or not')


def runtime_options(arguments: argparse.Namespace) -> RuntimeOptions:
    """Check and collect what ``add_runtime_options`` parsed; raises InvalidRequestError."""
    from ..runtime.controller import Settings
    from ..runtime.policies import POLICY_NAMES
    from ..runtime.runtime import RuntimeOptions
    for name, low, high in (('threads', 0, 256), ('context', 16, 1 << 20),
                            ('cache_capacity', 0, 64), ('scheduling_interval', 1, 1024),
                            ('draft_tokens', 0, 16)):
        value = getattr(arguments, name)
        if not low <= value <= high:
            raise InvalidRequestError(
                f'--{name.replace("_", "-")} is {value}, expected {low} to {high}')
    if arguments.policy not in POLICY_NAMES:
        raise InvalidRequestError(
            f'--policy is {arguments.policy!r}, expected one of {", ".join(POLICY_NAMES)}')
    return RuntimeOptions(
        device=arguments.device, dtype=arguments.dtype, context=arguments.context,
        max_gamma=arguments.draft_tokens, adaptive=not arguments.fixed_draft_length,
        policy=arguments.policy, threads=arguments.threads,
        settings=Settings(arguments.cache_capacity, arguments.scheduling_interval))


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
