# SPDX-License-Identifier: Apache-2.0
"""
The node's parameters as one table.

Declaration, descriptors, validation, the default YAML file and the table in the
documentation all follow from ``PARAMETERS``. Print the YAML file with
``python -m memspec_ros.parameters``, the table with ``… --markdown``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
import math
import sys
from typing import Any

from rcl_interfaces.msg import (
    FloatingPointRange,
    IntegerRange,
    ParameterDescriptor,
    SetParametersResult,
)
from rclpy.exceptions import InvalidParameterTypeException, InvalidParameterValueException
from rclpy.node import Node
from rclpy.parameter import Parameter

from .decoding.sampler import VERIFICATIONS
from .decoding.sampling import LARGEST_SEED, RANGES
from .models.kv_options import KVOptions
from .models.packing import WEIGHT_KINDS
from .runtime.policies import POLICY_NAMES

LIVE = 'live: at the next scheduling interval'
WATCH = 'live: twice a second'
REQUEST = 'with the next request'
CONFIGURE = 'only while unconfigured'
START = 'only at start'


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter: its range or choices, its unit in the description, when it applies."""

    name: str
    default: Any
    description: str
    applies: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()

    @property
    def constraint(self) -> str:
        """Range or choices, for people."""
        if self.choices:
            return 'one of ' + ', '.join(self.choices)
        if self.low is not None:
            return f'{_plain(self.low)} .. {_plain(self.high)}'
        return {bool: 'true or false', str: 'text'}[type(self.default)]

    def check(self, value: Any) -> Any:
        """The value as this parameter's type (5 is fine for 5.0); ValueError says why not."""
        kind = type(self.default)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not kind:
            raise ValueError(f'{self.name} is {value!r}, expected {kind.__name__} '
                             f'({self.constraint})')
        if self.choices and value not in self.choices:
            raise ValueError(f'{self.name} is {value!r}, expected {self.constraint}')
        if self.low is not None and not (
                self.low <= value <= self.high and math.isfinite(value)):
            raise ValueError(f'{self.name} is {value!r}, expected {self.constraint}')
        return value

    def descriptor(self) -> ParameterDescriptor:
        """Descriptor for ros2 param describe and rqt_reconfigure."""
        descriptor = ParameterDescriptor(
            description=self.description,
            additional_constraints=f'{self.constraint}; applies {self.applies}',
            read_only=self.applies == START,
            # Our own check below: the middleware would refuse 5 for a double.
            dynamic_typing=True)
        if self.low is not None and isinstance(self.default, int):
            descriptor.integer_range = [IntegerRange(
                from_value=int(self.low), to_value=int(self.high), step=1)]
        elif self.low is not None:
            descriptor.floating_point_range = [FloatingPointRange(
                from_value=float(self.low), to_value=float(self.high), step=0.0)]
        return descriptor


def _p(name, default, description, applies, low=None, high=None, choices=()) -> ParameterSpec:
    return ParameterSpec(name, default, description, applies, low, high, choices)


def _sampling(name, default, description) -> ParameterSpec:
    """Make a parameter that fills requests without ``sampling``."""
    return ParameterSpec(f'sampling.{name}', default, description, REQUEST, *RANGES[name])


