# SPDX-License-Identifier: Apache-2.0
"""Between the runtime's plain data and ROS messages; nothing else knows both."""

from __future__ import annotations

from collections.abc import Iterable

from rclpy.qos import DurabilityPolicy, HistoryPolicy, QoSProfile, ReliabilityPolicy

from .decoding.sampling import NUMBERS, Sampling
from .decoding.stats import GenerationStats as Stats
from .models.errors import (
    ContextOverflowError,
    InsufficientMemoryError,
    InvalidRequestError,
)
from .models.kv_options import KVOptions
from .msg import (
    DraftCount,
    DraftInfo,
    DraftResidency,
    GenerateRequest,
    GenerationStats,
    GenerationStatus,
    ModelInfo,
    SamplingParams,
)
from .runtime.requests import Finish, GenerationRequest
from .runtime.residency import DraftView
from .runtime.runtime import Runtime
from .runtime.worker import Job, JobState, QueueFullError

QOS_TOKENS = QoSProfile(depth=256, history=HistoryPolicy.KEEP_LAST,
                        reliability=ReliabilityPolicy.RELIABLE,
                        durability=DurabilityPolicy.VOLATILE)
QOS_RESIDENCY = QoSProfile(depth=10, history=HistoryPolicy.KEEP_LAST,
                           reliability=ReliabilityPolicy.RELIABLE,
                           durability=DurabilityPolicy.VOLATILE)
QOS_LATCHED = QoSProfile(depth=1, history=HistoryPolicy.KEEP_LAST,
                         reliability=ReliabilityPolicy.RELIABLE,
                         durability=DurabilityPolicy.TRANSIENT_LOCAL)
# The default depth of services (10) drops bursts in silence.
QOS_SERVICE = QoSProfile(depth=100, history=HistoryPolicy.KEEP_LAST,
                         reliability=ReliabilityPolicy.RELIABLE,
                         durability=DurabilityPolicy.VOLATILE)

_CODES = {
    Finish.STOP: GenerationStatus.OK,
    Finish.LENGTH: GenerationStatus.LENGTH,
    Finish.CANCELED: GenerationStatus.CANCELED,
    Finish.TIMEOUT: GenerationStatus.TIMEOUT,
    Finish.OUT_OF_MEMORY: GenerationStatus.OUT_OF_MEMORY,
    Finish.CONTEXT_OVERFLOW: GenerationStatus.CONTEXT_OVERFLOW,
    Finish.INVALID: GenerationStatus.INVALID,
    Finish.INTERNAL: GenerationStatus.INTERNAL,
}
STATUS_NAMES = {getattr(GenerationStatus, name): name for name in (
    'OK', 'LENGTH', 'CANCELED', 'TIMEOUT', 'QUEUE_FULL', 'NOT_ACTIVE', 'INVALID',
    'CONTEXT_OVERFLOW', 'OUT_OF_MEMORY', 'INTERNAL', 'PENDING', 'RUNNING')}


def to_text(text: str) -> str:
    """Text as a ROS string can hold it: U+0000 would end it there, U+FFFD stands for it."""
    return text.replace('\0', '\ufffd')


def status(code: int, message: str = '') -> GenerationStatus:
    """Make a GenerationStatus."""
    return GenerationStatus(code=code, message=message)


def job_status(job: Job) -> GenerationStatus:
    """Where a job stands."""
    if job.state is JobState.PENDING:
        return status(GenerationStatus.PENDING)
    if job.state is JobState.RUNNING:
        return status(GenerationStatus.RUNNING)
    return status(_CODES[job.finish], job.message)


def finish_status(finish: Finish, message: str) -> GenerationStatus:
    """Status of an ended request."""
    return status(_CODES[finish], message)


def refusal(error: Exception) -> GenerationStatus:
    """Status of a request that was not accepted."""
    if isinstance(error, QueueFullError):
        return status(GenerationStatus.QUEUE_FULL, str(error))
    if isinstance(error, InsufficientMemoryError):
        return status(GenerationStatus.OUT_OF_MEMORY, str(error))
    if isinstance(error, ContextOverflowError):
        return status(GenerationStatus.CONTEXT_OVERFLOW, str(error))
    if isinstance(error, InvalidRequestError):
        return status(GenerationStatus.INVALID, str(error))
    return status(GenerationStatus.INTERNAL, f'{type(error).__name__}: {error}')


