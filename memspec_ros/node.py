# SPDX-License-Identifier: Apache-2.0
"""
The memspec lifecycle node.

Callbacks run on one executor thread and never block: they enqueue, flag, look
or await. The worker thread generates and publishes tokens; transitions run on a
thread of their own; the loader thread belongs to the runtime.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
import contextlib
import math
import signal
import sys
import threading
import time
import traceback
import uuid

from diagnostic_msgs.msg import DiagnosticArray
from lifecycle_msgs.msg import State, Transition
import rclpy
from rclpy.action import ActionServer, CancelResponse, GoalResponse
from rclpy.clock import Clock, ClockType
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.qos import qos_profile_services_default
from rclpy.signals import SignalHandlerOptions
from rclpy.task import Future

from . import diagnostics, messages
from .action import Generate as GenerateAction
from .lifecycle import ERROR, FAILURE, ResponsiveLifecycleNode, SUCCESS
from .memory import preflight
from .memory.allocator import give_back
from .memory.footprint import affordable_capacity, draft_bytes, estimate, MIB
from .models.bundle import load_bundle
from .models.errors import InvalidRequestError, MemSpecError
from .models.target_files import locate_target
from .msg import GenerateRequest, GenerationStatus, ModelInfo, Residency, TokenChunk
from .parameters import NodeParameters
from .runtime.controller import Settings
from .runtime.residency import SlotState
from .runtime.runtime import choose_device, choose_dtype, Runtime, RuntimeOptions
from .runtime.worker import GenerationWorker, Job, QueueFullError
from .srv import Cancel, Generate, GetResult, Submit

RESIDENCY_MIN_PERIOD_SEC = 0.05
WINDOW_SEC = 30.0
KEPT_SESSIONS = 16
# Long enough for a slow client to ask, short enough to keep memory flat.
ACTION_RESULT_TIMEOUT_SEC = 60
# For the last answers to leave before the process ends.
FAREWELL_SEC = 0.5


class StoppedError(MemSpecError):
    """A transition was given up since the process is to end."""


class _Stream:
    """Puts an answer's chunks together to at most one message per period, on the worker thread."""

    def __init__(self, publish: Callable[[TokenChunk], None], request_id: str, period: float,
                 clock: Callable[[], float], stamp: Callable):
        self._publish = publish
        self._period = period
        self._clock = clock
        self._stamp = stamp
        self._last_at = -math.inf
        self._pending = TokenChunk(request_id=request_id)
        self._seq = 0

    def add(self, chunk) -> None:
        pending = self._pending
        pending.text += messages.to_text(chunk.text)
        pending.token_ids.extend(chunk.token_ids)
        pending.draft = chunk.draft
        if chunk.last:
            pending.last = True
            pending.status = messages.finish_status(chunk.finish, chunk.message)
            pending.stats = [messages.to_stats(chunk.stats)]
        elif not pending.token_ids or self._clock() - self._last_at < self._period:
            return
        else:
            pending.status.code = GenerationStatus.RUNNING
        pending.seq = self._seq
        pending.header.stamp = self._stamp()
        self._publish(pending)
        self._seq += 1
        self._last_at = self._clock()
        self._pending = TokenChunk(request_id=pending.request_id)


