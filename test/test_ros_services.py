# SPDX-License-Identifier: Apache-2.0
"""The services of an active node, and what becomes of requests that cannot be meant."""

from __future__ import annotations

import math
import time

import pytest

pytest.importorskip('rclpy')
pytest.importorskip('memspec_ros.srv')

from ros_peer import CONTEXT, LONG, request, Status, whole  # noqa: E402

from memspec_ros.msg import (  # noqa: E402
    GenerateRequest,
    SamplingParams,
    TokenChunk,
)
from memspec_ros.srv import Cancel, Generate, GetResult, Submit  # noqa: E402

pytest_plugins = ['ros_fixtures']


def raw(node, message: GenerateRequest) -> Generate.Response:
    return node.call(Generate, 'generate', Generate.Request(request=message))


# --- one request ---

def test_generate_answers_with_text_ids_status_and_statistics(active):
    answer = active.generate(max_new_tokens=40, request_id='whole-answer')
    assert answer.request_id == 'whole-answer'
    assert answer.status.code == Status.LENGTH
    assert len(answer.token_ids) == 40 == answer.stats.output_tokens
    assert answer.text
    stats = answer.stats
    assert stats.prompt_tokens > 0 and 0 < stats.iterations <= 40
    assert 0 < stats.drafted_tokens >= stats.accepted_tokens
    assert sum(count.proposed for count in stats.drafts) == stats.drafted_tokens
    assert sum(count.accepted for count in stats.drafts) == stats.accepted_tokens
    assert stats.total_sec >= stats.time_to_first_token_sec > 0
    assert stats.tokens_per_sec > 0


def test_node_assigns_a_request_id(active):
    first, second = active.generate(), active.generate()
    assert first.request_id and second.request_id
    assert first.request_id != second.request_id
    assert first.token_ids == second.token_ids


def test_submit_answers_at_once_and_get_result_follows(active):
    accepted = active.submit(max_new_tokens=LONG, request_id='followed')
    assert accepted.accepted and accepted.request_id == 'followed'
    assert accepted.status.code == Status.PENDING and accepted.queue_position == 0
    active.running('followed')
    halfway = active.result('followed')
    assert halfway.found and halfway.status.code == Status.RUNNING
    assert active.cancel('followed').success
    ended = active.finished('followed')
    assert ended.found and ended.status.code == Status.CANCELED
    assert ended.text.startswith(halfway.text)
    assert list(ended.token_ids[:len(halfway.token_ids)]) == list(halfway.token_ids)
    assert ended.stats.output_tokens == len(ended.token_ids) < LONG


def test_get_result_of_an_unknown_request(active):
    answer = active.result('never-was')
    assert not answer.found and answer.request_id == 'never-was'
    assert answer.status.code == Status.INVALID and 'never-was' in answer.status.message


def test_stop_string_ends_the_answer_before_it(active):
    full = active.generate(max_new_tokens=60)
    stop = full.text[10:14]
    answer = active.generate(max_new_tokens=60, stop=[stop])
    assert answer.status.code == Status.OK
    assert answer.text == full.text[:full.text.index(stop)]


def test_limit_is_exact(active):
    longest = list(active.generate(max_new_tokens=9).token_ids)
    for limit in (1, 2, 3, 5, 8):
        answer = active.generate(max_new_tokens=limit)
        assert list(answer.token_ids) == longest[:limit]
        assert answer.status.code == Status.LENGTH


def test_timeout_ends_the_answer(active):
    answer = active.generate(max_new_tokens=LONG, timeout_sec=0.5)
    assert answer.status.code == Status.TIMEOUT
    assert 0 < len(answer.token_ids) < LONG
    assert 0.5 <= answer.stats.total_sec < 2.0


def test_timeout_counts_the_wait_in_the_queue(active):
    in_front = active.occupy()
    answer = active.generate_async(max_new_tokens=LONG, timeout_sec=0.3)
    active.peer.spin(0.5)
    active.cancel(in_front)
    answer = active.peer.result(answer)
    assert answer.status.code == Status.TIMEOUT and not answer.token_ids


# --- zeros and nonsense ---

