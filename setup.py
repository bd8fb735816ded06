# SPDX-License-Identifier: Apache-2.0
"""
Only here for tools that look for a setup.py; it builds nothing.

The package has C++ parts (the ROS interfaces) and is built by CMakeLists.txt:
through colcon, or through ``pip install .``, which reads pyproject.toml and
never comes here. What works: ``--name``, ``--version`` and other queries.
"""

from pathlib import Path
import sys
from xml.etree import ElementTree

from setuptools import setup

if not any(argument.startswith('--') for argument in sys.argv[1:]):
    sys.exit('setup.py builds nothing: use `pip install .`, or colcon (see docs/building.md)')

package = ElementTree.parse(Path(__file__).with_name('package.xml')).getroot()
setup(version=package.findtext('version'))
