# SPDX-License-Identifier: Apache-2.0
"""llama.cpp, through llama-cpp-python, as a contender."""

from __future__ import annotations

from pathlib import Path
import time

import torch

from ..runtime.requests import GenerationRequest
from ..runtime.runtime import Runtime
from .race import Answer


class LlamaCppPeer:
    """
    llama.cpp on the weights of ``file``, with as many threads as PyTorch has, stop ids ours.

    positions: most tokens of prompt and answer. lookup_tokens: most tokens of
    its prompt lookup, 0 for plain decoding. Raises ImportError where it is not
    installed, ValueError where it cannot load the file.
    """

    def __init__(self, runtime: Runtime, file: Path, positions: int, lookup_tokens: int = 0):
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
        self._runtime = runtime
        threads = torch.get_num_threads()
        self._model = Llama(
            str(file), n_ctx=positions, n_threads=threads, n_threads_batch=threads, verbose=False,
            n_gpu_layers=-1 if runtime.target.device.type == 'cuda' else 0,
            draft_model=(LlamaPromptLookupDecoding(num_pred_tokens=lookup_tokens)
                         if lookup_tokens else None))

    def answer(self, prompt: str, limit: int) -> Answer:
        """Greedy."""
        start = time.perf_counter()
        request = self._runtime.prepare(GenerationRequest(prompt, max_new_tokens=limit))
        stop_ids, ids = self._runtime.controller.stop_ids, []
        # Else it would keep the prompt of the answer before.
        self._model.reset()
        for token in self._model.generate(request.prompt_ids, temp=0.0, repeat_penalty=1.0):
            ids.append(token)
            if token in stop_ids or len(ids) == limit:
                break
        return Answer(ids, time.perf_counter() - start)

    def close(self) -> None:
        """Let go of the weights."""
        self._model.close()
