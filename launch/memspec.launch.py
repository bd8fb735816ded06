# SPDX-License-Identifier: Apache-2.0
"""
Bring up one memspec node.

``ros2 launch memspec_ros memspec.launch.py --show-args`` lists the arguments.
Autostart is the node's own: launch only sets the parameter, so that a
respawned node comes back active too.
"""

from launch.actions import DeclareLaunchArgument
from launch.conditions import IfCondition
from launch.substitutions import (
    AndSubstitution,
    LaunchConfiguration,
    NotSubstitution,
    PathJoinSubstitution,
)
from launch_ros.actions import Node
from launch_ros.parameter_descriptions import ParameterValue
from launch_ros.substitutions import FindPackageShare

from launch import LaunchDescription

SHARE = FindPackageShare('memspec_ros')
ARGUMENTS = (
    ('namespace', '', 'Namespace of the node.'),
    ('node_name', 'memspec', 'Name of the node.'),
    ('params_file', PathJoinSubstitution([SHARE, 'config', 'memspec.yaml']),
     'YAML file with the parameters of the node.'),
    ('bundle', '', 'Directory of the model bundle; empty: the one installed with the package.'),
    ('cache_capacity', '2', 'K: most drafts in memory at a time.'),
    ('scheduling_interval', '4', 'N: iterations between rankings of the drafts.'),
    ('autostart', 'true', 'Configure and activate the node after start.'),
    ('use_lifecycle_manager', 'false',
     'Bring the node up by a lifecycle manager of Nav2 instead of autostart.'),
    ('use_aggregator', 'false', 'Start a diagnostic aggregator for rqt_robot_monitor.'),
    ('use_sim_time', 'false', 'Stamp messages with simulated time.'),
    ('use_respawn', 'false', 'Start the node again when it ends.'),
    ('log_level', 'info', 'Log level of the node.'),
)


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments and the processes."""
    value = {name: LaunchConfiguration(name) for name, _, _ in ARGUMENTS}

    def typed(name: str, kind: type) -> ParameterValue:
        return ParameterValue(value[name], value_type=kind)

    node = Node(
        package='memspec_ros', executable='memspec_node', name=value['node_name'],
        namespace=value['namespace'], output='screen', emulate_tty=True,
        respawn=value['use_respawn'], respawn_delay=2.0,
        parameters=[
            value['params_file'],
            {'bundle': typed('bundle', str),
             'cache_capacity': typed('cache_capacity', int),
             'scheduling_interval': typed('scheduling_interval', int),
             'use_sim_time': typed('use_sim_time', bool),
             # One place starts the node: itself, or the manager.
             'autostart': ParameterValue(
                 AndSubstitution(value['autostart'],
                                 NotSubstitution(value['use_lifecycle_manager'])),
                 value_type=bool)},
        ],
        arguments=['--ros-args', '--log-level', value['log_level']])
    # rclpy nodes have no bond, and loading takes longer than the manager's default patience.
    manager = Node(
        package='nav2_lifecycle_manager', executable='lifecycle_manager',
        name='lifecycle_manager_memspec', namespace=value['namespace'], output='screen',
        condition=IfCondition(value['use_lifecycle_manager']),
        parameters=[{'autostart': typed('autostart', bool), 'bond_timeout': 0.0,
                     'service_timeout': 600.0, 'node_names': [value['node_name']]}])
    aggregator = Node(
        package='diagnostic_aggregator', executable='aggregator_node', name='analyzers',
        output='screen', condition=IfCondition(value['use_aggregator']),
        parameters=[PathJoinSubstitution([SHARE, 'config', 'diagnostics_aggregator.yaml'])])
    declared = [DeclareLaunchArgument(name, default_value=default, description=description)
                for name, default, description in ARGUMENTS]
    return LaunchDescription([*declared, node, manager, aggregator])
