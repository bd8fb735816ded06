# SPDX-License-Identifier: Apache-2.0
"""
Random numbers of a request, keyed by seed, position and purpose.

Nothing is consumed in turn: what is drawn at a position does not depend on how
often, by whom or in which order anything was drawn before. Counter-based
(Philox, Salmon et al. 2011), computed on the CPU, so that a seed means the same
on every device.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

_PURPOSE_BITS = 8
_MASK = 2 ** 64 - 1


class Purpose(IntEnum):
    """What a draw at a position is for: different purposes are independent."""

    TOKEN = 0
    DRAFT = 1
    ACCEPT = 2


class Chance:
    """The draws of one seed."""

    def __init__(self, seed: int):
        self._seed = seed & _MASK
        # A draft and the target draw at the same positions, soon after each other.
        self._noise: dict[tuple[int, Purpose], Tensor] = {}

    def draw(self, probs: Tensor, position: int, purpose: Purpose = Purpose.TOKEN) -> int:
        """
        Draw a token of ``probs`` [V], which need not add up to 1.

        The one with the largest probs / e, e exponential: the Gumbel-max trick.
        Similar distributions are thus likely to give the same token for the
        same position and purpose.
        """
        return int((probs / self._exponential(position, purpose, len(probs), probs.device))
                   .argmax())

    def accepts(self, p: float, q: float, position: int) -> bool:
        """u * q < p, strictly: what the target gives no chance is never accepted."""
        return self._generator(position, Purpose.ACCEPT).random() * q < p

    def forget(self, position: int) -> None:
        """Drop what is kept of positions before this one."""
        self._noise = {key: noise for key, noise in self._noise.items() if key[0] >= position}

    def _exponential(self, position: int, purpose: Purpose, size: int,
                     device: torch.device) -> Tensor:
        key = position, purpose
        if key not in self._noise:
            noise = self._generator(position, purpose).standard_exponential(size)
            # Not 0, which a division would make NaN of where the probability is 0 too.
            self._noise[key] = torch.from_numpy(noise).to(device, torch.float32).clamp_min_(
                torch.finfo(torch.float32).tiny)
        return self._noise[key]

    def _generator(self, position: int, purpose: Purpose) -> np.random.Generator:
        key = np.array([self._seed, position << _PURPOSE_BITS | purpose], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key))