def to_request(message: GenerateRequest, defaults, history) -> GenerationRequest:
    """
    Fill a request's zeros from the node's parameters ``defaults`` (by name).

    Raises InvalidRequestError for what cannot be meant.
    """
    if message.max_new_tokens < 0:
        raise InvalidRequestError(
            f'max_new_tokens is {message.max_new_tokens}, expected 0 (the parameter '
            'sampling.max_new_tokens) or more')
    if message.sampling:
        sampling, ignore_eos = to_sampling(message.sampling[0]), message.sampling[0].ignore_eos
    else:
        sampling = Sampling(**{field.name: defaults[f'sampling.{field.name}']
                               for field in NUMBERS})
        ignore_eos = defaults['sampling.ignore_eos']
    timeout = message.timeout_sec
    return GenerationRequest(
        prompt=message.prompt,
        system_prompt=message.system_prompt or defaults['system_prompt'],
        history=history,
        max_new_tokens=message.max_new_tokens or defaults['sampling.max_new_tokens'],
        stop=tuple(message.stop), ignore_eos=ignore_eos,
        timeout_sec=timeout if timeout != 0.0 else defaults['request_timeout_sec'],
        sampling=sampling)


def to_sampling(message: SamplingParams) -> Sampling:
    """Sampling of a request that brings its own; raises InvalidRequestError."""
    ids, values = list(message.logit_bias_ids), list(message.logit_bias_values)
    if len(ids) != len(values):
        raise InvalidRequestError(
            f'sampling.logit_bias_ids has {len(ids)} elements and sampling.logit_bias_values '
            f'{len(values)}, expected as many')
    return Sampling(**{field.name: getattr(message, field.name) for field in NUMBERS},
                    logit_bias=tuple(zip(ids, values)))


def to_stats(stats: Stats | None) -> GenerationStats:
    """Statistics of a request; all zero where there are none yet."""
    if stats is None:
        return GenerationStats()
    message = GenerationStats(
        prompt_tokens=stats.prompt_tokens, cached_tokens=stats.cached_tokens,
        output_tokens=stats.output_tokens, iterations=stats.iterations,
        drafted_tokens=stats.drafted, accepted_tokens=stats.accepted, switches=stats.switches,
        drafts=[DraftCount(draft=draft, proposed=count.proposed, accepted=count.accepted)
                for draft, count in stats.drafts.items()])
    for name in ('desired_sec', 'fallback_sec', 'prediction_sec', 'load_wait_sec',
                 'catch_up_sec', 'other_sec', 'queue_sec', 'time_to_first_token_sec',
                 'total_sec'):
        setattr(message, name, float(getattr(stats, name)))
    message.tokens_per_sec = float(stats.tokens_per_sec or 0.0)
    message.inter_token_p50_sec = float(stats.inter_token(0.5) or 0.0)
    message.inter_token_p95_sec = float(stats.inter_token(0.95) or 0.0)
    return message


def to_draft_residency(views: Iterable[DraftView], kinds: dict[str, str]) -> list[DraftResidency]:
    """States of all drafts."""
    return [DraftResidency(id=view.id, kind=kinds[view.id], state=int(view.state),
                           score=float(view.score), bytes=view.bytes,
                           progress=float(view.progress), reason=view.reason)
            for view in views]


def _dtype(target, kv: KVOptions) -> str:
    computed = str(target.dtype).removeprefix('torch.')
    kinds = ', '.join(target.weight_kinds)
    weights = '' if kinds == computed else f', weights {kinds}'
    return computed + weights + ('' if kv.exact else f', kv {kv} (not exact)')


def to_model_info(runtime: Runtime, stamp) -> ModelInfo:
    """What is loaded."""
    bundle, target = runtime.bundle, runtime.target
    info = ModelInfo(
        bundle=bundle.name, bundle_path=str(bundle.directory.resolve()),
        target=bundle.target.name, architecture=runtime.architecture,
        license=bundle.target.licence, device=str(target.device),
        dtype=_dtype(target, runtime.options.kv), target_bytes=target.weight_bytes,
        vocab_size=runtime.tokenizer.size, context_tokens=runtime.options.context,
        drafts=[DraftInfo(id=spec.id, kind=spec.kind, domain=spec.domain, bytes=spec.bytes,
                          license=spec.licence) for spec in bundle.drafting],
        ranker=bundle.ranker.kind, policy=runtime.options.policy)
    info.header.stamp = stamp
    return info
