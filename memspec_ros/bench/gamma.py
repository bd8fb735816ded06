# SPDX-License-Identifier: Apache-2.0
"""
How many tokens to draft: acceptance and speed-up over gamma, and why some pairs lose.

Every draft of every configuration (a target at a precision) decodes alone with
each fixed draft length from 1 on, and plain decoding beside them, in turn.
Beside that stand what decides it: c, a drafted token, and v(n), a verify of n
rows, both in one-row steps of the target. Speculation pays where verification
runs its rows side by side and the draft is much faster than the target: v shows
the one, c the other. After the K sweep of a study of five draft/target pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
import statistics

import torch

from ..models.errors import InvalidRequestError
from ..runtime.runtime import RuntimeOptions
from .contest import Contest, PLAIN
from .gamma_configuration import Configuration, group
from .race import Answer, choose_prompts, conditions, race, Tally

_STEP_ROUNDS = 24
# A further row that costs more of a step than this: its rows are not verified side by side.
SERIAL_ROW_COST = 0.5


def measure(prompts: Path, configurations: Sequence[Configuration], options: RuntimeOptions,
            per_domain: int, max_new_tokens: int, wanted: Sequence[str] = (),
            report: Callable[[str], None] = print) -> dict:
    """
    Sweep gamma from 1 to ``options.max_gamma`` in all ``configurations``, one after another.

    per_domain: prompts of each domain, 0 for all. wanted: ids of the drafts to
    sweep in configurations that name none, empty for all. Returns
    ``configurations`` (one a draft of each, see docs/benchmarks.md). Raises MemSpecError.
    """
    texts = choose_prompts(prompts, per_domain)
    groups = group(configurations, wanted)
    if not groups:
        raise InvalidRequestError('there is no draft in ' + ', '.join(
            configuration.bundle or 'the default bundle' for configuration in configurations))
    sweeps = []
    for one in groups:
        contest = Contest([one.bundle], one.entrants, replace(
            options, dtype=one.dtype, weights=one.weights, adaptive=False, max_branches=0))
        try:
            report(f'{one.name}: {", ".join(e.id for e in one.entrants)}')
            sweeps += _sweep(contest, one.name, texts, max_new_tokens, report)
            conditions_of_last = conditions(contest.target, prompts)
        finally:
            contest.close()
    # Each configuration has a type of its own.
    del conditions_of_last['dtype']
    return {'configurations': sweeps, 'prompts': len(texts), 'max_new_tokens': max_new_tokens,
            'max_draft_tokens': options.max_gamma, **conditions_of_last}


def _sweep(contest: Contest, name: str, texts: list[tuple[str, str]], limit: int,
           report: Callable[[str], None]) -> list[dict]:
    gammas = range(1, contest.engine.max_gamma + 1)

    def run(draft: str, gamma: int, text: str, limit: int) -> Answer:
        contest.controller.draft_length.max_gamma = gamma
        return contest.answer(draft, text, limit)

    runners = {(PLAIN, 0): partial(contest.answer, PLAIN)}
    runners.update({(entrant.id, gamma): partial(run, entrant.id, gamma)
                    for entrant in contest.entrants for gamma in gammas})
    tallies = race(runners, texts, limit, report)
    times = contest.step_times(texts[0][1], _STEP_ROUNDS, gammas[-1] + 1)
    verify = [statistics.median(measured) for measured in times.verify]
    batched = check_batched(contest, texts[0][1])
    plain = _decoding_speed(tallies[PLAIN, 0])
    sweeps = []
    for entrant in contest.entrants:
        cost = StepCost(statistics.median(times.drafts[entrant.id]) / verify[0],
                        [seconds / verify[0] for seconds in verify])
        points = [_point(gamma, tallies[entrant.id, gamma], plain, cost) for gamma in gammas]
        sweeps.append({
            'name': f'{name}/{entrant.id}', 'kind': entrant.spec.kind,
            'dtype': str(contest.target.dtype).removeprefix('torch.'),
            'weights': '+'.join(contest.target.weight_kinds),
            'target': contest.runtime.bundle.target.name, 'target_step_ms': 1e3 * verify[0],
            'plain_tps': plain, 'draft_cost': cost.draft, 'verify_cost': cost.verify,
            'row_cost': cost.row, 'batch_parallel': cost.row < SERIAL_ROW_COST, **batched,
            'points': points, **judge(points, cost)})
    return sweeps


@dataclass(frozen=True)
class StepCost:
    """In one-row steps of the target: a drafted token, and a verify by rows (1, 2, …)."""

    draft: float
    verify: Sequence[float]

    @property
    def row(self) -> float:
        """What a further row costs: 0 where rows run side by side, 1 one after another."""
        return (self.verify[-1] - self.verify[0]) / max(1, len(self.verify) - 1)


def _decoding_speed(tally: Tally) -> float:
    """Tokens per second, prefill left out."""
    stats = [answer.stats for answer in tally.all()]
    return sum(s.output_tokens for s in stats) / sum(s.decode_sec for s in stats)


def _point(gamma: int, tally: Tally, plain: float, cost: StepCost) -> dict:
    stats = [answer.stats for answer in tally.all()]
    drafted = sum(s.drafted for s in stats)
    tokens = sum(s.output_tokens for s in stats) / sum(s.iterations for s in stats)
    # A lookup that finds nothing drafts nothing: cost is that of what was really drafted.
    mean = drafted / sum(s.iterations for s in stats)
    return {'gamma': gamma, 'acceptance': sum(s.accepted for s in stats) / drafted
            if drafted else None,
            'tokens_per_iteration': tokens, 'drafted_per_iteration': mean,
            'speedup': _decoding_speed(tally) / plain,
            'predicted_speedup': tokens / (mean * cost.draft + _rows_cost(cost, mean + 1))}


def _rows_cost(cost: StepCost, rows: float) -> float:
    """Of a verify of so many rows in the mean, between the numbers measured."""
    low = min(int(rows), len(cost.verify))
    high = min(low + 1, len(cost.verify))
    return cost.verify[low - 1] + (rows - low) * (cost.verify[high - 1] - cost.verify[low - 1])


def judge(points: Sequence[dict], cost: StepCost) -> dict:
    """
    The best gamma, and where not even that reaches plain decoding, why.

    cause: ``draft_cost`` or ``verify_cost`` where speculation would pay if that
    one were nothing (the larger, where either would do), ``acceptance`` where it
    takes more accepted tokens, ``overhead`` where by c, v and acceptance it
    should pay and does not. needed_acceptance: of each drafted token, for no
    loss; None where not even 1 would do.
    """
    best = max(points, key=lambda point: point['speedup'])
    verdict = {'best_gamma': best['gamma'], 'best_speedup': best['speedup'],
               'decelerates': best['speedup'] < 1.0, 'cause': None, 'reason': '',
               'needed_acceptance': None}
    if not verdict['decelerates']:
        return verdict
    gamma, tokens = best['drafted_per_iteration'], best['tokens_per_iteration']
    drafting, verifying = gamma * cost.draft, _rows_cost(cost, gamma + 1) - 1
    gain = tokens - 1
    needed = needed_acceptance(best['gamma'], drafting + verifying)
    if gain >= drafting + verifying:
        cause = 'overhead'
    elif gain >= min(drafting, verifying):
        # Without the larger it would pay; without the smaller perhaps as well.
        cause = 'draft_cost' if drafting > verifying else 'verify_cost'
    else:
        cause = 'acceptance'
    accepted = best['acceptance']
    reason = (f'at gamma {best["gamma"]} an iteration drafts {gamma:.2f} tokens for '
              f'{drafting:.2f} target steps and verifies them for {verifying:.2f} more, '
              f'and gains {gain:.2f} tokens')
    if accepted is None:
        reason += ': nothing was drafted'
    elif cause == 'overhead':
        reason += (f': that should give {best["predicted_speedup"]:.2f}; catching up and the rest '
                   'of an iteration take more')
    elif needed is None:
        reason += f': too dear even if all were accepted ({accepted:.2f} are)'
    else:
        reason += f': it takes an acceptance of {needed:.2f} a token, {accepted:.2f} are accepted'
    return {**verdict, 'cause': cause, 'reason': reason, 'needed_acceptance': needed}


def needed_acceptance(gamma: int, cost: float) -> float | None:
    """The acceptance a of every token at which a + a² + … + a^gamma = ``cost``; None above 1."""
    if cost > gamma:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if sum(middle ** depth for depth in range(1, gamma + 1)) < cost:
            low = middle
        else:
            high = middle
    return high


def check_batched(contest: Contest, text: str) -> dict:
    """Verify rows at once and one by one: the largest difference of logits, equal argmaxes."""
    engine, state = contest.engine, contest.engine.state
    with contest.drafters(text):
        rows = state.tokens[-1:] * (engine.max_gamma + 1)
        at_once = contest.target.forward(state, rows)
        state.hold(state.held)
        held, single = state.held, []
        for row in rows:
            single.append(contest.target.forward(state, [row]))
            state.hold(state.held + 1)
        state.hold(held)
    one_by_one = torch.cat(single)
    return {'batched_logit_difference': float((at_once - one_by_one).abs().max()),
            'batched_argmax_equal': bool(torch.equal(at_once.argmax(-1), one_by_one.argmax(-1)))}
