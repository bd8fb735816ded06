# SPDX-License-Identifier: Apache-2.0
"""
Stand-ins with chosen behaviour: target, drafts, clock, loader, store, tokenizer.

With these the decoding and runtime floors are tested without weights and
without sleeping. The fake target computes from what its cache holds, so that a
rollback gone wrong changes its output as it would a real one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import threading

import torch

from memspec_ros.decoding.draft_length import DraftLength
from memspec_ros.decoding.engine import Engine
from memspec_ros.models.drafts import Drafter, DraftKind
from memspec_ros.models.kv_cache import RollbackCache
from memspec_ros.models.state import DecodeState, Proposal
from memspec_ros.models.target import Target
from memspec_ros.models.tree import parents_of
from memspec_ros.runtime.controller import Controller
from memspec_ros.runtime.loader import LoadResult
from memspec_ros.runtime.policies import Plan, Policy
from memspec_ros.runtime.requests import PreparedRequest
from memspec_ros.runtime.residency import Residency
from memspec_ros.runtime.settings import Settings

VOCABULARY = 256
EOS = 255


class FakeClock:
    """Seconds that pass only when somebody spends them."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class FakeCache(RollbackCache):
    """Remembers which token was run at which position, as keys and values would."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.tokens: list[int | None] = [None] * capacity
        self.length = 0

    def set_length(self, length: int, group: int | None = None) -> None:
        assert 0 <= length <= self.capacity, f'length {length} of {self.capacity}'
        self.length = length


class FakeTarget(Target):
    """
    A target whose next token, or distribution, is ``next_token(prefix)``.

    ``next_token`` returns a token id or probabilities [V]. A forward pass takes
    ``step_sec + rows * row_sec`` of ``clock``. ``fail`` is called before each
    pass and may raise.
    """

    def __init__(self, next_token: Callable[[list[int]], int | torch.Tensor],
                 vocab_size: int = VOCABULARY, clock: FakeClock | None = None,
                 step_sec: float = 0.0, row_sec: float = 0.0):
        self.next_token = next_token
        self.vocab_size = vocab_size
        self.clock = clock or FakeClock()
        self.step_sec, self.row_sec = step_sec, row_sec
        self.hidden_size, self.layers, self.max_positions, self.weight_bytes = 4, 3, 4096, 0
        self.device, self.dtype = torch.device('cpu'), torch.float32
        self.rows: list[int] = []
        self.fail: Callable[[], None] = lambda: None

    def new_state(self, capacity, depths=frozenset(), stops=frozenset()):
        hidden = {depth: torch.zeros(capacity, self.hidden_size)
                  for depth in depths | {self.layers}}
        return DecodeState(FakeCache(capacity), hidden, capacity)

    def forward(self, state, tokens, last_only=False):
        self.fail()
        self.clock.advance(self.step_sec + len(tokens) * self.row_sec)
        self.rows.append(len(tokens))
        start, end = state.held, state.held + len(tokens)
        assert end <= state.capacity, 'ran beyond the buffers'
        state.kv.tokens[start:end] = tokens
        state.kv.set_length(end)
        for position in range(start, end):
            for hidden in state.hidden.values():
                hidden[position] = float(state.kv.tokens[position])
        logits = torch.stack([self._row(state.kv.tokens[:position + 1])
                              for position in range(start, end)])
        return logits[-1:] if last_only else logits

    def _row(self, prefix: list[int]) -> torch.Tensor:
        assert None not in prefix, 'a position was never run'
        choice = self.next_token(prefix)
        if isinstance(choice, torch.Tensor):
            return choice.log()
        row = torch.zeros(self.vocab_size)
        row[choice] = 9.0
        return row


class TreeCache(FakeCache):
    """A cache whose rows can be moved, as those of an accepted branch are."""

    def move(self, start, rows):
        self.tokens[start:start + len(rows)] = [self.tokens[start + row] for row in rows]


class TreeTarget(FakeTarget):
    """A FakeTarget that verifies trees."""

    verifies_trees = True

    def new_state(self, capacity, depths=frozenset(), stops=frozenset()):
        state = super().new_state(capacity, depths, stops)
        state.kv = TreeCache(capacity)
        return state

    def forward(self, state, tokens, last_only=False, branches=()):
        logits = super().forward(state, tokens, last_only)
        if not branches:
            return logits
        parents, before = parents_of(len(tokens) - 1 - len(branches), branches), state.held
        rows = []
        for row in range(len(tokens)):
            path: list[int] = []
            while row >= 0:
                path.insert(0, tokens[row])
                row = parents[row]
            rows.append(self._row([*state.kv.tokens[:before], *path]))
        return torch.stack(rows)


def counting(prefix: Sequence[int]) -> int:
    """A target that counts: each token is the last one plus one."""
    return (prefix[-1] + 1) % VOCABULARY


def scripted(prompt_length: int, output: Sequence[int]) -> Callable[[Sequence[int]], int]:
    """A target that answers a prompt of that length with ``output``, then with EOS for ever."""
    def next_token(prefix):
        place = len(prefix) - prompt_length
        return output[place] if 0 <= place < len(output) else EOS
    return next_token


class DraftTrouble(Exception):
    """What a broken draft raises: no class that the code under test knows."""


class FakeDrafter(Drafter):
    """
    Proposes ``guess(prefix)`` token by token, from a cache of its own that can lag.

    ``trouble`` maps a method's name to how many calls go well before it raises.
    """

    def __init__(self, guess: Callable[[list[int]], int], clock: FakeClock | None = None,
                 step_sec: float = 0.0, row_sec: float = 0.0,
                 trouble: Mapping[str, int] | None = None):
        super().__init__()
        self.guess = guess
        self.clock = clock or FakeClock()
        self.step_sec, self.row_sec = step_sec, row_sec
        self.left = dict(trouble or {})
        self.calls: list[str] = []
        self.restarts: list[int] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.left:
            if self.left[name] == 0:
                raise DraftTrouble(f'{name} failed')
            self.left[name] -= 1

    def lag(self, state):
        return max(0, state.held - self.cached)

    def catch_up(self, state, limit):
        self._call('catch_up')
        count = min(limit, self.lag(state))
        self.clock.advance(count * self.row_sec)
        self.cached += count

    def propose(self, state, gamma):
        self._call('propose')
        if self.lag(state):
            return Proposal([])
        tokens: list[int] = []
        for _ in range(gamma):
            self.clock.advance(self.step_sec)
            tokens.append(self.guess([*state.tokens, *tokens]))
        return Proposal(tokens)

    def update(self, state, accepted):
        self._call('update')

    def restart(self, kept):
        super().restart(kept)
        self.restarts.append(kept)


class FakeKind(DraftKind):
    """Makes FakeDrafters; raises on tensors that are the word ``corrupt``."""

    def __init__(self, make: Callable[[], Drafter] = lambda: FakeDrafter(counting),
                 slot_free: bool = False):
        self.make = make
        self.slot_free = slot_free
        self.attached: list[Drafter] = []

    def attach(self, tensors):
        if tensors == 'corrupt':
            raise KeyError('layers.0.qkv')
        self.attached.append(self.make())
        return self.attached[-1]


class ScriptedLoader:
    """
    A loader on the fake clock.

    ``script`` gives each draft its loads as (seconds, outcome), outcome being
    'ok', 'corrupt' or the reason of a failure; the last one repeats. Waiting is
    an error except where ``may_wait``: then it makes the time pass.
    """

    def __init__(self, clock: FakeClock, script: Mapping[str, Sequence[tuple[float, str]]],
                 default: tuple[float, str] = (1.0, 'ok')):
        self.clock = clock
        self.script = {draft: list(loads) for draft, loads in script.items()}
        self.default = default
        self.loading: str | None = None
        self.bytes_read = 0
        self.started: list[tuple[float, str]] = []
        self.cancels = 0
        self.stall = ''
        self.may_wait = False
        self._due = 0.0
        self._outcome = ''

    def start(self, draft: str) -> None:
        assert self.loading is None, f'{draft} started while {self.loading} is in flight'
        loads = self.script.get(draft, [self.default])
        seconds, self._outcome = loads.pop(0) if len(loads) > 1 else loads[0]
        self.loading, self.bytes_read = draft, 0
        self._due = self.clock() + seconds
        self.started.append((self.clock(), draft))

    def poll(self) -> LoadResult | None:
        if self.loading is None or self.clock() < self._due:
            return None
        draft, self.loading = self.loading, None
        if self._outcome == 'cancelled':
            return LoadResult(draft, cancelled=True)
        if self._outcome == 'ok':
            return LoadResult(draft, tensors={})
        if self._outcome == 'corrupt':
            return LoadResult(draft, tensors='corrupt')
        return LoadResult(draft, error=self._outcome)

    def cancel(self) -> None:
        self.cancels += 1
        if self.loading is not None:
            self._due, self._outcome = self.clock(), 'cancelled'

    def wait(self, timeout: float | None = None) -> bool:
        assert self.may_wait, 'waited for a load'
        if self.loading is not None:
            until = self._due if timeout is None else min(self._due, self.clock() + timeout)
            self.clock.now = max(self.clock(), until)
        return self.loading is None or self.clock() >= self._due

    def close(self) -> None:
        pass


class GatedStore:
    """
    A store for the real loader thread: each read waits until the test lets it through.

    ``inner`` reads for it (None: empty tensors); ``errors`` maps drafts to what
    their read raises. Reads are cancellable while they wait.
    """

    def __init__(self, inner=None, errors: Mapping[str, Exception] | None = None):
        self.inner = inner
        self.errors = dict(errors or {})
        self.gate = threading.Semaphore(0)
        self.reads: list[str] = []

    def read(self, draft, progress, cancelled):
        from memspec_ros.models.reading import LoadCancelled
        self.reads.append(draft)
        progress(0)
        while not self.gate.acquire(timeout=0.002):
            if cancelled():
                raise LoadCancelled(draft)
        if draft in self.errors:
            raise self.errors[draft]
        return self.inner.read(draft, progress, cancelled) if self.inner else {}


class FakeTokenizer:
    """One character a token: id 65 is 'A'; EOS has no text."""

    size = VOCABULARY
    eos_id = EOS

    def __init__(self, clock: FakeClock | None = None, decode_sec: float = 0.0):
        self.clock, self.decode_sec = clock or FakeClock(), decode_sec

    def decode(self, ids: Sequence[int]) -> str:
        self.clock.advance(self.decode_sec)
        return ''.join(chr(i) for i in ids if i != EOS)

    def encode_chat(self, messages) -> list[int]:
        return [ord(c) % EOS for message in messages for c in message['content']]


class ScriptedPolicy(Policy):
    """Ranks as ``rank(context)`` says, and keeps the contexts it was shown."""

    def __init__(self, rank: Callable[[object], Sequence[tuple[str, float]]],
                 clock: FakeClock | None = None, plan_sec: float = 0.0):
        self.rank = rank
        self.clock, self.plan_sec = clock or FakeClock(), plan_sec
        self.begun = 0
        self.recent: list[list[int]] = []

    def begin(self, context):
        self.begun += 1

    def plan(self, context):
        self.clock.advance(self.plan_sec)
        self.recent.append(list(context.recent))
        return Plan(list(self.rank(context)))


class Bench:
    """A controller over fakes, with everything a test wants to look at or turn."""

    def __init__(self, drafts: Mapping[str, FakeKind] | None = None, capacity: int = 2,
                 interval: int = 4, gamma: int = 3, next_token=counting, rank=None,
                 script: Mapping[str, Sequence[tuple[float, str]]] | None = None,
                 step_sec: float = 0.1, row_sec: float = 0.0, plan_sec: float = 0.0,
                 decode_sec: float = 0.0, adaptive: bool = False, context: int = 512,
                 bytes_each: int = 1000, target: type[FakeTarget] = FakeTarget,
                 branches: int = 0):
        self.clock = FakeClock()
        self.kinds = dict(drafts or {})
        for kind in self.kinds.values():
            kind.make = self._on_this_clock(kind.make)
        self.target = target(next_token, clock=self.clock, step_sec=step_sec, row_sec=row_sec)
        self.engine = Engine(self.target, context, gamma, frozenset(), self.clock, branches)
        self.loader = ScriptedLoader(self.clock, script or {})
        sized = {draft: (kind, 0 if kind.slot_free else bytes_each)
                 for draft, kind in self.kinds.items()}
        self.residency = Residency(sized, self.loader, capacity, self.clock)
        for kind in self.kinds.values():
            for drafter in kind.attached:
                drafter.clock = self.clock
        order = [(draft, 1.0 - 0.1 * i) for i, draft in enumerate(self.kinds)]
        self.policy = ScriptedPolicy(rank or (lambda context: order), self.clock, plan_sec)
        self.settings = Settings(capacity, interval)
        self.controller = Controller(
            self.engine, FakeTokenizer(self.clock, decode_sec), self.residency, self.policy,
            DraftLength(gamma, adaptive), self.settings, frozenset({EOS}))

    def _on_this_clock(self, make):
        def made():
            drafter = make()
            drafter.clock = self.clock
            return drafter
        return made

    def request(self, prompt: Iterable[int] = (1, 2, 3), max_new_tokens: int = 40,
                **options) -> PreparedRequest:
        return PreparedRequest(list(prompt), '', max_new_tokens, accepted_at=self.clock(),
                               **options)

    def run(self, prompt: Iterable[int] = (1, 2, 3), max_new_tokens: int = 40, **options):
        """Answer a request: (token ids, text, last chunk, all chunks)."""
        chunks = list(self.controller.generate(
            self.request(prompt, max_new_tokens, **options)))
        ids = [token for chunk in chunks for token in chunk.token_ids]
        return ids, ''.join(chunk.text for chunk in chunks), chunks[-1], chunks
