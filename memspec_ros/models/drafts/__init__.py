# SPDX-License-Identifier: Apache-2.0
"""
Draft kinds, one file each, behind one interface.

A kind registers a DraftKind class under its name in ``KINDS``. The class reads
what it needs at configure time (once, on one thread); ``attach`` turns bytes
that the loader brought into a Drafter.
"""

from __future__ import annotations

from .base import Drafter, DraftKind
from .causal_lm import CausalLMKind
from .feature import FeatureKind
from .prompt_lookup import PromptLookupKind
from .self_speculation import SelfSpeculationKind
from .shared_layers import SharedLayersKind

KINDS: dict[str, type[DraftKind]] = {
    'causal_lm': CausalLMKind,
    'feature': FeatureKind,
    'prompt_lookup': PromptLookupKind,
    'self_speculation': SelfSpeculationKind,
    'shared_layers': SharedLayersKind,
}

__all__ = ['KINDS', 'DraftKind', 'Drafter']
