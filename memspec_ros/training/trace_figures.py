# SPDX-License-Identifier: Apache-2.0
"""
What drafts are worth, read off acceptance traces: agreement and tokens per iteration.

Decoding is simulated on the trace, iteration by iteration, for a chain of
drafted tokens and for a static tree. Since a trace holds each rank under the
true tokens before it, and only true tokens lead on, both simulations are exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
import heapq

import numpy as np

from .trace_store import Trace, TraceHeader

CHAIN_TOKENS = 4
# Rows of a verify pass with a tree: the last committed token's and those of the drafted nodes.
TREE_ROWS = 9

# A node of a tree: the ranks on the way to it. (1,) is the best first token, (1, 2) the second
# best after it.
Path = tuple[int, ...]


def choose_tree(traces: Sequence[np.ndarray], nodes: int = TREE_ROWS - 1) -> list[Path]:
    """
    The tree of at most ``nodes`` nodes that a draft's ``traces`` speak for, best node first.

    traces: ranks [T, gamma] each. A node is worth the chance that it is
    accepted, estimated as if ranks at different depths were independent: the
    product of the shares of its ranks among the positions at which the true
    tokens above were within the ranks recorded. Such a node is never worth more
    than its parent, so that taking the best one again and again is the best
    tree there is under this estimate.
    """
    shares = _rank_shares(traces)
    waiting: list[tuple[float, Path]] = [(-1.0, ())]
    tree: list[Path] = []
    while waiting and len(tree) <= nodes:
        worth, path = heapq.heappop(waiting)
        tree.append(path)
        if len(path) < len(shares):
            for rank, share in enumerate(shares[len(path)], 1):
                if share > 0:
                    heapq.heappush(waiting, (worth * share, (*path, rank)))
    return tree[1:]  # the root is no drafted token


def _rank_shares(traces: Sequence[np.ndarray]) -> np.ndarray:
    """Share of each rank (1, 2, …) at each depth [gamma, ranks], see choose_tree."""
    gamma = traces[0].shape[1] if traces else 0
    most = max((int(ranks.max(initial=0)) for ranks in traces), default=0)
    counts, totals = np.zeros((gamma, most + 1)), np.zeros((gamma, 1))
    for ranks in traces:
        for depth in range(gamma):
            # Positions whose token at this depth lies beyond the end say nothing.
            rows = ranks[:max(0, len(ranks) - depth)]
            rows = rows[(rows[:, :depth] > 0).all(axis=1), depth]
            counts[depth] += np.bincount(rows, minlength=most + 1)
            totals[depth] += len(rows)
    return (counts / np.maximum(totals, 1))[:, 1:]


def chain_accepted(ranks: np.ndarray, tokens: int = CHAIN_TOKENS) -> np.ndarray:
    """Tokens accepted [T] of a chain drafted from each position; ranks [T, gamma]."""
    return np.cumprod(ranks[:, :tokens] == 1, axis=1).sum(axis=1)


def tree_accepted(ranks: np.ndarray, tree: Collection[Path]) -> np.ndarray:
    """Tokens accepted [T] of a tree drafted from each position; ranks [T, gamma]."""
    nodes = set(tree)
    accepted = np.zeros(len(ranks), dtype=np.int64)
    for position, row in enumerate(ranks.tolist()):
        depth = 0
        while depth < len(row) and tuple(row[:depth + 1]) in nodes:
            depth += 1
        accepted[position] = depth
    return accepted


def merged_accepted(ranks: np.ndarray, copied: np.ndarray, tree: Sequence[Path],
                    tokens: int) -> np.ndarray:
    """
    Tokens accepted [T] of one tree of ``tree``'s best nodes and ``tokens`` of a copying draft.

    ranks, copied [T, gamma]: of the draft and of the one that copies. ``tree``, best
    node first, gives up one node for each copied token.
    """
    return np.maximum(tree_accepted(ranks, tree[:max(0, TREE_ROWS - 1 - tokens)]),
                      chain_accepted(copied, tokens))


def choose_share(traces: Sequence[tuple[np.ndarray, np.ndarray]], tree: Sequence[Path]) -> int:
    """
    How many of a tree's tokens are best left to a draft that copies.

    traces: ranks of the draft and of the one that copies [T, gamma]. The fewest
    iterations decide, then the fewest such tokens.
    """
    return min(range(TREE_ROWS), key=lambda tokens: sum(
        iterations(merged_accepted(*ranks, tree, tokens)) for ranks in traces))


def iterations(accepted: Sequence[int]) -> int:
    """
    Iterations that emit a whole output, where ``accepted[t]`` would be accepted at t.

    Each emits what was accepted and the target's own token; the last is cut at
    the end.
    """
    position = count = 0
    while position < len(accepted):
        position += int(accepted[position]) + 1
        count += 1
    return count


class _Sums:
    """Tokens and iterations (or any two counts), by domain and draft."""

    def __init__(self) -> None:
        self._sums: dict = defaultdict(lambda: defaultdict(lambda: [0, 0]))

    def add(self, domain: str, draft: str, above: int, below: int) -> None:
        pair = self._sums[domain][draft]
        pair[0] += above
        pair[1] += below

    def ratios(self) -> dict[str, dict[str, float | None]]:
        """Above over below, pooled; None where nothing was counted."""
        return {domain: {draft: above / below if below else None
                         for draft, (above, below) in self._sums[domain].items()}
                for domain in sorted(self._sums)}


def measure(header: TraceHeader, traces: Iterable[Trace], copiers: Collection[str] = ()) -> dict:
    """
    Figures of ``traces`` by domain and draft, as plain data.

    agreement: share of output tokens that were the draft's first choice.
    tokens_per_iteration: with a chain of CHAIN_TOKENS. tree_tokens_per_iteration:
    with the best tree of TREE_ROWS rows. The tree for prompts of even key is
    chosen on those of odd key and the other way round, over all domains; None
    where the other half is empty. trees: both, for each draft.
    merged_tree_tokens_per_iteration: of drafts not among ``copiers``, with a tree
    of as many rows in which some stand for the first copier's chain; how many
    (copied_tokens) is chosen on the other half, too. Empty without a copier.
    """
    by_draft: dict[str, list[tuple[str, int, np.ndarray]]] = {d: [] for d in header.drafts}
    prompts: dict[str, int] = defaultdict(int)
    for trace in traces:
        prompts[trace.domain] += 1
        for draft, ranks in zip(header.drafts, trace.ranks):
            by_draft[draft].append((trace.domain, int(trace.key, 16) % 2, ranks))
    chain_tokens = min(CHAIN_TOKENS, header.gamma)
    agreement, chains, with_trees, merged, trees = _Sums(), _Sums(), _Sums(), _Sums(), {}
    copied = next((by_draft[draft] for draft in header.drafts if draft in copiers), None)
    shares = {}
    for draft, rows in by_draft.items():
        # By the half it is for.
        chosen = [choose_tree([ranks for _, other, ranks in rows if other != half])
                  for half in (0, 1)]
        trees[draft] = {'even': chosen[0], 'odd': chosen[1]}
        both = len({half for _, half, _ in rows}) == 2
        for domain, half, ranks in rows:
            agreement.add(domain, draft, int((ranks[:, 0] == 1).sum()), len(ranks))
            chains.add(domain, draft, len(ranks), iterations(chain_accepted(ranks, chain_tokens)))
            with_trees.add(domain, draft, len(ranks),
                           iterations(tree_accepted(ranks, chosen[half])) if both else 0)
        if copied is None or draft in copiers:
            continue
        pairs = [(domain, half, (ranks, other)) for (domain, half, ranks), (_, _, other)
                 in zip(rows, copied)]
        share = [choose_share([pair for _, other, pair in pairs if other != half], chosen[half])
                 for half in (0, 1)]
        shares[draft] = {'even': share[0], 'odd': share[1]}
        for domain, half, pair in pairs:
            merged.add(domain, draft, len(pair[0]), iterations(
                merged_accepted(*pair, chosen[half], share[half])) if both else 0)
    return {'bundle': header.bundle, 'dtype': header.dtype, 'gamma': header.gamma,
            'max_new_tokens': header.max_new_tokens, 'chain_tokens': chain_tokens,
            'tree_rows': TREE_ROWS, 'prompts': dict(sorted(prompts.items())),
            'agreement': agreement.ratios(), 'tokens_per_iteration': chains.ratios(),
            'tree_tokens_per_iteration': with_trees.ratios(),
            'merged_tree_tokens_per_iteration': merged.ratios(), 'copied_tokens': shares,
            'trees': {draft: {half: [list(path) for path in tree]
                              for half, tree in pair.items()} for draft, pair in trees.items()}}


def format_tables(figures: dict) -> str:
    """The figures for people: rows are domains, columns drafts, the best marked with a star."""
    titles = {
        'agreement': "share of tokens that were the draft's first choice",
        'tokens_per_iteration':
            f'tokens per iteration, chain of {figures["chain_tokens"]} drafted tokens',
        'tree_tokens_per_iteration':
            f'tokens per iteration, tree of {figures["tree_rows"]} rows (chosen on other prompts)'}
    if figures['copied_tokens']:
        titles['merged_tree_tokens_per_iteration'] = (
            'the same, some of the rows being what the text before says')
    return '\n\n'.join(f'{title}\n{_table(figures[name], figures["prompts"])}'
                       for name, title in titles.items())


def _table(rows: dict[str, dict[str, float | None]], prompts: dict[str, int]) -> str:
    drafts = list(next(iter(rows.values()), {}))
    width = max([10, *map(len, rows)])
    widths = [max(8, len(draft) + 2) for draft in drafts]
    lines = [' ' * width + '  prompts' + ''.join(
        f'{draft:>{size - 1}} ' for draft, size in zip(drafts, widths))]
    for domain, row in rows.items():
        best = max((value for value in row.values() if value is not None), default=None)
        cells = []
        for draft, size in zip(drafts, widths):
            value = row[draft]
            text = '-' if value is None else f'{value:.3f}'
            cells.append(f'{text:>{size - 1}}' + ('*' if value is not None and value == best
                                                  else ' '))
        lines.append(f'{domain:{width}}{prompts[domain]:9}' + ''.join(cells))
    return '\n'.join(line.rstrip() for line in lines)
