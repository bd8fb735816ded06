# SPDX-License-Identifier: Apache-2.0
"""The manifest is parsed strictly: whatever is wrong is named, nothing is ignored."""

import copy
import json
import shutil

from conftest import build_tokenizer, REAL_VOCABULARY, sha256_of
import pytest
import torch

from memspec_ros.models import convert
from memspec_ros.models.bundle import (
    default_bundle_path,
    draft_metadata,
    load_bundle,
    parse_manifest,
)
from memspec_ros.models.drafts import KINDS
from memspec_ros.models.errors import (
    BundleError,
    MemSpecError,
    UnsupportedModelError,
    VocabularyMismatchError,
)
from memspec_ros.models.target_files import cache_directory, find_gguf, locate_target
from memspec_ros.models.weights import read_tensors
from memspec_ros.runtime.runtime import Runtime, RuntimeOptions

HASH = 'a' * 64
MANIFEST = {
    'format': 1, 'name': 'tiny', 'description': 'text',
    'target': {'name': 't', 'licence': 'MIT', 'provenance': 'here', 'path': 'target',
               'sha256': {'config.json': HASH}},
    'tokenizer': {'path': 'tokenizer'},
    'shared_head': {'path': 'head.safetensors', 'sha256': HASH},
    'drafts': [
        {'id': 'general', 'kind': 'shared_layers', 'domain': 'general', 'licence': 'MIT',
         'provenance': 'distilled', 'path': 'g.safetensors', 'sha256': HASH, 'bytes': 10,
         'acceptance': {'general': 0.6, 'code': 1}, 'options': {'depth': 2, 'layers': 1}},
        {'id': 'small', 'kind': 'causal_lm', 'domain': 'code', 'licence': 'MIT',
         'provenance': 'hub', 'path': 'small', 'sha256': HASH, 'bytes': 10},
        {'id': 'lookup', 'kind': 'prompt_lookup', 'licence': 'MIT', 'provenance': 'code'}],
    'ranker': {'kind': 'domain_words', 'words': {'code': ['def']}}}
GGUF = {'file': 'model.gguf', 'sha256': HASH, 'package': 'p==1', 'package_sha256': HASH}


def changed(**edits):
    """The manifest with edits: 'drafts.0.kind' = value; ... = the key is taken away."""
    manifest = copy.deepcopy(MANIFEST)
    for path, value in edits.items():
        *way, last = path.split('.')
        place = manifest
        for key in way:
            place = place[int(key)] if isinstance(place, list) else place[key]
        last = int(last) if isinstance(place, list) else last
        if value is ...:
            del place[last]
        else:
            place[last] = value
    return manifest


def test_a_manifest_with_everything(tmp_path):
    bundle = parse_manifest(MANIFEST, tmp_path)
    general, small, lookup = bundle.drafts
    assert bundle.name == 'tiny' and bundle.target.sha256 == {'config.json': HASH}
    assert general.acceptance == {'general': 0.6, 'code': 1.0} and general.options['depth'] == 2
    assert bundle.weight_file(general) == tmp_path / 'g.safetensors'
    assert bundle.weight_file(small) == tmp_path / 'small' / 'model.safetensors'
    assert bundle.weight_file(lookup) is None and lookup.bytes == 0
    assert bundle.tokenizer_path == tmp_path / 'tokenizer'
    assert bundle.ranker.kind == 'domain_words'
    assert bundle.draft('small') is small
    with pytest.raises(BundleError, match="no draft 'big'.*general, small, lookup"):
        bundle.draft('big')


def test_what_may_be_left_out(tmp_path):
    bundle = parse_manifest(changed(
        description=..., tokenizer=..., shared_head=..., ranker=..., **{'drafts': []}), tmp_path)
    assert bundle.ranker.kind == 'domain_words' and bundle.drafts == ()
    with pytest.raises(BundleError, match='located'):
        bundle.tokenizer_path  # noqa: B018 (the error is what is tested)


