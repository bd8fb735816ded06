# SPDX-License-Identifier: Apache-2.0
"""What the node tells of itself: residency, model, diagnostics."""

from __future__ import annotations

import math

from diagnostic_msgs.msg import DiagnosticArray

from . import diagnostics, messages
from .memory.allocator import MIB
from .msg import ModelInfo, Residency
from .runtime.controller import Controller
from .runtime.residency import SlotState

RESIDENCY_MIN_PERIOD_SEC = 0.05
DIAGNOSTICS_PERIOD_SEC = 1.0
WINDOW_SEC = 30.0


class Reports:
    """
    Publishers of a MemSpecNode and what they say.

    Timers run on ``steady``: diagnostics go on while simulated time is paused.
    The node's runtime and worker are read once a message, since a transition on
    its own thread may take them away at any moment.
    """

    def __init__(self, node, steady, group):
        self._node = node
        self._steady = steady
        self._group = group
        self._shown = None
        self._residency_at = -math.inf
        self._timer = None
        self._residency = node.create_publisher(Residency, '~/residency', messages.QOS_RESIDENCY)
        self._model_info = node.create_publisher(ModelInfo, '~/model_info', messages.QOS_LATCHED)
        self._diagnostics = node.create_publisher(DiagnosticArray, '/diagnostics', 10)
        node.create_timer(DIAGNOSTICS_PERIOD_SEC, self._publish_diagnostics, clock=steady,
                          callback_group=group)

    def start(self, period: float) -> None:
        """Something is loaded: say so, and publish its residency every ``period`` seconds."""
        self._timer = self._node.create_timer(period, self._publish_residency,
                                              clock=self._steady, callback_group=self._group)
        self.publish_model_info()

    def stop(self) -> None:
        """Nothing is loaded any more."""
        if self._timer is not None:
            self._node.destroy_timer(self._timer)
            self._timer = None
        self._shown = None
        self.publish_model_info()

    def publish_model_info(self) -> None:
        """Publish what is loaded; empty where nothing is."""
        runtime, info = self._node.runtime, ModelInfo()
        if runtime is not None:
            info = messages.to_model_info(runtime, self._stamp())
        self._model_info.publish(info)

    def residency_changed(self) -> None:
        """Publish the residency if it has changed, at most 20 times a second (worker thread)."""
        runtime = self._node.runtime
        if runtime is None:
            return
        controller = runtime.controller
        shown = (controller.active, controller.desired, controller.residency.capacity,
                 tuple((view.id, view.state) for view in controller.residency.view()))
        if (shown != self._shown
                and controller.clock() - self._residency_at >= RESIDENCY_MIN_PERIOD_SEC):
            self._shown = shown
            self._publish_residency()

    def _stamp(self):
        return self._node.get_clock().now().to_msg()

    def _publish_residency(self) -> None:
        runtime = self._node.runtime
        controller = runtime.controller if runtime is not None else None
        if controller is None:
            return
        residency, counters = controller.residency, controller.residency.counters
        self._residency_at = controller.clock()
        message = Residency(
            capacity=controller.capacity, used_bytes=residency.used_bytes(),
            capacity_bytes=self._node.parameters['memory.budget_mib'] * MIB,
            drafts=messages.to_draft_residency(
                residency.view(), {spec.id: spec.kind for spec in runtime.bundle.drafting}),
            active=controller.active, desired=controller.desired, window_sec=WINDOW_SEC,
            **{name: getattr(counters, name) for name in (
                'hits', 'misses', 'evictions', 'prefetches_issued', 'prefetches_used',
                'prefetches_late', 'prefetches_wasted')}, **window_figures(controller))
        message.header.stamp = self._stamp()
        self._residency.publish(message)

    def _publish_diagnostics(self) -> None:
        node = self._node
        runtime = node.runtime
        target = runtime.target if runtime is not None else None
        hardware = 'memspec'
        if target is not None:
            hardware = f'{runtime.bundle.target.name} on {target.device}'
        self._diagnostics.publish(diagnostics.build(
            self._health(), node.get_fully_qualified_name(), hardware, self._stamp()))

    def _health(self) -> diagnostics.Health:
        node = self._node
        value, worker, runtime = node.parameters, node.worker, node.runtime
        health = diagnostics.Health(
            state=node.state_label, state_id=node.state_id,
            transition_error=node.transition_error,
            stall_limit_sec=value['diagnostics.stall_sec'], queue_max=value['queue.max_size'],
            queue_warn_fraction=value['diagnostics.queue_warn_fraction'],
            hit_rate_warn=value['diagnostics.hit_rate_warn'], requests=dict(node.desk.counts),
            speculation_wanted=value['draft.max_tokens'] > 0,
            memory=node.memory.reading(), memory_thresholds=node.memory.thresholds())
        if (guard := node.memory.guard) is not None:
            health.memory_level, health.limits = guard.level, guard.limits
            health.memory_reason, health.given_up = guard.reason, guard.given_up
        last = node.desk.last_stats
        if last is not None:
            health.last_tokens_per_sec = last.tokens_per_sec or 0.0
            health.last_time_to_first_token_sec = last.time_to_first_token_sec
        if worker is None or runtime is None:
            return health
        controller, target = runtime.controller, runtime.target
        if controller is None or target is None:
            return health
        if not runtime.bundle.drafting:
            health.speculation_off = 'the bundle has no drafts'
        health.worker_alive, health.running = worker.alive, worker.running is not None
        health.queue = worker.waiting
        health.stalled_sec = controller.clock() - worker.last_progress
        health.target_bytes = target.weight_bytes
        health.capacity = controller.capacity
        health.sessions = len(controller.sessions)
        health.sessions_bytes = controller.sessions.bytes
        health.kv_exact = runtime.options.kv.exact
        _add_controller(health, controller)
        return health


