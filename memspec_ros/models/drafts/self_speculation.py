# SPDX-License-Identifier: Apache-2.0
"""
Self-speculation: the target drafts for itself, and no draft is in memory.

Its lower layers guess the next tokens through an exit; a further exit higher up
checks several guesses in one pass and corrects the first that is wrong; the
whole target verifies what came of that. A token passes through every layer
once: the check goes on from what the guesses have computed, the verification
from what the check has. After CATS (2026), whose exits lie where layers are in
memory and where they are streamed.

An exit is a small adapter, the norm before the head and the head, trimmed where
the bundle has a trimmed vocabulary. Without trained weights it is the target's
own norm and head: a target whose layers were trained to allow that needs no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
import torch.nn.functional as F

from ..errors import BundleError, UnsupportedModelError
from ..packing import linear, pack
from ..quantized import Matrix
from ..state import DecodeState, Proposal
from ..target import LlamaTarget
from ..weights import read_tensors
from .base import Drafter, DraftKind
from .vocabulary import TextVocabulary

# Guesses that one pass of the check judges, unless the bundle says otherwise.
DEFAULT_RUN = 3


@dataclass(frozen=True)
class Adapter:
    """
    What brings hidden states of a lower layer nearer to those of the last: a narrow MLP.

    input_norm [H], gate_up [2 * rank, H], down [H, rank]. It works on the normed
    states, whose sizes are alike, and its result is normed again.
    """

    input_norm: Tensor
    gate_up: Tensor | Matrix
    down: Tensor | Matrix

    NAMES = ('input_norm', 'gate_up', 'down')

    def __call__(self, x: Tensor, eps: float) -> Tensor:
        """[..., H] -> [..., H]."""
        x = F.rms_norm(x, x.shape[-1:], self.input_norm, eps)
        gate, up = linear(x, self.gate_up).chunk(2, dim=-1)
        return x + linear(F.silu(gate) * up, self.down)


@dataclass(frozen=True)
class Exit:
    """
    A way out of the target after ``depth`` layers.

    norm: Tensor [H]. head: [V, H], V being the exit's vocabulary.
    """

    depth: int
    norm: Tensor
    head: Tensor | Matrix
    eps: float
    adapter: Adapter | None = None

    def logits(self, x: Tensor, further: Tensor | None = None) -> Tensor:
        """Hidden states [..., H] -> logits [..., V and rows of ``further``]."""
        x = x.to(self.norm.dtype)
        if self.adapter is not None:
            x = self.adapter(x, self.eps)
        normed = F.rms_norm(x, x.shape[-1:], self.norm, self.eps)
        logits = linear(normed, self.head)
        return logits if further is None else torch.cat([logits, linear(normed, further)], -1)

    @property
    def bytes(self) -> int:
        """Bytes that a token reads, the head left out."""
        parts = [self.norm, *(() if self.adapter is None else
                              (getattr(self.adapter, name) for name in Adapter.NAMES))]
        return sum(part.nbytes for part in parts)


class SelfSpeculationDrafter(Drafter):
    """
    Guesses by the lower exit, corrects by the upper one.

    With a check, what is proposed is what the upper exit says, token for token,
    and so are the distributions passed on: the lower one only makes it cheaper
    to find out. run: guesses a pass of the check judges.
    """

    bridges = True

    def __init__(self, target: LlamaTarget, lower: Exit, check: Exit | None, run: int,
                 vocabulary: TextVocabulary | None):
        super().__init__()
        self.target = target
        self.lower = lower
        self.check = check
        self.run = run
        self.vocabulary = vocabulary

    @torch.inference_mode()
    def propose(self, state: DecodeState, gamma: int) -> Proposal:
        ids = further = None
        if self.vocabulary is not None:
            self.vocabulary.follow(state.tokens)
            ids = self.vocabulary.ids
            further = self.vocabulary.further_rows(self.target.model.head_rows)
        choices: list[tuple[int, Tensor | None]] = []
        while len(choices) < gamma:
            room = gamma - len(choices)
            tokens = [token for token, _ in choices]
            guesses = self._guess(state, tokens, min(room, self.run if self.check else room),
                                  ids, further)
            if self.check is None:
                return Proposal.of(guesses)
            found = self._check(state, tokens, [token for token, _ in guesses], ids, further)
            choices += found
            if not found or (len(found) < len(guesses)
                             and found[-1][0] == guesses[len(found) - 1][0]):
                break  # an exit was not sure enough to go on
        return Proposal.of(choices)

    def _guess(self, state: DecodeState, before: list[int], count: int, ids: Tensor | None,
               further: Tensor | None) -> list[tuple[int, Tensor | None]]:
        """At most ``count`` choices of the lower exit to follow ``before``."""
        choices: list[tuple[int, Tensor | None]] = []
        for _ in range(count):
            drafted = before + [token for token, _ in choices]
            x = self.target.run_to(state, [state.tokens[-1], *drafted], self.lower.depth)
            choice = state.choose(self.lower.logits(x[-1], further), drafted, ids)
            if choice is None:
                break
            choices.append(choice)
        return choices

    def _check(self, state: DecodeState, before: list[int], guesses: list[int],
               ids: Tensor | None, further: Tensor | None) -> list[tuple[int, Tensor | None]]:
        """Choices of the upper exit in place of ``guesses``, up to the first that differs."""
        choices: list[tuple[int, Tensor | None]] = []
        if not guesses:
            return choices
        x = self.target.run_to(state, [state.tokens[-1], *before, *guesses[:-1]],
                               self.check.depth)[len(before):]
        for guess, row in zip(guesses, self.check.logits(x, further)):
            choice = state.choose(row, before + [token for token, _ in choices], ids)
            if choice is None:
                break
            choices.append(choice)
            if choice[0] != guess:
                break
        return choices

    def step_bytes(self, state: DecodeState) -> int:
        return (self.target.lower_bytes(state, self.lower.depth) + self.lower.bytes
                + self.lower.head.nbytes)


class SelfSpeculationKind(DraftKind):
    """
    Slot-free. Options: ``depth`` (layers that draft), ``check`` (layers up to the exit that
    checks, 0 or absent for none), ``run`` (guesses that it checks at once).

    A file holds for each depth D of the two ``D.norm`` [H], ``D.input_norm`` [H],
    ``D.gate_up`` [2 * rank, H] and ``D.down`` [H, rank]; there need not be one.
    """

    slot_free = True
    option_names = frozenset({'depth', 'check', 'run'})

    def __init__(self, spec, bundle, target, capacity):
        if not isinstance(target, LlamaTarget):
            raise UnsupportedModelError(
                f'{spec.kind}: needs a target on the lean path (llama, qwen2), whose passes can '
                'pause between layers')
        self.id = spec.id
        self.target = target
        last = target.layers - 1
        self.depth = _count(spec, 'depth', 1, last)
        self.check = _count(spec, 'check', self.depth + 1, last) if spec.options.get(
            'check') else None
        self.run = _count(spec, 'run', 1, 16) if 'run' in spec.options else DEFAULT_RUN
        self.stops = frozenset({self.depth, self.check} - {None})
        self._head_ids = bundle.head_token_ids()
        self._head = (target.model.head if self._head_ids is None
                      else bundle.shared_head_of(target))
        path = bundle.weight_file(spec)
        tensors = {} if path is None else read_tensors(path, spec.sha256)
        self._exits = [self._exit(depth, tensors) for depth in sorted(self.stops)]

    def attach(self, tensors: Mapping[str, Tensor]) -> Drafter:
        vocabulary = None
        if self._head_ids is not None:
            places = {token: place for place, token
                      in reversed(list(enumerate(self._head_ids)))}
            vocabulary = TextVocabulary(
                torch.tensor(self._head_ids, device=self.target.device), places)
        lower, check = self._exits if self.check else (self._exits[0], None)
        return SelfSpeculationDrafter(self.target, lower, check, self.run, vocabulary)

    def _exit(self, depth: int, tensors: Mapping[str, Tensor]) -> Exit:
        model, eps = self.target.model, self.target.model.config.norm_eps
        if not tensors:
            return Exit(depth, model.norm, self._head, eps)
        width = model.config.hidden_size
        gate_up = tensors.get(f'{depth}.gate_up')
        rank = 0 if gate_up is None else gate_up.shape[0] // 2
        norm, input_norm, gate_up, down = (
            self._tensor(tensors, f'{depth}.{name}', shape) for name, shape in (
                ('norm', (width,)), ('input_norm', (width,)), ('gate_up', (2 * rank, width)),
                ('down', (width, rank))))
        return Exit(depth, norm, self._head, eps, Adapter(input_norm, pack(gate_up), pack(down)))

    def _tensor(self, tensors: Mapping[str, Tensor], name: str, shape: Sequence[int]) -> Tensor:
        tensor = tensors.get(name)
        if tensor is None:
            raise BundleError(f'{self.id}: tensor {name} is missing; there are exits after '
                              f'{_depths_in(tensors)} layers')
        if tuple(tensor.shape) != tuple(shape):
            raise BundleError(f'{self.id}: tensor {name} is {tuple(tensor.shape)}, this target '
                              f'needs {tuple(shape)}: it was made for another one')
        if not bool(torch.isfinite(tensor.float()).all()):
            raise BundleError(f'{self.id}: tensor {name} holds values that are no numbers')
        # A view would keep the whole file beside what is packed of it.
        return tensor.to(device=self.target.device, dtype=self.target.dtype, copy=True)


def _depths_in(tensors: Mapping[str, Tensor]) -> str:
    depths = sorted({int(name.split('.')[0]) for name in tensors if name.split('.')[0].isdigit()})
    return ', '.join(map(str, depths)) or 'no'


def _count(spec, name: str, least: int, most: int) -> int:
    value = spec.options.get(name)
    if type(value) is not int or not least <= value <= most:
        raise BundleError(f'{spec.id}: {name} is {value!r}, expected {least}..{most}')
    return value