def test_request_with_only_a_prompt(active):
    active.set(sampling__max_new_tokens=7)
    answer = raw(active, GenerateRequest(prompt='the robot'))
    # A random model may end by itself; it must not go past the parameter.
    assert answer.status.code in (Status.OK, Status.LENGTH)
    assert 0 < len(answer.token_ids) <= 7


def test_zero_filled_sampling_is_the_default(active):
    zeros = SamplingParams(top_p=0.0, repetition_penalty=0.0)
    answer = raw(active, request(sampling=[zeros]))
    assert answer.token_ids == raw(active, request(sampling=[SamplingParams()])).token_ids
    assert answer.status.code in (Status.OK, Status.LENGTH)


def sampled(node, max_new_tokens=24, **fields):
    params = SamplingParams(**{'temperature': 1.5, 'seed': 5, 'ignore_eos': True, **fields})
    return raw(node, request(max_new_tokens=max_new_tokens, sampling=[params]))


def test_sampling_by_seed(active):
    first, again, other = (sampled(active, seed=seed) for seed in (5, 5, 6))
    assert first.status.code == Status.LENGTH and len(first.token_ids) == 24
    assert first.token_ids == again.token_ids != other.token_ids
    assert 0 < first.stats.accepted_tokens <= first.stats.drafted_tokens
    assert first.token_ids != raw(active, request()).token_ids
    free = [list(sampled(active, seed=0).token_ids) for _ in range(3)]
    assert len(set(map(tuple, free))) == 3
    # Drafts or not, this K or that: the same.
    active.set(cache_capacity=1, scheduling_interval=1, draft__copy=False)
    assert sampled(active).token_ids == first.token_ids


def test_every_field_of_sampling_reaches_the_decoder(active):
    plain = list(sampled(active, 80).token_ids)
    for fields in ({'temperature': 3.0}, {'top_k': 2}, {'top_p': 0.2}, {'min_p': 0.4},
                   {'repetition_penalty': 2.0}, {'presence_penalty': -2.0},
                   {'frequency_penalty': -2.0}):
        assert list(sampled(active, 80, **fields).token_ids) != plain, fields
    assert set(sampled(active, logit_bias_ids=[70], logit_bias_values=[100.0]).token_ids) == {70}
    assert list(sampled(active, temperature=0.001).token_ids) == list(
        raw(active, request()).token_ids)
    end = {'logit_bias_ids': [2], 'logit_bias_values': [100.0], 'ignore_eos': False}
    for least in (0, 1, 6):
        answer = sampled(active, min_tokens=least, **end)
        assert answer.status.code == Status.OK and len(answer.token_ids) == least + 1


def test_parameters_apply_to_requests_without_sampling(active):
    expected = sampled(active)
    active.set(sampling__temperature=1.5, sampling__seed=5, sampling__ignore_eos=True)
    assert raw(active, request(sampling=[])).token_ids == expected.token_ids
    # With one element, its fields apply as they stand.
    assert raw(active, request()).token_ids != expected.token_ids
    active.set(sampling__verification='rejection')
    first, again = (raw(active, request(sampling=[])) for _ in range(2))
    assert len(first.token_ids) == 24 and again.status.code == Status.LENGTH
    active.set(sampling__temperature=0.0001)
    refused = raw(active, request(sampling=[]))
    assert refused.status.code == Status.INVALID
    assert 'sampling.temperature is 0.0001, expected 0 or 0.001' in refused.status.message


