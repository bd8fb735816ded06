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
# A ranker's prediction counts as so many judged tokens of the draft itself …
PRIOR_WEIGHT = 12.0
# … and, where all are judged together, as so many accepted ones.
_SHARED_WEIGHT = 4.0
# How much of what surprises with one draft is expected of all. In acceptance traces of the default
# bundle's drafts about 0.95 of the variance (of logarithms, between prompts) is common to them;
# drafts of several kinds or sizes have less in common.
_SHARED_EXPONENT = 0.8


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
        self.decay(self.MEMORY)
        self.count(step.accepted, max(1, step.judged))

    def count(self, accepted: int, judged: int) -> None:
        self.accepted += accepted
        self.judged += judged

    def decay(self, memory: float) -> None:
        self.accepted *= memory
        self.judged *= memory

    def blended(self, prior: float, weight: float) -> float:
        """Expected acceptance: ``prior`` counts as ``weight`` judged tokens."""
        return (prior * weight + self.accepted) / (weight + self.judged)


def blend(expected: Sequence[tuple[str, float]], seen: Mapping[str, Acceptance],
          weight: float = PRIOR_WEIGHT) -> list[tuple[str, float]]:
    """
    What is ``expected`` of every draft, corrected by what was ``seen``: best first.

    Text that is harder for the drafts in use than expected is harder for the
    others too. All expectations are scaled by that before each draft's own
    figures count (as ``weight`` judged tokens): else a draft never tried would
    look better than the best one, merely because nothing has disproved it.
    """
    scale = _hardness(expected, seen) ** _SHARED_EXPONENT
    scored = [(seen.get(draft, Acceptance()).blended(min(1.0, prior * scale), weight), prior,
               draft) for draft, prior in expected]
    # Stable: equal ones stay in the bundle's order.
    scored.sort(key=lambda item: (-item[0], -item[1]))
    return [(draft, score) for score, _, draft in scored]


def _hardness(expected: Sequence[tuple[str, float]], seen: Mapping[str, Acceptance]) -> float:
    """Accepted per expected token, of all drafts that were used together; 1 if none were."""
    used = [(prior * seen[draft].judged, seen[draft].accepted)
            for draft, prior in expected if draft in seen]
    return ((sum(accepted for _, accepted in used) + _SHARED_WEIGHT)
            / (sum(hoped for hoped, _ in used) + _SHARED_WEIGHT))


@dataclass
class RankingContext:
    """
    What a ranker may look at.

    hidden: the target's hidden state [H] at the last committed position, or None
    before any position has been run. acceptance: by draft, for this request.
    position: committed tokens. remaining: output tokens that may still come.
    active, ready, loading: the draft in use, those that could be, and the one on
    its way ('' for none). slot_free: those that are never loaded.
    """

    prompt: Sequence[int]
    prompt_text: str
    recent: Sequence[int] = ()
    recent_text: str = ''
    hidden: Tensor | None = None
    acceptance: Mapping[str, Acceptance] = field(default_factory=dict)
    position: int = 0
    remaining: int = 0
    active: str = ''
    ready: frozenset[str] = frozenset()
    loading: str = ''
    slot_free: frozenset[str] = frozenset()


class Ranker(ABC):
    """Scores drafts; ``begin`` once a request, the rest at every interval boundary."""

    def begin(self, context: RankingContext) -> None:
        """See the prompt: what depends on it alone is computed once."""

    @abstractmethod
    def expected(self, context: RankingContext) -> list[tuple[str, float]]:
        """(draft, predicted acceptance) in the bundle's order, blind to ``acceptance``."""

    def rank(self, context: RankingContext) -> list[tuple[str, float]]:
        """(draft, expected acceptance), best first; ties in the bundle's order."""
        return blend(self.expected(context), context.acceptance)


class DomainWordsRanker(Ranker):
    """
    Guesses the domain from telling words.

    Options: ``words`` (domain -> list of lower-case words or signs),
    ``default_domain``. Each draft's acceptance by domain comes from the manifest.
    """

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

    def expected(self, context: RankingContext) -> list[tuple[str, float]]:
        hits = dict(self._prompt_hits)
        for domain, count in self._hits(context.recent_text).items():
            hits[domain] = hits.get(domain, 0.0) + self._RECENT_WEIGHT * count
        hits[self.default] = hits.get(self.default, 0.0) + self._DEFAULT_HITS
        # Squared: the leading domain should lead clearly, a stray word should not count.
        total = sum(count ** 2 for count in hits.values())
        belief = {domain: count ** 2 / total for domain, count in hits.items()}
        return [(spec.id, sum(share * self._prior(spec, domain)
                              for domain, share in belief.items())) for spec in self._drafts]

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
    prior = None if spec.prior is None else make_ranker(spec.prior, drafts)
    # Here, since trained rankers are built from what this file defines.
    from .trained_ranking import open_ranker
    return open_ranker(bundle, target, drafts, prior)
