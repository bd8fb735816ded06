# SPDX-License-Identifier: Apache-2.0
"""
Making acceptance traces: the target's greedy outputs, and every draft held against them.

One pass of the target over a prompt and its output gives the hidden states at
all positions; each draft then says from them (or from the tokens) at which rank
it has every token of the output. Nothing is decoded draft by draft.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..models.bundle import Bundle, MANIFEST_NAME
from ..models.drafts import KINDS
from ..models.state import TargetRun
from ..models.target import LlamaTarget, Target
from ..models.weights import file_sha256, read_tensors
from .outputs import content_key, generate_batch, OutputRecord, OutputStore, read_prompts
from .trace_store import Trace, TraceError, TraceHeader, TraceStore

OUTPUTS_NAME = 'outputs.jsonl'
# Ranks recorded: a tree of few rows has no use for more.
RANKS = 8
BATCH = 16


@dataclass(frozen=True)
class TracePrompt:
    """A prompt to trace: ``ids`` is what the chat template makes of ``text``."""

    domain: str
    text: str
    ids: list[int]

    @cached_property
    def key(self) -> str:
        """Name of its trace."""
        return content_key(self.ids)


def collect_prompts(files: Iterable[Path], encode: Callable[[str], list[int]],
                    prompt_tokens: int, per_domain: int = 0) -> list[TracePrompt]:
    """
    The prompts of ``files``, each once, at most ``per_domain`` (0: all) of a domain.

    Cut and skipped as ``memspec distill`` does, so that its outputs fit: text
    beyond four characters a token is cut off, what then has more than
    ``prompt_tokens`` tokens is skipped. Raises PromptFileError naming the line.
    """
    chosen: dict[str, TracePrompt] = {}
    counts: dict[str, int] = defaultdict(int)
    for file in files:
        for domain, text in read_prompts(file):
            if per_domain and counts[domain] >= per_domain:
                continue
            text = text[:4 * prompt_tokens]
            prompt = TracePrompt(domain, text, encode(text))
            if 0 < len(prompt.ids) <= prompt_tokens and prompt.key not in chosen:
                chosen[prompt.key] = prompt
                counts[domain] += 1
    return list(chosen.values())


def read_outputs(path: Path) -> dict[str, list[int]]:
    """Outputs of a store by the key of their prompt; TraceError where it is none."""
    try:
        return {content_key(record.prompt_ids): record.output_ids for record in OutputStore(path)}
    except OSError as error:
        raise TraceError(f'{path}: {error.strerror or error}') from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(f'{path}: not a store of outputs ({type(error).__name__}: {error})'
                         ) from error


class Tracer:
    """
    Traces prompts on one bundle; all its drafts are held in memory.

    ``capacity``: positions of the longest prompt with its output.
    """

    def __init__(self, bundle: Bundle, target: Target, stop_ids: frozenset[int], dtype: str,
                 capacity: int, max_new_tokens: int = 128, gamma: int = 8, hidden_every: int = 4):
        self.target = target
        self.stop_ids = stop_ids
        self.header = TraceHeader(
            file_sha256(bundle.directory / MANIFEST_NAME),
            tuple(spec.id for spec in bundle.drafts), gamma, RANKS, hidden_every, dtype,
            max_new_tokens)
        self._drafts = []
        for spec in bundle.drafts:
            file = bundle.weight_file(spec)
            self._drafts.append((KINDS[spec.kind](spec, bundle, target, capacity + gamma + 1),
                                 {} if file is None else read_tensors(file, spec.sha256)))
        # Drafts that copy from the text before; made of nothing, they are asked themselves.
        self.copiers = frozenset(
            spec.id for spec, (kind, tensors) in zip(bundle.drafts, self._drafts)
            if kind.slot_free and kind.attach(tensors).copies)
        depths = frozenset().union(*(kind.depths for kind, _ in self._drafts))
        self._state = target.new_state(capacity, depths | {target.layers})

    def outputs(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """Greedy outputs of a batch, as ``run`` wants them (it checks every token)."""
        if not isinstance(self.target, LlamaTarget):
            return [[] for _ in prompts]  # no batches on this path: ``run`` decodes
        return generate_batch(self.target.model, list(prompts), self.header.max_new_tokens,
                              self.stop_ids)

    @torch.inference_mode()
    def run(self, prompt: list[int], output: list[int], given: bool = False) -> TargetRun:
        """
        Pass the target over a prompt and the greedy output that it is said to have.

        A batch's padding and another type change last bits, and where two
        tokens are next to equal the argmax with them. So ``output`` is taken as
        far as it is what this pass says too; the rest is decoded from there,
        row by row, up to a stop token or the limit. ``given``: it is taken as it
        is, for what decoding wrote whose kernels' last bits are others.
        """
        state, limit = self._state, self.header.max_new_tokens
        state.hold(0)
        if prompt[:-1]:
            self.target.forward(state, prompt[:-1], last_only=True)
            state.hold(len(prompt) - 1)
        output = output[:limit]
        choices = self.target.forward(state, [prompt[-1], *output]).argmax(-1).tolist()
        tokens = [*prompt, *(output if given else self._checked(prompt, output, choices))]
        return TargetRun(tokens, {depth: hidden[:len(tokens)].clone()
                                  for depth, hidden in state.hidden.items()})

    def _checked(self, prompt: list[int], output: list[int], choices: list[int]) -> list[int]:
        """``output`` as far as it is what the target chooses, and from there what it decodes."""
        state = self._state
        checked: list[int] = []
        while (len(checked) < len(output) and output[len(checked)] == choices[len(checked)]
               and not self._ended(checked)):
            checked.append(output[len(checked)])
        state.hold(len(prompt) + len(checked))
        choice = choices[len(checked)]
        while not self._ended(checked):
            checked.append(choice)
            choice = int(self.target.forward(state, [choice])[-1].argmax())
            state.hold(len(prompt) + len(checked))
        return checked

    def _ended(self, output: list[int]) -> bool:
        return bool(output) and (output[-1] in self.stop_ids
                                 or len(output) >= self.header.max_new_tokens)

    @torch.inference_mode()
    def trace(self, prompt: TracePrompt, output: list[int], given: bool = False) -> Trace:
        """The trace of a prompt; ``output`` and ``given`` as in ``run``."""
        run, first = self.run(prompt.ids, output, given), len(prompt.ids)
        ranks = [kind.rollout_ranks(tensors, run, first, self.header.gamma, RANKS).cpu()
                 for kind, tensors in self._drafts]
        shape = (len(run.tokens) - first, self.header.gamma)
        for draft, found in zip(self.header.drafts, ranks):
            # A kind's mistake would otherwise be a wrong figure.
            if tuple(found.shape) != shape or found.dtype != torch.uint8:
                raise TraceError(f'draft {draft!r}: ranks are {found.dtype} '
                                 f'{list(found.shape)}, expected uint8 {list(shape)}')
        empty = torch.zeros(0, *shape, dtype=torch.uint8)
        return Trace(prompt.key, prompt.domain, prompt.text, np.array(prompt.ids, np.int32),
                     np.array(run.tokens[first:], np.int32),
                     (torch.stack(ranks) if ranks else empty).numpy(), self._hidden(run, first))

    def _hidden(self, run: TargetRun, first: int) -> np.ndarray | None:
        if not self.header.hidden_every:
            return None
        places = torch.arange(first - 2, len(run.tokens) - 2, self.header.hidden_every)
        last: Tensor = run.hidden[self.target.layers].float().cpu()
        rows = last[places.clamp(min=0)] * (places >= 0)[:, None]
        # Models have single outsized components, which float16 may not reach.
        most = torch.finfo(torch.float16).max
        return rows.clamp(-most, most).to(torch.float16).numpy()


def fill_traces(store: TraceStore, tracer: Tracer, prompts: Iterable[TracePrompt],
                given: Mapping[str, list[int]] | None = None, batch: int = BATCH,
                report: Callable[[int, int], None] | None = None) -> None:
    """
    Trace what the store lacks of ``prompts``.

    Outputs are generated a batch at a time into a store of their own in the
    same directory, ``given`` ones (by key) are used instead: what an
    interruption loses is one batch of outputs, or one trace. ``report`` is
    called with (prompts done, prompts in all). Raises TraceError.
    """
    store.create(tracer.header)
    outputs = OutputStore(store.directory / OUTPUTS_NAME)
    known = {**(given or {}), **read_outputs(outputs.path)}
    have = store.keys()
    # Prompts of like length in a batch: padding is work thrown away.
    missing = sorted((prompt for prompt in prompts if prompt.key not in have),
                     key=lambda prompt: len(prompt.ids))
    for done in range(0, len(missing), batch):
        group = missing[done:done + batch]
        lacking = [prompt for prompt in group if prompt.key not in known]
        if lacking:
            made = tracer.outputs([prompt.ids for prompt in lacking])
            _append(outputs, [OutputRecord(prompt.key, prompt.domain, prompt.ids, output)
                              for prompt, output in zip(lacking, made)])
            known.update((prompt.key, output) for prompt, output in zip(lacking, made))
        for number, prompt in enumerate(group, done + 1):
            store.add(tracer.trace(prompt, known[prompt.key]))
            if report:
                report(number, len(missing))


def _append(outputs: OutputStore, records: list[OutputRecord]) -> None:
    try:
        outputs.append(records)
    except OSError as error:
        # A record cut short is dropped when the store is read.
        raise TraceError(f'{outputs.path}: {error.strerror or error}; what was written before '
                         'is kept, run the same command again to go on') from error
