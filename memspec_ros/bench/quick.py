# SPDX-License-Identifier: Apache-2.0
"""
A quick, honest comparison: with speculation, without, and transformers.

All three answer the same prompts in one process, turn by turn and in rotating
order, so that whatever else the machine does hits all alike. Tokens per second
count from the prompt to the last token, prefill included.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from ..runtime.runtime import Runtime, RuntimeOptions
from .floor import format_glance, glance
from .race import answer, choose_prompts, conditions, geometric_mean, race, Tally
from .transformers_peer import TransformersPeer


def measure(prompts: Path, options: RuntimeOptions, bundle: str, per_domain: int,
            max_new_tokens: int, report: Callable[[str], None] = print) -> dict:
    """
    Run the comparison; ``report`` receives a line a prompt.

    Returns domains -> tokens/s of each contender and ``ratio`` (memspec over
    plain), the geometric means, and what was run.
    """
    texts = choose_prompts(prompts, per_domain)
    runtime = Runtime.open(bundle or None, options)
    try:
        tallies = race({'memspec': partial(answer, runtime, speculate=True),
                        'plain': partial(answer, runtime, speculate=False),
                        'transformers': TransformersPeer(runtime).answer},
                       texts, max_new_tokens, report)
        floor = glance(runtime.controller.engine)
        known = conditions(runtime.target, prompts)
    finally:
        runtime.close()
    domains = {domain: _figures(tallies, domain) for domain in tallies['memspec'].answers}
    return {
        'domains': domains,
        'gmean_ratio': geometric_mean(entry['ratio'] for entry in domains.values()),
        'gmean_ratio_transformers': geometric_mean(
            entry['ratio_transformers'] for entry in domains.values()),
        'floor': floor, 'prompts': len(texts),
        'outputs_differing_from_transformers': tallies['memspec'].differing(
            tallies['transformers']),
        'max_new_tokens': max_new_tokens, 'cache_capacity': options.settings.cache_capacity,
        'scheduling_interval': options.settings.scheduling_interval, **known}


def _figures(tallies: dict[str, Tally], domain: str) -> dict[str, float]:
    speed = {name: tally.speed(domain) for name, tally in tallies.items()}
    return {**{f'{name}_tps': value for name, value in speed.items()},
            'ratio': speed['memspec'] / speed['plain'],
            'ratio_transformers': speed['memspec'] / speed['transformers']}


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
    lines.append(format_glance(result['floor']))
    return '\n'.join(lines)
