# SPDX-License-Identifier: Apache-2.0
"""Self-speculation: exact, nothing run twice, there when no loaded draft is."""

from dataclasses import replace
from types import SimpleNamespace

from conftest import PROMPTS, REAL_VOCABULARY, sha256_of
from fakes import Bench, counting, FakeDrafter, FakeKind
import pytest
from safetensors.torch import save_file
import torch

from memspec_ros.bench.chi_square import goodness_of_fit
from memspec_ros.decoding.engine import Engine
from memspec_ros.decoding.sampling import Prefix, Sampling, warp
from memspec_ros.models.bundle import DraftSpec, load_bundle
from memspec_ros.models.drafts import KINDS
from memspec_ros.models.errors import BundleError, UnsupportedModelError
from memspec_ros.models.kv_options import EXACT, KVOptions
from memspec_ros.models.packing import dense
from memspec_ros.models.target import load_target
from memspec_ros.models.target_files import locate_target
from memspec_ros.runtime.requests import GenerationRequest
from memspec_ros.runtime.runtime import Runtime, RuntimeOptions
from memspec_ros.runtime.settings import Settings

EXITS = [{'depth': 2}, {'depth': 1, 'check': 3}, {'depth': 1, 'check': 2, 'run': 1},
         {'depth': 1, 'check': 3, 'run': 5}]
NO_HEAD = SimpleNamespace(head_token_ids=lambda: None, weight_file=lambda spec: None)


def spec_of(options):
    return DraftSpec('self', 'self_speculation', '', 'MIT', 'here', options=options)


def drafting(target, options, gamma=4):
    """(engine, drafter) whose exits are the target's own norm and head."""
    kind = KINDS['self_speculation'](spec_of(options), NO_HEAD, target, 200)
    engine = Engine(target, 200, gamma, kind.depths, iter(range(10 ** 9)).__next__,
                    stops=kind.stops)
    return engine, kind.attach({})


def decode(engine, drafter, prompt, count, gamma=4):
    for _ in engine.prefill(list(prompt)):
        pass
    output, records = [], []
    while len(output) < count:
        tokens, record = engine.step(drafter, gamma, count - len(output), frozenset())
        assert set(engine.state.kv.lengths) == {engine.state.held} == {
            len(engine.state.tokens) - 1}
        assert not engine.state.ahead and not engine.state.passing
        output += tokens
        records.append(record)
    return output, records


@pytest.mark.parametrize('options', EXITS, ids=str)
@pytest.mark.parametrize('gamma', [1, 2, 4, 7])
def test_output_is_plain_greedy_decoding(target, greedy, options, gamma):
    engine, drafter = drafting(target, options, gamma)
    for prompt in PROMPTS[:2]:
        output, records = decode(engine, drafter, prompt, 40, gamma)
        assert output == greedy(prompt, 40)
        assert sum(record.drafted for record in records) > 0


def test_some_of_what_is_drafted_is_accepted(target):
    """Else the tests here would show little."""
    engine, drafter = drafting(target, {'depth': 1, 'check': 3})
    _, records = decode(engine, drafter, PROMPTS[1], 60)
    accepted, drafted = (sum(getattr(record, name) for record in records)
                         for name in ('accepted', 'drafted'))
    assert 0 < accepted < drafted


@pytest.mark.parametrize('options', EXITS, ids=str)
def test_what_is_committed_is_what_a_plain_pass_computes(target, options):
    engine, drafter = drafting(target, options)
    decode(engine, drafter, PROMPTS[2], 30)
    state, plain = engine.state, target.new_state(200)
    target.forward(plain, state.tokens[:-1])
    held = state.held
    for mine, other in ((state.kv.keys, plain.kv.keys), (state.kv.values, plain.kv.values)):
        assert torch.allclose(mine[..., :held, :], other[..., :held, :], atol=1e-5)
    assert torch.allclose(state.hidden[4][:held], plain.hidden[4][:held], atol=1e-4)
    assert set(state.hidden) == {4}  # no text of hidden states is kept at the exits


