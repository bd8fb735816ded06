# SPDX-License-Identifier: Apache-2.0
"""
Shared-layer draft: the target's embedding and lower layers, a small top of its own.

Extra memory is the top alone (a few percent of the target). The head covers a
trimmed vocabulary and the tokens of the text at hand, is made of rows of the
target's own and shared by all drafts of the bundle. Source: "Speculative
Decoding Under Memory Constraints" (2026) for the idea; the figures are ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
import torch.nn.functional as F

from ..errors import BundleError, UnsupportedModelError
from ..kv_cache import KVCache
from ..layer_stack import LayerStack, of_one_stream, run_layers
from ..layers import layer_shapes, LayerWeights
from ..llama_config import LlamaConfig
from ..packing import linear, pack
from ..quantized import Matrix
from ..state import DecodeState, Proposal, TargetRun
from ..target import LlamaTarget
from ..tree import choose_branches
from .base import Drafter, DraftKind, rank_windows, token_ranks
from .vocabulary import TextVocabulary

# Rows kept to be judged: what is older says little of what follows.
JUDGED_ROWS = 64


class SharedLayersDrafter(Drafter):
    """
    Runs the target's lower layers on drafted tokens, then its own top.

    The top's cache is built from committed hidden states, never from drafted
    ones: what was drafted is forgotten at every proposal.
    """

    # What the last iteration committed runs in one pass with the first drafted token.
    rows_with_proposal = 16
    judges = True

    def __init__(self, target: LlamaTarget, depth: int, layers: list[LayerWeights], norm: Tensor,
                 head: Tensor, vocabulary: TextVocabulary, capacity: int):
        super().__init__()
        self.target = target
        self.depth = depth
        self.layers = LayerStack(layers)
        self.norm = norm
        self.head = head
        self.vocabulary = vocabulary
        config = target.model.config
        self.kv = KVCache(len(layers), config.kv_heads, capacity, config.head_dim,
                          target.model.attention_dtype, target.device)
        # What the top made of the latest committed positions of the answer, not judged yet.
        self._unjudged: list[Tensor] = []

    def lag(self, state: DecodeState) -> int:
        self.follow(state)
        return max(0, state.held - self.cached)

    @torch.inference_mode()
    def evict(self, first: int, count: int) -> int:
        if self.cached < first + count:
            self._unjudged = []
            return super().evict(first, count)
        # Its own cache moves up as the target's does, instead of being built anew.
        self.kv.drop(first, count, self.cached, self.target.model.rope.turn_back)
        return self.cached - count

    @torch.inference_mode()
    def catch_up(self, state: DecodeState, limit: int) -> None:
        count = min(limit, self.lag(state))
        if count:
            x = self._after_target(state, self._held(state, self.cached + count))
            outputs = self._run_top(x, self.cached)
            self._note(state, outputs[0])
            self.cached += count

    @torch.inference_mode()
    def propose(self, state: DecodeState, gamma: int) -> Proposal:
        if self.lag(state) > self.rows_with_proposal:
            return Proposal([])
        position = state.held
        self.vocabulary.follow(state.tokens)
        further = self.further_rows()
        tokens, choices, views, top = [], [], [], None
        for step in range(min(gamma, self.kv.capacity - position)):
            lower = self._lower(state, (tokens or state.tokens)[-1], position + step)
            if step:
                x = self._after_own(lower, top)
            else:  # what was committed since it last drafted comes first
                x = self._after_target(state, torch.cat([self._held(state, position), lower], 1))
            top = self._run_top(x, position + step + 1 - x.shape[1])
            if step == 0:
                self._note(state, top[0, :-1])
            top = top[:, -1:]
            self.cached = position
            views.append(self.logits(top[0, -1], further))
            choice = state.choose(views[-1], tokens, self.vocabulary.ids)
            if choice is None:
                break
            choices.append(choice)
            tokens.append(choice[0])
        for group in state.kv.groups_below(self.depth):
            state.kv.set_length(position, group)
        return Proposal.of(choices, choose_branches(views, tokens, self.vocabulary.ids,
                                                    state.branching))

    @torch.inference_mode()
    def judge(self, state: DecodeState) -> tuple[int, int]:
        if not self._unjudged:
            return 0, 0
        outputs, self._unjudged = torch.cat(self._unjudged), []
        # The row of a position says which token stands at the next one.
        first = self.cached + self.dropped + 1 - len(outputs)
        best = self.logits_along(outputs, state.tokens, first).argmax(-1)
        said = self.vocabulary.ids[best]  # of the vocabulary as the text has extended it by now
        true = state.tokens[first:first + len(outputs)]
        return sum(map(int.__eq__, said.tolist(), true)), len(outputs)

    def restart(self, kept: int) -> None:
        super().restart(kept)
        self._unjudged = []

    def _note(self, state: DecodeState, outputs: Tensor) -> None:
        """Keep the top's outputs [T, H] of the positions from ``cached`` on, if of the answer."""
        answered = self.cached + len(outputs) + self.dropped - (state.prompt_length - 1)
        outputs = outputs[-min(answered, JUDGED_ROWS):] if answered > 0 else outputs[:0]
        if len(outputs):
            self._unjudged.append(outputs)
            while sum(map(len, self._unjudged[1:])) >= JUDGED_ROWS:
                self._unjudged.pop(0)

    def step_bytes(self, state: DecodeState) -> int:
        return (self.target.lower_bytes(state, self.depth)
                + sum(layer.bytes for layer in self.layers) + self.norm.nbytes + self.head.nbytes
                + self.kv.position_bytes * state.held)

    @torch.inference_mode()
    def outputs(self, inputs: Tensor) -> Tensor:
        """
        The top's outputs [N, H] for its inputs [N, H] at all positions.

        What is cached is overwritten: for a drafter that does not decode.
        """
        return self._run_top(inputs[None], 0)[0]

    def further_rows(self) -> Tensor | None:
        """Rows of the target's head for what the text adds to the vocabulary, None for nothing."""
        return self.vocabulary.further_rows(
            lambda ids: self.target.model.head_rows(ids).to(self.norm.dtype))

    def logits(self, top: Tensor, further: Tensor | None = None) -> Tensor:
        """The top's output [..., H], before its norm -> logits [..., trimmed V and further]."""
        normed = F.rms_norm(top, top.shape[-1:], self.norm, self.target.model.config.norm_eps)
        logits = linear(normed, self.head)
        return logits if further is None else torch.cat([logits, linear(normed, further)], -1)

    def logits_along(self, outputs: Tensor, tokens: Sequence[int], first: int) -> Tensor:
        """
        Logits [N, trimmed V and further] of ``tokens[first:first + N]``, each after those before.

        outputs [N, H]: the top's, of the position before each. A token that neither
        the trimmed vocabulary nor the text before holds cannot be drafted.
        """
        self.vocabulary.follow(tokens)
        logits = self.logits(outputs, self.further_rows())
        since = list(self.vocabulary.further.values())
        places = torch.arange(len(outputs), device=logits.device)[:, None] + first
        later = torch.tensor(since, device=logits.device) >= places
        known = logits.shape[1] - len(since)
        logits[:, known:] = logits[:, known:].masked_fill(later, -torch.inf)
        return logits

    def _lower(self, state: DecodeState, token: int, position: int) -> Tensor:
        """What the shared layers make of a token at ``position``, not committed yet: [1, 1, H]."""
        return self.target.run_lower(state, token, position, self.depth)

    def _held(self, state: DecodeState, end: int) -> Tensor:
        """What they made of committed positions from ``cached`` up to ``end``: [1, T, H]."""
        return state.hidden[self.depth][self.cached:end][None]

    def _after_target(self, state: DecodeState, lower: Tensor) -> Tensor:
        """
        The top's inputs at the positions from ``cached`` on, of which ``lower`` is [1, T, H].

        All positions before them are committed, and so are they themselves but for the last one.
        """
        return lower

    def _after_own(self, lower: Tensor, before: Tensor) -> Tensor:
        """Its input [1, 1, H] at a position after one that was drafted, output ``before``."""
        return lower

    def _run_top(self, x: Tensor, start: int) -> Tensor:
        config = self.target.model.config
        rope = self.target.model.rope.at(start, x.shape[1])
        return run_layers(config, self.layers, x.to(self.norm.dtype), self.kv, start, rope)


