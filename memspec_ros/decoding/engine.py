# SPDX-License-Identifier: Apache-2.0
"""
The draft-verify loop's body: propose, verify, commit.

The engine owns one DecodeState and one target. Which draft proposes, and how
many tokens, is told to it each iteration; it cannot tell policies apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..models.drafts import Drafter
from ..models.kv_options import EXACT, KVOptions
from ..models.state import Branching, Proposal
from ..models.target import Target
from ..models.threads import Threads
from ..models.tree import common_prefix, graft, Merged
from .sampler import make_sampler
from .sampling import Sampling
from .stats import StepRecord

PREFILL_CHUNK = 64
# Rows a lagging draft may run per iteration: a cold draft in a long conversation
# warms over several iterations, instead of stalling one.
CATCH_UP_ROWS = 256


class DraftFailure(Exception):  # noqa: N818 (the draft failed, not the decode)
    """A draft raised instead of proposing; the state is as it was before the iteration."""


@dataclass
class Second:
    """
    Another draft, whose chain is verified beside the first one's in one tree.

    gamma: most tokens it is asked for. branching: most rows beside the first
    draft's chain, and the least probability of being accepted that one is given
    for. chances: of the tokens after the prefix that the first chain and the
    second one have in common.
    """

    id: str
    drafter: Drafter
    gamma: int
    branching: Branching
    chances: Callable[[Sequence[int], Sequence[int]], Sequence[float]]


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
    stops: further depths at which drafts have the target's passes pause
    kv: how keys and values of old positions are kept

    Attributes
    ----------
    threads: how many passes take; by default as many as PyTorch has

    """

    threads = Threads()

    def __init__(self, target: Target, context: int, max_gamma: int,
                 depths: frozenset[int], clock: Callable[[], float], max_branches: int = 0,
                 kv: KVOptions = EXACT, stops: frozenset[int] = frozenset()):
        self.target = target
        self.context = context
        self.max_gamma = max_gamma
        self.max_branches = max_branches if target.verifies_trees else 0
        self.clock = clock
        rows = max_gamma + self.max_branches + 1
        self.state = (target.new_state(context + rows, depths, stops) if kv.exact else
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
            with self.threads.running(len(rows)):
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

    def is_cold(self, drafter: Drafter) -> bool:
        """Whether a draft lags behind by more than it may catch up on in one iteration."""
        return drafter.lag(self.state) > CATCH_UP_ROWS

    def warm(self, drafter: Drafter) -> None:
        """Let a draft catch up as far as one iteration lets it; raises DraftFailure."""
        try:
            self._catch_up(drafter)
        except Exception as error:
            raise DraftFailure(str(error) or type(error).__name__) from error

    def judge(self, drafter: Drafter, catch_up: bool) -> tuple[int, int]:
        """
        (right, judged) of a draft on tokens of the answer, see Drafter.judge; DraftFailure.

        catch_up: over what it lags behind, first, as far as one iteration lets it.
        """
        try:
            if catch_up:
                self._catch_up(drafter)
            with self.threads.running(1):
                return drafter.judge(self.state)
        except Exception as error:
            raise DraftFailure(str(error) or type(error).__name__) from error

    def trial(self, tokens: list[int], last_only: bool = False) -> None:
        """Run tokens after the committed positions for nothing: to time a pass."""
        with self.threads.running(len(tokens)):
            # Reading a result back waits for the device.
            self.target.forward(self.state, tokens, last_only)[-1].argmax().item()

    def step(self, drafter: Drafter | None, gamma: int, limit: int, stop_ids: frozenset[int],
             branching: Branching | None = None, second: Second | None = None
             ) -> tuple[list[int], StepRecord]:
        """
        One iteration: emits at least one token and at most ``limit``.

        Tokens end at the first of ``stop_ids``, which is emitted too. ``branching``:
        the draft may name alternatives, and ``second`` is another one to be heard in the same
        pass, where target and sampler can judge them (``merges``). The record's
        ``draft`` and ``desired`` are for the caller to fill in. Raises DraftFailure
        where the draft raised; the iteration may then be repeated without it.
        """
        state = self.state
        position = len(state.tokens)
        most = 0 if self.opening else min(limit - 1, self._most_drafted())
        gamma = min(gamma, most)
        start = caught_up = self.clock()
        proposal = Proposal([])
        if drafter is not None and gamma > 0:
            try:
                proposal, caught_up = self._propose(drafter, gamma, branching)
            except Exception as error:
                state.hold(state.last)
                raise DraftFailure(str(error) or type(error).__name__) from error
        drafted = self.clock()
        merged, other, second_error, begun = Merged(proposal), [], '', drafted
        if second is not None and proposal.tokens and self.merges:
            try:
                found, begun = self._propose(second.drafter, min(most, second.gamma))
                chances = second.chances(proposal.tokens, found.tokens)
                merged = graft(proposal, found.tokens, chances, second.branching)
                other = found.tokens
            except Exception as error:  # noqa: BLE001 (the first draft's tokens are good)
                state.hold(state.last)
                second_error = str(error) or type(error).__name__
        heard, ahead = self.clock(), len(state.ahead)
        rows, tokens = self._verify(merged.proposal)
        tokens = _cut(tokens, limit, stop_ids)
        state.keep([0, *rows][:len(tokens)])
        state.tokens += tokens
        state.hold(state.last)
        right, draft_error = tokens[:len(rows)], ''
        chain = common_prefix(proposal.tokens, right)
        # Of an alternative that was right, the draft has run nothing.
        accepted = chain + ((chain, right[chain]) in proposal.branches
                            if chain < len(right) else 0)
        if drafter is not None:
            draft_error = self._update(drafter, chain)
        if second is not None and not second_error:
            second_error = self._update(second.drafter, common_prefix(other, tokens))
        end = self.clock()
        return tokens, StepRecord(
            draft='', desired='', position=position, drafted=len(proposal.tokens),
            accepted=accepted, emitted=len(tokens), branches=len(merged.proposal.branches),
            t_catch_up=caught_up - start + begun - drafted, t_draft=drafted - caught_up,
            t_verify=end - heard, duration=end - start, ahead=ahead, draft_error=draft_error,
            second=second.id if other else '', second_drafted=merged.placed,
            second_accepted=common_prefix(other[:merged.placed], right),
            second_error=second_error, grafted=merged.alone, t_second=heard - begun)

    @property
    def merges(self) -> bool:
        """Whether two drafts can be verified in one tree: target and sampler judge branches."""
        return self.max_branches > 0 and self.sampler.branches

    def _update(self, drafter: Drafter, accepted: int) -> str:
        """Tell a draft what became of its proposal; what it raised, '' if it is well."""
        try:
            drafter.update(self.state, accepted)
        except Exception as error:  # noqa: BLE001 (the tokens stand, whatever the draft does)
            return str(error) or type(error).__name__
        return ''

    def _most_drafted(self) -> int:
        """Most tokens that may be drafted now; makes room where the next row has none."""
        state = self.state
        state.make_room()
        most = min(self.max_gamma, state.reach - 1)
        return most if state.eviction else min(most, self.context - len(state.tokens) - 1)

    def _verify(self, proposal: Proposal) -> tuple[list[int], list[int]]:
        """Run the target over a proposal: (rows of the tokens accepted, tokens to emit)."""
        state = self.state
        run = [*state.read(state.held, state.last + 1), *proposal.tokens,
               *(token for _, token in proposal.branches)]
        with self.threads.running(len(run)):
            if not proposal.branches:
                logits = self.target.forward(state, run, last_only=self.opening)
                accepted, tokens = self.sampler.verify(state, logits, proposal)
                return list(range(1, accepted + 1)), tokens
            logits = self.target.forward(state, run, branches=proposal.branches)
            return self.sampler.verify_tree(state, logits, proposal)

    def _propose(self, drafter: Drafter, gamma: int,
                 branching: Branching | None = None) -> tuple[Proposal, float]:
        """Let a draft catch up and propose; also says when it had caught up."""
        self.state.branching = None
        if branching and self.merges:
            self.state.branching = replace(branching,
                                           most=min(branching.most, self.max_branches))
        if drafter.lag(self.state) > drafter.rows_with_proposal:
            self._catch_up(drafter)
        caught_up = self.clock()
        with self.threads.running(1):
            return drafter.propose(self.state, gamma), caught_up

    def _catch_up(self, drafter: Drafter) -> None:
        with self.threads.running(drafter.lag(self.state)):
            drafter.catch_up(self.state, CATCH_UP_ROWS)


def _cut(tokens: list[int], limit: int, stop_ids: frozenset[int]) -> list[int]:
    """End a block at the first stop token (inclusive) and at the limit."""
    tokens = tokens[:limit]
    for index, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[:index + 1]
    return tokens
