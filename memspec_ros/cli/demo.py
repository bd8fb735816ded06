# SPDX-License-Identifier: Apache-2.0
"""``memspec demo``: a node from start to end around one prompt, seen from outside."""

from __future__ import annotations

import argparse
import os
import sys

from .node_process import NodeProcess, NodeProcessError
from .ros_options import require_ros

DEFAULT_PROMPT = ('Write a Python function that computes the area of a triangle. Then solve step '
                  'by step: what is the area for a base of 6 cm and a height of 4 cm?')


def register(commands) -> None:
    parser = commands.add_parser(
        'demo', help='start a node, send one prompt, watch the answer, shut down')
    parser.add_argument('--prompt', default=os.environ.get('PROMPT') or DEFAULT_PROMPT)
    parser.add_argument('--bundle', default='', metavar='DIR')
    parser.add_argument('--max-new-tokens', type=int, default=200, metavar='TOKENS')
    parser.add_argument('--cache-capacity', type=int, default=2, metavar='K')
    parser.add_argument('--scheduling-interval', type=int, default=4, metavar='N')
    parser.add_argument('--svg', metavar='FILE', help='save a picture of the final view')
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    require_ros()
    from rich.console import Console

    from ..client import MemSpecClient, RequestRefusedError
    from .view import AnswerView, summary
    console = Console()
    parameters = {'bundle': arguments.bundle, 'cache_capacity': arguments.cache_capacity,
                  'scheduling_interval': arguments.scheduling_interval}
    with NodeProcess(parameters, name=f'memspec_demo_{os.getpid()}') as node:
        with MemSpecClient(f'/memspec_demo_{os.getpid()}', timeout=60.0) as client:
            with console.status('starting the node'):
                state = client.state()
            console.print(f'node /memspec_demo_{os.getpid()} is [bold]{state}[/]')
            with console.status('configure: loading the target'):
                configured = client.configure()
            if not configured or not client.activate():
                raise NodeProcessError(f'the node could not be brought up:\n{node.log()}')
            console.print(f'node is [bold]{client.state()}[/]')
            client.spin(0.5)
            drafts = [draft.id for draft in client.model_info.drafts] if client.model_info else []
            try:
                with AnswerView(arguments.prompt, drafts, console) as view:
                    for chunk in client.stream(arguments.prompt,
                                               max_new_tokens=arguments.max_new_tokens):
                        view.update(chunk, client.residency)
            except RequestRefusedError as error:
                raise NodeProcessError(f'the request was refused: {error}') from error
            console.print(summary(view.stats))
            if arguments.svg:
                save_picture(arguments.svg, view, summary(view.stats))
            client.shut_down()
    status = node.process.returncode
    if status:
        raise NodeProcessError(f'the node ended with status {status}:\n{node.log()}')
    console.print('node shut down cleanly')
    return 0


def save_picture(path: str, view, text: str) -> None:
    """Draw the final view once more, into an SVG file."""
    from rich.console import Console
    console = Console(record=True, width=100, height=40, file=open(os.devnull, 'w'),
                      force_terminal=True)
    view.console = console
    console.print(view.render())
    console.print(text)
    console.save_svg(path, title='memspec demo')
    print(f'picture saved in {path}', file=sys.stderr)
