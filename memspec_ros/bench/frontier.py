# SPDX-License-Identifier: Apache-2.0
"""
Speed-up against memory: what each of many drafts gains alone, and what it takes.

The drafts of one or several bundles of the same target run on one engine, one
at a time, each the only draft of its whole answer. Every prompt is answered by
all of them and without any in turn, in rotating order, so that whatever else
the machine does hits all alike. All are in memory before anything is timed.
After the figure in "Speculative Decoding Under Memory Constraints" (2026).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
import statistics

from ..models.errors import InvalidRequestError
from ..runtime.runtime import RuntimeOptions
from .contest import Contest, enter, Entrant, open_bundles, PLAIN
from .floor import glance
from .race import choose_prompts, conditions, race, Tally

# Draft steps and target steps timed for their ratio.
_STEP_ROUNDS = 40


def measure(prompts: Path, bundle: str, more: Sequence[str], options: RuntimeOptions,
            per_domain: int, max_new_tokens: int, report: Callable[[str], None] = print) -> dict:
    """
    Run every draft of ``bundle`` and of the bundles ``more`` on the prompts.

    per_domain: prompts of each domain, 0 for all. ``report`` receives a line a
    prompt. Returns ``points``, one a draft (see docs/benchmarks.md), and what
    was run on what. Raises MemSpecError.
    """
    texts = choose_prompts(prompts, per_domain)
    bundles = open_bundles([bundle, *more])
    entrants = enter(bundles)
    if not entrants:
        raise InvalidRequestError('there is no draft in '
                                  + ', '.join(str(opened.directory) for opened in bundles))
    contest = Contest(bundles, entrants, options)
    try:
        names = [PLAIN, *(entrant.id for entrant in entrants)]
        tallies = race({name: partial(contest.answer, name) for name in names}, texts,
                       max_new_tokens, report)
        times = contest.step_times(texts[0][1], _STEP_ROUNDS)
        steps = {PLAIN: statistics.median(times.verify[0]),
                 **{name: statistics.median(measured) for name, measured in times.drafts.items()}}
        plain = tallies[PLAIN]
        return {
            'points': [_point(entrant, contest, tallies[entrant.id], plain, steps)
                       for entrant in entrants],
            'shared_heads': contest.head_bytes(),
            'target': {'name': bundles[0].target.name, 'bytes': contest.target.weight_bytes,
                       'step_sec': steps[PLAIN], 'plain_tps': plain.speed()},
            'floor': glance(contest.engine),
            'prompts': len(texts), 'max_new_tokens': max_new_tokens,
            'max_draft_tokens': options.max_gamma, 'adaptive_draft_length': options.adaptive,
            **conditions(contest.target, prompts)}
    finally:
        contest.close()


def _point(entrant: Entrant, contest: Contest, tally: Tally, plain: Tally,
           steps: Mapping[str, float]) -> dict:
    size = contest.memory[entrant.id]
    answers = tally.all()
    return {
        'draft': entrant.id, 'kind': entrant.spec.kind, 'domain': entrant.spec.domain,
        'extra_bytes': size, 'extra_percent': contest.percent(size),
        'shared_head_percent': contest.percent(contest.head_size(entrant)),
        'speedup': tally.speed() / plain.speed(),
        'speedup_by_domain': {domain: tally.speed(domain) / plain.speed(domain)
                              for domain in tally.answers},
        'tokens_per_iteration': (sum(len(answer.ids) for answer in answers)
                                 / sum(answer.stats.iterations for answer in answers)),
        'draft_step_sec': steps[entrant.id],
        'draft_step_over_target_step': steps[entrant.id] / steps[PLAIN],
        'outputs_differing_from_plain': tally.differing(plain)}
