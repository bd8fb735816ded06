# SPDX-License-Identifier: Apache-2.0
"""A bundle opened and run: real models, a real loader thread, the same text as transformers."""

import json
import threading
import time

from conftest import REAL_VOCABULARY
from fakes import GatedStore
import pytest
import torch

from memspec_ros.models.bundle import load_bundle
from memspec_ros.models.tokenizer import Tokenizer
from memspec_ros.runtime.policies import Plan, Policy
from memspec_ros.runtime.requests import Finish, GenerationRequest
from memspec_ros.runtime.runtime import (
    choose_device,
    choose_dtype,
    Runtime,
    RuntimeOptions,
    stop_ids_of,
)
from memspec_ros.runtime.settings import Settings
from memspec_ros.runtime.storage import FileStore

TEXTS = ['the red cube', 'def add(a, b): return a + b', 'grüße 😀', 'a b a b a b a b']


class Rotating(Policy):
    """Wants another draft at every boundary, so that drafts are switched and loaded meanwhile."""

    def __init__(self, drafts):
        self.drafts, self.turn = list(drafts), 0

    def plan(self, context):
        self.turn += 1
        shift = self.turn % len(self.drafts)
        order = self.drafts[shift:] + self.drafts[:shift]
        return Plan([(draft, 0.9 - i / 10) for i, draft in enumerate(order)])


def options(**changes):
    return RuntimeOptions(**{'device': 'cpu', 'dtype': 'float32', 'context': 200,
                             'adaptive': False, **changes})


def file_store(directory):
    bundle = load_bundle(directory)
    return FileStore({spec.id: (bundle.weight_file(spec), spec.sha256)
                      for spec in bundle.drafts if spec.path})


@pytest.fixture(scope='module')
def expected(reference, tokenizer_dir):
    """Text -> (ids, text) as ``transformers`` greedy decoding and its tokenizer have it."""
    tokenizer = Tokenizer(tokenizer_dir)
    known = {}

    def generate(text, count):
        if (text, count) not in known:
            ids = tokenizer.encode_chat([{'role': 'user', 'content': text}])
            with torch.inference_mode():
                out = reference.generate(torch.tensor([ids]), do_sample=False,
                                         max_new_tokens=count, eos_token_id=2, pad_token_id=0)
            out = out[0, len(ids):].tolist()
            known[text, count] = out, tokenizer.decode(out)
        return known[text, count]
    return generate


def answer(runtime, text, count, **request):
    prepared = runtime.prepare(GenerationRequest(text, max_new_tokens=count, **request))
    chunks = list(runtime.controller.generate(prepared))
    return ([token for chunk in chunks for token in chunk.token_ids],
            ''.join(chunk.text for chunk in chunks), chunks[-1])


@pytest.mark.parametrize('capacity', [0, 1, 2, 4])
@pytest.mark.parametrize('gamma', [1, 4])
def test_output_equals_transformers_while_drafts_load_and_switch(
        full_bundle, expected, capacity, gamma):
    """Each load is let through after some chunks: switches fall in the middle of answers."""
    store = GatedStore(file_store(full_bundle))
    runtime = Runtime.open(full_bundle, options(
        max_gamma=gamma, settings=Settings(capacity, 2)), store=store)
    try:
        drafts = [spec.id for spec in runtime.bundle.drafts]
        runtime.controller.policy = Rotating(drafts)
        switches = drafted = 0
        for text in TEXTS:
            ids, seen = [], 0
            prepared = runtime.prepare(GenerationRequest(text, max_new_tokens=40))
            for chunk in runtime.controller.generate(prepared):
                ids += chunk.token_ids
                seen += 1
                assert len(runtime.controller.residency.resident) <= capacity
                if seen % 3 == 0 and runtime.controller.residency.loading:
                    store.gate.release()
                    runtime._loader.wait(10.0)
            assert ids == expected(text, 40)[0]
            assert chunk.finish in (Finish.LENGTH, Finish.STOP)
            switches, drafted = switches + chunk.stats.switches, drafted + chunk.stats.drafted
        assert drafted > 0
        if capacity:
            assert switches > 1 and len(store.reads) > 1
    finally:
        runtime.close()


@pytest.fixture(scope='module')
def runtime(full_bundle):
    runtime = Runtime.open(full_bundle, options())
    yield runtime
    runtime.close()


