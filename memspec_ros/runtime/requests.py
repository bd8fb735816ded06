# SPDX-License-Identifier: Apache-2.0
"""A request, checked, and the pieces its answer comes in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
import math
import secrets

from ..decoding.sampling import LARGEST_SEED, Sampling
from ..decoding.stats import GenerationStats, StepRecord
from ..models.errors import ContextOverflowError, InvalidRequestError
from ..models.tokenizer import Tokenizer

# No tokenizer in use packs more characters into a token: a longer prompt is
# refused before it is tokenised.
_MOST_CHARACTERS_PER_TOKEN = 64
MOST_STOPS = 16


class Finish(str, Enum):
    """How an answer ended."""

    STOP = 'stop'
    LENGTH = 'length'
    CANCELED = 'canceled'
    TIMEOUT = 'timeout'
    OUT_OF_MEMORY = 'out_of_memory'
    CONTEXT_OVERFLOW = 'context_overflow'
    INVALID = 'invalid'
    INTERNAL = 'internal'


@dataclass(frozen=True)
class GenerationRequest:
    """
    What a client asks for.

    prompt: text; system_prompt: '' for none; history: earlier (role, text) turns
    of the conversation; max_new_tokens at least 1; stop: strings that end the
    answer; ignore_eos: go on past the end-of-sequence token; timeout_sec: from
    acceptance to the end, 0 for none; sampling: how tokens are chosen.
    """

    prompt: str
    system_prompt: str = ''
    history: Sequence[tuple[str, str]] = ()
    max_new_tokens: int = 128
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    timeout_sec: float = 0.0
    sampling: Sampling = Sampling()


@dataclass(frozen=True)
class PreparedRequest:
    """
    A request that was checked and tokenised: what the controller runs.

    session: the conversation it belongs to, '' for none.
    """

    prompt_ids: list[int]
    prompt_text: str
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    timeout_sec: float = 0.0
    accepted_at: float = 0.0
    sampling: Sampling = Sampling()
    session: str = ''


@dataclass
class Chunk:
    """
    A piece of an answer; all texts together are the answer's text.

    draft: id of the draft whose proposal the tokens came from, '' for none.
    The last chunk carries finish, message and stats. step: the iteration.
    """

    seq: int
    text: str
    token_ids: list[int]
    draft: str = ''
    last: bool = False
    finish: Finish | None = None
    message: str = ''
    stats: GenerationStats | None = None
    step: StepRecord | None = field(default=None, repr=False)


def prepare(request: GenerationRequest, tokenizer: Tokenizer, context: int,
            now: float, evicts: bool = False) -> PreparedRequest:
    """
    Check and tokenise a request before any work is done for it.

    ``context``: most tokens of prompt and output together; ``now``: the clock at
    acceptance. Where old positions are evicted (``evicts``), answers and what was said
    before may be longer than that, and only what is said now has to fit it. Raises
    InvalidRequestError naming the field, ContextOverflowError with both numbers.
    """
    if not request.prompt.strip():
        raise InvalidRequestError('prompt is empty')
    if request.max_new_tokens < 1:
        raise InvalidRequestError(
            f'max_new_tokens is {request.max_new_tokens}, expected at least 1')
    if not (math.isfinite(request.timeout_sec) and request.timeout_sec >= 0):
        raise InvalidRequestError(
            f'timeout_sec is {request.timeout_sec}, expected 0 (none) or more')
    if len(request.stop) > MOST_STOPS:
        raise InvalidRequestError(f'{len(request.stop)} stop strings, at most {MOST_STOPS}')
    if any(not stop for stop in request.stop):
        raise InvalidRequestError('a stop string is empty')
    sampling = request.sampling.checked(tokenizer.size)
    if not sampling.seed and not sampling.greedy:
        sampling = replace(sampling, seed=1 + secrets.randbelow(LARGEST_SEED))
    system = [{'role': 'system', 'content': request.system_prompt}] * bool(request.system_prompt)
    earlier = [{'role': role, 'content': text} for role, text in request.history]
    said = [{'role': 'user', 'content': request.prompt}]
    messages = [*system, *earlier, *said]
    characters = sum(len(message['content'])
                     for message in ([*system, *said] if evicts else messages))
    if characters > context * _MOST_CHARACTERS_PER_TOKEN:
        raise ContextOverflowError(
            f'the prompt has {characters} characters; the context holds {context} tokens')
    prompt_ids = tokenizer.encode_chat(messages)
    if not prompt_ids:
        raise InvalidRequestError('the prompt has no tokens')
    if evicts:
        if len(prompt_ids) > context and (
                count := len(tokenizer.encode_chat([*system, *said]))) > context:
            raise ContextOverflowError(
                f'prompt of {count} tokens does not fit the context of {context}; shorten it or '
                'raise context.max_tokens')
    elif len(prompt_ids) + request.max_new_tokens > context:
        raise ContextOverflowError(
            f'prompt of {len(prompt_ids)} tokens and {request.max_new_tokens} new ones do not '
            f'fit the context of {context}; shorten the prompt, lower max_new_tokens or raise '
            'context.max_tokens')
    return PreparedRequest(prompt_ids, request.prompt, request.max_new_tokens,
                           tuple(request.stop), request.ignore_eos, request.timeout_sec, now,
                           sampling)
