# SPDX-License-Identifier: Apache-2.0
"""
What trees of drafted tokens bring: chains, branches, and two drafts in one tree.

One engine answers the same prompts in each way, and plainly, in turn and in
rotating order. Tokens per iteration say what a way gains at each pass of the
target and hardly depend on the machine's noise; the ratios of speed, what is
left of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from ..models.errors import InvalidRequestError
from ..runtime.runtime import Runtime, RuntimeOptions
from .race import Answer, answer, choose_prompts, conditions, geometric_mean, race, Tally

PLAIN = 'plain'
# Way -> (alternatives to drafted tokens, two drafts in one tree).
WAYS = {'chains': (False, False), 'branches': (True, False), 'merged': (True, True)}


def measure(prompts: Path, options: RuntimeOptions, bundle: str, per_domain: int,
            max_new_tokens: int, report: Callable[[str], None] = print) -> dict:
    """
    Run the comparison; ``report`` receives a line a prompt.

    Returns ``domains`` -> way -> tokens_per_sec, tokens_per_iteration and
    speedup (over plain decoding), their geometric means over domains, and what
    was run. Raises MemSpecError.
    """
    texts = choose_prompts(prompts, per_domain)
    runtime = Runtime.open(bundle or None, options)
    try:
        engine = runtime.controller.engine
        most = engine.max_branches
        if not most or not runtime.bundle.drafts:
            raise InvalidRequestError(
                f'{runtime.bundle.directory}: no tree would be verified; choose a bundle with '
                'drafts and a target on the lean path, --draft-tokens and --branches 1 or more')

        def run(branches: bool, merge: bool, text: str, limit: int) -> Answer:
            engine.max_branches = most if branches else 0
            runtime.controller.settings.merge = merge
            return answer(runtime, text, limit, speculate=True)

        tallies = race({PLAIN: partial(answer, runtime, speculate=False),
                        **{name: partial(run, *way) for name, way in WAYS.items()}},
                       texts, max_new_tokens, report)
        known = conditions(runtime.target, prompts)
    finally:
        runtime.close()
    domains = {domain: {name: _figures(tally, tallies[PLAIN], domain)
                        for name, tally in tallies.items()}
               for domain in tallies[PLAIN].answers}
    means = {name: {figure: geometric_mean(entry[name][figure] for entry in domains.values())
                    for figure in ('speedup', 'tokens_per_iteration')} for name in tallies}
    return {'domains': domains, 'gmean': means,
            'merged_over_branches': means['merged']['speedup'] / means['branches']['speedup'],
            'outputs_differing_from_plain': {name: tallies[name].differing(tallies[PLAIN])
                                             for name in WAYS},
            'prompts': len(texts), 'max_new_tokens': max_new_tokens,
            'max_draft_tokens': options.max_gamma, 'max_branches': options.max_branches,
            'cache_capacity': options.settings.cache_capacity, **known}


def _figures(tally: Tally, plain: Tally, domain: str) -> dict[str, float]:
    stats = [given.stats for given in tally.all(domain)]
    return {'tokens_per_sec': tally.speed(domain),
            'tokens_per_iteration': (sum(s.output_tokens for s in stats)
                                     / sum(s.iterations for s in stats)),
            'speedup': tally.speed(domain) / plain.speed(domain)}


def format_table(result: dict) -> str:
    """The result as text."""
    lines = [f'{"domain":12}' + ''.join(f'{name:>16}' for name in WAYS)
             + '   (over plain decoding; tokens per iteration)']
    for domain, entry in [*result['domains'].items(), ('gmean', result['gmean'])]:
        lines.append(f'{domain:12}' + ''.join(
            f'{entry[name]["speedup"]:9.2f} ({entry[name]["tokens_per_iteration"]:.2f})'
            for name in WAYS))
    lines.append(f'merged over branches: {result["merged_over_branches"]:.3f}')
    return '\n'.join(lines)
