# SPDX-License-Identifier: Apache-2.0
"""Acceptance traces: what is in them is what the real engine does; they survive what happens."""

import errno
import json
from pathlib import Path

from conftest import PROMPTS, REAL_VOCABULARY
from fakes import GatedStore
import numpy as np
import pytest
import torch

from memspec_ros.cli import main
from memspec_ros.models.bundle import load_bundle
from memspec_ros.models.drafts import base, DraftKind
from memspec_ros.models.state import TargetRun
from memspec_ros.models.target_files import locate_target
from memspec_ros.models.weights import read_tensors
from memspec_ros.runtime.policies import Plan, Policy
from memspec_ros.runtime.requests import GenerationRequest
from memspec_ros.runtime.runtime import Runtime, RuntimeOptions
from memspec_ros.runtime.settings import Settings
from memspec_ros.runtime.storage import FileStore
from memspec_ros.training import traces
from memspec_ros.training.outputs import content_key, OutputRecord, OutputStore
from memspec_ros.training.trace_store import Trace, TraceError, TraceHeader, TraceStore
from memspec_ros.training.traces import (
    collect_prompts,
    fill_traces,
    read_outputs,
    TracePrompt,
    Tracer,
)

LIMIT, GAMMA = 20, 6
DRAFTS = ('near', 'far', 'top', 'noise', 'feature', 'embedded', 'lookup')
# The third repeats itself, so that prompt lookup has something to find.
TEXTS = ['the red cube', 'def add(a, b): return a + b', 'a b a b a b a b', 'grüße 😀']


@pytest.fixture(scope='module')
def bundle(full_bundle):
    bundle = load_bundle(full_bundle)
    locate_target(bundle)
    return bundle


@pytest.fixture(scope='module')
def tracer(bundle, target):
    return Tracer(bundle, target, frozenset(), 'float32', 100, LIMIT, GAMMA, hidden_every=3)


def prompts_of(*ids):
    return [TracePrompt(f'domain{i % 2}', f'text {i}', list(prompt))
            for i, prompt in enumerate(ids)]


# --- ranks ---

def test_ties_rank_by_index_as_argmax_has_it():
    logits = torch.tensor([[1., 3., 3., 0.], [2., 2., 2., 2.], [0., 1., 2., 3.]])
    for row, order in zip(logits, ([1, 2, 0, 3], [0, 1, 2, 3], [3, 2, 1, 0])):
        assert row.argmax() == order[0]
        ranks = base.token_ranks(row.expand(4, 4), order, 9)
        assert ranks.dtype == torch.uint8 and ranks.tolist() == [1, 2, 3, 4]
    assert base.token_ranks(logits, [0, 3, 3], 3).tolist() == [3, 0, 1]
    assert base.token_ranks(logits, [-1, 4, 1], 9).tolist() == [0, 0, 3]


def test_windows_end_with_the_output():
    ranks = torch.tensor([1, 2, 3], dtype=torch.uint8)
    assert base.rank_windows(ranks, 2).tolist() == [[1, 2], [2, 3], [3, 0]]
    assert base.rank_windows(ranks, 5).tolist() == [[1, 2, 3, 0, 0], [2, 3, 0, 0, 0],
                                                    [3, 0, 0, 0, 0]]
    assert base.rank_windows(ranks, 1).tolist() == [[1], [2], [3]]


def real_proposals(tracer, target, run, first, name, gamma):
    """What the draft's own drafter proposes at each position of the output."""
    kind, tensors = dict(zip(tracer.header.drafts, tracer._drafts))[name]
    for end in range(first, len(run.tokens)):
        state = target.new_state(120, kind.depths)
        state.tokens = run.tokens[:end]
        target.forward(state, state.tokens[:-1])
        state.hold(end - 1)
        drafter = kind.attach(tensors)
        drafter.catch_up(state, 1000)
        yield drafter.propose(state, gamma).tokens


