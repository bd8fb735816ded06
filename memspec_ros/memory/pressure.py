# SPDX-License-Identifier: Apache-2.0
"""
How short memory is, as the system tells it: what can still be taken, and who waits for it.

Read from small files, in some hundred microseconds: MemAvailable, the limits of
the control groups the process is in (version 2 and 1), and pressure stall
information (PSI, kernel 4.20 and later). What is missing is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
from dataclasses import dataclass
import os
from pathlib import Path

import torch

# Directory in place of "/" for the files read here: to try out what happens under pressure.
ROOT_VARIABLE = 'MEMSPEC_SYSTEM_ROOT'
UNLIMITED = 1 << 62
# Names of limit, use, and what of the use the kernel takes back when it is short: cached files.
_GROUP_FILES = (('memory.max', 'memory.current', 'inactive_file'),
                ('memory.limit_in_bytes', 'memory.usage_in_bytes', 'total_inactive_file'))


@dataclass(frozen=True)
class PressureReading:
    """
    One look at the system's memory.

    Attributes
    ----------
    available: bytes that can still be taken; UNLIMITED where nothing says
    source: where least is left: 'system', 'control group' or 'device'
    stall_percent: share of the last 10 s in which some program waited for
        memory [%] ("some avg10"); None where the kernel does not tell
    stalled_sec: the same as a sum since the system's start [s]

    """

    available: int = UNLIMITED
    source: str = 'system'
    stall_percent: float | None = None
    stalled_sec: float | None = None


class PressureGauge:
    """
    Reads the system's memory; may be used by any thread.

    Parameters
    ----------
    device_free: bytes free on a device with memory of its own; may raise
        RuntimeError where the device does not answer
    root: in place of "/"; None for $MEMSPEC_SYSTEM_ROOT, if that is set

    """

    def __init__(self, device_free: Callable[[], int] | None = None, root: Path | None = None):
        self._device_free = device_free
        self._root = Path(os.environ.get(ROOT_VARIABLE) or '/') if root is None else root

    def read(self) -> PressureReading:
        """Look now."""
        groups = list(self._groups())
        left = [(self._mem_available(), 'system')]
        left += [(self._left_in(group), 'control group') for group in groups]
        if self._device_free is not None:
            with contextlib.suppress(RuntimeError):
                left.append((self._device_free(), 'device'))
        available, source = min(left, key=lambda item: item[0])
        stalls = [stall for stall in map(self._stall, (
            self._root / 'proc/pressure/memory', *(group / 'memory.pressure'
                                                   for group in groups))) if stall]
        return PressureReading(available, source, *max(stalls, default=(None, None)))

    def _mem_available(self) -> int:
        with contextlib.suppress(ValueError, IndexError):
            for line in _text(self._root / 'proc/meminfo').splitlines():
                if line.startswith('MemAvailable:'):
                    return int(line.split()[1]) * 1024
        return UNLIMITED

    def _groups(self) -> Iterator[Path]:
        """Control groups of this process that count memory, each with those it lies in."""
        for line in (_text(self._root / 'proc/self/cgroup') or '0::/').splitlines():
            _, _, rest = line.partition(':')
            controllers, _, path = rest.partition(':')
            if controllers and 'memory' not in controllers.split(','):
                continue
            # In a container the path may be the host's, and the mount the container's own group.
            parts = Path(path.strip('/')).parts
            mount = self._root / 'sys/fs/cgroup' / ('memory' if controllers else '')
            for depth in range(len(parts), -1, -1):
                group = mount.joinpath(*parts[:depth])
                if '..' not in parts[:depth] and group.is_dir():
                    yield group

    @staticmethod
    def _left_in(group: Path) -> int:
        for limit_name, used_name, cached_name in _GROUP_FILES:
            with contextlib.suppress(ValueError, IndexError):
                limit, used = int(_text(group / limit_name)), int(_text(group / used_name))
                stat = dict(line.split() for line in _text(group / 'memory.stat').splitlines())
                return max(0, limit - used + int(stat.get(cached_name, 0)))
        return UNLIMITED  # "max" is no number: no limit

    @staticmethod
    def _stall(file: Path) -> tuple[float, float] | None:
        """(percent of the last 10 s, seconds in all) of "some", if the file says so."""
        with contextlib.suppress(ValueError, KeyError):
            for line in _text(file).splitlines():
                kind, *fields = line.split()
                if kind == 'some':
                    values = dict(field.split('=') for field in fields)
                    return float(values['avg10']), int(values['total']) / 1e6
        return None


def _text(file: Path) -> str:
    """The text of a file of the kernel; '' where there is none."""
    try:
        return file.read_text(errors='replace')
    except OSError:
        return ''


def shares_system_memory(device: torch.device) -> bool:
    """Whether models on ``device`` lie in the system's memory: the CPU, and boards like Jetson."""
    return device.type != 'cuda' or bool(
        getattr(torch.cuda.get_device_properties(device), 'is_integrated', False))


def gauge_of(device: torch.device) -> PressureGauge:
    """
    A gauge of what models on ``device`` are short of.

    On the CPU, and on boards whose GPU shares the system's memory, that is the
    system's: free memory leaves out what the kernel would give back.
    """
    if shares_system_memory(device):
        return PressureGauge()
    return PressureGauge(lambda: torch.cuda.mem_get_info(device)[0])
