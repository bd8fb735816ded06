# SPDX-License-Identifier: Apache-2.0
"""``memspec distill``: make drafts from prompts, as those in models/ were made."""

from __future__ import annotations

import argparse
from collections import defaultdict
import json
from pathlib import Path
import time

from ..models.errors import InvalidRequestError, MemSpecError

BASE = 'base'
_STATE = '{}.state'


def register(commands) -> None:
    parser = commands.add_parser(
        'distill', help="train drafts on the target's own outputs",
        description='Generates outputs of the target for the prompts, has the target say what '
                    'it expects at each of their positions, trains a base draft on the general '
                    'domain and continues it into every domain. All of it is kept in --work: '
                    'what an interrupted run has made is not made again.')
    parser.add_argument('--bundle', default='', metavar='DIR',
                        help='whose target to distil (default: the installed bundle)')
    parser.add_argument('--prompts', action='append', default=[], metavar='FILE', required=True,
                        help='JSON lines with "prompt" and "domain" (may be given several times)')
    parser.add_argument('--eval-prompts', action='append', default=[], metavar='FILE',
                        help='held-out prompts for the acceptance figures')
    parser.add_argument('--eval-per-domain', type=int, default=24, metavar='COUNT')
    parser.add_argument('--outputs', action='append', default=[], metavar='FILE',
                        help='stores of target outputs made before')
    parser.add_argument('--work', required=True, metavar='DIR',
                        help='where outputs, lessons and drafts are kept')
    parser.add_argument('--resume', action='store_true',
                        help='go on with a training that was interrupted; without it, such a '
                             'training begins anew (outputs and lessons are always kept)')
    parser.add_argument('--domain', action='append', default=[], metavar='NAME',
                        help='drafts to make (default: every domain there are outputs of)')
    data = parser.add_argument_group('data')
    data.add_argument('--prompts-per-domain', type=int, default=0, metavar='COUNT', help='0: all')
    data.add_argument('--tokens-per-domain', type=int, default=0, metavar='TOKENS',
                      help='output tokens each draft learns from, beside those of the base '
                           '(default: 0, all)')
    data.add_argument('--samples', type=int, default=1, metavar='COUNT',
                      help='outputs a prompt of the general domain: the first is greedy, further '
                           'ones are sampled (default: %(default)s)')
    data.add_argument('--temperature', type=float, default=0.7,
                      help='of sampled outputs (default: %(default)s)')
    data.add_argument('--reuse-only', action='store_true',
                      help='train on the outputs there are, generate none for --prompts')
    data.add_argument('--prompt-tokens', type=int, default=256, metavar='TOKENS',
                      help='skip longer prompts (default: %(default)s)')
    data.add_argument('--output-tokens', type=int, default=160, metavar='TOKENS')
    shape = parser.add_argument_group('draft')
    shape.add_argument('--kind', default='feature',
                       choices=['feature', 'shared_layers', 'causal_lm'])
    shape.add_argument('--vocabulary', type=int, default=8192, metavar='SIZE',
                       help='tokens of the head all drafts share (default: %(default)s)')
    shape.add_argument('--depth', type=int, default=2, help='target layers reused')
    shape.add_argument('--layers', type=int, default=1, help='own layers')
    shape.add_argument('--features', default='', metavar='L,L,…',
                       help='after which target layers a feature draft reads hidden states '
                            '(default: a third, two thirds, all)')
    shape.add_argument('--width', type=int, default=192, help='of a causal_lm draft')
    training = parser.add_argument_group('training')
    training.add_argument('--epochs', type=float, default=4.0, help='of the base draft')
    training.add_argument('--domain-epochs', type=float, default=4.0,
                          help='of each draft, continued from the base')
    training.add_argument('--learning-rate', type=float, default=2e-3)
    training.add_argument('--ahead', type=int, default=2,
                          help='steps a feature draft drafts in training')
    training.add_argument('--batch', type=int, default=16, metavar='SEQUENCES')
    training.add_argument('--checkpoint-steps', type=int, default=50, metavar='STEPS')
    training.add_argument('--seed', type=int, default=0)
    training.add_argument('--threads', type=int, default=0)
    training.add_argument('--device', default='auto')
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import torch
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    _check(arguments)
    job = _Job(arguments)
    records = job.outputs(arguments.prompts, 'outputs.jsonl', arguments.prompts_per_domain,
                          training=True)
    held_out = job.outputs(arguments.eval_prompts, 'eval_outputs.jsonl',
                           arguments.eval_per_domain, training=False)
    vocabulary = job.vocabulary(records)
    # The general draft first: it is what a request without a telling word begins with.
    domains = arguments.domain or sorted({record.domain for record in records},
                                         key=lambda domain: (domain != 'general', domain))
    plan = job.plan(records, domains)
    used = {record.key: record for part in plan.values() for record in part}
    job.announce(used.values(), held_out, plan)
    job.think([*used.values(), *held_out])
    start = job.draft(BASE, plan.pop(BASE), held_out, vocabulary, None)
    figures = {domain: job.draft(domain, part, held_out, vocabulary, start)
               for domain, part in plan.items()}
    _print_agreement(figures, job.work)
    manifest = job.write_bundle(figures, held_out)
    print(f'\n{job.work} is a bundle now ({manifest.name} written)')
    return 0


