# SPDX-License-Identifier: Apache-2.0
"""Every parameter: described, checked, and in force when it says it is."""

from __future__ import annotations

from pathlib import Path
import subprocess
import sys

from conftest import build_llama, build_tokenizer, BundleMaker
from gptq_maker import write_gptq
import pytest
import yaml

pytest.importorskip('rclpy')
pytest.importorskip('memspec_ros.srv')

from diagnostic_msgs.msg import DiagnosticArray  # noqa: E402
from rcl_interfaces.msg import ParameterType  # noqa: E402
from rcl_interfaces.srv import SetParametersAtomically  # noqa: E402
from rclpy.parameter import Parameter  # noqa: E402
from ros_peer import LATCHED, LONG, request, Status  # noqa: E402

from memspec_ros.msg import (  # noqa: E402
    DraftResidency,
    GenerateRequest,
    ModelInfo,
    Residency,
    SamplingParams,
)
from memspec_ros.parameters import BY_NAME, CONFIGURE, PARAMETERS, START  # noqa: E402
from memspec_ros.srv import Generate  # noqa: E402

pytest_plugins = ['ros_fixtures']

SETTABLE = [spec for spec in PARAMETERS if spec.applies != START]
# As the design has them; a default that changes is a change of the interface.
DEFAULTS = {'bundle': '', 'device': 'auto', 'dtype': 'auto', 'cache_capacity': 2,
            'weights': 'auto', 'scheduling_interval': 4, 'policy': 'memspec',
            'release_on_deactivate': False, 'autostart': False}


def legal(spec) -> list:
    """Values that ``spec`` allows, the ends of its range among them."""
    if spec.choices:
        return list(spec.choices)
    if isinstance(spec.default, bool):
        return [True, False]
    if isinstance(spec.default, str):
        return ['', 'some text']
    kind = type(spec.default)
    return [kind(spec.low), kind(spec.high), spec.default]


def illegal(spec) -> list:
    """Values of the wrong type, beyond the ends, and none of the choices."""
    wrong = [['a', 'list'], [1.0]]
    if isinstance(spec.default, bool):
        return [*wrong, 1, 'true']
    if isinstance(spec.default, str):
        return [*wrong, 3, True] + (['no such choice', ''] if spec.choices else [])
    wrong += ['5', True]
    if isinstance(spec.default, int):
        # A message has no room for what is beyond the largest of its integers.
        beyond = [int(spec.high) + 1] if spec.high < 2 ** 63 - 1 else []
        return [*wrong, 1.5, int(spec.low) - 1, *beyond]
    return [*wrong, spec.low - 0.5, spec.high * 1.01, float('nan'), float('inf')]


def test_all_are_there_and_described(node):
    names = {spec.name for spec in PARAMETERS}
    assert names <= set(node.parameter_names())
    assert {name: BY_NAME[name].default for name in DEFAULTS} == DEFAULTS
    for spec, found in zip(PARAMETERS, node.describe(*(spec.name for spec in PARAMETERS))):
        assert found.name == spec.name
        assert len(found.description) > 10, spec.name
        assert spec.applies in found.additional_constraints, spec.name
        assert found.read_only == (spec.applies == START), spec.name
        expected = {bool: ParameterType.PARAMETER_BOOL, str: ParameterType.PARAMETER_STRING,
                    int: ParameterType.PARAMETER_INTEGER, float: ParameterType.PARAMETER_DOUBLE}
        assert found.type == expected[type(spec.default)], spec.name
        if isinstance(spec.default, bool) or isinstance(spec.default, str):
            assert not found.integer_range and not found.floating_point_range
            for choice in spec.choices:
                assert choice in found.additional_constraints
        else:
            both = [*found.integer_range, *found.floating_point_range]
            assert len(both) == 1, spec.name
            assert both[0].from_value == spec.low and both[0].to_value == spec.high
            assert spec.low <= spec.default <= spec.high


def test_defaults_in_force(start_node):
    node = start_node(yaml_parameters={})
    given = {'threads', 'dtype', 'context.max_tokens', 'draft.adaptive', 'bundle'}  # by the tests
    specs = [spec for spec in PARAMETERS if spec.name not in given]
    assert node.get(*(spec.name for spec in specs)) == [spec.default for spec in specs]
    node.kill()


@pytest.mark.parametrize('spec', SETTABLE, ids=lambda spec: spec.name)
def test_set_and_get_while_unconfigured(unconfigured, spec):
    for value in legal(spec):
        result, = unconfigured.set(**{spec.name: value})
        assert result.successful, (value, result.reason)
        assert unconfigured.get(spec.name) == [value]
    kept = unconfigured.get(spec.name)
    for value in illegal(spec):
        result, = unconfigured.set(**{spec.name: value})
        assert not result.successful, value
        assert spec.name in result.reason, (value, result.reason)
        assert unconfigured.get(spec.name) == kept


