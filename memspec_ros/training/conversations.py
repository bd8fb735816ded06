# SPDX-License-Identifier: Apache-2.0
"""
Traces of conversations: a turn's prompt is everything said before, the target's answers included.

A trace directory of its own, with ``conversations.json``: the keys of each
conversation's traces, turn by turn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
import json
from pathlib import Path

from .outputs import PromptFileError, read_fields, read_lines, read_prompts
from .trace_store import Trace, TraceError, TraceStore
from .traces import fill_traces, TracePrompt, Tracer

INDEX_NAME = 'conversations.json'


@dataclass(frozen=True)
class Conversation:
    """What the user says, turn by turn, and the domain of each turn."""

    turns: tuple[str, ...]
    domains: tuple[str, ...]


def holds_conversations(path: Path) -> bool:
    """Whether a file of JSON lines is one of conversations, by its first line."""
    return '"turns"' in next((line for line in read_lines(path) if line.strip()), '')


def read_conversations(files: Sequence[Path]) -> list[Conversation]:
    """
    Conversations of JSON-lines files with ``turns`` (strings) and ``domain``.

    Where there is no such file, they are made of the prompts (``prompt`` and
    ``domain``) so that the domain changes midway; see ``pair``. Raises
    PromptFileError naming the line.
    """
    given = [path for path in files if holds_conversations(path)]
    if given:
        return [each for path in given for each in _read(path)]
    return pair(prompt for path in files for prompt in read_prompts(path))


def _read(path: Path) -> list[Conversation]:
    conversations = []
    for number, turns, domain in read_fields(path, 'turns'):
        if not (isinstance(turns, list) and turns and isinstance(domain, str)
                and all(isinstance(turn, str) for turn in turns)):
            raise PromptFileError(f'{path}, line {number}: "turns" must be a list of strings, '
                                  '"domain" a string')
        conversations.append(Conversation(tuple(turns), (domain,) * len(turns)))
    return conversations


def pair(prompts: Iterable[tuple[str, str]]) -> list[Conversation]:
    """
    Conversations of two (domain, prompt) of different domains; each is used once, at most.

    The domains take turns in who follows whom.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for domain, prompt in prompts:
        groups[domain].append(prompt)
    domains = list(groups)
    conversations = []
    for row in range(max(map(len, groups.values()), default=0)):
        shift = row % len(domains)
        there = [(domain, groups[domain][row]) for domain in domains[shift:] + domains[:shift]
                 if row < len(groups[domain])]
        for (first, one), (second, other) in zip(there[::2], there[1::2]):
            conversations.append(Conversation((one, other), (first, second)))
    return conversations


def fill_conversations(store: TraceStore, tracer: Tracer, conversations: Sequence[Conversation],
                       encode: Callable[[list[dict[str, str]]], list[int]],
                       decode: Callable[[Sequence[int]], str], prompt_tokens: int,
                       given: Mapping[str, list[int]] | None = None,
                       report: Callable[[int, int], None] | None = None) -> None:
    """
    Trace what the store lacks, turn by turn, and write the index.

    encode: token ids of a conversation up to where the answer begins. A
    conversation ends before a turn whose prompt has more than ``prompt_tokens``
    tokens; those of one turn are left out. given, report: as for ``fill_traces``.
    Raises TraceError.
    """
    keys: list[list[str]] = [[] for _ in conversations]
    messages: list[list[dict[str, str]]] = [[] for _ in conversations]
    for turn in range(max((len(each.turns) for each in conversations), default=0)):
        prompts = {}
        for number, each in enumerate(conversations):
            if turn >= len(each.turns) or len(keys[number]) < turn:
                continue
            messages[number].append({'role': 'user', 'content': each.turns[turn]})
            ids = encode(messages[number])
            if len(ids) <= prompt_tokens:
                prompts[number] = TracePrompt(each.domains[turn], each.turns[turn], ids)
        unique = {prompt.key: prompt for prompt in prompts.values()}
        fill_traces(store, tracer, unique.values(), given, report=report)
        for number, prompt in prompts.items():
            keys[number].append(prompt.key)
            output = store.read(prompt.key).output_ids.tolist()
            # The template ends the turn itself.
            text = decode([token for token in output if token not in tracer.stop_ids])
            messages[number].append({'role': 'assistant', 'content': text})
    store.write_json(INDEX_NAME, [turns for turns in keys if len(turns) > 1])


def open_conversations(store: TraceStore) -> list[list[Trace]]:
    """The traces of each conversation in a directory; raises TraceError."""
    path = store.directory / INDEX_NAME
    try:
        index = json.loads(path.read_text(encoding='utf-8'))
        keys = [[str(key) for key in turns] for turns in index]
    except OSError as error:
        raise TraceError(f'{path}: {error.strerror or error}; make conversations with memspec '
                         'bench multiturn --prompts') from error
    except (ValueError, TypeError) as error:
        raise TraceError(f'{path}: not a list of conversations ({error})') from error
    return [[store.read(key) for key in turns] for turns in keys]
