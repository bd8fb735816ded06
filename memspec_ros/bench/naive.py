# SPDX-License-Identifier: Apache-2.0
"""
Speculative decoding as it is first written down: correct, and careless of memory.

What ``memspec bench memory`` compares with. Keys, values and hidden states grow
by concatenation, caches are copied so that a rejected draft can be undone, and
the logits of every row of target and draft are kept, in float32 over the full
vocabulary. Weights and kernels are those of the engine it is compared with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..decoding.verification import verify_greedy
from ..models.drafts.shared_layers import SharedLayersDrafter
from ..models.layers import attend, causal_mask, finish_layer, LayerWeights, project_qkv
from ..models.target import LlamaTarget

Cache = list[tuple[Tensor, Tensor]]


class NaiveDecoder:
    """
    Greedy, with one shared-layers draft that always proposes ``gamma`` tokens.

    ``draft`` gives its weights; its own cache is not used.
    """

    def __init__(self, target: LlamaTarget, draft: SharedLayersDrafter, gamma: int):
        self.target = target
        self.draft = draft
        self.gamma = gamma
        self.logits: list[Tensor] = []

    @torch.inference_mode()
    def generate(self, prompt: list[int], count: int) -> list[int]:
        """``count`` tokens that follow ``prompt``."""
        model, depth = self.target.model, self.draft.depth
        self.logits = []
        tokens, end = list(prompt), len(prompt) + count
        target: Cache = self._empty(len(model.layers))
        top: Cache = self._empty(len(self.draft.layers))
        if len(tokens) > 1:
            x = model.embed(torch.tensor([tokens[:-1]], device=self.target.device))
            lower = self._run(model.layers[:depth], x, target, 0)
            self._keep(model.logits(self._run(model.layers[depth:], lower, target, depth)[0]))
            self._run(self.draft.layers, lower, top, 0)
        while len(tokens) < end:
            before, top_before = _copy(target), _copy(top)
            drafted = self._propose(tokens, _copy(target[:depth]), top,
                                    min(self.gamma, end - len(tokens) - 1))
            x = model.embed(torch.tensor([[tokens[-1], *drafted]], device=self.target.device))
            lower = self._run(model.layers[:depth], x, target, 0)
            logits = model.logits(self._run(model.layers[depth:], lower, target, depth)[0])
            self._keep(logits)
            accepted, emitted = verify_greedy(logits, drafted)
            tokens += emitted[:end - len(tokens)]
            held = before[0][0].shape[2] + 1 + accepted
            target = _copy([(k[:, :, :held], v[:, :, :held]) for k, v in target])
            top = top_before
            self._run(self.draft.layers, lower[:, :1 + accepted], top, 0)
        return tokens[len(prompt):]

    def _propose(self, tokens: list[int], lower: Cache, top: Cache, gamma: int) -> list[int]:
        model, draft, drafted = self.target.model, self.draft, []
        draft.vocabulary.follow(tokens)
        further = draft.further_rows()
        for _ in range(gamma):
            x = model.embed(torch.tensor([(drafted or tokens)[-1:]], device=self.target.device))
            x = self._run(model.layers[:draft.depth], x, lower, 0)
            x = self._run(draft.layers, x, top, 0)
            full = torch.full((1, self.target.vocab_size), -torch.inf, device=x.device)
            full[:, draft.vocabulary.ids] = draft.logits(x[0], further).float()
            self._keep(full)
            drafted.append(int(full[0].argmax()))
        return drafted

    def _run(self, layers: list[LayerWeights], x: Tensor, cache: Cache, first: int) -> Tensor:
        """Run ``layers`` over x [1, T, H], whose caches begin at ``cache[first]``."""
        config, model = self.target.model.config, self.target.model
        for index, layer in enumerate(layers, first):
            keys, values = cache[index]
            start, new = keys.shape[2], x.shape[1]
            query, key, value = project_qkv(config, layer, x, model.rope.at(start, new),
                                            model.attention_dtype)
            keys, values = torch.cat([keys, key], 2), torch.cat([values, value], 2)
            cache[index] = (keys, values)
            mask = causal_mask(new, start + new, x.device)
            x = finish_layer(config, layer, x, attend(query, keys, values, mask))
        return x

    def _empty(self, layers: int) -> Cache:
        config, model = self.target.model.config, self.target.model
        none = torch.zeros(1, config.kv_heads, 0, config.head_dim, dtype=model.attention_dtype,
                           device=model.device)
        return [(none, none)] * layers

    def _keep(self, logits: Tensor) -> None:
        self.logits.append(logits.float())


def _copy(cache: Cache) -> Cache:
    return [(keys.clone(), values.clone()) for keys, values in cache]
