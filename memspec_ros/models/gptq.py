# SPDX-License-Identifier: Apache-2.0
"""
GPTQ checkpoints, read without a library.

A matrix [out, in] is stored as ``qweight`` (levels, packed along the inputs into
int32), ``scales`` [groups, out], ``qzeros`` (zero levels, packed along the
outputs) and ``g_idx`` [in], the group of each input: with act-order inputs of a
group are not neighbours. A weight is (level - zero) * scale. Checkpoints of
format ``gptq`` hold every zero less one, those of ``gptq_v2`` as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
import torch.nn.functional as F

from .errors import BundleError, UnsupportedModelError
from .quantized import has_int4, Int4Matrix, kernel_group, KERNEL_GROUPS, Matrix, StackedMatrix
from .weights import Checkpoint, StoredTable

BITS = (2, 4, 8)
_FORMATS = ('gptq', 'gptq_v2')
_PARTS = ('.qweight', '.qzeros', '.scales', '.g_idx')
_REMEDY = 'the checkpoint is damaged or incomplete: fetch or quantise it again'


@dataclass(frozen=True)
class GptqSettings:
    """What ``quantization_config`` says; ``group_size`` -1 is one group for all inputs."""

    bits: int
    group_size: int
    zeros_less_one: bool
    mixed: bool

    @classmethod
    def from_config(cls, raw: Mapping) -> GptqSettings:
        """Raises UnsupportedModelError for what is no GPTQ known here."""
        method = raw.get('quant_method', 'gptq')
        if method != 'gptq':
            raise UnsupportedModelError(
                f'quantization_config: quant_method {method!r} is not supported; use a GPTQ '
                'checkpoint, or make one of the unquantised model with `memspec quantize`')
        form = raw.get('checkpoint_format') or 'gptq'
        if form not in _FORMATS:
            raise UnsupportedModelError(
                f'quantization_config: checkpoint_format {form!r} is not supported '
                f'({", ".join(_FORMATS)} are)')
        bits, group = raw.get('bits'), raw.get('group_size')
        if bits not in BITS:
            raise UnsupportedModelError(f'quantization_config: bits is {bits!r}, supported are '
                                        f'{", ".join(map(str, BITS))}')
        if not isinstance(group, int) or isinstance(group, bool) or group == 0 or group < -1:
            raise UnsupportedModelError(f'quantization_config: group_size is {group!r}, expected '
                                        'a number of inputs, or -1 for all')
        return cls(bits, group, form == 'gptq', bool(raw.get('dynamic')))


@dataclass(frozen=True, eq=False)
class GptqMatrix(Matrix):
    """
    One matrix as stored; ``dtype`` is the type that is computed in.

    ``groups`` [in] int64 is the group of each input, ``zeros`` [groups, out] the
    zero levels (unpacked, int32), ``scales`` [groups, out].
    """

    name: str
    bits: int
    qweight: Tensor
    zeros: Tensor
    scales: Tensor
    groups: Tensor
    dtype: torch.dtype = torch.float32

    kind = 'gptq'

    @property
    def shape(self) -> tuple[int, int]:
        return self.qweight.shape[1], len(self.groups)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.qweight, self.zeros, self.scales, self.groups))

    def to(self, device: torch.device, dtype: torch.dtype) -> GptqMatrix:
        """On ``device``, to compute in ``dtype``."""
        moved = {name: getattr(self, name).to(device)
                 for name in ('qweight', 'zeros', 'scales', 'groups')}
        return replace(self, dtype=dtype, **moved)

    def dequantize(self) -> Tensor:
        """The weights [out, in] in ``dtype``."""
        levels = unpack(self.qweight, self.bits)
        scales = self.scales.float()[self.groups]
        return ((levels - self.zeros[self.groups]) * scales).t().to(self.dtype).contiguous()

    def multiply(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dequantize())

    def int4(self) -> Int4Matrix | None:
        """For PyTorch's INT4 kernels; None where they cannot hold it."""
        out, width = self.shape
        if self.bits > 4 or not has_int4(self.scales.device, self.dtype, out):
            return None
        order = None
        groups = self.groups
        if bool((groups[1:] < groups[:-1]).any()):
            groups, order = groups.sort(stable=True)
        # A group of theirs must lie within one of the checkpoint's.
        size = next((size for size in KERNEL_GROUPS if width % size == 0 and bool(
            (groups.view(-1, size) == groups[::size, None]).all())), None)
        if size is None:
            return None
        levels = unpack(self.qweight, self.bits)
        levels = (levels if order is None else levels[order]).t().contiguous()
        return Int4Matrix(levels, self.scales.float()[groups[::size]],
                          self.zeros[groups[::size]].float(), size, self.dtype, order)

    @classmethod
    def fuse(cls, parts: Sequence[GptqMatrix]) -> Matrix:
        """One matrix of several that read the same input; stacked where their groups differ."""
        first = parts[0]
        if any(part.bits != first.bits or not torch.equal(part.groups, first.groups)
               for part in parts[1:]):
            return StackedMatrix(parts)
        joined = {name: torch.cat([getattr(part, name) for part in parts], 1)
                  for name in ('qweight', 'zeros', 'scales')}
        return replace(first, **joined)


