# SPDX-License-Identifier: Apache-2.0
"""The target's tokenizer: chat template, ids, and whether a draft speaks the same ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import json
from pathlib import Path
import threading

from .errors import BundleError, InvalidRequestError, VocabularyMismatchError


class Tokenizer:
    """
    Thin face of a Hugging Face tokenizer, with what decoding needs.

    Attributes
    ----------
    size: number of real ids (a model's padded vocabulary may be larger)
    special_ids: ids that never appear in text

    """

    def __init__(self, path: Path):
        from transformers import AutoTokenizer
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except Exception as error:  # noqa: BLE001 (its parsers raise bare Exceptions)
            raise BundleError(f'{path}: no usable tokenizer there ({error})') from error
        # The tokenizer switches settings while it encodes, and fails when a second thread enters.
        self._lock = threading.Lock()
        self.size = len(self._tokenizer)
        self.special_ids = frozenset(self._tokenizer.all_special_ids)
        self.eos_id: int | None = self._tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, nothing added."""
        with self._lock:
            return self._tokenizer.encode(text, add_special_tokens=False)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """
        Token ids of a conversation, up to where the assistant's answer begins.

        Through the chat template and tokenised once: a template that writes its
        own beginning-of-sequence token would otherwise get two. A model without
        a template (a base model) gets the texts joined by blank lines. Raises
        InvalidRequestError where the template refuses the conversation.
        """
        try:
            with self._lock:
                if getattr(self._tokenizer, 'chat_template', None):
                    return list(self._tokenizer.apply_chat_template(
                        list(messages), add_generation_prompt=True, return_dict=False))
                return self._tokenizer.encode('\n\n'.join(m['content'] for m in messages))
        except Exception as error:
            # A role the template refuses, text that is not Unicode: the request's fault.
            raise InvalidRequestError(f'the prompt cannot be encoded ({error})') from error

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        with self._lock:
            return self._tokenizer.decode(list(ids), skip_special_tokens=True,
                                          clean_up_tokenization_spaces=False)


def read_vocabulary(path: Path) -> dict[int, str]:
    """Map id -> token of the ``tokenizer.json`` in directory ``path``."""
    file = path / 'tokenizer.json'
    try:
        raw = json.loads(file.read_text(encoding='utf-8'))
        vocabulary = raw['model']['vocab']
        pairs = ([(token, i) for i, (token, _) in enumerate(vocabulary)]
                 if isinstance(vocabulary, list) else vocabulary.items())
        ids = {i: token for token, i in pairs}
        ids.update((entry['id'], entry['content']) for entry in raw.get('added_tokens', []))
        return ids
    except OSError as error:
        raise BundleError(f'{file}: {error.strerror or error}') from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleError(f'{file}: not a tokenizer file ({error})') from error


def check_same_vocabulary(target: Mapping[int, str], draft: Mapping[int, str], name: str) -> None:
    """
    Refuse a draft whose ids mean something else than the target's.

    Padded sizes do not matter, real ids do. A draft may lack ids (it never
    proposes them); one it has must be the same token. Raises
    VocabularyMismatchError naming the first differing id.
    """
    for i in sorted(draft):
        if i in target and target[i] != draft[i]:
            raise VocabularyMismatchError(
                f'draft {name!r}: id {i} is {draft[i]!r}, in the target it is {target[i]!r}; '
                'a draft needs the tokenizer of its target')
        if i not in target:
            raise VocabularyMismatchError(
                f'draft {name!r}: id {i} ({draft[i]!r}) does not exist in the target')