@pytest.mark.parametrize('name', DRAFTS)
@pytest.mark.parametrize('prompt', [PROMPTS[1], [7, 9] * 6], ids=['plain', 'repeating'])
def test_rank_one_is_what_the_drafter_proposes(tracer, target, name, prompt):
    trace = tracer.trace(TracePrompt('code', '', prompt), [])
    run, ranks = tracer.run(prompt, []), trace.ranks[DRAFTS.index(name)]
    hits = 0
    for t, proposal in enumerate(real_proposals(tracer, target, run, len(prompt), name, GAMMA)):
        for j, token in enumerate(proposal):
            place = len(prompt) + t + j
            if place >= len(run.tokens):
                assert ranks[t, j] == 0
                continue
            right = token == run.tokens[place]
            assert (ranks[t, j] == 1) == right, (t, j)
            hits += right
            # What it says after a wrong token of its own is not what it says after the true one.
            if not right and name != 'lookup':
                break
    assert hits or name in ('noise', 'far', 'embedded', 'lookup')


def test_lower_ranks_are_those_of_the_draft_models_own_logits(tracer, model_dirs, greedy):
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(model_dirs / 'far')
    output = greedy(PROMPTS[0], LIMIT)
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPTS[0] + output])).logits[0, :, :REAL_VOCABULARY]
    ranks = tracer.trace(TracePrompt('code', '', PROMPTS[0]), output).ranks[DRAFTS.index('far')]
    for t, token in enumerate(output):
        row = logits[len(PROMPTS[0]) + t - 1]
        rank = row.argsort(descending=True, stable=True).tolist().index(token) + 1
        assert ranks[t, 0] == (rank if rank <= traces.RANKS else 0)
        assert [ranks[t - j, j] for j in range(min(t + 1, GAMMA))] == [ranks[t, 0]] * min(
            t + 1, GAMMA)


def test_a_causal_lm_says_nothing_beyond_its_own_context(bundle, target):
    from memspec_ros.models.drafts import KINDS
    spec = bundle.draft('near')
    tensors = read_tensors(bundle.weight_file(spec))
    run = TargetRun(PROMPTS[3], {})
    wide, narrow = (KINDS['causal_lm'](spec, bundle, target, size).rollout_ranks(
        tensors, run, 10, 3, 255) for size in (100, 20))
    expected = base.rank_windows(torch.where(torch.arange(35) < 10, wide[:, 0], 0), 3)
    assert torch.equal(narrow, expected) and narrow[0].all()
    assert not KINDS['causal_lm'](spec, bundle, target, 5).rollout_ranks(
        tensors, run, 10, 3, 255).any()


def test_a_token_outside_the_trimmed_vocabulary_has_no_rank(bundle, target):
    from memspec_ros.models.drafts import KINDS
    spec = bundle.draft('top')
    kind = KINDS['shared_layers'](spec, bundle, target, 64)
    tokens = [5, 17, 40, REAL_VOCABULARY, 99]
    hidden = {depth: torch.ones(5, target.hidden_size) for depth in (2, target.layers)}
    ranks = kind.rollout_ranks(read_tensors(bundle.weight_file(spec)),
                               TargetRun(tokens, hidden), 2, 2, 255)
    assert ranks.tolist()[1] == [0, ranks[2, 0]] and not ranks[1, 0]


def test_a_kind_without_traces_says_so():
    class Silent(DraftKind):
        def __init__(self):
            pass

        def attach(self, tensors):
            raise AssertionError
    with pytest.raises(Exception, match='Silent records no acceptance traces'):
        Silent().rollout_ranks({}, TargetRun([1, 2], {}), 1, 4, 8)


# --- outputs ---

@pytest.mark.parametrize('prompt', PROMPTS, ids=len)
def test_the_output_is_the_targets_whatever_was_said_before(tracer, greedy, prompt):
    """Batched and bfloat16 outputs may part from the argmax, others be too short or long."""
    expected = greedy(prompt, LIMIT)
    for place in (0, 1, 7, LIMIT - 1):
        wrong = list(expected)
        wrong[place] = (wrong[place] + 1) % REAL_VOCABULARY
        for output in (wrong, expected[:place], [*expected, 1, 2, 3]):
            run = tracer.run(prompt, output)
            assert run.tokens == prompt + expected


