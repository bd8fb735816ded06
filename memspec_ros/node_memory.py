# SPDX-License-Identifier: Apache-2.0
"""Memory of the node: what it asks for before it loads, what it gives back under pressure."""

from __future__ import annotations

from dataclasses import replace

import torch

from .memory import preflight, process
from .memory.allocator import MIB
from .memory.footprint import Demand, FootprintModel
from .memory.pressure import (
    gauge_of,
    PressureGauge,
    PressureReading,
    shares_system_memory,
    UNLIMITED,
)
from .models.bundle import Bundle
from .models.errors import InsufficientMemoryError
from .runtime.memory_guard import Level, MemoryGuard, Thresholds
from .runtime.runtime import Runtime
from .runtime.worker import GenerationWorker

CHECK_PERIOD_SEC = 0.5


class NodeMemory:
    """
    Preflight, and the watch over what was loaded.

    Checks run on the executor: they read a few small files and decide; the worker
    carries out what concerns the drafts. ``steady``: the timer's clock.
    """

    def __init__(self, node, steady, group):
        self._node = node
        self._value = node.parameters
        self._steady = steady
        self._group = group
        self._timer = None
        self._watched: tuple[Runtime, GenerationWorker, MemoryGuard] | None = None
        self._affordable_capacity = 0
        self._freed = False
        self._gauge = PressureGauge()
        # Bytes of the budget that what idle conversations have read may take.
        self._conversations_room = UNLIMITED

    @property
    def guard(self) -> MemoryGuard | None:
        """What watches over the models; None where none are loaded."""
        watched = self._watched
        return watched[2] if watched is not None else None

    def reading(self) -> PressureReading:
        """How short memory is: of the last check, or now where nothing is loaded."""
        guard = self.guard
        return guard.reading if guard is not None else self._gauge.read()

    def thresholds(self) -> Thresholds:
        """What counts as pressure, as the parameters have it."""
        return Thresholds(self._value['memory.min_free_mib'] * MIB,
                          self._value['memory.stall_percent'], self._value['memory.recover_sec'])

    def preflight(self, bundle: Bundle, dtype: torch.dtype, device: torch.device) -> None:
        """Refuse what will not fit, and work K out where it is -1."""
        value = self._value
        self._gauge = gauge_of(device)
        model = FootprintModel(
            bundle, dtype, device, value['weights'],
            process.runtime_bytes(dtype, device) if shares_system_memory(device) else 0,
            int(value['memory.layers_mib'] * MIB))
        budget, min_free = value['memory.budget_mib'] * MIB, value['memory.min_free_mib'] * MIB
        available = self._gauge.read().available
        demand = Demand(value['context.max_tokens'], value['draft.max_tokens'], 0,
                        branches=value['draft.max_branches'], kv=value.kv)
        self._affordable_capacity = model.affordable_capacity(
            demand, preflight.room_bytes(available, model.runtime, budget, min_free))
        footprint = model.of(replace(demand, capacity=self.wanted_capacity()))
        preflight.check(footprint, model.of(demand), available, budget, min_free)
        self._conversations_room = budget - footprint.total if budget else UNLIMITED
        self._node.get_logger().info(
            f'needs {footprint.needed / MIB:.0f} MiB beside the {model.runtime / MIB:.0f} MiB of '
            f'its libraries; {available / MIB:.0f} MiB are available; '
            f'K = {self.wanted_capacity()}')

    def wanted_capacity(self) -> int:
        """K: the parameter, or what was derived from the budget for -1."""
        value = self._value['cache_capacity']
        return self._affordable_capacity if value < 0 else value

    def watch(self, runtime: Runtime, worker: GenerationWorker) -> None:
        """Give memory of ``runtime`` back under pressure from now on."""
        room = self._conversations_room
        runtime.controller.sessions.room = lambda: room
        guard = MemoryGuard(runtime.controller, self.thresholds, runtime.controller.clock)
        self._watched, self._freed = (runtime, worker, guard), False
        self._check()
        self._timer = self._node.create_timer(CHECK_PERIOD_SEC, self._check, clock=self._steady,
                                              callback_group=self._group)

    def stop(self) -> None:
        """Nothing is loaded any more."""
        if self._timer is not None:
            self._node.destroy_timer(self._timer)
            self._timer = None
        self._watched = None

    def admit(self) -> None:
        """Raise InsufficientMemoryError where no request may be taken."""
        guard = self.guard
        if guard is not None and not guard.limits.requests:
            raise InsufficientMemoryError(
                f'memory is short ({guard.reason}); try again when the Memory status of '
                '/diagnostics is OK, or stop other programs')

    def _check(self) -> None:
        watched = self._watched
        if watched is None:
            return
        runtime, worker, guard = watched
        changed = guard.check(self._gauge.read())
        if changed:
            self._log(guard)
        # A running request gives a draft up after the check that wants it: the next one returns
        # what was freed.
        freed, self._freed = self._freed, (guard.pressed and changed
                                           and guard.level <= Level.DRAFTS)
        if worker.running is not None:
            if freed:
                runtime.give_back()
        elif freed or guard.pressed and (changed or self._too_many(runtime)):
            worker.between(lambda: self._settle(runtime))

    @staticmethod
    def _too_many(runtime: Runtime) -> bool:
        controller = runtime.controller
        allowed = controller.capacity if controller.limits.requests else 0
        return len(controller.residency.resident) > allowed

    @staticmethod
    def _settle(runtime: Runtime) -> None:
        runtime.controller.settle()
        runtime.give_back()

    def _log(self, guard: MemoryGuard) -> None:
        given = ', '.join(guard.given_up)
        if guard.pressed:
            self._node.get_logger().warning(f'memory is short: {guard.reason}; given up: {given}')
        else:
            self._node.get_logger().info(
                f'memory is back: {guard.reading.available / MIB:.0f} MiB available; '
                f'{"still given up: " + given if given else "nothing is given up any more"}')
