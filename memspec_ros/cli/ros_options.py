# SPDX-License-Identifier: Apache-2.0
"""Whether ROS is there for the commands that need it."""

from __future__ import annotations

import importlib.util

from ..models.errors import MemSpecError


class RosMissingError(MemSpecError):
    """rclpy or this package's interfaces cannot be imported."""


def require_ros() -> None:
    """Raise RosMissingError with the remedy where ROS cannot be imported."""
    missing = [name for name in ('rclpy', 'memspec_ros.srv')
               if importlib.util.find_spec(name) is None]
    if missing:
        raise RosMissingError(
            f'this command needs ROS 2 and the built package, {missing[0]} is not there; source '
            'the workspace (install/setup.bash) or use the virtual environment of "make build". '
            '"memspec generate" works without ROS')
