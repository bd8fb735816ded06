# SPDX-License-Identifier: Apache-2.0
"""Fixtures: tiny models and tokenizers, made here, the same at every run."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
import shutil

from hypothesis import settings as hypothesis_settings
import pytest

hypothesis_settings.register_profile('memspec', deadline=None, database=None, max_examples=100)
hypothesis_settings.load_profile('memspec')

# Ids of the tiny tokenizer are fewer: the model's vocabulary is padded, as real ones are.
REAL_VOCABULARY = 300
PADDED_VOCABULARY = 320
SPECIAL_TOKENS = ['<pad>', '<|im_start|>', '<|im_end|>', '<tool>']
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + "
    "'<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
# Merges learned from this cut across characters of several bytes.
_CORPUS = ['the robot picks up the red cube and puts it down', 'def add(a, b): return a + b',
           'grüße aus köln, 日本語のテキスト 😀😀🤖', 'naïve café — “quotes”']
PROMPTS = [[5, 17, 40, 8, 99], [200, 3, 3, 7, 60, 61, 62, 60, 61, 62, 11, 250, 33],
           [42], list(range(30, 75))]


@pytest.fixture(scope='session', autouse=True)
def few_threads():
    """Matrices this small are slower on many threads, and slower still on a busy machine."""
    import torch
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build_tokenizer(directory: Path, template: str | None = CHAT_TEMPLATE,
                    special=tuple(SPECIAL_TOKENS)) -> None:
    """Train a byte-level BPE on a few lines and save it."""
    from tokenizers import decoders, models, pre_tokenizers, Tokenizer, trainers
    from transformers import PreTrainedTokenizerFast
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(_CORPUS, trainers.BpeTrainer(
        vocab_size=REAL_VOCABULARY, special_tokens=list(special), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token='<|im_end|>',
                            chat_template=template).save_pretrained(directory)


def build_llama(seed: int, std: float = 0.2, **changes):
    """A random Llama whose argmax is decisive: large weights make large gaps."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    sizes = {
        'hidden_size': 64, 'intermediate_size': 96, 'num_hidden_layers': 4,
        'num_attention_heads': 4, 'num_key_value_heads': 2, 'vocab_size': PADDED_VOCABULARY,
        'max_position_embeddings': 512, 'initializer_range': std, 'eos_token_id': None,
        'bos_token_id': None, 'tie_word_embeddings': False}
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).eval()


def perturbed(model, scale: float, seed: int = 0):
    """A copy of ``model`` with noise of that share of each weight's spread."""
    import copy

    import torch
    generator = torch.Generator().manual_seed(seed)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            if p.dim() > 1:
                p += scale * p.std() * torch.randn(p.shape, generator=generator)
    return twin


@pytest.fixture(scope='session')
def tokenizer_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp('tokenizer')
    build_tokenizer(path)
    return path


@pytest.fixture(scope='session')
def reference():
    """The model that greedy decoding through ``transformers`` is done with."""
    import torch
    model = build_llama(seed=3)
    with torch.no_grad():  # as in real models, padding ids are never the best
        model.lm_head.weight[REAL_VOCABULARY:] = 0.0
    return model


@pytest.fixture(scope='session')
def model_dirs(tmp_path_factory, reference, tokenizer_dir):
    """Hugging Face directories: the target, and causal LMs near to it and far from it."""
    root = tmp_path_factory.mktemp('models')
    models = {'target': reference, 'twin': reference, 'near': perturbed(reference, 0.015),
              'far': build_llama(seed=8, num_hidden_layers=2, hidden_size=32,
                                 tie_word_embeddings=True)}
    for name, model in models.items():
        model.save_pretrained(root / name)
        for file in tokenizer_dir.iterdir():
            shutil.copy(file, root / name)
    return root


@pytest.fixture(scope='session')
def target(model_dirs):
    """The target on the lean path, float32."""
    import torch

    from memspec_ros.models.target import load_target
    return load_target(model_dirs / 'target', torch.float32, torch.device('cpu'), 512)


@pytest.fixture(scope='session')
def trainable(model_dirs):
    """The same weights unpacked, as training needs them."""
    import torch

    from memspec_ros.models.target import load_target
    return load_target(model_dirs / 'target', torch.float32, torch.device('cpu'), 512,
                       packed=False)


@pytest.fixture(scope='session')
def greedy(reference):
    """(prompt ids, n, eos ids) -> n greedy tokens of ``transformers``, remembered."""
    import torch
    known: dict = {}

    def generate(prompt, count, eos=None):
        key = (tuple(prompt), count, tuple(eos or ()))
        if key not in known:
            with torch.inference_mode():
                ids = reference.generate(
                    torch.tensor([prompt]), do_sample=False, max_new_tokens=count,
                    eos_token_id=list(eos) if eos else None, pad_token_id=0,
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.long))
            known[key] = ids[0, len(prompt):].tolist()
        return list(known[key])
    return generate


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class BundleMaker:
    """Writes bundles: a manifest as plain data, changed by a test before it is saved."""

    def __init__(self, directory: Path, target_dir: Path):
        self.directory = directory
        self.manifest = {
            'format': 1, 'name': 'tiny', 'description': 'made by a test',
            'target': {'name': 'tiny-llama', 'licence': 'Apache-2.0', 'provenance': 'random',
                       'path': str(target_dir)},
            'drafts': [], 'ranker': {'kind': 'domain_words', 'words': {'code': ['def']}}}

    def add_draft(self, draft_id: str, kind: str, path: str | None = None, **keys) -> dict:
        entry = {'id': draft_id, 'kind': kind, 'domain': 'general', 'licence': 'Apache-2.0',
                 'provenance': 'random', **keys}
        if path is not None:
            file = self.directory / path
            file = file / 'model.safetensors' if file.is_dir() else file
            entry.update(path=path, bytes=file.stat().st_size, sha256=sha256_of(file))
        self.manifest['drafts'].append(entry)
        return entry

    def add_head(self, ids) -> None:
        from safetensors.torch import save_file
        import torch
        file = self.directory / 'head.safetensors'
        save_file({'token_ids': torch.tensor(ids)}, file)
        self.manifest['shared_head'] = {'path': file.name, 'sha256': sha256_of(file)}

    def write(self) -> Path:
        # JSON is YAML: what a test wrote is read back as it is.
        (self.directory / 'bundle.yaml').write_text(json.dumps(self.manifest))
        return self.directory


