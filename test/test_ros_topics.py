# SPDX-License-Identifier: Apache-2.0
"""What the node publishes, in which state, how often, and what is in it."""

from __future__ import annotations

import math
import re

import pytest

pytest.importorskip('rclpy')
pytest.importorskip('memspec_ros.srv')

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus  # noqa: E402
from rclpy.qos import DurabilityPolicy, ReliabilityPolicy  # noqa: E402
from ros_peer import DEEP, LATCHED, LONG, Status, whole  # noqa: E402

from memspec_ros import diagnostics  # noqa: E402
from memspec_ros.memory.pressure import PressureReading  # noqa: E402
from memspec_ros.msg import (  # noqa: E402
    DraftResidency,
    ModelInfo,
    Residency,
    TokenChunk,
)
from memspec_ros.runtime.memory_guard import Level, Limits, Thresholds  # noqa: E402

pytest_plugins = ['ros_fixtures']

STATUSES = ('Lifecycle', 'Generation', 'Speculation', 'Residency', 'Memory')


@pytest.fixture(scope='module')
def paused(start_node):
    """Provide a second node: other namespace, other name, and a simulated time that stands."""
    node = start_node(namespace='arm/left', name='words', use_sim_time=True)
    yield node
    node.ended_cleanly()


def seconds(stamp) -> float:
    return stamp.sec + 1e-9 * stamp.nanosec


# --- ~/tokens ---

@pytest.mark.parametrize('limit', [1, 2, 7, 150])
def test_chunks_add_up_to_the_answer(active, limit):
    with active.peer.listen(TokenChunk, f'{active.fqn}/tokens') as chunks:
        answer = active.generate('grüße aus köln 😀', max_new_tokens=limit)
        active.peer.wait(lambda: chunks and chunks[-1].last, 'the last chunk')
    assert whole(chunks, answer.request_id) == (answer.text, list(answer.token_ids))
    assert {chunk.request_id for chunk in chunks} == {answer.request_id}
    for chunk in chunks[:-1]:
        assert chunk.status.code == Status.RUNNING and not chunk.stats
        assert chunk.token_ids
    last = chunks[-1]
    assert last.status == answer.status and len(last.stats) == 1
    assert last.stats[0] == answer.stats
    stamps = [seconds(chunk.header.stamp) for chunk in chunks]
    assert stamps == sorted(stamps) and stamps[0] > 0


def test_text_is_what_the_ids_say_but_for_the_character_no_ros_string_holds(active):
    from memspec_ros.models.tokenizer import Tokenizer
    answer = active.generate('grüße aus köln 😀', max_new_tokens=400)
    text = Tokenizer(active.bundle / 'target').decode(answer.token_ids)
    assert '\0' in text  # else this shows nothing
    assert answer.text == text.replace('\0', '\ufffd')


def test_chunks_name_the_draft(active):
    with active.peer.listen(TokenChunk, f'{active.fqn}/tokens') as chunks:
        answer = active.generate(max_new_tokens=60)
        active.peer.wait(lambda: chunks and chunks[-1].last, 'the last chunk')
    named = {chunk.draft for chunk in chunks} - {''}
    assert named == {count.draft for count in answer.stats.drafts}
    assert named <= {'general', 'code', 'math', 'lookup'}


def test_chunks_come_while_the_answer_grows(active):
    with active.peer.listen(TokenChunk, f'{active.fqn}/tokens') as chunks:
        future = active.generate_async(max_new_tokens=LONG, request_id='grows')
        active.peer.wait(lambda: len(chunks) >= 5, 'five chunks')
        assert not future.done() and not chunks[-1].last
        active.cancel('grows')
        active.peer.result(future)


