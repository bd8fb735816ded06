# SPDX-License-Identifier: Apache-2.0
"""``memspec chat``: talk to a running node, or to one of its own."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import uuid

from .node_process import NodeProcess, NodeProcessError
from .options import add_sampling_options, sampling_fields
from .ros_options import require_ros


def register(commands) -> None:
    parser = commands.add_parser('chat', help='talk to a node in the terminal')
    parser.add_argument('--node', metavar='NAME',
                        help='a running node, such as /memspec (default: start one)')
    parser.add_argument('--bundle', default='', metavar='DIR', help='bundle of the node started')
    parser.add_argument('--system-prompt', default='')
    parser.add_argument('--max-new-tokens', type=int, default=0, metavar='TOKENS',
                        help="per answer (default: the node's parameter)")
    parser.add_argument('--timeout', type=float, default=20.0, metavar='SEC',
                        help='how long to wait for the node (default: %(default)g)')
    add_sampling_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    require_ros()
    with contextlib.ExitStack() as stack:
        name = arguments.node
        if name is None:
            name = f'memspec_chat_{os.getpid()}'
            node = stack.enter_context(NodeProcess({'bundle': arguments.bundle}, name=name))
        from ..client import MemSpecClient
        client = stack.enter_context(MemSpecClient(name, timeout=arguments.timeout))
        if arguments.node is None and not (client.configure() and client.activate()):
            raise NodeProcessError(f'the node could not be brought up:\n{node.log()}')
        if client.state() != 'active':
            raise NodeProcessError(f'{name} is {client.state()}; activate it first')
        client.spin(0.5)
        return _talk(client, arguments)


def _talk(client, arguments: argparse.Namespace) -> int:
    """Answer line by line; 1 if a request of a script was refused."""
    from ..client import RequestRefusedError
    from ..models.errors import InvalidRequestError
    from .view import AnswerView, summary
    session = uuid.uuid4().hex
    fields = _request_fields(arguments)
    drafts = [draft.id for draft in client.model_info.drafts] if client.model_info else []
    status = 0
    if sys.stdin.isatty():
        print('Ctrl-D ends the conversation, Ctrl-C an answer.')
    while True:
        try:
            prompt = input('> ' if sys.stdin.isatty() else '').strip()
        except EOFError:
            return 0 if sys.stdin.isatty() else status
        if not prompt:
            continue
        try:
            with AnswerView(prompt, drafts) as view:
                for chunk in client.stream(prompt, session_id=session, **fields):
                    view.update(chunk, client.residency)
            print(summary(view.stats))
        except (RequestRefusedError, InvalidRequestError) as error:
            print(f'refused: {error}', file=sys.stderr)
            status = 1
        except KeyboardInterrupt:
            print('\ncancelled', file=sys.stderr)


def _request_fields(arguments: argparse.Namespace) -> dict:
    """Fields of every request; without sampling options the node's parameters apply."""
    from ..client import make_request
    from ..models.errors import InvalidRequestError
    fields = {'system_prompt': arguments.system_prompt, 'max_new_tokens': arguments.max_new_tokens}
    sampling = sampling_fields(arguments)
    if 'logit_bias' in sampling:
        bias = sampling.pop('logit_bias')
        sampling['logit_bias_ids'], sampling['logit_bias_values'] = zip(*bias)
    if sampling:
        fields['sampling'] = sampling
    try:
        make_request(**fields)
    except TypeError as error:  # a number that the message cannot hold
        raise InvalidRequestError(str(error)) from error
    return fields
