# SPDX-License-Identifier: Apache-2.0
"""``memspec distill``: make shared-layer drafts from prompts, as those in models/ were made."""

from __future__ import annotations

import argparse
from collections import defaultdict
import json
from pathlib import Path

from ..models.errors import InvalidRequestError, MemSpecError


def register(commands) -> None:
    parser = commands.add_parser(
        'distill', help="train shared-layer drafts on the target's own outputs")
    parser.add_argument('--bundle', default='', metavar='DIR',
                        help='whose target to distil (default: the installed bundle)')
    parser.add_argument('--prompts', action='append', default=[], metavar='FILE', required=True,
                        help='JSON lines with "prompt" and "domain" (may be given several times)')
    parser.add_argument('--eval-prompts', action='append', default=[], metavar='FILE',
                        help='held-out prompts for the acceptance figures')
    parser.add_argument('--outputs', action='append', default=[], metavar='FILE',
                        help='stores of target outputs made before')
    parser.add_argument('--work', required=True, metavar='DIR',
                        help='where outputs and drafts are kept; run again to resume')
    parser.add_argument('--domain', action='append', default=[], metavar='NAME',
                        help='drafts to make, "general" first (default: general and every domain)')
    parser.add_argument('--prompts-per-domain', type=int, default=0, metavar='COUNT',
                        help='0: all')
    parser.add_argument('--reuse-only', action='store_true',
                        help='train on the outputs there are, generate none for --prompts')
    parser.add_argument('--prompt-tokens', type=int, default=256, metavar='TOKENS',
                        help='skip longer prompts (default: %(default)s)')
    parser.add_argument('--output-tokens', type=int, default=160, metavar='TOKENS')
    parser.add_argument('--vocabulary', type=int, default=8192, metavar='SIZE')
    parser.add_argument('--depth', type=int, default=2, help='target layers reused')
    parser.add_argument('--layers', type=int, default=1, help='own layers')
    parser.add_argument('--epochs', type=float, default=3.0, help='of the general draft')
    parser.add_argument('--domain-epochs', type=float, default=3.0,
                        help='of each domain draft, continued from the general one')
    parser.add_argument('--learning-rate', type=float, default=2e-3)
    parser.add_argument('--batch', type=int, default=16, metavar='SEQUENCES')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--threads', type=int, default=0)
    parser.add_argument('--device', default='auto')
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import torch
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    work = Path(arguments.work)
    bundle, target, encode, stop_ids = _open_target(arguments)
    records = _outputs(arguments, target, encode, stop_ids, arguments.prompts,
                       work / 'outputs.jsonl', arguments.prompts_per_domain)
    held_out = _outputs(arguments, target, encode, stop_ids, arguments.eval_prompts,
                        work / 'eval_outputs.jsonl', 24)
    vocabulary = _vocabulary(arguments, work, records, stop_ids)
    domains = arguments.domain or ['general', *sorted({r.domain for r in records} - {'general'})]
    figures = {}
    for domain in domains:
        figures[domain] = _make_draft(arguments, work, target, vocabulary, records, held_out,
                                      domain)
    print('\nagreement with the target on held-out outputs (rows: draft, columns: domain)')
    for domain, row in figures.items():
        print(f'{domain:10} ' + '  '.join(f'{name} {value:.3f}' for name, value in row.items()))
    manifest = _write_bundle(arguments, work, bundle, figures)
    print(f'\n{work} is a bundle now ({manifest.name} written)')
    return 0


def _write_bundle(arguments, work: Path, bundle, figures) -> Path:
    from ..training.bundle_writer import shared_layers_entry, write_bundle
    entries = [shared_layers_entry(
        work / f'{domain}.safetensors', domain,
        {'depth': arguments.depth, 'layers': arguments.layers}, acceptance,
        bundle.target.licence, f"distilled from the target's own outputs by memspec distill, "
        f'seed {arguments.seed}; see the metadata of the file')
        for domain, acceptance in figures.items()]
    return write_bundle(work, bundle, work / 'head.safetensors', entries)


def _open_target(arguments):
    import torch

    from ..models.bundle import load_bundle
    from ..models.llama import Llama, LlamaConfig
    from ..models.target import open_checkpoint, read_config
    from ..models.target_files import locate_target
    from ..models.tokenizer import Tokenizer
    from ..runtime.runtime import choose_device, stop_ids_of
    bundle = load_bundle(arguments.bundle or None, verify=False)
    directory = locate_target(bundle)
    tokenizer = Tokenizer(bundle.tokenizer_path)
    config = LlamaConfig.from_hf(read_config(directory))
    with open_checkpoint(directory) as weights:
        target = Llama.from_state(config, weights, torch.bfloat16,
                                  choose_device(arguments.device),
                                  arguments.prompt_tokens + arguments.output_tokens + 1)

    def encode(prompt: str) -> list[int]:
        return tokenizer.encode_chat([{'role': 'user', 'content': prompt}])

    return bundle, target, encode, stop_ids_of(directory, tokenizer)