@pytest.mark.parametrize('edits, message', [
    # unknown keys, everywhere a key can stand
    ({'colour': 1}, "bundle.yaml: unknown key 'colour'"),
    ({'target.colour': 1}, "target: unknown key 'colour'"),
    ({'tokenizer.colour': 1}, "tokenizer: unknown key 'colour'"),
    ({'shared_head.colour': 1}, "shared_head: unknown key 'colour'"),
    ({'drafts.0.colour': 1}, "draft 'general': unknown key 'colour'"),
    ({'drafts.0.options.colour': 1}, "draft 'general': unknown key 'colour'"),
    ({'drafts.1.options': {'depth': 1}}, "draft 'small': unknown key 'depth'"),
    ({'drafts.2.options': {'ngram': [2]}}, "draft 'lookup': unknown key 'ngram'"),
    ({'drafts.2.path': 'x'}, "draft 'lookup': unknown key 'path'"),
    ({'target.path': ..., 'target.sha256': ..., 'target.gguf': {**GGUF, 'colour': 1}},
     "gguf: unknown key 'colour'"),
    # missing keys
    ({'format': ...}, 'format is missing'),
    ({'name': ...}, 'name is missing'),
    ({'target': ...}, 'target is missing'),
    ({'drafts': ...}, 'drafts is missing'),
    ({'target.licence': ...}, 'target: licence is missing'),
    ({'target.provenance': ...}, 'target: provenance is missing'),
    ({'tokenizer.path': ...}, 'tokenizer: path is missing'),
    ({'shared_head.sha256': ...}, 'shared_head: sha256 is missing'),
    ({'drafts.0.id': ...}, r'drafts\[0\]: id is missing'),
    ({'drafts.1.kind': ...}, "draft 'small': kind is missing"),
    ({'drafts.0.licence': ...}, "draft 'general': licence is missing"),
    ({'drafts.0.provenance': ...}, "draft 'general': provenance is missing"),
    ({'drafts.0.path': ...}, "draft 'general': path is missing"),
    ({'drafts.0.sha256': ...}, "draft 'general': sha256 is missing"),
    ({'drafts.0.bytes': ...}, "draft 'general': bytes is missing"),
    ({'ranker.kind': ...}, 'ranker: kind is missing'),
    ({'ranker': {'kind': 'hidden', 'sha256': HASH}}, 'ranker: path is missing'),
    ({'ranker': {'kind': 'bert', 'path': 'r'}}, 'ranker: sha256 is missing'),
    ({'ranker': {'kind': 'hidden', 'path': 'r', 'sha256': 'x'}}, 'ranker: sha256 is not 64'),
    ({'ranker': {'kind': 'hidden', 'path': 'r', 'sha256': HASH, 'words': {}}},
     "ranker: unknown key 'words'"),
    # wrong types and values
    ({'format': 2}, 'format 2 is not known'),
    ({'format': True}, 'format must be int'),
    ({'name': 7}, 'name must be str, got 7'),
    ({'name': ' '}, 'name is empty'),
    ({'target': []}, 'target must be dict'),
    ({'drafts': {}}, 'drafts must be list'),
    ({'drafts.1': 'small'}, r'drafts\[1\]: expected a mapping, got str'),
    ({'drafts.0.bytes': '10'}, "bytes must be int, got '10'"),
    ({'drafts.0.bytes': -1}, 'bytes is -1'),
    ({'drafts.0.bytes': True}, 'bytes must be int'),
    ({'drafts.0.options': [1]}, 'options must be dict'),
    ({'drafts.0.acceptance': {'code': 1.5}}, "acceptance of 'code' is 1.5"),
    ({'drafts.0.acceptance': {'code': float('nan')}}, 'acceptance'),
    ({'drafts.0.acceptance': {'code': True}}, 'acceptance'),
    ({'drafts.0.acceptance': {5: 0.5}}, 'acceptance names the domain 5'),
    ({'drafts.0.sha256': 'abc'}, "draft 'general': sha256 is not 64 hexadecimal digits"),
    ({'drafts.0.sha256': HASH.upper()}, 'not 64 hexadecimal'),
    ({'target.sha256': {'config.json': 'x'}}, 'sha256 of config.json'),
    ({'target.sha256': {5: HASH}}, 'names the file 5'),
    ({'drafts.0.id': 'Ge neral'}, "id 'Ge neral' is not made of"),
    ({'drafts.0.id': '../x'}, 'is not made of'),
    ({'drafts.1.id': 'general'}, "id 'general' is there twice"),
    ({'drafts.0.kind': 'oracle'}, "kind 'oracle' is not known; there are: causal_lm"),
    ({'target.gguf': GGUF}, 'exactly one of "path" and "gguf"'),
    ({'target.path': ...}, 'exactly one of "path" and "gguf"'),
    ({'target.path': ..., 'target.gguf': GGUF}, "target: unknown key 'sha256'")])
