# SPDX-License-Identifier: Apache-2.0
"""``generate`` of transformers on the target's weights, as a contender."""

from __future__ import annotations

from pathlib import Path
import time

import torch

from ..models.target import load_reference
from ..runtime.requests import GenerationRequest
from ..runtime.runtime import Runtime
from .race import Answer


class TransformersPeer:
    """The target of ``runtime`` in transformers: same weights, type, device, stop ids."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self._model = self.load(runtime.bundle.target_path)

    def load(self, directory: Path):
        """A causal LM of a directory, as the target is loaded."""
        target = self._runtime.target
        return load_reference(directory, target.dtype, target.device)

    @torch.inference_mode()
    def answer(self, prompt: str, limit: int, **options) -> Answer:
        """Greedy; ``options`` are those of ``generate``."""
        start = time.perf_counter()
        request = self._runtime.prepare(GenerationRequest(prompt, max_new_tokens=limit))
        ids = torch.tensor([request.prompt_ids], device=self._model.device)
        output = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False,
            eos_token_id=sorted(self._runtime.controller.stop_ids), **options)
        return Answer(output[0, ids.shape[1]:].tolist(), time.perf_counter() - start)