def test_an_output_that_is_given_is_traced_as_it_is(tracer, greedy):
    true = greedy(PROMPTS[0], 12)
    other = [*true[:4], (true[4] + 1) % 300, *true[5:]]
    run = tracer.run(PROMPTS[0], other, given=True)
    assert run.tokens == PROMPTS[0] + other
    trace = tracer.trace(TracePrompt('code', '', PROMPTS[0]), other, given=True)
    assert trace.output_ids.tolist() == other
    same = tracer.run(PROMPTS[0], true, given=True)
    for depth, hidden in tracer.run(PROMPTS[0], true).hidden.items():
        assert torch.allclose(hidden[:len(same.tokens)], same.hidden[depth], atol=1e-5)


def test_the_output_ends_at_its_stop_token(bundle, target, greedy):
    plain = greedy(PROMPTS[0], LIMIT)
    stop = plain[5]
    expected = plain[:plain.index(stop) + 1]
    tracer = Tracer(bundle, target, frozenset({stop}), 'float32', 100, LIMIT, 2)
    wrong = [(plain[0] + 1) % REAL_VOCABULARY]
    for output in ([], plain, expected, wrong, [stop], expected[:-1]):
        assert tracer.run(PROMPTS[0], output).tokens == PROMPTS[0] + expected


def test_hidden_states_are_the_targets_and_what_rankers_are_shown(tracer, target, greedy):
    prompt = PROMPTS[1]
    wrong = [*greedy(prompt, LIMIT)[:8], 0]
    run, trace = tracer.run(prompt, wrong), tracer.trace(TracePrompt('code', '', prompt), wrong)
    state = target.new_state(100, frozenset({1, 2}))
    target.forward(state, run.tokens)
    assert set(run.hidden) == {1, 2, target.layers}
    for depth, hidden in run.hidden.items():
        assert hidden.shape == (len(run.tokens), target.hidden_size)
        assert torch.allclose(hidden, state.hidden[depth][:len(run.tokens)], atol=1e-4)
    assert trace.hidden.dtype == np.float16 and len(trace.hidden) == 7
    for row, t in enumerate(range(0, LIMIT, 3)):
        state.tokens = run.tokens[:len(prompt) + t]
        state.hold(len(state.tokens) - 1)
        assert np.allclose(trace.hidden[row], state.last_hidden.numpy(), rtol=2e-3, atol=2e-3)


def test_a_prompt_of_one_token_has_no_hidden_state_before_it(tracer):
    hidden = tracer.trace(TracePrompt('code', '', PROMPTS[2]), []).hidden
    assert not hidden[0].any() and hidden[1].any()


def test_outsized_hidden_states_stay_finite(tracer, target):
    run = TargetRun([1, 2, 3], {target.layers: torch.full((3, target.hidden_size), 1e9)})
    assert np.isfinite(tracer._hidden(run, 2)).all()


# --- the exactness contract ---

class Rotating(Policy):
    """Wants another draft at every boundary."""

    def __init__(self):
        self.turn = 0

    def plan(self, context):
        self.turn += 1
        shift = self.turn % len(DRAFTS)
        order = DRAFTS[shift:] + DRAFTS[:shift]
        return Plan([(draft, 0.9 - i / 10) for i, draft in enumerate(order)])


@pytest.fixture(scope='module')
def engine_log(full_bundle):
    """Text -> (prompt ids, output ids, StepRecords), drafts being loaded and switched."""
    bundle = load_bundle(full_bundle)
    store = GatedStore(FileStore({spec.id: (bundle.weight_file(spec), spec.sha256)
                                  for spec in bundle.drafts if spec.path}))
    runtime = Runtime.open(full_bundle, RuntimeOptions(
        device='cpu', dtype='float32', context=200, max_gamma=GAMMA, adaptive=False,
        max_branches=0, settings=Settings(3, 2)), store=store)
    log = {}
    try:
        controller = runtime.controller
        controller.policy = Rotating()
        for text in TEXTS:
            request = runtime.prepare(GenerationRequest(text, max_new_tokens=60))
            ids, steps = [], []
            for seen, chunk in enumerate(controller.generate(request)):
                ids += chunk.token_ids
                steps.append(chunk.step)
                if controller.residency.loading:
                    store.gate.release()
                    runtime._loader.wait(10.0)
                # Draft lengths that change, as they do where they adapt.
                controller.draft_length.max_gamma = 1 + (seen * 5) % GAMMA
            log[text] = request.prompt_ids, ids, steps
        return log, controller.stop_ids
    finally:
        runtime.close()


