# SPDX-License-Identifier: Apache-2.0
"""Suite ``acceptance``: what drafts and choices of drafts have accepted (MemSpec, Figs. 1, 3)."""

from __future__ import annotations

from .base import Chart, number, Result, Suite, Table
from .comparison import Bench
from .paper import ACCEPTANCE
from .sums import GMEAN, Sums

POLICIES = ('oracle_static', 'ucb_sync', 'ucb_async', 'memspec', 'oracle_dynamic')


def run(bench: Bench) -> Result:
    """
    Accepted tokens an iteration over those of the baseline, by domain.

    Of every draft used alone, and of policies. With a fixed draft length that is
    the acceptance rate normalised, too, but for drafts that do not always draft.
    """
    names = bench.names(POLICIES)
    drafts = [spec.id for spec in bench.source.drafts]
    compared = bench.compare(names, drafts)
    rates = {name: compared.relative(name, Sums.accepted_per_iteration)
             for name in (*names, *drafts)}
    places = [*bench.source.prompts, GMEAN]
    tables = [
        Table('accepted tokens an iteration over those of general_static, one draft for all',
              places, [[draft, *(number(rates[draft][place]) for place in places)]
                       for draft in drafts]),
        Table('the same of policies', [*places, 'paper'],
              [[name, *(number(rates[name][place]) for place in places),
                number(ACCEPTANCE.get(name))] for name in names], bench.note())]
    charts = [
        Chart('acceptance_drafts', 'Acceptance by domain and draft', 'bars',
              'accepted, over general_static', places,
              {draft: [rates[draft][place] for place in places] for draft in drafts}),
        Chart('acceptance', 'Acceptance (Figs. 1, 3)', 'bars', 'accepted, over general_static',
              places, {name: [rates[name][place] for place in places] for name in names},
              {name: [None] * (len(places) - 1) + [ACCEPTANCE[name]]
               for name in names if name in ACCEPTANCE})]
    data = {**bench.about(), 'paper': ACCEPTANCE,
            'normalised': {name: rates[name] for name in names},
            'drafts_alone': {draft: rates[draft] for draft in drafts},
            'accepted_per_iteration': {
                name: compared.mean(name, Sums.accepted_per_iteration)
                for name in (*names, *drafts)}}
    return Result(data, tables, charts)


SUITE = Suite('acceptance', 'Figs. 1, 3', run)
