# SPDX-License-Identifier: Apache-2.0
"""
What a decode did and where its time went.

One dataclass for an iteration and one for a request. Messages, diagnostics,
command line and benchmarks all read these and count nothing themselves.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

TIME_SHARES = ('desired', 'fallback', 'prediction', 'load_wait', 'catch_up', 'other')


@dataclass
class StepRecord:
    """
    One draft-verify iteration; times in seconds.

    draft: id of the draft used, '' for none. desired: the draft the policy
    wanted. position: committed tokens before the iteration. drafted: tokens
    proposed. accepted: those of them the target agreed with (and that were
    emitted). emitted: tokens committed, the target's own included. branches:
    alternatives to drafted tokens that were verified too; one of them counts as
    accepted where it stands. copied: a draft that copies stepped in for the one
    the policy had chosen. ahead: rows that drafting had run through lower layers of
    the target before it verified them. draft_error: why the draft is not to be asked again, ''
    if it is well.

    Where a second draft's tokens stood in the same tree, ``second`` is its id,
    and second_drafted, second_accepted and second_error are of it: a token that
    both proposed counts for both, drafted and accepted are the first one's alone.
    grafted: those of the branches that stood for the second draft only.
    t_second: what it took to propose.
    """

    draft: str
    desired: str
    position: int
    drafted: int
    accepted: int
    emitted: int
    t_catch_up: float = 0.0
    t_draft: float = 0.0
    t_verify: float = 0.0
    t_predict: float = 0.0
    t_wait: float = 0.0
    duration: float = 0.0
    branches: int = 0
    copied: bool = False
    ahead: int = 0
    draft_error: str = ''
    second: str = ''
    second_drafted: int = 0
    second_accepted: int = 0
    second_error: str = ''
    grafted: int = 0
    t_second: float = 0.0

    @property
    def judged(self) -> int:
        """Drafted tokens that were judged: none is after the first rejected one."""
        return self.accepted + (self.accepted < self.drafted)

    @property
    def rows(self) -> int:
        """Rows the target verified."""
        return self.drafted + self.branches + 1


@dataclass
class DraftCount:
    """Tokens one draft proposed and had accepted in a request."""

    proposed: int = 0
    accepted: int = 0


@dataclass
class GenerationStats:
    """
    One request. Times in seconds; rates are None where nothing was measured.

    drafted and accepted are sums over drafts: a token that two of them proposed
    for the same place is two.

    The six time shares add up to the decoding time: desired (the active draft
    was the wanted one), fallback (it was not), prediction, load_wait, catch_up,
    other (detokenising, scheduling, the client of the iterator).
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    iterations: int = 0
    drafted: int = 0
    accepted: int = 0
    switches: int = 0
    drafts: dict[str, DraftCount] = field(default_factory=dict)
    desired_sec: float = 0.0
    fallback_sec: float = 0.0
    prediction_sec: float = 0.0
    load_wait_sec: float = 0.0
    catch_up_sec: float = 0.0
    other_sec: float = 0.0
    queue_sec: float = 0.0
    prefill_sec: float = 0.0
    time_to_first_token_sec: float = 0.0
    total_sec: float = 0.0
    loads: int = 0
    evictions: int = 0
    gaps: list[float] = field(default_factory=list, repr=False)

    @property
    def decode_sec(self) -> float:
        """Time of all iterations and of what lay between them."""
        return sum(getattr(self, f'{share}_sec') for share in TIME_SHARES)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted per drafted token."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_iteration(self) -> float | None:
        """Tokens committed per target step."""
        return self.output_tokens / self.iterations if self.iterations else None

    @property
    def tokens_per_sec(self) -> float | None:
        """Output tokens per second of decoding, prefill left out."""
        return self.output_tokens / self.decode_sec if self.decode_sec > 0 else None

    def add(self, step: StepRecord, between: float = 0.0) -> None:
        """Count an iteration; ``between`` is decoding time spent outside of it."""
        self.iterations += 1
        self.output_tokens += step.emitted
        for draft, drafted, accepted in (
                (step.draft, step.drafted, step.accepted),
                (step.second, step.second_drafted, step.second_accepted)):
            if drafted:
                self.drafted += drafted
                self.accepted += accepted
                count = self.drafts.setdefault(draft, DraftCount())
                count.proposed += drafted
                count.accepted += accepted
        work = step.t_draft + step.t_second + step.t_verify
        if step.draft == step.desired:
            self.desired_sec += work
        else:
            self.fallback_sec += work
        self.prediction_sec += step.t_predict
        self.load_wait_sec += step.t_wait
        self.catch_up_sec += step.t_catch_up
        self.other_sec += between + max(
            0.0, step.duration - work - step.t_predict - step.t_wait - step.t_catch_up)

    def inter_token(self, fraction: float) -> float | None:
        """Quantile of the time between successive output tokens."""
        if not self.gaps:
            return None
        ordered = sorted(self.gaps)
        return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]

    def as_dict(self) -> dict:
        """Plain data for JSON, with the derived figures; None where there is none."""
        raw = asdict(self)
        raw.pop('gaps')
        raw.update(
            acceptance_rate=self.acceptance_rate, tokens_per_iteration=self.tokens_per_iteration,
            tokens_per_sec=self.tokens_per_sec, decode_sec=self.decode_sec,
            inter_token_p50_sec=self.inter_token(0.5), inter_token_p95_sec=self.inter_token(0.95))
        return raw