def test_chunks_are_put_together(active):
    assert active.set(stream__min_period_sec=0.2)[0].successful
    with active.peer.listen(TokenChunk, f'{active.fqn}/tokens') as chunks:
        answer = active.generate(max_new_tokens=LONG, timeout_sec=1.5)
        active.peer.wait(lambda: chunks and chunks[-1].last, 'the last chunk')
    assert whole(chunks, answer.request_id) == (answer.text, list(answer.token_ids))
    assert 3 <= len(chunks) <= 10
    stamps = [seconds(chunk.header.stamp) for chunk in chunks[:-1]]
    assert all(later - earlier >= 0.19 for earlier, later in zip(stamps, stamps[1:]))


def test_quality_of_service(active):
    expected = {'tokens': (ReliabilityPolicy.RELIABLE, DurabilityPolicy.VOLATILE),
                'residency': (ReliabilityPolicy.RELIABLE, DurabilityPolicy.VOLATILE),
                'model_info': (ReliabilityPolicy.RELIABLE, DurabilityPolicy.TRANSIENT_LOCAL)}
    for topic, qos in expected.items():
        name = f'{active.fqn}/{topic}'
        info, = active.peer.wait(
            lambda name=name: active.peer.node.get_publishers_info_by_topic(name), name)
        assert (info.qos_profile.reliability, info.qos_profile.durability) == qos


# --- ~/residency ---

def test_residency_shows_every_draft(active):
    with active.peer.listen(Residency, f'{active.fqn}/residency') as messages:
        active.generate(max_new_tokens=200)
        active.peer.wait(lambda: messages and messages[-1].hits, 'residency with hits')
        messages.clear()
        now = active.peer.wait(lambda: messages and messages[-1], 'residency')
    assert [draft.id for draft in now.drafts] == ['general', 'code', 'math', 'lookup']
    assert [draft.kind for draft in now.drafts] == ['shared_layers'] * 3 + ['prompt_lookup']
    assert now.capacity == 2 and now.capacity_bytes == 0
    held = [draft for draft in now.drafts if draft.bytes and draft.state in (
        DraftResidency.READY, DraftResidency.LOADING)]
    assert 1 <= len(held) <= 2
    assert now.used_bytes == sum(draft.bytes for draft in held)
    for draft in now.drafts:
        assert draft.progress == 1.0 if draft.state == DraftResidency.READY else (
            0.0 <= draft.progress <= 1.0)
        assert not draft.reason
    assert now.drafts[3].state == DraftResidency.READY and now.drafts[3].bytes == 0
    assert now.prefetches_issued >= now.prefetches_used > 0
    assert now.active == '' == now.desired  # idle
    assert 0.0 <= now.acceptance_rate <= 1.0
    fractions = (now.desired_fraction, now.fallback_fraction, now.prediction_fraction,
                 now.catch_up_fraction, now.load_wait_fraction)
    assert all(0.0 <= value <= 1.0 for value in fractions)
    assert now.desired_fraction + now.fallback_fraction > 0.3 and sum(fractions) <= 1.001
    assert now.window_sec > 0 and seconds(now.header.stamp) > 0


def test_residency_of_an_idle_node(node):
    node.bring_to('unconfigured')
    node.bring_to('inactive')
    with node.peer.listen(Residency, f'{node.fqn}/residency') as messages:
        first = node.peer.wait(lambda: messages and messages[0], 'residency')
        node.peer.wait(lambda: len(messages) == 4, 'four of them', 10.0)
    assert all(math.isnan(value) for value in (
        first.acceptance_rate, first.desired_fraction, first.fallback_fraction))
    assert first.used_bytes == first.hits == first.misses == first.prefetches_issued == 0
    span = seconds(messages[-1].header.stamp) - seconds(messages[0].header.stamp)
    assert 2.5 < span < 4.5  # three periods of one second


def test_residency_changes_are_told_at_once_but_not_too_often(unconfigured):
    node = unconfigured
    assert node.set(residency__period_sec=30.0)[0].successful
    node.bring_to('active')
    with node.peer.listen(Residency, f'{node.fqn}/residency') as messages:
        answer = node.generate('def add(a, b): solve the sum', max_new_tokens=600)
        node.peer.wait(lambda: any(message.active for message in messages), 'an active draft')
        node.peer.spin(0.2)
    # Nothing of this was periodic.
    assert len(messages) <= 2 + answer.stats.total_sec * 20
    assert any(draft.state == DraftResidency.READY and draft.bytes
               for message in messages for draft in message.drafts)