def test_each_fault_of_the_manifest_is_named(tmp_path, edits, message):
    with pytest.raises(BundleError, match=message):
        parse_manifest(changed(**edits), tmp_path)


@pytest.mark.parametrize('raw', [None, 'text', [], 5])
def test_a_manifest_that_is_no_mapping(tmp_path, raw):
    with pytest.raises(BundleError, match='expected a mapping'):
        parse_manifest(raw, tmp_path)


@pytest.mark.parametrize('text, message', [
    ('{', 'not valid YAML'), ('\x00', 'not valid YAML'), ('a: b: c', 'not valid YAML'),
    ('', 'expected a mapping'), ('name: x\nname: y\n', "key 'name' is there twice"),
    ('format: 1\ndrafts:\n- id: a\n  id: b\n', "key 'id' is there twice"),
    ('? [a]\n: b\n', 'not valid YAML')])
def test_a_file_that_is_no_manifest(tmp_path, text, message):
    (tmp_path / 'bundle.yaml').write_text(text)
    with pytest.raises(BundleError, match=message):
        load_bundle(tmp_path)


def test_a_manifest_that_is_not_utf8(tmp_path):
    (tmp_path / 'bundle.yaml').write_bytes(b'name: \xff\xfe')
    with pytest.raises(BundleError, match='not valid YAML'):
        load_bundle(tmp_path)


def test_a_wrong_path_is_named(tmp_path):
    """Pitfall 25."""
    with pytest.raises(BundleError, match='nowhere/bundle.yaml: no such file; a bundle is'):
        load_bundle(tmp_path / 'nowhere')
    (tmp_path / 'file').write_text('')
    with pytest.raises(BundleError, match='Not a directory'):
        load_bundle(tmp_path / 'file')


def test_the_manifest_may_be_named_instead_of_its_directory(full_bundle):
    assert load_bundle(full_bundle / 'bundle.yaml').directory == full_bundle
    assert len(load_bundle(str(full_bundle)).drafts) == 7


def test_the_default_bundle_is_found_under_an_installed_prefix(tmp_path, monkeypatch):
    share = tmp_path / 'share' / 'memspec_ros' / 'models'
    share.mkdir(parents=True)
    shutil.copy(__file__, share / 'bundle.yaml')
    monkeypatch.setenv('AMENT_PREFIX_PATH', f'/nowhere:{tmp_path}')
    assert (default_bundle_path() / 'bundle.yaml').is_file()


@pytest.fixture
def own_bundle(full_bundle, tmp_path):
    """A copy of the full bundle that a test may damage."""
    shutil.copytree(full_bundle, tmp_path / 'bundle')
    return tmp_path / 'bundle'


def edit(directory, change):
    manifest = json.loads((directory / 'bundle.yaml').read_text())
    change(manifest)
    (directory / 'bundle.yaml').write_text(json.dumps(manifest))


def test_a_whole_bundle_passes(own_bundle):
    bundle = load_bundle(own_bundle)
    locate_target(bundle)
    assert draft_metadata(bundle, bundle.draft('top')) == {'made': 'by a test'}
    assert draft_metadata(bundle, bundle.draft('lookup')) == {}


def test_a_missing_draft_file(own_bundle):
    (own_bundle / 'top.safetensors').unlink()
    with pytest.raises(BundleError, match="draft 'top': .*top.safetensors does not exist"):
        load_bundle(own_bundle)


