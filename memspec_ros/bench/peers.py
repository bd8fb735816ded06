# SPDX-License-Identifier: Apache-2.0
"""
Other programs on the same weights: transformers in three ways, llama.cpp in two.

All answer the same prompts in one process, in turn (``race``). What is not
installed, or cannot run these weights, is left out and named with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
import statistics
import tempfile

from ..models.bundle import Bundle, DraftSpec
from ..models.errors import InvalidRequestError, MemSpecError
from ..models.target_files import cache_directory
from ..runtime.requests import GenerationRequest
from ..runtime.runtime import Runtime, RuntimeOptions
from .floor import format_glance, glance
from .gguf_export import PRECISIONS, write_gguf
from .llama_cpp_peer import LlamaCppPeer
from .race import answer, choose_prompts, conditions, geometric_mean, race, Runner, Tally
from .transformers_peer import TransformersPeer

PEERS = ('transformers_greedy', 'transformers_assisted', 'transformers_prompt_lookup',
         'llama_cpp', 'llama_cpp_prompt_lookup')
# Tokens a prompt lookup proposes: as the documentation of transformers, and of llama-cpp-python
# (for a GPU, and for a CPU alone), advises.
_LOOKUP_TOKENS = 10
_LLAMA_LOOKUP_TOKENS = {'cuda': 10, 'cpu': 2}
_TRY_TOKENS = 8


class _Skip(Exception):  # noqa: N818 (nothing failed)
    """A peer that does not take part, and why."""


def measure(prompts: Path, options: RuntimeOptions, bundle: str, per_domain: int,
            max_new_tokens: int, assistant: str = '', assistant_tokens: int = 0,
            gguf: str = '', report: Callable[[str], None] = print) -> dict:
    """
    Race this package against its peers.

    assistant: directory of a causal LM for assisted generation, '' for the
    bundle's best ``causal_lm`` draft. assistant_tokens: tokens it drafts, 0 for
    as many as transformers chooses. gguf: a file for llama.cpp, '' for the
    target's own weights, written to one. Returns ``ratios`` (ours over theirs,
    None where a peer did not run), ``skipped`` (why) and what was run; see
    docs/benchmarks.md. Raises MemSpecError.
    """
    texts = choose_prompts(prompts, per_domain)
    with ExitStack() as stack:
        runtime = Runtime.open(bundle or None, options)
        stack.callback(runtime.close)
        entry = _Entry(runtime, stack, texts, max_new_tokens)
        entry.transformers(assistant, assistant_tokens)
        entry.llama_cpp(Path(gguf) if gguf else None)
        report('; '.join(['running: ' + ', '.join(entry.runners),
                          *(f'without {name}: {why}' for name, why in entry.skipped.items())]))
        tallies = race(
            {'memspec': partial(answer, runtime, speculate=True),
             'plain': partial(answer, runtime, speculate=False), **entry.runners},
            texts, max_new_tokens, report)
        floor = glance(runtime.controller.engine)
        known = conditions(runtime.target, prompts)
    domains = {domain: {name: tally.speed(domain) for name, tally in tallies.items()}
               for domain in tallies['memspec'].answers}
    return {
        'ratios': {name: _ratio(domains, name) if name in tallies else None for name in PEERS},
        'ratio_plain': _ratio(domains, 'plain'), 'skipped': entry.skipped,
        'tokens_per_sec': domains,
        'tokens': {name: sum(len(a.ids) for a in tally.all()) for name, tally in tallies.items()},
        'outputs_differing_from_memspec': _differing(tallies),
        'weights': entry.weights, 'assistant': entry.assistant, 'floor': floor,
        'prompts': len(texts), 'max_new_tokens': max_new_tokens,
        'max_draft_tokens': options.max_gamma, 'cache_capacity': options.settings.cache_capacity,
        'transformers': version('transformers'), 'llama_cpp_python': _llama_cpp_version(),
        **known}


def _ratio(domains: dict[str, dict[str, float]], name: str) -> float:
    return geometric_mean(speeds['memspec'] / speeds[name] for speeds in domains.values())


def _differing(tallies: dict[str, Tally]) -> dict[str, int]:
    return {name: tally.differing(tallies['memspec']) for name, tally in tallies.items()
            if name != 'memspec'}


def _llama_cpp_version() -> str | None:
    try:
        return version('llama-cpp-python')
    except PackageNotFoundError:
        return None


class _Entry:
    """
    Who takes part.

    runners: those who do. skipped: peer -> why not. weights: peer -> what its
    weights are. assistant: the model that drafts in assisted generation.
    """

    def __init__(self, runtime: Runtime, stack: ExitStack, texts: list[tuple[str, str]],
                 limit: int):
        self.runners: dict[str, Runner] = {}
        self.skipped: dict[str, str] = {}
        self.weights = {'memspec': str(runtime.target.dtype).removeprefix('torch.')}
        self.assistant = ''
        self._runtime = runtime
        self._stack = stack
        self._texts = texts
        self._limit = limit

    def transformers(self, assistant: str, assistant_tokens: int) -> None:
        """Enter the three ways of transformers."""
        peer = TransformersPeer(self._runtime)
        self.weights['transformers'] = self.weights['memspec']
        self._try('transformers_greedy', lambda: peer.answer)
        self._try('transformers_prompt_lookup', lambda: partial(
            peer.answer, prompt_lookup_num_tokens=_LOOKUP_TOKENS))
        self._try('transformers_assisted', lambda: partial(
            peer.answer, assistant_model=self._assistant(peer, assistant, assistant_tokens)))

    def _assistant(self, peer: TransformersPeer, directory: str, tokens: int):
        if not directory:
            bundle = self._runtime.bundle
            draft = best_causal_lm(bundle)
            if draft is None:
                raise _Skip('the bundle has no causal_lm draft: make one with memspec distill '
                            '--kind causal_lm, or name a model with --assistant')
            directory = str(bundle.directory_of(draft))
        elif not (Path(directory) / 'config.json').is_file():
            raise InvalidRequestError(f'--assistant {directory}: no config.json there; expected '
                                      'the directory of a causal language model')
        try:
            model = peer.load(Path(directory))
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise InvalidRequestError(f'--assistant {directory}: {error}') from error
        if tokens:
            model.generation_config.num_assistant_tokens = tokens
            # It would stop earlier where it is unsure.
            model.generation_config.assistant_confidence_threshold = 0.0
        self.assistant = directory
        return model

    def llama_cpp(self, file: Path | None) -> None:
        """Enter llama.cpp on ``file``, or on the target's own weights."""
        if file is not None and not file.is_file():
            raise InvalidRequestError(f'--gguf {file}: no such file')
        try:
            import llama_cpp  # noqa: F401
            file = file or self._export()
        except ImportError as error:
            why = f"{error}; pip install llama-cpp-python, or the package's extra 'peers'"
        except (MemSpecError, OSError, RuntimeError) as error:
            why = f'{type(error).__name__}: {error}'
        else:
            self.weights.setdefault('llama_cpp', f'those of {file.name}')
            tokens = _LLAMA_LOOKUP_TOKENS[self._runtime.target.device.type]
            self._try('llama_cpp', lambda: self._llama_cpp(file, 0))
            self._try('llama_cpp_prompt_lookup', lambda: self._llama_cpp(file, tokens))
            return
        self.skipped.update({name: why for name in PEERS if name.startswith('llama_cpp')})

    def _export(self) -> Path:
        target = self._runtime.target
        cache_directory().mkdir(parents=True, exist_ok=True)
        folder = self._stack.enter_context(
            tempfile.TemporaryDirectory(prefix='gguf-', dir=cache_directory()))
        file = Path(folder) / 'target.gguf'
        write_gguf(self._runtime.bundle.target_path, file, target.dtype)
        self.weights['llama_cpp'] = f"{PRECISIONS[target.dtype]}, the target's own"
        return file

    def _llama_cpp(self, file: Path, lookup_tokens: int) -> Runner:
        prompts = [self._runtime.prepare(GenerationRequest(text, max_new_tokens=self._limit))
                   for _, text in self._texts]
        positions = max(len(prompt.prompt_ids) for prompt in prompts) + self._limit
        # A few more for what it drafts.
        peer = LlamaCppPeer(self._runtime, file, positions + 16, lookup_tokens)
        self._stack.callback(peer.close)
        return peer.answer

    def _try(self, name: str, make: Callable[[], Runner]) -> None:
        """Enter a peer if it can answer at all."""
        try:
            runner = make()
            runner(self._texts[0][1], min(_TRY_TOKENS, self._limit))
        except InvalidRequestError:
            raise
        except _Skip as reason:
            self.skipped[name] = str(reason)
        except Exception as error:  # noqa: BLE001 (another program's, of any kind)
            self.skipped[name] = f'{type(error).__name__}: {error}'
        else:
            self.runners[name] = runner


