# SPDX-License-Identifier: Apache-2.0
"""Draft files that are whole and wrong: that draft fails by name, answers stay what they are."""

from __future__ import annotations

from conftest import REAL_VOCABULARY
import pytest
import torch

from memspec_ros.models.fingerprint import TARGET_KEY
from memspec_ros.runtime.requests import GenerationRequest
from memspec_ros.runtime.residency import SlotState
from memspec_ros.runtime.runtime import Runtime, RuntimeOptions
from memspec_ros.runtime.settings import Settings
from memspec_ros.runtime.storage import check_numbers
from memspec_ros.training.lessons import TopShape
from memspec_ros.training.teacher import write_whole
from memspec_ros.training.tops import make_top


def nan(tensors):
    tensors['layers.0.down'][3, 5] = torch.nan


def infinite(tensors):
    tensors['norm'][7] = -torch.inf


def missing(tensors):
    del tensors['layers.0.qkv']


def narrower(tensors):
    tensors['norm'] = tensors['norm'][:-8]


# What is done to its tensors, its metadata, and what the reason says.
FAULTS = {
    'NaN': (nan, {}, 'bad.safetensors: layers.0.down holds values that are no numbers'),
    'infinite': (infinite, {}, 'norm holds values that are no numbers'),
    'missing': (missing, {}, "draft 'bad': tensor layers.0.qkv is missing"),
    'narrower': (narrower, {}, 'it was made for another one'),
    'of another target': (lambda tensors: None, {TARGET_KEY: 'ab' * 32},
                          "draft 'bad' was distilled for another target: its file names abababab")}


def answer(runtime):
    request = runtime.prepare(GenerationRequest('the red cube', max_new_tokens=20))
    chunks = list(runtime.controller.generate(request))
    return [token for chunk in chunks for token in chunk.token_ids], chunks[-1].stats


@pytest.mark.parametrize('fault', FAULTS)
def test_it_fails_by_name_and_the_others_serve(bundle_maker, trainable, caplog, fault):
    spoil, metadata, reason = FAULTS[fault]
    bundle_maker.add_head(list(range(REAL_VOCABULARY)))
    for name in ('bad', 'good'):
        tensors = make_top(trainable.model, TopShape('shared_layers', 2, 1),
                           range(REAL_VOCABULARY)).export()
        if name == 'bad':
            spoil(tensors)
        write_whole(bundle_maker.directory / f'{name}.safetensors', tensors,
                    metadata if name == 'bad' else {})
        bundle_maker.add_draft(name, 'shared_layers', f'{name}.safetensors',
                               options={'depth': 2, 'layers': 1})
    options = {'device': 'cpu', 'dtype': 'float32', 'context': 200}
    plain = Runtime.open(bundle_maker.write(), RuntimeOptions(**options, max_gamma=0))
    expected, _ = answer(plain)
    plain.close()
    runtime = Runtime.open(bundle_maker.directory, RuntimeOptions(
        **options, settings=Settings(2, 1), adaptive=False))
    try:
        for _ in range(10):
            tokens, stats = answer(runtime)
            assert tokens == expected
            runtime._loader.wait(10.0)
            if list(stats.drafts) == ['good'] and (
                    runtime.controller.residency.view()[0].state is SlotState.FAILED):
                break
        views = {view.id: view for view in runtime.controller.residency.view()}
        assert views['bad'].state is SlotState.FAILED and reason in views['bad'].reason
        assert views['good'].state is SlotState.READY and list(stats.drafts) == ['good']
        assert reason in caplog.text
    finally:
        runtime.close()


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_large_sums_and_whole_numbers_are_sound(tmp_path, dtype):
    check_numbers(tmp_path, {'large': torch.full((4000,), 6e4, dtype=dtype),
                             'empty': torch.empty(0, dtype=dtype),
                             'whole': torch.arange(5)})
