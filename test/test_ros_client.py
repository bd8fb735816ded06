# SPDX-License-Identifier: Apache-2.0
"""The Python client, against a real node."""

from __future__ import annotations

import pytest

pytest.importorskip('rclpy')
pytest.importorskip('memspec_ros.srv')

from rclpy.task import Future  # noqa: E402
from ros_peer import LONG, Status  # noqa: E402

from memspec_ros import client as client_module  # noqa: E402
from memspec_ros.client import (  # noqa: E402
    MemSpecClient,
    MemSpecUnavailableError,
    RequestRefusedError,
)
from memspec_ros.msg import SamplingParams

pytest_plugins = ['ros_fixtures']

PROMPT = 'the robot picks up the red cube'
ON = {'sampling': [SamplingParams(ignore_eos=True)]}


@pytest.fixture
def client(active):
    with MemSpecClient(active.fqn) as client:
        yield client


def test_stream(active, client):
    chunks = list(client.stream(PROMPT, max_new_tokens=50, request_id='streamed', **ON))
    assert [chunk.seq for chunk in chunks] == list(range(len(chunks)))
    assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert {chunk.request_id for chunk in chunks} == {'streamed'}
    result = client.result('streamed')
    assert ''.join(chunk.text for chunk in chunks) == result.text
    assert result.status.code == Status.LENGTH and len(result.token_ids) == 50
    assert result.text == active.generate(PROMPT, max_new_tokens=50).text


def test_leaving_the_loop_cancels(active, client):
    for chunk in client.stream(PROMPT, max_new_tokens=LONG, request_id='left', **ON):
        if chunk.seq == 3:
            break
    assert active.finished('left').status.code == Status.CANCELED
    # An answer that was seen to its end is not canceled after the fact.
    list(client.stream(PROMPT, max_new_tokens=5, request_id='seen', **ON))
    assert client.result('seen').status.code == Status.LENGTH


def test_error_in_the_loop_cancels_too(active, client):
    with pytest.raises(ZeroDivisionError):
        for _ in client.stream(PROMPT, max_new_tokens=LONG, request_id='failed', **ON):
            raise ZeroDivisionError
    assert active.finished('failed').status.code == Status.CANCELED


def test_generate(active, client):
    answer = client.generate(PROMPT, max_new_tokens=30, **ON)
    expected = active.generate(PROMPT, max_new_tokens=30)
    assert answer.found and answer.token_ids == expected.token_ids
    assert answer.status.code == Status.LENGTH and answer.stats.output_tokens == 30


def test_two_streams_at_once(active, client):
    expected = {prompt: active.generate(prompt, max_new_tokens=40).text
                for prompt in (PROMPT, 'def add(a, b):')}
    streams = {prompt: client.stream(prompt, max_new_tokens=40, **ON) for prompt in expected}
    texts = dict.fromkeys(expected, '')
    while streams:
        for prompt in list(streams):
            chunk = next(streams[prompt])
            texts[prompt] += chunk.text
            if chunk.last:
                del streams[prompt]
    assert texts == expected


def test_refused(client):
    with pytest.raises(RequestRefusedError, match='temperature') as caught:
        client.submit(PROMPT, sampling={'temperature': -1})
    assert caught.value.status.code == Status.INVALID
    with pytest.raises(RequestRefusedError, match='prompt'):
        list(client.stream(''))


def test_refused_by_an_inactive_node(active, client):
    assert active.change('deactivate')
    with pytest.raises(RequestRefusedError, match='inactive') as caught:
        client.generate(PROMPT)
    assert caught.value.status.code == Status.NOT_ACTIVE


def test_unavailable(ros_environment):
    with MemSpecClient('/nobody/memspec', timeout=0.5) as client:
        with pytest.raises(MemSpecUnavailableError, match='/nobody/memspec'):
            client.state()
        with pytest.raises(MemSpecUnavailableError):
            client.submit(PROMPT)
        with pytest.raises(MemSpecUnavailableError, match='not active'):
            client.wait_until_active(timeout=1.0)


def test_no_chunk_in_time(active, client):
    active.occupy()
    request_id = client.submit(PROMPT, **ON)
    with pytest.raises(MemSpecUnavailableError, match=request_id):
        list(client.chunks(request_id, timeout=0.3))