def _outputs(arguments, target, encode, stop_ids, files, path: Path, per_domain: int):
    """Records for the prompts of ``files``: from the stores given, the rest is generated."""
    from rich.progress import track

    from ..training.outputs import content_key, fill_store, OutputStore, read_prompts
    known = {record.key: record for file in (*arguments.outputs, path)
             for record in OutputStore(Path(file))}
    wanted, counts = {}, defaultdict(int)
    for file in files:
        prompts = list(read_prompts(Path(file)))
        for domain, prompt in track(prompts, f'tokenising {Path(file).name}', transient=True):
            if per_domain and counts[domain] >= per_domain:
                continue
            ids = encode(prompt[:4 * arguments.prompt_tokens])
            if len(ids) <= arguments.prompt_tokens:
                wanted[content_key(ids)] = (domain, ids)
                counts[domain] += 1
    missing = [item for key, item in wanted.items() if key not in known]
    if arguments.reuse_only and files is arguments.prompts:
        missing = []
    if missing:
        print(f'generating {len(missing)} outputs into {path} (interrupt and rerun at will)')
        fill_store(OutputStore(path), target, missing, arguments.output_tokens, stop_ids, 64,
                   lambda done, total: print(f'  {done} of {total}', flush=True))
    records = {**known, **{record.key: record for record in OutputStore(path)}}
    # Stores given by hand are used whole, also where their prompts are not in the files.
    extra = list(known.values()) if files is arguments.prompts else []
    chosen = {record.key: record for record in extra}
    chosen.update({key: records[key] for key in wanted if key in records})
    return [chosen[key] for key in sorted(chosen)]


def _vocabulary(arguments, work: Path, records, stop_ids) -> list[int]:
    from safetensors.torch import save_file
    import torch

    from ..models.weights import read_tensors
    from ..training.distill import choose_vocabulary, coverage
    path = work / 'head.safetensors'
    if path.exists():
        return read_tensors(path)['token_ids'].tolist()
    vocabulary = choose_vocabulary(records, arguments.vocabulary, stop_ids)
    work.mkdir(parents=True, exist_ok=True)
    save_file({'token_ids': torch.tensor(vocabulary, dtype=torch.int32)}, path)
    print(f'trimmed vocabulary of {len(vocabulary)} tokens covers '
          f'{coverage(records, vocabulary):.1%} of the outputs')
    return vocabulary


def _make_draft(arguments, work: Path, target, vocabulary, records, held_out,
                domain: str) -> dict[str, float]:
    from ..models.weights import read_metadata, read_tensors
    from ..training.distill import (
        agreement,
        distill,
        DistillOptions,
        Examples,
        save_draft,
        Throttle,
        Top,
    )
    path = work / f'{domain}.safetensors'
    if path.exists():
        print(f'{path} is there already')
        return json.loads(read_metadata(path).get('agreement', '{}'))
    general = work / 'general.safetensors'
    start, epochs, mine = None, arguments.epochs, records
    if domain != 'general':
        if not general.exists():
            raise MemSpecError('a domain draft continues from the general one: make that first')
        start, epochs = read_tensors(general), arguments.domain_epochs
        mine = [record for record in records if record.domain == domain]
    if not mine:
        raise InvalidRequestError(f'no outputs of domain {domain!r}')
    options = DistillOptions(arguments.depth, arguments.layers, epochs, arguments.batch,
                             arguments.learning_rate / (1 if start is None else 2),
                             seed=arguments.seed)
    examples = Examples(target, mine, arguments.depth, vocabulary)
    held = Examples(target, held_out, arguments.depth, vocabulary)
    print(f'{domain}: {len(mine)} outputs, {examples.output_tokens} tokens', flush=True)
    may_report = Throttle(20.0)

    def report(step: int, steps: int, loss: float, right: float) -> None:
        if may_report() or step == steps:
            print(f'  {domain} step {step} of {steps}: loss {loss:.3f}, agreement {right:.3f}',
                  flush=True)

    def checkpoint(top: Top, step: int) -> None:
        if held_out:
            scores = agreement(target, top, held, vocabulary)
            print(f'  {domain} step {step}, held out: ' + ', '.join(
                f'{name} {value:.3f}' for name, value in scores.items()), flush=True)

    top = distill(target, examples, vocabulary, options, start, report, checkpoint)
    scores = agreement(target, top, held, vocabulary) if held_out else {}
    save_draft(path, top.export(), {
        'kind': 'shared_layers', 'domain': domain, 'depth': str(arguments.depth),
        'layers': str(arguments.layers), 'epochs': str(epochs), 'seed': str(arguments.seed),
        'learning_rate': str(options.learning_rate), 'batch': str(arguments.batch),
        'training_tokens': str(examples.output_tokens),
        'continued_from': 'general' if start is not None else '',
        'agreement': json.dumps({name: round(value, 4) for name, value in scores.items()})})
    return scores