def test_replaying_the_engines_log_gives_what_it_accepted(engine_log, bundle, target):
    log, stop_ids = engine_log
    tracer = Tracer(bundle, target, stop_ids, 'float32', 200, 60, GAMMA)
    used, lengths, accepted = set(), set(), 0
    for text, (prompt, output, steps) in log.items():
        trace = tracer.trace(TracePrompt('code', text, prompt), [])
        assert trace.output_ids.tolist() == output
        for step in filter(None, steps):
            if not step.draft:
                assert step.drafted == step.accepted == 0
                continue
            chain = trace.accepted(DRAFTS.index(step.draft), step.drafted)
            assert chain[step.position - len(prompt)] == step.accepted, step
            if step.drafted:
                used.add(step.draft)
                lengths.add(step.drafted)
            accepted += step.accepted
    assert len(used) >= 4 and len(lengths) >= 3 and accepted > 20


# --- filling a directory ---

def listing(directory: Path):
    return sorted(path.name for path in directory.iterdir())


def test_traces_are_what_was_asked_for(tmp_path, tracer, greedy):
    store, reports = TraceStore(tmp_path / 'deep' / 'out'), []
    prompts = prompts_of(*PROMPTS)
    fill_traces(store, tracer, prompts, batch=3, report=lambda *done: reports.append(done))
    assert reports == [(n, 4) for n in (1, 2, 3, 4)]
    assert store.header() == tracer.header and tracer.header.drafts == DRAFTS
    assert store.keys() == {prompt.key for prompt in prompts}
    for prompt in prompts:
        trace = store.read(prompt.key)
        assert (trace.domain, trace.prompt) == (prompt.domain, prompt.text)
        assert trace.prompt_ids.tolist() == prompt.ids
        assert trace.output_ids.tolist() == greedy(prompt.ids, LIMIT)
        assert trace.ranks.shape == (len(DRAFTS), LIMIT, GAMMA) and trace.ranks.dtype == np.uint8
        assert trace.ranks.max() <= traces.RANKS
    assert len(listing(store.directory)) == 6


def test_an_interrupted_run_is_resumed(tmp_path, tracer, monkeypatch):
    whole, store = TraceStore(tmp_path / 'whole'), TraceStore(tmp_path / 'cut')
    prompts = prompts_of(*PROMPTS, [1, 2, 3], [4, 5])
    fill_traces(whole, tracer, prompts, batch=2)
    generated = []
    original = Tracer.outputs
    monkeypatch.setattr(Tracer, 'outputs', lambda self, ids: (
        generated.extend(map(tuple, ids)), original(self, ids))[1])

    def interrupt(done, total):
        raise KeyboardInterrupt

    for most in range(1, 6):  # one trace more each time
        with pytest.raises(KeyboardInterrupt):
            fill_traces(store, tracer, prompts, batch=2, report=interrupt)
        assert len(store.keys()) == most and not list(store.directory.glob('*.partial'))
    fill_traces(store, tracer, prompts, batch=2)
    # No output was made twice, though traces were lost in the middle of batches.
    assert sorted(generated) == sorted(tuple(prompt.ids) for prompt in prompts)
    assert listing(store.directory) == listing(whole.directory)
    for trace in whole:
        other = store.read(trace.key)
        assert np.array_equal(other.ranks, trace.ranks)
        assert np.array_equal(other.hidden, trace.hidden)
    fill_traces(store, tracer, prompts, report=interrupt)  # nothing is left to be done


def test_outputs_made_before_are_used_and_checked(tmp_path, tracer, greedy, monkeypatch):
    monkeypatch.setattr(Tracer, 'outputs', lambda self, ids: pytest.fail('generated'))
    right = greedy(PROMPTS[0], LIMIT)
    given = OutputStore(tmp_path / 'given.jsonl')
    given.append([OutputRecord('any', 'code', PROMPTS[0], right[:4] + [0, 0]),
                  OutputRecord('other', 'code', PROMPTS[1], greedy(PROMPTS[1], LIMIT + 5))])
    store = TraceStore(tmp_path / 'out')
    fill_traces(store, tracer, prompts_of(*PROMPTS[:2]), read_outputs(given.path))
    assert store.read(content_key(PROMPTS[0])).output_ids.tolist() == right
    assert store.read(content_key(PROMPTS[1])).output_ids.tolist() == greedy(PROMPTS[1], LIMIT)


