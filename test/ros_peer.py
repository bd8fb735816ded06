# SPDX-License-Identifier: Apache-2.0
"""
For the ROS tests: nodes in processes of their own, over DDS, and a peer to talk to them.

The peer calls and spins in the test's thread. Nothing here sleeps where an
event can be awaited; waits are long, since a loaded machine discovers slowly.
"""

from __future__ import annotations

from contextlib import contextmanager
import itertools
import os
from pathlib import Path
import signal
import subprocess
import sys
import tempfile
import time
from unittest import mock

from action_msgs.msg import GoalStatus
from conftest import build_llama, build_tokenizer, BundleMaker, REAL_VOCABULARY
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState, GetState
from rcl_interfaces.srv import DescribeParameters, GetParameters, ListParameters, SetParameters
import rclpy
from rclpy.action import ActionClient
from rclpy.executors import SingleThreadedExecutor
from rclpy.parameter import Parameter, parameter_value_to_python
from rclpy.qos import DurabilityPolicy, QoSProfile
import yaml

import memspec_ros
from memspec_ros.action import Generate as GenerateAction
from memspec_ros.msg import GenerateRequest, GenerationStatus, SamplingParams, TokenChunk
from memspec_ros.srv import Cancel, Generate, GetResult, Submit

Status = GenerationStatus
WAIT_SEC = 30.0
# Output that takes several seconds: long enough to act on a request that is running.
LONG = 12000
CONTEXT = 16384
# A server that has not discovered a client yet drops its answer: these are asked again.
REPEATABLE = (GetState, GetResult, GetParameters, SetParameters, DescribeParameters,
              ListParameters)
REPEAT_SEC = 3.0
LATCHED = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
DEEP = QoSProfile(depth=5000)
# Transitions from 'unconfigured' to each state.
_PATHS = {'unconfigured': (), 'inactive': ('configure',), 'active': ('configure', 'activate')}
_BACK = {'active': 'deactivate', 'inactive': 'cleanup'}
_names = itertools.count()


def make_bundle(directory: Path, **sizes) -> Path:
    """Write a bundle of a random target, three ``shared_layers`` drafts and a lookup."""
    import torch

    from memspec_ros.models.llama import Llama
    from memspec_ros.models.llama_config import LlamaConfig
    from memspec_ros.training.lessons import TopShape
    from memspec_ros.training.tops import make_top, save_draft
    target_dir = directory / 'target'
    model = build_llama(seed=3, **{'max_position_embeddings': 2 * CONTEXT, **sizes})
    with torch.no_grad():  # as in real models, padding ids are never the best
        model.lm_head.weight[REAL_VOCABULARY:] = 0.0
    model.save_pretrained(target_dir)
    build_tokenizer(target_dir)
    target = Llama.from_state(LlamaConfig.from_hf(model.config.to_dict()), model.state_dict(),
                              torch.float32, torch.device('cpu'))
    maker = BundleMaker(directory, target_dir)
    maker.manifest['target']['path'] = 'target'
    maker.manifest['ranker']['words'] = {'code': ['def', 'python'], 'math': ['sum', 'solve']}
    maker.add_head(list(range(REAL_VOCABULARY)))
    # From as good as the target to worse: all of its layers, all but one, all but two.
    for domain, depth in (('general', 3), ('code', 2), ('math', 1)):
        top = make_top(target, TopShape('shared_layers', depth, 1), range(REAL_VOCABULARY))
        save_draft(directory / f'{domain}.safetensors', top, {'made': 'by a test'})
        maker.add_draft(domain, 'shared_layers', f'{domain}.safetensors', domain=domain,
                        options={'depth': depth, 'layers': 1})
    maker.add_draft('lookup', 'prompt_lookup', domain='')
    return maker.write()


def child_environment() -> dict[str, str]:
    """Make the environment of a child that is to find the package where it was found here."""
    root = str(Path(next(iter(memspec_ros.__path__))).resolve().parent)
    paths = [root, *filter(None, os.environ.get('PYTHONPATH', '').split(os.pathsep))]
    return {**os.environ, 'PYTHONPATH': os.pathsep.join(paths), 'OMP_NUM_THREADS': '1'}


