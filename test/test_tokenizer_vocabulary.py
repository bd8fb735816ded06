# SPDX-License-Identifier: Apache-2.0
"""The tokenizer's thin face, and whether a draft's ids mean what the target's mean."""

from concurrent.futures import ThreadPoolExecutor
import json

from conftest import build_tokenizer, REAL_VOCABULARY
from hypothesis import given
from hypothesis import strategies as st
import pytest

from memspec_ros.models.errors import BundleError, InvalidRequestError, VocabularyMismatchError
from memspec_ros.models.tokenizer import check_same_vocabulary, read_vocabulary, Tokenizer


@pytest.fixture(scope='module')
def tokenizer(tokenizer_dir):
    return Tokenizer(tokenizer_dir)


def test_sizes_and_special_ids(tokenizer):
    assert tokenizer.size == REAL_VOCABULARY
    assert tokenizer.eos_id == 2 and 2 in tokenizer.special_ids


@given(st.text(max_size=50))
def test_plain_text_survives_a_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_conversation_is_tokenised_once(tokenizer):
    """Pitfall 15: the template writes its own special tokens, the tokenizer adds none."""
    messages = [{'role': 'system', 'content': 'be brief'}, {'role': 'user', 'content': 'hi'}]
    ids = tokenizer.encode_chat(messages)
    expected = ('<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n'
                '<|im_start|>assistant\n')
    assert ids == tokenizer.encode(expected)
    assert [i for i in ids if i < 3] == [1, 2, 1, 2, 1]


def test_a_beginning_of_sequence_token_is_never_doubled(tmp_path):
    """Pitfall 15, with a tokenizer that adds one of its own to all text it encodes."""
    template = "{{ '<s>' }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    build_tokenizer(tmp_path, template, ('<pad>', '<s>', '<|im_end|>'))
    file = tmp_path / 'tokenizer.json'
    raw = json.loads(file.read_text())
    raw['post_processor'] = {
        'type': 'TemplateProcessing', 'pair': [],
        'single': [{'SpecialToken': {'id': '<s>', 'type_id': 0}},
                   {'Sequence': {'id': 'A', 'type_id': 0}}],
        'special_tokens': {'<s>': {'id': '<s>', 'ids': [1], 'tokens': ['<s>']}}}
    file.write_text(json.dumps(raw))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer._tokenizer.encode('hi')[0] == 1  # it does add one
    ids = tokenizer.encode_chat([{'role': 'user', 'content': 'hi'}])
    assert ids[0] == 1 and ids.count(1) == 1
    assert 1 not in tokenizer.encode('hi')


def test_without_a_template_texts_are_joined(tmp_path):
    build_tokenizer(tmp_path, template=None)
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode_chat([{'role': 'system', 'content': 'a'},
                                 {'role': 'user', 'content': 'b'}])
    assert tokenizer.decode(ids) == 'a\n\nb'


def test_a_template_that_refuses_a_conversation_is_a_bad_request(tmp_path):
    build_tokenizer(tmp_path, "{% if messages[0]['role'] == 'system' %}"
                              "{{ raise_exception('no system role here') }}{% endif %}x")
    tokenizer = Tokenizer(tmp_path)
    with pytest.raises(InvalidRequestError, match='no system role here'):
        tokenizer.encode_chat([{'role': 'system', 'content': 'a'}])
    assert tokenizer.encode_chat([{'role': 'user', 'content': 'a'}])


def test_text_that_is_not_unicode_is_a_bad_request(tokenizer):
    with pytest.raises(InvalidRequestError, match='cannot be encoded'):
        tokenizer.encode_chat([{'role': 'user', 'content': 'a\ud800b'}])


def test_special_tokens_have_no_text(tokenizer):
    ids = [*tokenizer.encode('ab'), 2, *tokenizer.encode('c'), 1]
    assert tokenizer.decode(ids) == 'abc'


def test_spaces_before_punctuation_are_not_cleaned_up(tokenizer):
    text = "it 's a , test . isn 't it ?"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_of_the_padding_have_no_text(tokenizer):
    assert tokenizer.decode([REAL_VOCABULARY + 5]) == ''


def test_threads_may_share_a_tokenizer(tokenizer):
    texts = [f'text {i} with a few words ' * 5 for i in range(40)]
    expected = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(tokenizer.encode, texts * 3)) == expected * 3


def test_a_directory_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(BundleError, match='no usable tokenizer'):
        Tokenizer(tmp_path)


def test_the_vocabulary_is_read_with_added_tokens(tokenizer_dir, tokenizer):
    vocabulary = read_vocabulary(tokenizer_dir)
    assert sorted(vocabulary) == list(range(REAL_VOCABULARY))
    assert vocabulary[2] == '<|im_end|>'
    for i in range(REAL_VOCABULARY):
        assert tokenizer._tokenizer.convert_ids_to_tokens(i) == vocabulary[i]


def test_unigram_vocabularies_are_lists(tmp_path):
    (tmp_path / 'tokenizer.json').write_text(json.dumps({
        'model': {'type': 'Unigram', 'vocab': [['<unk>', 0.0], ['▁a', -1.5]]},
        'added_tokens': [{'id': 2, 'content': '<eos>'}]}))
    assert read_vocabulary(tmp_path) == {0: '<unk>', 1: '▁a', 2: '<eos>'}


@pytest.mark.parametrize('text', ['', '{', '[]', '5', '{"model": 5}', '{"model": {}}',
                                  '{"model": {"vocab": "abc"}}', '{"model": {"vocab": [1]}}'])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, text):
    (tmp_path / 'tokenizer.json').write_text(text)
    with pytest.raises(BundleError, match='tokenizer.json: not a tokenizer file'):
        read_vocabulary(tmp_path)


def test_a_missing_tokenizer_file_is_named(tmp_path):
    with pytest.raises(BundleError, match='tokenizer.json: No such file'):
        read_vocabulary(tmp_path)


TARGET = dict(enumerate('abcdef'))


def test_the_same_vocabulary_passes_and_so_does_a_smaller_one():
    check_same_vocabulary(TARGET, dict(TARGET), 'd')
    check_same_vocabulary(TARGET, dict(list(TARGET.items())[:3]), 'd')


def test_the_first_differing_id_is_named():
    """Pitfall 10: the smallest one, whatever the order of the file."""
    draft = {5: 'X', 3: 'Y', **{i: TARGET[i] for i in (4, 0, 1, 2)}}
    with pytest.raises(VocabularyMismatchError,
                       match="draft 'd': id 3 is 'Y', in the target it is 'd'"):
        check_same_vocabulary(TARGET, draft, 'd')


def test_an_id_the_target_lacks_is_named():
    with pytest.raises(VocabularyMismatchError, match=r"id 6 \('g'\) does not exist"):
        check_same_vocabulary(TARGET, {**TARGET, 7: 'h', 6: 'g'}, 'd')
