# SPDX-License-Identifier: Apache-2.0
"""
What the target gains by drafting for itself: in memory, and with layers left in storage.

Every contender is the same engine with no draft loaded (K = 0): plain decoding,
prompt lookup (the best rival that takes no memory either), self-speculation,
and both as a node runs them. They answer the same prompts in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ..memory.allocator import MIB
from ..models.bundle import SELF_ID
from ..models.errors import InvalidRequestError
from ..runtime.requests import GenerationRequest
from ..runtime.runtime import Runtime, RuntimeOptions
from ..runtime.settings import Settings
from .equivalence import plain_gap, TOLERANCES
from .race import Answer, answer, choose_prompts, conditions, geometric_mean, race, Tally

# How the paper says it (CATS, 2026; models and boards of its own).
PAPER = {'offloaded_speed_up': 5.08, 'over_best_rival': 1.45}
CONTENDERS = {
    'plain': {'speculate': False},
    'lookup': {'copy': True},
    'self': {'copy': False, 'self_speculation': True},
    'both': {'copy': True, 'self_speculation': True}}


def measure(prompts: Path, options: RuntimeOptions, bundle: str, per_domain: int,
            max_new_tokens: int, offload_mib: Sequence[float],
            report: Callable[[str], None] = print) -> dict:
    """
    Run the comparison with all layers in memory, and with each MiB for them of ``offload_mib``.

    ``options.storage`` is the storage that layers are read from. Returns a
    dictionary for JSON.
    """
    texts = choose_prompts(prompts, per_domain)
    parts = []
    for layers_mib in (0.0, *offload_mib):
        report(f'{layers_mib:g} MiB for layers' if layers_mib else 'all layers in memory')
        runtime = Runtime.open(bundle or None, replace(
            options, layers_mib=layers_mib, settings=Settings(cache_capacity=0)))
        try:
            if runtime.bundle.self_speculation is None:
                raise InvalidRequestError(f'{runtime.bundle.name} has no exits: make some with '
                                          'memspec distill --kind self_speculation')
            tallies = race({name: partial(_answer, runtime, settings)
                            for name, settings in CONTENDERS.items()},
                           texts, max_new_tokens, report)
            parts.append({'layers_mib': layers_mib, **_layers(runtime), **_figures(tallies),
                          'gaps': _gaps(runtime, texts, tallies),
                          'tolerance': TOLERANCES[runtime.target.dtype]})
            known = conditions(runtime.target, prompts)
            known['exits'] = dict(runtime.bundle.self_speculation.options)
        finally:
            runtime.close()
    return {'parts': parts, 'paper': PAPER, 'prompts': len(texts),
            'max_new_tokens': max_new_tokens, 'max_gamma': options.max_gamma,
            'storage_mb_per_sec': options.storage.mb_per_sec, **known}


def _answer(runtime: Runtime, settings: dict, prompt: str, limit: int) -> Answer:
    runtime.controller.settings = replace(
        Settings(cache_capacity=0), **{'copy': False, **settings})
    return answer(runtime, prompt, limit, settings.get('speculate', True))


def _layers(runtime: Runtime) -> dict:
    model = runtime.target.model
    return {'layers': len(model.layers), 'layers_in_memory': len(model.held_layers),
            'target_mib': round(runtime.target.weight_bytes / MIB, 1)}


def _gaps(runtime: Runtime, texts: Sequence[tuple[str, str]],
          tallies: dict[str, Tally]) -> dict[str, list[float]]:
    """Of each answer that is not the plain one: by how much plain decoding prefers its own."""
    prompts = [runtime.prepare(GenerationRequest(text, max_new_tokens=1)).prompt_ids
               for _, text in texts]
    return {name: [plain_gap(runtime, prompt, ours.ids, plain.ids)
                   for prompt, ours, plain in zip(prompts, tallies[name].all(),
                                                  tallies['plain'].all())
                   if ours.ids != plain.ids]
            for name in CONTENDERS if name != 'plain'}


def _figures(tallies: dict[str, Tally]) -> dict:
    """Tokens per second (prefill included) and speed-ups by domain and over all."""
    plain, domains = tallies['plain'], {}
    for domain in plain.answers:
        speed = {name: tally.speed(domain) for name, tally in tallies.items()}
        domains[domain] = {'plain_tps': speed['plain'], **{
            name: speed[name] / speed['plain'] for name in CONTENDERS if name != 'plain'}}
    counts = [answer.stats.drafts.get(SELF_ID) for answer in tallies['self'].all()]
    drafted = sum(count.proposed for count in counts if count)
    accepted = sum(count.accepted for count in counts if count)
    speed_up = {name: geometric_mean(entry[name] for entry in domains.values())
                for name in CONTENDERS if name != 'plain'}
    iterations = sum(answer.stats.iterations for answer in tallies['self'].all())
    tokens = sum(len(answer.ids) for answer in tallies['self'].all())
    return {
        'plain_tps': plain.speed(), 'speed_up': speed_up,
        'both_over_lookup': speed_up['both'] / speed_up['lookup'], 'domains': domains,
        'acceptance': accepted / drafted if drafted else None,
        'tokens_per_pass': tokens / iterations,
        'outputs_differing_from_plain': {name: tallies[name].differing(plain)
                                         for name in CONTENDERS if name != 'plain'}}


def _near_ties(part: dict) -> str:
    gaps = part['gaps']['self']
    return (f', parting where the logits of the two tokens are at most '
            f'{max(map(abs, gaps)):.3g} apart ({part["tolerance"]:g} passes for rounding)'
            if gaps else '')


def format_table(result: dict) -> str:
    """The result as text."""
    lines = []
    for part in result['parts']:
        where = (f'{part["layers_in_memory"]} of {part["layers"]} layers in memory, target '
                 f'{part["target_mib"]:.0f} MiB')
        lines += [where, f'  {"domain":12} {"plain tok/s":>12} {"lookup":>8} {"self":>8} '
                         f'{"both":>8}   (speed-up over plain)']
        for domain, entry in part['domains'].items():
            lines.append(f'  {domain:12} {entry["plain_tps"]:12.2f} {entry["lookup"]:8.2f} '
                         f'{entry["self"]:8.2f} {entry["both"]:8.2f}')
        mean = part['speed_up']
        rate = part['acceptance']
        lines += [f'  {"gmean":12} {part["plain_tps"]:12.2f} {mean["lookup"]:8.2f} '
                  f'{mean["self"]:8.2f} {mean["both"]:8.2f}',
                  f'  self-speculation: {part["tokens_per_pass"]:.2f} tokens a pass, '
                  f'{"nothing drafted" if rate is None else f"{rate:.0%} of drafted accepted"}; '
                  f'{part["outputs_differing_from_plain"]["self"]} of {result["prompts"]} outputs '
                  f'differ from plain{_near_ties(part)}', '']
    paper = result['paper']
    lines.append(f'paper (CATS, its own models and boards): up to {paper["offloaded_speed_up"]}x '
                 f'offloaded, {paper["over_best_rival"]}x over the best rival')
    return '\n'.join(lines)
