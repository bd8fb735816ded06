# SPDX-License-Identifier: Apache-2.0
"""Opening a bundle: everything a controller needs, put together in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
import statistics
import time

import torch

from ..decoding.draft_length import DraftLength
from ..decoding.engine import Engine
from ..memory import allocator
from ..memory.footprint import draft_bytes
from ..models.bundle import Bundle, load_bundle
from ..models.drafts import KINDS
from ..models.errors import BundleError, InvalidRequestError
from ..models.fingerprint import strangers
from ..models.kv_options import KVOptions
from ..models.offload import Offload
from ..models.target import load_target, read_config, Target
from ..models.target_files import cache_directory, locate_target
from ..models.threads import choose_threads, FEW_ROWS
from ..models.tokenizer import Tokenizer
from .controller import Controller, Settings
from .loader import Loader, STALL_SEC, ThreadLoader
from .policies import make_policy
from .ranking import make_ranker
from .requests import GenerationRequest, prepare, PreparedRequest
from .residency import Residency
from .slots import slots_for
from .storage import FileStore, PreparingStore, StorageLimits, Store

_WARM_UP_ROUNDS = 6
DTYPES = {'bfloat16': torch.bfloat16, 'float32': torch.float32, 'float16': torch.float16}


@dataclass
class RuntimeOptions:
    """
    How to run a bundle.

    dtype 'auto' is bfloat16 where the processor has it, float32 elsewhere;
    weights: what the target's layers are held as, of packing.WEIGHT_KINDS.
    max_gamma 0 switches speculation off. max_branches: alternatives to drafted
    tokens verified beside them. threads 0: as many as are fastest here, measured.
    layers_mib: most memory for the target's layers, the others are read in
    every pass; 0 keeps all. kv: how keys and values of old positions are kept.
    storage: how draft files, and such layers, are read.
    """

    device: str = 'auto'
    dtype: str = 'auto'
    weights: str = 'auto'
    context: int = 2048
    max_gamma: int = 4
    max_branches: int = 4
    adaptive: bool = True
    policy: str = 'memspec'
    ucb_c: float = 1.0
    ucb_per_iteration: bool = False
    generic_target: bool = False
    threads: int = 0
    layers_mib: float = 0.0
    kv: KVOptions = KVOptions()
    settings: Settings = field(default_factory=Settings)
    storage: StorageLimits = StorageLimits()


def choose_device(name: str) -> torch.device:
    """Resolve 'auto', 'cpu' or 'cuda[:N]'; InvalidRequestError where it is not there."""
    if name == 'auto':
        return torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')
    if name == 'cpu':
        return torch.device('cpu')
    kind, _, index = name.partition(':')
    if kind != 'cuda' or not (index == '' or index.isdigit()):
        raise InvalidRequestError(f'device {name!r}: expected auto, cpu or cuda:N')
    if not torch.cuda.is_available():
        raise InvalidRequestError(f'device {name!r}: this PyTorch sees no CUDA device; use cpu')
    if int(index or 0) >= torch.cuda.device_count():
        raise InvalidRequestError(
            f'device {name!r}: there are {torch.cuda.device_count()} CUDA devices')
    return torch.device('cuda', int(index or 0))


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Resolve 'auto' and the names of DTYPES for ``device``."""
    if name != 'auto':
        if name not in DTYPES:
            raise InvalidRequestError(
                f'dtype {name!r}: expected auto, {", ".join(sorted(DTYPES))}')
        return DTYPES[name]
    if device.type == 'cuda':
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if _cpu_has_bfloat16() else torch.float32


def _cpu_has_bfloat16() -> bool:
    """Whether bfloat16 products are native here, so that they are faster than float32 ones."""
    try:
        flags = Path('/proc/cpuinfo').read_text()
    except OSError:
        return False
    return any(f' {flag}' in flags for flag in ('avx512_bf16', 'amx_bf16', 'bf16'))