@pytest.mark.parametrize('options', EXITS, ids=str)
def test_no_token_passes_a_layer_twice(target, options, monkeypatch):
    engine, drafter = drafting(target, options)
    runs, run_layers = [], target.model.run_layers

    def counted(x, first, last, cache, start, *rest):
        runs.extend((layer, start + row) for layer in range(first, last)
                    for row in range(x.shape[1]))
        return run_layers(x, first, last, cache, start, *rest)
    list(engine.prefill(list(PROMPTS[1])))
    monkeypatch.setattr(target.model, 'run_layers', counted)
    corrected = 0
    for _ in range(12):
        runs.clear()
        before = engine.state.held
        _, record = engine.step(drafter, 4, 100, frozenset())
        rows = set(range(before, before + record.drafted + 1))
        upper = options.get('check', options['depth'])
        for layer in range(4):
            passed = [position for at, position in runs if at == layer]
            if layer >= upper or 'check' not in options:
                assert sorted(passed) == sorted(rows)
            else:  # a token that was corrected was one for nothing, and no more than that
                assert set(passed) >= rows
                corrected += len(passed) - len(rows)
        assert record.ahead == record.drafted
    assert bool(corrected) == (options['depth'] == 1 and options.get('run') != 1)


def test_with_a_check_what_is_proposed_is_what_the_upper_exit_says(target):
    chains = []
    for options in ({'depth': 1, 'check': 3}, {'depth': 2, 'check': 3, 'run': 1}, {'depth': 3}):
        engine, drafter = drafting(target, options, 6)
        list(engine.prefill(list(PROMPTS[1])))
        chains.append(drafter.propose(engine.state, 6).tokens)
    assert chains[0] == chains[1] == chains[2] and len(chains[0]) == 6


def test_what_was_asked_and_not_verified_leaves_nothing_behind(target, greedy):
    engine, drafter = drafting(target, {'depth': 1, 'check': 3})
    for _ in engine.prefill(list(PROMPTS[0])):
        pass
    output = []
    while len(output) < 24:
        assert len(engine.ask(drafter, 3)) == 3 and not engine.state.ahead
        output += engine.step(None, 0, 24, frozenset())[0]
        engine.ask(drafter, 2)
        output += engine.step(drafter, 3, 24 - len(output), frozenset())[0]
    assert output[:24] == greedy(PROMPTS[0], 24)


def test_what_is_ahead_of_other_tokens_is_run_again(target):
    engine, drafter = drafting(target, {'depth': 1, 'check': 3})
    list(engine.prefill(list(PROMPTS[0])))
    state = engine.state
    drafted = drafter.propose(state, 4).tokens
    other = [state.tokens[-1], drafted[0], (drafted[1] + 1) % REAL_VOCABULARY, drafted[2]]
    logits = target.forward(state, other)
    plain = target.new_state(200)
    expected = target.forward(plain, state.tokens[:-1] + other)[-4:]
    assert torch.allclose(logits, expected, atol=1e-4)
    again = target.forward(state, other)  # not taken for verified
    assert torch.allclose(again, expected, atol=1e-4)


# --- sampling ---

def test_coupled_output_is_plain_sampling(target):
    params = Sampling(temperature=1.0, top_p=0.95, frequency_penalty=0.3, seed=1)
    for options in EXITS[:2]:
        engine, drafter = drafting(target, options)
        for seed in range(1, 6):
            engine.use(replace(params, seed=seed))
            plain = decode(engine, None, PROMPTS[1], 20)[0]
            assert decode(engine, drafter, PROMPTS[1], 20)[0] == plain


