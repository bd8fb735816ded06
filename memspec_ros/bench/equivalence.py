# SPDX-License-Identifier: Apache-2.0
"""
Does a bundle's speculative decoding give what its target alone would give?

Greedy: the same tokens as ``generate`` of transformers. Sampled: short
continuations of the same prompts, by the controller with its drafts and by
``generate``, each continuation with a seed of its own, held against each other
by a two-sample chi-square test. Tokens are compared where all that stands
before them is the same, so that they are independent draws.

Where old keys and values are rounded or evicted, output is not that of the
target. What drafts must not change is then that of plain decoding with the
same option, which takes the place of transformers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
import itertools
from pathlib import Path
import time

import torch
from torch import Tensor

from ..decoding.sampling import Sampling
from ..models.errors import InvalidRequestError
from ..models.target import load_reference, quantization_of, read_config
from ..runtime.requests import GenerationRequest, PreparedRequest
from ..runtime.runtime import Runtime, RuntimeOptions
from ..training.outputs import read_prompts
from . import exact
from .chi_square import ChiSquare, two_samples

PASS_P = 0.001
# Largest difference of the two logits where outputs may part: none in float32. In half precision
# kernels for one row and for several differ in the last bits, which the layers add to.
TOLERANCES = {torch.float32: 0.0, torch.bfloat16: 0.5, torch.float16: 0.1}
# Tokens of a continuation: enough for a proposal and what follows it.
CONTINUATION = 4
# Every processor that both sides have takes part.
SAMPLED = Sampling(temperature=0.7, top_k=50, top_p=0.95, min_p=0.02, repetition_penalty=1.1)
# Continuations that transformers samples at once.
_BATCH = 64
# Continuations after which a line of progress is due.
_PROGRESS_EVERY = 50
PROMPTS = (
    'Name three uses of a depth camera.', 'Write a Python function that reverses a string.',
    'What is 17 times 6? Show the steps.', 'Bring me the blue cup from the kitchen.',
    'Why do wheels slip on gravel?', 'Explain odometry drift in two sentences.',
    'Write a haiku about a lonely robot.', 'What does a contract need to be valid?',
    'List the symptoms of dehydration.', 'Sort the list [4, 1, 3] and say how.',
    'Translate "good morning" into French and German.', 'How do I tie a bowline knot?')


def verify(options: RuntimeOptions, bundle: str, prompts: Path | None, count: int,
           max_new_tokens: int, tokens: int, report: Callable[[str], None] = print) -> dict:
    """
    Run all checks on a bundle.

    prompts: JSON lines, None for those that come with the package; count: how
    many of them; max_new_tokens: of a greedy answer; tokens: sampled by each
    method. ``report`` receives lines on how far it is. Returns what
    docs/sampling.md describes. Raises MemSpecError.
    """
    texts = [text for _, text in read_prompts(prompts)] if prompts else list(PROMPTS)
    texts = texts[:count]
    if not texts:
        raise InvalidRequestError(f'{prompts}: no prompts in it')
    # Always draft: whether it pays is not the question here.
    options = replace(options, adaptive=False)
    runtime = Runtime.open(bundle or None, options)
    try:
        if not runtime.bundle.drafts or not options.max_gamma:
            raise InvalidRequestError(
                f'{runtime.bundle.directory}: nothing would be drafted, so that there is nothing '
                'to verify; choose a bundle with drafts and --draft-tokens 1 or more')
        contest = _Contest(runtime) if options.kv.exact else _PlainContest(runtime)
        report(_plan(contest, texts, max_new_tokens, tokens))
        result = {
            'exact': _exact(report),
            'greedy': contest.greedy(texts, max_new_tokens, report),
            'chi_square': contest.sampled(texts, tokens, report),
            'bundle': runtime.bundle.name, 'dtype': str(runtime.target.dtype),
            'device': str(runtime.target.device),
            'verification': options.settings.verification, 'kv': str(options.kv),
            'exact_target': options.kv.exact, 'reference': contest.reference,
            'drafted': contest.drafted, 'accepted': contest.accepted, 'torch': torch.__version__}
    finally:
        runtime.close()
    if not contest.drafted:
        raise InvalidRequestError(f'{result["bundle"]}: its drafts proposed nothing, so that '
                                  'nothing was verified; see `memspec info`')
    result['pass'] = all(result[part]['pass'] for part in ('exact', 'greedy', 'chi_square'))
    return result


def rounds_of(tokens: int, prompts: int) -> int:
    """Continuations of each prompt, for about so many tokens in all."""
    return max(1, round(tokens / (CONTINUATION * prompts)))


def _plan(contest: _Contest, texts: Sequence[str], max_new_tokens: int, tokens: int) -> str:
    """What is going to be done, and about how long it takes, by a short answer that is timed."""
    rounds = rounds_of(tokens, len(texts))
    contest.warm_up(texts[0], CONTINUATION)  # the first pays for kernels and loads
    start = time.monotonic()
    contest.warm_up(texts[0], CONTINUATION)
    each = time.monotonic() - start
    # A greedy answer is as many times longer, and the exact distributions take about a minute.
    seconds = each * (rounds * len(texts) + len(texts) * max_new_tokens / CONTINUATION) + 60
    return (f'to do: exact distributions; {len(texts)} greedy answers of at most {max_new_tokens} '
            f'tokens; {len(texts)} prompts with {rounds} continuations of {CONTINUATION} tokens '
            f'by each method. About {max(1, round(seconds / 60))} min.')


def _exact(report: Callable[[str], None]) -> dict:
    found = exact.check(report)
    return {**found, 'pass': (found['largest_error'] < exact.TOLERANCE
                              and not found['coupled_differing'] and found['draws_p'] > PASS_P)}


class _Contest:
    """Controller and transformers on the same weights, type and device."""

    reference = 'transformers'

    def __init__(self, runtime: Runtime):
        directory, weights = runtime.bundle.target_path, runtime.options.weights
        if weights == 'int8' or weights == 'int4' and quantization_of(
                directory, read_config(directory)) is None:
            raise InvalidRequestError(
                f'--weights {weights} rounds the target while it loads: it is its own reference '
                'then, and not what transformers computes; verify with --weights auto')
        self._runtime = runtime
        self._model = load_reference(directory, runtime.target.dtype, runtime.target.device)
        self.drafted = self.accepted = 0

    def warm_up(self, text: str, limit: int) -> None:
        """Answer once by each method; counts for nothing."""
        _, prompt = self._ours(text, limit, replace(SAMPLED, seed=1), ignore_eos=True)
        # Of a batch, each costs a share.
        self._generate(prompt, 1, do_sample=False)
        self.drafted = self.accepted = 0

    def greedy(self, texts: Sequence[str], limit: int, report: Callable[[str], None]) -> dict:
        """Answers that are equal, of how many; and the others, each with its near-tie."""
        tolerance = TOLERANCES[self._runtime.target.dtype]
        equal, gaps = 0, []
        for done, text in enumerate(texts, start=1):
            ours, prompt = self._ours(text, limit, Sampling())
            theirs = self._generate(prompt, limit, do_sample=False, stop=True)[0]
            if ours == theirs:
                equal += 1
            else:
                gaps.append(self._gap(prompt, ours, theirs))
            report(f'greedy: {done} of {len(texts)} prompts, {equal} equal')
        return {'equal': equal, 'total': len(texts), 'gaps': gaps, 'tolerance': tolerance,
                'pass': all(gap <= tolerance for gap in gaps)}

    def sampled(self, texts: Sequence[str], tokens: int, report: Callable[[str], None]) -> dict:
        """Two-sample chi-square test over about so many tokens of each method."""
        rounds = rounds_of(tokens, len(texts))
        strata: dict[tuple, tuple[Counter, Counter]] = defaultdict(lambda: (Counter(), Counter()))
        for place, text in enumerate(texts):
            ours = []
            for number in range(rounds):
                params = replace(SAMPLED, seed=1 + place * rounds + number)
                ids, prompt = self._ours(text, CONTINUATION, params, ignore_eos=True)
                ours.append(ids)
                if (number + 1) % _PROGRESS_EVERY == 0:
                    report(f'sampled: prompt {place + 1} of {len(texts)}, {number + 1} of '
                           f'{rounds} continuations')
            torch.manual_seed(1 + place)
            theirs = [ids for first in range(0, rounds, _BATCH)
                      for ids in self._sample(prompt, min(_BATCH, rounds - first))]
            for side, continuations in enumerate((ours, theirs)):
                for ids in continuations:
                    for depth, token in enumerate(ids):
                        strata[(place, *ids[:depth])][side][token] += 1
            report(f'sampled: {place + 1} of {len(texts)} prompts, {rounds} continuations each')
        found: ChiSquare = two_samples(strata.values())
        return {'p': found.p, 'tokens': rounds * len(texts) * CONTINUATION,
                'statistic': found.statistic, 'degrees': found.degrees,
                'pass': found.p > PASS_P and found.degrees > 0}

    def _ours(self, text: str, limit: int, sampling: Sampling,
              ignore_eos: bool = False) -> tuple[list[int], list[int]]:
        """(output, prompt) by the controller and its drafts."""
        request = self._runtime.prepare(GenerationRequest(
            text, max_new_tokens=limit, sampling=sampling, ignore_eos=ignore_eos))
        ids: list[int] = []
        for chunk in self._runtime.controller.generate(request):
            ids += chunk.token_ids
        self.drafted += chunk.stats.drafted
        self.accepted += chunk.stats.accepted
        return ids, request.prompt_ids

    def _sample(self, prompt: list[int], count: int) -> list[list[int]]:
        return self._generate(
            prompt, CONTINUATION, do_sample=True, num_return_sequences=count,
            **{name: getattr(SAMPLED, name) for name in (
                'temperature', 'top_k', 'top_p', 'min_p', 'repetition_penalty')})

    @torch.inference_mode()
    def _generate(self, prompt: list[int], limit: int, stop: bool = False,
                  **options) -> list[list[int]]:
        ids = torch.tensor([prompt], device=self._model.device)
        # What a checkpoint's own generation_config.json says of sampling must not join in.
        self._model.generation_config = type(self._model.generation_config)(
            eos_token_id=sorted(self._runtime.controller.stop_ids) if stop else None,
            pad_token_id=0)
        output = self._model.generate(ids, attention_mask=torch.ones_like(ids),
                                      max_new_tokens=limit, **options)
        return output[:, ids.shape[1]:].tolist()

    @torch.inference_mode()
    def _gap(self, prompt: list[int], ours: list[int], theirs: list[int]) -> float:
        """By how much transformers prefers its own token where two answers part."""
        place = _parting(ours, theirs)
        if place is None:
            return float('inf')
        row: Tensor = self._model(
            torch.tensor([[*prompt, *theirs[:place]]], device=self._model.device)).logits[0, -1]
        return float(row[theirs[place]] - row[ours[place]])


class _PlainContest(_Contest):
    """Controller with drafts and without, keys and values kept in the same way."""

    reference = 'plain decoding'

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self.drafted = self.accepted = 0
        # Of no continuation that the drafts have a part in.
        self._seeds = itertools.count(1 << 32)

    def _sample(self, prompt: list[int], number: int) -> list[list[int]]:
        return [self._plain(prompt, CONTINUATION, replace(SAMPLED, seed=next(self._seeds)), True)
                for _ in range(number)]

    def _generate(self, prompt: list[int], limit: int, stop: bool = False,
                  **options) -> list[list[int]]:
        return [self._plain(prompt, limit, Sampling(), not stop)]

    def _plain(self, prompt: list[int], limit: int, sampling: Sampling,
               ignore_eos: bool) -> list[int]:
        controller = self._runtime.controller
        settings = controller.settings
        controller.settings = replace(settings, speculate=False)
        try:
            request = PreparedRequest(prompt, '', limit, ignore_eos=ignore_eos, sampling=sampling)
            return [token for chunk in controller.generate(request) for token in chunk.token_ids]
        finally:
            controller.settings = settings

    def _gap(self, prompt: list[int], ours: list[int], theirs: list[int]) -> float:
        return plain_gap(self._runtime, prompt, ours, theirs)


def plain_gap(runtime: Runtime, prompt: list[int], ours: list[int], plain: list[int]) -> float:
    """By how much plain decoding prefers its own token where an answer parts from it."""
    place = _parting(ours, plain)
    if place is None:
        return float('inf')
    engine = runtime.controller.engine
    for _ in engine.prefill([*prompt, *plain[:place]]):
        pass
    engine.state.make_room()
    row = engine.target.forward(engine.state, engine.state.tokens[-1:])[-1]
    return float(row[plain[place]] - row[ours[place]])


def _parting(one: list[int], other: list[int]) -> int | None:
    """Where two answers part; None where one is merely longer, which no tie explains."""
    return next((i for i, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), None)


def format_report(result: dict) -> str:
    """The result for people."""
    greedy, chi, small = result['greedy'], result['chi_square'], result['exact']
    gaps = ''
    if greedy['gaps']:
        gaps = (f', {len(greedy["gaps"])} part where {result["reference"]} prefers its own token '
                f'by {max(greedy["gaps"]):.3g} at most ({greedy["tolerance"]:g} is allowed)')
    return '\n'.join([
        f'exact       {_verdict(small)}  {small["combinations"]} combinations of processors: '
        f'probabilities off by {small["largest_error"]:.1e} at most, coupled output differs in '
        f'{small["coupled_differing"]}, frequencies of draws p = {small["draws_p"]:.3g}',
        f'greedy      {_verdict(greedy)}  {greedy["equal"]} of {greedy["total"]} answers equal '
        f'those of {result["reference"]}{gaps}',
        f'chi-square  {_verdict(chi)}  p = {chi["p"]:.3g} over {chi["tokens"]} tokens a method '
        f'({chi["statistic"]:.0f} at {chi["degrees"]} degrees of freedom; '
        f'{result["verification"]})',
        f'{result["bundle"]} in {result["dtype"].removeprefix("torch.")}: '
        f'{result["accepted"]} of {result["drafted"]} drafted tokens accepted',
        *([] if result['exact_target'] else [
            f'keys and values: {result["kv"]}; drafts change nothing, but output is NOT that of '
            'the exact target (see memspec bench kv)']),
        'PASS' if result['pass'] else 'FAIL'])


def _verdict(part: dict) -> str:
    return 'pass' if part['pass'] else 'FAIL'
