# SPDX-License-Identifier: Apache-2.0
"""
From a GGUF file to a Hugging Face directory, once, cached by the file's hash.

Loading GGUF dequantises every tensor and rebuilds the tokenizer (about 20 s);
the converted directory loads in a second.
"""

from __future__ import annotations

from collections.abc import Callable
import contextlib
from pathlib import Path
import shutil
import tempfile

from .errors import BundleError
from .weights import file_sha256

_DONE = 'converted-from.sha256'
Progress = Callable[[str, float], None]


def converted_gguf(gguf: Path, sha256: str, cache: Path,
                   progress: Progress | None = None) -> Path:
    """
    The Hugging Face directory made from ``gguf``, converting it if there is none yet.

    Safe against interruption and against two processes at once: the work happens
    in a directory of its own that is renamed when complete.
    """
    destination = cache / 'converted' / sha256[:16]
    if _is_complete(destination, sha256):
        return destination
    if progress:
        progress('checking the target file', 0.0)
    actual = file_sha256(gguf)
    if actual != sha256:
        raise BundleError(f'target: {gguf} has sha256 {actual}, the manifest says {sha256}: '
                          'the file is damaged or was replaced')
    destination.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix='converting-', dir=destination.parent))
    try:
        _convert(gguf, work, progress)
        (work / _DONE).write_text(sha256 + '\n')
        if destination.exists() and not _is_complete(destination, sha256):
            shutil.rmtree(destination)
        with contextlib.suppress(OSError):  # another process was first: its result is the same
            work.rename(destination)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if not _is_complete(destination, sha256):
        raise BundleError(f'target: conversion left nothing usable in {destination}')
    return destination


def _is_complete(directory: Path, sha256: str) -> bool:
    try:
        return (directory / _DONE).read_text().strip() == sha256
    except OSError:
        return False


def _convert(gguf: Path, destination: Path, progress: Progress | None) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    try:
        if progress:
            progress('converting the target (once)', 0.1)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True)
        # The reader leaves its quantiser behind, and saving would ask it to quantise again.
        model.hf_quantizer = None
        if hasattr(model.config, 'quantization_config'):
            del model.config.quantization_config
        model.config.dtype = torch.bfloat16
        if progress:
            progress('converting the target (once)', 0.6)
        model.to(torch.bfloat16).save_pretrained(destination)
        if progress:
            progress('converting the tokenizer (once)', 0.8)
        tokenizer = AutoTokenizer.from_pretrained(
            gguf.parent, gguf_file=gguf.name, local_files_only=True)
        tokenizer.save_pretrained(destination)
        if progress:
            progress('converted', 1.0)
    except ImportError as error:
        raise BundleError(
            f'converting {gguf.name} needs the Python packages gguf and accelerate '
            f'({error}); install requirements/runtime.txt') from error
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        raise BundleError(f'target: {gguf} cannot be converted ({error})') from error
