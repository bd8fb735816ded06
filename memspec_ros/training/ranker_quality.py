# SPDX-License-Identifier: Apache-2.0
"""
How good rankers are on traces of prompts they were not trained on (the paper's Table 2).

Recall counts any of the drafts tied for the best as right. Beside the rankers
stand what knowing the prompt's domain for certain would give (the ceiling), the
one ranking that is best on the whole (static), the one by the training means
(prior: what a head knows without looking), and chance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import statistics
from typing import Any

import torch
from torch import Tensor

from ..models.errors import InvalidRequestError
from ..models.ranking_head import prompt_mark, RankingHead
from ..runtime.ranking import Ranker, RankingContext
from .ranker import Examples, scores_of, TIE

# Table 2 of the paper: the combined inputs.
PAPER = {'top1': 0.716, 'top2': 0.957}
_ROWS = 4096


def quality(scores: Tensor, utilities: Tensor) -> dict[str, float]:
    """
    Recall of the best draft and share of the best utility, from both as [B, D].

    top1, top2: how often the best draft is the first, or one of the first two.
    utility1, utility2: what the first, or the better of the first two, gives of
    what the best draft would, over all boundaries. Ties of scores go to the
    bundle's order.
    """
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :2]
    picked = utilities.gather(1, order)
    best = utilities.max(-1).values
    first, both = picked[:, 0], picked.max(-1).values
    return {'top1': (first >= best - TIE).float().mean().item(),
            'top2': (both >= best - TIE).float().mean().item(),
            'utility1': (first.sum() / best.sum()).item(),
            'utility2': (both.sum() / best.sum()).item()}


def chance(utilities: Tensor) -> dict[str, float]:
    """What ``quality`` expects of a ranking drawn at random."""
    drafts = utilities.shape[1]
    best = utilities.max(-1).values
    tied = (utilities >= best[:, None] - TIE).sum(-1).float()
    pairs = max(1, drafts * (drafts - 1) // 2)
    lost = (drafts - tied) * (drafts - tied - 1) / 2 / pairs
    ordered = utilities.sort(dim=-1, descending=True).values
    # The k-th best is the better of a pair with each of those after it.
    weights = torch.arange(drafts - 1, -1, -1) / pairs
    both = (ordered * weights).sum(-1) if drafts > 1 else best
    return {'top1': (tied / drafts).mean().item(), 'top2': (1 - lost).mean().item(),
            'utility1': (utilities.mean(-1).sum() / best.sum()).item(),
            'utility2': (both.sum() / best.sum()).item()}


def domain_scores(examples: Examples) -> tuple[Tensor, dict[str, Tensor]]:
    """Each boundary scored with the mean utilities of its domain [B, D], and those by domain."""
    rows = _domain_rows(examples)
    scores = torch.empty_like(examples.utilities)
    means = {}
    for domain, mask in rows.items():
        means[domain] = examples.utilities[mask].mean(0)
        scores[mask] = means[domain]
    return scores, means


def evaluate(heads: Mapping[str, RankingHead], examples: Mapping[str, Examples],
             scored: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """
    Figures of every head, by its name, and of what they are compared with.

    ``examples``: by the heads' kinds. ``scored``: scores [B, D] of rankers that
    were asked elsewhere. Raises InvalidRequestError where a head was trained on
    one of their prompts.
    """
    any_examples = next(iter(examples.values()))
    utilities, rows = any_examples.utilities, _domain_rows(any_examples)
    ceiling, means = domain_scores(any_examples)
    scores = {'ceiling': ceiling, 'static': utilities.mean(0).expand_as(utilities),
              **(scored or {})}
    for name, head in heads.items():
        check_unseen(name, head, any_examples)
        own = examples[head.kind]
        with torch.no_grad():
            scores[name] = torch.cat([scores_of(head, own, block)
                                      for block in torch.arange(len(own)).split(_ROWS)])
    result: dict[str, Any] = {name: quality(scores[name], utilities)
                              for name in (*heads, *(scored or {}), 'ceiling', 'static')}
    if heads:
        prior = next(iter(heads.values())).prior
        result['prior'] = quality(prior.expand_as(utilities), utilities)
    result['chance'] = chance(utilities)
    best = utilities.max(-1, keepdim=True).values
    result['all_tied'] = (utilities >= best - TIE).all(-1).float().mean().item()
    result['prompts'], result['boundaries'] = len(any_examples.keys), len(any_examples)
    result['drafts'] = list(any_examples.drafts)
    result['domains'] = {
        domain: {
            'boundaries': int(mask.sum()),
            'prompts': any_examples.domains.count(domain),
            'utilities': dict(zip(any_examples.drafts, means[domain].tolist())),
            **{name: quality(scores[name][mask], utilities[mask]) for name in scores}}
        for domain, mask in rows.items()}
    return result


def check_unseen(name: str, head: RankingHead, examples: Examples) -> None:
    """Refuse to judge a head by prompts that it was trained on."""
    known = set(head.trained_on.tolist())
    seen = sum(prompt_mark(key) in known for key in examples.keys)
    if seen:
        raise InvalidRequestError(f'the {name} ranker was trained on {seen} of these '
                                  f'{len(examples.keys)} prompts; evaluate it on others')


def time_ranking(ranker: Ranker, contexts: Sequence[RankingContext],
                 clock: Callable[[], float]) -> float:
    """Median milliseconds of a ranking; ``begin`` is not counted, nor the first ranking."""
    times = []
    for context in contexts:
        ranker.begin(context)
        ranker.rank(context)
        start = clock()
        ranker.rank(context)
        times.append(1e3 * (clock() - start))
    return statistics.median(times)


def format_table(result: Mapping[str, Any], names: Sequence[str]) -> str:
    """The result for people."""
    lines = [f'{"":14}{"top-1":>8}{"top-2":>8}{"utility-1":>11}{"utility-2":>11}{"ms":>8}']

    def add(name: str, row: Mapping[str, float]) -> None:
        cells = [f'{100 * row[key]:.1f} %' if key in row else ''
                 for key in ('top1', 'top2', 'utility1', 'utility2')]
        ms = f'{row["ms"]:.2f}' if 'ms' in row else ''
        lines.append(f'{name:14}{cells[0]:>8}{cells[1]:>8}{cells[2]:>11}{cells[3]:>11}{ms:>8}'
                     .rstrip())

    for name in names:
        add(name, result[name])
    add('paper', PAPER)
    for name in ('ceiling', 'static', 'prior', 'chance'):
        add(name, result[name])
    lines += ['', "ceiling: the drafts ranked by their mean utility here, in the prompt's own "
              'domain;', 'static: over all domains; prior: by the mean in training; paper: its '
              'Table 2,', 'of other drafts and another target', '']
    shown = next(iter(names), 'ceiling')
    lines.append(f'{"domain":14}{"best draft":>14}{"tokens/it.":>12}{"top-1":>9}'
                 f'{"ceiling":>9}   ({shown})')
    for domain, row in result['domains'].items():
        best = max(row['utilities'], key=row['utilities'].get)
        lines.append(f'{domain:14}{best:>14}{row["utilities"][best]:>12.2f}'
                     f'{100 * row[shown]["top1"]:>7.1f} %{100 * row["ceiling"]["top1"]:>7.1f} %')
    lines.append(f'\n{result["prompts"]} prompts, {result["boundaries"]} boundaries '
                 f'({100 * result["all_tied"]:.1f} % with all drafts tied)')
    return '\n'.join(lines)


def _domain_rows(examples: Examples) -> dict[str, Tensor]:
    names = sorted(set(examples.domains))
    of = torch.tensor([names.index(domain) for domain in examples.domains])[examples.of_prompt]
    return {domain: of == index for index, domain in enumerate(names)}
