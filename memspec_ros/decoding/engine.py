# SPDX-License-Identifier: Apache-2.0
"""
The draft-verify loop's body: propose, verify, commit.

The engine owns one DecodeState and one target. Which draft proposes, and how
many tokens, is told to it each iteration; it cannot tell policies apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ..models.drafts import Drafter
from ..models.kv_options import EXACT, KVOptions
from ..models.state import Branching, Proposal
from ..models.target import Target
from .sampler import make_sampler
from .sampling import Sampling
from .stats import StepRecord

PREFILL_CHUNK = 64
# Rows a lagging draft may run per iteration: a cold draft in a long conversation
# warms over several iterations, instead of stalling one.
CATCH_UP_ROWS = 256


class DraftFailure(Exception):  # noqa: N818 (the draft failed, not the decode)
    """A draft raised instead of proposing; the state is as it was before the iteration."""


class Engine:
    """
    Decoding of one sequence at a time, exact for any draft; greedy unless told otherwise.

    Parameters
    ----------
    target: the model
    context: most tokens of prompt and output together
    max_gamma: most tokens drafted in a chain per iteration
    max_branches: most alternatives to them verified beside it
    depths: hidden states to keep (what the bundle's drafts read)
    clock: seconds, monotonic
    kv: how keys and values of old positions are kept

    """

    def __init__(self, target: Target, context: int, max_gamma: int,
                 depths: frozenset[int], clock: Callable[[], float], max_branches: int = 0,
                 kv: KVOptions = EXACT):
        self.target = target
        self.context = context
        self.max_gamma = max_gamma
        self.max_branches = max_branches if target.verifies_trees else 0
        self.clock = clock
        rows = max_gamma + self.max_branches + 1
        self.state = (target.new_state(context + rows, depths) if kv.exact else
                      target.new_lossy_state(kv, context, rows, depths))
        self.use(Sampling())

    def use(self, sampling: Sampling, verification: str = 'coupled',
            min_confidence: float = 0.0) -> None:
        """Choose tokens like this from now on; ``sampling`` is checked, its seed not 0."""
        self.sampler = make_sampler(sampling, self.target.vocab_size, verification, min_confidence)
        self.state.chooser = self.sampler.choose

    @property
    def opening(self) -> bool:
        """Whether the next iteration also runs what a prefill has left of the prompt."""
        return self.state.held < self.state.last

    def prefill(self, prompt: list[int], chunk: int = PREFILL_CHUNK,
                opening: bool = False) -> Iterator[int]:
        """
        Run all of the prompt but its last token, in chunks; yields positions held after each.

        First yields the positions kept from the last request, whose computation
        is saved. Between chunks the caller may stop. With ``opening`` the last chunk is
        left to the first iteration, which then drafts nothing: the first token is
        there after one pass instead of a draft's proposal and two.
        """
        state = self.state
        yield state.restart(prompt)
        while self.opening:
            state.make_room()
            if opening and state.last - state.held < min(chunk, state.reach):
                break
            rows = state.read(state.held, min(state.held + min(chunk, state.reach), state.last))
            self.target.forward(state, rows, last_only=True)
            state.hold(state.held + len(rows))
            yield state.held

    def ask(self, drafter: Drafter, gamma: int) -> list[int]:
        """
        What a draft would propose now, at most ``gamma`` tokens; nothing is verified.

        It catches up first, as far as one iteration lets it. Nothing before the prompt's
        last rows have run. Raises DraftFailure.
        """
        state = self.state
        if self.opening:
            return []
        gamma = min(gamma, self._most_drafted())
        try:
            proposal = self._propose(drafter, max(0, gamma))[0]
            drafter.update(state, 0)
        except Exception as error:
            raise DraftFailure(str(error) or type(error).__name__) from error
        finally:
            state.hold(state.last)
        return proposal.tokens

    def step(self, drafter: Drafter | None, gamma: int, limit: int, stop_ids: frozenset[int],
             branching: Branching | None = None) -> tuple[list[int], StepRecord]:
        """
        One iteration: emits at least one token and at most ``limit``.

        Tokens end at the first of ``stop_ids``, which is emitted too. ``branching``:
        the draft may name alternatives, where target and sampler can judge them. The record's
        ``draft`` and ``desired`` are for the caller to fill in. Raises DraftFailure
        where the draft raised; the iteration may then be repeated without it.
        """
        state = self.state
        position = len(state.tokens)
        gamma = 0 if self.opening else min(gamma, limit - 1, self._most_drafted())
        start = caught_up = self.clock()
        proposal = Proposal([])
        if drafter is not None and gamma > 0:
            try:
                proposal, caught_up = self._propose(drafter, gamma, branching)
            except Exception as error:
                state.hold(state.last)
                raise DraftFailure(str(error) or type(error).__name__) from error
        drafted = self.clock()
        rows, tokens = self._verify(proposal)
        tokens = _cut(tokens, limit, stop_ids)
        state.keep([0, *rows][:len(tokens)])
        state.tokens += tokens
        state.hold(state.last)
        accepted, draft_error = min(len(rows), len(tokens)), ''
        if drafter is not None:
            # Of an alternative that was right, the draft has run nothing.
            chain = sum(row == place for place, row in enumerate(rows[:accepted], start=1))
            try:
                drafter.update(state, chain)
            except Exception as error:  # noqa: BLE001 (the tokens stand, whatever the draft does)
                draft_error = str(error) or type(error).__name__
        end = self.clock()
        return tokens, StepRecord(
            draft='', desired='', position=position, drafted=len(proposal.tokens),
            accepted=accepted, emitted=len(tokens), branches=len(proposal.branches),
            t_catch_up=caught_up - start, t_draft=drafted - caught_up, t_verify=end - drafted,
            duration=end - start, draft_error=draft_error)

    def _most_drafted(self) -> int:
        """Most tokens that may be drafted now; makes room where the next row has none."""
        state = self.state
        state.make_room()
        most = min(self.max_gamma, state.reach - 1)
        return most if state.eviction else min(most, self.context - len(state.tokens) - 1)

    def _verify(self, proposal: Proposal) -> tuple[list[int], list[int]]:
        """Run the target over a proposal: (rows of the tokens accepted, tokens to emit)."""
        state = self.state
        run = [*state.read(state.held, state.last + 1), *proposal.tokens]
        if not proposal.branches:
            logits = self.target.forward(state, run, last_only=self.opening)
            accepted, tokens = self.sampler.verify(state, logits, proposal)
            return list(range(1, accepted + 1)), tokens
        run += (token for _, token in proposal.branches)
        logits = self.target.forward(state, run, branches=proposal.branches)
        return self.sampler.verify_tree(state, logits, proposal)

    def _propose(self, drafter: Drafter, gamma: int,
                 branching: Branching | None = None) -> tuple[Proposal, float]:
        """Let a draft catch up and propose; also says when it had caught up."""
        self.state.branching = None
        if branching and self.max_branches and self.sampler.branches:
            self.state.branching = replace(branching,
                                           most=min(branching.most, self.max_branches))
        if drafter.lag(self.state) > drafter.rows_with_proposal:
            drafter.catch_up(self.state, CATCH_UP_ROWS)
        caught_up = self.clock()
        return drafter.propose(self.state, gamma), caught_up


def _cut(tokens: list[int], limit: int, stop_ids: frozenset[int]) -> list[int]:
    """End a block at the first stop token (inclusive) and at the limit."""
    tokens = tokens[:limit]
    for index, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[:index + 1]
    return tokens
