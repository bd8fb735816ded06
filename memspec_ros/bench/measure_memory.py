# SPDX-License-Identifier: Apache-2.0
"""
The footprint model held against a run: a child process loads, generates, and is weighed.

Every figure of a process's memory holds for all its life, so that only a fresh
one can say what a bundle takes. ``python -m memspec_ros.bench.measure_memory``
is the child: options as JSON in, figures as JSON out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
import json
import subprocess
import sys

from ..memory.allocator import MIB
from ..memory.footprint import Demand, FootprintModel
from ..models.errors import MemSpecError
from ..models.kv_options import KVOptions

# Output tokens; the rest of the context is prompt.
_NEW_TOKENS = 48
_LOAD_SEC = 600.0


@dataclass(frozen=True)
class Subject:
    """What the child is to run."""

    bundle: str
    dtype: str
    weights: str
    device: str
    threads: int
    demand: Demand
    layers_mib: float = 0.0


def measure(subject: Subject) -> dict:
    """
    Run ``subject`` in a child; predicted and measured peak and their parts, in MiB.

    Raises MemSpecError with what the child said where it failed.
    """
    done = subprocess.run(
        [sys.executable, '-m', __name__], input=json.dumps(asdict(subject)), text=True,
        capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f'it ended with status {done.returncode}']
        raise MemSpecError(f'the measuring process failed: {said[-1]}')
    return json.loads(done.stdout.splitlines()[-1])


def open_model(bundle: str, device: str, dtype: str, weights: str,
               layers_mib: float = 0.0) -> FootprintModel:
    """
    The footprint of a bundle ('' for the installed one) in this process, as it is here and now.

    What the process takes by itself is measured while a tokenizer is there.
    """
    from ..memory import process
    from ..models.bundle import load_bundle
    from ..models.target_files import locate_target
    from ..models.tokenizer import Tokenizer
    from ..runtime.runtime import choose_device, choose_dtype
    opened = load_bundle(bundle or None)
    locate_target(opened)
    where = choose_device(device)
    what = choose_dtype(dtype, where)
    tokenizer = Tokenizer(opened.tokenizer_path)
    model = FootprintModel(opened, what, where, weights, process.runtime_bytes(what, where),
                           int(layers_mib * MIB))
    del tokenizer
    return model


def weigh(subject: Subject) -> dict:
    """Load and generate here, the context of every session filled and K drafts resident."""
    import torch

    from ..memory import process
    from ..runtime.requests import Finish, PreparedRequest
    from ..runtime.runtime import Runtime, RuntimeOptions
    from ..runtime.settings import Settings
    demand = subject.demand
    if subject.threads:
        torch.set_num_threads(subject.threads)
    model = open_model(subject.bundle, subject.device, subject.dtype, subject.weights,
                       subject.layers_mib)
    footprint = model.of(demand)
    process.reset_peak()
    runtime = Runtime.open(subject.bundle or None, RuntimeOptions(
        device=subject.device, dtype=subject.dtype, weights=subject.weights,
        context=demand.context, max_gamma=demand.gamma, max_branches=demand.branches,
        adaptive=False, threads=subject.threads, layers_mib=subject.layers_mib, kv=demand.kv,
        settings=Settings(demand.capacity, self_speculation=demand.kv.exact)))
    try:
        controller = runtime.controller
        _load_largest(controller.residency, model, demand)
        fresh = min(_NEW_TOKENS, runtime.options.context // 2)
        for session in range(demand.sessions):
            ids = [(7 * i + session) % runtime.tokenizer.size
                   for i in range(runtime.options.context - fresh)]
            *_, last = controller.generate(PreparedRequest(
                ids, '', fresh, ignore_eos=True, session=f'{session}'))
            if last.finish is not Finish.LENGTH:
                raise MemSpecError(f'an answer ended with {last.finish.value}: {last.message}')
        resident = len(controller.residency.resident)
    finally:
        runtime.close()
    measured = process.peak_bytes()
    return {
        'predicted_peak_mib': round(footprint.total / MIB, 2),
        'measured_peak_mib': round(measured / MIB, 2),
        'relative_error': round(footprint.total / measured - 1, 4),
        'runtime_mib': round(footprint.runtime / MIB, 2), 'resident_drafts': resident}


def _load_largest(residency, model: FootprintModel, demand: Demand) -> None:
    """Bring the K largest drafts into memory, as the footprint counts them."""
    ranked = [(draft, 1.0) for draft in model.largest(demand)]
    for _ in ranked:
        residency.update(ranked, None)
        residency.wait(_LOAD_SEC)
        residency.poll()
    failed = [view for view in residency.view() if view.reason]
    if failed:
        raise MemSpecError(f'draft {failed[0].id!r} failed: {failed[0].reason}')


def main() -> int:
    """Read a Subject from standard input, write the figures to standard output."""
    given = json.load(sys.stdin)
    try:
        demand = {**given['demand'], 'kv': KVOptions(**given['demand']['kv'])}
        print(json.dumps(weigh(Subject(**{**given, 'demand': Demand(**demand)}))))
        return 0
    except (MemSpecError, OSError) as error:
        print(' '.join(str(error).split()), file=sys.stderr)
        return 1


if __name__ == '__main__':
    sys.exit(main())
