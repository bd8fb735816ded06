# SPDX-License-Identifier: Apache-2.0
"""Text comes out piece by piece, in whole characters, and is the whole text in the end."""

from fakes import VOCABULARY
from hypothesis import example, given, settings
from hypothesis import strategies as st
import pytest

from memspec_ros.decoding.detokenizer import Detokenizer
from memspec_ros.decoding.output import OutputStream
from memspec_ros.models.tokenizer import Tokenizer

REPLACEMENT = '\ufffd'
EOS = 256


def byte_decode(ids):
    """A byte-level decoder: ids below 256 are bytes, others have no text."""
    return bytes(i for i in ids if i < 256).decode('utf-8', errors='replace')


def pieces_of(decode, ids):
    detokenizer = Detokenizer(decode)
    return [detokenizer.add(i) for i in ids] + [detokenizer.flush()]


def split(data, encoded):
    """A byte string cut anywhere, as tokens of several bytes cut it."""
    edges = sorted(data.draw(st.lists(st.integers(0, len(encoded)), max_size=12)))
    return [encoded[a:b] for a, b in zip([0, *edges], [*edges, len(encoded)])]


@given(st.lists(st.integers(0, 256), max_size=80))
@example([0xF0, 0x9F, 0x98, 0x80])
@example([0xFF] * 9)
@example([0xE2, 0x82, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 65])
@example([0xEF, 0xBF, 0xBD, 0xEF, 0xBF])
@settings(max_examples=400)
def test_pieces_and_flush_equal_the_decode_of_all_for_any_bytes(ids):
    assert ''.join(pieces_of(byte_decode, ids)) == byte_decode(ids)


@given(st.text(max_size=40), st.data())
@settings(max_examples=300)
def test_text_cut_into_tokens_anywhere_comes_out_whole(text, data):
    """Pitfall 17: emoji and CJK are split across tokens, and never shown in halves."""
    parts = split(data, text.encode())

    def decode(ids):
        return b''.join(parts[i] for i in ids).decode('utf-8', errors='replace')
    pieces = pieces_of(decode, range(len(parts)))
    assert ''.join(pieces) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


@given(st.text(alphabet='aé日😀', min_size=1, max_size=12))
def test_a_character_comes_with_its_last_byte_not_later(text):
    detokenizer = Detokenizer(byte_decode)
    shown = ''
    for character in text:
        for byte in character.encode():
            shown += detokenizer.add(byte)
        assert text.startswith(shown) and len(shown.encode()) >= len(character.encode())
        assert shown.endswith(character)


@given(st.text(max_size=60))
@settings(max_examples=60)
def test_the_real_decoder_agrees(tokenizer, text):
    ids = tokenizer.encode(text)
    pieces = pieces_of(tokenizer.decode, ids)
    assert ''.join(pieces) == tokenizer.decode(ids)
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


@given(st.lists(st.integers(0, 299), max_size=40))
@settings(max_examples=150)
def test_the_real_decoder_agrees_on_any_ids(tokenizer, ids):
    assert ''.join(pieces_of(tokenizer.decode, ids)) == tokenizer.decode(ids)


@pytest.fixture(scope='module')
def tokenizer(tokenizer_dir):
    return Tokenizer(tokenizer_dir)


def test_tokens_without_text_do_not_disturb_their_neighbours():
    emoji = list('😀'.encode())
    ids = [EOS, *emoji[:2], EOS, *emoji[2:], EOS, 65, EOS]
    pieces = pieces_of(byte_decode, ids)
    assert ''.join(pieces) == '😀A' and REPLACEMENT not in ''.join(pieces)


def test_spaces_that_a_decoder_takes_from_the_front_are_kept_between_tokens():
    """Pitfall 17: SentencePiece drops the space of the first token it is given."""
    words = ['▁Hello', '▁wide', ',', '▁world', '▁', '▁!']

    def decode(ids):
        text = ''.join(words[i] for i in ids).replace('▁', ' ')
        return text[1:] if text.startswith(' ') else text
    pieces = pieces_of(decode, range(len(words)))
    assert ''.join(pieces) == decode(range(len(words))) == 'Hello wide, world  !'


def test_a_space_after_a_token_without_text_is_kept():
    words = ['▁Hello', '', '▁world', '', '', '▁again']

    def decode(ids):
        text = ''.join(words[i] for i in ids).replace('▁', ' ')
        return text[1:] if text.startswith(' ') else text
    assert ''.join(pieces_of(decode, range(len(words)))) == 'Hello world again'


def test_an_unfinished_character_is_flushed_as_broken():
    detokenizer = Detokenizer(byte_decode)
    assert [detokenizer.add(b) for b in (65, 0xF0, 0x9F)] == ['A', '', '']
    assert detokenizer.flush() == REPLACEMENT
    assert detokenizer.flush() == ''


def test_what_is_held_back_is_short_even_for_garbage():
    shown = 0
    detokenizer = Detokenizer(byte_decode)
    for count in range(1, 60):
        shown += len(detokenizer.add(0xFF))
        assert count - shown <= 3


def test_the_window_does_not_grow_with_the_text():
    longest = 0

    def decode(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return byte_decode(ids)
    pieces_of(decode, list(('word ' * 200 + '日本語').encode()))
    assert longest < 10


@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=40),
       st.lists(st.integers(1, 5), min_size=1, max_size=8),
       st.lists(st.text(alphabet='abé\ufffd', min_size=1, max_size=3), max_size=3))
@example(list('xaéb'.encode()), [3], ['é'])
@settings(max_examples=200)
def test_an_output_stream_is_the_same_for_any_blocks(ids, sizes, stops):
    """Blocks are what drafts got accepted: text, ids and end must not depend on them."""
    def run(block_sizes):
        stream = OutputStream(byte_decode, stops)
        text, place, taken, block = '', 0, 0, 0
        while place < len(ids) and not stream.stopped:
            size = block_sizes[block % len(block_sizes)]
            piece, count = stream.add(ids[place:place + size])
            text, taken = text + piece, taken + count
            place, block = place + size, block + 1
        text += stream.finish()
        assert text == stream.text and taken == len(stream.token_ids)
        return text, stream.token_ids, stream.stopped
    text, kept, stopped = run(sizes)
    assert (text, kept, stopped) == run([1])
    assert kept == ids[:len(kept)]
    assert not any(stop in text for stop in stops)
    assert byte_decode(kept).startswith(text)
    if not stopped:
        assert text == byte_decode(ids)