def test_whole_numbers_pass_for_doubles(unconfigured):
    doubles = [spec for spec in SETTABLE if isinstance(spec.default, float)]
    assert len(doubles) >= 5
    for spec in doubles:
        assert unconfigured.set(**{spec.name: int(spec.low) + 1})[0].successful, spec.name
    unconfigured.bring_to('active')
    assert unconfigured.generate().status.code == Status.LENGTH


def test_some_apply_only_while_unconfigured(node):
    specs = [spec for spec in PARAMETERS if spec.applies == CONFIGURE]
    assert {'bundle', 'device', 'dtype', 'policy', 'draft.max_tokens'} <= {s.name for s in specs}
    node.bring_to('inactive')
    for spec in specs:
        now, = node.get(spec.name)
        other = next(value for value in legal(spec) if value != now)
        result, = node.set(**{spec.name: other})
        assert not result.successful
        assert spec.name in result.reason and 'unconfigured' in result.reason
        assert node.get(spec.name) == [now]
        # What it is already is no change: a tool that sends all values back does no harm.
        assert node.set(**{spec.name: now})[0].successful


def test_autostart_is_read_only(node):
    result, = node.set(autostart=True)
    assert not result.successful and node.get('autostart') == [False]


def test_several_at_once_all_or_none(unconfigured):
    node = unconfigured
    node.set(cache_capacity=2)  # to be restored

    def at_once(**values):
        return node.call(
            SetParametersAtomically, 'set_parameters_atomically',
            SetParametersAtomically.Request(parameters=[
                Parameter(name, value=value).to_parameter_msg()
                for name, value in values.items()])).result

    refused = at_once(cache_capacity=3, scheduling_interval=0)
    assert not refused.successful and 'scheduling_interval' in refused.reason
    assert node.get('cache_capacity', 'scheduling_interval') == [2, 4]
    assert at_once(cache_capacity=3, scheduling_interval=1).successful
    assert node.get('cache_capacity', 'scheduling_interval') == [3, 1]


def newest_residency(node, messages, condition, what: str) -> Residency:
    messages.clear()
    return node.peer.wait(lambda: messages and condition(messages[-1]) and messages[-1], what)


def held(message: Residency) -> list[str]:
    return [draft.id for draft in message.drafts if draft.bytes
            and draft.state in (DraftResidency.READY, DraftResidency.LOADING)]


def test_cache_capacity_changes_while_generating(unconfigured):
    active = unconfigured
    # A policy that always loads K drafts, however sure of one it is.
    assert active.set(policy='hedge')[0].successful
    active.bring_to('active')
    with active.peer.listen(Residency, f'{active.fqn}/residency') as messages:
        running = active.occupy()
        newest_residency(active, messages, lambda m: len(held(m)) == 2, 'two drafts')
        for capacity in (3, 1, 0, 2):
            assert active.set(cache_capacity=capacity)[0].successful
            message = newest_residency(
                active, messages, lambda m, count=capacity: len(held(m)) == count,
                f'{capacity} drafts')
            assert message.capacity == capacity
        # -1: as many as the budget allows, and there is none.
        assert active.set(cache_capacity=-1)[0].successful
        message = newest_residency(active, messages, lambda m: len(held(m)) == 3, 'all drafts')
        assert message.capacity == 3
        assert active.result(running).status.code == Status.RUNNING


def rankings(node, interval: int, tokens: int = 300) -> tuple[int, int]:
    """Rankings (hits and misses) and iterations of one answer, at N = ``interval``."""
    assert node.set(scheduling_interval=interval)[0].successful
    with node.peer.listen(Residency, f'{node.fqn}/residency') as messages:
        before = newest_residency(node, messages, lambda m: not m.active, 'idle before')
        answer = node.generate(max_new_tokens=tokens)
        messages.clear()
        node.peer.wait(lambda: len(messages) >= 2 and not messages[-1].active, 'idle after')
    return (messages[-1].hits + messages[-1].misses - before.hits - before.misses,
            answer.stats.iterations)


def test_scheduling_interval_says_how_often_drafts_are_ranked(active):
    often, iterations = rankings(active, 1)
    # At every iteration, or every fourth where nothing changes; at the start of the request, and
    # where a load ends in between.
    assert iterations / 4 <= often <= iterations + 8
    seldom, iterations = rankings(active, 64)
    assert iterations / 64 <= seldom <= iterations / 64 + 8


