# SPDX-License-Identifier: Apache-2.0
"""
/diagnostics of the node: five statuses, one plain number per key, units in the keys.

Published at 1 Hz in every lifecycle state. Idle is OK: only what wants a person's
attention is a warning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue

from .memory.pressure import PressureReading
from .runtime.memory_guard import Level, Limits, NO_LIMIT, Thresholds

OK, WARN, ERROR = DiagnosticStatus.OK, DiagnosticStatus.WARN, DiagnosticStatus.ERROR
_MIB = 1 << 20


@dataclass
class Health:
    """What the node knows of itself at one moment; see the builders below for its use."""

    state: str = 'unconfigured'
    state_id: int = 1
    transition_error: str = ''
    # Generation
    worker_alive: bool | None = None
    running: bool = False
    stalled_sec: float = 0.0
    stall_limit_sec: float = 30.0
    queue: int = 0
    queue_max: int = 1
    queue_warn_fraction: float = 0.8
    requests: Mapping[str, int] = field(default_factory=dict)
    last_tokens_per_sec: float = 0.0
    last_time_to_first_token_sec: float = 0.0
    # Speculation
    speculation_wanted: bool = True
    speculation_off: str = ''
    acceptance: float | None = None
    tokens_per_iteration: float | None = None
    active: str = ''
    desired: str = ''
    kv_exact: bool = True
    # Residency
    capacity: int = 0
    resident: int = 0
    resident_bytes: int = 0
    failed: Mapping[str, str] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    hit_rate: float | None = None
    hit_rate_warn: float = 0.0
    # Memory
    memory: PressureReading = PressureReading()
    memory_thresholds: Thresholds = Thresholds(0)
    memory_level: Level = Level.NORMAL
    memory_reason: str = ''
    given_up: Sequence[str] = ()
    limits: Limits = Limits()
    target_bytes: int = 0
    sessions: int = 0
    sessions_bytes: int = 0


def build(health: Health, node: str, hardware_id: str, stamp) -> DiagnosticArray:
    """All statuses; ``node`` is the fully qualified name, so that two nodes never collide."""
    array = DiagnosticArray()
    array.header.stamp = stamp
    for name, make in (('Lifecycle', _lifecycle), ('Generation', _generation),
                       ('Speculation', _speculation), ('Residency', _residency),
                       ('Memory', _memory)):
        level, message, values = make(health)
        array.status.append(DiagnosticStatus(
            level=level, name=f'{node}: {name}', message=message, hardware_id=hardware_id,
            values=[KeyValue(key=key, value=_text(value)) for key, value in values.items()]))
    return array


def _text(value) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return f'{value:.6g}' if isinstance(value, float) else str(value)


def _lifecycle(health: Health):
    values = {'state_id': health.state_id}
    if health.transition_error:
        return ERROR, health.transition_error, values
    if health.state in ('active', 'activating', 'configuring'):
        return OK, health.state, values
    return WARN, f'{health.state}: requests are refused', values


def _generation(health: Health):
    values = {'queue': health.queue, 'queue_max': health.queue_max, 'running': health.running,
              'last_tokens_per_sec': health.last_tokens_per_sec,
              'last_time_to_first_token_sec': health.last_time_to_first_token_sec,
              **{f'requests_{name.lower()}': count for name, count in health.requests.items()}}
    if health.worker_alive is False:
        return ERROR, 'the worker thread has died; clean up and configure again', values
    if health.running and health.stalled_sec > health.stall_limit_sec:
        return ERROR, f'no progress for {health.stalled_sec:.0f} s', values
    if health.queue >= health.queue_warn_fraction * health.queue_max and health.queue:
        return WARN, f'queue {health.queue} of {health.queue_max}', values
    return OK, 'generating' if health.running else 'idle', values


def _speculation(health: Health):
    # Drafts never change what is said; how keys and values are kept may.
    values = {'kv_exact': health.kv_exact}
    if health.acceptance is not None:
        values['acceptance_rate'] = health.acceptance
    if health.tokens_per_iteration is not None:
        values['tokens_per_iteration'] = health.tokens_per_iteration
    if not health.speculation_wanted:
        return OK, 'off, as draft.max_tokens is 0', values
    if health.speculation_off:
        return WARN, f'speculation is off: {health.speculation_off}', values
    if health.active != health.desired:
        return OK, f'on: {health.active or "the target alone"}, wanted {health.desired}', values
    return OK, f'on: {health.active}' if health.active else 'on', values


def _residency(health: Health):
    values = {'capacity': health.capacity, 'resident': health.resident,
              'resident_mib': health.resident_bytes / _MIB, **health.counters}
    if health.hit_rate is not None:
        values['hit_rate'] = health.hit_rate
    if health.failed:
        draft, reason = next(iter(health.failed.items()))
        return WARN, f'draft {draft} failed: {reason}', values
    if health.hit_rate is not None and health.hit_rate < health.hit_rate_warn:
        return WARN, f'the wanted draft was ready in {health.hit_rate:.0%} of intervals', values
    return OK, f'{health.resident} of {health.capacity} slots used', values


def _memory(health: Health):
    reading, thresholds, limits = health.memory, health.memory_thresholds, health.limits
    values = {'available_mib': reading.available / _MIB,
              'min_free_mib': thresholds.min_free / _MIB,
              'stall_percent_limit': thresholds.stall_percent,
              'target_mib': health.target_bytes / _MIB,
              'drafts_mib': health.resident_bytes / _MIB,
              'sessions': health.sessions,
              'sessions_mib': health.sessions_bytes / _MIB,
              'pressure_level': int(health.memory_level),
              'requests_refused': not limits.requests}
    if reading.stall_percent is not None:
        values['stall_percent'] = reading.stall_percent
    # Where there is no limit there is no number either.
    values |= {name: value for name, value in (
        ('drafts_limit', limits.drafts), ('gamma_limit', limits.gamma)) if value < NO_LIMIT}
    if health.given_up:
        return (WARN if limits.requests else ERROR,
                f'{health.memory_reason}; given up: {", ".join(health.given_up)}', values)
    if reading.available < thresholds.min_free:
        return WARN, (f'{reading.available / _MIB:.0f} MiB available, '
                      f'memory.min_free_mib is {thresholds.min_free / _MIB:.0f}'), values
    return OK, f'{reading.available / _MIB:.0f} MiB available', values