def _check(arguments: argparse.Namespace) -> None:
    least = {'vocabulary': 2, 'output_tokens': 1, 'prompt_tokens': 2, 'batch': 1, 'samples': 1,
             'checkpoint_steps': 1, 'ahead': 1, 'prompts_per_domain': 0, 'tokens_per_domain': 0,
             'eval_per_domain': 1, 'layers': 1, 'width': 8}
    for name, value in least.items():
        if getattr(arguments, name) < value:
            raise InvalidRequestError(
                f'--{name.replace("_", "-")} is {getattr(arguments, name)}, expected {value} '
                'or more')
    for name in ('epochs', 'domain_epochs', 'learning_rate', 'temperature'):
        if not 0 < getattr(arguments, name) < 1e6:
            raise InvalidRequestError(
                f'--{name.replace("_", "-")} is {getattr(arguments, name)}, expected more than 0')


class _Job:
    """The work directory, the target, and what is made of them step by step."""

    def __init__(self, arguments: argparse.Namespace):
        import torch

        from ..models.bundle import load_bundle
        from ..models.llama import Llama, LlamaConfig
        from ..models.target import open_checkpoint, read_config
        from ..models.target_files import locate_target
        from ..models.tokenizer import Tokenizer
        from ..runtime.runtime import choose_device, stop_ids_of
        from ..training.teacher import fingerprint, TeacherStore
        self.arguments = arguments
        self.work = Path(arguments.work)
        self.bundle = load_bundle(arguments.bundle or None, verify=False)
        directory = locate_target(self.bundle)
        config = LlamaConfig.from_hf(read_config(directory))
        self.shape = self._shape(config)
        tokenizer = Tokenizer(self.bundle.tokenizer_path)
        self.stop_ids = stop_ids_of(directory, tokenizer)
        self._encode = lambda text: tokenizer.encode_chat([{'role': 'user', 'content': text}])
        device = choose_device(arguments.device)
        context = arguments.prompt_tokens + arguments.output_tokens + 1
        with open_checkpoint(directory) as weights:
            self.target = Llama.from_state(config, weights, torch.bfloat16, device, context)
        name = fingerprint(self.target)
        self._claim(name)
        self.teacher = TeacherStore(self.work / 'lessons', name, self.shape.depths)

    def _shape(self, config):
        from ..training.tops import draft_shape
        arguments = self.arguments
        features = ()
        if arguments.features:
            try:
                features = tuple(sorted({int(part) for part in arguments.features.split(',')}))
            except ValueError as error:
                raise InvalidRequestError(f'--features is {arguments.features!r}, expected '
                                          'numbers of layers, as 10,20,30') from error
        elif arguments.kind == 'feature':
            third = max(1, config.layers // 3)
            features = tuple(sorted({third, min(2 * third, config.layers), config.layers}))
        shape = draft_shape(arguments.kind, depth=arguments.depth, layers=arguments.layers,
                            features=features, width=arguments.width)
        if problem := shape.problem(config.layers):
            raise InvalidRequestError(f'--kind {arguments.kind}: {problem}')
        return shape

    def _claim(self, target_name: str) -> None:
        """A work directory belongs to one target: outputs of another teach the wrong thing."""
        path = self.work / 'target.json'
        if path.exists():
            if json.loads(path.read_text()).get('sha256') != target_name:
                raise MemSpecError(f'{self.work} was begun with another target; '
                                   'choose another --work')
            return
        self.work.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({'name': self.bundle.target.name, 'sha256': target_name}))

    def outputs(self, files, name: str, per_domain: int, training: bool):
        """Records for the prompts of ``files``: from the stores given, the rest is generated."""
        from rich.progress import track

        from ..training.outputs import content_key, fill_store, OutputStore, read_prompts
        arguments, path = self.arguments, self.work / name
        known = {record.key: record for file in (*arguments.outputs, path)
                 for record in OutputStore(Path(file))}
        wanted, counts = {}, defaultdict(int)
        for file in files:
            prompts = list(read_prompts(Path(file)))
            for domain, prompt in track(prompts, f'tokenising {Path(file).name}', transient=True):
                if per_domain and counts[domain] >= per_domain:
                    continue
                ids = self._encode(prompt[:4 * arguments.prompt_tokens])
                if len(ids) <= arguments.prompt_tokens:
                    wanted[content_key(ids)] = (domain, ids)
                    counts[domain] += 1
        samples = arguments.samples if training else 1
        keys = {f'{key}-{n}' if n else key: (domain, ids, n)
                for key, (domain, ids) in wanted.items()
                for n in range(samples if domain == 'general' else 1)}
        missing = {key: item for key, item in keys.items() if key not in known}
        if missing and not (training and arguments.reuse_only):
            with _bar(f'generating into {path}', len(missing)) as advance:
                for sample in range(samples):
                    fill_store(
                        OutputStore(path), self.target,
                        [(domain, ids) for domain, ids, n in missing.values() if n == sample],
                        arguments.output_tokens, self.stop_ids, 64, advance,
                        temperature=arguments.temperature if sample else 0.0,
                        sample=sample, seed=arguments.seed, teacher=self.teacher)
        records = {**known, **{record.key: record for record in OutputStore(path)}}
        # Stores given by hand are used whole, also where their prompts are not in the files.
        chosen = dict(known) if training else {}
        chosen.update({key: records[key] for key in keys if key in records})
        if training and not chosen:
            raise InvalidRequestError('no prompt is left to learn from: none was given, or all '
                                      f'have more than {arguments.prompt_tokens} tokens')
        return [chosen[key] for key in sorted(chosen)]

    def vocabulary(self, records) -> list[int]:
        import torch

        from ..models.weights import read_tensors
        from ..training.lessons import choose_vocabulary, coverage
        from ..training.teacher import write_whole
        path = self.work / 'head.safetensors'
        if path.exists():
            return read_tensors(path)['token_ids'].tolist()
        vocabulary = choose_vocabulary(records, self.arguments.vocabulary, self.stop_ids)
        write_whole(path, {'token_ids': torch.tensor(vocabulary, dtype=torch.int32)},
                    {'made': 'memspec distill'})
        print(f'trimmed vocabulary of {len(vocabulary)} tokens covers '
              f'{coverage(records, vocabulary):.1%} of the outputs')
        return vocabulary

    def plan(self, records, domains) -> dict:
        """
        Which records the base and each draft learn from.

        The base learns from the general domain (or from all, where there is
        none). Every draft then learns from as many tokens of its own domain; the
        general one from outputs that the base has not seen, where there are.
        """
        by_domain = defaultdict(list)
        for record in sorted(records, key=lambda record: ('-' in record.key, record.key)):
            by_domain[record.domain].append(record)
        limit = self.arguments.tokens_per_domain
        if 'general' not in by_domain:
            plan = {BASE: _first(sorted(records, key=lambda record: record.key), limit)}
        else:
            plan = {BASE: _first(by_domain['general'], limit)}
        for domain in domains:
            mine = by_domain[domain]
            if not mine:
                raise InvalidRequestError(f'no outputs of domain {domain!r}')
            if domain == 'general':
                seen = {record.key for record in plan[BASE]}
                mine = [record for record in mine if record.key not in seen] + [
                    record for record in mine if record.key in seen]
            plan[domain] = _first(mine, limit)
        return plan

    def announce(self, records, held_out, plan) -> None:
        """Say beforehand what it will take: measured on a few records, not guessed."""
        from ..training.teacher import positions_per_second
        config = self.target.config
        width = config.hidden_size
        missing = self.teacher.missing([*records, *held_out])
        disk = self.teacher.bytes_needed(missing, width)
        positions = {name: sum(len(r.prompt_ids) + len(r.output_ids) for r in part)
                     for name, part in plan.items() if not self.path(name).exists()}
        passes = sum(count * (self.arguments.epochs if name == BASE
                              else self.arguments.domain_epochs)
                     for name, count in positions.items())
        if not missing and not passes:
            return
        speed = positions_per_second(self.target, [*records][:4])
        todo = sum(len(r.prompt_ids) + len(r.output_ids) for r in missing)
        # A training pass runs a few layers forward and back, with a trimmed head.
        cost = (self.shape.cost(config.layers)
                * (1 + 0.6 * (self.shape.kind == 'feature') * (self.arguments.ahead - 1)))
        memory = (self.teacher.bytes_needed([*records, *held_out], width)
                  + 16 * 4 * self.shape.parameters(config))
        print(f'lessons: {todo} positions, about {_duration(todo / speed)}, '
              f'{disk / 1e9:.2f} GB of disk\n'
              f'training: {len(positions)} drafts, {passes / 1e6:.2f} million positions, about '
              f'{_duration(passes * cost / speed)}, {memory / 1e9:.2f} GB of memory', flush=True)

    def think(self, records) -> None:
        missing = self.teacher.missing(records)
        if not missing:
            return
        with _bar(f'lessons into {self.teacher.directory}', len(missing)) as advance:
            self.teacher.fill(self.target, missing, advance)

    def path(self, name: str) -> Path:
        """The file (or directory) of a draft."""
        return self.work / (name if self.shape.kind == 'causal_lm' else f'{name}.safetensors')

    def draft(self, name: str, records, held_out, vocabulary, start):
        """
        Train a draft, or take the one that is there.

        Returns its tensors for the base, its figures (one dictionary a step
        ahead) for the others.
        """
        from ..training.distill import (
            agreement,
            Distillation,
            DistillOptions,
            load_training,
            save_training,
        )
        from ..training.lessons import Lessons
        from ..training.tops import read_draft, save_draft
        arguments, path = self.arguments, self.path(name)
        if path.exists():
            print(f'{path} is there already')
            tensors, about = read_draft(path)
            return tensors if name == BASE else json.loads(about.get('agreement', '[]'))
        options = DistillOptions(
            epochs=arguments.epochs if name == BASE else arguments.domain_epochs,
            batch=arguments.batch,
            learning_rate=arguments.learning_rate / (1 if start is None else 2),
            ahead=arguments.ahead if self.shape.kind == 'feature' else 1,
            checkpoint_steps=arguments.checkpoint_steps, seed=arguments.seed)
        lessons = Lessons(self.target, [self.teacher.lesson(r) for r in records], self.shape,
                          vocabulary)
        held = Lessons(self.target, [self.teacher.lesson(r) for r in held_out], self.shape,
                       vocabulary)
        training = Distillation(self.target, lessons, vocabulary, options, start)
        state_path = self.work / _STATE.format(name)
        if arguments.resume and (state := load_training(state_path)) is not None:
            try:
                training.resume(state)
            except MemSpecError as error:
                raise MemSpecError(f'{state_path}: {error}') from error
            print(f'{name}: resumed at step {training.step} of {training.steps}')
        print(f'{name}: {len(records)} outputs, {lessons.output_tokens} tokens, '
              f'{training.steps} steps', flush=True)
        with _bar(name, training.steps, training.step) as advance:
            top = training.run(
                lambda step, steps, loss, right: advance(
                    step, steps, f'loss {loss:.3f}, agreement {right:.3f}'),
                lambda run: save_training(state_path, run.state()))
        scores = agreement(top, held, self.target.device, arguments.ahead) if held_out else []
        save_draft(path, top, {
            'kind': self.shape.kind, 'domain': name, 'options': json.dumps(self.shape.options),
            'epochs': str(options.epochs), 'steps': str(training.steps),
            'seed': str(arguments.seed), 'learning_rate': str(options.learning_rate),
            'batch': str(arguments.batch), 'training_tokens': str(lessons.output_tokens),
            'continued_from': BASE if start is not None else '',
            'agreement': json.dumps([{domain: round(value, 4) for domain, value in row.items()}
                                     for row in scores])},
            tokenizer=self.bundle.tokenizer_path)
        state_path.unlink(missing_ok=True)
        if scores:
            print(f'  {name}, held out: ' + ', '.join(
                f'{domain} {value:.3f}' for domain, value in scores[0].items()), flush=True)
        return top.export() if name == BASE else scores

    def write_bundle(self, figures, held_out) -> Path:
        from ..training.bundle_writer import draft_entry, lookup_acceptance, write_bundle
        entries = [draft_entry(
            self.path(domain), self.shape.kind, domain, self.shape.options,
            scores[0] if scores else {}, self.bundle.target.licence,
            "distilled from the target's own outputs by memspec distill, "
            f'seed {self.arguments.seed}; see the metadata of the file')
            for domain, scores in figures.items()]
        return write_bundle(self.work, self.bundle, self.work / 'head.safetensors', entries,
                            lookup_acceptance(held_out))


