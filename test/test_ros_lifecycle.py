# SPDX-License-Identifier: Apache-2.0
"""The lifecycle: every transition from every state, and what happens to requests on the way."""

from __future__ import annotations

import pytest

pytest.importorskip('rclpy')
pytest.importorskip('memspec_ros.srv')

from diagnostic_msgs.msg import DiagnosticArray  # noqa: E402
from lifecycle_msgs.msg import Transition as T  # noqa: E402
from lifecycle_msgs.srv import GetAvailableStates, GetAvailableTransitions  # noqa: E402
from ros_peer import configure_held_up, LONG, Status, whole  # noqa: E402

from memspec_ros.msg import Residency, TokenChunk

pytest_plugins = ['ros_fixtures']

STATES = ('unconfigured', 'inactive', 'active')
# State -> {transition: state after it}; whatever is not here is illegal.
LEGAL = {
    'unconfigured': {T.TRANSITION_CONFIGURE: 'inactive', 'configure': 'inactive'},
    'inactive': {T.TRANSITION_ACTIVATE: 'active', 'activate': 'active',
                 T.TRANSITION_CLEANUP: 'unconfigured', 'cleanup': 'unconfigured'},
    'active': {T.TRANSITION_DEACTIVATE: 'inactive', 'deactivate': 'inactive'}}
SHUTDOWNS = {'unconfigured': T.TRANSITION_UNCONFIGURED_SHUTDOWN,
             'inactive': T.TRANSITION_INACTIVE_SHUTDOWN,
             'active': T.TRANSITION_ACTIVE_SHUTDOWN}
REQUESTS = [
    T.TRANSITION_CREATE, T.TRANSITION_CONFIGURE, T.TRANSITION_CLEANUP, T.TRANSITION_ACTIVATE,
    T.TRANSITION_DEACTIVATE, *SHUTDOWNS.values(), T.TRANSITION_DESTROY,
    T.TRANSITION_ON_CONFIGURE_SUCCESS, T.TRANSITION_ON_ERROR_FAILURE, 200,
    'configure', 'cleanup', 'activate', 'deactivate', 'create', 'destroy', 'transition_success',
    'no such transition']


@pytest.mark.parametrize('state', STATES)
def test_illegal_transitions_are_refused_and_the_node_stays(node, state):
    node.bring_to(state)
    illegal = [transition for transition in REQUESTS
               if transition not in LEGAL[state] and transition != SHUTDOWNS[state]]
    assert len(illegal) >= 15
    for transition in illegal:
        assert not node.change(transition), transition
        assert node.state == state, transition
    assert node.alive


@pytest.mark.parametrize('state, transition, after', [
    (state, transition, after)
    for state in STATES for transition, after in LEGAL[state].items()])
def test_legal_transitions(node, state, transition, after):
    node.bring_to(state)
    assert node.change(transition)
    assert node.state == after


def test_what_the_node_says_is_possible(unconfigured):
    node = unconfigured
    for state in STATES:
        node.bring_to(state)
        offered = node.call(GetAvailableTransitions, 'get_available_transitions',
                            GetAvailableTransitions.Request()).available_transitions
        legal = {transition for transition in LEGAL[state] if isinstance(transition, int)}
        assert {item.transition.id for item in offered} == legal | {SHUTDOWNS[state]}
    states = node.call(GetAvailableStates, 'get_available_states',
                       GetAvailableStates.Request()).available_states
    assert {*STATES, 'finalized'} <= {state.label for state in states}


@pytest.mark.parametrize('state, transition', [
    *SHUTDOWNS.items(), ('active', 'shutdown')])
def test_shutdown_from_every_state(start_node, ros_bundle, state, transition):
    node = start_node()
    node.bring_to(state)
    running = None
    if state == 'active':
        running = node.generate_async(max_new_tokens=LONG, request_id='running')
        node.running('running')
    assert node.change(transition)
    assert node.state == 'finalized'
    if running is not None:
        assert node.peer.result(running).status.code == Status.CANCELED
    for other in (*REQUESTS, 'shutdown'):
        assert not node.change(other)
    assert node.generate().status.code == Status.NOT_ACTIVE
    node.ended_cleanly()


def test_everything_is_answered_while_configuring(unconfigured):
    node = unconfigured
    with node.peer.listen(DiagnosticArray, '/diagnostics') as diagnostics, configure_held_up():
        future = node.change_async('configure')
        node.peer.wait(lambda: node.state == 'configuring', 'configuring')
        diagnostics.clear()
        node.peer.wait(lambda: any(
            status.name == f'{node.fqn}: Lifecycle' and status.message == 'configuring'
            for array in diagnostics for status in array.status), 'diagnostics while configuring')
        assert node.get('cache_capacity') == [2]
        assert node.set(scheduling_interval=8)[0].successful
        refused = node.set(policy='prediction_only')[0]
        assert not refused.successful and 'policy' in refused.reason
        assert not node.cancel('nobody').success
        assert node.generate().status.code == Status.NOT_ACTIVE
        # A second transition meanwhile is illegal, whichever it is.
        for transition in ('configure', 'activate', 'cleanup', 'shutdown'):
            assert not node.change(transition)
        assert not future.done()
    assert node.peer.result(future).success
    assert node.state == 'inactive'


def test_configure_after_cleanup_gives_the_same_node(node):
    node.bring_to('active')
    before = node.generate(max_new_tokens=30)
    for _ in range(2):
        node.bring_to('unconfigured')
        node.bring_to('active')
        assert node.generate(max_new_tokens=30).token_ids == before.token_ids


def test_deactivate_ends_requests_with_a_last_chunk(active):
    with active.peer.listen(TokenChunk, f'{active.fqn}/tokens') as chunks:
        running = active.generate_async(max_new_tokens=LONG, request_id='deactivated')
        active.peer.wait(lambda: chunks, 'the first chunk')
        waiting = active.generate_async(max_new_tokens=LONG, request_id='never-begun')
        active.peer.wait(lambda: active.result('never-begun').found, 'the queued one')
        assert active.change('deactivate')
        ended, begun = active.peer.result(running), active.peer.result(waiting)
        active.peer.wait(lambda: sum(chunk.last for chunk in chunks) == 2, 'the last chunks')
    assert ended.status.code == begun.status.code == Status.CANCELED
    last = [chunk for chunk in chunks if chunk.last]
    assert all(chunk.status.code == Status.CANCELED and chunk.stats for chunk in last)
    assert whole(chunks, 'deactivated') == (ended.text, list(ended.token_ids))
    assert whole(chunks, 'never-begun') == ('', [])
    assert active.generate().status.code == Status.NOT_ACTIVE
    # Results are still there, and the node works again.
    assert active.result('deactivated').status.code == Status.CANCELED
    assert active.change('activate')
    assert active.generate().status.code == Status.LENGTH


def residency_now(node) -> Residency:
    with node.peer.listen(Residency, f'{node.fqn}/residency') as messages:
        return node.peer.wait(lambda: messages and messages[-1], 'residency')


def test_drafts_stay_unless_released_on_deactivate(active):
    active.generate(max_new_tokens=60)
    active.peer.wait(lambda: residency_now(active).used_bytes, 'a draft in memory')
    assert active.change('deactivate')
    assert residency_now(active).used_bytes > 0
    assert active.set(release_on_deactivate=True)[0].successful
    assert active.change('activate') and active.change('deactivate')
    active.peer.wait(lambda: not residency_now(active).used_bytes, 'all drafts released')
    assert active.change('activate')
    assert active.generate(max_new_tokens=60).stats.drafted_tokens > 0