def test_scheduling_interval_changes_while_generating(active):
    assert active.set(scheduling_interval=1024)[0].successful
    with active.peer.listen(Residency, f'{active.fqn}/residency') as messages:
        running = active.occupy()
        at = newest_residency(active, messages, lambda m: m.active, 'running')
        later = newest_residency(active, messages, lambda m: m.header.stamp != at.header.stamp,
                                 'a later one')
        assert later.hits + later.misses - at.hits - at.misses <= 4
        assert active.set(scheduling_interval=1)[0].successful
        # From the next boundary on, which may be 1024 iterations away, at every iteration.
        newest_residency(active, messages, lambda m: m.hits > later.hits + 50, 'many rankings')
        assert active.result(running).status.code == Status.RUNNING


def test_parameters_of_the_next_request(active):
    plain = active.generate()
    assert active.set(system_prompt='you are a robot',
                      sampling__max_new_tokens=5)[0].successful
    answer = active.call(Generate, 'generate', Generate.Request(
        request=GenerateRequest(prompt=request().prompt)))
    assert answer.stats.prompt_tokens > plain.stats.prompt_tokens
    assert len(answer.token_ids) <= 5
    own = active.generate(system_prompt='no')
    assert plain.stats.prompt_tokens < own.stats.prompt_tokens < answer.stats.prompt_tokens
    assert active.set(request_timeout_sec=0.2)[0].successful
    assert active.generate(max_new_tokens=LONG).status.code == Status.TIMEOUT
    assert active.generate(max_new_tokens=LONG,
                           timeout_sec=0.6).stats.total_sec >= 0.6


def test_queue_size_changes_while_requests_wait(active):
    active.occupy()
    assert active.set(queue__max_size=1)[0].successful
    assert active.submit().accepted
    assert active.submit().status.code == Status.QUEUE_FULL
    assert active.set(queue__max_size=2)[0].successful
    assert active.submit().accepted
    assert active.submit().status.code == Status.QUEUE_FULL


def test_draft_max_tokens_0_is_plain_decoding_with_the_same_output(unconfigured):
    node = unconfigured
    node.bring_to('active')
    speculative = node.generate(max_new_tokens=50)
    node.bring_to('unconfigured')
    assert node.set(draft__max_tokens=0)[0].successful
    node.bring_to('active')
    plain = node.generate(max_new_tokens=50)
    assert speculative.stats.drafted_tokens > 0 == plain.stats.drafted_tokens
    assert plain.token_ids == speculative.token_ids and plain.stats.iterations == 50


@pytest.mark.parametrize('policy', ['prediction_only', 'general_static', 'ucb_sync',
                                    'ucb_async'])
def test_policy(unconfigured, policy):
    assert all(result.successful for result in unconfigured.set(
        policy=policy, draft__copy=False))  # else the lookup steps in where the text repeats
    unconfigured.bring_to('active')
    answer = unconfigured.generate('def add(a, b): solve', max_new_tokens=120)
    assert answer.status.code == Status.LENGTH and answer.stats.drafted_tokens
    with unconfigured.peer.listen(Residency, f'{unconfigured.fqn}/residency') as messages:
        message = newest_residency(unconfigured, messages, lambda m: m.hits, 'hits')
    assert message.prefetches_issued == 0
    if policy == 'general_static':
        assert [count.draft for count in answer.stats.drafts] == ['general']
    assert unconfigured.set(draft__copy=True)[0].successful


def test_a_gptq_target_and_its_weights(unconfigured, tmp_path):
    """The node runs a quantised bundle and says what its layers are held as."""
    node = unconfigured
    target = tmp_path / 'target'
    write_gptq(build_llama(5, num_hidden_layers=2), target)
    build_tokenizer(target)
    maker = BundleMaker(tmp_path, target)
    maker.add_draft('lookup', 'prompt_lookup', domain='')
    assert all(r.successful for r in node.set(bundle=str(maker.write()), context__max_tokens=256))
    answers = []
    for weights, dtype in (('auto', 'float32, weights int4'), ('dense', 'float32')):
        assert node.set(weights=weights)[0].successful
        with node.peer.listen(ModelInfo, f'{node.fqn}/model_info', LATCHED) as messages:
            node.bring_to('active')
            info = node.peer.wait(lambda: messages and messages[-1], 'the latched message')
            assert info.dtype == dtype
        answers.append(node.generate(max_new_tokens=30).token_ids)
        node.bring_to('unconfigured')
    assert len(answers[0]) == 30 and answers[0] == answers[1]


