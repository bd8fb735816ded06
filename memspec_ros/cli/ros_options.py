# SPDX-License-Identifier: Apache-2.0
"""Whether ROS is there for the commands that need it."""

from __future__ import annotations

from ..models.errors import MemSpecError


class RosMissingError(MemSpecError):
    """rclpy or this package's interfaces cannot be imported."""


def require_ros() -> None:
    """Raise RosMissingError with the remedy where ROS cannot be imported."""
    try:
        import rclpy  # noqa: F401

        import memspec_ros.srv  # noqa: F401
    except ImportError as error:
        raise RosMissingError(
            f'this command needs ROS 2 and the built package ({error}); source the workspace '
            '(install/setup.bash) or use the virtual environment of "make build". '
            '"memspec generate" works without ROS') from error