@pytest.mark.parametrize('options', [{'depth': 3}, {'depth': 1, 'check': 3}], ids=str)
def test_rejection_sampling_keeps_the_distribution_of_the_target(target, options):
    """What is passed on must be the distribution that the corrected token was drawn from."""
    engine, drafter = drafting(target, options, 2)
    params = Sampling(temperature=1.0, top_k=3, seed=1)
    list(engine.prefill(list(PROMPTS[1])))
    state, held = engine.state, engine.state.held
    prompt = list(state.tokens)
    counts, expected = {}, {}

    def row(tokens):
        plain = target.new_state(64)
        logits = target.forward(plain, tokens, last_only=True)
        return warp(logits, Prefix(tokens, len(prompt)), params)[0]
    first = row(prompt)
    for a in first.nonzero().flatten().tolist():
        second = row([*prompt, a])
        for b in second.nonzero().flatten().tolist():
            expected[a, b] = float(first[a] * second[b])
    accepted = 0
    for seed in range(1, 601):
        state.tokens = list(prompt)
        state.hold(held)
        engine.use(replace(params, seed=seed), 'rejection')
        output = []
        while len(output) < 2:
            tokens, record = engine.step(drafter, 2, 2 - len(output), frozenset())
            output += tokens
            accepted += record.accepted
        counts[tuple(output)] = counts.get(tuple(output), 0) + 1
    assert set(counts) <= set(expected) and accepted > 50
    keys = sorted(expected)
    assert goodness_of_fit(torch.tensor([counts.get(key, 0) for key in keys]),
                           torch.tensor([expected[key] for key in keys])).p > 0.001


def test_exits_that_are_unsure_say_no_more(target):
    for options in EXITS:
        engine, drafter = drafting(target, options)
        engine.use(Sampling(), min_confidence=0.99)
        list(engine.prefill(list(PROMPTS[1])))
        assert drafter.propose(engine.state, 4).tokens == []


# --- trained exits, and bundles ---

def exit_tensors(depths, rank=8, width=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {'norm': (width,), 'input_norm': (width,), 'gate_up': (2 * rank, width),
              'down': (width, rank)}
    return {f'{depth}.{name}': torch.randn(shape, generator=generator) * 0.3
            for depth in depths for name, shape in shapes.items()}


def add_exits(maker, tensors=None, **options):
    section = {'licence': 'MIT', 'provenance': 'random', 'options': options}
    if tensors is not None:
        file = maker.directory / 'self.safetensors'
        save_file(tensors, file)
        section.update(path=file.name, bytes=file.stat().st_size, sha256=sha256_of(file))
    maker.manifest['self_speculation'] = section
    return section


def kind_of(maker, target):
    bundle = load_bundle(maker.write())
    locate_target(bundle)
    return KINDS['self_speculation'](bundle.self_speculation, bundle, target, 100)


def test_a_trained_exit_is_its_adapter_norm_and_the_trimmed_head(bundle_maker, target):
    bundle_maker.add_head([7, 3, 40, 12])
    tensors = exit_tensors([2])
    add_exits(bundle_maker, tensors, depth=2)
    exit_ = kind_of(bundle_maker, target).attach({}).lower
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(5)) * 4

    def normed(x, weight):
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
    z = normed(x, tensors['2.input_norm'])
    gate, up = (z @ tensors['2.gate_up'].T).chunk(2, -1)
    z = z + (torch.nn.functional.silu(gate) * up) @ tensors['2.down'].T
    expected = normed(z, tensors['2.norm']) @ dense(target.model.head)[[7, 3, 40, 12]].T
    assert torch.allclose(exit_.logits(x), expected, atol=1e-3)


def test_it_says_tokens_of_the_trimmed_vocabulary_and_of_the_text(bundle_maker, target, greedy):
    bundle_maker.add_head(list(range(0, REAL_VOCABULARY, 2)))
    add_exits(bundle_maker, exit_tensors([1, 3]), depth=1, check=3)
    kind = kind_of(bundle_maker, target)
    engine = Engine(target, 99, 4, kind.depths, iter(range(10 ** 9)).__next__, stops=kind.stops)
    drafter, seen = kind.attach({}), set()
    list(engine.prefill(list(PROMPTS[1])))
    for _ in range(10):
        seen.update(drafter.propose(engine.state, 4).tokens)
        engine.step(drafter, 4, 50, frozenset())
    assert all(token % 2 == 0 or token in engine.state.tokens for token in seen)
    assert engine.state.output == greedy(PROMPTS[1], len(engine.state.output))


@pytest.mark.parametrize('changes, reason', [
    ({'depth': 0}, 'depth is 0, expected 1..3'), ({'depth': 4}, 'depth is 4'),
    ({'depth': 'two'}, "depth is 'two'"), ({'check': 1}, 'check is 1, expected 3..3'),
    ({'check': 4}, 'check is 4'), ({'run': 0}, 'run is 0'), ({'depths': 3}, "'depths'")])