@pytest.mark.parametrize('fields, word', [
    ({'prompt': ''}, 'prompt'),
    ({'prompt': ' \n\t '}, 'prompt'),
    ({'max_new_tokens': -1}, 'max_new_tokens'),
    ({'max_new_tokens': -2 ** 31}, 'max_new_tokens'),
    ({'timeout_sec': -0.5}, 'timeout_sec'),
    ({'timeout_sec': math.nan}, 'timeout_sec'),
    ({'timeout_sec': math.inf}, 'timeout_sec'),
    ({'stop': ['end', '']}, 'stop'),
    ({'stop': ['x'] * 17}, 'stop'),
    ({'sampling': [SamplingParams(temperature=100.5)]}, 'sampling.temperature is 100.5'),
    ({'sampling': [SamplingParams(temperature=-1.0)]}, 'temperature'),
    ({'sampling': [SamplingParams(temperature=math.nan)]}, 'temperature'),
    ({'sampling': [SamplingParams(repetition_penalty=-1.2)]}, 'repetition_penalty'),
    ({'sampling': [SamplingParams(presence_penalty=2.5)]}, 'presence_penalty'),
    ({'sampling': [SamplingParams(frequency_penalty=math.inf)]}, 'frequency_penalty'),
    ({'sampling': [SamplingParams(min_tokens=-3)]}, 'min_tokens'),
    ({'sampling': [SamplingParams(top_k=-1)]}, 'top_k'),
    ({'sampling': [SamplingParams(top_p=1.1)]}, 'top_p'),
    ({'sampling': [SamplingParams(min_p=-0.1)]}, 'min_p'),
    ({'sampling': [SamplingParams(logit_bias_ids=[1])]}, 'logit_bias_values'),
    ({'sampling': [SamplingParams(logit_bias_ids=[10 ** 6], logit_bias_values=[2.0])]},
     'logit_bias_ids has 1000000'),
    ({'sampling': [SamplingParams(logit_bias_ids=[1], logit_bias_values=[math.nan])]},
     'logit_bias_values'),
])
def test_what_cannot_be_meant_is_refused_by_name(active, fields, word):
    message = request(**fields)
    answer = raw(active, message)
    assert answer.status.code == Status.INVALID and word in answer.status.message
    assert not answer.text and not answer.token_ids
    submitted = active.call(Submit, 'submit', Submit.Request(request=message))
    assert not submitted.accepted and submitted.status == answer.status


def test_wholly_zero_request_is_invalid(active):
    answer = raw(active, GenerateRequest())
    assert answer.status.code == Status.INVALID and 'prompt' in answer.status.message


def test_prompt_over_the_context(active):
    # Character by character at worst: the tiny tokenizer knows few merges.
    answer = active.generate('xyz ' * 5000, max_new_tokens=10)
    assert answer.status.code == Status.CONTEXT_OVERFLOW
    numbers = [int(word) for word in answer.status.message.replace(';', ' ').split()
               if word.isdigit()]
    assert CONTEXT in numbers and any(number > CONTEXT - 10 for number in numbers
                                      if number != CONTEXT)
    assert 'context.max_tokens' in answer.status.message


def test_output_over_the_context(active):
    answer = active.generate(max_new_tokens=2 ** 31 - 1)
    assert answer.status.code == Status.CONTEXT_OVERFLOW
    assert str(CONTEXT) in answer.status.message and str(2 ** 31 - 1) in answer.status.message


def test_request_id_in_use_or_kept_is_refused(active):
    active.submit(max_new_tokens=LONG, request_id='twice')
    for _ in range(2):
        again = active.submit(request_id='twice')
        assert not again.accepted and again.status.code == Status.INVALID
        assert 'twice' in again.status.message
        active.cancel('twice')
        assert active.finished('twice').status.code == Status.CANCELED


def test_odd_text_comes_through(active):
    answer = active.generate('grüße 😀 \u0000 \x7f 日本語 <|im_end|> {{ braces }} "quotes" \\n',
                             max_new_tokens=16)
    assert answer.status.code == Status.LENGTH and len(answer.token_ids) == 16


# --- cancel ---

def test_cancel_of_an_unknown_request(active):
    answer = active.cancel('never-was')
    assert not answer.success and answer.canceled == 0 and 'never-was' in answer.message


def test_cancel_of_nothing_at_all_succeeds(active):
    answer = active.cancel('')
    assert answer.success and answer.canceled == 0


def test_cancel_ends_a_running_request_soon(active):
    future = active.generate_async(max_new_tokens=LONG, request_id='cut-short')
    active.running('cut-short')
    before = time.monotonic()
    answer = active.cancel('cut-short')
    assert answer.success and answer.canceled == 1
    ended = active.peer.result(future)
    assert time.monotonic() - before < 2.0
    assert ended.status.code == Status.CANCELED
    assert 0 < len(ended.token_ids) == ended.stats.output_tokens
    again = active.cancel('cut-short')
    assert not again.success and again.canceled == 0