def test_old_keys_and_values_may_be_rounded_and_evicted(unconfigured):
    """An answer outlasts the context, with drafts as without; nothing calls it exact."""
    node, answers = unconfigured, []
    kv = {'kv__int8_after': 16, 'kv__window': -1, 'context__max_tokens': 160}
    for gamma in (4, 0):
        assert all(r.successful for r in node.set(draft__max_tokens=gamma, **kv))
        with node.peer.listen(ModelInfo, f'{node.fqn}/model_info', LATCHED) as messages:
            node.bring_to('active')
            info = node.peer.wait(lambda: messages and messages[-1], 'the latched message')
        assert info.dtype.endswith('int8 after 16, 4 sinks and a window of the context '
                                   '(not exact)')
        answers.append(node.generate(max_new_tokens=300, sampling=[SamplingParams(
            top_p=1.0, repetition_penalty=1.0, ignore_eos=True)]))
        node.bring_to('unconfigured')
    assert len(answers[0].token_ids) == 300 and answers[0].stats.accepted_tokens > 0
    assert answers[0].token_ids == answers[1].token_ids
    assert node.set(kv__window=500)[0].successful
    assert not node.change('configure')
    assert 'kv.window is 500 and kv.sinks 4' in node.log


def test_a_conversation_outlasts_a_window(unconfigured):
    """Turn after turn past the context, with drafts as without."""
    node, said = unconfigured, []
    for gamma in (4, 0):
        assert all(r.successful for r in node.set(
            draft__max_tokens=gamma, kv__window=90, kv__sinks=2, context__max_tokens=160))
        node.bring_to('active')
        with node.peer.listen(DiagnosticArray, '/diagnostics') as arrays:
            answers = [node.generate(text, session_id='talk', max_new_tokens=80)
                       for text in ('the robot', 'and then?', 'and the red cube?', 'why?')]
            node.peer.wait(lambda: any(
                (item.key, item.value) == ('kv_exact', '0')
                for array in arrays for status in array.status for item in status.values),
                'kv_exact in diagnostics')
        assert sum(len(answer.token_ids) for answer in answers) == 320
        assert answers[1].stats.cached_tokens > 0
        said.append([list(answer.token_ids) for answer in answers])
        node.bring_to('unconfigured')
    assert said[0] == said[1]


# --- at start ---

@pytest.fixture(scope='module')
def misfit(start_node):
    """Provide a node whose YAML file holds what it should not."""
    node = start_node(yaml_parameters={
        'cache_capacity': -2, 'policy': 'no_such_policy', 'residency.period_sec': '1 s',
        'request_timeout_sec': 5, 'cache_capazity': 3, 'sampling.max_new_tokens': 11})
    yield node
    node.ended_cleanly()


def test_wrong_values_at_start_keep_the_node_unconfigured_until_mended(misfit):
    assert misfit.state == 'unconfigured'
    for name, value in (('cache_capacity', '-2'), ('policy', 'no_such_policy'),
                        ('residency.period_sec', '1 s')):
        line, = [line for line in misfit.log.splitlines()
                 if '[ERROR]' in line and f'parameter {name}' in line]
        assert value in line
    assert not misfit.change('configure') and misfit.state == 'unconfigured'
    failure = [line for line in misfit.log.splitlines() if 'cannot configure' in line][-1]
    assert 'cache_capacity is -2' in failure and 'policy' in failure
    assert all(result.successful for result in misfit.set(
        cache_capacity=1, policy='memspec'))
    assert not misfit.change('configure')
    assert misfit.set(residency__period_sec=1.0)[0].successful
    assert misfit.change('configure') and misfit.change('activate')
    assert misfit.generate().status.code == Status.LENGTH


def test_unknown_name_at_start_is_warned_about(misfit):
    line, = [line for line in misfit.log.splitlines() if 'cache_capazity' in line]
    assert '[WARN]' in line and 'not known' in line
    assert not [line for line in misfit.log.splitlines()
                if 'not known' in line and 'cache_capazity' not in line]


def test_right_values_at_start_are_in_force_and_logged(misfit):
    assert misfit.get('request_timeout_sec', 'sampling.max_new_tokens') == [5, 11]
    misfit.bring_to('unconfigured')
    misfit.bring_to('inactive')
    line = [line for line in misfit.log.splitlines() if 'configuring with' in line][-1]
    for spec in PARAMETERS:
        assert f'{spec.name}=' in line
    assert 'sampling.max_new_tokens=11' in line and 'request_timeout_sec=5.0' in line


# --- the file of defaults ---

def test_default_yaml_is_up_to_date_and_complete():
    made = subprocess.run([sys.executable, '-m', 'memspec_ros.parameters'], check=True,
                          capture_output=True, text=True).stdout
    flat = {}

    def flatten(prefix: str, values: dict) -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                flatten(f'{prefix}{key}.', value)
            else:
                flat[prefix + key] = value

    flatten('', yaml.safe_load(made)['/**']['ros__parameters'])
    assert flat == {spec.name: spec.default for spec in PARAMETERS}
    file = Path(__file__).resolve().parents[1] / 'config' / 'memspec.yaml'
    if not file.exists():
        pytest.skip('not in a source tree')
    assert file.read_text() == made
