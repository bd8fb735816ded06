# SPDX-License-Identifier: Apache-2.0
"""Drafts know their target, and are refused by another one."""

from __future__ import annotations

import shutil

from conftest import build_llama, perturbed, REAL_VOCABULARY
from gptq_maker import write_gptq
import pytest
import torch

from memspec_ros.models.bundle import load_bundle
from memspec_ros.models.errors import BundleError
from memspec_ros.models.fingerprint import strangers, target_fingerprint, TARGET_KEY
from memspec_ros.runtime.requests import GenerationRequest
from memspec_ros.runtime.residency import SlotState
from memspec_ros.runtime.runtime import Runtime, RuntimeOptions
from memspec_ros.runtime.settings import Settings
from memspec_ros.training.lessons import TopShape
from memspec_ros.training.teacher import write_whole
from memspec_ros.training.tops import make_top


def saved(model, directory, dtype=torch.float32):
    model.to(dtype).save_pretrained(directory)
    return directory


def test_it_is_the_target_whatever_type_it_is_kept_in(tmp_path):
    """Also where its layers are quantised: drafts of the one are of use to the other."""
    name = target_fingerprint(saved(build_llama(3), tmp_path / 'float32'))
    assert len(name) == 64
    for dtype in (torch.bfloat16, torch.float16):
        assert target_fingerprint(saved(build_llama(3), tmp_path / str(dtype), dtype)) == name
    write_gptq(build_llama(3), tmp_path / 'gptq')
    assert target_fingerprint(tmp_path / 'gptq') == name


def test_another_one_has_another(tmp_path):
    model = build_llama(3)
    others = {'other weights': build_llama(4), 'trained on': perturbed(model, 0.01),
              'more layers': build_llama(3, num_hidden_layers=5)}
    names = [target_fingerprint(saved(other, tmp_path / name))
             for name, other in {'itself': model, **others}.items()]
    assert len(set(names)) == len(names)


def test_families_without_lean_path_and_damaged_targets(tmp_path):
    (tmp_path / 'config.json').write_text('{"model_type": "gpt2"}')
    assert target_fingerprint(tmp_path) == ''
    directory = saved(build_llama(3), tmp_path / 'damaged')
    (directory / 'model.safetensors').unlink()
    with pytest.raises(BundleError, match='model.safetensors'):
        target_fingerprint(directory)


def write_draft(maker, trainable, name, metadata):
    top = make_top(trainable.model, TopShape('shared_layers', 2, 1), range(REAL_VOCABULARY))
    write_whole(maker.directory / f'{name}.safetensors', top.export(), metadata)
    maker.add_draft(name, 'shared_layers', f'{name}.safetensors',
                    options={'depth': 2, 'layers': 1})


def test_drafts_of_this_target_and_such_that_do_not_say_are_taken(bundle_maker, trainable,
                                                                  model_dirs):
    bundle_maker.add_head(list(range(REAL_VOCABULARY)))
    own = target_fingerprint(model_dirs / 'target')
    for name, metadata in (('stranger', {TARGET_KEY: 'ab' * 32}), ('unnamed', {}),
                           ('own', {TARGET_KEY: own})):
        write_draft(bundle_maker, trainable, name, metadata)
    bundle = load_bundle(bundle_maker.write())
    refused = strangers(bundle)
    assert set(refused) == {'stranger'} and own[:12] in refused['stranger']


def test_a_bundle_that_is_moved_onto_another_target(bundle_maker, trainable, model_dirs, tmp_path):
    """Same sizes, other weights: what the shapes do not tell."""
    bundle_maker.add_head(list(range(REAL_VOCABULARY)))
    write_draft(bundle_maker, trainable, 'code',
                {TARGET_KEY: target_fingerprint(model_dirs / 'target')})
    other = saved(build_llama(9), tmp_path / 'other')
    for file in (model_dirs / 'target').iterdir():
        if 'token' in file.name:
            shutil.copy(file, other)
    bundle_maker.manifest['target']['path'] = str(other)
    runtime = Runtime.open(bundle_maker.write(), RuntimeOptions(
        device='cpu', dtype='float32', context=200, settings=Settings(1, 1)))
    try:
        request = runtime.prepare(GenerationRequest('the red cube', max_new_tokens=4))
        list(runtime.controller.generate(request))
        assert runtime._loader.wait(10.0)
        runtime.controller.residency.poll()
        view, = runtime.controller.residency.view()
        assert view.state is SlotState.FAILED and 'another target' in view.reason
    finally:
        runtime.close()