def test_cancel_during_the_prompt(active):
    """The prompt of many thousand tokens is computed in pieces, so that a cancel gets through."""
    future = active.generate_async('xyz ' * 3500, max_new_tokens=8, request_id='long-prompt')
    active.peer.wait(
        lambda: active.result('long-prompt').status.code == Status.RUNNING, 'the prompt running')
    assert active.cancel('long-prompt').canceled == 1
    ended = active.peer.result(future, 'the end', 5.0)
    assert ended.status.code == Status.CANCELED
    assert not ended.token_ids and not ended.text and ended.stats.prompt_tokens > 10000


def test_cancel_reaches_a_waiting_request_and_spares_the_running_one(active):
    first = active.generate_async(max_new_tokens=LONG, request_id='runs')
    active.running('runs')
    second = active.generate_async(max_new_tokens=LONG, request_id='waits')
    active.peer.wait(lambda: active.result('waits').found, 'a queued request')
    assert active.cancel('waits').canceled == 1
    assert active.result('runs').status.code == Status.RUNNING
    active.cancel('runs')
    assert active.peer.result(second).status.code == Status.CANCELED
    assert not active.peer.result(second).token_ids
    assert active.peer.result(first).status.code == Status.CANCELED


def test_cancel_all(active):
    futures = [active.generate_async(max_new_tokens=LONG, request_id=f'all-{i}')
               for i in range(4)]
    active.running('all-0')
    active.peer.wait(lambda: all(active.result(f'all-{i}').found for i in range(4)), 'the queue')
    answer = active.cancel('')
    assert answer.success and answer.canceled == 4
    for future in futures:
        assert active.peer.result(future).status.code == Status.CANCELED


# --- the queue ---

def test_full_queue_refuses_at_once(active):
    active.set(queue__max_size=2)
    running = active.occupy()
    positions = [active.submit(max_new_tokens=LONG, request_id=f'full-{i}').queue_position
                 for i in (1, 2)]
    assert positions == [1, 2]
    before = time.monotonic()
    answer = active.generate(request_id='full-3')
    assert time.monotonic() - before < 2.0
    assert answer.status.code == Status.QUEUE_FULL and 'queue.max_size' in answer.status.message
    refused = active.submit(request_id='full-3')
    assert not refused.accepted and refused.status.code == Status.QUEUE_FULL
    assert active.result(running).status.code == Status.RUNNING
    # Room again: the same id is taken, as the refused one left no trace.
    active.cancel('full-1')
    active.cancel(running)
    active.finished('full-1')
    assert active.submit(request_id='full-3').accepted


def test_burst_of_requests_is_answered_whole(active):
    active.set(queue__max_size=64)
    futures = [active.generate_async(max_new_tokens=2, request_id=f'burst-{i}')
               for i in range(60)]
    answers = [active.peer.result(future) for future in futures]
    assert [answer.request_id for answer in answers] == [f'burst-{i}' for i in range(60)]
    assert {answer.status.code for answer in answers} == {Status.LENGTH}


def test_two_clients_at_once_get_exactly_their_text(active):
    prompts = {'red': 'the robot picks up the red cube', 'add': 'def add(a, b): return a + b'}
    alone = {name: active.generate(prompt, max_new_tokens=60)
             for name, prompt in prompts.items()}
    assert alone['red'].text != alone['add'].text
    with active.peer.listen(TokenChunk, f'{active.fqn}/tokens') as chunks:
        futures = {f'{name}-{i}': active.generate_async(
            prompts[name], max_new_tokens=60, request_id=f'{name}-{i}', client_id=name)
            for i in range(3) for name in prompts}
        for request_id, future in futures.items():
            answer, expected = active.peer.result(future), alone[request_id.split('-')[0]]
            assert answer.request_id == request_id
            assert answer.token_ids == expected.token_ids and answer.text == expected.text
        active.peer.wait(lambda: sum(chunk.last for chunk in chunks) == 6, 'the last chunks')
    for request_id in futures:
        expected = alone[request_id.split('-')[0]]
        assert whole(chunks, request_id) == (expected.text, list(expected.token_ids))
    assert {chunk.request_id for chunk in chunks} == set(futures)