def test_lost_last_chunk_is_made_up_for(active, monkeypatch):
    class Deaf(MemSpecClient):
        def _on_chunk(self, chunk):
            if chunk.seq < 3:
                super()._on_chunk(chunk)

    monkeypatch.setattr(client_module, '_ASK_AFTER_SEC', 0.2)
    with Deaf(active.fqn) as client:
        chunks = list(client.stream(PROMPT, max_new_tokens=50, **ON))
    assert chunks[-1].last and chunks[-1].status.code == Status.LENGTH and chunks[-1].stats
    expected = active.generate(PROMPT, max_new_tokens=50)
    assert ''.join(chunk.text for chunk in chunks) == expected.text


class AnswersLost:
    """A service client whose first answers never arrive, as from a server new to the client."""

    def __init__(self, client, lost: int):
        self._client, self._lost = client, lost
        self.requests = 0

    def __getattr__(self, name):
        return getattr(self._client, name)

    def call_async(self, request):
        self.requests += 1
        future = self._client.call_async(request)
        return Future() if self.requests <= self._lost else future


def test_lost_answers_are_asked_for_again(active, client, monkeypatch):
    monkeypatch.setattr(client_module, '_REPEAT_SEC', 0.3)
    client._get_state = AnswersLost(client._get_state, 2)
    assert client.state() == 'active' and client._get_state.requests == 3
    client._submit = AnswersLost(client._submit, 1)
    answer = client.generate(PROMPT, max_new_tokens=20, **ON)
    assert client._submit.requests == 2
    assert answer.status.code == Status.LENGTH and len(answer.token_ids) == 20
    # An id of the caller's own may be in use by another: nothing is sent twice, and it is said.
    client.timeout = 1.0
    client._submit = AnswersLost(client._submit, 1)
    with pytest.raises(MemSpecUnavailableError, match='submit'):
        client.submit(PROMPT, request_id='mine', max_new_tokens=5, **ON)
    assert client._submit.requests == 1


def test_lifecycle_and_what_is_shown(start_node):
    node = start_node()
    with MemSpecClient(node.fqn) as client:
        assert client.state() == 'unconfigured'
        assert not client.activate()
        assert client.configure() and not client.configure()
        assert client.activate()
        client.wait_until_active(timeout=10.0)
        assert client.generate(PROMPT, max_new_tokens=10, **ON).status.code == Status.LENGTH
        client.spin(1.5)
        assert client.model_info.target == 'tiny-llama'
        assert [draft.id for draft in client.residency.drafts][0] == 'general'
        assert client.shut_down()
        assert client.state() == 'finalized'
        assert not client.shut_down()
    node.ended_cleanly()


def test_a_request_is_checked_before_it_is_sent():
    request = client_module.make_request(prompt='a', timeout_sec=60, stop=['x'], priority=3)
    assert (request.timeout_sec, list(request.stop), request.priority) == (60.0, ['x'], 3)
    for wrong in ({'max_tokens': 3}, {'stop': 'END'}, {'max_new_tokens': 2 ** 32 + 3},
                  {'max_new_tokens': 'a'}, {'prompt': 5}, {'timeout_sec': 'soon'}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            client_module.make_request(**{'prompt': 'a', **wrong})
    for broken in ({'prompt': 'bad \udcff'}, {'prompt': 'a', 'stop': ['bad \udcff']}):
        with pytest.raises(client_module.InvalidRequestError, match='Unicode'):
            client_module.make_request(**broken)


def test_sampling_may_be_a_mapping_which_is_checked_too(active, client):
    request = client_module.make_request(
        prompt='a', sampling={'temperature': 1, 'top_k': 5, 'logit_bias_ids': [3],
                              'logit_bias_values': [2]})
    params = request.sampling[0]
    assert (params.temperature, params.top_k, params.top_p) == (1.0, 5, 1.0)
    assert list(params.logit_bias_values) == [2.0]
    for wrong in ({'temprature': 1.0}, {'top_k': 0.5}, {'top_k': 2 ** 40}, {'seed': 'x'}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            client_module.make_request(prompt='a', sampling=wrong)
    first, again = (client.generate(PROMPT, max_new_tokens=12, sampling={
        'temperature': 2, 'seed': 8, 'ignore_eos': True}) for _ in range(2))
    assert first.token_ids == again.token_ids != client.generate(
        PROMPT, max_new_tokens=12, **ON).token_ids


def test_a_timeout_given_as_an_integer_is_no_timeout_of_zero(active, client):
    answer = client.generate('the robot', timeout_sec=60, max_new_tokens=4)
    assert answer.status.code == Status.LENGTH


def test_a_name_that_is_none(ros_environment):
    for name in ('bad name!', ''):
        with pytest.raises(client_module.MemSpecUnavailableError, match='not the name'):
            client_module.MemSpecClient(name)
