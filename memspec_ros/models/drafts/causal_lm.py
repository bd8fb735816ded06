# SPDX-License-Identifier: Apache-2.0
"""An independent small causal language model with the target's tokenizer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..state import DecodeState, Proposal, TargetRun
from ..tokenizer import check_same_vocabulary, read_vocabulary
from ..transformers_lm import build_skeleton, TransformersLM
from ..tree import choose_branches
from .base import Drafter, DraftKind, rank_windows, token_ranks


class CausalLMDrafter(Drafter):
    """
    Feeds itself ``tokens[cached:]``.

    Its cache covers committed tokens only: drafted positions are rolled back
    after each proposal and those accepted are kept by ``update``.
    """

    def __init__(self, lm: TransformersLM, vocab_size: int):
        super().__init__()
        self.lm = lm
        self.vocab_size = vocab_size
        self.embeddings = lm.model.get_input_embeddings().num_embeddings
        self._drafted = 0

    def lag(self, state: DecodeState) -> int:
        self.follow(state)
        return max(0, state.last - self.cached)

    def catch_up(self, state: DecodeState, limit: int) -> None:
        count = min(limit, self.lag(state))
        if count and self.cached + count <= self.lm.cache.capacity:
            self._feed(state.read(self.cached, self.cached + count))
            self.cached += count

    def propose(self, state: DecodeState, gamma: int) -> Proposal:
        # A draft whose own context has ended proposes nothing; decoding goes on without it.
        lag = self.lag(state)
        gamma = min(gamma, self.lm.cache.capacity - state.last - 1)
        if gamma <= 0 or lag:
            return Proposal([])
        feed, tokens, choices, views = state.tokens[-1:], [], [], []
        while len(tokens) < gamma:
            # Rows of a padded vocabulary beyond the real ids are no tokens.
            views.append(self._feed(feed)[-1][:self.vocab_size])
            choice = state.choose(views[-1], tokens, None)
            if choice is None:
                break
            choices.append(choice)
            tokens.append(choice[0])
            feed = tokens[-1:]
        self._drafted = len(tokens)
        return Proposal.of(choices, choose_branches(views, tokens, None, state.branching))

    def step_bytes(self, state: DecodeState) -> int:
        return self.lm.step_bytes(state.last + 1)

    def update(self, state: DecodeState, accepted: int) -> None:
        # Fed were the last committed token and all drafted ones but the last.
        if self._drafted:
            self.cached += 1 + min(accepted, self._drafted - 1)
            # A block cut at a stop token ends with an accepted one, which is yet to be run.
            self.cached = min(self.cached, state.last)
            self._drafted = 0
        self.lm.set_length(self.cached)

    def evict(self, first: int, count: int) -> int:
        # How a model of transformers turns its keys is its own affair: it reads them again.
        kept = super().evict(first, count)
        self.lm.set_length(kept)
        return kept

    def restart(self, kept: int) -> None:
        super().restart(kept)
        self._drafted = 0
        self.lm.set_length(self.cached)

    def score(self, tokens: list[int], first: int) -> Tensor:
        """
        Logits [N - first + 1, real ids] of the tokens that follow ``first`` or more of ``tokens``.

        What is cached is overwritten: for a drafter that does not decode.
        """
        self.lm.set_length(0)
        return self._feed(tokens, last_only=False)[first - 1:, :self.vocab_size]

    def _feed(self, tokens: list[int], last_only: bool = True) -> Tensor:
        # Committed tokens the draft has no embedding of (its vocabulary is padded less, or lacks
        # ids) are read as another one: what follows may be rejected, but the draft lives on.
        known = [token if token < self.embeddings else 0 for token in tokens]
        return self.lm.forward(known, last_only)[0]


class CausalLMKind(DraftKind):
    """A Hugging Face directory: ``config.json``, ``model.safetensors``, ``tokenizer.json``."""

    def __init__(self, spec, bundle, target, capacity):
        self.directory = bundle.directory_of(spec)
        draft_vocabulary = read_vocabulary(self.directory)
        check_same_vocabulary(read_vocabulary(bundle.tokenizer_path), draft_vocabulary, spec.id)
        self.vocab_size = min(max(draft_vocabulary, default=-1) + 1, target.vocab_size)
        self.skeleton = build_skeleton(self.directory)
        self.dtype, self.device = target.dtype, target.device
        own = getattr(self.skeleton.config, 'max_position_embeddings', capacity)
        self.capacity = min(capacity, own)

    def attach(self, tensors: Mapping[str, Tensor]) -> Drafter:
        with torch.inference_mode():
            lm = TransformersLM.attach(self.skeleton, tensors, self.dtype, self.device,
                                       self.capacity)
        return CausalLMDrafter(lm, self.vocab_size)

    def rollout_ranks(self, tensors: Mapping[str, Tensor], run: TargetRun, first: int,
                      gamma: int, top: int) -> Tensor:
        drafter = self.attach(tensors)
        # Its own context may end before the target's: from there on it proposes nothing.
        count = min(len(run.tokens), self.capacity) - first
        ranks = torch.zeros(len(run.tokens) - first, dtype=torch.uint8)
        if count > 0:
            logits = drafter.score(run.tokens[:first + count - 1], first)
            ranks[:count] = token_ranks(logits, run.tokens[first:first + count], top)
        return rank_windows(ranks, gamma)