# --- ~/model_info ---

def test_model_info_is_latched_and_empty_again_after_cleanup(node):
    node.bring_to('inactive')
    topic = f'{node.fqn}/model_info'
    with node.peer.listen(ModelInfo, topic, LATCHED) as messages:
        info = node.peer.wait(lambda: messages and messages[0], 'the latched message')
        assert info.bundle == 'tiny' and info.target == 'tiny-llama'
        assert info.bundle_path == str(node.bundle)
        assert info.architecture == 'llama' and info.license == 'Apache-2.0'
        assert info.device == 'cpu' and info.dtype == 'float32'
        assert info.vocab_size == 300 and info.context_tokens == 16384
        assert info.target_bytes > 4 * 320 * 64
        assert [draft.id for draft in info.drafts] == ['general', 'code', 'math', 'lookup']
        assert info.drafts[1].kind == 'shared_layers' and info.drafts[1].domain == 'code'
        assert info.drafts[0].bytes > 0 == info.drafts[3].bytes
        assert info.ranker == 'domain_words' and info.policy == 'memspec'
        node.bring_to('unconfigured')
        node.peer.wait(lambda: messages[-1] == ModelInfo(), 'the empty message')
    with node.peer.listen(ModelInfo, topic, LATCHED) as messages:
        assert node.peer.wait(lambda: messages and messages[0], 'the latched one') == ModelInfo()


# --- /diagnostics ---

def diagnostics_of(node, arrays) -> list[dict[str, DiagnosticStatus]]:
    """Return the node's statuses by short name, one dictionary an array."""
    found = []
    for array in arrays:
        mine = {status.name.removeprefix(f'{node.fqn}: '): status for status in array.status
                if status.name.startswith(f'{node.fqn}: ')}
        if mine:
            found.append(mine)
    return found


def number(status: DiagnosticStatus, key: str) -> float:
    value, = [pair.value for pair in status.values if pair.key == key]
    return float(value)


@pytest.mark.parametrize('state', ['unconfigured', 'inactive', 'active'])
def test_diagnostics_once_a_second_in_every_state(node, state):
    node.bring_to(state)
    with node.peer.listen(DiagnosticArray, '/diagnostics') as arrays:
        node.peer.wait(lambda: len(diagnostics_of(node, arrays)) >= 4, 'four arrays', 10.0)
    mine = [array for array in arrays if diagnostics_of(node, [array])][:4]
    span = seconds(mine[-1].header.stamp) - seconds(mine[0].header.stamp)
    assert 2.5 < span < 4.5
    statuses = diagnostics_of(node, mine)[-1]
    assert tuple(statuses) == STATUSES
    lifecycle = statuses['Lifecycle']
    assert lifecycle.level == (DiagnosticStatus.OK if state == 'active' else DiagnosticStatus.WARN)
    assert state in lifecycle.message
    for name, status in statuses.items():
        assert status.hardware_id == (
            'memspec' if state == 'unconfigured' else 'tiny-llama on cpu')
        keys = [pair.key for pair in status.values]
        assert len(keys) == len(set(keys))
        for pair in status.values:
            float(pair.value)  # plain, or a plotter cannot show it
            assert re.fullmatch(r'[a-z0-9_]+', pair.key)
        if name != 'Lifecycle':  # idle is nothing to worry about
            assert status.level == DiagnosticStatus.OK, (name, status.message)


def newest(node, arrays, condition, what):
    """Wait for the node's statuses of which ``condition`` holds."""
    arrays.clear()
    return node.peer.wait(
        lambda: (found := diagnostics_of(node, arrays)) and condition(found[-1]) and found[-1],
        what, 15.0)