class Peer:
    """A node of the test's own, with clients that are kept for the session."""

    def __init__(self):
        self.context = rclpy.Context()
        rclpy.init(context=self.context)
        self.node = rclpy.create_node(f'tester_{os.getpid()}', context=self.context)
        self.executor = SingleThreadedExecutor(context=self.context)
        self.executor.add_node(self.node)
        self._clients: dict = {}

    def close(self) -> None:
        self.executor.shutdown()
        self.node.destroy_node()
        self.context.try_shutdown()

    def spin(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.executor.spin_once(timeout_sec=left)

    def wait(self, condition, what: str = 'what was awaited', timeout: float = WAIT_SEC):
        """Spin until ``condition()`` is true; returns its value."""
        deadline = time.monotonic() + timeout
        while not (value := condition()):
            assert time.monotonic() < deadline, f'{what} did not happen within {timeout:.0f} s'
            self.executor.spin_once(timeout_sec=0.05)
        return value

    def client(self, kind, name: str):
        client = self._clients.get((kind, name))
        if client is None:
            # The default depth of 10 loses answers where many are open and this side is slow.
            client = self._clients[kind, name] = self.node.create_client(
                kind, name, qos_profile=DEEP)
        # Discovery takes its time, and it is the events in spin_once that tell of it.
        self.wait(client.service_is_ready, f'discovery of {name}')
        return client

    def call_async(self, kind, name: str, request):
        return self.client(kind, name).call_async(request)

    def call(self, kind, name: str, request, timeout: float = WAIT_SEC):
        what = f'an answer of {name}'
        sent = [self.call_async(kind, name, request)]
        if kind not in REPEATABLE:
            return self.result(sent[0], what, timeout)
        sent_at = time.monotonic()

        def answered():
            nonlocal sent_at
            if time.monotonic() - sent_at > REPEAT_SEC:
                sent_at = time.monotonic()
                sent.append(self.call_async(kind, name, request))
            return next((future for future in sent if future.done()), None)

        return self.wait(answered, what, timeout).result()

    def result(self, future, what: str = 'an answer', timeout: float = WAIT_SEC):
        self.wait(future.done, what, timeout)
        return future.result()

    def _introduce(self, fqn: str) -> None:
        """
        Have the node know of every subscription made so far: what it sends before is lost.

        Endpoints are announced in order. A node that answers a client made just now has heard
        of all that came before it.
        """
        client = self.node.create_client(GetParameters, f'{fqn}/get_parameters')
        try:
            self.wait(client.service_is_ready, f'the services of {fqn}')
            answers, asked = [], 0.0

            def answered() -> bool:
                nonlocal asked
                if time.monotonic() > asked + 1.0:
                    asked = time.monotonic()
                    answers.append(client.call_async(GetParameters.Request()))
                return any(answer.done() for answer in answers)
            self.wait(answered, f'an answer of {fqn}')
        finally:
            self.node.destroy_client(client)

    @contextmanager
    def listen(self, kind, topic: str, qos=DEEP, matched: bool = True):
        """Messages of a topic, in a list that grows while the peer spins."""
        messages: list = []
        subscription = self.node.create_subscription(kind, topic, messages.append, qos)
        try:
            if matched:
                self.wait(lambda: self.node.count_publishers(topic), f'a publisher of {topic}')
            if matched and kind is TokenChunk:
                self._introduce(topic.rpartition('/')[0])
            yield messages
        finally:
            self.node.destroy_subscription(subscription)


def request(prompt: str = 'the robot picks up the red cube', max_new_tokens: int = 24,
            ignore_eos: bool = True, **fields) -> GenerateRequest:
    """Make a request whose output has exactly ``max_new_tokens`` tokens."""
    fields.setdefault('sampling', [SamplingParams(ignore_eos=ignore_eos)])
    return GenerateRequest(prompt=prompt, max_new_tokens=max_new_tokens, **fields)


def whole(chunks: list[TokenChunk], request_id: str):
    """Text and ids of a request's chunks, which must be in order and without a gap."""
    mine = [chunk for chunk in chunks if chunk.request_id == request_id]
    numbers = [chunk.seq for chunk in mine]
    assert numbers == list(range(len(mine))), f'{request_id}: seq {numbers}'
    lasts = [chunk.seq for chunk in mine if chunk.last]
    assert lasts == numbers[-1:], f'{request_id}: {len(mine)} chunks, last at {lasts}'
    return (''.join(chunk.text for chunk in mine),
            [token for chunk in mine for token in chunk.token_ids])


class RemoteNode:
    """A node that runs somewhere, and what can be asked of it."""

    log = ''

    def __init__(self, peer: Peer, fqn: str):
        self.peer = peer
        self.fqn = fqn
        self._touched = False
        self._defaults: dict = {}

    # --- calls ---

    def call(self, kind, name: str, message, timeout: float = WAIT_SEC):
        return self.peer.call(kind, f'{self.fqn}/{name}', message, timeout)

    def call_async(self, kind, name: str, message):
        return self.peer.call_async(kind, f'{self.fqn}/{name}', message)

    def generate(self, *args, timeout: float = 60.0, **fields) -> Generate.Response:
        return self.call(Generate, 'generate',
                         Generate.Request(request=request(*args, **fields)), timeout)

    def generate_async(self, *args, **fields):
        return self.call_async(Generate, 'generate',
                               Generate.Request(request=request(*args, **fields)))

    def submit(self, *args, **fields) -> Submit.Response:
        return self.call(Submit, 'submit', Submit.Request(request=request(*args, **fields)))

    def result(self, request_id: str) -> GetResult.Response:
        return self.call(GetResult, 'get_result', GetResult.Request(request_id=request_id))

    def finished(self, request_id: str, timeout: float = 60.0) -> GetResult.Response:
        """Wait for the end of a request; returns its result."""
        return self.peer.wait(
            lambda: (answer := self.result(request_id)).status.code < Status.PENDING
            and answer, f'the end of {request_id}', timeout)

    def running(self, request_id: str) -> None:
        """Wait until a request is being decoded."""
        self.peer.wait(lambda: self.result(request_id).token_ids, f'{request_id} running')

    def occupy(self, **fields) -> str:
        """Have a long request running; returns its id."""
        accepted = self.submit(max_new_tokens=LONG, **fields)
        assert accepted.accepted, accepted.status
        self.running(accepted.request_id)
        return accepted.request_id

    def cancel(self, request_id: str = '') -> Cancel.Response:
        return self.call(Cancel, 'cancel', Cancel.Request(request_id=request_id))

    # --- lifecycle ---

    @property
    def state(self) -> str:
        return self.call(GetState, 'get_state', GetState.Request()).current_state.label

    def state_now(self) -> str:
        """Return the state, or '' for no answer: a call right after a start can get lost."""
        try:
            return self.call(GetState, 'get_state', GetState.Request(), 1.0).current_state.label
        except AssertionError:
            return ''

    def change_async(self, transition: int | str):
        message = Transition(label=transition) if isinstance(transition, str) else (
            Transition(id=transition))
        return self.call_async(ChangeState, 'change_state',
                               ChangeState.Request(transition=message))

    def change(self, transition: int | str, timeout: float = 60.0) -> bool:
        return self.peer.result(self.change_async(transition), f'{transition}', timeout).success

    def bring_to(self, state: str) -> None:
        current = self.state
        path = _PATHS[state]
        done = _PATHS[current]
        while done != path[:len(done)]:
            assert self.change(_BACK[current]), self.log
            current = 'inactive' if current == 'active' else 'unconfigured'
            done = _PATHS[current]
        for transition in path[len(done):]:
            assert self.change(transition), self.log
        assert self.state == state

    # --- parameters ---

    def set(self, **values):
        """Set parameters, '__' for '.'; returns the results, in order."""
        self._remember()
        self._touched = True
        return self.call(SetParameters, 'set_parameters', SetParameters.Request(parameters=[
            Parameter(name.replace('__', '.'), value=value).to_parameter_msg()
            for name, value in values.items()])).results

    def get(self, *names: str) -> list:
        values = self.call(GetParameters, 'get_parameters',
                           GetParameters.Request(names=list(names))).values
        return [parameter_value_to_python(value) for value in values]

    def describe(self, *names: str) -> list:
        return self.call(DescribeParameters, 'describe_parameters',
                         DescribeParameters.Request(names=list(names))).descriptors

    def parameter_names(self) -> list[str]:
        return self.call(ListParameters, 'list_parameters',
                         ListParameters.Request(depth=0)).result.names

    def _remember(self) -> None:
        if not self._defaults:
            names = [name for name in self.parameter_names()
                     if not name.startswith(('qos_overrides.', 'use_sim_time', 'autostart',
                                             'start_type_description_service'))]
            self._defaults = dict(zip(names, self.get(*names)))

    def restore(self) -> None:
        """Undo what a test has done: no requests, all parameters as at the start."""
        self.cancel()
        if self._touched:
            self.bring_to('unconfigured')
            values = {name.replace('.', '__'): value for name, value in self._defaults.items()}
            assert all(result.successful for result in self.set(**values)), self.log
            self._touched = False

    # --- action ---

    @contextmanager
    def action(self):
        client = ActionClient(self.peer.node, GenerateAction, f'{self.fqn}/generate_stream',
                              feedback_sub_qos_profile=DEEP)
        try:
            self.peer.wait(client.server_is_ready, 'discovery of the action server')
            yield client
        finally:
            client.destroy()

    def send_goal(self, client, goal: GenerateRequest):
        """Send a goal that is accepted; returns (goal handle, list of feedback that grows)."""
        feedback: list[TokenChunk] = []
        handle = self.peer.result(client.send_goal_async(
            GenerateAction.Goal(request=goal), lambda m: feedback.append(m.feedback.chunk)))
        assert handle.accepted
        return handle, feedback

    def goal_result(self, handle, timeout: float = 60.0):
        """Wait for the end of a goal; returns (GoalStatus name, result)."""
        answer = self.peer.result(handle.get_result_async(), 'the result', timeout)
        names = {getattr(GoalStatus, f'STATUS_{name}'): name
                 for name in ('SUCCEEDED', 'CANCELED', 'ABORTED')}
        return names[answer.status], answer.result


class NodeUnderTest(RemoteNode):
    """A node process. Its output goes to files, its name is like no other's."""

    def __init__(self, peer: Peer, directory: Path, bundle: Path | str = '', namespace: str = '',
                 name: str = '', yaml_parameters: dict | None = None, **parameters):
        self.name = name or f'memspec_{next(_names)}'
        self.bundle = bundle
        super().__init__(peer, f'/{namespace}/{self.name}' if namespace else f'/{self.name}')
        # Whether drafting pays for a tiny model is chance: it is to draft in any case.
        given = {'threads': 1, 'dtype': 'float32', 'context.max_tokens': CONTEXT,
                 'draft.adaptive': False, 'bundle': str(bundle), **(yaml_parameters or {})}
        file = directory / f'{self.name}.yaml'
        file.write_text(yaml.safe_dump({'/**': {'ros__parameters': given}}))
        command = [sys.executable, '-m', 'memspec_ros.node', '--ros-args',
                   '-r', f'__node:={self.name}', '--params-file', str(file)]
        if namespace:
            command += ['-r', f'__ns:=/{namespace}']
        for key, value in parameters.items():
            command += ['-p', f'{key}:={yaml.safe_dump(value).splitlines()[0]}']
        self._command = command
        self._forgiven: list[str] = []
        self._out, self._err = directory / f'{self.name}.out', directory / f'{self.name}.err'
        self.start()

    def start(self) -> None:
        with self._out.open('a') as out, self._err.open('a') as err:
            self.process = subprocess.Popen(
                self._command, stdout=out, stderr=err, start_new_session=True,
                env={**child_environment(), 'TMPDIR': os.environ['TEST_TMPDIR']})

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def log(self) -> str:
        return self._out.read_text(errors='replace') + self._err.read_text(errors='replace')

    def wait_for_log(self, text: str, timeout: float = WAIT_SEC) -> None:
        self.peer.wait(lambda: text in self.log, f'{text!r} in the log', timeout)

    def stop(self, number: int = signal.SIGINT, timeout: float = WAIT_SEC) -> int:
        """Send a signal and spin until the process has ended; returns its exit status."""
        if self.alive:
            self.process.send_signal(number)
            self.peer.wait(lambda: not self.alive, f'the end of {self.name}', timeout)
        return self.process.returncode

    def ended_cleanly(self, number: int = signal.SIGINT) -> None:
        """Stop the node and check that it went without complaint."""
        status = self.stop(number)
        assert status == 0, f'status {status}\n{self.log}'
        log = self.log
        for said in self._forgiven:
            log = log.replace(said, '')
        assert 'Traceback' not in log, log

    def forgive(self, said: str) -> None:
        """Take a part of the log as a fault that a test provoked."""
        self._forgiven.append(said)

    def kill(self) -> None:
        if self.alive:
            self.process.kill()
        self.process.wait()


@contextmanager
def configure_held_up():
    """Keep nodes waiting in configure: the lock under which they measure memory is ours."""
    from memspec_ros.memory.preflight import machine_lock
    with mock.patch.object(tempfile, 'tempdir', os.environ['TEST_TMPDIR']), machine_lock():
        yield
