# SPDX-License-Identifier: Apache-2.0
"""Suite ``all``: every suite, in one report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
import os
from pathlib import Path
import platform
from typing import Any

import numpy
import torch

from ...models.errors import InvalidRequestError
from ...models.kernel_choice import processor
from .base import Result, Suite
from .comparison import Bench
from .drawing import draw

REPORT_NAME = 'report.md'


def environment() -> dict[str, Any]:
    """The machine and the versions of what runs on it."""
    try:
        own = version('memspec_ros')
    except PackageNotFoundError:  # run from the sources
        own = ''
    return {'processor': processor() or platform.processor(), 'cores': os.cpu_count(),
            'device': torch.cuda.get_device_name() if torch.cuda.is_available() else 'cpu',
            'system': platform.platform(), 'python': platform.python_version(),
            'torch': torch.__version__, 'numpy': numpy.__version__, 'memspec_ros': own,
            'torch_threads': torch.get_num_threads()}


def run_all(bench: Bench, suites: Mapping[str, Suite], report: Callable[[str], None]
            ) -> dict[str, Result]:
    """Suite after suite; of several, those these prompts cannot serve are left out."""
    results = {}
    for name, suite in suites.items():
        if len(suites) > 1 and (reason := suite.lacks(bench)):
            report(f'{name}: left out, {reason}')
            continue
        report(f'{name} ({suite.figures})')
        results[name] = suite.run(bench)
    return results


def data_of(bench: Bench, results: Mapping[str, Result]) -> dict[str, Any]:
    """Plain data of all suites."""
    return {'environment': environment(), **bench.about(),
            'suites': {name: result.data for name, result in results.items()}}


def write_report(bench: Bench, results: Mapping[str, Result], suites: Mapping[str, Suite],
                 directory: Path) -> Path:
    """Draw the charts into ``directory`` and write the report there; its path."""
    about, machine = bench.about(), environment()
    device = '' if machine['device'] == 'cpu' else f', {machine["device"]}'
    lines = [
        '# Benchmark report', '', f'{bench.source.heading()}.', '',
        f'- machine: {machine["processor"] or "processor unknown"}, {machine["cores"]} cores'
        f'{device}, {machine["system"]}',
        f'- versions: memspec_ros {machine["memspec_ros"] or "from sources"}, Python '
        f'{machine["python"]}, PyTorch {machine["torch"]}, NumPy {machine["numpy"]}, '
        f'{machine["torch_threads"]} threads',
        f'- seeds: none, decoding is greedy; {bench.note()}',
        f'- prompts: {", ".join(f"{count} {name}" for name, count in about["prompts"].items())}; '
        f'sha256 of their keys {about["prompts_sha256"]}',
        f'- bundle: sha256 of its manifest {about["bundle"]}, drafts '
        f'{", ".join(about["drafts"])}, {about["dtype"]}', '',
        "*paper*: MemSpec's own figures, of other models on another machine.", '']
    for name, result in results.items():
        lines += [f'## {name} ({suites[name].figures})', '']
        for table in result.tables:
            lines += [table.markdown(), '']
        for chart in result.charts:
            lines += [f'![{chart.title}]({draw(chart, directory).name})', '']
    path = directory / REPORT_NAME
    try:
        path.write_text('\n'.join(lines), encoding='utf-8')
    except OSError as error:
        raise InvalidRequestError(f'{path}: {error.strerror or error}') from error
    return path