def test_a_truncated_draft_file(own_bundle):
    file = own_bundle / 'near' / 'model.safetensors'
    whole = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(BundleError,
                       match=f"draft 'near': .*{whole - 100} bytes, the manifest says {whole}"):
        load_bundle(own_bundle, verify=False)


def flip(file, place=-10):
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


def test_a_draft_file_with_one_wrong_bit(own_bundle):
    flip(own_bundle / 'top.safetensors')
    load_bundle(own_bundle, verify=False)
    with pytest.raises(BundleError, match="draft 'top': .*sha256 of the manifest"):
        load_bundle(own_bundle)


def test_a_shared_head_that_is_damaged_missing_or_foreign(own_bundle, target):
    bundle = load_bundle(own_bundle)
    spec = bundle.draft('top')
    flip(own_bundle / 'head.safetensors')
    with pytest.raises(BundleError, match='head.safetensors: sha256'):
        KINDS['shared_layers'](spec, bundle, target, 10)
    (own_bundle / 'head.safetensors').unlink()
    with pytest.raises(BundleError, match='head.safetensors: No such file'):
        KINDS['shared_layers'](spec, load_bundle(own_bundle), target, 10)
    edit(own_bundle, lambda manifest: manifest.pop('shared_head'))
    with pytest.raises(BundleError, match="draft 'top': shared_layers needs \"shared_head\""):
        KINDS['shared_layers'](spec, load_bundle(own_bundle), target, 10)


@pytest.mark.parametrize('ids, message', [
    (torch.tensor([0, 320]), 'token id 320 does not exist in the target'),
    (torch.tensor([0, -1]), 'token id -1 does not exist'),
    (torch.tensor([[0]]), 'one-dimensional'), (torch.tensor([0.5]), 'integers'),
    (torch.tensor([], dtype=torch.long), 'one-dimensional'), (None, 'one-dimensional')])
def test_a_shared_head_with_wrong_ids(own_bundle, target, ids, message):
    from safetensors.torch import save_file
    file = own_bundle / 'head.safetensors'
    save_file({'x': torch.zeros(1)} if ids is None else {'token_ids': ids}, file)
    edit(own_bundle, lambda m: m['shared_head'].update(sha256=sha256_of(file)))
    bundle = load_bundle(own_bundle)
    with pytest.raises(BundleError, match=message):
        KINDS['shared_layers'](bundle.draft('top'), bundle, target, 10)


@pytest.mark.parametrize('options, message', [
    ({'layers': 1}, 'depth is None, expected 1..3'), ({'depth': 0, 'layers': 1}, 'depth is 0'),
    ({'depth': 4, 'layers': 1}, 'depth is 4'), ({'depth': 1, 'layers': 9}, 'layers is 9'),
    ({'depth': True, 'layers': 1}, 'depth is True'), ({'depth': 2.0, 'layers': 1}, 'depth')])
def test_shared_layers_options_out_of_range(own_bundle, target, options, message):
    edit(own_bundle, lambda m: m['drafts'][2].update(options=options))
    bundle = load_bundle(own_bundle)
    with pytest.raises(BundleError, match=f"draft 'top': {message}"):
        KINDS['shared_layers'](bundle.draft('top'), bundle, target, 10)


@pytest.mark.parametrize('sizes', [[], [0], [17], 'x', [True], [2.0]])
def test_prompt_lookup_options_out_of_range(tmp_path, sizes):
    bundle = parse_manifest(changed(**{'drafts.2.options': {'ngrams': sizes}}), tmp_path)
    with pytest.raises(BundleError, match="draft 'lookup': ngrams"):
        KINDS['prompt_lookup'](bundle.draft('lookup'), bundle, None, 10)


def test_shared_layers_on_a_generic_target(own_bundle, model_dirs):
    from memspec_ros.models.target import load_target
    generic = load_target(model_dirs / 'target', torch.float32, torch.device('cpu'), 64, True)
    bundle = load_bundle(own_bundle)
    with pytest.raises(UnsupportedModelError, match="draft 'top': .*lean path"):
        KINDS['shared_layers'](bundle.draft('top'), bundle, generic, 10)
    with pytest.raises(UnsupportedModelError, match='lean path'):
        generic.new_state(10, frozenset({2}))


