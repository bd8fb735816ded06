# SPDX-License-Identifier: Apache-2.0
"""What a distillation is said to take before it begins."""

from conftest import PROMPTS
import pytest

from memspec_ros.training import forecast as forecast_module
from memspec_ros.training.forecast import forecast
from memspec_ros.training.lessons import ExitShape, TopShape
from memspec_ros.training.outputs import content_key, OutputRecord
from memspec_ros.training.student import StudentShape
from memspec_ros.training.teacher import TeacherStore

SHARED = TopShape('shared_layers', 2, 1)
FEATURE = TopShape('feature', 1, 1, (1, 3, 4))
VOCABULARY = 40


@pytest.fixture
def say(trainable, tmp_path, monkeypatch):
    """The two lines, on a target that does a position a second."""
    monkeypatch.setattr(forecast_module, 'positions_per_second', lambda target, records: 1.0)

    def words(shape, passes, ahead=1):
        records = [OutputRecord(content_key(ids), 'code', ids, [1] * 8) for ids in PROMPTS]
        store = TeacherStore(tmp_path / 'lessons', 'tiny', shape.depths, top=8)
        return forecast(trainable.model, store, shape, records[1:], records[:1], passes,
                        VOCABULARY, ahead)
    return words


def seconds(text):
    """Of training."""
    count, unit = text.splitlines()[1].split('about ')[1].split(',')[0].split()
    return float(count) * (60 if unit == 'min' else 1)


def test_lessons_take_a_pass_of_the_target(say):
    positions = sum(len(ids) + 8 for ids in PROMPTS)
    assert say(SHARED, [100.0]).startswith(f'lessons: {positions} positions, about')


def test_where_nothing_is_to_be_made_nothing_is_said(trainable):
    class Full:
        def missing(self, records):
            return []

    assert forecast(trainable.model, Full(), SHARED, [], [], [], VOCABULARY, 1) == ''


def test_a_top_takes_its_share_of_the_target(say, trainable):
    """Three passes of one layer, against all layers and the whole head."""
    config = trainable.model.config
    layer = sum(tensor.numel() for tensor in trainable.model.layers[2].tensors().values())
    whole = config.layers * layer + config.vocab_size * config.hidden_size
    least, most = 3 * layer / whole, 4 * layer / whole
    assert least * 6e4 < seconds(say(SHARED, [4e4, 2e4])) < most * 6e4 + 60


@pytest.mark.parametrize('shape', [FEATURE, ExitShape(features=(3, 1), rank=8)],
                         ids=lambda shape: shape.kind)
def test_more_positions_take_longer(say, shape):
    assert seconds(say(shape, [6e5])) == pytest.approx(6 * seconds(say(shape, [1e5])), rel=0.1)


def test_steps_ahead_take_longer(say):
    assert seconds(say(FEATURE, [1e5], 3)) == pytest.approx(
        2.2 * seconds(say(FEATURE, [1e5])), rel=0.1)
    assert seconds(say(SHARED, [1e5], 3)) == seconds(say(SHARED, [1e5]))


def test_wider_students_take_longer(say):
    assert (seconds(say(StudentShape(width=64), [1e6]))
            > 1.5 * seconds(say(StudentShape(width=32), [1e6])))
