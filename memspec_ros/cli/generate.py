# SPDX-License-Identifier: Apache-2.0
"""``memspec generate``: one answer without ROS, by the node's own runtime."""

from __future__ import annotations

import argparse
import sys

from .options import (
    add_json_option,
    add_kv_options,
    add_runtime_options,
    add_sampling_options,
    add_storage_options,
    runtime_options,
    sampling_fields,
    write_json,
)


def register(commands) -> None:
    parser = commands.add_parser('generate', help='answer one prompt without ROS')
    parser.add_argument('--prompt', required=True, help='the prompt (-: from standard input)')
    parser.add_argument('--system-prompt', default='')
    parser.add_argument('--max-new-tokens', type=int, default=128, metavar='TOKENS')
    parser.add_argument('--stop', action='append', default=[], metavar='TEXT',
                        help='end before this text (may be given several times)')
    parser.add_argument('--ignore-eos', action='store_true',
                        help='go on past the end-of-sequence token')
    parser.add_argument('--timeout', type=float, default=0.0, metavar='SEC')
    add_sampling_options(parser)
    parser.add_argument('--verification', default='coupled', choices=('coupled', 'rejection'),
                        help='how drafted tokens are judged when sampling')
    add_runtime_options(parser)
    add_storage_options(parser)
    add_kv_options(parser)
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..decoding.sampling import Sampling
    from ..runtime.requests import GenerationRequest
    from ..runtime.runtime import Runtime
    options = runtime_options(arguments)
    options.settings.verification = arguments.verification
    sampling = sampling_fields(arguments)
    sampling = Sampling(**{**sampling, 'logit_bias': tuple(sampling.get('logit_bias', ()))})
    prompt = sys.stdin.read() if arguments.prompt == '-' else arguments.prompt
    runtime = Runtime.open(arguments.bundle or None, options)
    try:
        prepared = runtime.prepare(GenerationRequest(
            prompt, arguments.system_prompt, max_new_tokens=arguments.max_new_tokens,
            stop=tuple(arguments.stop), ignore_eos=arguments.ignore_eos,
            timeout_sec=arguments.timeout, sampling=sampling))
        show = arguments.json != '-'
        text, token_ids, last = '', [], None
        for last in runtime.controller.generate(prepared):
            text += last.text
            token_ids += last.token_ids
            if show:
                print(last.text, end='', flush=True)
        if show:
            print()
        if arguments.json:
            write_json(arguments.json, {
                'text': text, 'prompt_ids': prepared.prompt_ids, 'token_ids': token_ids,
                'finish': last.finish.value, 'message': last.message,
                # Of the keys and values: whether this is what the target says.
                'exact': options.kv.exact, 'kv': str(options.kv),
                'kv_dropped': runtime.controller.engine.state.dropped,
                'stats': last.stats.as_dict()})
        if last.message:
            print(f'memspec generate: {last.finish.value}: {last.message}', file=sys.stderr)
            return 1
        return 0
    finally:
        runtime.close()
