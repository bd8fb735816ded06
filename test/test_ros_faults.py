# SPDX-License-Identifier: Apache-2.0
"""Bundles that are wrong: a named reason, a node that stays up and takes a right one next."""

from __future__ import annotations

import contextlib
import json
import math
import os
from pathlib import Path
import re
import shutil
import time

import pytest
import yaml

pytest.importorskip('rclpy')
pytest.importorskip('memspec_ros.srv')

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus  # noqa: E402
from ros_peer import Status  # noqa: E402

from memspec_ros.msg import DraftResidency, Residency  # noqa: E402

pytest_plugins = ['ros_fixtures']


def manifest(directory: Path, change) -> None:
    """Rewrite the manifest as ``change(data)`` leaves it."""
    file = directory / 'bundle.yaml'
    data = yaml.safe_load(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def truncate(file: Path, share: float) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:int(len(content) * share)])


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.write_bytes(content)


def replace(file: Path, text: str) -> None:
    file.write_text(text)


NORM = 'model.layers.1.input_layernorm.weight'


def spoil(tensor):
    tensor[3] = math.nan
    return tensor


def rewrite(file: Path, name: str, change) -> None:
    """Change one tensor of a weight file, or take it away."""
    from safetensors.torch import load_file, save_file
    tensors = load_file(file)
    tensor = tensors.pop(name)
    save_file({**tensors, **({name: change(tensor)} if change else {})}, file)


# What is done to a good bundle, and what the reason must name.
FAULTS = {
    'no directory': (shutil.rmtree, ['no such file']),
    'no manifest': (lambda d: (d / 'bundle.yaml').unlink(), ['bundle.yaml', 'no such file']),
    'not YAML': (lambda d: replace(d / 'bundle.yaml', 'format: 1\nname: ]['), ['not valid YAML']),
    'not text': (lambda d: (d / 'bundle.yaml').write_bytes(b'\xff\xfe\x00'), ['not valid YAML']),
    'empty manifest': (lambda d: replace(d / 'bundle.yaml', ''), ['bundle.yaml', 'mapping']),
    'key twice': (lambda d: replace(d / 'bundle.yaml', 'format: 1\nformat: 1'), ['twice']),
    'unknown key': (lambda d: manifest(d, lambda m: m.update(draft_s=[])), ['draft_s']),
    'future format': (lambda d: manifest(d, lambda m: m.update(format=99)), ['format 99']),
    'unknown kind': (lambda d: manifest(d, lambda m: m['drafts'][0].update(kind='oracle')),
                     ['oracle', 'general']),
    'draft missing': (lambda d: (d / 'code.safetensors').unlink(), ['code.safetensors']),
    'draft truncated': (lambda d: truncate(d / 'code.safetensors', 0.7),
                        ['code.safetensors', 'truncated']),
    'draft damaged': (lambda d: flip_a_bit(d / 'math.safetensors'),
                      ['math.safetensors', 'sha256']),
    'head damaged': (lambda d: flip_a_bit(d / 'head.safetensors'), ['head.safetensors', 'sha256']),
    'target missing': (lambda d: shutil.rmtree(d / 'target'), ['target']),
    'target truncated': (lambda d: truncate(d / 'target' / 'model.safetensors', 0.7),
                         ['model.safetensors']),
    'target almost empty': (lambda d: (d / 'target' / 'model.safetensors').write_bytes(b'\x09'),
                            ['model.safetensors']),
    'target is a web page': (
        lambda d: replace(d / 'target' / 'model.safetensors', '<!DOCTYPE html>' * 100),
        ['model.safetensors']),
    'target holds NaN': (lambda d: rewrite(d / 'target' / 'model.safetensors', NORM, spoil),
                         [NORM, 'no numbers']),
    'target lacks a tensor': (lambda d: rewrite(d / 'target' / 'model.safetensors', NORM, None),
                              [NORM, 'missing']),
    'target not the one': (
        lambda d: manifest(d, lambda m: m['target'].update(
            sha256={'model.safetensors': '0' * 64})), ['model.safetensors', 'sha256']),
    'target file of hash missing': (
        lambda d: manifest(d, lambda m: m['target'].update(
            sha256={'other.safetensors': '0' * 64})), ['other.safetensors']),
    'no weights': (lambda d: (d / 'target' / 'model.safetensors').unlink(), ['model.safetensors']),
    'no config': (lambda d: (d / 'target' / 'config.json').unlink(), ['config.json']),
    'config not JSON': (lambda d: replace(d / 'target' / 'config.json', '{'), ['config.json']),
    'config without sizes': (
        lambda d: replace(d / 'target' / 'config.json', '{"model_type": "llama"}'),
        ['config.json', 'hidden_size']),
    'no tokenizer': (lambda d: (d / 'target' / 'tokenizer.json').unlink(), ['tokenizer']),
    'tokenizer not JSON': (lambda d: replace(d / 'target' / 'tokenizer.json', '{'), ['tokenizer']),
}


