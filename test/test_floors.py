# SPDX-License-Identifier: Apache-2.0
"""The house's floors: a lower one never imports a higher one, and ROS stays at the top."""

import ast
from pathlib import Path
import subprocess
import sys

import pytest

import memspec_ros

PACKAGE = Path(memspec_ros.__file__).parent
# From the ground up; the files beside these folders are the ROS floor, on top of all.
FLOORS = ('models', 'decoding', 'memory', 'runtime', 'training', 'bench')
# The command line drives the client and the node: it stands beside them.
TOP = ('cli',)
FILES = sorted(PACKAGE.rglob('*.py'))
ROS = {'rclpy', 'launch', 'launch_ros', 'std_msgs', 'diagnostic_msgs', 'lifecycle_msgs',
       'action_msgs', 'rcl_interfaces', 'builtin_interfaces', 'rosidl_runtime_py'}
INTERFACES = {'msg', 'srv', 'action'}


def floor_of(parts):
    """Height of a module given by its path below the package."""
    if len(parts) > 0 and parts[0] in FLOORS:
        return FLOORS.index(parts[0])
    return len(FLOORS)


def imports_of(source, package):
    """Absolute dotted names that a file imports, those inside functions included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ''
            if node.level:
                above = package[:len(package) - node.level + 1]
                base = '.'.join([*above, *([node.module] if node.module else [])])
            yield from (f'{base}.{alias.name}' for alias in node.names)


def faults_of(path, source):
    """What the file at ``path`` (below the package) imports that it must not."""
    package = ['memspec_ros', *path.parent.parts]
    own = floor_of(path.parts)
    for name in imports_of(source, package):
        parts = name.split('.')
        if parts[0] == 'memspec_ros' and len(parts) > 1:
            if parts[1] in INTERFACES:
                if own < len(FLOORS):
                    yield f'{name}: ROS interfaces'
            elif own < floor_of(parts[1:]) and (parts[1] in (*FLOORS, *TOP)
                                                or (PACKAGE / f'{parts[1]}.py').exists()):
                yield f'{name}: a higher floor'
        elif parts[0] in ROS and len(path.parts) > 1:
            yield f'{name}: ROS below the top floor'


@pytest.mark.parametrize('file', FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_only_from_its_own_floor_and_lower_ones(file):
    faults = list(faults_of(file.relative_to(PACKAGE), file.read_text(encoding='utf-8')))
    assert not faults, faults


@pytest.mark.parametrize('place, source', [
    ('models/x.py', 'from ..decoding.engine import Engine'),
    ('models/drafts/x.py', 'from ...runtime import loader'),
    ('decoding/x.py', 'import memspec_ros.runtime.policies'),
    ('runtime/x.py', 'from ..node import main'),
    ('runtime/x.py', 'def f():\n    import rclpy'),
    ('runtime/x.py', 'from memspec_ros.msg import TokenChunk'),
    ('runtime/x.py', 'from .. import training'),
    ('bench/x.py', 'from ..cli import main'),
    ('cli/x.py', 'import rclpy.node')])
def test_the_check_finds_what_it_is_for(place, source):
    assert len(list(faults_of(Path(place), source))) == (
        0 if 'node import' in source and not (PACKAGE / 'node.py').exists() else 1)


@pytest.mark.parametrize('place, source', [
    ('decoding/x.py', 'from ..models.state import Proposal\nimport torch'),
    ('runtime/x.py', 'from .loader import Loader\nfrom . import ranking'),
    ('node.py', 'import rclpy\nfrom .runtime.runtime import Runtime\nfrom .msg import X'),
    ('cli/x.py', 'from ..runtime.runtime import Runtime')])
def test_the_check_lets_through_what_is_right(place, source):
    assert list(faults_of(Path(place), source)) == []


def test_the_engine_runs_where_there_is_no_ros():
    script = f"""
import sys
class NoRos:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {sorted(ROS)!r}:
            raise ImportError(name)
sys.meta_path.insert(0, NoRos())
import memspec_ros.runtime.runtime, memspec_ros.training.distill
assert not any(name.split('.')[0] in {sorted(ROS)!r} for name in sys.modules)
"""
    subprocess.run([sys.executable, '-c', script], check=True, cwd=PACKAGE.parent)


def test_importing_the_package_imports_nothing_heavy():
    """So that ``import memspec_ros.msg`` works on a machine without torch."""
    script = ("import memspec_ros, sys; "
              "assert not {'torch', 'transformers', 'numpy', 'rclpy'} & set(sys.modules)")
    subprocess.run([sys.executable, '-c', script], check=True, cwd=PACKAGE.parent)


@pytest.mark.parametrize('file', FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_files_carry_their_licence(file):
    assert file.read_text(encoding='utf-8').startswith(
        '# SPDX-License-Identifier: Apache-2.0\n')