def finish_order(node, in_front: str, count: int) -> list[str]:
    """Ids of the requests that wait, in the order in which they end."""
    with node.peer.listen(TokenChunk, f'{node.fqn}/tokens') as chunks:
        node.cancel(in_front)
        node.peer.wait(lambda: sum(chunk.last for chunk in chunks) >= count + 1, 'the end of all')
    return [chunk.request_id for chunk in chunks if chunk.last][1:]


def test_clients_take_turns(active):
    in_front = active.occupy(client_id='other')
    for i in range(3):
        active.submit(max_new_tokens=4, request_id=f'many-{i}', client_id='many')
    active.submit(max_new_tokens=4, request_id='single', client_id='single')
    # The one request of the other client does not wait for all three.
    assert finish_order(active, in_front, 4) == ['many-0', 'single', 'many-1', 'many-2']


def test_priority_goes_first(active):
    in_front = active.occupy()
    for request_id, priority in (('low', -1), ('plain', 0), ('high', 5)):
        active.submit(max_new_tokens=4, request_id=request_id, priority=priority)
    assert finish_order(active, in_front, 3) == ['high', 'plain', 'low']


# --- sessions ---

def test_second_turn_continues_the_first(active):
    first = active.generate('the robot', session_id='talk', max_new_tokens=30)
    second = active.generate('and then?', session_id='talk', max_new_tokens=30)
    # More than the new turn, and most of it was in the cache.
    assert second.stats.prompt_tokens > first.stats.prompt_tokens + 30 // 2
    assert second.stats.cached_tokens >= first.stats.prompt_tokens - 1
    alone = active.generate('and then?', max_new_tokens=30)
    assert alone.stats.prompt_tokens < second.stats.prompt_tokens
    assert alone.token_ids != second.token_ids


def test_turn_sent_before_the_last_one_ended_follows_it(active):
    ids = [active.submit(text, session_id='hasty', max_new_tokens=30, priority=place).request_id
           for place, text in enumerate(('the robot', 'and then?'))]
    first, second = (active.finished(request_id) for request_id in ids)
    assert first.status.code == second.status.code == Status.LENGTH
    # All that the first turn had read.
    assert second.stats.cached_tokens >= first.stats.prompt_tokens
    assert second.stats.prompt_tokens > first.stats.prompt_tokens + 25
    patient = [active.generate(text, session_id='patient', max_new_tokens=30)
               for text in ('the robot', 'and then?')]
    assert [answer.text for answer in (first, second)] == [answer.text for answer in patient]


def test_sessions_that_alternate_are_not_read_again(active):
    first = {text: active.generate(text, session_id=text, max_new_tokens=30)
             for text in ('the robot', 'def add(a, b): return')}
    for text, before in first.items():
        again = active.generate('and then?', session_id=text, max_new_tokens=30)
        # The random model's bytes are no text: the answer itself is read differently.
        assert again.stats.cached_tokens >= before.stats.prompt_tokens
        assert again.stats.drafted_tokens > 0


def test_sessions_do_not_mix(active):
    active.generate('def add(a, b):', session_id='one', max_new_tokens=20)
    other = active.generate('and then?', session_id='two', max_new_tokens=20)
    alone = active.generate('and then?', max_new_tokens=20)
    assert other.token_ids == alone.token_ids
    assert other.stats.prompt_tokens == alone.stats.prompt_tokens


def test_cancelled_turn_is_not_part_of_the_session(active):
    cut = active.occupy(session_id='broken')
    active.cancel(cut)
    active.finished(cut)
    after = active.generate('and then?', session_id='broken', max_new_tokens=8)
    assert after.stats.prompt_tokens == active.generate('and then?').stats.prompt_tokens


# --- not active ---

@pytest.mark.parametrize('state', ['unconfigured', 'inactive'])
def test_inactive_node_refuses_requests_and_answers_the_rest(node, state):
    node.bring_to(state)
    answer = node.generate(request_id='too-early')
    assert answer.status.code == Status.NOT_ACTIVE and answer.request_id == 'too-early'
    assert state in answer.status.message
    submitted = node.submit(request_id='too-early')
    assert not submitted.accepted and submitted.status.code == Status.NOT_ACTIVE
    assert not node.call(GetResult, 'get_result',
                         GetResult.Request(request_id='too-early')).found
    assert not node.call(Cancel, 'cancel', Cancel.Request(request_id='too-early')).success