class SharedLayersKind(DraftKind):
    """
    Options: ``depth`` (L, target layers reused), ``layers`` (own ones).

    The file holds ``layers.<i>.<field>`` of LayerWeights and ``norm``.
    """

    option_names = frozenset({'depth', 'layers'})
    least_depth = 1

    def __init__(self, spec, bundle, target, capacity):
        if not isinstance(target, LlamaTarget):
            raise UnsupportedModelError(
                f'draft {spec.id!r}: {spec.kind} needs a target on the lean path (llama, qwen2)')
        self.id = spec.id
        self.target = target
        self.capacity = capacity
        self.depth = _count(spec, 'depth', target.layers - 1, self.least_depth)
        self.own_layers = _count(spec, 'layers', target.layers)
        self.depths = frozenset({self.depth} - {0})
        head_ids = bundle.head_token_ids()
        if head_ids is None:
            raise BundleError(
                f'draft {spec.id!r}: {spec.kind} needs "shared_head" in bundle.yaml')
        self._head_ids = torch.tensor(head_ids, device=target.device)
        self._head_places = {token: place
                             for place, token in reversed(list(enumerate(head_ids)))}
        self.head = bundle.shared_head_of(target)

    def prepare(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor | Matrix]:
        return {name: self._packed(tensor) if self.is_matrix(name) and tensor.dim() == 2
                else tensor for name, tensor in tensors.items()}

    @staticmethod
    def is_matrix(name: str) -> bool:
        return name.split('.')[-1] in LayerWeights.MATRICES

    def attach(self, tensors: Mapping[str, Tensor | Matrix]) -> Drafter:
        return SharedLayersDrafter(*self._top(tensors))

    def _top(self, tensors: Mapping[str, Tensor | Matrix]) -> tuple:
        """Arguments of the drafter."""
        layers, norm = of_one_stream([layer.packed('auto') for layer in self.own(tensors)],
                                     self.own_norm(tensors))
        return (self.target, self.depth, layers, norm, self.head,
                TextVocabulary(self._head_ids, self._head_places), self.capacity)

    def own(self, tensors: Mapping[str, Tensor | Matrix]) -> list[LayerWeights]:
        """The checked own layers, packed where ``tensors`` are."""
        config: LlamaConfig = self.target.model.config
        return [self._layer(tensors, index, config) for index in range(self.own_layers)]

    def own_norm(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The checked final norm [H]."""
        return self._tensor(tensors, 'norm', (self.target.model.config.hidden_size,))

    def rollout_ranks(self, tensors: Mapping[str, Tensor], run: TargetRun, first: int,
                      gamma: int, top: int) -> Tensor:
        # Drafted tokens pass through the shared layers as committed ones do: what the draft
        # says after true tokens does not depend on which of them were drafted.
        drafter = self.attach(tensors)
        outputs = drafter.outputs(run.hidden[self.depth][:len(run.tokens) - 1])
        ranks = self.ranks(drafter, outputs[first - 1:], run.tokens, first, top)
        return rank_windows(ranks, gamma)

    def ranks(self, drafter: SharedLayersDrafter, outputs: Tensor, tokens: Sequence[int],
              first: int, top: int) -> Tensor:
        """
        Rank of every token from ``first`` on: uint8 [len(tokens) - first].

        outputs [len(tokens) - first, H]: the top's, of the position before each.
        A token that neither the trimmed vocabulary nor the text before holds cannot
        be drafted, hence never ends up between where drafting began and where it
        is judged: the text before the judged token stands for that before the draft.
        """
        logits = drafter.logits_along(outputs, tokens, first)
        trimmed = len(self._head_ids)
        since = drafter.vocabulary.further
        known = {token: trimmed + index for index, token in enumerate(since)}
        wanted = [self._head_places.get(token, known[token] if since.get(token, place) < place
                                        else -1)
                  for place, token in enumerate(tokens[first:], first)]
        return token_ranks(logits, wanted, top)

    def _layer(self, tensors, index: int, config: LlamaConfig) -> LayerWeights:
        shapes = layer_shapes(config)
        bias = f'layers.{index}.qkv_bias'
        return LayerWeights.of(
            {name: self._tensor(tensors, f'layers.{index}.{name}', shape)
             for name, shape in shapes.items() if name != 'qkv_bias' or bias in tensors})

    def _packed(self, tensor: Tensor) -> Tensor | Matrix:
        return pack(tensor.to(device=self.target.device, dtype=self.target.dtype), 'auto')

    def _tensor(self, tensors, name: str, shape: tuple[int, ...]) -> Tensor | Matrix:
        tensor = tensors.get(name)
        if tensor is None:
            raise BundleError(f'draft {self.id!r}: tensor {name} is missing')
        if tuple(tensor.shape) != shape:
            raise BundleError(f'draft {self.id!r}: tensor {name} is {tuple(tensor.shape)}, '
                              f'this target needs {shape}: it was made for another one')
        if isinstance(tensor, Matrix) or tensor.is_mkldnn:
            return tensor
        # A vector left in the file's buffer would keep all of it beside the packed matrices.
        return tensor.to(device=self.target.device, dtype=self.target.dtype,
                         copy=len(shape) == 1)


def _count(spec, name: str, most: int, least: int = 1) -> int:
    value = spec.options.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise BundleError(f'draft {spec.id!r}: {name} is {value!r}, expected {least}..{most}')
    return value
