#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Can this machine build the package from wheels? Says what is missing, before minutes of work.
# Usage: check_system.sh PYTHON
python=$1

fail() {
  echo "memspec_ros: $1" >&2
  exit 1
}

case "$(uname -s) $(uname -m)" in
  'Linux x86_64') ;;
  *) fail "PyPI has ROS 2 wheels for x86-64 Linux only, this is $(uname -s) $(uname -m): \
build with colcon on an apt ROS 2 instead, see docs/building.md" ;;
esac
command -v "$python" >/dev/null || fail "there is no '$python'; choose one with PYTHON=..."
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') ||
  fail "'$python' does not run"
case $version in
  3.10 | 3.11 | 3.12 | 3.13) ;;
  *) fail "'$python' is Python $version; 3.10 to 3.13 are supported. Choose one with PYTHON=..." ;;
esac
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
  fail "'$python' cannot create virtual environments: apt install python3-venv"
"$python" -c 'import os, sysconfig
assert os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null ||
  fail "the header files of Python $version are missing: apt install python3-dev"
command -v c++ >/dev/null || fail 'there is no C++ compiler: apt install g++'