def test_options_that_do_not_fit_are_named(bundle_maker, target, changes, reason):
    add_exits(bundle_maker, **{'depth': 2, **changes})
    with pytest.raises(BundleError, match=reason):
        kind_of(bundle_maker, target)


@pytest.mark.parametrize('tensors, reason', [
    (exit_tensors([1]), r'2.norm is missing; there are exits after 1 layers'),
    (exit_tensors([2], width=32), r'2.norm is \(32,\), this target needs \(64,\)'),
    ({**exit_tensors([2]), '2.down': torch.zeros(64, 5)}, r'2.down is \(64, 5\)'),
    ({**exit_tensors([2]), '2.norm': torch.full((64,), float('nan'))}, 'no numbers')])
def test_files_that_do_not_fit_are_named(bundle_maker, target, tensors, reason):
    add_exits(bundle_maker, tensors, depth=2)
    with pytest.raises(BundleError, match=reason):
        kind_of(bundle_maker, target)


def test_manifests_that_do_not_fit_are_named(bundle_maker):
    section = add_exits(bundle_maker, exit_tensors([2]), depth=2)
    for changes, reason in (
            ({'bytes': 3}, 'self.*truncated or was replaced'), ({'sha256': 'a' * 64}, 'sha256'),
            ({'path': 'none.safetensors'}, 'does not exist'), ({'colour': 1}, "'colour'"),
            ({'licence': ''}, 'licence is empty')):
        bundle_maker.manifest['self_speculation'] = {**section, **changes}
        with pytest.raises(BundleError, match=reason):
            load_bundle(bundle_maker.write())
    bundle_maker.manifest['self_speculation'] = section
    bundle_maker.add_draft('self', 'prompt_lookup')
    with pytest.raises(BundleError, match="'self' belongs to self_speculation"):
        load_bundle(bundle_maker.write())
    bundle_maker.manifest['drafts'] = []
    bundle_maker.add_draft('mine', 'self_speculation', options={'depth': 1})
    with pytest.raises(BundleError, match="'mine'.*section 'self_speculation'"):
        load_bundle(bundle_maker.write())


def test_a_generic_target_cannot_pause(model_dirs):
    generic = load_target(model_dirs / 'target', torch.float32, torch.device('cpu'), 64, True)
    with pytest.raises(UnsupportedModelError, match='lean path'):
        KINDS['self_speculation'](spec_of({'depth': 2}), NO_HEAD, generic, 64)
    with pytest.raises(UnsupportedModelError, match='lean path'):
        generic.new_state(64, frozenset(), frozenset({2}))


# --- when it drafts ---

class Bridge(FakeDrafter):
    """A draft as self-speculation is one."""

    bridges = True

    def lag(self, state):
        return 0


def bridge(guess, step_sec=0.001):
    return FakeKind(lambda: Bridge(guess, step_sec=step_sec), slot_free=True)


def slotted(guess):
    return FakeKind(lambda: FakeDrafter(guess))


def drafts_of(chunks):
    return [chunk.step.draft for chunk in chunks if chunk.step]


def controlled(drafts, ranked, capacity=1, on=True, **options):
    bench = Bench(drafts, capacity, rank=lambda context: [(d, 0.5) for d in ranked], **options)
    bench.settings.self_speculation = on
    return bench


def test_it_drafts_until_a_loaded_draft_is_there():
    bench = controlled({'a': slotted(counting), 'self': bridge(counting)}, 'a',
                       script={'a': [(0.5, 'ok')]})
    _, _, last, chunks = bench.run(max_new_tokens=60)
    order = drafts_of(chunks)
    assert order[0] == 'self' and order[-1] == 'a'
    assert order == sorted(order, key=lambda name: name == 'a')  # never again once a is there
    # The wanted draft was not there: that is what fallback means.
    assert last.stats.fallback_sec > 0 and last.stats.drafts['self'].accepted > 0