def test_a_batch_that_differs_is_put_right_in_the_trace(tmp_path, tracer, greedy, monkeypatch):
    monkeypatch.setattr(traces, 'generate_batch', lambda model, prompts, limit, stops: [
        [*greedy(prompt, limit)[:9], 1, 2] for prompt in prompts])
    store = TraceStore(tmp_path)
    fill_traces(store, tracer, prompts_of(*PROMPTS))
    for prompt in PROMPTS:
        assert store.read(content_key(prompt)).output_ids.tolist() == greedy(prompt, LIMIT)


@pytest.mark.parametrize('name, value', [
    ('bundle', 'f' * 64), ('gamma', GAMMA + 1), ('dtype', 'bfloat16'), ('max_new_tokens', 9),
    ('hidden_every', 0), ('drafts', ('near',)), ('ranks', 4)])
def test_the_directory_of_other_traces_is_left_alone(tmp_path, tracer, name, value):
    store = TraceStore(tmp_path)
    store.create(TraceHeader(**{**vars(tracer.header), name: value}))
    before = (tmp_path / 'traces.json').read_bytes()
    with pytest.raises(TraceError, match=f'made with another {name}; choose another directory'):
        fill_traces(store, tracer, prompts_of(PROMPTS[0]))
    assert listing(tmp_path) == ['traces.json']
    assert (tmp_path / 'traces.json').read_bytes() == before


def full_disk(*args, **kwargs):
    raise OSError(errno.ENOSPC, 'No space left on device')


@pytest.mark.parametrize('fails', ['trace', 'outputs', 'header'])
def test_a_full_disk_is_told_and_nothing_half_written_stays(tmp_path, tracer, monkeypatch, fails):
    store = TraceStore(tmp_path / 'out')
    prompts = prompts_of(*PROMPTS)
    original = np.savez_compressed

    def one_fits(file, **arrays):
        if store.keys():
            file.write(b'PK half')
            full_disk()
        original(file, **arrays)

    with monkeypatch.context() as patch:
        if fails == 'trace':
            patch.setattr(np, 'savez_compressed', one_fits)
        elif fails == 'outputs':
            patch.setattr(OutputStore, 'append', full_disk)
        else:
            patch.setattr(Path, 'replace', full_disk)
        with pytest.raises(TraceError, match='No space left on device.*again to go on'):
            fill_traces(store, tracer, prompts)
    names = listing(store.directory)
    assert [name for name in names if name not in ('traces.json', 'outputs.jsonl')] == [
        f'{key}.npz' for key in store.keys()]
    assert len(store.keys()) == (fails == 'trace')
    list(store)  # what there is can be read
    fill_traces(store, tracer, prompts)
    assert len(list(store)) == 4


# --- files as they should not be ---

@pytest.fixture
def small(tmp_path):
    header = TraceHeader('b' * 64, ('one', 'two'), 2, 8, 2, 'float32', 4)
    store = TraceStore(tmp_path)
    store.create(header)
    ranks = np.array([[[1, 1], [1, 0], [0, 0]], [[0, 1], [1, 1], [1, 0]]], np.uint8)
    store.add(Trace('0a', 'code', 'tail\0', np.array([1, 2], np.int32),
                    np.array([3, 4, 5], np.int32), ranks, np.ones((2, 4), np.float16)))
    return store


def test_what_was_added_is_read_back(small):
    trace, = small
    assert (trace.key, trace.domain, trace.prompt) == ('0a', 'code', 'tail\0')
    assert trace.output_ids.tolist() == [3, 4, 5] and trace.hidden.shape == (2, 4)
    assert trace.accepted(0, 2).tolist() == [2, 1, 0]
    assert trace.accepted(1, 2).tolist() == [0, 2, 1]
    assert trace.accepted(1, 1).tolist() == [0, 1, 1] and not trace.accepted(1, 0).any()
    with pytest.raises(ValueError, match='3 drafted tokens'):
        trace.accepted(0, 3)
    assert [path.name for path in small.directory.iterdir() if 'partial' in path.name] == []