PARAMETERS: tuple[ParameterSpec, ...] = (
    _p('bundle', '', 'Directory of the model bundle; empty = the one installed with the package.',
       CONFIGURE),
    _p('device', 'auto', 'Where the models run: auto, cpu, cuda or cuda:N.', CONFIGURE),
    _p('dtype', 'auto', 'Type of weights; auto = bfloat16 where the device has it.', CONFIGURE,
       choices=('auto', 'bfloat16', 'float16', 'float32')),
    _p('weights', 'auto', 'What the layers of the target are held as; auto = as its checkpoint '
       'has them, GPTQ in INT4: see docs/bundle.md.', CONFIGURE, choices=WEIGHT_KINDS),
    _p('threads', 0, 'CPU threads; 0 = as many as are fastest, measured.', CONFIGURE, 0, 256),
    _p('cache_capacity', 2, 'K: most drafts in memory at a time. -1 = as many as '
       'memory.budget_mib and memory.min_free_mib allow.', LIVE, -1, 64),
    _p('scheduling_interval', 4, 'N: draft-verify iterations between rankings of the drafts; '
       'memspec waits up to 4 N where nothing changes.', LIVE, 1, 1024),
    _p('policy', 'memspec', 'How drafts are scheduled: see docs/policies.md.', CONFIGURE,
       choices=POLICY_NAMES),
    _p('ucb.c', 1.0, 'Policies ucb_sync, ucb_async: weight of exploration.', CONFIGURE,
       0.001, 1000.0),
    _p('ucb.per_iteration', False, 'Policies ucb_sync, ucb_async: choose after every iteration, '
       'not every scheduling_interval.', CONFIGURE),
    _p('memory.budget_mib', 0, 'Most memory the node may take, its libraries included '
       '[MiB]; 0 = no limit but what is free.', CONFIGURE, 0, 1 << 20),
    _p('memory.min_free_mib', 128, 'Memory to be left free on the machine [MiB]; below it the '
       'node gives back what it can spare: see docs/memory.md.', WATCH, 0, 1 << 20),
    _p('memory.stall_percent', 10.0, 'Share of the time in which programs wait for memory (PSI, '
       'some avg10) from which on the node gives memory back [%]; 0 = never mind.', WATCH,
       0.0, 100.0),
    _p('memory.recover_sec', 10.0, 'Time without pressure after which one thing that was given '
       'up is taken back [s].', WATCH, 0.0, 3600.0),
    _p('memory.layers_mib', 0.0, "Most memory for the target's layers [MiB]; the others are read "
       'from storage for every pass (docs/self_speculation.md). 0 = all in memory.', CONFIGURE,
       0.0, 1 << 20),
    _p('context.max_tokens', 2048, 'Most tokens of prompt and output together.', CONFIGURE,
       16, 1 << 20),
    _p('kv.int8_after', 0, 'Keys and values are kept in INT8 but for so many recent positions, or '
       'a few more; 0 = all as they are. See docs/memory.md.', CONFIGURE, 0, 1 << 20),
    _p('kv.window', 0, 'Old positions are dropped but for so many recent ones, or a few more, and '
       'answers go on beyond the context; -1 = when it is full, 0 = never.', CONFIGURE,
       -1, 1 << 20),
    _p('kv.sinks', 4, 'First positions, which kv.int8_after and kv.window leave as they are.',
       CONFIGURE, 0, 1 << 10),
    _p('draft.max_tokens', 4, 'Most tokens drafted per iteration; 0 = speculation off.',
       CONFIGURE, 0, 16),
    _p('draft.max_branches', 4, 'Most second choices of a draft that are verified beside its '
       'tokens, where they pay; 0 = none.', CONFIGURE, 0, 16),
    _p('draft.adaptive', True, 'Draft fewer tokens, or none, where more do not pay.', CONFIGURE),
    _p('draft.copy', True, 'Where the answer repeats what stands in the text already, copy it '
       'instead of drafting.', LIVE),
    _p('draft.self_speculation', True, 'While no loaded draft is ready, or none may be loaded, '
       'the target drafts with its own lower layers, if the bundle has exits and it pays.', LIVE),
    _p('draft.merge', False, 'Verify what would be copied, or what a second draft in memory '
       "proposes, in one pass with the active draft's tokens, where that pays.", LIVE),
    _p('draft.min_confidence', 0.0, 'A draft proposes no more once its next token has less '
       'than this probability; 0 = off.', REQUEST, 0.0, 1.0),
    _p('queue.max_size', 8, 'Most requests waiting; more are refused with QUEUE_FULL.', LIVE,
       1, 1024),
    _p('system_prompt', '', 'System prompt of requests that bring none.', REQUEST),
    _p('sampling.max_new_tokens', 256, 'Most output tokens of requests that say 0.', REQUEST,
       1, 1 << 20),
    _sampling('temperature', 0.0, 'Softmax temperature; 0 = greedy.'),
    _sampling('top_k', 0, 'Keep the k most probable tokens; 0 = off.'),
    _sampling('top_p', 1.0, 'Keep the fewest tokens whose probabilities add up to this; 1 = off.'),
    _sampling('min_p', 0.0, 'Keep tokens at least this probable, as a share of the most probable '
              'one; 0 = off.'),
    _sampling('repetition_penalty', 1.0, 'Divides positive and multiplies negative logits of '
              'tokens in prompt or output; 1 = off.'),
    _sampling('presence_penalty', 0.0, 'Subtracted from logits of tokens in the output.'),
    _sampling('frequency_penalty', 0.0, 'Subtracted from logits of tokens once per time in the '
              'output.'),
    _sampling('min_tokens', 0, 'Output tokens before which end-of-sequence is not chosen.'),
    _p('sampling.seed', 0, 'Same seed, same request: same output; 0 = a new one for every '
       'request.', REQUEST, 0, LARGEST_SEED),
    _p('sampling.ignore_eos', False, 'Go on after end-of-sequence.', REQUEST),
    _p('sampling.verification', 'coupled', 'How drafted tokens are judged when sampling: see '
       'docs/sampling.md.', REQUEST, choices=VERIFICATIONS),
    _p('request_timeout_sec', 0.0, 'From acceptance to the end [s] for requests that say 0; '
       '0 = none.', REQUEST, 0.0, 86400.0),
    _p('stream.min_period_sec', 0.0, 'Least time between two chunks on ~/tokens [s]; text in '
       'between is put together.', REQUEST, 0.0, 10.0),
    _p('residency.period_sec', 1.0, 'Period of ~/residency [s].', CONFIGURE, 0.05, 60.0),
    _p('diagnostics.queue_warn_fraction', 0.8, 'Queue fill from which on diagnostics warn.', LIVE,
       0.0, 1.0),
    _p('diagnostics.hit_rate_warn', 0.0, 'Share of intervals whose wanted draft was ready below '
       'which diagnostics warn; 0 = never.', LIVE, 0.0, 1.0),
    _p('diagnostics.stall_sec', 30.0, 'Time without progress of a running request from which on '
       'diagnostics report an error [s].', LIVE, 1.0, 3600.0),
    _p('release_on_deactivate', False, 'Drop all drafts from memory when deactivated.', LIVE),
    _p('autostart', False, 'Configure and activate after start, without a lifecycle manager.',
       START),
)
BY_NAME = {spec.name: spec for spec in PARAMETERS}


