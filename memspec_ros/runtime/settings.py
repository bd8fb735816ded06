# SPDX-License-Identifier: Apache-2.0
"""What may change while a controller runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Settings:
    """
    The controller's, read at interval boundaries.

    cache_capacity: K. scheduling_interval: N. speculate: False decodes plainly.
    copy: where the last tokens stood in the text before, copy what followed
    instead of drafting, if that promises more tokens per second. self_speculation:
    while no draft is READY that had to be loaded, the target drafts for itself, if
    the bundle says how and it pays. merge: verify what a second draft proposes, or
    what would be copied, in one tree with what the active draft does, likewise.
    verification: how drafted tokens of a request that samples are judged
    (decoding.sampler). min_confidence: a draft less sure of its next token than that
    proposes no more. wait_for_first_load: decode only when the first draft is there,
    as in the paper (benchmarks; the wait counts as part of the prefill).
    """

    cache_capacity: int = 2
    scheduling_interval: int = 4
    speculate: bool = True
    copy: bool = True
    self_speculation: bool = False
    merge: bool = False
    verification: str = 'coupled'
    min_confidence: float = 0.0
    wait_for_first_load: bool = False
