# SPDX-License-Identifier: Apache-2.0
"""
Which target a draft was made for.

``memspec distill`` writes the target's fingerprint into the metadata of a draft
file. Shapes alone do not tell two targets of a family apart, and a draft of the
other one would load, and be wrong nearly always. The same target in another type or
quantised is still the draft's own, unlike for what it is distilled from
(training.teacher.weights_sha256).
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import torch

from .bundle import Bundle, draft_metadata, DraftSpec
from .errors import BundleError, MemSpecError
from .llama_config import LlamaConfig, SUPPORTED_MODEL_TYPES
from .target import open_checkpoint, read_config
from .target_files import locate_target

# Key in the metadata of a draft file.
TARGET_KEY = 'target_fingerprint'
_EMBEDDING = 'model.embed_tokens.weight'
_PIECES, _PIECE = 16, 16384
_SHOWN = 12


def target_fingerprint(directory: Path) -> str:
    """
    Fingerprint of the target in a Hugging Face directory: 64 hexadecimal digits.

    Of its sizes and the signs of a quarter of a million numbers of its embedding,
    which further training changes, and neither another type of the numbers nor
    quantising the layers does. '' for families without a lean path: no draft is
    distilled for them. Raises MemSpecError for files that cannot be read.
    """
    raw = read_config(directory)
    if raw.get('model_type') not in SUPPORTED_MODEL_TYPES:
        return ''
    config = LlamaConfig.from_hf(raw)
    digest = hashlib.sha256(json.dumps([
        config.vocab_size, config.hidden_size, config.intermediate_size, config.layers,
        config.heads, config.kv_heads, config.head_dim]).encode())
    with open_checkpoint(directory) as weights:
        if _EMBEDDING not in weights:
            raise BundleError(f'{directory}: tensor {_EMBEDDING} is missing')
        total = math.prod(weights.shape(_EMBEDDING))
        for piece in range(_PIECES):
            first = piece * max(0, total - _PIECE) // (_PIECES - 1)
            values = weights.values_of(_EMBEDDING, first, min(_PIECE, total))
            digest.update(torch.signbit(values).numpy().tobytes())
    return digest.hexdigest()


def strangers(bundle: Bundle) -> dict[str, str]:
    """
    Drafts of a bundle that were made for another target: id -> the reason to give.

    A draft whose file does not say is none of them.
    """
    said = {spec.id: _target_of(bundle, spec) for spec in bundle.drafts}
    if not any(said.values()):
        return {}
    ours = target_fingerprint(bundle.target_path or locate_target(bundle))
    return {draft: f'draft {draft!r} was distilled for another target: its file names '
                   f'{theirs[:_SHOWN]}, {bundle.target.name} of this bundle is {ours[:_SHOWN]}; '
                   'distil it for this one, or use the bundle it came from'
            for draft, theirs in said.items() if theirs and ours and theirs != ours}


def _target_of(bundle: Bundle, spec: DraftSpec) -> str:
    try:
        return draft_metadata(bundle, spec).get(TARGET_KEY, '')
    except MemSpecError:
        return ''  # its load says what is wrong with the file