def _first(records, tokens: int) -> list:
    """Records with ``tokens`` output tokens or a little more; all for 0."""
    chosen, count = [], 0
    for record in records:
        if tokens and count >= tokens:
            break
        chosen.append(record)
        count += len(record.output_ids)
    return chosen


def _duration(seconds: float) -> str:
    return f'{seconds:.0f} s' if seconds < 100 else f'{seconds / 60:.0f} min'


class _bar:  # noqa: N801 (used as a function)
    """
    A progress bar; a line now and then where the output is not a terminal.

    Gives a function of (done, in all, note).
    """

    _PERIOD_SEC = 20.0

    def __init__(self, title: str, total: int, done: int = 0):
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )
        self._title, self._told = title, time.monotonic()
        self._progress = None
        console = Console()
        if console.is_terminal:
            self._progress = Progress(
                TextColumn('{task.description}'), BarColumn(), MofNCompleteColumn(),
                TimeRemainingColumn(), TextColumn('{task.fields[note]}'), console=console)
            self._task = self._progress.add_task(title, total=total, completed=done, note='')
        else:
            print(f'{title}: {total} to do', flush=True)

    def __enter__(self):
        if self._progress is not None:
            self._progress.start()
        return self._advance

    def __exit__(self, *exc) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _advance(self, done: int, total: int, note: str = '') -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=done, total=total, note=note)
        elif done == total or time.monotonic() - self._told > self._PERIOD_SEC:
            self._told = time.monotonic()
            print(f'  {self._title}: {done} of {total}' + (f', {note}' if note else ''),
                  flush=True)


def _print_agreement(figures, work: Path) -> None:
    for step in range(max((len(scores) for scores in figures.values()), default=0)):
        where = 'the next token' if step == 0 else f'{step + 1} tokens ahead'
        print(f'\nagreement with the target on held-out outputs, {where} '
              '(rows: draft, columns: domain)')
        for domain, scores in figures.items():
            print(f'{domain:10} ' + '  '.join(
                f'{name} {value:.3f}' for name, value in scores[step].items()))