def test_it_drafts_where_none_may_be_loaded_and_where_a_load_has_failed():
    for bench in (controlled({'a': slotted(counting), 'self': bridge(counting)}, 'a', 0),
                  controlled({'a': slotted(counting), 'self': bridge(counting)}, 'a',
                             script={'a': [(0.1, 'no such file')]}),
                  controlled({'self': bridge(counting)}, '')):
        *_, chunks = bench.run(max_new_tokens=60)
        assert set(drafts_of(chunks)) == {'self'}
        ids, *_ = bench.run(max_new_tokens=20)
        assert ids == [counting([2 + i + 1]) for i in range(20)]


def test_it_stays_out_of_sight_where_it_is_switched_off_or_nothing_is_to_be_drafted():
    drafts = {'a': slotted(counting), 'self': bridge(counting)}
    assert set(drafts_of(controlled(drafts, 'a', 0, on=False).run()[3])) == {''}
    bench = controlled(drafts, 'a', 0)
    bench.settings.speculate = False
    assert set(drafts_of(bench.run()[3])) == {''}


def test_where_it_does_not_pay_decoding_is_plain():
    bench = controlled({'self': bridge(lambda prefix: 0, step_sec=0.05)}, '', 0, adaptive=True)
    *_, chunks = bench.run(max_new_tokens=200)
    order = drafts_of(chunks)
    assert order[30:].count('self') <= len(order) // 16 + 1  # looked at now and then


@pytest.mark.parametrize('copied, wins', [(counting, 'copier'), (lambda prefix: 0, 'self')])
def test_the_better_of_copying_and_self_speculation_drafts(copied, wins):
    class Copier(FakeDrafter):
        copies = True

        def match(self, state):
            return 5

        def lag(self, state):
            return 0
    bench = controlled({'copier': FakeKind(lambda: Copier(copied), slot_free=True),
                        'self': bridge(counting, step_sec=0.02)}, ['copier'], 0, adaptive=True)
    *_, chunks = bench.run(max_new_tokens=120)
    order = drafts_of(chunks)[10:]
    assert order.count(wins) > 0.8 * len(order)


def test_one_that_fails_is_given_up_and_tried_again_later():
    kind = FakeKind(lambda: Bridge(counting, trouble={'propose': 2}), slot_free=True)
    bench = controlled({'self': kind}, '', 0)
    _, _, last, chunks = bench.run(max_new_tokens=60)
    assert last.stats.output_tokens == 60 and len(kind.attached) > 1
    assert {'self', ''} == set(drafts_of(chunks))


def test_its_verify_is_not_taken_for_a_faster_machine():
    """It skips what drafting has run: no reason to think that all verifies are cheaper now."""
    from memspec_ros.decoding.draft_length import DraftLength
    from memspec_ros.decoding.stats import StepRecord
    length = DraftLength(4)
    for rows in range(1, 6):
        length.calibrate(rows, 1.0)
    for _ in range(50):
        length.observe(StepRecord('self', '', 9, 4, 4, 5, t_draft=0.4, t_verify=0.5, ahead=4))
    assert length.verify_cost(1) == pytest.approx(1.0)
    assert length.speed('self', 4) == pytest.approx(
        length.expected_tokens('self', 4) / (0.4 + 0.5))


@pytest.mark.parametrize('exits', [None, [1, 3]])
def test_a_runtime_without_drafts_speculates(bundle_maker, exits, greedy):
    bundle_maker.add_head(list(range(REAL_VOCABULARY)))
    add_exits(bundle_maker, exits and exit_tensors(exits), depth=1, check=3)
    settings = Settings(cache_capacity=0, self_speculation=True)
    runtime = Runtime.open(bundle_maker.write(), RuntimeOptions(
        device='cpu', dtype='float32', context=300, adaptive=False, threads=1,
        settings=settings))
    try:
        request = runtime.prepare(GenerationRequest(prompt='the robot', max_new_tokens=40))
        chunks = list(runtime.controller.generate(request))
        ids = [token for chunk in chunks for token in chunk.token_ids]
        assert ids == greedy(request.prompt_ids, len(ids))
        assert chunks[-1].stats.drafts['self'].proposed > 0
        view, = runtime.controller.residency.view()
        assert (view.id, view.slot_free) == ('self', True)
        assert runtime.controller.residency.used_bytes() == 0
    finally:
        runtime.close()


