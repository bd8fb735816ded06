# SPDX-License-Identifier: Apache-2.0
"""Where the outcomes of ``memspec bench SUITE`` come from, mode by mode."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
import hashlib
import json
from pathlib import Path
import sys
import tempfile

from ..models.errors import InvalidRequestError
from .options import check_at_least
from .trace import open_tokenizer, open_tracer, progress, too_long

DEFAULT_PROFILE = 'jetson_orin_nano'
# Deepest draft position in traces that are made on the way.
_TRACE_GAMMA = 8


def open_sources(arguments: argparse.Namespace, longest: int):
    """
    (source of prompts, source of conversations), None for one that the suite does not need.

    In a ``with`` statement: what they run on is closed at its end. longest: tokens of
    the longest answers that are to be had, where they are made.
    """
    return _MODES[arguments.mode](arguments, longest)


@contextmanager
def _replay(arguments: argparse.Namespace, longest: int) -> Iterator[tuple]:
    from ..bench.profile import load_profile
    if bool(arguments.traces) == bool(arguments.prompts):
        raise InvalidRequestError('give either --prompts or --traces')
    _check(arguments)
    scenario = _scenario(arguments, load_profile(arguments.profile or DEFAULT_PROFILE))
    made = _Traces(arguments, longest) if arguments.prompts else None
    prompts = conversations = None
    if arguments.suite != 'multiturn':
        prompts = _prompt_source(arguments, scenario, made)
    if arguments.suite == 'multiturn' or (arguments.suite == 'all' and made):
        conversations = _conversation_source(arguments, scenario, made)
    yield prompts, conversations


@contextmanager
def _real(arguments: argparse.Namespace, longest: int) -> Iterator[tuple]:
    from ..bench.real import check_load_ratio, open_machine
    from ..bench.real_source import RealSource
    from ..bench.replay import open_ranker
    if not arguments.prompts or arguments.traces:
        raise InvalidRequestError('--mode real needs --prompts, and no --traces')
    if arguments.profile:
        raise InvalidRequestError('--profile is for replays: --mode real measures this machine')
    _check(arguments)
    check_at_least(arguments, profile_rounds=2)
    made = _EngineTraces(arguments, longest)
    with open_machine(arguments.bundle, _runtime_options(arguments, made.positions()),
                      arguments.profile_rounds, say, arguments.without) as (runtime, machine):
        profile = machine.measure()
        check_load_ratio(profile, machine.drafts, arguments.load_ratio or None, arguments.gamma)
        scenario = _scenario(arguments, profile)

        def source(header, conversations):
            traces = [trace for turns in conversations for trace in turns]
            return RealSource(machine, conversations, header, scenario,
                              open_ranker(runtime.bundle, machine.drafts, traces),
                              runtime.tokenizer, arguments.all_variants, say)
        prompts = conversations = None
        with made.on(runtime, machine, scenario):
            if arguments.suite != 'multiturn':
                header, traces = made.of_prompts()
                prompts = source(header, [[trace] for trace in traces])
            if arguments.suite in ('multiturn', 'all'):
                header, turns = made.of_conversations()
                conversations = source(header, turns) if turns else None
        yield prompts, conversations


_MODES = {'replay': _replay, 'real': _real}
MODES = tuple(_MODES)


def say(line: str) -> None:
    """How far it is, on standard error: the JSON may go to standard output."""
    print(line, file=sys.stderr, flush=True)


def _check(arguments: argparse.Namespace) -> None:
    for name, least in (('k', 0), ('n', 1), ('gamma', 1), ('max_new_tokens', 1),
                        ('prompts_per_domain', 0), ('load_ratio', 0), ('prompt_tokens', 1),
                        ('threads', 0)):
        value = getattr(arguments, name)
        if not least <= value < float('inf'):
            raise InvalidRequestError(f'--{name.replace("_", "-")} is {value}, expected at least '
                                      f'{least}')


def _scenario(arguments: argparse.Namespace, profile):
    from ..bench.replay import Scenario
    if arguments.load_ratio:
        profile = profile.with_load_ratio(arguments.load_ratio)
    return Scenario(profile, arguments.k, arguments.n, arguments.gamma, arguments.max_new_tokens,
                    arguments.adaptive, arguments.first_load_counts)


def _runtime_options(arguments: argparse.Namespace, context: int):
    from ..runtime.runtime import RuntimeOptions
    from ..runtime.storage import StorageLimits
    return RuntimeOptions(
        device=arguments.device, dtype=arguments.dtype, context=context,
        max_gamma=arguments.gamma, threads=arguments.threads,
        storage=StorageLimits(cold=arguments.cold_storage))


def _prompt_source(arguments: argparse.Namespace, scenario, made: _Traces | None):
    from ..bench.replay import take_per_domain
    if made:
        header, traces = made.of_prompts()
    else:
        stores, header = _open_stores(arguments)
        traces = [trace for store in stores for trace in store]
    traces = take_per_domain(traces, arguments.prompts_per_domain)
    return _source(arguments, scenario, header, [[trace] for trace in traces])


def _conversation_source(arguments: argparse.Namespace, scenario, made: _Traces | None):
    from ..training.conversations import open_conversations
    if made:
        header, conversations = made.of_conversations()
    else:
        stores, header = _open_stores(arguments)
        conversations = [turns for store in stores for turns in open_conversations(store)]
    return _source(arguments, scenario, header, conversations) if conversations else None


def _open_stores(arguments: argparse.Namespace):
    from ..training.trace_store import TraceStore
    stores = [TraceStore(Path(directory)) for directory in arguments.traces]
    header = stores[0].header()
    for store in stores[1:]:
        if store.header() != header:
            raise InvalidRequestError(f'--traces {store.directory}: these traces were not made '
                                      f'like those of {stores[0].directory}')
    return stores, header


def _source(arguments: argparse.Namespace, scenario, header, conversations):
    from ..bench.replay import open_ranker
    from ..bench.replay_source import ReplaySource
    from ..models.bundle import load_bundle
    bundle = load_bundle(arguments.bundle or None, verify=False)
    for draft in arguments.without:
        if draft not in header.drafts:
            raise InvalidRequestError(f'--without {draft}: the traces hold no such draft; they '
                                      f'hold: {", ".join(header.drafts)}')
    drafts = [bundle.draft(draft) for draft in header.drafts if draft not in arguments.without]
    tokenizer = open_tokenizer(bundle)
    traces = [trace for turns in conversations for trace in turns]
    return ReplaySource(conversations, header, drafts, scenario,
                        open_ranker(bundle, drafts, traces), tokenizer)


class _Traces:
    """Traces made of --prompts: kept under --out, else in the cache, and found again there."""

    def __init__(self, arguments: argparse.Namespace, longest: int):
        from ..models.bundle import load_bundle
        from ..models.target_files import cache_directory
        self._bundle = load_bundle(arguments.bundle or None)
        self._tokenizer = open_tokenizer(self._bundle)
        self._files = [Path(file) for file in arguments.prompts]
        self._prompt_tokens, self._count = arguments.prompt_tokens, arguments.prompts_per_domain
        base = Path(arguments.out) if arguments.out else cache_directory()
        self._directory = base / 'traces'
        self._longest, self._usual = longest, arguments.max_new_tokens
        self._given: dict[str, list[int]] = {}
        # A ranker of hidden states is to see what it would in the node.
        self._options = {
            'threads': arguments.threads, 'device': arguments.device, 'dtype': 'float32',
            'gamma': max(_TRACE_GAMMA, arguments.gamma),
            'hidden_every': 1 if self._bundle.ranker.kind == 'hidden' else 4}

    def of_prompts(self):
        """(header, traces) of the prompts."""
        from ..training.conversations import holds_conversations
        from ..training.traces import collect_prompts, fill_traces
        files = [file for file in self._files if not holds_conversations(file)]
        prompts = collect_prompts(files, self._encode, self._prompt_tokens, self._count)
        if not prompts:
            raise InvalidRequestError(
                f'--prompts: no prompt of at most {self._prompt_tokens} tokens')
        tracer, store = self._open('prompts', max(len(prompt.ids) for prompt in prompts),
                                   self._longest)
        with progress() as bar:
            fill_traces(store, tracer, prompts, report=_reporter(bar, 'tracing prompts'))
        traces = [store.read(prompt.key) for prompt in prompts]
        self._given = {trace.key: trace.output_ids.tolist() for trace in traces}
        return tracer.header, traces

    def of_conversations(self):
        """(header, conversations), each the traces of its turns."""
        from ..training.conversations import fill_conversations, open_conversations
        conversations = self._read_conversations()
        if not conversations:  # prompts of one domain
            return None, []
        room = self._room(conversations)
        tracer, store = self._open('conversations', room, self._usual)
        with progress() as bar:
            fill_conversations(store, tracer, conversations, self._tokenizer.encode_chat,
                               self._tokenizer.decode, room, self._given,
                               _reporter(bar, 'tracing conversations'))
        return tracer.header, open_conversations(store)

    def _read_conversations(self):
        from ..training.conversations import read_conversations
        conversations = read_conversations(self._files)
        return _take(conversations, self._count) if self._count else conversations

    def _room(self, conversations) -> int:
        """Tokens of the longest prompt of a last turn."""
        turns = max(len(each.turns) for each in conversations)
        return turns * self._prompt_tokens + (turns - 1) * self._usual

    def _encode(self, prompt: str) -> list[int]:
        return self._tokenizer.encode_chat([{'role': 'user', 'content': prompt}])

    def _open(self, kind: str, prompt_tokens: int, max_new_tokens: int):
        from ..training.trace_store import TraceStore
        tracer = open_tracer(argparse.Namespace(max_new_tokens=max_new_tokens, **self._options),
                             self._bundle, prompt_tokens)
        made = json.dumps(asdict(tracer.header), sort_keys=True).encode()
        name = f'{kind}-{hashlib.sha256(made).hexdigest()[:12]}'
        return tracer, TraceStore(self._directory / name)


class _EngineTraces(_Traces):
    """Of what the engine itself answers; they hold for this run and are not kept."""

    def __init__(self, arguments: argparse.Namespace, longest: int):
        super().__init__(arguments, longest)
        self._suite = arguments.suite

    def positions(self) -> int:
        """Of the longest prompt with its answer."""
        conversations = (self._read_conversations() if self._suite in ('multiturn', 'all')
                         else [])
        return max(self._prompt_tokens + self._longest,
                   self._room(conversations) + self._usual if conversations else 0)

    @contextmanager
    def on(self, runtime, machine, scenario) -> Iterator[None]:
        """Within it, traces can be made."""
        self._runtime, self._machine, self._scenario = runtime, machine, scenario
        with tempfile.TemporaryDirectory() as directory:
            self._directory = Path(directory)
            yield

    def _open(self, kind: str, prompt_tokens: int, max_new_tokens: int):
        from ..bench.real import EngineTracer
        from ..training.trace_store import TraceStore
        capacity = prompt_tokens + max_new_tokens
        if capacity > self._runtime.options.context:
            raise too_long(capacity, self._runtime.target)
        return (EngineTracer(self._runtime, self._machine, self._scenario, capacity,
                             max_new_tokens), TraceStore(self._directory / kind))


def _reporter(bar, title: str):
    task = bar.add_task(title, total=None)
    return lambda done, total: bar.update(task, completed=done, total=total)


def _take(conversations, count: int):
    """The first ``count`` that begin with each domain."""
    taken: dict[str, int] = {}
    chosen = []
    for each in conversations:
        taken[each.domains[0]] = taken.get(each.domains[0], 0) + 1
        if taken[each.domains[0]] <= count:
            chosen.append(each)
    return chosen
