# SPDX-License-Identifier: Apache-2.0
"""
Generation memory against naive speculative decoding, after SpecMemo (arXiv 2506.01986).

The same target, the same draft, the same fixed gamma, the same prompts, greedy.
Generation memory is what a process takes at its peak beyond libraries and
weights; each contender is weighed in a process of its own. Throughput is timed
in one process, contenders in turn, prefill included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
import json
from pathlib import Path
import statistics
import subprocess
import sys
import time

import torch

from ..decoding.engine import Engine
from ..memory import allocator, process
from ..memory.allocator import MIB
from ..models.bundle import Bundle, load_bundle
from ..models.drafts import KINDS
from ..models.drafts.shared_layers import SharedLayersKind
from ..models.errors import InvalidRequestError, MemSpecError
from ..models.target import LlamaTarget, load_target
from ..models.target_files import locate_target
from ..models.tokenizer import Tokenizer
from ..models.weights import read_tensors
from ..runtime.runtime import choose_device, choose_dtype
from ..training.outputs import read_prompts
from .naive import NaiveDecoder

CONTENDERS = ('memspec', 'naive')


@dataclass(frozen=True)
class Race:
    """What is run: ids of prompts, tokens to write, and with what."""

    bundle: str
    draft: str
    device: str
    dtype: str
    threads: int
    gamma: int
    new_tokens: int
    prompts: tuple[tuple[int, ...], ...]

    @property
    def context(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(map(len, self.prompts)) + self.new_tokens


def prepare(bundle_path: str, draft: str, device: str, dtype: str, threads: int, gamma: int,
            new_tokens: int, prompts: Path, per_domain: int) -> Race:
    """Check and tokenise; raises MemSpecError naming what cannot be run."""
    bundle = load_bundle(bundle_path or None)
    locate_target(bundle)
    able = [spec.id for spec in bundle.drafts if KINDS[spec.kind] is SharedLayersKind]
    if (draft and draft not in able) or not able:
        raise InvalidRequestError(
            f'draft {draft!r}: the naive decoder runs shared_layers drafts; in this bundle: '
            f'{", ".join(able) or "none"}')
    groups: dict[str, list[str]] = defaultdict(list)
    for domain, text in read_prompts(prompts):
        if len(groups[domain]) < per_domain:
            groups[domain].append(text)
    texts = [text for group in groups.values() for text in group]
    if not texts:
        raise InvalidRequestError(f'{prompts}: no prompts in it')
    tokenizer = Tokenizer(bundle.tokenizer_path)
    ids = tuple(tuple(tokenizer.encode_chat([{'role': 'user', 'content': text}]))
                for text in texts)
    return Race(bundle_path, draft or able[0], device, dtype, threads, gamma, new_tokens, ids)


def measure(race: Race, rounds: int, report: Callable[[str], None] = print) -> dict:
    """
    Weigh and time the contenders; ``report`` receives a line for each part.

    Returns generation memory, tokens/s (medians over rounds), the share of memory
    saved and the throughput relative to the naive decoder. Raises MemSpecError.
    """
    memory = {}
    for name in CONTENDERS:
        memory[name] = _weigh_in_child(race, name)
        report(f'{name}: {memory[name]["generation_mib"]:.1f} MiB beyond libraries and weights')
    with _Stage(race) as stage:
        contenders = {name: stage.contender(name) for name in CONTENDERS}
        speeds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
        differing = 0
        for name in CONTENDERS:  # kernels are set up before anything is timed
            contenders[name](list(race.prompts[0]))
        for turn in range(rounds):
            order = CONTENDERS if turn % 2 else CONTENDERS[::-1]
            spent, outputs = dict.fromkeys(CONTENDERS, 0.0), defaultdict(list)
            for prompt in race.prompts:
                for name in order:
                    start = time.perf_counter()
                    outputs[name].append(contenders[name](list(prompt)))
                    spent[name] += time.perf_counter() - start
            count = len(race.prompts) * race.new_tokens
            for name in CONTENDERS:
                speeds[name].append(count / spent[name])
            differing = sum(a != b for a, b in zip(*outputs.values()))
            report(f'round {turn + 1} of {rounds}: ' + ', '.join(
                f'{name} {speeds[name][-1]:.1f} tokens/s' for name in CONTENDERS))
        ratios = [ours / naive for ours, naive in zip(*(speeds[name] for name in CONTENDERS))]
        return {
            'contenders': {name: {**memory[name],
                                  'tokens_per_sec': statistics.median(speeds[name])}
                           for name in CONTENDERS},
            'memory_saved': 1 - (memory['memspec']['generation_mib']
                                 / memory['naive']['generation_mib']),
            'throughput_ratio': statistics.median(ratios),
            'outputs_differing': differing, 'prompts': len(race.prompts), 'rounds': rounds,
            'gamma': race.gamma, 'max_new_tokens': race.new_tokens, 'context': race.context,
            'draft': race.draft, 'device': str(stage.target.device),
            'dtype': str(stage.target.dtype).removeprefix('torch.'),
            'torch': torch.__version__, 'torch_threads': torch.get_num_threads()}


class _Stage:
    """Target and draft weights, for either contender."""

    def __init__(self, race: Race):
        if race.threads:
            torch.set_num_threads(race.threads)
        self.race = race
        self.bundle: Bundle = load_bundle(race.bundle or None)
        directory = locate_target(self.bundle)
        device = choose_device(race.device)
        dtype = choose_dtype(race.dtype, device)
        self.libraries = process.runtime_bytes(dtype, device)
        with allocator.compact():
            self.target = load_target(directory, dtype, device, race.context + race.gamma + 1)
            if not isinstance(self.target, LlamaTarget):
                raise MemSpecError(f'{directory}: the naive decoder runs targets on the lean path')
            spec = self.bundle.draft(race.draft)
            self.tensors = read_tensors(self.bundle.weight_file(spec), spec.sha256)
            self.bundle.shared_head_of(self.target)

    def __enter__(self) -> _Stage:
        return self

    def __exit__(self, *exc) -> None:
        self.target = self.tensors = None

    def contender(self, name: str) -> Callable[[list[int]], list[int]]:
        """Prompt -> output; what generation takes is taken from here on."""
        race = self.race
        spec = self.bundle.draft(race.draft)
        capacity = race.context + race.gamma + 1 if name == 'memspec' else 1
        kind = SharedLayersKind(spec, self.bundle, self.target, capacity)
        drafter = kind.attach(self.tensors)
        if name == 'naive':
            decoder = NaiveDecoder(self.target, drafter, race.gamma)
            return lambda prompt: decoder.generate(prompt, race.new_tokens)
        engine = Engine(self.target, race.context, race.gamma, kind.depths, time.monotonic)

        def generate(prompt: list[int]) -> list[int]:
            engine.state.hold(0)
            for _ in engine.prefill(prompt):
                pass
            drafter.restart(0)
            output: list[int] = []
            while len(output) < race.new_tokens:
                tokens, _ = engine.step(drafter, race.gamma, race.new_tokens - len(output),
                                        frozenset())
                output += tokens
            return output

        return generate

    @property
    def weight_bytes(self) -> int:
        """Bytes of target, draft and shared head."""
        head = len(self.bundle.head_token_ids()) * self.target.hidden_size
        draft = sum(tensor.numel() for tensor in self.tensors.values())
        return self.target.weight_bytes + (head + draft) * self.target.dtype.itemsize


def _weigh_in_child(race: Race, name: str) -> dict:
    done = subprocess.run(
        [sys.executable, '-m', __name__, name], input=json.dumps(asdict(race)), text=True,
        capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f'it ended with status {done.returncode}']
        raise MemSpecError(f'weighing {name} failed: {said[-1]}')
    return json.loads(done.stdout.splitlines()[-1])


def weigh(race: Race, name: str) -> dict:
    """Run one contender in this process, the longest prompt first, and read its peak."""
    with _Stage(race) as stage:
        weights = stage.weight_bytes
        run = stage.contender(name)
        stage.tensors = None  # packed now
        allocator.give_back()
        process.reset_peak()
        for prompt in sorted(race.prompts, key=len, reverse=True):
            run(list(prompt))
        peak = process.peak_bytes()
        return {'generation_mib': (peak - stage.libraries - weights) / MIB,
                'peak_mib': peak / MIB, 'libraries_mib': stage.libraries / MIB,
                'weights_mib': weights / MIB}


def format_table(result: dict) -> str:
    """The result as text."""
    lines = [f'{"":10} {"generation memory":>18} {"peak":>12} {"tokens/s":>10}']
    for name, entry in result['contenders'].items():
        lines.append(f'{name:10} {entry["generation_mib"]:14.1f} MiB {entry["peak_mib"]:8.1f} MiB '
                     f'{entry["tokens_per_sec"]:10.1f}')
    lines.append(f'memory saved {result["memory_saved"]:.1%}, throughput '
                 f'{result["throughput_ratio"]:.2f} of the naive decoder (gamma '
                 f'{result["gamma"]}, context {result["context"]}, draft {result["draft"]})')
    return '\n'.join(lines)


if __name__ == '__main__':
    given = json.load(sys.stdin)
    print(json.dumps(weigh(Race(**{
        **given, 'prompts': tuple(map(tuple, given['prompts']))}), sys.argv[1])))
