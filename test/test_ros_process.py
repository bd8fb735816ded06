# SPDX-License-Identifier: Apache-2.0
"""The process around the node: how it starts by itself, and how it ends on a signal."""

from __future__ import annotations

import signal

import pytest

pytest.importorskip('rclpy')
pytest.importorskip('memspec_ros.srv')

from ros_peer import configure_held_up, LONG, request, Status, whole  # noqa: E402

from memspec_ros.msg import TokenChunk

pytest_plugins = ['ros_fixtures']

INT, TERM = signal.SIGINT, signal.SIGTERM
# Both signals take the same way: the other half of the table only where there is time.
BOTH = pytest.mark.parametrize('number', [
    INT, pytest.param(TERM, marks=pytest.mark.slow)], ids=['SIGINT', 'SIGTERM'])
BOTH_TERM_FIRST = pytest.mark.parametrize('number', [
    TERM, pytest.param(INT, marks=pytest.mark.slow)], ids=['SIGTERM', 'SIGINT'])


@BOTH_TERM_FIRST
def test_signal_before_configure(start_node, number):
    node = start_node()
    assert node.state == 'unconfigured'
    node.ended_cleanly(number)


@BOTH
def test_signal_during_service_calls(start_node, number):
    node = start_node()
    node.bring_to('active')
    with node.peer.listen(TokenChunk, f'{node.fqn}/tokens') as chunks:
        running = node.generate_async(max_new_tokens=LONG, request_id='running')
        waiting = [node.generate_async(max_new_tokens=LONG, request_id=f'waiting-{i}')
                   for i in range(5)]
        node.peer.wait(lambda: chunks, 'the first chunk')
        node.peer.wait(lambda: all(node.result(f'waiting-{i}').found for i in range(5)), 'all')
        node.ended_cleanly(number)
        # Every caller has got an answer, and every listener a last chunk.
        answer = node.peer.result(running, 'the answer', 5.0)
        others = [node.peer.result(future, 'the answer', 5.0) for future in waiting]
        node.peer.wait(lambda: sum(chunk.last for chunk in chunks) == 6, 'the last chunks', 5.0)
    assert answer.status.code == Status.CANCELED and answer.text
    assert whole(chunks, 'running') == (answer.text, list(answer.token_ids))
    assert {other.status.code for other in others} == {Status.CANCELED}


@BOTH_TERM_FIRST
def test_signal_during_an_action(start_node, number):
    node = start_node()
    node.bring_to('active')
    with node.action() as client:
        handle, feedback = node.send_goal(client, request(max_new_tokens=LONG))
        future = handle.get_result_async()
        node.peer.wait(lambda: feedback, 'the first feedback')
        node.ended_cleanly(number)
        answer = node.peer.result(future, 'the result', 5.0)
    assert answer.result.status.code == Status.CANCELED and answer.result.text


@BOTH
def test_signal_during_configure(start_node, number):
    node = start_node()
    with configure_held_up():
        future = node.change_async('configure')
        node.peer.wait(lambda: node.state == 'configuring', 'configuring')
        node.ended_cleanly(number)
    assert not node.peer.result(future, 'an answer', 5.0).success
    assert 'cannot configure: the node is being stopped' in node.log


def test_autostart_comes_up_and_comes_back(start_node):
    node = start_node(autostart=True)
    node.peer.wait(lambda: node.state_now() == 'active', 'the active state', 60.0)
    assert node.generate().status.code == Status.LENGTH
    # As after a crash, when launch starts the process anew.
    node.kill()
    node.start()
    node.peer.wait(lambda: node.state_now() == 'active', 'the active state', 60.0)
    assert node.generate().status.code == Status.LENGTH
    node.ended_cleanly()


def test_autostart_in_vain_leaves_a_node_that_can_be_mended(start_node, ros_bundle, tmp_path):
    node = start_node(autostart=True, bundle=tmp_path / 'nowhere')
    node.wait_for_log('autostart: configure did not succeed')
    assert str(tmp_path / 'nowhere') in node.log
    assert node.state == 'unconfigured'
    assert node.set(bundle=str(ros_bundle))[0].successful
    node.bring_to('active')
    assert node.generate().status.code == Status.LENGTH
    node.ended_cleanly()