def _add_controller(health: diagnostics.Health, controller: Controller) -> None:
    """Figures of speculation and residency."""
    residency, counters = controller.residency, controller.residency.counters
    steps = [step for _, step in list(controller.recent_steps)]
    drafted = sum(step.drafted for step in steps)
    if steps:
        health.tokens_per_iteration = sum(step.emitted for step in steps) / len(steps)
    if drafted:
        health.acceptance = sum(step.accepted for step in steps) / drafted
    health.active, health.desired = controller.active, controller.desired
    health.resident = len(residency.resident)
    health.resident_bytes = residency.used_bytes()
    health.failed = {view.id: view.reason for view in residency.view()
                     if view.state is SlotState.FAILED}
    health.counters = {name: getattr(counters, name) for name in (
        'hits', 'misses', 'evictions', 'loads', 'failures')}
    asked = counters.hits + counters.misses
    health.hit_rate = counters.hits / asked if asked else None


def window_figures(controller: Controller) -> dict[str, float]:
    """Windowed figures of Residency.msg; NaN where nothing was measured."""
    since = controller.clock() - WINDOW_SEC
    steps = [step for at, step in list(controller.recent_steps) if at >= since]
    drafted = sum(step.drafted for step in steps)
    total = sum(step.duration + step.t_predict for step in steps)

    def share(value: float) -> float:
        return value / total if total else math.nan

    work = [(step.draft == step.desired, step.t_draft + step.t_verify) for step in steps]
    return {
        'acceptance_rate': (sum(step.accepted for step in steps) / drafted
                            if drafted else math.nan),
        'desired_fraction': share(sum(time for desired, time in work if desired)),
        'fallback_fraction': share(sum(time for desired, time in work if not desired)),
        'prediction_fraction': share(sum(step.t_predict for step in steps)),
        'load_wait_fraction': share(sum(step.t_wait for step in steps)),
        'catch_up_fraction': share(sum(step.t_catch_up for step in steps)),
    }
