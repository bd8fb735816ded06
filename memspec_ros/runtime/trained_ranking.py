# SPDX-License-Identifier: Apache-2.0
"""
Rankers that were trained on acceptance traces (MemSpec, Prediction Engine).

Both kinds have a small head over two vectors, the prompt's and the recent
output's. ``bert``: those of a frozen sentence encoder, as in the paper.
``hidden``: the target's own hidden states, which cost nothing more: the one at
the first boundary after the prefill stands for the prompt, the latest one for
the recent output. Before there is any, a ``prior`` that reads the prompt's words
says which draft to load.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..models.bundle import Bundle, DraftSpec
from ..models.encoder import (
    locate_encoder,
    PROMPT_TOKENS,
    RECENT_TOKENS,
    SentenceEncoder,
    WEIGHTS_SHA256,
)
from ..models.errors import BundleError, UnsupportedModelError
from ..models.ranking_head import RankingHead, read_head
from ..models.target import Target
from .ranking import Ranker, RankingContext, UNKNOWN_ACCEPTANCE


class TrainedRanker(Ranker):
    """
    Predicts each draft's acceptance.

    ``prior`` is believed where the head has nothing to look at yet. Drafts the
    head was not trained with (a prompt lookup, say) keep its figures, or without
    one the mean of the manifest's.
    """

    def __init__(self, head: RankingHead, drafts: Sequence[DraftSpec],
                 encoder: SentenceEncoder | None = None, prior: Ranker | None = None):
        self.head = head
        self._drafts = list(drafts)
        self._encoder = encoder
        self._prior = prior
        self._prompt: Tensor | None = None

    def begin(self, context: RankingContext) -> None:
        self._prompt = None
        if self._prior is not None:
            self._prior.begin(context)
        if self._encoder is not None:
            self._prompt = self._encoder.encode([context.prompt_text], PROMPT_TOKENS)[0]

    def expected(self, context: RankingContext) -> list[tuple[str, float]]:
        if self._prior is None:
            predicted = self.predicted(context)
            return [(spec.id, predicted.get(spec.id, _manifest_acceptance(spec)))
                    for spec in self._drafts]
        prior = self._prior.expected(context)
        if self._encoder is None and context.hidden is None:
            return prior
        predicted = self.predicted(context)
        return [(draft, predicted.get(draft, before)) for draft, before in prior]

    def predicted(self, context: RankingContext) -> dict[str, float]:
        """Acceptance per judged token that the head expects, by draft."""
        recent = self._recent(context)
        if self._prompt is None and recent is not None:
            self._prompt = recent.clone()
        utilities = self.head.predict(self._prompt, recent).tolist()
        return {draft: acceptance_of(utility, self.head.gamma)
                for draft, utility in zip(self.head.drafts, utilities)}

    def _recent(self, context: RankingContext) -> Tensor | None:
        if self._encoder is not None:
            text = context.recent_text
            return self._encoder.encode([text], RECENT_TOKENS)[0] if text.strip() else None
        return None if context.hidden is None else context.hidden.float().cpu()


def acceptance_of(tokens: float, gamma: int) -> float:
    """The uniform acceptance a that gives 1 + a + … + a^gamma tokens per iteration."""
    low, high = 0.0, 1.0
    for _ in range(24):
        middle = (low + high) / 2
        if sum(middle ** depth for depth in range(gamma + 1)) < tokens:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def open_ranker(bundle: Bundle, target: Target, drafts: Sequence[DraftSpec],
                prior: Ranker | None = None) -> TrainedRanker:
    """
    The bundle's trained ranker for ``drafts``; ``prior``: that of its manifest entry.

    Raises BundleError where the head was made for another target, other drafts
    or another kind, or its encoder was not fetched; UnsupportedModelError for a
    target whose hidden states cannot be had as the head needs them.
    """
    spec, path = bundle.ranker, bundle.ranker_file
    head = read_head(path, spec.sha256)
    if head.kind != spec.kind:
        raise BundleError(f'ranker: {path} is of kind {head.kind!r}, the manifest says '
                          f'{spec.kind!r}')
    known = {draft.id for draft in bundle.drafts}
    for draft in head.drafts:
        if draft not in known:
            raise BundleError(f'ranker: {path} ranks a draft {draft!r}, which the bundle does '
                              'not have; train it with traces of this bundle')
    if spec.kind == 'bert':
        if head.about.get('encoder') != WEIGHTS_SHA256:
            raise BundleError(f'ranker: {path} was trained with another encoder')
        return TrainedRanker(head, drafts, SentenceEncoder(locate_encoder(), target.device),
                             prior)
    if head.width != target.hidden_size:
        raise BundleError(f'ranker: {path} was made for hidden states of {head.width} numbers, '
                          f'this target has {target.hidden_size}')
    if not target.hidden_before_norm:
        raise UnsupportedModelError('ranker: the hidden states of this target cannot be had '
                                    'before its final norm; use a ranker of another kind')
    return TrainedRanker(head, drafts, prior=prior)


def _manifest_acceptance(spec: DraftSpec) -> float:
    if not spec.acceptance:
        return UNKNOWN_ACCEPTANCE
    return sum(spec.acceptance.values()) / len(spec.acceptance)
