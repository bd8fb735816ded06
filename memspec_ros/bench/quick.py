# SPDX-License-Identifier: Apache-2.0
"""
A quick, honest comparison: with speculation, without, and transformers.

All three answer the same prompts in one process, turn by turn and in rotating
order, so that whatever else the machine does hits all alike. Tokens per second
count from the prompt to the last token, prefill included.
"""

from __future__ import annotations

from collections import defaultdict
import hashlib
import math
from pathlib import Path
import statistics
import time

import torch

from ..models.errors import InvalidRequestError
from ..runtime.requests import GenerationRequest
from ..runtime.runtime import Runtime, RuntimeOptions
from ..training.outputs import read_prompts

CONTENDERS = ('memspec', 'plain', 'transformers')


def measure(prompts: Path, options: RuntimeOptions, bundle: str, per_domain: int,
            max_new_tokens: int, report=print) -> dict:
    """
    Run the comparison; ``report`` receives a line a prompt.

    Returns domains -> tokens/s of each contender and ``ratio`` (memspec over
    plain), the geometric means, and what was run.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for domain, prompt in read_prompts(prompts):
        if len(groups[domain]) < per_domain:
            groups[domain].append(prompt)
    if not any(groups.values()):
        raise InvalidRequestError(f'{prompts}: no prompts in it')
    runtime = Runtime.open(bundle or None, options)
    reference = _Reference(runtime)
    totals: dict[str, dict[str, list[float]]] = defaultdict(
        lambda: {name: [0.0, 0.0] for name in CONTENDERS})
    differing, done = 0, 0
    try:
        runners = {'memspec': lambda p: _run(runtime, p, max_new_tokens, True),
                   'plain': lambda p: _run(runtime, p, max_new_tokens, False),
                   'transformers': lambda p: reference.run(p, max_new_tokens)}
        warm = next(iter(groups.values()))[0]
        for name in CONTENDERS:
            runners[name](warm)
        for domain, texts in groups.items():
            for text in texts:
                outputs = {}
                for shift in range(len(CONTENDERS)):
                    name = CONTENDERS[(done + shift) % len(CONTENDERS)]
                    ids, seconds = runners[name](text)
                    outputs[name] = ids
                    totals[domain][name][0] += len(ids)
                    totals[domain][name][1] += seconds
                differing += outputs['memspec'] != outputs['transformers']
                done += 1
                report(f'{domain}: {done} of {sum(map(len, groups.values()))}')
    finally:
        runtime.close()
    domains = {domain: _figures(figures) for domain, figures in totals.items()}
    return {
        'domains': domains,
        'gmean_ratio': _gmean(entry['ratio'] for entry in domains.values()),
        'gmean_ratio_transformers': _gmean(
            entry['ratio_transformers'] for entry in domains.values()),
        'prompts': done, 'outputs_differing_from_transformers': differing,
        'max_new_tokens': max_new_tokens,
        'prompts_sha256': hashlib.sha256(prompts.read_bytes()).hexdigest(),
        'dtype': str(runtime.options.dtype), 'cache_capacity': options.settings.cache_capacity,
        'scheduling_interval': options.settings.scheduling_interval,
        'torch': torch.__version__, 'torch_threads': torch.get_num_threads()}


def _run(runtime: Runtime, prompt: str, limit: int, speculate: bool) -> tuple[list[int], float]:
    controller = runtime.controller
    controller.settings.speculate = speculate
    # No prompt of the run before is left in the cache: every contender computes its own.
    controller.engine.state.hold(0)
    start = time.perf_counter()
    request = runtime.prepare(GenerationRequest(prompt, max_new_tokens=limit))
    ids = [token for chunk in controller.generate(request) for token in chunk.token_ids]
    return ids, time.perf_counter() - start


class _Reference:
    """Greedy ``generate`` of transformers on the same weights, type and device."""

    def __init__(self, runtime: Runtime):
        from transformers import AutoModelForCausalLM
        self._runtime = runtime
        self._model = AutoModelForCausalLM.from_pretrained(
            runtime.bundle.target_path, dtype=runtime.target.dtype,
            local_files_only=True).to(runtime.target.device).eval()

    @torch.inference_mode()
    def run(self, prompt: str, limit: int) -> tuple[list[int], float]:
        start = time.perf_counter()
        request = self._runtime.prepare(GenerationRequest(prompt, max_new_tokens=limit))
        ids = torch.tensor([request.prompt_ids], device=self._model.device)
        output = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False,
            eos_token_id=sorted(self._runtime.controller.stop_ids))
        return output[0, ids.shape[1]:].tolist(), time.perf_counter() - start


def _figures(totals: dict[str, list[float]]) -> dict[str, float]:
    speed = {name: tokens / seconds for name, (tokens, seconds) in totals.items()}
    return {**{f'{name}_tps': value for name, value in speed.items()},
            'ratio': speed['memspec'] / speed['plain'],
            'ratio_transformers': speed['memspec'] / speed['transformers']}


def _gmean(values) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


def format_table(result: dict) -> str:
    """The result as text."""
    lines = [f'{"domain":12} {"memspec":>9} {"plain":>9} {"transformers":>13} '
             f'{"/plain":>8} {"/transf.":>9}   (tokens/s, prefill included)']
    for domain, entry in result['domains'].items():
        lines.append(f'{domain:12} {entry["memspec_tps"]:9.1f} {entry["plain_tps"]:9.1f} '
                     f'{entry["transformers_tps"]:13.1f} {entry["ratio"]:8.2f} '
                     f'{entry["ratio_transformers"]:9.2f}')
    lines.append(f'{"gmean":12} {"":9} {"":9} {"":13} {result["gmean_ratio"]:8.2f} '
                 f'{result["gmean_ratio_transformers"]:9.2f}')
    return '\n'.join(lines)
