# SPDX-License-Identifier: Apache-2.0
"""
A lifecycle node whose transitions run beside the executor, not in it.

rclpy runs transition callbacks inside the change_state service callback: while
a model loads, get_state, parameters and diagnostics would be dead, and an
illegal transition would raise and end the node. Here change_state answers when
a thread of its own has finished the transition, and illegal ones are refused.
"""

from __future__ import annotations

from collections.abc import Callable
import threading
import traceback

from lifecycle_msgs.msg import State, Transition
from lifecycle_msgs.srv import ChangeState
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.lifecycle import LifecycleState, TransitionCallbackReturn
from rclpy.lifecycle.node import LifecycleNodeMixin
from rclpy.node import Node
from rclpy.task import Future

SUCCESS = TransitionCallbackReturn.SUCCESS
FAILURE = TransitionCallbackReturn.FAILURE
ERROR = TransitionCallbackReturn.ERROR

# Primary state -> {transition id: trigger method}.
_LEGAL = {
    State.PRIMARY_STATE_UNCONFIGURED: {
        Transition.TRANSITION_CONFIGURE: 'trigger_configure',
        Transition.TRANSITION_UNCONFIGURED_SHUTDOWN: 'trigger_shutdown'},
    State.PRIMARY_STATE_INACTIVE: {
        Transition.TRANSITION_ACTIVATE: 'trigger_activate',
        Transition.TRANSITION_CLEANUP: 'trigger_cleanup',
        Transition.TRANSITION_INACTIVE_SHUTDOWN: 'trigger_shutdown'},
    State.PRIMARY_STATE_ACTIVE: {
        Transition.TRANSITION_DEACTIVATE: 'trigger_deactivate',
        Transition.TRANSITION_ACTIVE_SHUTDOWN: 'trigger_shutdown'},
}
_LABELS = {'configure': Transition.TRANSITION_CONFIGURE, 'cleanup': Transition.TRANSITION_CLEANUP,
           'activate': Transition.TRANSITION_ACTIVATE,
           'deactivate': Transition.TRANSITION_DEACTIVATE}
_SHUTDOWNS = {State.PRIMARY_STATE_UNCONFIGURED: Transition.TRANSITION_UNCONFIGURED_SHUTDOWN,
              State.PRIMARY_STATE_INACTIVE: Transition.TRANSITION_INACTIVE_SHUTDOWN,
              State.PRIMARY_STATE_ACTIVE: Transition.TRANSITION_ACTIVE_SHUTDOWN}


class ResponsiveLifecycleNode(LifecycleNodeMixin, Node):
    """
    Base of nodes with slow transitions.

    Subclasses override on_configure and friends as usual; these run on a thread
    of their own, one at a time. Needs an executor that spins this node.
    """

    def __init__(self, name: str, **kwargs):
        Node.__init__(self, name, **kwargs)
        self.reentrant_group = ReentrantCallbackGroup()
        LifecycleNodeMixin.__init__(self, callback_group=self.reentrant_group)
        # The mixin's own callback would run the transition inside the executor.
        self._service_change_state.callback = self._on_change_state
        self._transition_lock = threading.Lock()

    @property
    def state_id(self) -> int:
        """Id of the current state (lifecycle_msgs/State)."""
        return self._state_machine.current_state[0]

    @property
    def state_label(self) -> str:
        """Label of the current state."""
        return self._state_machine.current_state[1]

    def change_state(self, transition_id: int) -> bool:
        """
        Run a transition in the calling thread; False where it is illegal now or did not succeed.

        Never raises. A second transition during a running one is illegal, as in
        rclcpp, where the state machine is then in a transition state.
        """
        if not self._transition_lock.acquire(blocking=False):
            self.get_logger().warning('a transition is running already; this one is refused')
            return False
        try:
            return self._change(transition_id)
        finally:
            self._transition_lock.release()

    def shut_down(self) -> None:
        """Wait for the transition that is running, if any, then shut down from any state."""
        with self._transition_lock:
            if self.state_id in _SHUTDOWNS:
                self._change(_SHUTDOWNS[self.state_id])

    def _change(self, transition_id: int) -> bool:
        method = _LEGAL.get(self.state_id, {}).get(transition_id)
        if method is None:
            self.get_logger().warning(
                f'transition {transition_id} is not possible in state {self.state_label}')
            return False
        try:
            return getattr(self, method)() is SUCCESS
        except Exception:  # noqa: BLE001 (a broken transition is reported, the node stays up)
            self.get_logger().error(f'transition failed:\n{traceback.format_exc()}')
            return False

    async def run_beside(self, work: Callable[[], object]) -> object:
        """Await ``work()`` on a thread of its own; its exceptions come back."""
        future = Future()

        def run() -> None:
            try:
                result, error = work(), None
            except Exception as raised:  # noqa: BLE001 (handed to the awaiting callback)
                result, error = None, raised
            self.resolve(future, (result, error))

        threading.Thread(target=run, name='memspec-transition', daemon=True).start()
        result, error = await future
        if error is not None:
            raise error
        return result

    def resolve(self, future: Future, result: object) -> None:
        """Complete a future that a service callback awaits, from any thread."""
        future.set_result(result)
        # A future alone wakes nobody: the executor is asleep in its wait set.
        executor = self.executor
        if executor is not None:
            executor.wake()

    async def _on_change_state(self, request: ChangeState.Request,
                               response: ChangeState.Response) -> ChangeState.Response:
        transition = request.transition.id
        if request.transition.label:
            label = request.transition.label
            transition = _SHUTDOWNS.get(self.state_id, -1) if label == 'shutdown' else (
                _LABELS.get(label, -1))
        response.success = await self.run_beside(lambda: self.change_state(transition))
        return response


__all__ = ['ERROR', 'FAILURE', 'SUCCESS', 'LifecycleState', 'ResponsiveLifecycleNode']