class Runtime:
    """
    An opened bundle: target in memory, drafts under residency, controller ready.

    Open with ``Runtime.open``; ``close`` ends the loader thread and drops all weights.
    """

    def __init__(self, bundle: Bundle, options: RuntimeOptions, target: Target,
                 tokenizer: Tokenizer, loader: Loader, controller: Controller):
        self.bundle = bundle
        self.options = options
        self.target = target
        self.tokenizer = tokenizer
        self.controller = controller
        self._loader = loader

    @classmethod
    def open(cls, path: Path | str | None = None, options: RuntimeOptions | None = None,
             clock: Callable[[], float] = time.monotonic,
             progress: Callable[[str, float], None] | None = None,
             store: Store | None = None,
             before_loading: Callable[[Bundle, torch.dtype, torch.device], None] | None = None
             ) -> Runtime:
        """
        Load the bundle of ``path`` (None or '': the default one).

        ``progress(stage, fraction)`` is told of slow work. ``before_loading`` is
        called when the tokenizer is there and no model yet, and may raise to
        refuse. Raises MemSpecError saying what is wrong and where.
        """
        options = replace(options) if options else RuntimeOptions()
        tell = progress or (lambda stage, fraction: None)
        tell('reading the bundle', 0.0)
        bundle = load_bundle(path, again=False)  # what is read of it is hashed as it is read
        device = choose_device(options.device)
        dtype = choose_dtype(options.dtype, device)
        if options.threads:
            torch.set_num_threads(options.threads)
        directory = locate_target(bundle, progress)
        read_config(directory)  # else the tokenizer stumbles over it first, and is blamed
        tell('loading the tokenizer', 0.2)
        tokenizer = Tokenizer(bundle.tokenizer_path)
        if before_loading is not None:
            before_loading(bundle, dtype, device)
        tell('loading the target', 0.3)
        with allocator.compact():
            target = load_target(directory, dtype, device, options.context,
                                 options.generic_target, weights=options.weights,
                                 offload=offload_of(options))
        if target.vocab_size < tokenizer.size:
            raise BundleError(f'the target has {target.vocab_size} ids, its tokenizer '
                              f'{tokenizer.size}: they do not belong together')
        options.context = min(options.context, target.max_positions)
        tell('preparing the drafts', 0.8)
        capacity = options.kv.positions(options.context) + options.max_gamma + 1
        kinds = {spec.id: (KINDS[spec.kind](spec, bundle, target, capacity), spec.bytes)
                 for spec in bundle.drafting
                 if options.kv.exact or spec is not bundle.self_speculation
                 } if options.max_gamma else {}
        depths, stops = (frozenset().union(*(getattr(kind, name) for kind, _ in kinds.values()))
                         for name in ('depths', 'stops'))
        engine = Engine(target, options.context, options.max_gamma, depths, clock,
                        options.max_branches if options.max_gamma else 0, options.kv, stops)
        if store is None:
            store = file_store(bundle, device, options.storage)
        drafts = [spec for spec in bundle.drafts if spec.id in kinds]
        if bundle.ranker_file is not None:
            tell('loading the ranker', 0.85)
        ranker = make_ranker(bundle.ranker, drafts, bundle, target)
        policy = make_policy(options.policy, drafts, ranker, options.ucb_c,
                             options.ucb_per_iteration)
        draft_length = DraftLength(options.max_gamma, options.adaptive)
        loader = ThreadLoader(PreparingStore(store, kinds),
                              STALL_SEC + options.storage.latency_ms / 1e3)
        residency = Residency(kinds, loader, options.settings.cache_capacity, clock,
                              {spec.id: draft_bytes(bundle, spec, dtype, device)
                               for spec in bundle.drafting})
        controller = Controller(engine, tokenizer, residency, policy, draft_length,
                                options.settings, stop_ids_of(directory, tokenizer))
        runtime = cls(bundle, options, target, tokenizer, loader, controller)
        try:
            tell('warming up', 0.9)
            runtime.warm_up()
            tell('ready', 1.0)
        except BaseException:
            runtime.close()
            raise
        return runtime

    @property
    def architecture(self) -> str:
        """Family of the target, such as llama."""
        return read_config(self.bundle.target_path).get('model_type', '')

    def prepare(self, request: GenerationRequest, session: str = '') -> PreparedRequest:
        """Check and tokenise a request of ``session``; raises InvalidRequestError."""
        return replace(prepare(request, self.tokenizer, self.options.context,
                               self.controller.clock(), self.options.kv.evicts), session=session)

    def give_back(self) -> None:
        """Return memory that nothing uses at present to the system; any thread."""
        self._loader.give_back()
        allocator.trim()

    def close(self) -> None:
        """End the loader thread and let go of all weights."""
        self._loader.close()
        if self.target is not None:
            self.target.close()
        self.controller = self.target = None

    def warm_up(self) -> None:
        """Set the kernels up, and measure what each verify size costs beside the others."""
        engine, draft_length = self.controller.engine, self.controller.draft_length
        engine.state.restart([0] * 8)
        if not self.options.threads and self.target.device.type == 'cpu':
            engine.threads = choose_threads(
                self._description(), lambda rows: engine.trial(
                    [0] * min(rows, engine.state.reach), last_only=rows > FEW_ROWS))
        times: dict[int, list[float]] = {rows: [] for rows in
                                         range(1, engine.max_gamma + engine.max_branches + 2)}
        for _ in range(_WARM_UP_ROUNDS):
            for rows, measured in times.items():
                start = engine.clock()
                engine.trial([0] * rows)
                measured.append(engine.clock() - start)
        for rows, measured in times.items():
            # The first round also paid for kernel set-up.
            draft_length.calibrate(rows, statistics.median(measured[1:]))
        engine.state.restart([0])
        engine.state.hold(0)

    def _description(self) -> str:
        """What the time of a pass depends on, beside the machine."""
        target = self.target
        return (f'{type(target).__name__} of {target.layers} layers, {target.hidden_size} wide, '
                f'{target.weight_bytes} bytes in {", ".join(target.weight_kinds)}')


def offload_of(options: RuntimeOptions) -> Offload | None:
    """Which layers of the target stay in storage, None for none."""
    if not options.layers_mib:
        return None
    return Offload(int(options.layers_mib * allocator.MIB), cache_directory(),
                   options.storage.limit)


def file_store(bundle: Bundle, device: torch.device, limits: StorageLimits) -> Store:
    """
    The bundle's weight files, read into slots on ``device`` at the pace of ``limits``.

    Drafts made for another target fail to load, with that as the reason.
    """
    files = {spec.id: (bundle.weight_file(spec), spec.sha256)
             for spec in bundle.drafts if spec.path}
    largest = max((spec.bytes for spec in bundle.drafts if spec.path), default=0)
    return limits.limit(FileStore(files, slots_for(device, largest), limits.cold,
                                  strangers(bundle)))


def stop_ids_of(directory: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """End-of-sequence ids: what the model's configurations say, and the tokenizer's own."""
    ids = set()
    # A chat model's end of turn is often in generation_config.json alone.
    names = [name for name in ('config.json', 'generation_config.json')
             if name == 'config.json' or (directory / name).is_file()]
    for name in names:
        raw = read_config(directory, name).get('eos_token_id')
        ids.update(raw if isinstance(raw, list) else [] if raw is None else [raw])
    if tokenizer.eos_id is not None:
        ids.add(tokenizer.eos_id)
    return frozenset(ids)
