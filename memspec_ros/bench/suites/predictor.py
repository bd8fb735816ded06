# SPDX-License-Identifier: Apache-2.0
"""Suite ``predictor``: how good the ranker is, and what a ranking takes (MemSpec, Table 2)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
import time

import numpy as np
import torch
from torch import Tensor

from ...models.drafts import KINDS
from ...models.encoder import locate_encoder, SentenceEncoder
from ...models.errors import InvalidRequestError
from ...models.ranking_head import read_head
from ...runtime.ranking import Ranker, RankingContext
from ...runtime.scheduling import RECENT_TOKENS
from ...runtime.trained_ranking import TrainedRanker
from ...training.ranker import Examples, make_examples
from ...training.ranker_quality import check_unseen, evaluate, time_ranking
from ...training.trace_store import Trace
from ..replay_source import ReplaySource
from .base import Chart, number, percent, Result, Suite, Table
from .comparison import Bench
from .paper import PREDICTOR
from .sums import geometric_mean

# Boundaries are that many tokens apart, and utilities look that many iterations ahead, as where
# rankers are trained.
EVERY, HORIZON = 4, 16
# Rankings timed in a run, each at another boundary.
_TIMED = 40
_FIGURES = ('top1', 'top2', 'utility1', 'utility2')


class _NoInputs:
    """Examples of which only the utilities are wanted: rankers are asked themselves."""

    kind, width = 'none', 0

    def __call__(self, trace: Trace, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        return torch.zeros(0), torch.zeros(len(positions), 0)


def run(bench: Bench) -> Result:
    """
    Judge the bundle's ranker, and those of ``bench.rankers``, at the boundaries of the traces.

    Blind to what was accepted so far, as in the paper. Only drafts that have to
    be loaded are ranked. Raises InvalidRequestError where a ranker was trained on
    these prompts.
    """
    source = bench.source
    drafts, gamma = _ranked(source), source.scenario.gamma
    every = max(EVERY, source.header.hidden_every)
    traces = {trace.key: trace for trace in source.traces}
    examples = make_examples(source.header, traces.values(), drafts, _NoInputs(), every, gamma,
                             HORIZON)
    rankers = {'bundle': source.ranker, **{Path(file).stem: _open(file, source)
                                           for file in bench.rankers}}
    scored = {}
    for name, ranker in rankers.items():
        if isinstance(ranker, TrainedRanker):
            check_unseen(name, ranker.head, examples)
        scored[name] = _scores(ranker, drafts, examples, traces, source)
    result = evaluate({}, {'none': examples}, scored)
    contexts = [context for _, context in _contexts(examples, traces, source)]
    contexts = contexts[::-(-len(contexts) // _TIMED)]
    for name, ranker in rankers.items():
        times = [time_ranking(ranker, contexts, time.perf_counter) for _ in range(bench.repeats)]
        result[name] |= {'ms': geometric_mean(times), 'ms_spread': [min(times), max(times)]}
    names = [*rankers, 'ceiling', 'static', 'chance']
    data = {**bench.about(), 'rankers': {name: result[name] for name in names},
            'timed_runs': bench.repeats, 'boundaries': result['boundaries'],
            'all_tied': result['all_tied'], 'every': every, 'horizon': HORIZON,
            'domains': result['domains'], 'paper': PREDICTOR}
    return Result(data, [_table(names, data)], [_chart(names, data)])


def lacks(bench: Bench) -> str:
    if len(_ranked(bench.source)) < 2 or bench.source.ranker is None:
        return 'there is nothing to rank: fewer than two drafts have to be loaded'
    return ''


def _ranked(source: ReplaySource) -> list[str]:
    return [spec.id for spec in source.drafts if not KINDS[spec.kind].slot_free]


def _open(file: str, source: ReplaySource) -> Ranker:
    head = read_head(Path(file))
    missing = [draft for draft in head.drafts if draft not in source.header.drafts]
    if missing:
        raise InvalidRequestError(f'{file} ranks a draft {missing[0]!r}, which the traces do not '
                                  'hold')
    if head.kind == 'hidden' and not source.header.hidden_every:
        raise InvalidRequestError(f'{file} looks at hidden states and the traces hold none; '
                                  'make them with --hidden-every')
    encoder = SentenceEncoder(locate_encoder()) if head.kind == 'bert' else None
    return TrainedRanker(head, source.drafts, encoder)


def _contexts(examples: Examples, traces: dict[str, Trace], source: ReplaySource
              ) -> Iterator[tuple[bool, RankingContext]]:
    """(the first of its prompt, what a ranker sees), boundary by boundary."""
    decode = source.tokenizer.decode if source.tokenizer else lambda ids: ''
    every, before = source.header.hidden_every, -1
    for prompt, position in zip(examples.of_prompt.tolist(), examples.positions.tolist()):
        trace = traces[examples.keys[prompt]]
        recent = trace.output_ids[max(0, position - RECENT_TOKENS):position].tolist()
        hidden = None
        if every and trace.hidden is not None:
            hidden = torch.from_numpy(trace.hidden[position // every]).float()
        yield prompt != before, RankingContext(
            trace.prompt_ids.tolist(), trace.prompt, recent, decode(recent), hidden,
            position=len(trace.prompt_ids) + position)
        before = prompt


def _scores(ranker: Ranker, drafts: list[str], examples: Examples, traces: dict[str, Trace],
            source: ReplaySource) -> Tensor:
    """What ``ranker`` expects of every draft [B, D]."""
    rows = []
    for first, context in _contexts(examples, traces, source):
        if first:
            ranker.begin(context)
        expected = dict(ranker.expected(context))
        rows.append([expected[draft] for draft in drafts])
    return torch.tensor(rows)


def _table(names: list[str], data: dict) -> Table:
    rows = []
    for name in names:
        found = data['rankers'][name]
        rows.append([name, *(percent(found[key]) for key in _FIGURES),
                     number(found.get('ms'), 2) if 'ms' in found else '',
                     '{:.2f} to {:.2f}'.format(*found['ms_spread']) if 'ms' in found else ''])
        if name not in ('ceiling', 'static', 'chance'):
            rows.append([f'  paper: {name}' if len(names) > 4 else '  paper',
                         percent(PREDICTOR['top1']), percent(PREDICTOR['top2']), '', '', '', ''])
    return Table(
        'rankers at the boundaries of the traces',
        ['top-1', 'top-2', 'utility-1', 'utility-2', 'ms', 'spread'], rows,
        f'utility: of what the best draft gives; ceiling: ranked by the means of the true domain; '
        f'static: by those over all; {data["boundaries"]} boundaries, '
        f'{percent(data["all_tied"])} with all drafts tied; ms: {data["timed_runs"]} runs, '
        'geometric mean')


def _chart(names: list[str], data: dict) -> Chart:
    return Chart('predictor', 'Rankers (Table 2)', 'bars', 'share', list(_FIGURES),
                 {name: [data['rankers'][name][key] for key in _FIGURES] for name in names},
                 {names[0]: [PREDICTOR['top1'], PREDICTOR['top2'], None, None]})


SUITE = Suite('predictor', 'Table 2', run, lacks)