@pytest.mark.parametrize('text', TEXTS)
def test_ids_text_and_chunks_agree_with_the_reference(runtime, expected, text):
    ids, shown, last = answer(runtime, text, 30)
    assert (ids, shown) == expected(text, 30)
    assert last.stats.output_tokens == len(ids)
    assert last.stats.prompt_tokens == len(runtime.prepare(GenerationRequest(text)).prompt_ids)


def test_a_conversation_goes_on_from_its_cache(runtime, expected, reference):
    first = answer(runtime, TEXTS[0], 12)[1]
    history = [('user', TEXTS[0]), ('assistant', first)]
    prepared = runtime.prepare(GenerationRequest('and then?', history=history, max_new_tokens=10))
    chunks = list(runtime.controller.generate(prepared))
    with torch.inference_mode():
        out = reference.generate(torch.tensor([prepared.prompt_ids]), do_sample=False,
                                 max_new_tokens=10, eos_token_id=2, pad_token_id=0)
    assert [t for c in chunks for t in c.token_ids] == out[
        0, len(prepared.prompt_ids):].tolist()
    assert chunks[-1].stats.cached_tokens > 10


def test_stop_strings_cut_real_text(runtime, expected):
    ids, text = expected(TEXTS[0], 30)
    for start in range(0, len(text) - 2, 4):
        stop = text[start:start + 2]
        kept, shown, last = answer(runtime, TEXTS[0], 30, stop=(stop,))
        assert shown == text[:text.index(stop)] and last.finish is Finish.STOP
        assert kept == ids[:len(kept)]


def test_the_cli_plain_mode_equals_speculation(full_bundle, expected):
    plain = Runtime.open(full_bundle, options(max_gamma=0))
    try:
        ids, _, last = answer(plain, TEXTS[1], 20)
        assert ids == expected(TEXTS[1], 20)[0]
        assert last.stats.drafted == 0 and plain.controller.residency.view() == []
    finally:
        plain.close()


def test_a_generic_target_runs_the_drafts_that_bring_their_own_layers(
        bundle_maker, model_dirs, expected):
    import shutil
    shutil.copytree(model_dirs / 'near', bundle_maker.directory / 'near')
    bundle_maker.add_draft('near', 'causal_lm', 'near')
    bundle_maker.add_draft('lookup', 'prompt_lookup')
    runtime = Runtime.open(bundle_maker.write(), options(generic_target=True))
    try:
        for _ in range(2):
            ids, _, last = answer(runtime, TEXTS[0], 25)
            assert ids == expected(TEXTS[0], 25)[0]
            runtime._loader.wait(10.0)
        assert last.stats.accepted > 0
    finally:
        runtime.close()


def test_a_draft_whose_file_is_damaged_after_configure_fails_alone(
        full_bundle, tmp_path, expected):
    import shutil
    shutil.copytree(full_bundle, tmp_path / 'bundle')
    runtime = Runtime.open(tmp_path / 'bundle', options(settings=Settings(4, 1)))
    try:
        file = tmp_path / 'bundle' / 'top.safetensors'
        file.write_bytes(file.read_bytes()[:1000])
        for _ in range(5):
            ids, _, last = answer(runtime, TEXTS[0], 20)
            assert ids == expected(TEXTS[0], 20)[0] and last.finish is Finish.LENGTH
            runtime._loader.wait(10.0)
        views = {view.id: view for view in runtime.controller.residency.view()}
        assert views['top'].state.name == 'FAILED' and 'top.safetensors' in views['top'].reason
        assert views['near'].state.name == 'READY'
    finally:
        runtime.close()


def test_bfloat16_runs_every_kind(full_bundle):
    runtime = Runtime.open(full_bundle, options(dtype='bfloat16', settings=Settings(4, 1)))
    try:
        runtime.controller.policy = Rotating([s.id for s in runtime.bundle.drafts])
        for _ in range(3):
            ids, _, last = answer(runtime, TEXTS[0], 30)
            assert last.finish in (Finish.LENGTH, Finish.STOP) and ids
            runtime._loader.wait(10.0)
        assert last.stats.drafted > 0 and last.stats.accepted > 0
    finally:
        runtime.close()


def test_opening_tells_of_its_progress_and_closing_ends_the_thread(full_bundle):
    stages = []
    before = threading.active_count()
    runtime = Runtime.open(full_bundle, options(), progress=lambda *told: stages.append(told))
    assert threading.active_count() == before + 1
    runtime.close()
    assert threading.active_count() == before
    fractions = [fraction for _, fraction in stages]
    assert stages[0][0] == 'reading the bundle' and stages[-1] == ('ready', 1.0)
    assert fractions == sorted(fractions)