def test_diagnostics_follow_a_request(active):
    with active.peer.listen(DiagnosticArray, '/diagnostics') as arrays:
        assert active.set(queue__max_size=2)[0].successful
        running = active.occupy()
        for _ in range(2):
            active.submit(max_new_tokens=LONG)
        full = newest(active, arrays, lambda s: number(s['Generation'], 'queue') == 2, 'a queue')
        generation = full['Generation']
        assert generation.level == DiagnosticStatus.WARN and '2 of 2' in generation.message
        assert number(generation, 'running') == 1 and number(generation, 'queue_max') == 2
        assert full['Speculation'].level == DiagnosticStatus.OK
        assert 0 <= number(full['Speculation'], 'acceptance_rate') <= 1
        assert number(full['Speculation'], 'tokens_per_iteration') >= 1
        assert number(full['Residency'], 'resident') >= 1
        assert number(full['Residency'], 'hits') > 0
        assert number(full['Memory'], 'available_mib') > 0
        active.submit()  # one too many
        active.cancel('')
        active.finished(running)
        idle = newest(active, arrays, lambda s: number(s['Generation'], 'running') == 0
                      and number(s['Generation'], 'requests_canceled') >= 3, 'idle again')
        assert idle['Generation'].level == DiagnosticStatus.OK
        assert number(idle['Generation'], 'requests_queue_full') >= 1
        assert number(idle['Generation'], 'last_tokens_per_sec') > 0


def test_diagnostics_thresholds_are_parameters(active):
    with active.peer.listen(DiagnosticArray, '/diagnostics') as arrays:
        active.generate()
        assert active.set(diagnostics__queue_warn_fraction=0.1)[0].successful
        active.occupy()
        active.submit(max_new_tokens=LONG)
        newest(active, arrays, lambda s: s['Generation'].level == DiagnosticStatus.WARN, 'WARN')
        assert active.set(diagnostics__queue_warn_fraction=1.0)[0].successful
        newest(active, arrays, lambda s: s['Generation'].level == DiagnosticStatus.OK, 'OK')


def test_diagnostics_warn_of_little_memory(unconfigured):
    with unconfigured.peer.listen(DiagnosticArray, '/diagnostics') as arrays:
        assert unconfigured.set(memory__min_free_mib=1 << 20)[0].successful
        found = newest(unconfigured, arrays,
                       lambda s: s['Memory'].level == DiagnosticStatus.WARN, 'WARN')
        assert 'memory.min_free_mib' in found['Memory'].message
        # For the same reason it does not configure, and says so.
        assert not unconfigured.change('configure')
        found = newest(unconfigured, arrays,
                       lambda s: s['Lifecycle'].level == DiagnosticStatus.ERROR, 'ERROR')
        assert 'MiB' in found['Lifecycle'].message


