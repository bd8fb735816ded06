# SPDX-License-Identifier: Apache-2.0
"""
The ``memspec`` command.

Subcommands that talk to a node need ROS; ``generate``, ``info``, ``plan``,
``fetch``, ``verify`` and ``bench`` do not. Errors go to standard error with a
non-zero exit status.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import os
import sys

from ..models.errors import MemSpecError


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    from . import (
        bench,
        chat,
        demo,
        distill,
        fetch,
        generate,
        info,
        plan,
        quantize,
        rank,
        trace,
        verify,
    )
    parser = argparse.ArgumentParser(
        prog='memspec', description='Memory-aware speculative decoding on a robot.')
    commands = parser.add_subparsers(dest='command', required=True, metavar='COMMAND')
    for module in (demo, chat, generate, info, plan, fetch, bench, distill, trace, rank,
                   verify, quantize):
        module.register(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    try:
        status = arguments.run(arguments) or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader has gone; Python would complain once more while flushing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    # OSError: a full disk, say, under whatever was being written.
    except (MemSpecError, OSError) as error:
        print(f'memspec {arguments.command}: {error}', file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print('interrupted', file=sys.stderr)
        return 130
