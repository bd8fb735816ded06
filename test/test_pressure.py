# SPDX-License-Identifier: Apache-2.0
"""What the system's files say of its memory."""

from __future__ import annotations

import pytest
import torch

from memspec_ros.memory.pressure import (
    gauge_of,
    PressureGauge,
    PressureReading,
    ROOT_VARIABLE,
    UNLIMITED,
)

KIB, MIB = 1 << 10, 1 << 20
MEMINFO = 'MemTotal: 8000000 kB\nMemFree: 100 kB\nMemAvailable:    5000 kB\nBuffers: 1 kB\n'
PSI = ('some avg10=12.50 avg60=3.00 avg300=1.00 total=2500000\n'
       'full avg10=99.00 avg60=0.00 avg300=0.00 total=9000000\n')


@pytest.fixture
def system(tmp_path):
    """(files by name) -> a gauge of a system that has these."""
    def make(files, device_free=None):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return PressureGauge(device_free, tmp_path)
    return make


def version_2(path, limit, used, cached=0):
    return {f'{path}/memory.max': f'{limit}\n', f'{path}/memory.current': f'{used}\n',
            f'{path}/memory.stat': f'anon 7\ninactive_file {cached}\nactive_file 9\n'}


def version_1(path, limit, used, cached=0):
    return {f'{path}/memory.limit_in_bytes': f'{limit}\n',
            f'{path}/memory.usage_in_bytes': f'{used}\n',
            f'{path}/memory.stat': f'cache 7\ninactive_file 1\ntotal_inactive_file {cached}\n'}


def test_mem_available_and_who_waits(system):
    reading = system({'proc/meminfo': MEMINFO, 'proc/pressure/memory': PSI}).read()
    assert reading == PressureReading(5000 * KIB, 'system', 12.5, 2.5)


@pytest.mark.parametrize('files', [
    {}, {'proc/meminfo': 'MemTotal: 1 kB\n'}, {'proc/meminfo': 'MemAvailable:\n'},
    {'proc/meminfo': 'MemAvailable: many kB\n'}, {'proc/pressure/memory': ''},
    {'proc/pressure/memory': 'some avg10=x total=1\n'},
    {'proc/pressure/memory': 'some avg10=1.0\n'},
    {'sys/fs/cgroup/memory.max': '100\n'}, {'proc/self/cgroup': 'nonsense\n'}])
def test_what_is_missing_or_odd_is_left_out(system, files):
    assert system(files).read() == PressureReading(UNLIMITED, 'system', None, None)


def test_the_limit_of_the_control_group(system):
    """Less than the system has; cached files are given back by the kernel, and are no use."""
    reading = system({'proc/meminfo': MEMINFO, 'proc/self/cgroup': '0::/robot/llm\n',
                      **version_2('sys/fs/cgroup/robot/llm', MIB, 900 * KIB, 100 * KIB)}).read()
    assert (reading.available, reading.source) == (224 * KIB, 'control group')


def test_no_limit_is_none(system):
    reading = system({'proc/meminfo': MEMINFO, 'proc/self/cgroup': '0::/robot\n',
                      **version_2('sys/fs/cgroup/robot', 'max', 900)}).read()
    assert (reading.available, reading.source) == (5000 * KIB, 'system')


def test_the_group_around_it_may_be_the_tighter_one(system):
    reading = system({'proc/self/cgroup': '0::/robot/llm\n',
                      **version_2('sys/fs/cgroup/robot', 500, 450),
                      **version_2('sys/fs/cgroup/robot/llm', 900, 100)}).read()
    assert reading.available == 50


@pytest.mark.parametrize('path', ['/', '/host/docker/abc', '/../other'])
def test_in_a_container_the_mount_is_the_group(system, path):
    reading = system({'proc/self/cgroup': f'0::{path}\n',
                      **version_2('sys/fs/cgroup', 500, 450)}).read()
    assert reading.available == 50


def test_a_group_that_is_over_its_limit_has_nothing_left(system):
    assert system(version_2('sys/fs/cgroup', 500, 800)).read().available == 0


def test_version_1_groups(system):
    """Beside other controllers; one without a limit has an absurd one."""
    reading = system({
        'proc/meminfo': MEMINFO,
        'proc/self/cgroup': '3:cpuset:/x\n4:memory,hugetlb:/docker/abc\n0::/\n',
        **version_1('sys/fs/cgroup/memory/docker', 9223372036854771712, 10),
        **version_1('sys/fs/cgroup/memory/docker/abc', 1000, 600, 50)}).read()
    assert (reading.available, reading.source) == (450, 'control group')


def test_the_group_may_wait_where_the_system_does_not_say(system):
    group = {'proc/self/cgroup': '0::/robot\n', 'sys/fs/cgroup/robot/memory.pressure': PSI}
    assert system(group).read().stall_percent == 12.5
    assert system({'proc/pressure/memory': PSI.replace('12.50', '40.00')}).read() \
        .stall_percent == 40.0


def test_a_device_with_memory_of_its_own(system):
    def broken():
        raise RuntimeError('CUDA error')
    files = {'proc/meminfo': MEMINFO}
    reading = system(files, lambda: 77).read()
    assert (reading.available, reading.source) == (77, 'device')
    assert system(files, lambda: 1 << 40).read().source == 'system'
    assert system(files, broken).read().available == 5000 * KIB


def test_the_root_can_be_set_from_outside(tmp_path, monkeypatch, system):
    system({'proc/meminfo': MEMINFO})
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path))
    assert gauge_of(torch.device('cpu')).read().available == 5000 * KIB
    monkeypatch.setenv(ROOT_VARIABLE, '')
    assert PressureGauge().read().available != 5000 * KIB


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
def test_on_a_gpu_its_free_memory_counts():
    device = torch.device('cuda:0')
    before = gauge_of(device).read()
    held = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    after = gauge_of(device).read()
    assert after.available < before.available or before.source != 'device'
    del held
    torch.cuda.empty_cache()
