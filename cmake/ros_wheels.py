# SPDX-License-Identifier: Apache-2.0
"""
Which ROS 2 wheels this package is built against and needs, for pyproject.toml.

A metadata provider of scikit-build-core. ``ROS_DISTRO_WHEELS`` (default: jazzy)
selects the distribution; the lists are in ``requirements/``, where the
Makefile reads them too.
"""

import os
from pathlib import Path

REQUIREMENTS = Path(__file__).parent.parent / 'requirements'


def get_requires_for_dynamic_metadata(_settings):
    """Return what to install before the build, unless that is switched off."""
    return _read('ros-{}-build.txt')


def dynamic_metadata(field, _settings, *_):
    """
    Return the wheel's dependencies: ROS and what a client needs.

    No torch and no transformers: those belong to the machine (see
    docs/building.md), and the interfaces are of use without them.
    """
    assert field == 'dependencies'
    return [*_read('ros-{}.txt'), 'numpy', 'pyyaml']


def _read(name):
    distro = os.environ.get('ROS_DISTRO_WHEELS') or 'jazzy'
    path = REQUIREMENTS / name.format(distro)
    if not path.is_file():
        raise ValueError(f'ROS_DISTRO_WHEELS={distro}: there is no {path}')
    lines = (line.partition('#')[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]
