# SPDX-License-Identifier: Apache-2.0
"""How the tokens of one request are chosen, on the drafts' side and on the target's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..models.state import choose_most_probable, DecodeState, Proposal
from .chance import Chance, Purpose
from .sampling import Prefix, process, Sampling, warp
from .verification import descend, verify_coupled, verify_greedy, verify_rejection

VERIFICATIONS = ('coupled', 'rejection')


class Sampler:
    """
    Greedy choice; what the other samplers have in common.

    Parameters
    ----------
    params: checked
    vocabulary: width V of the target's logits
    min_confidence: a draft whose most probable token is less probable than this
        does not go on. Looked at before a token is drawn: to discard drawn ones
        would bias the output.

    """

    def __init__(self, params: Sampling, vocabulary: int, min_confidence: float = 0.0):
        self.params = params
        self.vocabulary = vocabulary
        self.min_confidence = min_confidence

    def choose(self, state: DecodeState, logits: Tensor, drafted: Sequence[int],
               ids: Tensor | None = None) -> tuple[int, Tensor | None] | None:
        """Choose a draft's next token, see DecodeState.choose."""
        if self.params.keeps_scores and not self.min_confidence:
            return choose_most_probable(state, logits, drafted, ids)
        if self.params.keeps_scores:
            scores = logits
        else:
            scores, ids = self._processed(state, logits, drafted, ids), None
        best = int(scores.argmax())
        if scores[best] == -torch.inf or (
                self.min_confidence and scores.softmax(-1)[best] < self.min_confidence):
            return None
        return best if ids is None else int(ids[best]), None

    def verify(self, state: DecodeState, logits: Tensor,
               proposal: Proposal) -> tuple[int, list[int]]:
        """(accepted, tokens to emit); logits [drafted + 1, V] of the target."""
        if not self.params.keeps_scores:
            logits = process(logits, _prefix(state), self.params, proposal.tokens)
        return verify_greedy(logits, proposal.tokens)

    @property
    def branches(self) -> bool:
        """Whether proposals may branch: where a row's scores depend on nothing beside it."""
        return self.params.keeps_scores

    def verify_tree(self, state: DecodeState, logits: Tensor,
                    proposal: Proposal) -> tuple[list[int], list[int]]:
        """(rows accepted, tokens to emit); logits [1 + drafted + branches, V] of the target."""
        choices = logits.argmax(-1).tolist()
        return descend(proposal.tokens, proposal.branches, lambda row, depth: choices[row])

    def _widened(self, logits: Tensor, ids: Tensor | None) -> Tensor:
        """A draft's logits [its own vocabulary] as [1, V]; ids it does not know are impossible."""
        row = logits.new_full((1, self.vocabulary), -torch.inf, dtype=torch.float32)
        row[0, slice(len(logits)) if ids is None else ids] = logits.float()
        return row

    def _processed(self, state: DecodeState, logits: Tensor, drafted: Sequence[int],
                   ids: Tensor | None) -> Tensor:
        return process(self._widened(logits, ids), _prefix(state, drafted), self.params)[0]


class _DrawingSampler(Sampler):
    """What samplers that draw have in common."""

    def __init__(self, *args, chance: Chance | None = None, **keywords):
        super().__init__(*args, **keywords)
        self.chance = chance or Chance(self.params.seed)

    def _draft_probabilities(self, state: DecodeState, logits: Tensor, drafted: Sequence[int],
                             ids: Tensor | None) -> Tensor | None:
        """q [V] of the draft; None where it is to propose no more."""
        q = warp(self._widened(logits, ids), _prefix(state, drafted), self.params)[0]
        # Nothing that it knows is allowed: NaN.
        return q if q.max() >= self.min_confidence else None

    def _target_probabilities(self, state: DecodeState, logits: Tensor,
                              proposal: Proposal) -> Tensor:
        self.chance.forget(len(state.tokens))
        return warp(logits, _prefix(state), self.params, proposal.tokens)


class CoupledSampler(_DrawingSampler):
    """Drafts and target draw by the same randomness: output does not depend on the drafts."""

    def choose(self, state, logits, drafted, ids=None):
        q = self._draft_probabilities(state, logits, drafted, ids)
        if q is None:
            return None
        return self.chance.draw(q, len(state.tokens) + len(drafted)), None

    def verify(self, state, logits, proposal):
        p = self._target_probabilities(state, logits, proposal)
        return verify_coupled(p, proposal.tokens, self.chance, len(state.tokens))

    def verify_tree(self, state, logits, proposal):
        position = len(state.tokens)
        p = self._target_probabilities(state, logits, Proposal([]))
        return descend(proposal.tokens, proposal.branches,
                       lambda row, depth: self.chance.draw(p[row], position + depth))


class RejectionSampler(_DrawingSampler):
    """Rejection sampling: accepts most, output depends on who drafted (not how it is spread)."""

    branches = False

    def choose(self, state, logits, drafted, ids=None):
        q = self._draft_probabilities(state, logits, drafted, ids)
        if q is None:
            return None
        position = len(state.tokens) + len(drafted)
        return self.chance.draw(q, position, Purpose.DRAFT), q

    def verify(self, state, logits, proposal):
        p = self._target_probabilities(state, logits, proposal)
        return verify_rejection(p, proposal, self.chance, len(state.tokens))


def make_sampler(params: Sampling, vocabulary: int, verification: str,
                 min_confidence: float = 0.0) -> Sampler:
    """Make the sampler of a request; ``verification`` is one of VERIFICATIONS."""
    kind = Sampler if params.greedy else {'coupled': CoupledSampler,
                                          'rejection': RejectionSampler}[verification]
    return kind(params, vocabulary, min_confidence)


def _prefix(state: DecodeState, drafted: Sequence[int] = ()) -> Prefix:
    return Prefix([*state.tokens, *drafted], state.prompt_length)