def unpack(words: Tensor, bits: int) -> Tensor:
    """int32 words [n, m] -> the values in them, lowest bits first: int32 [n * 32 / bits, m]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    values = (words[:, None] >> shifts[:, None]) & (1 << bits) - 1
    return values.reshape(-1, words.shape[1])


def pack_words(values: Tensor, bits: int) -> Tensor:
    """The reverse of ``unpack``: values [n, m] -> int32 words [n * bits / 32, m]."""
    per_word = 32 // bits
    shifts = torch.arange(0, 32, bits, device=values.device)
    words = (values.long().view(-1, per_word, values.shape[1]) << shifts[:, None]).sum(1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def _ones(bits: int) -> int:
    """A word that holds 1 in every field, as a signed number."""
    return sum(1 << shift for shift in range(0, 32, bits))


class GptqCheckpoint(Mapping):
    """
    A checkpoint under the names of the unquantised model.

    ``…q_proj.weight`` is a GptqMatrix where ``…q_proj.qweight`` is stored;
    everything else is a Tensor. Use as a context manager.
    """

    def __init__(self, files: Checkpoint, settings: GptqSettings):
        self._files = files
        self.settings = settings
        self._quantised = {name.removesuffix('.qweight') for name in files
                           if name.endswith('.qweight')}
        if not self._quantised:
            self.close()
            raise BundleError('config.json speaks of GPTQ, but no tensor is quantised (none is '
                              'named …qweight): remove quantization_config, or ' + _REMEDY)

    def __enter__(self) -> GptqCheckpoint:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files."""
        self._files.close()

    def __getitem__(self, name: str) -> Tensor | GptqMatrix:
        base = name.removesuffix('.weight')
        if base != name and base in self._quantised:
            return self._matrix(base)
        return self._files[name]

    def __iter__(self) -> Iterator[str]:
        for name in self._files:
            base, dot, part = name.rpartition('.')
            if base not in self._quantised or dot + part not in _PARTS:
                yield name
            elif part == 'qweight':
                yield f'{base}.weight'

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor or matrix, without reading it."""
        base = name.removesuffix('.weight')
        if base == name or base not in self._quantised:
            return self._files.shape(name)
        rows, out = self._files.shape(f'{base}.qweight')
        return out, rows * 32 // self.settings.bits

    def table(self, name: str, dtype: torch.dtype) -> StoredTable:
        """An unquantised matrix that stays in its file."""
        return self._files.table(name, dtype)

    def int4_group(self, name: str) -> int | None:
        """The group that INT4 kernels can take a matrix in, judged by its shape; or None."""
        base = name.removesuffix('.weight')
        if base == name or base not in self._quantised or self.settings.bits > 4:
            return None
        size = self.settings.group_size
        return kernel_group(self.shape(name)[1], None if size == -1 else size)

    def _matrix(self, base: str) -> GptqMatrix:
        settings = self.settings

        def need(part: str) -> Tensor:
            if base + part not in self._files:
                raise BundleError(f'tensor {base}{part} is missing: {_REMEDY}')
            return self._files[base + part]

        def refuse(part: str, what: str) -> None:
            raise BundleError(f'tensor {base}{part} {what}: {_REMEDY}')

        qweight, qzeros, scales = need('.qweight'), need('.qzeros'), need('.scales')
        for part, tensor in (('.qweight', qweight), ('.qzeros', qzeros)):
            if tensor.dtype != torch.int32 or tensor.dim() != 2:
                refuse(part, f'is {tensor.dtype} of {tensor.dim()} dimensions, expected a matrix '
                             'of torch.int32')
        if scales.dim() != 2 or not scales.is_floating_point():
            refuse('.scales', f'is {scales.dtype} of {scales.dim()} dimensions')
        count, out = scales.shape
        index = self._files[f'{base}.g_idx'] if f'{base}.g_idx' in self._files else None
        # Where bits differ from matrix to matrix (gptqmodel's `dynamic`), its shapes tell them.
        bits = settings.bits
        if settings.mixed and index is not None:
            bits = qweight.shape[0] * 32 // max(1, len(index))
        if bits not in BITS:
            refuse('.qweight', f'has {bits} bits a weight by its shape')
        width = qweight.shape[0] * 32 // bits
        size = width if settings.group_size == -1 else settings.group_size
        expected = -(-width // size)
        if count != expected and not settings.mixed:
            raise BundleError(
                f'tensor {base}.scales has {count} groups, with group_size '
                f'{settings.group_size} of config.json {width} inputs make {expected}: set '
                'quantization_config.bits and group_size to what the checkpoint was made with')
        if qweight.shape[1] != out:
            refuse('.qweight', f'has {qweight.shape[1]} outputs, scales have {out}')
        if tuple(qzeros.shape) != (count, out * bits // 32):
            refuse('.qzeros', f'is {tuple(qzeros.shape)}, expected {(count, out * bits // 32)}')
        if not bool(torch.isfinite(scales).all()):
            refuse('.scales', 'holds values that are no numbers (NaN or infinite)')
        groups = (torch.arange(width) // -(-width // count) if index is None else index).long()
        if len(groups) != width or not 0 <= int(groups.min()) <= int(groups.max()) < count:
            refuse('.g_idx', f'does not give each of {width} inputs one of {count} groups')
        if settings.zeros_less_one:
            # As one number, which undoes how the writers subtract: carries included.
            one = torch.tensor(_ones(bits), dtype=torch.int32)
            qzeros = qzeros + one
        zeros = unpack(qzeros.t().contiguous(), bits).t().contiguous()
        return GptqMatrix(base, bits, qweight, zeros, scales, groups)
