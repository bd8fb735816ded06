# SPDX-License-Identifier: Apache-2.0
"""The action: chunks as feedback, the whole answer as result, cancelable at any time."""

from __future__ import annotations

import pytest

pytest.importorskip('rclpy')
pytest.importorskip('memspec_ros.action')

from action_msgs.srv import CancelGoal  # noqa: E402
from ros_peer import LONG, request, Status, whole  # noqa: E402

from memspec_ros.msg import GenerateRequest, TokenChunk  # noqa: E402

pytest_plugins = ['ros_fixtures']


def check(feedback: list[TokenChunk], result) -> None:
    """What came as feedback is a part of the answer; not all of it has to come."""
    assert {chunk.request_id for chunk in feedback} <= {result.request_id}
    numbers = [chunk.seq for chunk in feedback]
    assert numbers == sorted(set(numbers))
    if numbers == list(range(len(numbers))):
        assert result.text.startswith(''.join(chunk.text for chunk in feedback))
        ids = [token for chunk in feedback for token in chunk.token_ids]
        assert ids == list(result.token_ids[:len(ids)])


def test_feedback_and_result(active):
    assert active.set(stream__min_period_sec=0.01)[0].successful
    expected = active.generate(max_new_tokens=1500)
    with active.action() as client, \
            active.peer.listen(TokenChunk, f'{active.fqn}/tokens') as chunks:
        handle, feedback = active.send_goal(
            client, request(max_new_tokens=1500, request_id='goal'))
        outcome, result = active.goal_result(handle)
        active.peer.wait(lambda: chunks and chunks[-1].last, 'the last chunk')
    assert outcome == 'SUCCEEDED' and result.request_id == 'goal'
    assert result.status.code == Status.LENGTH and result.stats.output_tokens == 1500
    assert result.text == expected.text and result.token_ids == expected.token_ids
    assert whole(chunks, 'goal') == (result.text, list(result.token_ids))
    # The feedback is what the topic has, and get_result has the rest.
    assert len(feedback) > 20
    check(feedback, result)
    assert all(chunks[chunk.seq] == chunk for chunk in feedback)
    assert active.result('goal').text == result.text


def test_cancel_ends_a_goal_soon(active):
    with active.action() as client:
        handle, feedback = active.send_goal(client, request(max_new_tokens=LONG))
        active.peer.wait(lambda: feedback, 'the first feedback')
        answer = active.peer.result(handle.cancel_goal_async(), 'an answer to cancel', 2.0)
        assert answer.return_code == CancelGoal.Response.ERROR_NONE
        assert len(answer.goals_canceling) == 1
        outcome, result = active.goal_result(handle, 2.0)
    assert outcome == 'CANCELED' and result.status.code == Status.CANCELED
    assert 0 < len(result.token_ids) < LONG
    check(feedback, result)
    assert active.generate().status.code == Status.LENGTH


def test_cancel_of_a_goal_that_waits(active):
    running = active.occupy()
    with active.action() as client:
        handle, feedback = active.send_goal(client, request(max_new_tokens=LONG))
        active.peer.result(handle.cancel_goal_async())
        active.cancel(running)
        outcome, result = active.goal_result(handle)
    assert outcome == 'CANCELED' and result.status.code == Status.CANCELED
    assert not result.token_ids


def test_goal_can_be_canceled_by_request_id_too(active):
    with active.action() as client:
        handle, feedback = active.send_goal(
            client, request(max_new_tokens=LONG, request_id='by-id'))
        active.peer.wait(lambda: feedback, 'the first feedback')
        assert active.cancel('by-id').canceled == 1
        outcome, result = active.goal_result(handle)
    # Nobody asked the action server for it, so it is no cancellation to this client.
    assert outcome == 'ABORTED' and result.status.code == Status.CANCELED


def test_goal_that_times_out(active):
    with active.action() as client:
        handle, _ = active.send_goal(client, request(max_new_tokens=LONG, timeout_sec=0.3))
        outcome, result = active.goal_result(handle)
    assert outcome == 'ABORTED' and result.status.code == Status.TIMEOUT and result.text


@pytest.mark.parametrize('goal, code', [
    (GenerateRequest(), Status.INVALID),
    (request(max_new_tokens=-3), Status.INVALID),
    (request(max_new_tokens=1 << 20), Status.CONTEXT_OVERFLOW)])
def test_goal_that_cannot_be_meant(active, goal, code):
    with active.action() as client:
        handle, feedback = active.send_goal(client, goal)
        outcome, result = active.goal_result(handle)
    assert outcome == 'ABORTED' and result.status.code == code and result.status.message
    assert not feedback


def test_full_queue_refuses_a_goal(active):
    assert active.set(queue__max_size=1)[0].successful
    active.occupy()
    active.submit(max_new_tokens=LONG)
    with active.action() as client:
        outcome, result = active.goal_result(active.send_goal(client, request())[0])
    assert outcome == 'ABORTED' and result.status.code == Status.QUEUE_FULL


@pytest.mark.parametrize('state', ['unconfigured', 'inactive'])
def test_inactive_node_refuses_goals(node, state):
    node.bring_to(state)
    with node.action() as client:
        outcome, result = node.goal_result(node.send_goal(client, request())[0])
    assert outcome == 'ABORTED' and result.status.code == Status.NOT_ACTIVE
    assert state in result.status.message


def test_deactivate_ends_a_goal(active):
    with active.action() as client:
        handle, feedback = active.send_goal(client, request(max_new_tokens=LONG))
        active.peer.wait(lambda: feedback, 'the first feedback')
        assert active.change('deactivate')
        outcome, result = active.goal_result(handle)
    assert outcome == 'ABORTED' and result.status.code == Status.CANCELED and result.text


def test_two_goals_and_a_service_call_each_get_their_own(active):
    prompts = ['the robot', 'def add(a, b):', 'grüße']
    expected = [active.generate(prompt, max_new_tokens=40).text for prompt in prompts]
    with active.action() as client:
        goals = [active.send_goal(client, request(prompt, max_new_tokens=40))
                 for prompt in prompts[:2]]
        third = active.generate_async(prompts[2], max_new_tokens=40)
        results = [active.goal_result(handle)[1] for handle, _ in goals]
    assert [*(result.text for result in results), active.peer.result(third).text] == expected
    for result, (_, feedback) in zip(results, goals):
        check(feedback, result)