@pytest.mark.parametrize('text, words', [
    ('', 'not the header'), ('[]', 'not the header'), ('{"format": 1}', 'not the header'),
    ('{"format": 2, "new": 1}', 'format 2, this version reads 1'), ('{"gamma": 4}', 'format'),
    ('[' * 100000, 'not the header')])
def test_a_malformed_header_is_named(tmp_path, text, words):
    (tmp_path / 'traces.json').write_text(text)
    store = TraceStore(tmp_path)
    header = TraceHeader('b', (), 1, 1, 0, 'float32', 1)
    for use in (store.header, lambda: store.create(header)):
        with pytest.raises(TraceError, match=f'traces.json: .*{words}'):
            use()
    assert (tmp_path / 'traces.json').read_text() == text


@pytest.mark.parametrize('name, value', [
    ('gamma', '2'), ('gamma', 0), ('hidden_every', -1), ('drafts', [1]), ('dtype', None)])
def test_a_header_with_senseless_fields_is_refused(small, name, value):
    path = small.directory / 'traces.json'
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(TraceError, match='not the header of traces'):
        small.header()


def test_no_header_says_what_makes_one(tmp_path):
    with pytest.raises(TraceError, match='make traces with memspec trace'):
        TraceStore(tmp_path).header()


def test_a_damaged_trace_is_named(small):
    path = small.directory / '0a.npz'
    whole = path.read_bytes()
    damaged = [whole[:cut] for cut in (0, 1, 50, len(whole) - 1)]
    damaged += [whole[:i] + bytes([whole[i] ^ 0xff]) + whole[i + 1:]
                for i in range(0, len(whole), 7)]
    refused = 0
    for content in damaged:
        path.write_bytes(content)
        try:
            small.read('0a')  # a bit of a time stamp, say, harms nothing
        except TraceError as error:
            assert str(error).startswith(f'{path}: not a trace') and 'delete it' in str(error)
            refused += 1
    assert refused > len(damaged) / 4
    np.save(path.with_suffix('.npy'), np.ones(3))
    path.with_suffix('.npy').replace(path)
    with pytest.raises(TraceError, match='not a trace'):
        small.read('0a')


@pytest.mark.parametrize('changes', [
    {'ranks': np.zeros((1, 3, 2), np.uint8)}, {'ranks': np.zeros((2, 4, 2), np.uint8)},
    {'ranks': np.zeros((2, 3, 2), np.int64)}, {'output_ids': np.zeros((3, 1), np.int32)}])
def test_arrays_that_do_not_belong_together_are_refused(small, changes):
    small.add(Trace(**{**vars(small.read('0a')), **changes}))
    with pytest.raises(TraceError, match='0a.npz: not a trace'):
        small.read('0a')


@pytest.mark.parametrize('line', ['no json', '[]', '{"domain": "code"}', '7',
                                  '{"domain": "code", "prompt_ids": [1]}'])
def test_a_store_of_outputs_that_is_none_is_named(tmp_path, line):
    path = tmp_path / 'outputs.jsonl'
    path.write_text(line + '\n')
    with pytest.raises(TraceError, match='outputs.jsonl: not a store of outputs'):
        read_outputs(path)


# --- prompts ---

def test_prompts_are_taken_once_and_up_to_a_number(tmp_path):
    files = []
    for name, texts in (('a', ['x', 'xx', 'x', 'y' * 9]), ('b', ['xx', 'xxx', 'z'])):
        files.append(tmp_path / name)
        files[-1].write_text(''.join(json.dumps({'prompt': text, 'domain': domain}) + '\n'
                                     for text in texts for domain in ('code', 'law')))

    def encode(text):
        return [ord(c) for c in text]

    def chosen(*limits):
        return [(p.domain, p.text) for p in collect_prompts(files, encode, *limits)]
    assert chosen(9) == [('code', text) for text in ('x', 'xx', 'y' * 9, 'xxx', 'z')]
    assert chosen(9, 2) == [('code', 'x'), ('code', 'xx'), ('law', 'y' * 9), ('law', 'xxx')]
    assert chosen(2) == [('code', 'x'), ('code', 'xx'), ('code', 'z')]


# --- the command ---

@pytest.fixture
def prompt_file(tmp_path):
    path = tmp_path / 'prompts.jsonl'
    path.write_text(''.join(json.dumps({'domain': domain, 'prompt': f'{domain} {i} a b a b'})
                            + '\n' for i in range(3) for domain in ('general', 'code')))
    return path


