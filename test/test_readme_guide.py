# SPDX-License-Identifier: Apache-2.0
"""README's guide to a target and a domain of one's own, as it is written."""

import json
from pathlib import Path
import re
import shlex

import yaml

from memspec_ros.cli import main
from memspec_ros.models.bundle import load_bundle

README = Path(__file__).parent.parent / 'README.md'


def section() -> str:
    text = README.read_text(encoding='utf-8')
    return re.search(r'^## Your own target and domain\n(.*?)^## ', text, re.M | re.S).group(1)


def test_the_guide_works_as_written(tmp_path, model_dirs, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    text = section()
    manifest = yaml.safe_load(re.search(r'```yaml\n(.*?)```', text, re.S).group(1))
    assert manifest['target']['path'] == '/path/to/model'
    manifest['target']['path'] = str(model_dirs / 'target')
    (tmp_path / 'my_target').mkdir()
    (tmp_path / 'my_target' / 'bundle.yaml').write_text(yaml.safe_dump(manifest))
    example = json.loads(re.search(r'`(\{"domain".*?\})`', text).group(1))
    for name, count in (('train.jsonl', 12), ('held_out.jsonl', 2)):
        (tmp_path / name).write_text(''.join(
            json.dumps({'domain': domain,
                        'prompt': f'{domain[0]}{name[0]} {i} {example["prompt"]}'}) + '\n'
            for i in range(count) for domain in ('general', example['domain'])))
    block = '\n'.join(line[4:] for line in text.splitlines() if line.startswith('    '))
    commands = [shlex.split(line) for line in block.replace('\\\n', ' ').splitlines()]
    assert [command[:2] for command in commands] == [
        ['memspec', 'distill'], ['memspec', 'trace'], ['memspec', 'rank'], ['memspec', 'info'],
        ['memspec', 'generate']]
    for command in commands:
        assert main(command[1:]) == 0, (command, capfd.readouterr().err)
    bundle = load_bundle('my_bundle')
    assert [spec.id for spec in bundle.drafts] == ['general', 'kitchen', 'lookup']
    assert bundle.ranker.kind == 'hidden' and set(bundle.draft('lookup').acceptance) == {
        'general', 'kitchen'}