def test_tensors_made_for_another_target_are_named(own_bundle, target):
    bundle = load_bundle(own_bundle)
    spec = bundle.draft('top')
    kind = KINDS['shared_layers'](spec, bundle, target, 10)
    good = read_tensors(bundle.weight_file(spec))
    assert kind.attach(good)
    for name, tensor in good.items():
        wrong = {**good, name: torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 2)}
        with pytest.raises(BundleError, match=f"draft 'top': tensor {name} is .*another one"):
            kind.attach(wrong)
        missing = {other: t for other, t in good.items() if other != name}
        with pytest.raises(BundleError, match=f'tensor {name} is missing'):
            kind.attach(missing)


def test_a_causal_lm_whose_weights_do_not_fit_its_config(own_bundle, target):
    bundle = load_bundle(own_bundle)
    locate_target(bundle)
    spec = bundle.draft('near')
    kind = KINDS['causal_lm'](spec, bundle, target, 10)
    good = read_tensors(bundle.weight_file(spec))
    name = 'model.layers.1.mlp.up_proj.weight'
    with pytest.raises(BundleError, match=f'1 weights are missing.*{name}'):
        kind.attach({other: t for other, t in good.items() if other != name})
    with pytest.raises((BundleError, RuntimeError), match='up_proj'):
        kind.attach({**good, name: torch.zeros(3, 3)})
    assert kind.attach(good) is not kind.attach(good)  # the skeleton is still whole


def test_tied_weights_are_tied_after_a_load(own_bundle, target, model_dirs):
    """Pitfall 19: broken ties after an attach onto a skeleton."""
    from transformers import AutoModelForCausalLM
    bundle = load_bundle(own_bundle)
    locate_target(bundle)
    spec = bundle.draft('far')
    tensors = read_tensors(bundle.weight_file(spec))
    assert 'lm_head.weight' not in tensors
    model = KINDS['causal_lm'](spec, bundle, target, 10).attach(tensors).lm.model
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    ids = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        reference = AutoModelForCausalLM.from_pretrained(model_dirs / 'far')(ids).logits
        assert torch.allclose(model(ids).logits, reference, atol=1e-5)


def test_a_draft_with_another_tokenizer_is_refused_naming_the_first_id(own_bundle, target):
    """Pitfall 10."""
    file = own_bundle / 'near' / 'tokenizer.json'
    raw = json.loads(file.read_text())
    vocabulary = raw['model']['vocab']
    by_id = {i: token for token, i in vocabulary.items()}
    for i, j in ((250, 251), (40, 41)):
        vocabulary[by_id[i]], vocabulary[by_id[j]] = j, i
    file.write_text(json.dumps(raw))
    bundle = load_bundle(own_bundle)
    locate_target(bundle)
    with pytest.raises(VocabularyMismatchError, match=r"draft 'near': id 40 is .*in the target"):
        KINDS['causal_lm'](bundle.draft('near'), bundle, target, 10)


def test_a_sliding_window_draft_is_refused(own_bundle, target):
    """Pitfall 8."""
    file = own_bundle / 'near' / 'config.json'
    file.write_text(json.dumps({**json.loads(file.read_text()), 'model_type': 'mistral',
                                'architectures': ['MistralForCausalLM'], 'sliding_window': 16}))
    bundle = load_bundle(own_bundle)
    locate_target(bundle)
    with pytest.raises(UnsupportedModelError, match='sliding'):
        KINDS['causal_lm'](bundle.draft('near'), bundle, target, 10)


@pytest.mark.parametrize('damage, message', [
    (lambda d: (d / 'near' / 'config.json').unlink(), 'near'),
    (lambda d: (d / 'near' / 'config.json').write_text('{'), 'near'),
    (lambda d: (d / 'near' / 'tokenizer.json').unlink(), 'tokenizer.json'),
    (lambda d: (d / 'near' / 'tokenizer.json').write_text('{"model": 1}'), 'not a tokenizer')])
