# SPDX-License-Identifier: Apache-2.0
"""
What the target thinks of its outputs, computed once: lessons for any number of drafts.

One teacher-forced pass over each record gives the target's distribution at every
position (its ``top`` likeliest tokens) and the hidden states that drafts read.
They are kept on disk in chunks, written whole: an interrupted run loses at most
the chunk it was in. Training then needs the target no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
import errno
import hashlib
import json
from pathlib import Path
import time

from safetensors import safe_open, SafetensorError
from safetensors.torch import save_file
import torch
from torch import Tensor
import torch.nn.functional as F

from ..models.errors import MemSpecError
from ..models.layers import causal_mask, run_layer_uncached
from ..models.llama import Llama
from .outputs import OutputRecord

_CHUNK_RECORDS = 64
_BATCH = 8


@dataclass(frozen=True)
class Lesson:
    """
    One record as the target sees it; n positions, those of prompt and output.

    tokens int32 [n]. top_ids int32 and top_logprobs float16 [n, top]: what the
    target expects to follow each position, likeliest first. hidden: depth ->
    bfloat16 [n, H]. first: the prompt's length.
    """

    key: str
    domain: str
    first: int
    tokens: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    hidden: dict[int, Tensor]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def output_tokens(self) -> int:
        """Tokens of the output."""
        return len(self.tokens) - self.first


def weights_sha256(target: Llama) -> str:
    """
    Hash of every weight of the target as it is held, type and all: 64 hexadecimal digits.

    Lessons and outputs are what just these numbers make, so that any change of them
    begins new ones. Draft files name their target more loosely (models.fingerprint):
    they serve it in other types and quantised too.
    """
    digest = hashlib.sha256()
    for tensor in (target.embedding, target.norm, *(
            tensor for layer in target.layers for tensor in layer.tensors().values())):
        digest.update(tensor.detach().contiguous().cpu().view(torch.uint8).numpy())
    return digest.hexdigest()


class TeacherStore:
    """Lessons of one target, with hidden states at ``depths``, below ``directory``."""

    def __init__(self, directory: Path, target_name: str, depths: Iterable[int], top: int = 32):
        self.depths = tuple(sorted(depths))
        self.top = top
        made = json.dumps([target_name, self.depths, top])
        self.directory = directory / hashlib.sha256(made.encode()).hexdigest()[:12]
        self._places: dict[str, tuple[Path, int]] = {}
        self._chunks: dict[Path, dict[str, Tensor]] = {}
        for path in sorted(self.directory.glob('*.safetensors')):
            self._index(path)

    def missing(self, records: Iterable[OutputRecord]) -> list[OutputRecord]:
        """Records without a lesson, each once."""
        return list({record.key: record for record in records
                     if record.key not in self._places}.values())

    def bytes_needed(self, records: Iterable[OutputRecord], width: int) -> int:
        """What lessons of ``records`` take, on disk or in memory; ``width`` is the target's."""
        positions = sum(len(record.prompt_ids) + len(record.output_ids) for record in records)
        return positions * (2 * width * len(self.depths) + 6 * self.top + 4)

    def fill(self, target: Llama, records: Sequence[OutputRecord],
             report: Callable[[int, int], None] | None = None) -> None:
        """Make the lessons that are missing; ``report`` gets (done, in all) of them."""
        missing = self.missing(records)
        missing.sort(key=lambda record: len(record.prompt_ids) + len(record.output_ids))
        self.directory.mkdir(parents=True, exist_ok=True)
        for first in range(0, len(missing), _CHUNK_RECORDS):
            chunk = missing[first:first + _CHUNK_RECORDS]
            self._write(chunk, _think(target, chunk, self.depths, self.top))
            if report:
                report(first + len(chunk), len(missing))

    def lesson(self, record: OutputRecord) -> Lesson:
        """The lesson of a record; KeyError where it was not made."""
        path, row = self._places[record.key]
        chunk = self._chunks.get(path)
        if chunk is None:
            with safe_open(path, 'pt') as file:
                chunk = self._chunks[path] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        start, end = chunk['edges'][row:row + 2].tolist()
        return Lesson(record.key, record.domain, len(record.prompt_ids),
                      chunk['tokens'][start:end], chunk['top_ids'][start:end],
                      chunk['top_logprobs'][start:end],
                      {depth: chunk[f'hidden.{depth}'][start:end] for depth in self.depths})

    def observer(self, target: Llama, count: int) -> LessonObserver:
        """To watch a batch of ``count`` prompts being answered."""
        return LessonObserver(target, self.depths, self.top, count)

    def keep(self, records: Sequence[OutputRecord], observer: LessonObserver) -> None:
        """Lessons of a batch that was watched, in the order of its prompts."""
        new = [index for index, record in enumerate(records) if record.key not in self._places]
        if new:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._write([records[index] for index in new], _joined(
                [observer.lesson(index, records[index]) for index in new]))

    def _index(self, path: Path) -> None:
        try:
            with safe_open(path, 'pt') as file:
                keys = json.loads(file.metadata()['keys'])
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise MemSpecError(f'{path}: not a chunk of lessons ({error}); delete it, '
                               'it will be made again') from error
        self._places.update((key, (path, row)) for row, key in enumerate(keys))

    def _write(self, records: Sequence[OutputRecord], tensors: dict[str, Tensor]) -> None:
        path = self.directory / f'{records[0].key}-{len(records)}.safetensors'
        write_whole(path, tensors, {'keys': json.dumps([record.key for record in records])})
        self._index(path)


