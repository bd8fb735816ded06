# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the ROS tests; loaded by these alone, as rclpy may not be there."""

from __future__ import annotations

import os
import socket

import pytest
from ros_peer import make_bundle, NodeUnderTest, Peer

# The same ports as the domain coordinator of ROS's own tests, so that neither disturbs the other.
_DOMAIN_PORT = 22119


def _own_domain() -> tuple[int, socket.socket]:
    """Find a domain that no other test session here uses, and the socket that says so."""
    for domain in range(1, 101):
        lock = socket.socket()
        try:
            lock.bind(('localhost', _DOMAIN_PORT + domain))
            return domain, lock
        except OSError:
            lock.close()
    raise RuntimeError('no free ROS domain')


@pytest.fixture(scope='session')
def ros_environment(tmp_path_factory):
    """Set up what all processes of this session share: domain, range, folders."""
    domain, lock = _own_domain()
    directory = tmp_path_factory.mktemp('ros')
    values = {'ROS_DOMAIN_ID': str(domain), 'ROS_AUTOMATIC_DISCOVERY_RANGE': 'LOCALHOST',
              # Humble's name for the same.
              'ROS_LOCALHOST_ONLY': '1', 'ROS_LOG_DIR': str(directory / 'log'),
              # The lock that nodes take while loading: not that of other nodes on this machine.
              'TEST_TMPDIR': str(directory)}
    if os.environ.get('ROS_DISTRO', '') != 'humble':
        del values['ROS_LOCALHOST_ONLY']
    before = dict(os.environ)
    os.environ.update(values)
    yield directory
    os.environ.clear()
    os.environ.update(before)
    lock.close()


@pytest.fixture(scope='session')
def ros_bundle(tmp_path_factory):
    """Make the bundle of all ROS tests: tiny, with drafts of every worth."""
    return make_bundle(tmp_path_factory.mktemp('ros_bundle'))


@pytest.fixture(scope='session')
def peer(ros_environment):
    peer = Peer()
    yield peer
    peer.close()


@pytest.fixture(scope='session')
def start_node(peer, ros_environment, ros_bundle):
    """(keywords of NodeUnderTest) -> a new node; what a test leaves over is killed at the end."""
    started: list[NodeUnderTest] = []

    def start(**keywords) -> NodeUnderTest:
        keywords.setdefault('bundle', ros_bundle)
        started.append(NodeUnderTest(peer, ros_environment, **keywords))
        return started[-1]

    yield start
    for node in started:
        node.kill()


@pytest.fixture(scope='session')
def _shared(start_node):
    """Hold the node that all tests share which leave it as they found it."""
    holder: list[NodeUnderTest] = []
    yield holder
    if holder and holder[0].alive:
        holder[0].ended_cleanly()


@pytest.fixture
def node(_shared, start_node):
    """Provide the shared node in whatever state, with parameters as at its start."""
    if not _shared or not _shared[0].alive:
        _shared[:] = [start_node(namespace='robot')]
    yield _shared[0]
    if _shared[0].alive:
        _shared[0].restore()


@pytest.fixture
def active(node):
    node.bring_to('active')
    return node


@pytest.fixture
def unconfigured(node):
    node.bring_to('unconfigured')
    return node