def test_where_old_positions_are_rounded_or_dropped_there_is_none(bundle_maker):
    add_exits(bundle_maker, depth=1)
    bundle = bundle_maker.write()
    for kv, there in ((EXACT, ['self']), (KVOptions(int8_after=64), []),
                      (KVOptions(window=64), [])):
        runtime = Runtime.open(bundle, RuntimeOptions(
            device='cpu', dtype='float32', context=256, threads=1, kv=kv,
            settings=Settings(cache_capacity=0, self_speculation=True)))
        try:
            assert list(runtime.controller.residency.slot_free) == there
            request = runtime.prepare(GenerationRequest(prompt='the robot', max_new_tokens=8))
            assert list(runtime.controller.generate(request))[-1].finish is not None
        finally:
            runtime.close()


def test_info_tells_of_the_exits(bundle_maker, capfd):
    from memspec_ros.cli import main
    add_exits(bundle_maker, depth=1, check=3)
    assert main(['info', '--bundle', str(bundle_maker.write())]) == 0
    assert 'exits   after 1 layers, checked after 3, 0.0 MB' in capfd.readouterr().out


# --- the benchmark ---

def test_where_an_answer_parts_from_the_plain_one_the_gap_is_told(bundle_maker):
    from memspec_ros.bench.equivalence import plain_gap
    runtime = Runtime.open(bundle_maker.write(), RuntimeOptions(
        device='cpu', dtype='float32', context=128, threads=1))
    try:
        request = runtime.prepare(GenerationRequest(prompt='the robot', max_new_tokens=8))
        plain = [token for chunk in runtime.controller.generate(request)
                 for token in chunk.token_ids]
        assert plain_gap(runtime, request.prompt_ids, plain[:5], plain) == float('inf')
        state = runtime.controller.engine.state
        for place in (0, 3):
            list(runtime.controller.engine.prefill([*request.prompt_ids, *plain[:place]]))
            row = runtime.target.forward(state, state.tokens[-1:])[-1]
            other = int(row.argsort()[-5])
            found = plain_gap(runtime, request.prompt_ids,
                              [*plain[:place], other, *plain[place + 1:]], plain)
            assert found == pytest.approx(float(row.max() - row[other]), abs=1e-5) and found > 0
    finally:
        runtime.close()


def test_the_benchmark(bundle_maker, prompts, tmp_path, monkeypatch, capsys):
    import json

    from memspec_ros.cli import main
    monkeypatch.setenv('MEMSPEC_CACHE', str(tmp_path / 'cache'))
    arguments = ['bench', 'self-speculation', '--prompts', str(prompts), '--bundle',
                 str(bundle_maker.write()), '--dtype', 'float32', '--max-new-tokens', '12',
                 '--context', '128', '--draft-tokens', '3', '--fixed-draft-length',
                 '--threads', '1', '--offload-mib', '0.4', '--storage-latency-ms', '8',
                 '--json', str(tmp_path / 'out.json')]
    assert main(arguments) == 1
    assert 'tiny has no exits' in capsys.readouterr().err
    bundle_maker.add_draft('lookup', 'prompt_lookup')
    add_exits(bundle_maker, depth=1)  # what stays in memory
    bundle_maker.write()
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert '4 of 4 layers in memory' in out and '1 of 4 layers in memory' in out
    assert '5.08x offloaded' in out
    result = json.loads((tmp_path / 'out.json').read_text())
    whole, part = result['parts']
    for figures in (whole, part):
        assert figures['outputs_differing_from_plain'] == {'lookup': 0, 'self': 0, 'both': 0}
        assert figures['gaps'] == {'lookup': [], 'self': [], 'both': []}
        assert set(figures['domains']) == {'general', 'code'}
        assert 0 <= figures['acceptance'] <= 1 <= figures['tokens_per_pass']
    assert part['plain_tps'] < whole['plain_tps']  # three layers come at the pace of storage
    # Drafting reads nothing from storage: whatever is accepted, little is lost.
    assert part['speed_up']['self'] > 0.7
    assert main([*arguments, '--offload-mib', '-1']) == 1
    assert '--offload-mib is -1' in capsys.readouterr().err
