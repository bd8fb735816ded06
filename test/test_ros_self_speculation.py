# SPDX-License-Identifier: Apache-2.0
"""The node drafts with the target's own layers while no loaded draft is there."""

from __future__ import annotations

import shutil

import pytest
import yaml

pytest.importorskip('rclpy')
pytest.importorskip('memspec_ros.srv')

from ros_peer import DEEP, LATCHED, Status  # noqa: E402
from ros_peer import whole as whole_answer

from memspec_ros.msg import ModelInfo, TokenChunk  # noqa: E402

pytest_plugins = ['ros_fixtures']


@pytest.fixture(scope='module')
def exits(start_node, ros_bundle, tmp_path_factory):
    """Provide an active node whose bundle has exits."""
    directory = tmp_path_factory.mktemp('exits') / 'bundle'
    shutil.copytree(ros_bundle, directory)
    manifest = yaml.safe_load((directory / 'bundle.yaml').read_text())
    manifest['self_speculation'] = {'licence': 'MIT', 'provenance': 'none',
                                    'options': {'depth': 2, 'check': 3}}
    (directory / 'bundle.yaml').write_text(yaml.safe_dump(manifest))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('MEMSPEC_CACHE', str(directory / 'cache'))
        node = start_node(bundle=directory)
    assert node.set(draft__adaptive=False, cache_capacity=0)[0].successful
    node.bring_to('active')
    yield node
    node.ended_cleanly()


def drafts_of(answer) -> dict[str, int]:
    return {count.draft: count.accepted for count in answer.stats.drafts}


def test_with_k_0_the_target_drafts_for_itself_and_says_what_it_would_say(exits, active):
    exits.set(cache_capacity=0)
    with exits.peer.listen(TokenChunk, f'{exits.fqn}/tokens', DEEP) as chunks:
        answer = exits.generate(max_new_tokens=40)
        exits.peer.wait(lambda: chunks and chunks[-1].last, 'the last chunk')
    assert answer.status.code == Status.LENGTH and drafts_of(answer)['self'] > 0
    assert 'self' in {chunk.draft for chunk in chunks}
    assert answer.text == active.generate(max_new_tokens=40).text
    exits.set(draft__self_speculation=False)
    without = exits.generate(max_new_tokens=40)
    assert 'self' not in drafts_of(without) and without.text == answer.text
    exits.set(draft__self_speculation=True)


def test_a_loaded_draft_takes_over(exits):
    exits.set(cache_capacity=2)
    exits.generate(max_new_tokens=60)  # loads meanwhile
    exits.generate(max_new_tokens=60)
    assert 'self' not in drafts_of(exits.generate(max_new_tokens=40))
    exits.set(cache_capacity=0)
    assert drafts_of(exits.generate(max_new_tokens=40))['self'] > 0


def test_it_drafts_where_every_load_fails(exits):
    files = sorted((exits.bundle / name) for name in (
        'general.safetensors', 'code.safetensors', 'math.safetensors'))
    whole = {file: file.read_bytes() for file in files}
    exits.bring_to('inactive')
    exits.bring_to('active')
    exits.set(cache_capacity=0)
    exits.generate(max_new_tokens=4)  # nothing is in memory now
    for file in files:
        file.unlink()
    exits.set(cache_capacity=2)
    for _ in range(3):
        answer = exits.generate(max_new_tokens=40)
        assert answer.status.code == Status.LENGTH and drafts_of(answer)['self'] > 0
    for file, data in whole.items():
        file.write_bytes(data)
    exits.forgive('draft')
    exits.set(cache_capacity=0)


def test_layers_may_stay_in_storage(exits):
    """The last two tests: the node is configured anew."""
    before = exits.generate(max_new_tokens=24)
    exits.bring_to('unconfigured')
    assert exits.set(memory__layers_mib=0.4)[0].successful
    exits.bring_to('active')
    exits.set(cache_capacity=0)
    with exits.peer.listen(ModelInfo, f'{exits.fqn}/model_info', LATCHED) as infos:
        exits.peer.wait(lambda: infos, 'what is loaded')
    assert 'self_speculation' in [draft.kind for draft in infos[-1].drafts]
    # Of four layers one is in memory, beside two buffers.
    names = {file.name for file in exits.bundle.glob('cache/layers/*/*')}
    assert names == {f'{layer}.safetensors' for layer in (1, 2, 3)}
    answer = exits.generate(max_new_tokens=24)
    assert answer.text == before.text and drafts_of(answer)['self'] > 0


def test_a_layer_that_is_gone_ends_the_request_and_no_more(exits):
    """Its file is named in the status, and once it is back answers are what they were."""
    assert exits.get('memory.layers_mib') == [0.4]
    before = exits.generate(max_new_tokens=24)
    file, = exits.bundle.glob('cache/layers/*/2.safetensors')
    whole = file.read_bytes()
    with exits.peer.listen(TokenChunk, f'{exits.fqn}/tokens', DEEP) as chunks:
        running = exits.occupy()
        file.unlink()
        ended = exits.finished(running)
        assert ended.status.code == Status.INTERNAL and str(file) in ended.status.message
        # What had been said until then has come, and the end of it.
        exits.peer.wait(lambda: chunks and chunks[-1].last, 'the last chunk')
        assert whole_answer(chunks, running)[1] == list(ended.token_ids)
    assert exits.generate(max_new_tokens=24).status.code == Status.INTERNAL
    file.write_bytes(whole)
    assert exits.generate(max_new_tokens=24).text == before.text
    for line in exits.log.splitlines():
        if 'Traceback' in line:
            exits.forgive(line)