@pytest.mark.parametrize('changes, name, level, words', [
    ({'state': 'active'}, 'Lifecycle', DiagnosticStatus.OK, 'active'),
    ({'state': 'inactive'}, 'Lifecycle', DiagnosticStatus.WARN, 'refused'),
    ({'state': 'active', 'transition_error': 'cannot configure: so'}, 'Lifecycle',
     DiagnosticStatus.ERROR, 'cannot configure: so'),
    ({}, 'Generation', DiagnosticStatus.OK, 'idle'),
    ({'running': True}, 'Generation', DiagnosticStatus.OK, 'generating'),
    ({'worker_alive': False}, 'Generation', DiagnosticStatus.ERROR, 'died'),
    ({'running': True, 'stalled_sec': 31.0}, 'Generation', DiagnosticStatus.ERROR, '31 s'),
    ({'running': False, 'stalled_sec': 31.0}, 'Generation', DiagnosticStatus.OK, 'idle'),
    ({'queue': 7, 'queue_max': 8}, 'Generation', DiagnosticStatus.WARN, '7 of 8'),
    ({'queue': 6, 'queue_max': 8}, 'Generation', DiagnosticStatus.OK, ''),
    ({'speculation_off': 'the bundle has no drafts'}, 'Speculation', DiagnosticStatus.WARN,
     'the bundle has no drafts'),
    ({'speculation_wanted': False, 'speculation_off': 'so'}, 'Speculation', DiagnosticStatus.OK,
     'draft.max_tokens'),
    ({'active': 'lookup', 'desired': 'code'}, 'Speculation', DiagnosticStatus.OK, 'wanted code'),
    ({'failed': {'code': 'damaged'}}, 'Residency', DiagnosticStatus.WARN, 'code failed: damaged'),
    ({'hit_rate': 0.4, 'hit_rate_warn': 0.5}, 'Residency', DiagnosticStatus.WARN, '40%'),
    ({'hit_rate': 0.6, 'hit_rate_warn': 0.5}, 'Residency', DiagnosticStatus.OK, ''),
    ({'hit_rate': 0.0}, 'Residency', DiagnosticStatus.OK, ''),
    ({'memory': PressureReading(1 << 27), 'memory_thresholds': Thresholds(1 << 28)}, 'Memory',
     DiagnosticStatus.WARN, '128 MiB available'),
    ({'memory_level': Level.DRAFTS, 'given_up': ['drafts beyond 1'], 'memory_reason': 'so',
      'limits': Limits(False, 1)}, 'Memory', DiagnosticStatus.WARN,
     'so; given up: drafts beyond 1'),
    ({'memory_level': Level.REQUESTS, 'given_up': ['new requests'], 'memory_reason': 'so',
      'limits': Limits(False, 1, 1, False)}, 'Memory', DiagnosticStatus.ERROR,
     'so; given up: new requests'),
])
def test_levels(changes, name, level, words):
    from builtin_interfaces.msg import Time
    array = diagnostics.build(diagnostics.Health(**changes), '/a/b', 'a robot', Time())
    status, = [status for status in array.status if status.name == f'/a/b: {name}']
    assert status.level == level and words in status.message


# --- two nodes ---

def test_two_nodes_in_two_namespaces(active, paused):
    paused.bring_to('active')
    peer = active.peer
    assert paused.fqn == '/arm/left/words'
    with peer.listen(TokenChunk, f'{active.fqn}/tokens') as ours, \
            peer.listen(TokenChunk, f'{paused.fqn}/tokens') as theirs, \
            peer.listen(DiagnosticArray, '/diagnostics') as arrays:
        futures = [active.generate_async(max_new_tokens=100, request_id='same-id'),
                   paused.generate_async('def add(a, b):', max_new_tokens=100,
                                         request_id='same-id')]
        answers = [peer.result(future) for future in futures]
        peer.wait(lambda: ours and theirs and ours[-1].last and theirs[-1].last, 'both ends')
        peer.wait(lambda: diagnostics_of(active, arrays) and diagnostics_of(paused, arrays),
                  'diagnostics of both')
    assert answers[0].text != answers[1].text
    assert whole(ours, 'same-id') == (answers[0].text, list(answers[0].token_ids))
    assert whole(theirs, 'same-id') == (answers[1].text, list(answers[1].token_ids))
    names = {status.name for array in arrays for status in array.status}
    assert names == {f'{node.fqn}: {name}' for node in (active, paused) for name in STATUSES}


def test_everything_goes_on_while_simulated_time_stands(paused):
    peer = paused.peer
    assert paused.get('use_sim_time') == [True]
    paused.bring_to('active')
    with peer.listen(DiagnosticArray, '/diagnostics') as arrays, \
            peer.listen(Residency, f'{paused.fqn}/residency', DEEP) as residency:
        peer.wait(lambda: len(diagnostics_of(paused, arrays)) >= 3, 'diagnostics', 8.0)
        peer.wait(lambda: len(residency) >= 3, 'residency', 8.0)
        assert paused.generate(max_new_tokens=20).status.code == Status.LENGTH
        assert paused.generate(max_new_tokens=LONG,
                               timeout_sec=0.3).status.code == Status.TIMEOUT
    assert seconds(residency[-1].header.stamp) == 0  # no /clock has come
