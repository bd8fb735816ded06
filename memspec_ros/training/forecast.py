# SPDX-License-Identifier: Apache-2.0
"""What a distillation will take, to be said before it begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..models.layers import layer_elements
from ..models.llama import Llama
from ..models.llama_config import LlamaConfig
from .lessons import ExitShape, TopShape
from .outputs import OutputRecord
from .student import StudentShape
from .teacher import positions_per_second, TeacherStore

# Records that the target is timed on.
_TIMED = 4
# Bytes a trained parameter takes: itself, its gradient, two moments, and copies of them.
_PARAMETER_BYTES = 64


def forecast(target: Llama, teacher: TeacherStore, shape: TopShape | ExitShape | StudentShape,
             records: Sequence[OutputRecord], held_out: Sequence[OutputRecord],
             passes: Sequence[float], vocabulary: int, ahead: int) -> str:
    """
    Time, disk and memory that lessons and training will take, in two lines; '' for none.

    passes: positions each draft still to be made will learn from, epochs counted.
    The target is timed here, on a few of the records; training is taken to do as
    many multiply-adds a second.
    """
    missing = teacher.missing([*records, *held_out])
    if not missing and not passes:
        return ''
    config = target.config
    speed = positions_per_second(target, records[:_TIMED])
    todo = _positions(missing)
    # A feature draft is run several steps ahead.
    steps = 1 + 0.6 * (ahead - 1) if shape.kind == 'feature' else 1
    cost = steps * shape.products(config, vocabulary) / _forward_products(config)
    disk = teacher.bytes_needed(missing, config.hidden_size)
    memory = (teacher.bytes_needed([*records, *held_out], config.hidden_size)
              + _PARAMETER_BYTES * shape.parameters(config))
    return (f'lessons: {todo} positions, about {_duration(todo / speed)}, '
            f'{disk / 1e9:.2f} GB of disk\n'
            f'training: {len(passes)} drafts, {sum(passes) / 1e6:.2f} million positions, '
            f'about {_duration(sum(passes) * cost / speed)}, {memory / 1e9:.2f} GB of memory')


def _forward_products(config: LlamaConfig) -> int:
    """Multiply-adds of what is timed, a position: all layers and the whole head."""
    return config.layers * layer_elements(config) + config.vocab_size * config.hidden_size


def _positions(records: Iterable[OutputRecord]) -> int:
    return sum(len(record.prompt_ids) + len(record.output_ids) for record in records)


def _duration(seconds: float) -> str:
    return f'{seconds:.0f} s' if seconds < 100 else f'{seconds / 60:.0f} min'