def test_a_causal_lm_directory_that_is_not_whole(own_bundle, target, damage, message):
    damage(own_bundle)
    bundle = load_bundle(own_bundle)
    locate_target(bundle)
    with pytest.raises(MemSpecError, match=message):
        KINDS['causal_lm'](bundle.draft('near'), bundle, target, 10)


@pytest.fixture
def own_target(own_bundle, model_dirs):
    """The bundle with a target of its own, which a test may damage."""
    shutil.copytree(model_dirs / 'target', own_bundle / 'target')
    edit(own_bundle, lambda m: m['target'].update(path='target'))
    return own_bundle / 'target'


def open_runtime(directory, **options):
    return Runtime.open(directory, RuntimeOptions(**{
        'device': 'cpu', 'dtype': 'float32', 'context': 64, **options}))


def rewrite(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize('damage, message', [
    (lambda t: shutil.rmtree(t), 'target is not a directory'),
    (lambda t: (t / 'config.json').unlink(), 'config.json: No such file'),
    (lambda t: (t / 'config.json').write_text('{'), 'config.json: not JSON'),
    (lambda t: (t / 'config.json').write_text('[]'), 'expected a JSON object'),
    (lambda t: (t / 'model.safetensors').unlink(), 'model.safetensors: No such file'),
    (lambda t: (t / 'model.safetensors').write_bytes(b'junk' * 10), 'not a whole safetensors'),
    (lambda t: (t / 'model.safetensors').write_bytes(
        (t / 'model.safetensors').read_bytes()[:5000]), 'not a whole safetensors'),
    (lambda t: (t / 'tokenizer.json').write_text('{'), 'no usable tokenizer'),
    (lambda t: rewrite(t / 'config.json', vocab_size=77), 'config.json says'),
    (lambda t: rewrite(t / 'config.json', intermediate_size=50), 'gate_up of layer 0'),
    (lambda t: rewrite(t / 'config.json', num_hidden_layers=5), 'layers.4.*missing'),
    (lambda t: rewrite(t / 'config.json', hidden_size=None), 'hidden_size'),
    (lambda t: rewrite(t / 'config.json', use_sliding_window=True), 'sliding')])
def test_each_fault_of_the_targets_files_is_named(own_bundle, own_target, damage, message):
    """Pitfall 25: a truncated or corrupt file is named, never a crash."""
    damage(own_target)
    with pytest.raises(MemSpecError, match=message):
        open_runtime(own_bundle)


def test_the_targets_hashes_are_checked(own_bundle, own_target):
    digest = sha256_of(own_target / 'model.safetensors')
    edit(own_bundle, lambda m: m['target'].update(sha256={'model.safetensors': digest}))
    locate_target(load_bundle(own_bundle))
    flip(own_target / 'model.safetensors')
    with pytest.raises(BundleError, match='model.safetensors does not have the sha256'):
        locate_target(load_bundle(own_bundle))
    edit(own_bundle, lambda m: m['target'].update(sha256={'gone.bin': HASH}))
    with pytest.raises(BundleError, match='gone.bin: No such file'):
        locate_target(load_bundle(own_bundle))


def test_a_tokenizer_larger_than_the_target(own_bundle, own_target):
    special = tuple(f'<extra{i}>' for i in range(60))
    (own_bundle / 'tok').mkdir()
    build_tokenizer(own_bundle / 'tok', special=('<pad>', '<|im_end|>', *special))
    raw = json.loads((own_bundle / 'tok' / 'tokenizer.json').read_text())
    size = len(raw['model']['vocab'])
    raw['added_tokens'] += [{**raw['added_tokens'][0], 'id': size + i, 'content': f'<more{i}>'}
                            for i in range(60)]
    (own_bundle / 'tok' / 'tokenizer.json').write_text(json.dumps(raw))
    edit(own_bundle, lambda m: m.update(tokenizer={'path': 'tok'}, drafts=[]))
    with pytest.raises(BundleError, match='they do not belong together'):
        open_runtime(own_bundle)


@pytest.mark.parametrize('options, message', [
    ({'policy': 'oracle'}, "policy 'oracle' is not known"),
    ({'dtype': 'int8'}, "dtype 'int8'"), ({'device': 'tpu'}, "device 'tpu'"),
    ({'device': 'cuda:x'}, "device 'cuda:x'")])
def test_unknown_options_are_named_and_leave_no_thread_behind(own_bundle, options, message):
    import threading
    before = threading.active_count()
    with pytest.raises(MemSpecError, match=message):
        open_runtime(own_bundle, **options)
    assert threading.active_count() == before


@pytest.mark.parametrize('ranker, message', [
    ({'kind': 'crystal_ball'}, "kind 'crystal_ball' is not known"),
    ({'kind': 'domain_words', 'wordz': {}}, "unknown key 'wordz'"),
    ({'kind': 'domain_words', 'words': {'code': 'def'}}, 'words must map')])
def test_each_fault_of_the_ranker_is_named(own_bundle, ranker, message):
    edit(own_bundle, lambda m: m.update(ranker=ranker))
    with pytest.raises(BundleError, match=message):
        open_runtime(own_bundle)


class TestConversion:
    """GGUF files are converted once; the conversion itself is replaced here."""

    @pytest.fixture
    def gguf(self, tmp_path, monkeypatch):
        file = tmp_path / 'model.gguf'
        file.write_bytes(b'GGUF and more')
        self.converted = []

        def fake(source, destination, progress):
            self.converted.append(source)
            (destination / 'config.json').write_text('{}')
        monkeypatch.setattr(convert, '_convert', fake)
        return file

    def test_once_and_then_from_the_cache(self, gguf, tmp_path):
        digest = sha256_of(gguf)
        first = convert.converted_gguf(gguf, digest, tmp_path / 'cache')
        assert convert.converted_gguf(gguf, digest, tmp_path / 'cache') == first
        assert self.converted == [gguf] and (first / 'config.json').is_file()
        assert [p.name for p in first.parent.iterdir()] == [first.name]

    def test_a_wrong_file_is_refused(self, gguf, tmp_path):
        with pytest.raises(BundleError, match='sha256'):
            convert.converted_gguf(gguf, HASH, tmp_path / 'cache')
        assert self.converted == []

    def test_an_interrupted_conversion_is_made_again(self, gguf, tmp_path, monkeypatch):
        digest = sha256_of(gguf)

        def interrupted(source, destination, progress):
            (destination / 'half').write_text('')
            raise KeyboardInterrupt
        good = convert._convert
        monkeypatch.setattr(convert, '_convert', interrupted)
        with pytest.raises(KeyboardInterrupt):
            convert.converted_gguf(gguf, digest, tmp_path / 'cache')
        assert list((tmp_path / 'cache' / 'converted').iterdir()) == []
        # A directory that lacks its mark, from a crash in older days.
        (tmp_path / 'cache' / 'converted' / digest[:16]).mkdir()
        monkeypatch.setattr(convert, '_convert', good)
        result = convert.converted_gguf(gguf, digest, tmp_path / 'cache')
        assert (result / 'config.json').is_file()

    def test_a_file_that_is_nowhere_says_how_to_get_it(self, tmp_path, monkeypatch):
        monkeypatch.setenv('MEMSPEC_CACHE', str(tmp_path / 'cache'))
        assert cache_directory() == tmp_path / 'cache'
        bundle = parse_manifest(changed(**{'target.path': ..., 'target.sha256': ...,
                                           'target.gguf': GGUF}), tmp_path)
        with pytest.raises(BundleError, match='model.gguf is neither in .* nor in .*fetch'):
            find_gguf(bundle)
        (tmp_path / 'cache').mkdir()
        (tmp_path / 'cache' / 'model.gguf').write_bytes(b'x')
        assert find_gguf(bundle) == tmp_path / 'cache' / 'model.gguf'


def test_the_fixture_bundle_covers_real_ids_only(full_bundle):
    assert load_bundle(full_bundle).head_token_ids() == list(range(REAL_VOCABULARY))
