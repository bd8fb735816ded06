# SPDX-License-Identifier: Apache-2.0
"""``memspec quantize``, and the bundle that it makes, from the command line."""

import json
from pathlib import Path
import shutil

from conftest import BundleMaker, sha256_of
from gptq_maker import MODELS, round_matrix
import pytest
from safetensors.torch import load_file
import torch
import yaml

from memspec_ros.cli import main
from memspec_ros.models.errors import MemSpecError
from memspec_ros.models.gptq_library import installed_library
from memspec_ros.models.packing import dense
from memspec_ros.models.quantized import has_int4, has_int8
from memspec_ros.models.target import load_reference, load_target, open_weights, read_config
from memspec_ros.training.gptq import quantise, Scheme

CPU = torch.device('cpu')
PROMPT = 'def add(a, b): the robot picks up the red cube'
SMALL = ['--threads', '1', '--dtype', 'float32', '--context', '200']


@pytest.fixture(scope='module')
def prompts(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp('prompts') / 'prompts.jsonl'
    things = ['cube', 'cup', 'ball', 'book', 'box', 'plate']
    file.write_text(''.join(json.dumps({
        'domain': 'general',
        'prompt': f'the robot picks up the red {thing} and puts it down {n} times'}) + '\n'
        for thing in things for n in range(4)))
    return str(file)


@pytest.fixture(scope='module')
def made(tmp_path_factory, model_dirs, prompts):
    """Quantised targets by their options, each made once."""
    known = {}

    def make(*options: str, target: Path = model_dirs / 'target') -> tuple[Path, dict]:
        key = (options, target)
        if key not in known:
            out = tmp_path_factory.mktemp('quantised') / 'out'
            result = out.parent / 'result.json'
            assert main(['quantize', '--target', str(target), '--out', str(out), '--prompts',
                         prompts, '--json', str(result), '--device', 'cpu', *options]) == 0
            known[key] = out, json.loads(result.read_text())
        return known[key]
    return make


def generate(capfd, bundle, *options) -> dict:
    capfd.readouterr()
    status = main(['generate', '--bundle', str(bundle), '--prompt', PROMPT, '--max-new-tokens',
                   '24', '--ignore-eos', '--json', '-', *SMALL, *options])
    out, err = capfd.readouterr()
    assert status == 0, err
    return json.loads(out)


def greedy(directory, result: dict) -> list[int]:
    """What ``transformers`` says with the weights that the checkpoint stands for."""
    model = load_reference(directory, torch.float32, CPU)
    prompt = torch.tensor([result['prompt_ids']])
    with torch.inference_mode():
        ids = model.generate(prompt, do_sample=False, max_new_tokens=24, pad_token_id=0,
                             attention_mask=torch.ones_like(prompt))
    return ids[0, prompt.shape[1]:].tolist()


@pytest.mark.parametrize('options', [
    [], ['--act-order'], ['--symmetric'], ['--act-order', '--symmetric', '--group-size', '-1'],
    ['--bits', '8']])
def test_the_result_is_a_bundle_that_generates_what_it_stands_for(made, capfd, options):
    out, figures = made(*options)
    result = generate(capfd, out)
    assert result['token_ids'] == greedy(out, result)
    config = read_config(out)['quantization_config']
    assert config['quant_method'] == 'gptq'
    assert config['desc_act'] == ('--act-order' in options)
    assert config['sym'] == ('--symmetric' in options)
    assert figures['tokens'] > 50 and 0 <= figures['greedy_agreement'] <= 1
    assert figures['perplexity'] > 1 and figures['perplexity_quantised'] > 1


def test_speculation_and_plain_decoding_agree_on_it(made, capfd, tmp_path, model_dirs):
    out, _ = made('--act-order')
    shutil.copytree(model_dirs / 'near', tmp_path / 'near')
    maker = BundleMaker(tmp_path, out)
    maker.add_draft('near', 'causal_lm', 'near')
    maker.write()
    answers = [generate(capfd, tmp_path, '--draft-tokens', tokens, '--fixed-draft-length')
               for tokens in ('0', '4')]
    assert answers[0]['token_ids'] == answers[1]['token_ids']
    assert not answers[0]['stats']['drafted'] and answers[1]['stats']['drafted']


def test_eight_bits_hardly_differ_and_two_do(made):
    eight, four, two = (made('--bits', bits)[1] for bits in '842')
    assert eight['greedy_agreement'] > 0.95
    assert abs(eight['perplexity_quantised'] / eight['perplexity'] - 1) < 0.02
    assert eight['greedy_agreement'] >= four['greedy_agreement'] > two['greedy_agreement']


@pytest.mark.parametrize('family', MODELS)
def test_distances_are_those_between_the_loaded_models(made, prompts, tmp_path, tokenizer_dir,
                                                       family):
    """Perplexity and agreement come out of two streams of layers; loading both says the same."""
    from memspec_ros.models.tokenizer import Tokenizer
    model = MODELS[family]()
    if family == 'qwen2':  # ids of the tiny tokenizer go beyond its vocabulary
        model.resize_token_embeddings(320)
    model.save_pretrained(tmp_path)
    for file in tokenizer_dir.iterdir():
        shutil.copy(file, tmp_path)
    out, figures = made('--group-size', '32', target=tmp_path)
    tokenizer = Tokenizer(out)
    texts = [json.loads(line)['prompt'] for line in Path(prompts).read_text().splitlines()][7::8]
    losses, choices = [], []
    for directory in (tmp_path, out):
        target = load_target(directory, torch.float32, CPU, 256)
        loss, chosen = [], []
        for text in texts:
            ids = tokenizer.encode_chat([{'role': 'user', 'content': text}])
            rows = target.forward(target.new_state(len(ids)), ids)[:-1]
            loss.append(torch.nn.functional.cross_entropy(rows, torch.tensor(ids[1:]),
                                                          reduction='none'))
            chosen.append(rows.argmax(-1))
        losses.append(torch.cat(loss).mean().exp().item())
        choices.append(torch.cat(chosen))
    assert figures['perplexity'] == pytest.approx(losses[0], rel=1e-3)
    assert figures['perplexity_quantised'] == pytest.approx(losses[1], rel=1e-3)
    assert figures['tokens'] == len(choices[0])
    assert figures['greedy_agreement'] == pytest.approx(
        (choices[0] == choices[1]).float().mean().item(), abs=0.011)
    stored = load_file(out / 'model.safetensors')
    assert ('lm_head.weight' in stored) == (family == 'llama')
    assert any(name.endswith('q_proj.bias') for name in stored) == (family == 'qwen2')
    for prefix in ('model.layers.0.self_attn.q_proj.bias', 'model.norm.weight'):
        if prefix in stored:
            assert torch.equal(stored[prefix], model.state_dict()[prefix])


@pytest.mark.parametrize('act_order', [False, True])
@pytest.mark.parametrize('group', [32, 64, -1])
@pytest.mark.parametrize('width', [64, 320])
def test_gptq_errs_less_than_rounding(act_order, group, width):
    """On what the matrix reads, which is where it counts."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(48, width, generator=generator)
    mix = torch.randn(width, width, generator=generator) / 8
    x = torch.randn(500, width, generator=generator) @ mix
    result = quantise(weight, x.t() @ x / len(x), Scheme(4, group, act_order))
    index = torch.arange(width) // (width if group == -1 else group)
    plain = round_matrix(weight, 4, group, False, index)[3]
    error, rounding = ((x @ (weight - other).t()).square().mean()
                       for other in (result.dequantize(), plain))
    assert error < 0.7 * rounding
    sizes = torch.bincount(result.groups)
    assert sizes.tolist() == [width if group == -1 else group] * len(sizes)
    assert result.zeros.min() >= 1 and result.levels.min() >= 0 and result.levels.max() <= 15


def test_inputs_that_are_never_used_get_no_weight():
    moments = torch.diag(torch.tensor([1.0] * 31 + [0.0]))
    result = quantise(torch.randn(16, 32), moments, Scheme(4, 32))
    assert bool((result.dequantize()[:, 31] == 0).all())


@pytest.mark.parametrize('kind', ['int8', 'int4'])
def test_weights_are_rounded_on_load(full_bundle, capfd, kind):
    if kind == 'int8' and not has_int8(CPU) or kind == 'int4' and not has_int4(
            CPU, torch.float32, 64):
        pytest.skip('no such kernel')
    plain = generate(capfd, full_bundle, '--draft-tokens', '0')
    alone = generate(capfd, full_bundle, '--draft-tokens', '0', '--weights', kind)
    drafted = generate(capfd, full_bundle, '--weights', kind, '--fixed-draft-length')
    # It is its own reference, and not the unquantised one.
    assert drafted['stats']['drafted'] and drafted['token_ids'] == alone['token_ids']
    assert alone['token_ids'] != plain['token_ids']


@pytest.mark.skipif(installed_library() is None, reason='needs gptqmodel (or auto-gptq), optimum')
@pytest.mark.parametrize('options', [['--act-order'], ['--symmetric']])
def test_libraries_read_it_too(made, options):
    out, _ = made(*options)
    ids = [(7 * i * i + 3 * i + 5) % 300 for i in range(40)]
    own, other = (target.forward(target.new_state(40), ids) for target in (
        load_target(out, torch.bfloat16, CPU, 64, weights=kind) for kind in ('auto', 'library')))
    assert (own - other).abs().mean() < 0.04 * own.abs().mean()


def test_policies_are_compared_on_it(made, prompts, full_bundle, tmp_path, monkeypatch):
    """Traced, and replayed from the traces."""
    monkeypatch.setenv('MEMSPEC_CACHE', str(tmp_path / 'cache'))
    out, _ = made('--act-order')
    bundle = Path(shutil.copytree(full_bundle, tmp_path / 'bundle'))
    manifest = yaml.safe_load((bundle / 'bundle.yaml').read_text())
    manifest['target']['path'] = str(out)
    (bundle / 'bundle.yaml').write_text(yaml.safe_dump(manifest))
    file, traces = tmp_path / 'policies.json', tmp_path / 'traces'
    assert main(['trace', '--bundle', str(bundle), '--prompts', prompts, '--prompts-per-domain',
                 '2', '--max-new-tokens', '24', '--out', str(traces), '--threads', '1']) == 0
    assert main(['bench', 'policies', '--bundle', str(bundle), '--traces', str(traces),
                 '--threads', '1', '--json', str(file)]) == 0
    result = json.loads(file.read_text())
    assert result['normalised']['general_static']['gmean'] == 1.0
    best = result['normalised']['bound']['gmean']
    for policy in ('oracle_static', 'ucb_async', 'hedge', 'memspec', 'oracle_dynamic'):
        assert 0 < result['normalised'][policy]['gmean'] <= best + 1e-9
        assert sum(result['breakdown'][policy].values()) == pytest.approx(1.0)
    # The traces hold what the target says, as transformers has it.
    for record in map(json.loads, (traces / 'outputs.jsonl').read_text().splitlines()):
        expected = greedy(out, record)
        assert record['output_ids'][:24] == expected[:len(record['output_ids'])]


# --- drafts of another target ---

def test_a_target_that_was_replaced_by_a_quantised_one_is_refused(made, tmp_path, model_dirs,
                                                                  capfd):
    """The drafts of a bundle whose manifest has the target's sha256 stay with that target."""
    shutil.copytree(model_dirs / 'target', tmp_path / 'target')
    maker = BundleMaker(tmp_path, Path('target'))
    maker.manifest['target']['sha256'] = {
        'model.safetensors': sha256_of(tmp_path / 'target' / 'model.safetensors')}
    bundle = maker.write()
    generate(capfd, bundle)
    for file in made()[0].iterdir():
        shutil.copy(file, tmp_path / 'target')
    assert main(['generate', '--bundle', str(bundle), '--prompt', PROMPT, *SMALL]) == 1
    assert 'damaged or was replaced' in capfd.readouterr().err


DISTIL = ['--device', 'cpu', '--layers', '1', '--depth', '1', '--features', '', '--kind',
          'shared_layers', '--output-tokens', '8', '--epochs', '1', '--domain-epochs', '1']


def test_drafts_are_distilled_from_it_and_not_from_another(made, prompts, tmp_path, model_dirs,
                                                           capfd):
    out, _ = made()
    work = tmp_path / 'work'
    command = ['distill', '--prompts', prompts, '--eval-prompts', prompts, '--work', str(work),
               *DISTIL]
    assert main([*command, '--bundle', str(out)]) == 0
    result = generate(capfd, work, '--fixed-draft-length')
    assert result['token_ids'] == greedy(out, result) and result['stats']['drafted']
    unquantised = BundleMaker(tmp_path, model_dirs / 'target').write()
    assert main([*command, '--bundle', str(unquantised), '--resume']) == 1
    assert 'was begun with another target' in capfd.readouterr().err


# --- bad input ---

@pytest.mark.parametrize('options, message', [
    (['--group-size', '48'], 'does not divide the widths 64, 96 of this model; use one of 32, -1'),
    (['--group-size', '0'], 'does not divide'),
    (['--damping', '0'], '--damping'), (['--max-prompts', '0'], '--max-prompts'),
    (['--prompt-tokens', '1'], '--prompt-tokens'),
    (['--target', '/no/such/place'], 'neither a bundle'),
    (['--prompts', '/no/such/file'], 'No such file')])
def test_wrong_options_are_refused_before_any_work(tmp_path, model_dirs, prompts, capfd, options,
                                                   message):
    assert main(['quantize', '--target', str(model_dirs / 'target'), '--prompts', prompts,
                 '--out', str(tmp_path / 'out'), *options]) == 1
    assert message in capfd.readouterr().err
    assert not (tmp_path / 'out').exists()


def test_few_prompts_and_places_that_are_taken_are_refused(tmp_path, model_dirs, made, capfd):
    few = tmp_path / 'few.jsonl'
    few.write_text('{"domain": "general", "prompt": "the robot"}\n')
    target = ['--target', str(model_dirs / 'target')]
    assert main(['quantize', *target, '--out', str(tmp_path / 'out'), '--prompts', str(few)]) == 1
    assert 'at least 8' in capfd.readouterr().err
    out, _ = made()
    both = ['--prompts', str(few), '--eval-prompts', str(few)]
    assert main(['quantize', *target, '--out', str(out), *both]) == 1
    assert 'not empty' in capfd.readouterr().err
    assert main(['quantize', '--target', str(out), '--out', str(tmp_path / 'out'), *both]) == 1
    assert 'quantised already' in capfd.readouterr().err


@pytest.mark.parametrize('name', ['model.layers.2.mlp.down_proj.weight', 'model.norm.weight'])
@pytest.mark.parametrize('damage', ['missing', 'NaN'])
def test_a_broken_target_is_named(tmp_path, model_dirs, prompts, capfd, name, damage):
    from safetensors.torch import save_file
    shutil.copytree(model_dirs / 'target', tmp_path / 'target')
    file = tmp_path / 'target' / 'model.safetensors'
    tensors = load_file(file)
    if damage == 'NaN':
        tensors[name].view(-1)[0] = torch.nan
    else:
        del tensors[name]
    save_file(tensors, file)
    assert main(['quantize', '--target', str(tmp_path / 'target'), '--prompts', prompts, '--out',
                 str(tmp_path / 'out')]) == 1
    error = capfd.readouterr().err
    assert name in error and ('missing' in error or 'no numbers' in error)


def test_large_models_are_written_in_shards(tmp_path, made, model_dirs, monkeypatch, prompts):
    whole, _ = made()
    monkeypatch.setattr('memspec_ros.training.quantise._SHARD_BYTES', 20000)
    out = tmp_path / 'out'
    assert main(['quantize', '--target', str(model_dirs / 'target'), '--out', str(out),
                 '--prompts', prompts, '--device', 'cpu']) == 0
    assert len(list(out.glob('model-*-of-*.safetensors'))) > 2
    assert not (out / 'model.safetensors').exists() and not list(out.glob('*.partial'))
    with open_weights(out) as sharded, open_weights(whole) as one:
        assert set(sharded) == set(one)
        assert all(torch.equal(dense(sharded[name]), dense(one[name])) for name in one)


def test_wrong_weights_option_is_refused(full_bundle, capfd):
    assert main(['generate', '--bundle', str(full_bundle), '--prompt', PROMPT, '--weights',
                 'int5', *SMALL]) == 1
    assert "--weights is 'int5'" in capfd.readouterr().err


def test_the_generic_path_holds_its_weights_as_they_are(model_dirs):
    with pytest.raises(MemSpecError, match='lean path'):
        load_target(model_dirs / 'target', torch.float32, CPU, 64, generic=True, weights='int8')