class NodeParameters:
    """
    Declares the table on a node and keeps a checked copy of all values.

    A value that is wrong at start does not end the node: it is reported, kept
    in ``errors``, and configure fails until it has been set right.
    """

    def __init__(self, node: Node, configured) -> None:
        self._node = node
        self._configured = configured
        self.errors: dict[str, str] = {}
        self._values: dict[str, Any] = {}
        overrides = dict(getattr(node, '_parameter_overrides', {}))
        for spec in PARAMETERS:
            self._values[spec.name] = self._declare(spec, overrides.get(spec.name))
        self._warn_unknown(overrides)
        node.add_on_set_parameters_callback(self._on_set)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    @property
    def kv(self) -> KVOptions:
        """How keys and values of old positions are to be kept."""
        return KVOptions(self['kv.int8_after'], self['kv.sinks'], self['kv.window'])

    def effective(self) -> str:
        """All values on one line, for the log."""
        return ', '.join(f'{spec.name}={self._values[spec.name]!r}' for spec in PARAMETERS)

    def _declare(self, spec: ParameterSpec, override: Parameter | None) -> Any:
        try:
            if override is not None and override.type_ is not Parameter.Type.NOT_SET:
                spec.check(override.value)
            return spec.check(self._node.declare_parameter(
                spec.name, spec.default, spec.descriptor()).value)
        except (ValueError, InvalidParameterValueException,
                InvalidParameterTypeException) as error:
            self.errors[spec.name] = str(error)
            self._node.get_logger().error(f'parameter {error}')
            self._node.declare_parameter(spec.name, spec.default, spec.descriptor(),
                                         ignore_override=True)
            return spec.default

    def _warn_unknown(self, overrides: Iterable[str]) -> None:
        ours = set(BY_NAME) | {'use_sim_time', 'start_type_description_service'}
        for name in overrides:
            if name not in ours and not name.startswith('qos_overrides.'):
                self._node.get_logger().warning(
                    f'parameter {name} is not known and has no effect; '
                    'see ros2 param list for the known ones')

    def _on_set(self, parameters: list[Parameter]) -> SetParametersResult:
        checked = {}
        for parameter in parameters:
            spec = BY_NAME.get(parameter.name)
            if spec is None:
                continue
            try:
                value = spec.check(parameter.value)
            except ValueError as error:
                return SetParametersResult(successful=False, reason=str(error))
            if (spec.applies == CONFIGURE and self._configured()
                    and value != self._values[spec.name]):
                return SetParametersResult(
                    successful=False,
                    reason=f'{spec.name} can be set only while the node is unconfigured: '
                           'deactivate and clean up first')
            checked[spec.name] = value
        self._values.update(checked)
        for name in checked:
            self.errors.pop(name, None)
        return SetParametersResult(successful=True)


def default_yaml() -> str:
    """The text of config/memspec.yaml."""
    lines = [
        '# Parameters of the memspec node; all of them, with their defaults.',
        '# Made by: python -m memspec_ros.parameters',
        '/**:',
        '  ros__parameters:']
    sections: dict[str, list[ParameterSpec]] = {}
    for spec in PARAMETERS:
        head, _, rest = spec.name.rpartition('.')
        sections.setdefault(head, []).append(spec)
    for head, specs in sections.items():
        indent = '    '
        if head:
            lines.append(f'    {head}:')
            indent = '      '
        for spec in specs:
            lines.append(f'{indent}# {spec.description} ({spec.constraint}; {spec.applies})')
            lines.append(f'{indent}{spec.name.rpartition(".")[2]}: {_yaml(spec.default)}')
    return '\n'.join(lines) + '\n'


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)


def _yaml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def markdown_table() -> str:
    """The table of docs/ros_interface.md."""
    lines = ['| Parameter | Default | Values | Applies | What |', '|---|---|---|---|---|']
    for spec in PARAMETERS:
        default = _yaml(spec.default)
        lines.append(f'| `{spec.name}` | `{default}` | {spec.constraint} | {spec.applies} | '
                     f'{spec.description} |')
    return '\n'.join(lines) + '\n'


if __name__ == '__main__':
    print(markdown_table() if '--markdown' in sys.argv[1:] else default_yaml(), end='')
