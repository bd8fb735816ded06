# SPDX-License-Identifier: Apache-2.0
"""``memspec demo`` and ``chat``: the whole way, in the processes that a user starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip('rclpy')
pytest.importorskip('memspec_ros.srv')

from ros_peer import child_environment  # noqa: E402

pytest_plugins = ['ros_fixtures']


def memspec(*arguments: str, stdin: str = '') -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, '-m', 'memspec_ros.cli', *arguments], capture_output=True, input=stdin,
        text=True, errors='surrogateescape', timeout=120, env=child_environment())


def test_demo(ros_environment, ros_bundle, tmp_path):
    picture = tmp_path / 'demo.svg'
    done = memspec('demo', '--bundle', str(ros_bundle), '--prompt', 'the robot',
                   '--max-new-tokens', '30', '--svg', str(picture))
    assert done.returncode == 0, done.stderr + done.stdout
    for word in ('unconfigured', 'active', 'tokens/s', 'accepted', 'general',
                 'shut down cleanly'):
        assert word in done.stdout
    assert 'Traceback' not in done.stderr
    assert '<svg' in picture.read_text()


def test_demo_with_a_wrong_bundle(ros_environment, tmp_path):
    done = memspec('demo', '--bundle', str(tmp_path / 'nowhere'))
    assert done.returncode == 1
    assert 'nowhere' in done.stderr and 'Traceback' not in done.stderr


def test_chat_answers_line_by_line(ros_environment, ros_bundle):
    done = memspec('chat', '--bundle', str(ros_bundle), '--max-new-tokens', '8',
                   stdin='the robot\n\nbad \udcff\nand then\n')
    # A line that is no text is refused alone, and the script that sent it learns of it.
    assert done.returncode == 1 and 'not valid Unicode' in done.stderr
    # Two answers: the empty line between them is none.
    assert done.stdout.count('tokens/s, first token') == 2
    assert 'Traceback' not in done.stderr


def test_chat_with_a_node_that_is_not_there(ros_environment):
    done = memspec('chat', '--node', '/nobody', '--timeout', '1', stdin='hello\n')
    assert done.returncode == 1
    assert '/nobody' in done.stderr and 'Traceback' not in done.stderr