def test_closing_while_a_load_hangs_is_quick(full_bundle):
    runtime = Runtime.open(full_bundle, options(), store=GatedStore())
    answer(runtime, TEXTS[0], 3)
    assert runtime.controller.residency.loading is not None
    start = time.monotonic()
    runtime.close()
    assert time.monotonic() - start < 5.0


def test_the_context_is_no_longer_than_the_model_allows(full_bundle):
    runtime = Runtime.open(full_bundle, options(context=100_000))
    assert runtime.options.context == 512
    runtime.close()


@pytest.mark.parametrize('config, generation, expected_ids', [
    ({}, None, {2}), ({'eos_token_id': 5}, None, {2, 5}), ({'eos_token_id': [5, 6]}, None,
                                                           {2, 5, 6}),
    ({'eos_token_id': None}, {'eos_token_id': [7, 8]}, {2, 7, 8}),
    ({'eos_token_id': 5}, {'eos_token_id': 9}, {2, 5, 9}), ({}, {}, {2})])
def test_stop_ids_come_from_every_place_that_names_them(
        tmp_path, tokenizer_dir, config, generation, expected_ids):
    (tmp_path / 'config.json').write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / 'generation_config.json').write_text(json.dumps(generation))
    assert stop_ids_of(tmp_path, Tokenizer(tokenizer_dir)) == expected_ids


def test_devices_and_types():
    cpu = torch.device('cpu')
    assert choose_device('cpu') == cpu
    assert choose_dtype('float32', cpu) is torch.float32
    assert choose_dtype('auto', cpu) in (torch.bfloat16, torch.float32)


PROMPTS_OF_ALL_DOMAINS = (
    'Write a Python function that reverses a string, then explain what it costs.',
    'Fix this code: for i in range(10) print(i)',
    'Write a class for a queue in Java and say what each method does.',
    'What does `git rebase` do?',
    'A train travels 60 km in 45 minutes. What is its average speed in km/h?',
    'Solve 3x + 7 = 22 and show each step.',
    'What is the probability of two sixes with two dice?',
    'Bring me the red cup from the kitchen table.',
    'How do I list all ROS 2 topics, and how do I read one of them?',
    'The robot is stuck in front of a closed door. What should it do?',
    'Turn off the lights in the living room and close the blinds.',
    'What is a costmap used for in navigation?',
    'Why is the sky blue?',
    'Name five animals that live in the desert.',
    'Translate to French: The weather is nice today.',
    'Write a short poem about the sea.',
    'Summarise: The meeting was moved from Monday to Wednesday since two people were ill.',
    'What is the difference between a contract and an agreement?',
    'What are common symptoms of the flu?',
    'Rewrite politely: Give me the report now.',
)


@pytest.mark.slow
def test_the_default_bundle_equals_transformers():
    """The shipped drafts on the shipped target, in float32, loaded and switched meanwhile."""
    from transformers import AutoModelForCausalLM
    runtime = Runtime.open(None, options(context=512, settings=Settings(2, 2)))
    drafted = switches = loads = 0
    try:
        model = AutoModelForCausalLM.from_pretrained(runtime.bundle.target_path,
                                                     dtype=torch.float32)
        for text in PROMPTS_OF_ALL_DOMAINS:
            prepared = runtime.prepare(GenerationRequest(text, max_new_tokens=64))
            chunks = list(runtime.controller.generate(prepared))
            with torch.inference_mode():
                out = model.generate(
                    torch.tensor([prepared.prompt_ids]), do_sample=False, max_new_tokens=64,
                    eos_token_id=sorted(runtime.controller.stop_ids), pad_token_id=0)
            assert [t for c in chunks for t in c.token_ids] == out[
                0, len(prepared.prompt_ids):].tolist(), text
            stats = chunks[-1].stats
            drafted, switches = drafted + stats.drafted, switches + stats.switches
            loads += stats.loads
        assert drafted > 0 and switches > 0 and loads > 2
    finally:
        runtime.close()


def test_the_fixtures_answers_hold_real_ids(expected):
    for text in TEXTS:
        assert max(expected(text, 40)[0]) < REAL_VOCABULARY
