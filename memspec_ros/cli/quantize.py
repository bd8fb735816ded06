# SPDX-License-Identifier: Apache-2.0
"""``memspec quantize``: a target to a GPTQ checkpoint that is a bundle as well."""

from __future__ import annotations

import argparse
from dataclasses import asdict
import json
from pathlib import Path
import shutil

from ..models.errors import BundleError, InvalidRequestError, UnsupportedModelError
from .options import add_json_option, write_json

# What a directory needs besides weights and config.json.
_COMPANIONS = ('generation_config.json', 'tokenizer*', 'special_tokens_map.json', 'vocab.json',
               'merges.txt', 'added_tokens.json', 'chat_template*')


def register(commands) -> None:
    parser = commands.add_parser(
        'quantize', help='make a GPTQ checkpoint of a target',
        description='Rounds the matrices of a Llama or Qwen2 target to a few bits by GPTQ, layer '
                    'by layer, and says how far the result is from the original. --out becomes a '
                    'Hugging Face directory and a bundle without drafts.')
    parser.add_argument('--target', default='', metavar='DIR',
                        help='a Hugging Face directory, or a bundle (default: the installed one)')
    parser.add_argument('--out', required=True, metavar='DIR', help='a directory to be made')
    parser.add_argument('--prompts', required=True, metavar='FILE',
                        help='JSON lines with "prompt" and "domain" to calibrate on: like those '
                             'it will get')
    parser.add_argument('--eval-prompts', metavar='FILE',
                        help='prompts to judge by (default: every eighth of --prompts)')
    parser.add_argument('--bits', type=int, default=4, choices=(2, 4, 8))
    parser.add_argument('--group-size', type=int, metavar='INPUTS',
                        help='inputs that share a scale, -1: all (default: 128 where that divides '
                             'the widths of the model, else 64 or 32)')
    parser.add_argument('--act-order', action='store_true',
                        help='round the inputs that matter most first')
    parser.add_argument('--symmetric', action='store_true',
                        help='levels on both sides of zero alike, as some kernels want it')
    parser.add_argument('--damping', type=float, default=0.01)
    parser.add_argument('--max-prompts', type=int, default=128, metavar='COUNT',
                        help='most prompts to calibrate on (default: %(default)s)')
    parser.add_argument('--prompt-tokens', type=int, default=512, metavar='TOKENS',
                        help='where longer prompts are cut off (default: %(default)s)')
    parser.add_argument('--device', default='auto', help='auto, cpu, cuda or cuda:N')
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    from ..models.llama_config import LlamaConfig
    from ..models.target import open_checkpoint, quantization_of, read_config
    from ..models.tokenizer import Tokenizer
    from ..runtime.runtime import choose_device
    from ..training.gptq import Scheme
    from ..training.quantise import fitting_group, quantise_model
    _check(arguments)
    device = choose_device(arguments.device)
    source = _Source(arguments.target)
    raw = read_config(source.directory)
    if quantization_of(source.directory, raw) is not None:
        raise UnsupportedModelError(f'{source.directory} is quantised already; '
                                    'give the unquantised model')
    config = LlamaConfig.from_hf(raw)
    scheme = Scheme(arguments.bits, fitting_group(config, arguments.group_size),
                    arguments.act_order, arguments.symmetric, arguments.damping)
    calibration, held_out = _texts(arguments, Tokenizer(source.tokenizer),
                                   config.max_positions)
    out = Path(arguments.out)
    if out.exists() and any(out.iterdir()):
        raise InvalidRequestError(f'--out {out} is there already and not empty; '
                                  'name a new directory')
    out.mkdir(parents=True, exist_ok=True)
    # On standard error: the JSON may go to standard output.
    with Progress(TextColumn('layers'), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                  console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task('')
        with open_checkpoint(source.directory) as weights:
            distance = quantise_model(
                config, weights, scheme, calibration, held_out, out, device,
                lambda done, total: bar.update(task, completed=done, total=total))
    _write_configs(out, raw, scheme)
    for pattern in _COMPANIONS:
        for directory in (source.directory, source.tokenizer):
            for file in directory.glob(pattern):
                shutil.copyfile(file, out / file.name)
    source.write_manifest(out, scheme)
    if arguments.json != '-':
        print(f'{out}: {scheme.bits} bits, groups of {scheme.group_size}, '
              f'{sum(f.stat().st_size for f in out.glob("*.safetensors")) / 1e6:.1f} MB\n'
              f'held-out perplexity {distance.perplexity:.3f} before, '
              f'{distance.perplexity_quantised:.3f} after; same greedy token at '
              f'{distance.greedy_agreement:.1%} of {distance.tokens} positions\n'
              f'Try it: memspec generate --bundle {out} --prompt "…". Drafts have to be distilled '
              'from it anew.')
    if arguments.json:
        write_json(arguments.json, {'scheme': asdict(scheme), **asdict(distance)})
    return 0


def _check(arguments: argparse.Namespace) -> None:
    for name, low in (('max_prompts', 1), ('prompt_tokens', 2)):
        if getattr(arguments, name) < low:
            raise InvalidRequestError(f'--{name.replace("_", "-")} is {getattr(arguments, name)}, '
                                      f'expected {low} or more')
    if not 0 < arguments.damping < 1:
        raise InvalidRequestError(f'--damping is {arguments.damping}, expected 0 to 1')


class _Source:
    """The unquantised target: a bundle's, or a bare directory."""

    def __init__(self, name: str):
        from ..models.bundle import load_bundle, MANIFEST_NAME
        from ..models.target_files import locate_target
        path = Path(name).expanduser()
        if name and not (path / MANIFEST_NAME).is_file() and path.name != MANIFEST_NAME:
            if not (path / 'config.json').is_file():
                raise BundleError(f'--target {path}: neither a bundle ({MANIFEST_NAME}) nor a '
                                  'Hugging Face directory (config.json)')
            self.directory = self.tokenizer = path
            self.name, self.licence, self.origin = path.resolve().name, 'unknown', str(path)
            return
        bundle = load_bundle(name or None, verify=False)
        self.directory = locate_target(bundle)
        self.tokenizer = bundle.tokenizer_path
        self.name, self.licence = bundle.target.name, bundle.target.licence
        self.origin = bundle.target.provenance

    def write_manifest(self, out: Path, scheme) -> None:
        """Make ``out`` a bundle of the quantised target, without drafts of its own."""
        from ..training.bundle_writer import write_bare_bundle
        write_bare_bundle(out, {
            'name': f'{self.name}-GPTQ-{scheme.bits}bit', 'licence': self.licence,
            'provenance': f'memspec quantize, from: {self.origin}', 'path': '.'})


def _texts(arguments: argparse.Namespace, tokenizer, positions: int):
    """Token ids to calibrate on, and to judge by."""
    from ..training.outputs import read_prompts
    longest = min(arguments.prompt_tokens, positions)

    def encoded(file: str) -> list[list[int]]:
        texts = (tokenizer.encode_chat([{'role': 'user', 'content': prompt[:8 * longest]}])
                 for _, prompt in read_prompts(Path(file)))
        return [ids[:longest] for ids in texts if len(ids) > 1]

    texts = encoded(arguments.prompts)
    if arguments.eval_prompts:
        calibration, held_out = texts, encoded(arguments.eval_prompts)
    else:
        held_out = texts[7::8]
        calibration = [ids for place, ids in enumerate(texts) if place % 8 != 7]
    for option, found in (('--prompts', calibration), ('--eval-prompts', held_out)):
        if not found:
            raise InvalidRequestError(f'{option}: no prompt is there; at least 8 in --prompts, '
                                      'or one in each file, are needed')
    # Evenly from the whole file: domains often stand one after another.
    return (_spread(calibration, arguments.max_prompts),
            _spread(held_out, max(1, arguments.max_prompts // 4)))


def _spread(texts: list, count: int) -> list:
    return [texts[place * len(texts) // count] for place in range(count)] if (
        len(texts) > count) else texts


def _write_configs(out: Path, raw: dict, scheme) -> None:
    settings = {
        'quant_method': 'gptq', 'bits': scheme.bits, 'group_size': scheme.group_size,
        'desc_act': scheme.act_order, 'sym': scheme.symmetric, 'checkpoint_format': 'gptq',
        'damp_percent': scheme.damping, 'static_groups': False, 'true_sequential': False,
        'lm_head': False, 'pack_dtype': 'int32'}
    (out / 'config.json').write_text(
        json.dumps({**raw, 'quantization_config': settings}, indent=2) + '\n')
    # Where auto-gptq looks for it.
    (out / 'quantize_config.json').write_text(json.dumps(settings, indent=2) + '\n')