def run(bundle, prompts, out, *more):
    return main(['trace', '--bundle', str(bundle), '--prompts', str(prompts), '--out', str(out),
                 '--max-new-tokens', '10', '--gamma', '4', '--threads', '1', '--device', 'cpu',
                 *more])


def test_the_command_prints_tables_and_writes_json(full_bundle, tmp_path, prompt_file, capfd):
    out, file = tmp_path / 'out', tmp_path / 'figures.json'
    assert run(full_bundle, prompt_file, out, '--json', str(file)) == 0
    shown = capfd.readouterr().out
    for word in ('first choice', 'chain of 4', 'tree of 9', 'general', 'code', 'lookup', '*'):
        assert word in shown
    figures = json.loads(file.read_text())
    assert figures['prompts'] == {'code': 3, 'general': 3} and figures['dtype'] == 'float32'
    assert figures['gamma'] == 4 and figures['bundle'] == TraceStore(out).header().bundle
    for name in ('agreement', 'tokens_per_iteration', 'tree_tokens_per_iteration'):
        assert set(figures[name]) == {'code', 'general'}
        assert all(set(row) == set(DRAFTS) for row in figures[name].values())
    assert set(figures['trees']) == set(DRAFTS)
    # Again, of what is there: the same, on standard output and nothing else.
    assert run(full_bundle, prompt_file, out, '--json', '-') == 0
    assert json.loads(capfd.readouterr().out) == figures
    assert run(full_bundle, prompt_file, out, '--json', '-', '--prompts-per-domain', '1') == 0
    assert json.loads(capfd.readouterr().out)['prompts'] == {'code': 1, 'general': 1}


@pytest.mark.parametrize('arguments, words', [
    (['--gamma', '0'], '--gamma is 0'), (['--threads', '-1'], '--threads is -1'),
    (['--max-new-tokens', '0'], '--max-new-tokens is 0'),
    (['--hidden-every', '-1'], '--hidden-every is -1'),
    (['--outputs', '/no/such/store'], '/no/such/store: no such file'),
    (['--prompts', '/no/such/file'], '/no/such/file'),
    (['--prompt-tokens', '1'], 'no prompt of at most 1'),
    (['--max-new-tokens', '600'], 'the target was made for 512'),
    (['--device', 'tpu'], 'tpu'), (['--bundle', '/no/such/bundle'], '/no/such/bundle')])
def test_errors_are_one_line(full_bundle, tmp_path, prompt_file, capfd, arguments, words):
    assert run(full_bundle, prompt_file, tmp_path / 'out', *arguments) == 1
    error = capfd.readouterr().err.strip()
    assert error.startswith('memspec trace: ') and words in error and '\n' not in error
    assert not (tmp_path / 'out').exists()


def test_a_malformed_prompt_is_named_by_its_line(full_bundle, tmp_path, prompt_file, capfd):
    with prompt_file.open('a') as file:
        file.write('{"prompt": "a"}\n')
    assert run(full_bundle, prompt_file, tmp_path / 'out') == 1
    assert 'prompts.jsonl, line 7' in capfd.readouterr().err


def test_another_gamma_in_the_same_directory_is_refused(full_bundle, tmp_path, prompt_file, capfd):
    assert run(full_bundle, prompt_file, tmp_path / 'out', '--prompts-per-domain', '1') == 0
    assert run(full_bundle, prompt_file, tmp_path / 'out', '--gamma', '3') == 1
    assert 'another gamma' in capfd.readouterr().err


def test_the_output_directory_may_not_be_a_file(full_bundle, tmp_path, prompt_file, capfd):
    assert run(full_bundle, prompt_file, prompt_file, '--prompts-per-domain', '1') == 1
    assert 'memspec trace: ' in capfd.readouterr().err


def test_in_bfloat16_too(full_bundle, tmp_path, prompt_file, capfd):
    assert run(full_bundle, prompt_file, tmp_path / 'out', '--prompts-per-domain', '1', '--dtype',
               'bfloat16', '--json', '-') == 0
    assert json.loads(capfd.readouterr().out)['dtype'] == 'bfloat16'