@pytest.fixture
def broken(tmp_path, ros_bundle):
    """Provide a copy of the good bundle, to be spoilt."""
    return Path(shutil.copytree(ros_bundle, tmp_path / 'bundle'))


def fails_to_configure(node, *words: str) -> str:
    """Configure in vain; returns the reason, which must be one line and no traceback."""
    already = len(node.log)
    assert not node.change('configure')
    assert node.state == 'unconfigured' and node.alive
    said = node.log[already:]
    assert 'Traceback' not in said, said
    reason, = [line for line in said.splitlines() if '[ERROR]' in line]
    assert 'cannot configure' in reason
    for word in words:
        assert word in reason, reason
    return reason


@pytest.mark.parametrize('fault', FAULTS)
def test_reason_is_named_and_the_node_stays(unconfigured, broken, fault):
    spoil, words = FAULTS[fault]
    spoil(broken)
    assert unconfigured.set(bundle=str(broken))[0].successful
    fails_to_configure(unconfigured, *words)


def test_good_bundle_after_a_bad_one(unconfigured, broken, ros_bundle):
    node = unconfigured
    truncate(broken / 'general.safetensors', 0.5)
    assert node.set(bundle=str(broken))[0].successful
    reason = fails_to_configure(node, 'general.safetensors')
    with node.peer.listen(DiagnosticArray, '/diagnostics') as arrays:
        def lifecycle():
            return [status for array in arrays for status in array.status
                    if status.name == f'{node.fqn}: Lifecycle']
        status = node.peer.wait(lambda: (found := lifecycle()) and found[-1], 'diagnostics')
        assert status.level == DiagnosticStatus.ERROR
        assert status.message in reason and 'general.safetensors' in status.message
        assert node.set(bundle=str(ros_bundle))[0].successful
        assert node.change('configure') and node.change('activate')
        assert node.generate().status.code == Status.LENGTH
        arrays.clear()
        status = node.peer.wait(lambda: (found := lifecycle()) and found[-1], 'diagnostics')
        assert status.level == DiagnosticStatus.OK and status.message == 'active'


def test_fault_that_nobody_thought_of(unconfigured, broken, ros_bundle):
    """Whatever goes wrong while loading: the node lives, and a person is told."""
    node = unconfigured
    config = broken / 'target' / 'config.json'
    config.write_text(json.dumps({**json.loads(config.read_text()),
                                  'num_key_value_heads': 'two'}))
    assert node.set(bundle=str(broken))[0].successful
    already = len(node.log)
    assert not node.change('configure')
    assert node.state == 'unconfigured' and node.alive
    said = node.log[already:]
    node.forgive(said)
    assert '[ERROR]' in said and 'cannot configure' in said
    with node.peer.listen(DiagnosticArray, '/diagnostics') as arrays:
        status = node.peer.wait(
            lambda: [status for array in arrays for status in array.status
                     if status.name == f'{node.fqn}: Lifecycle'], 'diagnostics')[-1]
    assert status.level == DiagnosticStatus.ERROR and 'cannot configure' in status.message
    node.set(bundle=str(ros_bundle))
    node.bring_to('active')
    assert node.generate().status.code == Status.LENGTH


@pytest.mark.parametrize('values, words', [
    ({'device': 'tpu'}, ['tpu', 'expected']),
    ({'device': 'cuda:77'}, ['cuda:77']),
    ({'memory.budget_mib': 1}, ['needs', 'memory.budget_mib', 'is the least that works']),
    ({'memory.min_free_mib': 1 << 20}, ['needs', 'MiB', 'available']),
])
def test_settings_that_cannot_be(unconfigured, values, words):
    assert all(result.successful for result in unconfigured.set(**values))
    fails_to_configure(unconfigured, *words)


