# SPDX-License-Identifier: Apache-2.0
"""The launch file, run as ``ros2 launch`` would run it."""

from __future__ import annotations

from pathlib import Path

import pytest

# Not among the wheels: these run where ROS 2 comes from apt.
launch_pytest = pytest.importorskip('launch_pytest')
pytest.importorskip('launch_ros')
pytest.importorskip('memspec_ros.srv')

from ament_index_python.packages import (  # noqa: E402
    get_package_share_directory,
    PackageNotFoundError,
)
from launch.actions import (  # noqa: E402
    IncludeLaunchDescription,
    RegisterEventHandler,
    SetEnvironmentVariable,
)
from launch.event_handlers import OnProcessExit  # noqa: E402
from launch.launch_description_sources import PythonLaunchDescriptionSource  # noqa: E402
from launch.utilities import perform_substitutions  # noqa: E402
from ros_peer import child_environment, RemoteNode, Status  # noqa: E402
import yaml  # noqa: E402

from launch import LaunchContext, LaunchDescription  # noqa: E402

try:
    SHARE = Path(get_package_share_directory('memspec_ros'))
except PackageNotFoundError:
    pytest.skip('the package is not installed', allow_module_level=True)

pytest_plugins = ['ros_fixtures']

FILE = SHARE / 'launch' / 'memspec.launch.py'
# Exit statuses of the processes that launch started, by the test's own name for the run.
exits: dict[str, list[int]] = {}


def described(name: str, **arguments) -> LaunchDescription:
    """Include the launch file; what its processes return goes to ``exits[name]``."""
    exits[name] = []
    environment = child_environment()
    return LaunchDescription([
        *(SetEnvironmentVariable(key, environment[key]) for key in (
            'PYTHONPATH', 'OMP_NUM_THREADS')),
        RegisterEventHandler(OnProcessExit(
            on_exit=lambda event, context: exits[name].append(event.returncode))),
        IncludeLaunchDescription(PythonLaunchDescriptionSource(str(FILE)),
                                 launch_arguments=arguments.items()),
        launch_pytest.actions.ReadyToTest()])


@launch_pytest.fixture
def started(ros_environment, ros_bundle):
    parameters = ros_environment / 'launched.yaml'
    parameters.write_text(yaml.safe_dump({'/**': {'ros__parameters': {
        'threads': 1, 'dtype': 'float32', 'cache_capacity': 5, 'sampling.max_new_tokens': 17}}}))
    return described('started', namespace='launched', node_name='words',
                     params_file=str(parameters), bundle=str(ros_bundle), cache_capacity='1',
                     scheduling_interval='7', log_level='debug')


@launch_pytest.fixture
def by_hand(ros_environment, ros_bundle):
    return described('by_hand', namespace='by_hand', bundle=str(ros_bundle), autostart='false',
                     use_sim_time='true')


def test_arguments():
    description = PythonLaunchDescriptionSource(str(FILE)).get_launch_description(LaunchContext())
    arguments = {argument.name: argument for argument in description.get_launch_arguments()}
    defaults = {
        name: perform_substitutions(LaunchContext(), argument.default_value)
        for name, argument in arguments.items()}
    assert Path(defaults.pop('params_file')) == SHARE / 'config' / 'memspec.yaml'
    assert defaults == {
        'namespace': '', 'node_name': 'memspec', 'bundle': '', 'cache_capacity': '2',
        'scheduling_interval': '4', 'autostart': 'true', 'use_lifecycle_manager': 'false',
        'use_aggregator': 'false', 'use_sim_time': 'false', 'use_respawn': 'false',
        'log_level': 'info'}
    assert all(argument.description for argument in arguments.values())


@pytest.mark.launch(fixture=started)
def test_node_comes_up_by_itself_with_its_arguments(peer):
    node = RemoteNode(peer, '/launched/words')
    peer.wait(lambda: node.state_now() == 'active', 'the active state', 60.0)
    # Arguments go before the file, the file before the defaults.
    assert node.get('cache_capacity', 'scheduling_interval', 'sampling.max_new_tokens',
                    'queue.max_size', 'autostart', 'use_sim_time') == [1, 7, 17, 8, True, False]
    assert node.generate().status.code == Status.LENGTH
    yield  # launch shuts its processes down here
    assert exits['started'] == [0]


@pytest.mark.launch(fixture=by_hand)
def test_node_waits_without_autostart(peer):
    node = RemoteNode(peer, '/by_hand/memspec')
    peer.wait(lambda: node.state_now() == 'unconfigured', 'the node', 60.0)
    assert node.get('autostart', 'use_sim_time') == [False, True]
    peer.spin(1.0)
    assert node.state == 'unconfigured'
    # The file that the package brings has the defaults of the node.
    assert node.get('cache_capacity', 'context.max_tokens') == [2, 2048]
    node.bring_to('active')
    assert node.generate().status.code == Status.LENGTH
