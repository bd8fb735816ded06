# SPDX-License-Identifier: Apache-2.0
"""
A small client: submit a prompt, iterate over its chunks, cancel, get the result.

Needs rclpy and this package's interfaces, not torch. It spins a node of its
own in the calling thread, so it must not be used from inside a callback of
another executor; a node that already spins calls ``~/submit`` and listens to
``~/tokens`` itself (README.md shows how).

>>> with MemSpecClient() as client:                                  # doctest: +SKIP
...     for chunk in client.stream('What does a costmap hold?'):
...         print(chunk.text, end='', flush=True)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import math
import time
import uuid

from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState, GetState
import rclpy
from rclpy.context import Context
from rclpy.exceptions import NameValidationException
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from rclpy.task import Future

from .models.errors import InvalidRequestError, MemSpecError
from .msg import (
    GenerateRequest,
    GenerationStatus,
    ModelInfo,
    Residency,
    SamplingParams,
    TokenChunk,
)
from .srv import Cancel, GetResult, Submit

_QOS_TOKENS = QoSProfile(depth=256, reliability=ReliabilityPolicy.RELIABLE)
_QOS_LATCHED = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE,
                          durability=DurabilityPolicy.TRANSIENT_LOCAL)
# A request that is silent for so long is asked for its result.
_ASK_AFTER_SEC = 5.0
# A call that is not answered for so long is sent again.
_REPEAT_SEC = 3.0


class MemSpecUnavailableError(MemSpecError):
    """The node did not answer in time."""


class RequestRefusedError(MemSpecError):
    """The node refused a request; ``status`` is its GenerationStatus."""

    def __init__(self, status: GenerationStatus):
        super().__init__(status.message or f'refused with code {status.code}')
        self.status = status


def make_request(**fields) -> GenerateRequest:
    """
    A GenerateRequest of checked fields.

    Messages do not check what they are given: a misspelt name is ignored, an
    int in a float field becomes 0. ``sampling`` may be a mapping: fields of
    SamplingParams. Raises TypeError, and InvalidRequestError for text that is
    not Unicode.
    """
    if isinstance(fields.get('sampling'), Mapping):
        fields['sampling'] = [_fill(SamplingParams(), 'sampling', fields['sampling'])]
    return _fill(GenerateRequest(), 'a request', fields)


def _fill(message, what: str, fields: Mapping):
    """Set checked fields of a message that errors call ``what``."""
    types = message.get_fields_and_field_types()
    if '_check_fields' in message.__slots__:  # Humble always checks
        message._check_fields = True
    for name, value in fields.items():
        if name not in types:
            raise TypeError(f'{what} has no field {name!r}; there are: {", ".join(types)}')
        if types[name] == 'double' and type(value) is int:
            value = float(value)
        elif types[name] == 'sequence<double>':
            value = [float(v) if type(v) is int else v for v in value]
        try:
            for text in [value] if isinstance(value, str) else value if name == 'stop' else []:
                text.encode()
            setattr(message, name, value)
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f'{name} is not valid Unicode text') from error
        except (AssertionError, AttributeError) as error:
            raise TypeError(f'{name} is {value!r}, expected {types[name]}') from error
    return message


class MemSpecClient:
    """
    Client of one memspec node.

    Parameters
    ----------
    node_name: of the server, with its namespace: ``/memspec``
    timeout: seconds to wait for answers to calls (not for generations)
    args: command-line arguments for rclpy

    """

    def __init__(self, node_name: str = '/memspec', timeout: float = 20.0,
                 args: Sequence[str] | None = None):
        self.server = '/' + node_name.strip('/')
        self.timeout = timeout
        self._context = Context()
        rclpy.init(args=list(args) if args else None, context=self._context)
        self._node = Node(f'memspec_client_{uuid.uuid4().hex[:8]}', context=self._context)
        self._executor = SingleThreadedExecutor(context=self._context)
        self._executor.add_node(self._node)
        self._chunks: dict[str, deque[TokenChunk]] = {}
        self.residency: Residency | None = None
        self.model_info: ModelInfo | None = None
        try:
            self._make_entities()
        except NameValidationException as error:
            self.close()
            raise MemSpecUnavailableError(f'{node_name!r} is not the name of a node') from error

    def _make_entities(self) -> None:
        make = self._node.create_client
        self._submit = make(Submit, f'{self.server}/submit')
        self._cancel = make(Cancel, f'{self.server}/cancel')
        self._get_result = make(GetResult, f'{self.server}/get_result')
        self._change_state = make(ChangeState, f'{self.server}/change_state')
        self._get_state = make(GetState, f'{self.server}/get_state')
        listen = self._node.create_subscription
        listen(TokenChunk, f'{self.server}/tokens', self._on_chunk, _QOS_TOKENS)
        listen(Residency, f'{self.server}/residency', self._on_residency, 10)
        listen(ModelInfo, f'{self.server}/model_info', self._on_model_info, _QOS_LATCHED)

    def __enter__(self) -> MemSpecClient:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        """Leave ROS; the node's requests go on."""
        self._executor.shutdown()
        self._node.destroy_node()
        self._context.try_shutdown()

    def submit(self, prompt: str, request_id: str = '', **fields) -> str:
        """
        Queue a prompt; returns its request id.

        ``fields`` are those of GenerateRequest; ``sampling`` may be a mapping, such as
        {'temperature': 0.7, 'seed': 5}. Raises RequestRefusedError, and
        TypeError for a field that does not exist or has another type.
        """
        own_id = not request_id
        request_id = request_id or uuid.uuid4().hex
        request = make_request(request_id=request_id, prompt=prompt, **fields)
        self._wait_for_stream()
        self._chunks[request_id] = deque()
        try:
            response = self.call(self._submit, Submit.Request(request=request), repeat=own_id)
            # An id that nobody else can have is in use only if it was sent twice, and the
            # answer to the first was lost.
            if not response.accepted and not (own_id and self.result(request_id).found):
                raise RequestRefusedError(response.status)
        except BaseException:
            del self._chunks[request_id]
            raise
        return request_id

    def chunks(self, request_id: str, timeout: float | None = None) -> Iterator[TokenChunk]:
        """
        Iterate over the chunks of a request, the last one included.

        ``timeout`` limits the wait for each next chunk [s]. A gap in ``seq``
        shows chunks lost on the way; ``result`` has the whole text all the same.
        """
        waiting, text = self._chunks[request_id], ''
        try:
            while True:
                chunk = self._next_chunk(request_id, waiting, text, timeout)
                text += chunk.text
                yield chunk
                if chunk.last:
                    return
        finally:
            self._chunks.pop(request_id, None)

    def stream(self, prompt: str, **fields) -> Iterator[TokenChunk]:
        """``submit`` and ``chunks`` in one; leaving the loop early cancels the request."""
        request_id = self.submit(prompt, **fields)
        ended = False
        try:
            for chunk in self.chunks(request_id):
                ended = chunk.last
                yield chunk
        finally:
            if not ended:
                # Where the node has gone, that is not what the caller needs to hear now.
                with contextlib.suppress(MemSpecUnavailableError):
                    self.cancel(request_id)

    def generate(self, prompt: str, **fields) -> GetResult.Response:
        """Wait for the whole answer."""
        request_id = self.submit(prompt, **fields)
        for _ in self.chunks(request_id):
            pass
        return self.result(request_id)

    def result(self, request_id: str) -> GetResult.Response:
        """The result of a request, or how far it is."""
        return self.call(self._get_result, GetResult.Request(request_id=request_id))

    def cancel(self, request_id: str = '') -> Cancel.Response:
        """End a request; '' ends all."""
        return self.call(self._cancel, Cancel.Request(request_id=request_id))

    def state(self) -> str:
        """Label of the node's lifecycle state."""
        return self.call(self._get_state, GetState.Request()).current_state.label

    def configure(self, timeout: float = 600.0) -> bool:
        """Load the model; false where the node could not (its log says why)."""
        return self._transition(Transition.TRANSITION_CONFIGURE, timeout)

    def activate(self, timeout: float = 60.0) -> bool:
        """Begin to accept requests."""
        return self._transition(Transition.TRANSITION_ACTIVATE, timeout)

    def shut_down(self, timeout: float = 60.0) -> bool:
        """Shut the node down, from whatever primary state it is in."""
        transition = {'unconfigured': Transition.TRANSITION_UNCONFIGURED_SHUTDOWN,
                      'inactive': Transition.TRANSITION_INACTIVE_SHUTDOWN,
                      'active': Transition.TRANSITION_ACTIVE_SHUTDOWN}.get(self.state())
        return transition is not None and self._transition(transition, timeout)

    def wait_until_active(self, timeout: float = 600.0) -> None:
        """Wait for a node that configures itself (autostart) or is being brought up."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            try:
                if self.state() == 'active':
                    return
            except MemSpecUnavailableError:
                pass
            self.spin(0.2)
        raise MemSpecUnavailableError(f'{self.server} is not active after {timeout:.0f} s')

    def spin(self, seconds: float) -> None:
        """Take in messages for a while."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._executor.spin_once(timeout_sec=left)

    def call(self, client, request, timeout: float | None = None, repeat: bool = True):
        """
        Call a service of the node and wait; raises MemSpecUnavailableError.

        A server that has not discovered this client yet drops its answer, and ROS
        tells neither side. So an unanswered request is sent again, unless
        ``repeat`` says that doing it twice is something else than doing it once.
        """
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        if not client.wait_for_service(timeout_sec=self.timeout):
            raise MemSpecUnavailableError(
                f'{client.srv_name} does not answer: is the node running, and in the same '
                'ROS_DOMAIN_ID?')
        sent: list[Future] = []
        try:
            while True:
                sent.append(client.call_async(request))
                until = min(deadline, time.monotonic() + _REPEAT_SEC) if repeat else deadline
                answered = self._first_answer(sent, until)
                if answered is not None:
                    return answered.result()
                if time.monotonic() >= deadline:
                    raise MemSpecUnavailableError(
                        f'{client.srv_name}: no answer within {limit:.0f} s')
        finally:
            for future in sent:
                if not future.done():
                    client.remove_pending_request(future)

    def _first_answer(self, sent: list[Future], until: float) -> Future | None:
        while True:
            for future in sent:
                if future.done():
                    return future
            left = until - time.monotonic()
            if left <= 0:
                return None
            self._executor.spin_once(timeout_sec=left)

    def _transition(self, transition: int, timeout: float) -> bool:
        # Asked for a state first, the node has discovered this client; a transition is not
        # to be sent twice.
        self.state()
        request = ChangeState.Request(transition=Transition(id=transition))
        return self.call(self._change_state, request, timeout, repeat=False).success

    def _wait_for_stream(self) -> None:
        """Chunks published before the subscription is matched would be lost."""
        deadline = time.monotonic() + self.timeout
        while not self._node.count_publishers(f'{self.server}/tokens'):
            if time.monotonic() > deadline:
                raise MemSpecUnavailableError(f'{self.server}/tokens is not published')
            self.spin(0.05)

    def _next_chunk(self, request_id: str, waiting: deque[TokenChunk], text: str,
                    timeout: float | None) -> TokenChunk:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        ask_at = time.monotonic() + _ASK_AFTER_SEC
        while not waiting:
            now = time.monotonic()
            if now >= deadline:
                raise MemSpecUnavailableError(f'no chunk of {request_id} within {timeout:.0f} s')
            self._executor.spin_once(timeout_sec=min(1.0, deadline - now))
            if not waiting and time.monotonic() >= ask_at:
                # The last chunk itself may have been lost, or the node have gone: ask.
                ask_at = time.monotonic() + _ASK_AFTER_SEC
                answer = self.result(request_id)
                if answer.status.code < GenerationStatus.PENDING:
                    rest = answer.text[len(text):] if answer.text.startswith(text) else ''
                    return TokenChunk(request_id=request_id, text=rest, last=True,
                                      status=answer.status, stats=[answer.stats])
        return waiting.popleft()

    def _on_chunk(self, chunk: TokenChunk) -> None:
        if chunk.request_id in self._chunks:
            self._chunks[chunk.request_id].append(chunk)

    def _on_residency(self, message: Residency) -> None:
        self.residency = message

    def _on_model_info(self, message: ModelInfo) -> None:
        self.model_info = message