class MemSpecNode(ResponsiveLifecycleNode):
    """See README.md for the interface; docs/ros_interface.md for all of it."""

    def __init__(self, **kwargs):
        super().__init__('memspec', **kwargs)
        self.runtime: Runtime | None = None
        self.worker: GenerationWorker | None = None
        # A request is queued either before the drain of a transition, or not at all.
        self._gate = threading.Lock()
        self._accepting = False
        self._stopping = threading.Event()
        self._transition_error = ''
        self._requests: Counter[str] = Counter()
        self._last_stats = None
        self._sessions: OrderedDict[str, list[tuple[str, str]]] = OrderedDict()
        self._residency_shown = None
        self._residency_at = -math.inf
        self.parameters = NodeParameters(
            self, lambda: self.state_id != State.PRIMARY_STATE_UNCONFIGURED)
        # Diagnostics and residency go on while simulated time is paused.
        self._steady = Clock(clock_type=ClockType.STEADY_TIME)
        self._make_interface()
        if self.parameters['autostart']:
            self._autostart_timer = self.create_timer(
                0.1, self._autostart, clock=self._steady, callback_group=self.reentrant_group)

    # --- interface -----------------------------------------------------------------------------

    def _make_interface(self) -> None:
        group = self.reentrant_group
        self._tokens = self.create_lifecycle_publisher(
            TokenChunk, '~/tokens', messages.QOS_TOKENS,
            qos_overriding_options=_qos_overrides())
        self._residency = self.create_publisher(Residency, '~/residency', messages.QOS_RESIDENCY)
        self._model_info = self.create_publisher(ModelInfo, '~/model_info', messages.QOS_LATCHED)
        self._diagnostics = self.create_publisher(DiagnosticArray, '/diagnostics', 10)
        for kind, name, callback in (
                (Generate, '~/generate', self._on_generate),
                (Submit, '~/submit', self._on_submit),
                (GetResult, '~/get_result', self._on_get_result),
                (Cancel, '~/cancel', self._on_cancel)):
            self.create_service(kind, name, callback, callback_group=group,
                                qos_profile=messages.QOS_SERVICE)
        self._action = ActionServer(
            self, GenerateAction, '~/generate_stream', self._on_action,
            callback_group=group, goal_callback=lambda goal: GoalResponse.ACCEPT,
            cancel_callback=self._on_action_cancel, result_timeout=ACTION_RESULT_TIMEOUT_SEC,
            goal_service_qos_profile=messages.QOS_SERVICE,
            result_service_qos_profile=messages.QOS_SERVICE,
            cancel_service_qos_profile=qos_profile_services_default,
            feedback_pub_qos_profile=messages.QOS_TOKENS)
        self.create_timer(1.0, self._publish_diagnostics, clock=self._steady,
                          callback_group=group)
        self._residency_timer = None
        self._publish_model_info()

    async def _on_generate(self, request: Generate.Request,
                           response: Generate.Response) -> Generate.Response:
        future = Future()
        job, refused = self._enqueue(request.request,
                                     lambda job: self.resolve(future, job))
        response.request_id = job.id if job else request.request.request_id
        if refused is not None:
            response.status = refused
            return response
        await future
        response.text, response.token_ids = messages.to_text(job.text), job.token_ids
        response.status, response.stats = messages.job_status(job), messages.to_stats(job.stats)
        return response

    def _on_submit(self, request: Submit.Request, response: Submit.Response) -> Submit.Response:
        job, refused = self._enqueue(request.request)
        response.accepted = refused is None
        response.request_id = job.id if job else request.request.request_id
        response.status = refused or messages.status(GenerationStatus.PENDING)
        response.queue_position = job.position if job else 0
        return response

    def _on_get_result(self, request: GetResult.Request,
                       response: GetResult.Response) -> GetResult.Response:
        worker = self.worker
        job = worker.find(request.request_id) if worker else None
        response.request_id, response.found = request.request_id, job is not None
        if job is None:
            response.status = messages.status(
                GenerationStatus.INVALID,
                f'no request {request.request_id!r}, or its result is no longer kept')
            return response
        response.text, response.token_ids = messages.to_text(job.text), list(job.token_ids)
        response.status, response.stats = messages.job_status(job), messages.to_stats(job.stats)
        return response

    def _on_cancel(self, request: Cancel.Request, response: Cancel.Response) -> Cancel.Response:
        worker = self.worker
        response.canceled = worker.cancel(request.request_id) if worker else 0
        response.success = bool(response.canceled) or not request.request_id
        if not response.success:
            response.message = f'no request {request.request_id!r} is waiting or running'
        return response

    async def _on_action(self, goal_handle) -> GenerateAction.Result:
        future = Future()

        def feedback(chunk: TokenChunk) -> None:
            with contextlib.suppress(Exception):  # lossy by design: the result is authoritative
                goal_handle.publish_feedback(GenerateAction.Feedback(chunk=chunk))

        job, refused = self._enqueue(goal_handle.request.request,
                                     lambda job: self.resolve(future, job), feedback)
        result = GenerateAction.Result()
        if refused is not None:
            result.request_id, result.status = goal_handle.request.request.request_id, refused
            goal_handle.abort()
            return result
        goal_handle.memspec_job = job.id
        if goal_handle.is_cancel_requested:
            self.worker.cancel(job.id)
        await future
        result.request_id = job.id
        result.text, result.token_ids = messages.to_text(job.text), job.token_ids
        result.status, result.stats = messages.job_status(job), messages.to_stats(job.stats)
        if result.status.code in (GenerationStatus.OK, GenerationStatus.LENGTH):
            goal_handle.succeed()
        elif goal_handle.is_cancel_requested:
            goal_handle.canceled()
        else:
            goal_handle.abort()
        return result

    def _on_action_cancel(self, goal_handle) -> CancelResponse:
        job = getattr(goal_handle, 'memspec_job', None)
        if job is not None and self.worker is not None:
            self.worker.cancel(job)
        return CancelResponse.ACCEPT

    # --- requests ------------------------------------------------------------------------------

    def _enqueue(self, message: GenerateRequest, on_end: Callable[[Job], None] | None = None,
                 feedback: Callable[[TokenChunk], None] | None = None):
        """Check and queue a request: (job, None), or (None, status that says why not)."""
        worker, runtime = self.worker, self.runtime
        if not self._accepting or worker is None or runtime is None:
            return None, self._not_active()
        try:
            history = self._sessions.get(message.session_id, []) if message.session_id else []
            prepared = runtime.prepare(messages.to_request(message, self.parameters, history))
            job = Job(message.request_id or uuid.uuid4().hex, prepared, message.client_id,
                      message.priority)
            job.on_chunk = self._listener(job, message, on_end, feedback)
            with self._gate:
                if self._accepting:
                    worker.submit(job)
                    return job, None
            refused = self._not_active()
        except (InvalidRequestError, QueueFullError) as error:
            refused = messages.refusal(error)
        except Exception as error:  # noqa: BLE001 (a request must never end the executor)
            self.get_logger().error(f'request refused: {type(error).__name__}: {error}')
            refused = messages.refusal(error)
        self._requests[messages.STATUS_NAMES[refused.code]] += 1
        return None, refused

    def _not_active(self) -> GenerationStatus:
        return messages.status(GenerationStatus.NOT_ACTIVE,
                               f'the node is {self.state_label}; activate it first')

    def _refuse_requests(self) -> None:
        with self._gate:
            self._accepting = False

    def _listener(self, job: Job, message: GenerateRequest, on_end, feedback):
        """What happens with each chunk of a job, on the worker thread."""
        period = self.parameters['stream.min_period_sec']

        def publish(chunk: TokenChunk) -> None:
            self._tokens.publish(chunk)
            if feedback is not None:
                feedback(chunk)

        stream = _Stream(publish, job.id, period, self.runtime.controller.clock,
                         lambda: self.get_clock().now().to_msg())

        def on_chunk(job: Job, chunk) -> None:
            stream.add(chunk)
            self._publish_residency_if_changed()
            if chunk.last:
                self._finish(job, message)
                if on_end is not None:
                    on_end(job)

        return on_chunk

    def _finish(self, job: Job, message: GenerateRequest) -> None:
        code = messages.job_status(job).code
        self._requests[messages.STATUS_NAMES[code]] += 1
        if job.token_ids:  # the figures of one that never began say nothing
            self._last_stats = job.stats
        if code in (GenerationStatus.INTERNAL, GenerationStatus.OUT_OF_MEMORY):
            self.get_logger().error(f'request {job.id} failed: {job.message}')
        if message.session_id and code in (GenerationStatus.OK, GenerationStatus.LENGTH):
            turns = self._sessions.setdefault(message.session_id, [])
            self._sessions[message.session_id] = [
                *turns, ('user', message.prompt), ('assistant', job.text)]
            self._sessions.move_to_end(message.session_id)
            while len(self._sessions) > KEPT_SESSIONS:
                self._sessions.popitem(last=False)

    # --- lifecycle -----------------------------------------------------------------------------

    def on_configure(self, state) -> object:
        return self._transition('configure', self._configure, state)

    def on_activate(self, state) -> object:
        return self._transition('activate', self._activate, state)

    def on_deactivate(self, state) -> object:
        return self._transition('deactivate', self._deactivate, state)

    def on_cleanup(self, state) -> object:
        return self._transition('clean up', self._release, state, super().on_cleanup)

    def on_shutdown(self, state) -> object:
        return self._transition('shut down', self._release, state, super().on_shutdown)

    def on_error(self, state) -> object:
        reason = self._transition_error
        result = self._transition('recover', self._release, state, super().on_error)
        # Being unconfigured again does not mend what led here.
        self._transition_error = self._transition_error or reason
        return result

    def _transition(self, name: str, work: Callable[..., object], *arguments) -> object:
        """Run a transition: a MemSpecError is a FAILURE with its reason, a fault an ERROR."""
        try:
            result = work(*arguments)
            self._transition_error = ''
            return result
        except MemSpecError as error:
            # One line, whatever a parser below has to say.
            self._transition_error = f'cannot {name}: {" ".join(str(error).split())}'
            self.get_logger().error(self._transition_error)
            return FAILURE
        except Exception as error:  # noqa: BLE001 (rclpy would swallow it without a word)
            self._transition_error = f'cannot {name}: {type(error).__name__}: {error}; see the log'
            self.get_logger().error(f'cannot {name}:\n{traceback.format_exc()}')
            return ERROR

    def _configure(self, state) -> object:
        if self.parameters.errors:
            raise InvalidRequestError('; '.join(self.parameters.errors.values()))
        self.get_logger().info(f'configuring with {self.parameters.effective()}')
        with preflight.machine_lock(while_waiting=self._check_stopping):
            options = self._preflight()
            self.runtime = Runtime.open(self.parameters['bundle'] or None, options,
                                        progress=self._log_progress())
        self.worker = GenerationWorker(
            self.runtime.controller, lambda: self.parameters['queue.max_size'],
            lambda text: self.get_logger().error(text))
        self._residency_timer = self.create_timer(
            self.parameters['residency.period_sec'], self._publish_residency,
            clock=self._steady, callback_group=self.reentrant_group)
        self._publish_model_info()
        return super().on_configure(state)

    def _preflight(self) -> RuntimeOptions:
        """Refuse what will not fit; returns the options with K worked out."""
        value = self.parameters
        bundle = load_bundle(value['bundle'] or None, verify=False)
        locate_target(bundle, self._log_progress())
        device = choose_device(value['device'])
        dtype = choose_dtype(value['dtype'], device)
        gamma, budget = value['draft.max_tokens'], value['memory.budget_mib'] * MIB
        sizes = [draft_bytes(bundle, spec, dtype) for spec in bundle.drafts]
        capacity = value['cache_capacity']
        context = value['context.max_tokens']
        fixed = estimate(bundle, dtype, device, context, gamma, 0)
        self._affordable_capacity = affordable_capacity(fixed.total, sizes, budget)
        if capacity < 0:
            capacity = self._affordable_capacity
        footprint = estimate(bundle, dtype, device, context, gamma, capacity)
        preflight.check(footprint, preflight.available_bytes(device), budget,
                        value['memory.min_free_mib'] * MIB)
        return RuntimeOptions(
            device=value['device'], dtype=value['dtype'], context=context, max_gamma=gamma,
            adaptive=value['draft.adaptive'], policy=value['policy'], threads=value['threads'],
            settings=_LiveSettings(self))

    def _activate(self, state) -> object:
        result = super().on_activate(state)
        self._accepting = result is SUCCESS
        return result

    def _deactivate(self, state) -> object:
        self._refuse_requests()
        # Before the publishers close: every client gets its last chunk.
        if self.worker is not None:
            self.worker.drain()
        if self.parameters['release_on_deactivate'] and self.runtime is not None:
            self.runtime.controller.reset()
        return super().on_deactivate(state)

    def _release(self, state, close_entities: Callable) -> object:
        """Cleanup, shutdown and error alike: drain, end the threads, drop the weights."""
        self._refuse_requests()
        if self._residency_timer is not None:
            self.destroy_timer(self._residency_timer)
            self._residency_timer = None
        if self.worker is not None:
            self.worker.close()
            self.worker = None
        runtime, self.runtime = self.runtime, None
        if runtime is not None:
            runtime.close()
            del runtime
            give_back()
        self._sessions.clear()
        self._residency_shown = None
        self._publish_model_info()
        return close_entities(state)

    async def _autostart(self) -> None:
        self.destroy_timer(self._autostart_timer)

        def start() -> None:
            if self.change_state(Transition.TRANSITION_CONFIGURE):
                self.change_state(Transition.TRANSITION_ACTIVATE)
            else:
                self.get_logger().error('autostart: configure did not succeed; mend the cause '
                                        'and configure the node by its lifecycle services')

        await self.run_beside(start)

    def _log_progress(self) -> Callable[[str, float], None]:
        def log(stage: str, fraction: float) -> None:
            self._check_stopping()
            self.get_logger().info(f'{stage} ({fraction:.0%})')

        return log

    def _check_stopping(self) -> None:
        """Give up loading once the process has been told to end."""
        if self._stopping.is_set():
            raise StoppedError('the node is being stopped')

    def drain(self) -> None:
        """On the way out, whatever the state: end requests and threads, free the weights."""
        self._stopping.set()
        self.shut_down()

    # --- what is published ---------------------------------------------------------------------

    def capacity(self) -> int:
        """K in force: the parameter, or what was derived from the budget for -1."""
        value = self.parameters['cache_capacity']
        return self._affordable_capacity if value < 0 else value

    def _publish_model_info(self) -> None:
        info = ModelInfo()
        if self.runtime is not None:
            info = messages.to_model_info(self.runtime, self.get_clock().now().to_msg())
        self._model_info.publish(info)

    def _publish_residency_if_changed(self) -> None:
        """On change, at most 20 times a second (worker thread)."""
        runtime = self.runtime
        if runtime is None:
            return
        controller = runtime.controller
        shown = (controller.active, controller.desired, controller.residency.capacity,
                 tuple((view.id, view.state) for view in controller.residency.view()))
        if (shown != self._residency_shown
                and controller.clock() - self._residency_at >= RESIDENCY_MIN_PERIOD_SEC):
            self._residency_shown = shown
            self._publish_residency()

    def _publish_residency(self) -> None:
        runtime = self.runtime
        controller = runtime.controller if runtime is not None else None
        if controller is None:
            return
        residency, counters = controller.residency, controller.residency.counters
        self._residency_at = controller.clock()
        window = self._window(controller)
        message = Residency(
            capacity=self.capacity(), used_bytes=residency.used_bytes(),
            capacity_bytes=self.parameters['memory.budget_mib'] * MIB,
            drafts=messages.to_draft_residency(
                residency.view(), {spec.id: spec.kind for spec in runtime.bundle.drafts}),
            active=controller.active, desired=controller.desired, window_sec=WINDOW_SEC,
            **{name: getattr(counters, name) for name in (
                'hits', 'misses', 'evictions', 'prefetches_issued', 'prefetches_used',
                'prefetches_late', 'prefetches_wasted')}, **window)
        message.header.stamp = self.get_clock().now().to_msg()
        self._residency.publish(message)

    def _window(self, controller) -> dict[str, float]:
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

    def _publish_diagnostics(self) -> None:
        health = self._health()
        runtime = self.runtime
        # Read once: a transition on its own thread may close the runtime at any moment.
        target = runtime.target if runtime is not None else None
        hardware = 'memspec'
        if target is not None:
            hardware = f'{runtime.bundle.target.name} on {target.device}'
        self._diagnostics.publish(diagnostics.build(
            health, self.get_fully_qualified_name(), hardware,
            self.get_clock().now().to_msg()))

    def _health(self) -> diagnostics.Health:
        value, worker, runtime = self.parameters, self.worker, self.runtime
        health = diagnostics.Health(
            state=self.state_label, state_id=self.state_id,
            transition_error=self._transition_error,
            stall_limit_sec=value['diagnostics.stall_sec'], queue_max=value['queue.max_size'],
            queue_warn_fraction=value['diagnostics.queue_warn_fraction'],
            hit_rate_warn=value['diagnostics.hit_rate_warn'], requests=dict(self._requests),
            available_bytes=preflight.system_available_bytes(),
            min_free_bytes=value['memory.min_free_mib'] * MIB)
        if self._last_stats is not None:
            health.last_tokens_per_sec = self._last_stats.tokens_per_sec or 0.0
            health.last_time_to_first_token_sec = self._last_stats.time_to_first_token_sec
        health.speculation_wanted = value['draft.max_tokens'] > 0
        if worker is None or runtime is None:
            return health
        controller, target = runtime.controller, runtime.target
        if controller is None or target is None:
            return health
        residency, counters = controller.residency, controller.residency.counters
        views = residency.view()
        steps = [step for _, step in list(controller.recent_steps)]
        drafted = sum(step.drafted for step in steps)
        health.worker_alive, health.running = worker.alive, worker.running is not None
        health.queue = worker.waiting
        health.stalled_sec = controller.clock() - worker.last_progress
        if not runtime.bundle.drafts:
            health.speculation_off = 'the bundle has no drafts'
        if steps:
            health.tokens_per_iteration = sum(step.emitted for step in steps) / len(steps)
        if drafted:
            health.acceptance = sum(step.accepted for step in steps) / drafted
        health.active, health.desired = controller.active, controller.desired
        health.capacity, health.resident = self.capacity(), len(residency.resident)
        health.resident_bytes = residency.used_bytes()
        health.failed = {view.id: view.reason for view in views
                         if view.state is SlotState.FAILED}
        health.counters = {name: getattr(counters, name) for name in (
            'hits', 'misses', 'evictions', 'loads', 'failures')}
        asked = counters.hits + counters.misses
        health.hit_rate = counters.hits / asked if asked else None
        health.target_bytes = target.weight_bytes
        return health


