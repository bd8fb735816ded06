# SPDX-License-Identifier: Apache-2.0
"""Old keys and values in INT8, or evicted: the same with drafts as without, and less memory."""

from __future__ import annotations

from conftest import PROMPTS
import pytest
import torch

from memspec_ros.decoding.sampling import Sampling
from memspec_ros.memory.footprint import Demand, FootprintModel
from memspec_ros.models.bundle import load_bundle
from memspec_ros.models.drafts import KINDS
from memspec_ros.models.errors import (
    ContextOverflowError,
    InvalidRequestError,
    UnsupportedModelError,
)
from memspec_ros.models.int8_cache import Int8KVCache, quantise
from memspec_ros.models.kv_options import BLOCK, KVOptions
from memspec_ros.models.target_files import locate_target
from memspec_ros.models.weights import read_tensors
from memspec_ros.runtime.requests import Finish, GenerationRequest, prepare, PreparedRequest
from memspec_ros.runtime.runtime import Runtime, RuntimeOptions
from memspec_ros.runtime.settings import Settings

CPU = torch.device('cpu')
INT8 = KVOptions(int8_after=16)
WINDOW = KVOptions(window=40)
FULL = KVOptions(window=-1)
BOTH = KVOptions(int8_after=24, sinks=3, window=100)
EVERY = {'int8': INT8, 'window': WINDOW, 'full': FULL, 'both': BOTH}
CONTEXT = 180
LONG = 190
GREEDY = Sampling()


def open_runtime(full_bundle, kv, policy='memspec', gamma=4, **options):
    return Runtime.open(full_bundle, RuntimeOptions(
        dtype='float32', context=512 if kv == INT8 else CONTEXT, adaptive=False, policy=policy,
        max_gamma=gamma, kv=kv, settings=Settings(2, 2), **options))


def ask(controller, prompt, count=LONG, session='', sampling=GREEDY):
    chunks = list(controller.generate(PreparedRequest(
        list(prompt), '', count, ignore_eos=True, session=session, sampling=sampling)))
    assert chunks[-1].finish is Finish.LENGTH, chunks[-1].message
    return [token for chunk in chunks for token in chunk.token_ids], chunks[-1].stats


@pytest.fixture(scope='module')
def plain(full_bundle):
    """(options, prompt, count, sampling) -> output without speculation, from a cold start."""
    runtimes = {}

    def generate(kv, prompt, count=LONG, sampling=GREEDY):
        if kv not in runtimes:
            runtimes[kv] = open_runtime(full_bundle, kv, gamma=0)
        controller = runtimes[kv].controller
        controller.reset()
        return ask(controller, prompt, count, sampling=sampling)[0]
    yield generate
    for runtime in runtimes.values():
        runtime.close()


# --- pitfall 9: drafts change nothing ---

@pytest.mark.parametrize('name', EVERY)
def test_speculation_changes_nothing(full_bundle, plain, name):
    """Over several blocks and evictions, whoever drafts, trees and several sizes of blocks."""
    kv = EVERY[name]
    runtime = open_runtime(full_bundle, kv)
    controller = runtime.controller
    try:
        output, stats = ask(controller, PROMPTS[3])
        assert output == plain(kv, PROMPTS[3])
        dropped = controller.engine.state.dropped
        assert stats.accepted > 20
        if name == 'both':
            sampling = Sampling(temperature=0.8, seed=5, repetition_penalty=1.2)
            assert (ask(controller, PROMPTS[1], sampling=sampling)[0]
                    == plain(kv, PROMPTS[1], sampling=sampling))
        assert (dropped > 0) == kv.evicts
        assert not kv.exact
    finally:
        runtime.close()


@pytest.mark.parametrize('draft', ['near', 'top', 'feature', 'lookup', *(
    pytest.param(draft, marks=pytest.mark.slow) for draft in ('far', 'noise', 'embedded'))])
