# SPDX-License-Identifier: Apache-2.0
"""A memspec node as a child process, for the commands that bring their own."""

from __future__ import annotations

from collections.abc import Mapping
import os
from pathlib import Path
import signal
import subprocess
import sys
import tempfile

from ..models.errors import MemSpecError


class NodeProcessError(MemSpecError):
    """The node did not start, configure or stop as it should."""


class NodeProcess:
    """
    Starts the node with parameters; its log goes to a file and is shown when it fails.

    Use as a context manager: leaving it stops the node.
    """

    def __init__(self, parameters: Mapping[str, object], name: str = 'memspec',
                 namespace: str = ''):
        command = [sys.executable, '-m', 'memspec_ros.node', '--ros-args', '-r',
                   f'__node:={name}']
        if namespace:
            command += ['-r', f'__ns:=/{namespace.strip("/")}']
        for key, value in parameters.items():
            text = str(value).lower() if isinstance(value, bool) else (
                f'"{value}"' if isinstance(value, str) else str(value))
            command += ['-p', f'{key}:={text}']
        # Where the package was found, the child has to find it too.
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, *filter(None, os.environ.get('PYTHONPATH', '').split(os.pathsep))]
        self._log = tempfile.NamedTemporaryFile('w+', prefix='memspec-node-', suffix='.log')
        self.process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, 'PYTHONPATH': os.pathsep.join(paths)})

    def __enter__(self) -> NodeProcess:
        return self

    def __exit__(self, *exc) -> None:
        self.stop()

    def check(self) -> None:
        """Raise NodeProcessError if the node has ended."""
        if self.process.poll() is not None:
            raise NodeProcessError(
                f'the node ended with status {self.process.returncode}:\n{self.log()}')

    def log(self, lines: int = 20) -> str:
        """The end of the node's log."""
        self._log.flush()
        return '\n'.join(Path(self._log.name).read_text(errors='replace').splitlines()[-lines:])

    def stop(self, timeout: float = 20.0) -> int:
        """Interrupt the node and wait for its end; returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self.process.returncode
