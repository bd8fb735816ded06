# SPDX-License-Identifier: Apache-2.0
"""
The memspec lifecycle node.

Callbacks run on one executor thread and never block: they enqueue, flag, look
or await. The worker thread generates and publishes tokens; transitions run on a
thread of their own; the loader thread belongs to the runtime.
"""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import signal
import sys
import threading
import time
import traceback

from lifecycle_msgs.msg import State, Transition
import rclpy
from rclpy.action import ActionServer, CancelResponse, GoalResponse
from rclpy.clock import Clock, ClockType
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.qos_overriding_options import QoSOverridingOptions
from rclpy.signals import SignalHandlerOptions
from rclpy.task import Future

from . import messages
from .action import Generate as GenerateAction
from .memory import preflight
from .memory.allocator import give_back
from .models.errors import InvalidRequestError, MemSpecError
from .msg import GenerationStatus, TokenChunk
from .node_lifecycle import ERROR, FAILURE, ResponsiveLifecycleNode, SUCCESS
from .node_memory import NodeMemory
from .node_reports import Reports
from .node_requests import RequestDesk
from .parameters import NodeParameters
from .runtime.runtime import Runtime, RuntimeOptions
from .runtime.settings import Settings
from .runtime.worker import GenerationWorker
from .srv import Cancel, Generate, GetResult, Submit

# Long enough for a slow client to ask, short enough to keep memory flat.
ACTION_RESULT_TIMEOUT_SEC = 60
# For the last answers to leave before the process ends.
FAREWELL_SEC = 0.5


class StoppedError(MemSpecError):
    """A transition was given up since the process is to end."""


class MemSpecNode(ResponsiveLifecycleNode):
    """See README.md for the interface; docs/ros_interface.md for all of it."""

    def __init__(self, **kwargs):
        super().__init__('memspec', **kwargs)
        self.runtime: Runtime | None = None
        self.worker: GenerationWorker | None = None
        self.transition_error = ''
        self._stopping = threading.Event()
        self.parameters = NodeParameters(
            self, lambda: self.state_id != State.PRIMARY_STATE_UNCONFIGURED)
        steady = Clock(clock_type=ClockType.STEADY_TIME)
        self._tokens = self.create_lifecycle_publisher(
            TokenChunk, '~/tokens', messages.QOS_TOKENS,
            qos_overriding_options=QoSOverridingOptions.with_default_policies())
        self.memory = NodeMemory(self, steady, self.reentrant_group)
        self.reports = Reports(self, steady, self.reentrant_group)
        self.desk = RequestDesk(self, self.parameters, self._tokens.publish,
                                self.reports.residency_changed)
        self._make_services()
        self.reports.publish_model_info()
        if self.parameters['autostart']:
            self._autostart_timer = self.create_timer(
                0.1, self._autostart, clock=steady, callback_group=self.reentrant_group)

    # --- interface -----------------------------------------------------------------------------

    def _make_services(self) -> None:
        group = self.reentrant_group
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
            cancel_service_qos_profile=messages.QOS_SERVICE,
            feedback_pub_qos_profile=messages.QOS_TOKENS)

    async def _on_generate(self, request: Generate.Request,
                           response: Generate.Response) -> Generate.Response:
        future = Future()
        job, refused = self.desk.enqueue(request.request,
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
        job, refused = self.desk.enqueue(request.request)
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

        job, refused = self.desk.enqueue(goal_handle.request.request,
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
        reason = self.transition_error
        result = self._transition('recover', self._release, state, super().on_error)
        # Being unconfigured again does not mend what led here.
        self.transition_error = self.transition_error or reason
        return result

    def _transition(self, name: str, work: Callable[..., object], *arguments) -> object:
        """Run a transition: a MemSpecError is a FAILURE with its reason, a fault an ERROR."""
        try:
            result = work(*arguments)
            self.transition_error = ''
            return result
        except MemSpecError as error:
            # One line, whatever a parser below has to say.
            self.transition_error = f'cannot {name}: {" ".join(str(error).split())}'
            self.get_logger().error(self.transition_error)
            return FAILURE
        except Exception as error:  # noqa: BLE001 (rclpy would swallow it without a word)
            self.transition_error = f'cannot {name}: {type(error).__name__}: {error}; see the log'
            self.get_logger().error(f'cannot {name}:\n{traceback.format_exc()}')
            return ERROR

    def _configure(self, state) -> object:
        if self.parameters.errors:
            raise InvalidRequestError('; '.join(self.parameters.errors.values()))
        self.get_logger().info(f'configuring with {self.parameters.effective()}')
        with preflight.machine_lock(while_waiting=self._check_stopping):
            self.runtime = Runtime.open(
                self.parameters['bundle'] or None, self._runtime_options(),
                progress=self._log_progress(), before_loading=self.memory.preflight)
        self.worker = GenerationWorker(
            self.runtime.controller, lambda: self.parameters['queue.max_size'],
            lambda text: self.get_logger().error(text))
        self.memory.watch(self.runtime, self.worker)
        self.reports.start(self.parameters['residency.period_sec'])
        return super().on_configure(state)

    def _runtime_options(self) -> RuntimeOptions:
        value = self.parameters
        return RuntimeOptions(
            device=value['device'], dtype=value['dtype'], weights=value['weights'],
            context=value['context.max_tokens'], max_gamma=value['draft.max_tokens'],
            max_branches=value['draft.max_branches'],
            adaptive=value['draft.adaptive'], policy=value['policy'], ucb_c=value['ucb.c'],
            ucb_per_iteration=value['ucb.per_iteration'], threads=value['threads'],
            kv=value.kv, layers_mib=value['memory.layers_mib'],
            settings=_LiveSettings(self))

    def _activate(self, state) -> object:
        result = super().on_activate(state)
        if result is SUCCESS:
            self.desk.open(self.runtime, self.worker)
        return result

    def _deactivate(self, state) -> object:
        self.desk.close()
        # Before the publishers close: every client gets its last chunk.
        if self.worker is not None:
            self.worker.drain()
        if self.parameters['release_on_deactivate'] and self.runtime is not None:
            self.runtime.controller.reset()
        return super().on_deactivate(state)

    def _release(self, state, close_entities: Callable) -> object:
        """Cleanup, shutdown and error alike: drain, end the threads, drop the weights."""
        self.desk.close()
        self.memory.stop()
        if self.worker is not None:
            self.worker.close()
            self.worker = None
        runtime, self.runtime = self.runtime, None
        if runtime is not None:
            runtime.close()
            del runtime
            give_back()
        self.desk.forget_sessions()
        self.reports.stop()
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

class _LiveSettings(Settings):
    """Controller settings that read the node's parameters at every boundary."""

    def __init__(self, node: MemSpecNode):
        self._node = node

    @property
    def cache_capacity(self) -> int:
        return self._node.memory.wanted_capacity()

    @property
    def scheduling_interval(self) -> int:
        return self._node.parameters['scheduling_interval']

    @property
    def speculate(self) -> bool:
        return self._node.parameters['draft.max_tokens'] > 0

    @property
    def copy(self) -> bool:
        return self._node.parameters['draft.copy']

    @property
    def self_speculation(self) -> bool:
        return self._node.parameters['draft.self_speculation']

    @property
    def merge(self) -> bool:
        return self._node.parameters['draft.merge']

    @property
    def verification(self) -> str:
        return self._node.parameters['sampling.verification']

    @property
    def min_confidence(self) -> float:
        return self._node.parameters['draft.min_confidence']


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