class LessonObserver:
    """Takes lessons down while a batch is generated; see ``outputs.Observer``."""

    def __init__(self, target: Llama, depths: Sequence[int], top: int, count: int):
        self.depths = depths
        self._target = target
        self._last = target.config.layers
        self._top = top
        self._parts: list[dict[str, list[Tensor]]] = [{} for _ in range(count)]

    def see(self, rows: Sequence[int], skip: Sequence[int], hidden: Mapping[int, Tensor],
            logits: Tensor) -> None:
        new = logits[:, None] if hidden[self._last].shape[1] == 1 else None
        if new is not None:
            best, ids = _likeliest(new, self._top)
            states = {depth: _kept(hidden[depth]) for depth in self.depths}
        for index, (row, first) in enumerate(zip(rows, skip)):
            if new is None:  # a prompt: one after another, all logits at once would be gigabytes
                row_best, row_ids = _likeliest(
                    self._target.logits(hidden[self._last][index, first:]), self._top)
                row_states = {depth: _kept(hidden[depth][index, first:]) for depth in self.depths}
            else:
                row_best, row_ids = best[index], ids[index]
                row_states = {depth: state[index] for depth, state in states.items()}
            part = self._parts[row]
            for name, tensor in (('top_logprobs', row_best), ('top_ids', row_ids),
                                 *((f'hidden.{d}', state) for d, state in row_states.items())):
                part.setdefault(name, []).append(tensor)

    def lesson(self, index: int, record: OutputRecord) -> dict[str, Tensor]:
        """Tensors of the lesson of one prompt of the batch."""
        tokens = torch.tensor(record.prompt_ids + record.output_ids, dtype=torch.int32)
        tensors = {name: torch.cat(parts)[:len(tokens)]
                   for name, parts in self._parts[index].items()}
        # The last token was not run: nothing is learned from what follows it, nor reads it.
        return {'tokens': tokens, **{
            name: F.pad(tensor, (0, 0, 0, len(tokens) - len(tensor)))
            for name, tensor in tensors.items()}}


@torch.inference_mode()
def _think(target: Llama, records: Sequence[OutputRecord], depths: Sequence[int],
           top: int) -> dict[str, Tensor]:
    """The tensors of a chunk; ``edges`` are where its records begin and the last ends."""
    lessons = []
    for first in range(0, len(records), _BATCH):
        rows = [record.prompt_ids + record.output_ids
                for record in records[first:first + _BATCH]]
        longest = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows],
                              device=target.device)
        x = target.embed(tokens)
        rope, mask = target.rope.at(0, longest), causal_mask(longest, longest, x.device)
        hidden = {}
        for depth, weights in enumerate(target.layers, 1):
            x = run_layer_uncached(target.config, weights, x, rope, mask)
            if depth in depths:
                hidden[depth] = x
        for index, row in enumerate(rows):
            best, ids = _likeliest(target.logits(x[index, :len(row)]), top)
            lessons.append({'tokens': tokens[index, :len(row)].int().cpu(), 'top_ids': ids,
                            'top_logprobs': best,
                            **{f'hidden.{depth}': _kept(states[index, :len(row)])
                               for depth, states in hidden.items()}})
    return _joined(lessons)


def _likeliest(logits: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities (float16) and ids (int32) of the ``top`` likeliest tokens [..., top]."""
    best, ids = logits.topk(min(top, logits.shape[-1]))
    return (best - logits.logsumexp(-1, keepdim=True)).half().cpu(), ids.int().cpu()


def _kept(states: Tensor) -> Tensor:
    return states.to('cpu', torch.bfloat16, copy=True)


def _joined(lessons: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    edges = torch.tensor([0, *(len(lesson['tokens']) for lesson in lessons)]).cumsum(0)
    return {'edges': edges, **{name: torch.cat([lesson[name] for lesson in lessons])
                               for name in lessons[0]}}


def positions_per_second(target: Llama, records: Sequence[OutputRecord]) -> float:
    """How fast lessons are made here: measured on a few records."""
    rows = records[:4]
    positions = sum(len(record.prompt_ids) + len(record.output_ids) for record in rows)
    start = time.perf_counter()
    _think(target, rows, (), top=1)
    return positions / (time.perf_counter() - start)


def write_whole(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """
    Write a safetensors file that never carries its name while half-written.

    Raises MemSpecError where the disk is full, leaving nothing behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix('.partial')
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial,
                  metadata=metadata)
        partial.chmod(0o644)  # the writer makes it private; a bundle is for whoever runs the node
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        full = getattr(error, 'errno', None) == errno.ENOSPC or 'No space' in str(error)
        raise MemSpecError(f'{path}: {"the disk is full" if full else error}; make room and run '
                           'the same command again, it goes on from here') from error