def best_causal_lm(bundle: Bundle) -> DraftSpec | None:
    """The ``causal_lm`` draft whose acceptance, over all domains, is best; None without any."""
    drafts = [spec for spec in bundle.drafts if spec.kind == 'causal_lm']
    return max(drafts, default=None, key=lambda spec: (
        statistics.fmean(spec.acceptance.values()) if spec.acceptance else 0.0))


def format_table(result: dict) -> str:
    """The result as text."""
    first = next(iter(result['tokens_per_sec'].values()))
    width = max(map(len, first))
    lines = [f'{"":{width}} ' + ''.join(f'{domain:>10}' for domain in result['tokens_per_sec'])
             + f'{"ratio":>8}{"differ":>8}   (tokens/s, prefill included)']
    for name in first:
        ratio = {**result['ratios'], 'plain': result['ratio_plain']}.get(name)
        lines.append(f'{name:{width}} '
                     + ''.join(f'{speeds[name]:10.1f}'
                               for speeds in result['tokens_per_sec'].values())
                     + ('' if ratio is None else
                        f'{ratio:8.2f}{result["outputs_differing_from_memspec"][name]:8}'))
    lines += [f'without {name}: {why}' for name, why in result['skipped'].items()]
    lines.append('weights: ' + '; '.join(f'{name} {what}'
                                         for name, what in result['weights'].items()))
    lines.append(format_glance(result['floor']))
    return '\n'.join(lines)