def test_every_kind_of_draft_outlives_evictions(full_bundle, plain, draft):
    """Its own cache and the hidden states it reads move along: it goes on being right."""
    runtime = open_runtime(full_bundle, BOTH)
    controller = runtime.controller
    controller.settings.copy = draft == 'lookup'
    try:
        residency = controller.residency
        if draft != 'lookup':
            residency.update([(draft, 1.0)], None)
            while residency.loading is not None:
                residency.wait(1.0)
                residency.poll()
        engine, drafter = controller.engine, residency.drafter(draft)
        for _ in engine.prefill(PROMPTS[3]):
            pass
        drafter.begin(engine.state)
        output, accepted = [], []
        while len(output) < LONG:
            tokens, step = engine.step(drafter, 4, LONG - len(output), frozenset())
            output += tokens
            accepted.append(step.accepted / max(1, step.drafted))
        assert output == plain(BOTH, PROMPTS[3]) and engine.state.dropped >= 2 * BLOCK
        assert drafter.lag(engine.state) <= max(1, drafter.rows_with_proposal)
        if draft == 'top':  # its layers are the target's own
            late = accepted[-len(accepted) // 4:]
            assert sum(late) / len(late) > 0.5
    finally:
        runtime.close()


@pytest.mark.parametrize('name', EVERY)
def test_a_row_reads_the_same_alone_and_with_others(target, name):
    """Prefilled in large pieces and one by one: the same logits at every position."""
    kv = EVERY[name]
    tokens = [(7 * i * i + 3 * i) % 300 for i in range(300)]
    logits = []
    for chunk in (64, 5):
        state = target.new_lossy_state(kv, CONTEXT if kv.evicts else 420, 8)
        state.tokens = list(tokens)
        rows = []
        while state.held < state.last:
            state.make_room()
            end = min(state.held + min(chunk, state.reach), state.last)
            rows.append(target.forward(state, state.read(state.held, end)))
            state.hold(end)
        logits.append(torch.cat(rows))
    for other in logits[1:]:
        # The last bit of a product may tip a number that lies between two INT8 steps.
        tolerance = 0.05 if kv.int8_after else 2e-3
        torch.testing.assert_close(other, logits[0], atol=tolerance, rtol=1e-3)
        assert torch.equal(other.argmax(-1), logits[0].argmax(-1))


# --- what is kept, and where it stands ---

def run(target, state, tokens):
    state.tokens = list(tokens)
    while state.held < state.last:
        state.make_room()
        end = min(state.held + min(64, state.reach), state.last)
        target.forward(state, state.read(state.held, end), last_only=True)
        state.hold(end)
    return state


@pytest.mark.parametrize('name', EVERY)
def test_keys_stand_where_positions_are_after_evictions(target, name):
    """Of the first layer they follow from token and position alone: as if read afresh."""
    kv, tokens = EVERY[name], [(11 * i + 5) % 300 for i in range(390)]
    state = run(target, target.new_lossy_state(kv, CONTEXT if kv.evicts else 400, 8), tokens)
    left = state.read(0, state.held)
    fresh = run(target, target.new_state(400), [*left, 0])
    if kv.evicts:
        assert state.dropped and state.held <= kv.positions(CONTEXT)
        assert left == tokens[:kv.sinks] + tokens[kv.sinks + state.dropped:389]
        assert len(left) - kv.sinks >= (kv.window if kv.window > 0 else BLOCK)
    else:
        assert left == tokens[:389]
    one = torch.zeros(1, 2, 1, 16)
    kept = state.kv.extend(0, state.held, one, one)
    for mine, other in zip(kept, (fresh.kv.keys[0], fresh.kv.values[0])):
        off = (mine[:, :, :-1] - other[:, :, :len(left)]).abs()
        # Rounded up to four times, where a key was turned back.
        bound = other[:, :, :len(left)].abs().amax(-1, keepdim=True) / 254 * 4.5 + 1e-4
        assert bool((off <= bound).all())
        exact = slice(0, kv.sinks), slice(len(left) - kv.int8_after, None)
        for part in exact if kv.int8_after else [slice(None)]:
            assert float(off[:, :, part].max()) < 1e-4
        assert (float(off.max()) > 1e-4) == bool(kv.int8_after)


def test_int8_is_off_by_half_a_step_at_most():
    rows = torch.randn(2, 3, 50, 16) * torch.tensor([1e-3, 1.0, 100.0])[:, None, None]
    rows[0, 0, 0] = 0
    shadow, scales = quantise(rows)
    assert shadow.dtype == torch.int8 and bool((shadow[0, 0, 0] == 0).all())
    assert bool(((shadow * scales - rows).abs() <= scales * 0.501).all())
    assert bool((scales[..., 0] >= rows.abs().amax(-1) / 127.01).all())


def test_what_is_gone_cannot_be_rolled_back_to():
    """Pitfall 9: trimmed as far as exact rows reach, refused beyond, never made up."""
    cache = Int8KVCache(1, 1, 400, 4, torch.float32, CPU, recent=16, sinks=4, spare=4)
    row = torch.arange(400.0)[None, None, :, None].expand(1, 1, 400, 4)
    length = 0
    while length < 350:
        count = min(64, cache.reach(length), 350 - length)
        cache.extend(0, length, row[:, :, length:length + count], row[:, :, length:length + count])
        length += count
        cache.set_length(length)
    floor = cache.floor
    assert 350 - 2 * BLOCK - 16 <= floor <= 350 - BLOCK
    with pytest.raises(ValueError, match=f'below {floor}'):
        cache.set_length(floor - 1)
    cache.set_length(floor)
    # Other text from here on: rounded anew where its turn comes.
    other, edge_before, length = -row, floor, floor
    while length < 400:
        count = min(5, cache.reach(length), 400 - length)
        span = slice(length, length + count)
        keys, _ = cache.extend(0, length, other[:, :, span], other[:, :, span])
        length += count
        cache.set_length(length)
    edge = int((keys[0, 0, :, 0] < 0).nonzero()[0])
    assert edge == edge_before
    expected = torch.cat([row[0, 0, :edge, 0], other[0, 0, edge:, 0]])
    torch.testing.assert_close(keys[0, 0, :, 0], expected, atol=1e-3, rtol=5e-3)
    cache.set_length(0)
    assert cache.floor == 0


# --- conversations ---

@pytest.mark.parametrize('name', ['both', *(
    pytest.param(name, marks=pytest.mark.slow) for name in ('int8', 'window', 'full'))])
def test_conversations_go_on_where_they_ended(full_bundle, plain, name):
    kv = EVERY[name]
    runtime = open_runtime(full_bundle, kv)
    controller = runtime.controller
    try:
        texts = {'a': list(PROMPTS[3]), 'b': list(PROMPTS[1])}
        for turn in range(3):
            for session in texts:
                output, stats = ask(controller, texts[session], 90, session)
                assert output == plain(kv, texts[session], 90)
                if turn:
                    # A few tokens were taken back at most, as a chat template's tail is.
                    assert (stats.cached_tokens >= len(texts[session]) - 8
                            or stats.cached_tokens == 0 and kv.evicts)
                texts[session] += [*output[:-2], 9, 17]
        assert len(controller.sessions) == 1
        assert max(map(len, texts.values())) > CONTEXT
    finally:
        runtime.close()


@pytest.mark.parametrize('name', ['int8', 'window'])
def test_a_text_that_parts_early_is_read_again(full_bundle, plain, name):
    kv = EVERY[name]
    runtime = open_runtime(full_bundle, kv)
    try:
        output, _ = ask(runtime.controller, PROMPTS[3])
        again = [*PROMPTS[3], *output[:30], 7, 8, 9]
        second, stats = ask(runtime.controller, again)
        assert stats.cached_tokens == 0 and second == plain(kv, again)
    finally:
        runtime.close()


# --- requests, sizes, refusals ---

class OneByOne:
    size = 300

    def encode_chat(self, messages):
        return [1] * sum(len(message['content']) for message in messages)


def test_an_answer_may_outlast_the_context_and_a_prompt_may_not():
    def ids(count, evicts, **changes):
        return len(prepare(GenerationRequest('x' * count, max_new_tokens=500, **changes),
                           OneByOne(), 100, 0.0, evicts).prompt_ids)
    assert ids(90, True) == 90
    assert ids(90, True, history=[('user', 'y' * 300)]) == 390
    with pytest.raises(ContextOverflowError, match='101 tokens does not fit the context of 100'):
        ids(101, True)
    with pytest.raises(ContextOverflowError, match='390 tokens'):
        ids(90, False, history=[('user', 'y' * 300)])


@pytest.mark.parametrize(('kv', 'context', 'words'), [
    (KVOptions(window=-1), 100, 'takes a context of 132 tokens'),
    (KVOptions(window=256), 300, 'takes a context of 324 tokens'),
    (KVOptions(window=1024, sinks=8), 1024, 'takes a context of 1288 tokens')])
def test_a_window_that_does_not_fit_says_what_does(target, kv, context, words):
    with pytest.raises(InvalidRequestError, match=words):
        target.new_lossy_state(kv, context, 4)
    assert kv.positions(kv.least_context) <= kv.least_context


def test_a_target_through_transformers_refuses(model_dirs, bundle_maker):
    """Pitfall 9: what cannot be done is said, not left out."""
    with pytest.raises(UnsupportedModelError, match='int8 after 64.*lean path.*kv.int8_after'):
        Runtime.open(bundle_maker.write(), RuntimeOptions(
            dtype='float32', generic_target=True, kv=KVOptions(int8_after=64)))


def test_by_default_all_is_exact():
    assert KVOptions().exact and str(KVOptions()) == 'exact' and RuntimeOptions().kv.exact
    assert str(BOTH) == 'int8 after 24, 3 sinks and a window of 100'
    assert not any(kv.exact for kv in EVERY.values())


@pytest.mark.parametrize('kv', [*EVERY.values(), KVOptions()])
def test_the_footprint_is_what_is_allocated(full_bundle, kv):
    bundle = load_bundle(full_bundle)
    locate_target(bundle)
    footprint = FootprintModel(bundle, torch.float32, CPU).of(Demand(500, 4, 2, kv=kv))
    runtime = Runtime.open(full_bundle, RuntimeOptions(dtype='float32', context=500, kv=kv))
    try:
        state = runtime.controller.engine.state
        assert footprint.kv_cache == state.kv.bytes
        assert footprint.hidden_states == sum(rows.nbytes for rows in state.hidden.values())
    finally:
        runtime.close()


def test_they_take_less_memory(target):
    exact = target.new_state(4096).kv.bytes
    # Heads of 16 numbers have large scales relative to them, four layers a large scratch.
    assert target.new_lossy_state(KVOptions(int8_after=64), 4096, 9).kv.bytes < 0.65 * exact
    assert target.new_lossy_state(KVOptions(window=512), 4096, 9).kv.bytes < 0.2 * exact


def test_a_shared_layers_draft_moves_its_cache_along(full_bundle, target):
    bundle = load_bundle(full_bundle)
    locate_target(bundle)
    spec = bundle.draft('top')
    kind = KINDS[spec.kind](spec, bundle, target, 200)
    tensors = read_tensors(bundle.weight_file(spec), spec.sha256)
    state = target.new_lossy_state(WINDOW, CONTEXT, 8, kind.depths)
    mover, late = kind.attach(tensors), kind.attach(tensors)
    state.tokens = [(13 * i) % 300 for i in range(240)]
    while state.held < state.last:
        state.make_room()
        end = min(state.held + min(16, state.reach), state.last)
        target.forward(state, state.read(state.held, end))
        state.hold(end)
        mover.catch_up(state, mover.lag(state))
    late.catch_up(state, late.lag(state))
    assert state.dropped >= 2 * BLOCK and mover.cached == late.cached == state.held
    torch.testing.assert_close(mover.kv.keys[0, :, :, :state.held],
                               late.kv.keys[0, :, :, :state.held], atol=1e-4, rtol=1e-4)