class _LiveSettings(Settings):
    """Controller settings that read the node's parameters at every boundary."""

    def __init__(self, node: MemSpecNode):
        self._node = node

    @property
    def cache_capacity(self) -> int:
        return self._node.capacity()

    @property
    def scheduling_interval(self) -> int:
        return self._node.parameters['scheduling_interval']

    @property
    def speculate(self) -> bool:
        return self._node.parameters['draft.max_tokens'] > 0


def _qos_overrides():
    from rclpy.qos_overriding_options import QoSOverridingOptions
    return QoSOverridingOptions.with_default_policies()


def main(args: list[str] | None = None) -> int:
    """
    Run the node until SIGINT or SIGTERM; 0 is a clean end.

    Own signal handlers: rclpy's invalidate the context under running callbacks,
    and clients would never learn how their requests ended.
    """
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    rclpy.init(args=args, signal_handler_options=SignalHandlerOptions.NO)
    node = MemSpecNode()
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    try:
        # Python runs the handlers between two turns, so a turn must not last long.
        while not stop.is_set():
            executor.spin_once(timeout_sec=1.0)
        _finish(node, executor)
    except ExternalShutdownException:
        pass
    finally:
        executor.shutdown()
        node.destroy_node()
        rclpy.try_shutdown()
    return 0


def _finish(node: MemSpecNode, executor: SingleThreadedExecutor) -> None:
    """Drain beside the executor, so that waiting callers still get their answers."""
    thread = threading.Thread(target=node.drain, name='memspec-drain', daemon=True)
    thread.start()
    while thread.is_alive():
        executor.spin_once(timeout_sec=0.1)
    # Answers that the drain completed are sent by the turns after it.
    last = time.monotonic() + FAREWELL_SEC
    while time.monotonic() < last:
        executor.spin_once(timeout_sec=0.05)


if __name__ == '__main__':
    sys.exit(main())
