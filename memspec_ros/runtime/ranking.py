# SPDX-License-Identifier: Apache-2.0
"""
Which drafts will be accepted most (MemSpec, Algorithm 1).

A ranker sees the prompt, the recent tokens, the target's hidden state and what
has been accepted so far, and scores every draft with the share of its tokens it
expects the target to accept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
import re
from typing import Any

from torch import Tensor

from ..decoding.stats import StepRecord
from ..models.bundle import Bundle, DraftSpec, RankerSpec
from ..models.errors import BundleError
from ..models.target import Target

# Acceptance of a draft of which nothing is known.
UNKNOWN_ACCEPTANCE = 0.3


@dataclass
class Acceptance:
    """
    Running acceptance of one draft: decayed counts of tokens judged and accepted.

    A token after the first rejected one was not judged. An iteration in which
    the draft was asked and had nothing to say counts as one rejection.
    """

    judged: float = 0.0
    accepted: float = 0.0

    MEMORY = 0.97

    def add(self, step: StepRecord) -> None:
        judged = max(1, step.accepted + (step.accepted < step.drafted))
        self.judged = self.judged * self.MEMORY + judged
        self.accepted = self.accepted * self.MEMORY + step.accepted

    def blended(self, prior: float, weight: float) -> float:
        """Expected acceptance: ``prior`` counts as ``weight`` judged tokens."""
        return (prior * weight + self.accepted) / (weight + self.judged)


@dataclass
class RankingContext:
    """
    What a ranker may look at.

    hidden: the target's hidden state [H] at the last committed position, or None
    before any position has been run. acceptance: by draft, for this request.
    """

    prompt: Sequence[int]
    prompt_text: str
    recent: Sequence[int] = ()
    recent_text: str = ''
    hidden: Tensor | None = None
    acceptance: Mapping[str, Acceptance] = field(default_factory=dict)


class Ranker(ABC):
    """Scores drafts; ``begin`` once a request, ``rank`` at every interval boundary."""

    def begin(self, context: RankingContext) -> None:
        """See the prompt: what depends on it alone is computed once."""

    @abstractmethod
    def rank(self, context: RankingContext) -> list[tuple[str, float]]:
        """(draft, expected acceptance), best first; ties in the bundle's order."""


class DomainWordsRanker(Ranker):
    """
    Guesses the domain from telling words, and blends in what was accepted.

    Options: ``words`` (domain -> list of lower-case words or signs),
    ``default_domain``. Each draft's acceptance by domain comes from the manifest.
    """

    PRIOR_WEIGHT = 12.0
    _RECENT_WEIGHT = 1.5
    _DEFAULT_HITS = 1.0

    def __init__(self, drafts: Sequence[DraftSpec], options: Mapping[str, Any]):
        words = options.get('words', {})
        if not isinstance(words, dict) or not all(
                isinstance(group, list) and all(isinstance(w, str) for w in group)
                for group in words.values()):
            raise BundleError('ranker: words must map each domain to a list of words')
        unknown = set(options) - {'words', 'default_domain'}
        if unknown:
            raise BundleError(f'ranker: unknown key {sorted(unknown)[0]!r}')
        self.default = options.get('default_domain', 'general')
        self._domain_of = {}
        for domain, group in words.items():
            for word in group:
                self._domain_of.setdefault(word.lower(), []).append(domain)
        self._drafts = list(drafts)
        self._prompt_hits: dict[str, float] = {}

    def begin(self, context: RankingContext) -> None:
        self._prompt_hits = self._hits(context.prompt_text)

    def rank(self, context: RankingContext) -> list[tuple[str, float]]:
        hits = dict(self._prompt_hits)
        for domain, count in self._hits(context.recent_text).items():
            hits[domain] = hits.get(domain, 0.0) + self._RECENT_WEIGHT * count
        hits[self.default] = hits.get(self.default, 0.0) + self._DEFAULT_HITS
        # Squared: the leading domain should lead clearly, a stray word should not count.
        total = sum(count ** 2 for count in hits.values())
        belief = {domain: count ** 2 / total for domain, count in hits.items()}
        scored = [(spec.id, self._score(spec, belief, context)) for spec in self._drafts]
        return sorted(scored, key=lambda item: -item[1])

    def _score(self, spec: DraftSpec, belief: Mapping[str, float],
               context: RankingContext) -> float:
        prior = sum(share * self._prior(spec, domain) for domain, share in belief.items())
        seen = context.acceptance.get(spec.id, Acceptance())
        return seen.blended(prior, self.PRIOR_WEIGHT)

    def _prior(self, spec: DraftSpec, domain: str) -> float:
        if domain in spec.acceptance:
            return spec.acceptance[domain]
        if spec.acceptance:
            return min(spec.acceptance.values())
        return UNKNOWN_ACCEPTANCE + (0.1 if spec.domain == domain else 0.0)

    def _hits(self, text: str) -> dict[str, float]:
        counts: dict[str, float] = {}
        for word in re.findall(r'[a-z_]+|[^\sa-z_]', text.lower()):
            for domain in self._domain_of.get(word, ()):
                counts[domain] = counts.get(domain, 0.0) + 1.0
        return counts


RANKERS = ('bert', 'domain_words', 'hidden')


def make_ranker(spec: RankerSpec, drafts: Sequence[DraftSpec], bundle: Bundle | None = None,
                target: Target | None = None) -> Ranker:
    """
    The ranker a bundle asks for; the trained kinds need the bundle and its target.

    Raises BundleError, also for a trained head that does not belong to them.
    """
    if spec.kind not in RANKERS:
        raise BundleError(f'ranker: kind {spec.kind!r} is not known; there are: '
                          f'{", ".join(RANKERS)}')
    if spec.kind == 'domain_words':
        return DomainWordsRanker(drafts, spec.options)
    # Here, since trained rankers are built from what this file defines.
    from .trained_ranking import open_ranker
    return open_ranker(bundle, target, drafts)