@pytest.fixture
def bundle_maker(tmp_path, model_dirs):
    return BundleMaker(tmp_path, model_dirs / 'target')


@pytest.fixture(scope='session')
def full_bundle(tmp_path_factory, model_dirs, trainable):
    """A bundle with a draft of every kind."""
    import torch

    from memspec_ros.training.lessons import TopShape
    from memspec_ros.training.teacher import write_whole
    from memspec_ros.training.tops import make_top
    directory = tmp_path_factory.mktemp('bundle')
    maker = BundleMaker(directory, model_dirs / 'target')
    vocabulary = list(range(REAL_VOCABULARY))
    maker.add_head(vocabulary)
    generator = torch.Generator().manual_seed(1)

    def noise(shape: TopShape, scale: float) -> dict:
        return {name: torch.randn(tensor.shape, generator=generator).to(tensor.dtype) * scale
                for name, tensor in make_top(trainable.model, shape, vocabulary).export().items()}

    top = make_top(trainable.model, TopShape('shared_layers', 2, 2), vocabulary)
    write_whole(directory / 'top.safetensors', top.export(), {'made': 'by a test'})
    write_whole(directory / 'noise.safetensors', noise(TopShape('shared_layers', 1, 1), 0.3), {})
    # Its mixer is loud enough to change what the top says, which is still often right.
    feature = make_top(trainable.model, TopShape('feature', 2, 2, (1, 4)), vocabulary).export()
    for name, tensor in noise(TopShape('feature', 2, 2, (1, 4)), 0.02).items():
        feature[name] = tensor + feature[name] if name.startswith('mixer') else feature[name]
    write_whole(directory / 'feature.safetensors', feature, {})
    write_whole(directory / 'embedded.safetensors', noise(TopShape('feature', 0, 1, (2,)), 0.3),
                {})
    for name in ('near', 'far'):
        shutil.copytree(model_dirs / name, directory / name)
    maker.add_draft('near', 'causal_lm', 'near')
    maker.add_draft('far', 'causal_lm', 'far', domain='code')
    maker.add_draft('top', 'shared_layers', 'top.safetensors',
                    options={'depth': 2, 'layers': 2})
    maker.add_draft('noise', 'shared_layers', 'noise.safetensors',
                    options={'depth': 1, 'layers': 1})
    maker.add_draft('feature', 'feature', 'feature.safetensors',
                    options={'depth': 2, 'layers': 2, 'features': [1, 4]})
    maker.add_draft('embedded', 'feature', 'embedded.safetensors',
                    options={'depth': 0, 'layers': 1, 'features': [2]})
    maker.add_draft('lookup', 'prompt_lookup')
    return maker.write()


@pytest.fixture
def prompts(tmp_path) -> Path:
    """Two prompts of each of two domains."""
    file = tmp_path / 'prompts.jsonl'
    lines = [{'domain': domain, 'prompt': f'{text} {i}'} for i in range(2)
             for domain, text in (('general', 'the robot'), ('code', 'def add'))]
    file.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    return file


@pytest.fixture(scope='module')
def full_kinds(full_bundle, target):
    """Draft kinds of ``full_bundle`` by id, on ``target`` and for 300 positions."""
    from memspec_ros.models.bundle import load_bundle
    from memspec_ros.models.drafts import KINDS
    from memspec_ros.models.target_files import locate_target
    bundle = load_bundle(full_bundle)
    locate_target(bundle)
    return {spec.id: KINDS[spec.kind](spec, bundle, target, 300) for spec in bundle.drafts}


@pytest.fixture(scope='module')
def engine(target, full_kinds):
    """An engine that keeps what the drafts of ``full_bundle`` read; its clock stands still."""
    from memspec_ros.decoding.engine import Engine
    depths = frozenset().union(*(kind.depths for kind in full_kinds.values()))
    return Engine(target, 200, 6, depths, lambda: 0.0, 4)


@pytest.fixture(scope='module')
def make_drafter(full_bundle, full_kinds):
    """Make a drafter of ``full_bundle``, by its id."""
    from memspec_ros.models.bundle import load_bundle
    from memspec_ros.models.weights import read_tensors
    bundle = load_bundle(full_bundle)
    return lambda name: full_kinds[name].attach(
        read_tensors(bundle.weight_file(bundle.draft(name))))