def test_draft_that_breaks_later_is_gone_without(unconfigured, broken):
    """The file of a draft is spoilt after configure: it fails, the answers are what they were."""
    node = unconfigured
    node.bring_to('active')
    expected = node.generate(max_new_tokens=80)
    node.bring_to('unconfigured')
    assert node.set(bundle=str(broken))[0].successful
    node.bring_to('active')
    for draft in ('general', 'code', 'math'):
        flip_a_bit(broken / f'{draft}.safetensors')
    answer = node.generate(max_new_tokens=80)
    assert answer.token_ids == expected.token_ids and answer.status.code == Status.LENGTH
    with node.peer.listen(Residency, f'{node.fqn}/residency') as messages, \
            node.peer.listen(DiagnosticArray, '/diagnostics') as arrays:
        failed = node.peer.wait(lambda: messages and [
            draft for draft in messages[-1].drafts if draft.state == DraftResidency.FAILED],
            'a failed draft')
        assert all('sha256' in draft.reason for draft in failed)
        status = node.peer.wait(
            lambda: [status for array in arrays for status in array.status
                     if status.name == f'{node.fqn}: Residency'], 'diagnostics')[-1]
        assert status.level == DiagnosticStatus.WARN and 'failed' in status.message


def residency_status(node, arrays, words: str):
    """Wait for a Residency status that has ``words``."""
    return node.peer.wait(lambda: [
        status for array in arrays for status in array.status
        if status.name == f'{node.fqn}: Residency' and words in status.message],
        f'{words!r} in diagnostics')[-1]


def test_storage_is_removed(unconfigured, broken):
    """And comes back: its drafts fail with that reason meanwhile, answers are what they were."""
    node, elsewhere = unconfigured, broken.parent / 'elsewhere'
    assert node.set(bundle=str(broken))[0].successful
    node.bring_to('active')
    already = len(node.log)
    broken.rename(elsewhere)
    with node.peer.listen(DiagnosticArray, '/diagnostics') as arrays:
        without = node.generate(max_new_tokens=80)
        assert without.status.code == Status.LENGTH
        status = residency_status(node, arrays, 'No such file or directory')
        assert status.level == DiagnosticStatus.WARN
        assert 'cannot be used' in node.log[already:] and 'No such file' in node.log[already:]
        elsewhere.rename(broken)

        def drafted():
            answer = node.generate(max_new_tokens=80)
            assert answer.token_ids == without.token_ids
            return {count.draft for count in answer.stats.drafts} - {'lookup'}
        node.peer.wait(drafted, 'a draft after the storage is back')


@pytest.mark.slow
def test_storage_stalls_for_ten_seconds(unconfigured, broken, ros_bundle):
    """Files that nobody answers for: opening a pipe waits in the kernel, as a dead disk would."""
    node = unconfigured
    assert node.set(bundle=str(broken))[0].successful
    node.bring_to('active')
    already, files = len(node.log), [broken / f'{draft}.safetensors'
                                     for draft in ('general', 'code', 'math')]
    for file in files:
        file.unlink()
        os.mkfifo(file)
    start = time.monotonic()
    with node.peer.listen(DiagnosticArray, '/diagnostics') as arrays:
        without = node.generate(max_new_tokens=80)
        # Diagnostics come once a second: the first that says so says 5 or, rounded, 6.
        said = residency_status(node, arrays, 'the storage has sent nothing for').message
        assert 5 <= int(re.search(r'sent nothing for (\d+) s', said)[1]) < 10
        node.peer.wait(lambda: time.monotonic() > start + 10.0, 'ten seconds')
        again = node.generate(max_new_tokens=80)
        assert without.status.code == again.status.code == Status.LENGTH
        assert again.token_ids == without.token_ids
        assert 'cannot be used: the storage has sent nothing' in node.log[already:]
        for file in files:
            writer = None
            with contextlib.suppress(OSError):  # nobody waits for this one
                writer = os.open(file, os.O_WRONLY | os.O_NONBLOCK)
            file.unlink()
            shutil.copy(ros_bundle / file.name, file)
            if writer is not None:
                os.close(writer)

        def drafted():
            answer = node.generate(max_new_tokens=80)
            assert answer.token_ids == without.token_ids
            return {count.draft for count in answer.stats.drafts} - {'lookup'}
        node.peer.wait(drafted, 'a draft after the storage answers', 90.0)
