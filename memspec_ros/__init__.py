# SPDX-License-Identifier: Apache-2.0
"""
MemSpec: speculative decoding under a memory limit, as a ROS 2 node.

This file imports nothing of ours, so that ``import memspec_ros.msg`` works on
a machine without torch. The path is extended because the interface generator
installs ``msg``, ``srv`` and ``action`` under the same package name: run from
a source folder, Python still has to find the generated ones.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
