# SPDX-License-Identifier: Apache-2.0
"""
The terminal view of a running answer: text coloured by draft, residency, figures.

Reads messages only, so it shows what any subscriber could see.
"""

from __future__ import annotations

import time

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

# Colours that stay apart on light and dark terminals; the target's own text is plain.
_PALETTE = ('cyan', 'magenta', 'green', 'yellow', 'blue', 'red', 'bright_cyan', 'bright_magenta')
_STATES = ('absent', 'loading', 'ready', 'failed')


class AnswerView:
    """
    Live view of one answer.

    ``draft_ids`` fixes the colour of each draft. ``update(chunk, residency)``
    takes TokenChunk and Residency messages.
    """

    def __init__(self, prompt: str, draft_ids: list[str], console: Console | None = None):
        self.prompt = prompt
        self.console = console or Console()
        self.colours = {draft: _PALETTE[i % len(_PALETTE)] for i, draft in enumerate(draft_ids)}
        self.answer = Text()
        self.residency = None
        self.tokens = 0
        self.first_at: float | None = None
        self.last_at: float | None = None
        self.stats = None
        self._live: Live | None = None

    def __enter__(self) -> AnswerView:
        # A pipe or a log gets the text as it comes; only a terminal is redrawn.
        if self.console.is_terminal:
            self._live = Live(self.render(), console=self.console, refresh_per_second=8)
            self._live.__enter__()
        return self

    def __exit__(self, *exc) -> None:
        if self._live is not None:
            self._live.update(self.render())
            self._live.__exit__(*exc)
        else:
            self.console.print()

    def update(self, chunk, residency) -> None:
        """Show a chunk and the latest residency (or None)."""
        now = time.monotonic()
        if chunk.token_ids:
            self.first_at = self.first_at or now
            self.last_at = now
        self.tokens += len(chunk.token_ids)
        self.answer.append(chunk.text, self.colours.get(chunk.draft, ''))
        self.residency = residency or self.residency
        if chunk.stats:
            self.stats = chunk.stats[0]
        if self._live is not None:
            self._live.update(self.render())
        else:
            self.console.print(Text(chunk.text, self.colours.get(chunk.draft, '')), end='')

    def render(self) -> Group:
        """The whole view."""
        answer = self.answer.copy()
        height = max(6, self.console.height - len(self.colours) - 12)
        lines = answer.wrap(self.console, max(20, self.console.width - 4))
        shown = Text('\n').join(lines[-height:])
        return Group(Panel(Text(self.prompt), title='prompt', title_align='left',
                           border_style='dim'),
                     Panel(shown, title='answer', title_align='left'),
                     self._drafts(), self._figures())

    def _drafts(self) -> Table:
        table = Table(expand=True, box=None, pad_edge=False)
        for column in ('draft', 'state', '', 'score', 'proposed', 'accepted'):
            table.add_column(column, justify='right' if column in (
                'score', 'proposed', 'accepted') else 'left')
        counts = {count.draft: count for count in self.stats.drafts} if self.stats else {}
        for draft in self.residency.drafts if self.residency else ():
            colour = self.colours.get(draft.id, '')
            active = self.residency.active == draft.id
            mark = '▶ ' if active else '  '
            state = _STATES[draft.state] if draft.bytes else 'always there'
            count = counts.get(draft.id)
            table.add_row(
                Text(mark + draft.id, f'bold {colour}' if active else colour),
                Text(state, {'ready': 'green', 'loading': 'yellow', 'failed': 'red'}.get(
                    state, 'dim')),
                ProgressBar(total=1.0, completed=draft.progress, width=12)
                if draft.bytes and draft.state in (1, 2) else '',
                f'{draft.score:.2f}',
                str(count.proposed) if count else '', str(count.accepted) if count else '')
        return table

    def _figures(self) -> Text:
        parts = [f'{self.tokens} tokens']
        if self.first_at and self.last_at and self.last_at > self.first_at:
            parts.append(f'{self.tokens / (self.last_at - self.first_at):.1f} tokens/s')
        if self.residency is not None:
            if self.residency.acceptance_rate == self.residency.acceptance_rate:
                parts.append(f'acceptance {self.residency.acceptance_rate:.0%}')
            parts.append(f'K {self.residency.capacity}')
            parts.append(f'prefetches {self.residency.prefetches_issued} '
                         f'({self.residency.prefetches_used} used, '
                         f'{self.residency.prefetches_late} late)')
            parts.append(f'evictions {self.residency.evictions}')
        return Text('  ·  '.join(parts), 'dim')


def summary(stats) -> str:
    """A few lines on an ended request, from its GenerationStats message."""
    rate = f'{stats.accepted_tokens / stats.drafted_tokens:.0%}' if stats.drafted_tokens else '-'
    per_step = stats.output_tokens / stats.iterations if stats.iterations else 0.0
    drafts = ', '.join(f'{count.draft} {count.accepted}/{count.proposed}'
                       for count in stats.drafts) or 'none'
    return (f'{stats.output_tokens} tokens in {stats.total_sec:.1f} s, '
            f'{stats.tokens_per_sec:.1f} tokens/s, first token after '
            f'{stats.time_to_first_token_sec:.2f} s\n'
            f'{stats.iterations} iterations, {per_step:.2f} tokens each; '
            f'accepted {rate} of {stats.drafted_tokens} drafted tokens\n'
            f'accepted/proposed by draft: {drafts}; switches: {stats.switches}\n'
            f'time: {stats.desired_sec:.2f} s wanted draft, {stats.fallback_sec:.2f} s fallback, '
            f'{stats.prediction_sec:.3f} s ranking, {stats.catch_up_sec:.2f} s catch-up, '
            f'{stats.load_wait_sec:.2f} s waiting for loads')
