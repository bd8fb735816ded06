# SPDX-License-Identifier: Apache-2.0
"""What prefetching costs decoding: on fakes that say, and on a tiny model."""

import json

from fakes import Bench, counting, FakeDrafter, FakeKind
import pytest
from replay_maker import drafts_of

from memspec_ros.bench.prefetch import compare, format_table
from memspec_ros.cli import main
from memspec_ros.models.errors import InvalidRequestError, MemSpecError

DRAFTS = ('near', 'far', 'top')


class Slow(FakeKind):
    """Attaching takes time of the thread that decodes."""

    sec, clock = 0.0, None

    def attach(self, tensors):
        self.clock.advance(self.sec)
        return super().attach(tensors)


def bench_of(attach_sec=0.0, load=(0.25, 'ok'), drafts=DRAFTS):
    kinds = {draft: Slow(lambda: FakeDrafter(lambda prefix: 0)) for draft in drafts}
    bench = Bench(kinds, next_token=counting, step_sec=0.1,
                  script={draft: [load] for draft in drafts})
    bench.loader.may_wait = True
    for kind in kinds.values():
        kind.sec, kind.clock = attach_sec, bench.clock
    return bench


def compared(bench, drafts=DRAFTS, count=2, tokens=40, runs=2):
    requests = [lambda: bench.request(max_new_tokens=tokens) for _ in range(count)]
    return compare(bench.controller, drafts_of(drafts), requests, runs, lambda line: None)


def test_a_load_that_takes_nothing_from_decoding_costs_nothing():
    bench = bench_of()
    result = compared(bench)
    assert result['p95_ms'] == {kind: pytest.approx(100) for kind in ('idle', 'loading')}
    assert result['ratio'] == pytest.approx(1) and result['within']
    # Two prompts, two runs; of each answer's tokens all but the first come after another.
    assert result['tokens'] == {'idle': 4 * 39, 'loading': 4 * 39}
    assert result['draft'] == 'near' and result['loaded'] == ['far', 'top']
    # A load takes two and a half iterations, and the next begins at once.
    assert result['loads'] >= 4 * 12 and 0.3 < result['loads_per_iteration'] < 0.4
    assert {draft for _, draft in bench.loader.started} == set(DRAFTS)
    assert 'p95 1.000 times as long' in format_table(result)


def test_what_loads_take_from_decoding_is_seen():
    result = compared(bench_of(attach_sec=0.05))
    assert result['p95_ms'] == {'idle': pytest.approx(100), 'loading': pytest.approx(150)}
    assert result['ratio'] == pytest.approx(1.5) and not result['within']
    assert result['p50_ms']['loading'] == pytest.approx(100)


def test_a_bundle_with_one_other_draft_has_it_loaded_again_and_again():
    bench = bench_of(drafts=DRAFTS[:2])
    result = compared(bench, DRAFTS[:2], 1, runs=1)
    assert result['loaded'] == ['far'] and result['loads'] >= 12


def test_nothing_is_loaded_beside_the_other_answers():
    bench = bench_of()
    idle, generate = [], bench.controller.generate

    def watched(request):
        before = len(bench.loader.started)
        yield from generate(request)
        idle.append(len(bench.loader.started) == before)
    bench.controller.generate = watched
    compared(bench, count=2, runs=1)
    assert idle == [True, False, False, True]  # in rotating order


def test_what_cannot_be_measured_is_said():
    with pytest.raises(InvalidRequestError, match="no draft to load beside 'near'"):
        compared(bench_of(), DRAFTS[:1])
    with pytest.raises(InvalidRequestError, match='too short'):
        compared(bench_of(), tokens=1)
    with pytest.raises(InvalidRequestError, match='0 prompts'):
        compared(bench_of(), count=0)
    with pytest.raises(MemSpecError, match="draft 'near': no such sector"):
        compared(bench_of(load=(0.25, 'no such sector')))


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / 'prompts.jsonl'
    file.write_text(json.dumps({'domain': 'general', 'prompt': 'the red cube'}) + '\n')
    return file


def prefetch(bundle, prompts, *more):
    return main(['bench', 'prefetch', '--bundle', str(bundle), '--prompts', str(prompts),
                 '--device', 'cpu', '--dtype', 'float32', '--threads', '1', '--context', '200',
                 '--runs', '1', *more])


@pytest.mark.parametrize('ratio', ['2.7', '0'])
def test_the_command(full_bundle, prompts, tmp_path, capfd, ratio):
    file = tmp_path / 'prefetch.json'
    assert prefetch(full_bundle, prompts, '--max-new-tokens', '60', '--load-ratio', ratio,
                    '--json', str(file)) == 0
    assert 'a load in flight' in capfd.readouterr().out
    result = json.loads(file.read_text())
    assert set(result['p95_ms']) == {'idle', 'loading'} and min(result['p95_ms'].values()) > 0
    assert result['ratio'] == pytest.approx(
        result['p95_ms']['loading'] / result['p95_ms']['idle'])
    iterations = result['loads'] / result['loads_per_iteration']
    # One with the prompt, and one an iteration.
    assert 1 <= result['loads'] <= round(iterations) + result['prompts'] * result['runs']


@pytest.mark.parametrize('arguments, words', [
    (['--runs', '0'], '--runs is 0'), (['--load-ratio', '-1'], '--load-ratio is -1'),
    (['--storage-latency-ms', 'nan'], 'latency_ms is nan'),
    (['--max-new-tokens', '200'], 'leaves room'), (['--draft-tokens', '0'], '--draft-tokens')])
def test_errors_are_one_line(full_bundle, prompts, capfd, arguments, words):
    assert prefetch(full_bundle, prompts, *arguments) == 1
    error = capfd.readouterr().err.strip()
    assert error.startswith('memspec bench: ') and words in error and '\n' not in error
