# SPDX-License-Identifier: Apache-2.0
"""
From prompts to a bundle: outputs, vocabulary, lessons, drafts, manifest, in a work directory.

Each step keeps what it has made there, and an interrupted job makes none of it
again. ``memspec distill`` is this with progress bars.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
import json
from pathlib import Path

import torch
from torch import Tensor

from ..models.bundle import load_bundle, MANIFEST_NAME, SELF_ID
from ..models.errors import InvalidRequestError, MemSpecError
from ..models.fingerprint import target_fingerprint, TARGET_KEY
from ..models.llama import Llama
from ..models.llama_config import LlamaConfig
from ..models.target import open_weights, read_config
from ..models.target_files import locate_target
from ..models.tokenizer import Tokenizer
from ..models.weights import read_tensors
from ..runtime.runtime import choose_device, stop_ids_of
from .bundle_writer import draft_entry, lookup_acceptance, write_bundle, write_exits
from .distill import agreement, Distillation, DistillOptions, load_training, save_training
from .forecast import forecast
from .further import carry_over, draft_to_continue, mean, shape_of_drafts
from .lessons import choose_vocabulary, coverage, ExitShape, Lessons, TopShape
from .outputs import content_key, fill_store, OutputRecord, OutputStore, read_prompts
from .own_prompts import fill_prompt_file
from .student import Student, StudentShape
from .teacher import TeacherStore, weights_sha256, write_whole
from .tops import read_draft, save_draft, Top

BASE = 'base'
_FROM_NOTHING = (BASE, SELF_ID)
_GENERATION_BATCH = 64

Advance = Callable[..., None]
ProgressFactory = Callable[[str, int, int], AbstractContextManager[Advance]]


@dataclass(frozen=True)
class JobOptions:
    """
    What is to be made, of what and how; see ``memspec distill --help``.

    outputs: stores made before, used whole. own_prompts: prompts of the domain
    ``general`` that the target writes itself. samples: outputs a prompt, sampled
    from the second on. epochs: of the base; domain_epochs: of what continues
    from it. Counts of 0 mean all. further: go on from the bundle's own drafts
    instead of a base, and keep their shape and vocabulary.
    """

    work: str
    bundle: str = ''
    outputs: Sequence[str] = ()
    resume: bool = False
    reuse_only: bool = False
    tokens_per_domain: int = 0
    own_prompts: int = 0
    samples: int = 1
    temperature: float = 0.7
    prompt_tokens: int = 256
    output_tokens: int = 160
    vocabulary: int = 4096
    epochs: float = 4.0
    domain_epochs: float = 4.0
    learning_rate: float = 2e-3
    ahead: int = 2
    batch: int = 16
    checkpoint_steps: int = 50
    seed: int = 0
    device: str = 'auto'
    further: bool = False


class DistillJob:
    """
    A work directory, a target, and what is made of them step by step.

    shape_of: the drafts' shape for a target of that configuration. progress:
    (title, in all, done) -> a context that gives a function of (done, in all,
    note). say: prints a line.
    """

    def __init__(self, options: JobOptions,
                 shape_of: Callable[[LlamaConfig], TopShape | ExitShape | StudentShape],
                 progress: ProgressFactory, say: Callable[[str], None] = print):
        self.options = options
        self.work = Path(options.work)
        self.bundle = load_bundle(options.bundle or None, verify=False)
        self._progress, self._say = progress, say
        directory = locate_target(self.bundle)
        config = LlamaConfig.from_hf(read_config(directory))
        self.shape = shape_of_drafts(self.bundle) if options.further else shape_of(config)
        self._tokenizer = Tokenizer(self.bundle.tokenizer_path)
        self._stop_ids = stop_ids_of(directory, self._tokenizer)
        device = choose_device(options.device)
        context = options.prompt_tokens + options.output_tokens + 1
        with open_weights(directory) as weights:
            self.target = Llama.from_state(config, weights, torch.bfloat16, device, context)
        name = weights_sha256(self.target)
        self._claim(name)
        self.teacher = TeacherStore(self.work / 'lessons', name, self.shape.depths)

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

    # --- outputs ---

    def training_outputs(self, files: Sequence[str], per_domain: int) -> list[OutputRecord]:
        """
        Records to learn from: those of the stores given, and for the prompts of ``files``.

        What is missing is generated, unless only what is there is to be used.
        """
        if self.options.own_prompts and not self.options.reuse_only:
            path = self.work / 'own_prompts.jsonl'
            fill_prompt_file(path, self.options.own_prompts, self.target, self._tokenizer,
                             self._stop_ids, self.options.seed, self._progress)
            files = [*files, str(path)]
        records = self._outputs(files, 'outputs.jsonl', per_domain, self.options.samples,
                                generate=not self.options.reuse_only, whole_stores=True)
        if not records:
            raise InvalidRequestError('no prompt is left to learn from: none was given, or all '
                                      f'have more than {self.options.prompt_tokens} tokens')
        return records

    def held_out_outputs(self, files: Sequence[str], per_domain: int) -> list[OutputRecord]:
        """Records to judge by, for the prompts of ``files``."""
        return self._outputs(files, 'eval_outputs.jsonl', per_domain, 1, generate=True,
                             whole_stores=False)

    def _outputs(self, files: Sequence[str], name: str, per_domain: int, samples: int,
                 generate: bool, whole_stores: bool) -> list[OutputRecord]:
        options, path = self.options, self.work / name
        known = {record.key: record for file in (*options.outputs, path)
                 for record in OutputStore(Path(file))}
        keys = {f'{key}-{n}' if n else key: (domain, ids, n)
                for key, (domain, ids) in self._prompts(files, per_domain).items()
                for n in range(samples)}
        missing = {key: item for key, item in keys.items() if key not in known}
        if missing and generate:
            with self._progress(f'generating into {path}', len(missing), 0) as advance:
                for sample in range(samples):
                    fill_store(
                        OutputStore(path), self.target,
                        [(domain, ids) for domain, ids, n in missing.values() if n == sample],
                        options.output_tokens, self._stop_ids, _GENERATION_BATCH, advance,
                        temperature=options.temperature if sample else 0.0,
                        sample=sample, seed=options.seed, teacher=self.teacher)
        records = {**known, **{record.key: record for record in OutputStore(path)}}
        chosen = dict(known) if whole_stores else {}
        chosen.update({key: records[key] for key in keys if key in records})
        return [chosen[key] for key in sorted(chosen)]

    def _prompts(self, files: Sequence[str], per_domain: int) -> dict[str, tuple[str, list[int]]]:
        """Domain and token ids by content, without the prompts that are too long."""
        limit = self.options.prompt_tokens
        wanted: dict[str, tuple[str, list[int]]] = {}
        counts: dict[str, int] = defaultdict(int)
        for file in files:
            prompts = list(read_prompts(Path(file)))
            with self._progress(f'tokenising {Path(file).name}', len(prompts), 0) as advance:
                for number, (domain, prompt) in enumerate(prompts, 1):
                    advance(number, len(prompts))
                    if per_domain and counts[domain] >= per_domain:
                        continue
                    ids = self._encode(prompt[:4 * limit])
                    if len(ids) <= limit:
                        wanted[content_key(ids)] = (domain, ids)
                        counts[domain] += 1
        return wanted

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode_chat([{'role': 'user', 'content': text}])

    # --- what all drafts share ---

    def vocabulary(self, records: Sequence[OutputRecord],
                   held_out: Sequence[OutputRecord]) -> list[int]:
        """
        The trimmed vocabulary: that of the drafts to be continued, or chosen once.

        Chosen by coverage of ``records``.
        """
        path = self.work / 'head.safetensors'
        if path.exists():
            return read_tensors(path)['token_ids'].tolist()
        vocabulary = (self.bundle.head_token_ids() if self.options.further else
                      choose_vocabulary(records, self.options.vocabulary, self._stop_ids))
        write_whole(path, {'token_ids': torch.tensor(vocabulary, dtype=torch.int32)},
                    {'made': 'memspec distill'})
        judged = held_out or records
        self._say(f'trimmed vocabulary of {len(vocabulary)} tokens covers '
                  f'{coverage(judged, vocabulary):.1%} of the {"held-out " if held_out else ""}'
                  f'outputs, {coverage(judged, vocabulary, text=True):.1%} with what the text '
                  'held')
        return vocabulary

    def plan(self, records: Iterable[OutputRecord],
             domains: Iterable[str]) -> dict[str, list[OutputRecord]]:
        """
        Which records the base and each draft learn from.

        The base learns from the general domain (or from all, where there is
        none). Every draft then learns from as many tokens of its own domain; the
        general one from outputs that the base has not seen, where there are.
        """
        by_domain = defaultdict(list)
        for record in sorted(records, key=lambda record: ('-' in record.key, record.key)):
            by_domain[record.domain].append(record)
        limit = self.options.tokens_per_domain
        everything = sorted((record for part in by_domain.values() for record in part),
                            key=lambda record: record.key)
        plan = ({} if self.options.further else
                {BASE: take_tokens(by_domain.get('general', everything), limit)})
        for domain in domains:
            mine = by_domain[domain]
            if not mine:
                raise InvalidRequestError(f'no outputs of domain {domain!r}')
            if domain == 'general' and BASE in plan:
                seen = {record.key for record in plan[BASE]}
                mine = [record for record in mine if record.key not in seen] + [
                    record for record in mine if record.key in seen]
            plan[domain] = take_tokens(mine, limit)
        return plan

    def announce(self, records: Iterable[OutputRecord], held_out: Iterable[OutputRecord],
                 plan: Mapping[str, Sequence[OutputRecord]]) -> None:
        """Say beforehand what it will take."""
        options = self.options
        passes = [sum(len(record.prompt_ids) + len(record.output_ids) for record in part)
                  * (options.epochs if name in _FROM_NOTHING else options.domain_epochs)
                  for name, part in plan.items() if not self.path(name).exists()]
        said = forecast(self.target, self.teacher, self.shape, list(records), list(held_out),
                        passes, options.vocabulary, options.ahead)
        if said:
            self._say(said)

    def think(self, records: Iterable[OutputRecord]) -> None:
        """Make the lessons that are missing."""
        missing = self.teacher.missing(records)
        if missing:
            title = f'lessons into {self.teacher.directory}'
            with self._progress(title, len(missing), 0) as advance:
                self.teacher.fill(self.target, missing, advance)

    # --- drafts ---

    def path(self, name: str) -> Path:
        """The file (or directory) of a draft."""
        return self.work / (name if self.shape.kind == 'causal_lm' else f'{name}.safetensors')

    def draft(self, name: str, records: Sequence[OutputRecord],
              held_out: Sequence[OutputRecord], vocabulary: Sequence[int],
              start: Mapping[str, Tensor] | None) -> list[dict[str, float]]:
        """
        Train a draft from ``start``, or take the one that is there.

        Of a draft that was continued, the mean with what it was before is kept.
        Returns its agreement on ``held_out`` by domain, one dictionary a step ahead.
        """
        path = self.path(name)
        if path.exists():
            self._say(f'{path} is there already')
            return json.loads(read_draft(path)[1].get('agreement', '[]'))
        options = DistillOptions(
            epochs=(self.options.epochs if name in _FROM_NOTHING
                    else self.options.domain_epochs),
            batch=self.options.batch,
            learning_rate=self.options.learning_rate * (1.0 if start is None else 0.75),
            ahead=self.options.ahead if self.shape.kind == 'feature' else 1,
            checkpoint_steps=self.options.checkpoint_steps, seed=self.options.seed)
        lessons, held = (self._lessons(part, vocabulary) for part in (records, held_out))
        training = Distillation(self.target, lessons, vocabulary, options, start)
        path.parent.mkdir(parents=True, exist_ok=True)
        state_path = path.with_suffix('.state')
        if self.options.resume and (state := load_training(state_path)) is not None:
            try:
                training.resume(state)
            except MemSpecError as error:
                raise MemSpecError(f'{state_path}: {error}') from error
            self._say(f'{name}: resumed at step {training.step} of {training.steps}')
        self._say(f'{name}: {len(records)} outputs, {lessons.output_tokens} tokens, '
                  f'{training.steps} steps')
        with self._progress(name, training.steps, training.step) as advance:
            top = training.run(
                lambda step, steps, loss, right: advance(
                    step, steps, f'loss {loss:.3f}, agreement {right:.3f}'),
                lambda run: save_training(state_path, run.state()))
        if self.options.further:
            top.load(mean(start, top.export()))
        scores = self._scores(top, held)
        save_draft(path, top, {
            TARGET_KEY: target_fingerprint(self.bundle.target_path),
            'kind': self.shape.kind, 'domain': name, 'options': json.dumps(self.shape.options),
            'epochs': str(options.epochs), 'steps': str(training.steps),
            'seed': str(options.seed), 'learning_rate': str(options.learning_rate),
            'batch': str(options.batch), 'training_tokens': str(lessons.output_tokens),
            'continued_from': self._origin(name) if start is not None else '',
            'agreement': json.dumps(scores)},
            tokenizer=self.bundle.tokenizer_path)
        state_path.unlink(missing_ok=True)
        if scores:
            self._say(f'  {name}, held out: ' + ', '.join(
                f'{domain} {value:.3f}' for domain, value in scores[0].items()))
        return scores

    def _scores(self, top: Top | Student, held_out: Lessons) -> list[dict[str, float]]:
        if not held_out.lessons:
            return []
        return [{domain: round(value, 4) for domain, value in row.items()}
                for row in agreement(top, held_out, self.target.device, self.options.ahead)]

    def _origin(self, name: str) -> str:
        """What the draft ``name`` continues, as its file says it."""
        if not self.options.further:
            return BASE
        return f'{draft_to_continue(self.bundle, name).id}, of which it is the mean'

    def start_of(self, domain: str) -> dict[str, Tensor]:
        """Tensors that the draft of a domain begins with."""
        if self.options.further:
            spec = draft_to_continue(self.bundle, domain)
            return read_draft(self.bundle.weight_file(spec))[0]
        return read_draft(self.path(BASE))[0]

    def _lessons(self, records: Iterable[OutputRecord], vocabulary: Sequence[int]) -> Lessons:
        return Lessons(self.target, [self.teacher.lesson(record) for record in records],
                       self.shape, vocabulary)

    def curve(self, domain: str, shares: Sequence[float], records: Sequence[OutputRecord],
              held_out: Sequence[OutputRecord],
              vocabulary: Sequence[int]) -> list[tuple[int, list[dict[str, float]]]]:
        """
        (training tokens, agreement) of a domain's draft made of more and more of its data.

        ``records``: all of them, as ``plan`` has them; the draft of all is the
        domain's own. Epochs, hence passes over a token, are the same for all.
        """
        points, start = [], self.start_of(domain)
        total = sum(len(record.output_ids) for record in records)
        for share in sorted(shares):
            whole = share >= 1
            part = records if whole else take_tokens(records, max(1, round(share * total)))
            name = domain if whole else f'curve/{domain}-{share:g}'
            points.append((sum(len(record.output_ids) for record in part),
                           self.draft(name, part, held_out, vocabulary, start)))
        return points

    def write_bundle(self, figures: Mapping[str, list[dict[str, float]]],
                     held_out: Sequence[OutputRecord]) -> Path:
        """Make the work directory a bundle of the drafts in ``figures``; its manifest's path."""
        entries = [draft_entry(
            self.path(domain), self.shape.kind, domain, self.shape.options,
            scores[0] if scores else {}, self.bundle.target.licence,
            self._provenance)
            for domain, scores in figures.items()]
        if self.options.further:
            entries += carry_over(self.bundle, self.work, figures)
        return write_bundle(self.work, self.bundle, self.work / 'head.safetensors', entries,
                            lookup_acceptance(held_out))

    def write_exits(self, held_out: Sequence[OutputRecord]) -> Path:
        """
        Have the bundle in the work directory use the exits ``SELF_ID``; its manifest's path.

        Where there is none yet it becomes one, without drafts that have to be loaded.
        """
        if not (self.work / MANIFEST_NAME).exists():
            self.write_bundle({}, held_out)
        return write_exits(self.work, self.path(SELF_ID), self.shape.options,
                           self.bundle.target.licence, self._provenance)

    @property
    def _provenance(self) -> str:
        return ("distilled from the target's own outputs by memspec distill, "
                f'seed {self.options.seed}; see the metadata of the file')


def take_tokens(records: Sequence[OutputRecord], tokens: int) -> list[OutputRecord]:
    """The first records with ``tokens`` output tokens or a little more; all for 0."""
    chosen, count = [], 0
    for record in records:
        if tokens and count >= tokens:
            break
        chosen.append(record)
        count += len(record.output_ids)
    return chosen
