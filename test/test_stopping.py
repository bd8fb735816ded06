# SPDX-License-Identifier: Apache-2.0
"""Stop strings: the answer ends right before the first one, however its text arrives."""

from hypothesis import example, given, settings
from hypothesis import strategies as st
import pytest

from memspec_ros.decoding.stopping import StopStrings

texts = st.text(alphabet='abc', max_size=40)
stop_lists = st.lists(st.text(alphabet='abc', min_size=1, max_size=4), max_size=4)


def let_through(text, stops, edges=()):
    """(text let through, stop string met) when ``text`` arrives cut at ``edges``."""
    scanner, out = StopStrings(stops), ''
    cuts = sorted({0, *(min(e, len(text)) for e in edges), len(text)})
    for first, last in zip(cuts, cuts[1:]):
        piece = scanner.add(text[first:last])
        assert scanner.hit is None or not scanner.add('more')
        out += piece
    return out + scanner.flush(), scanner.hit


@given(texts, st.text(alphabet='abc', min_size=1, max_size=4), st.lists(st.integers(0, 40)))
@settings(max_examples=300)
def test_one_stop_string_cuts_at_its_first_occurrence_for_any_split(text, stop, edges):
    out, hit = let_through(text, [stop], edges)
    assert out == text.split(stop)[0]
    assert hit == (stop if stop in text else None)


@given(texts, stop_lists, st.lists(st.integers(0, 40)))
@example('abcd', ['abcd', 'bc'], [])
@example('abcd', ['abcd', 'bc'], [1, 2, 3])
@settings(max_examples=500)
def test_of_several_the_first_to_be_complete_cuts_for_any_split(text, stops, edges):
    ends = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    expected = (text, None)
    if ends:
        end, _, stop = min(ends)
        expected = text[:end - len(stop)], stop
    assert let_through(text, stops, edges) == expected


@given(texts, stop_lists)
def test_no_stop_string_is_ever_let_through(text, stops):
    out, _ = let_through(text, stops, range(41))
    assert not any(stop in out for stop in stops) and text.startswith(out)


@given(texts, stop_lists)
def test_no_more_is_held_back_than_may_begin_a_stop_string(text, stops):
    scanner, out = StopStrings(stops), ''
    for character in text:
        out += scanner.add(character)
        if scanner.hit is None:
            held = text[len(out):len(out + scanner._held)]
            assert held == '' or any(stop.startswith(held) for stop in stops)


def test_a_false_start_is_let_through_at_once_when_it_turns_out_to_be_one():
    scanner = StopStrings(['\n\nUser:'])
    assert [scanner.add(c) for c in 'a\n\nUsed'] == ['a', '', '', '', '', '', '\n\nUsed']


def test_an_overlapping_restart_is_found():
    assert let_through('aaab', ['aab'], range(5)) == ('a', 'aab')
    assert let_through('ababac', ['abac'], range(7)) == ('ab', 'abac')


def test_without_stop_strings_everything_passes():
    scanner = StopStrings([])
    assert scanner.add('abc') == 'abc' and scanner.flush() == ''


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match='empty'):
        StopStrings(['a', ''])


def test_nothing_is_added_after_a_hit():
    scanner = StopStrings(['x'])
    assert scanner.add('ax') == 'a' and scanner.hit == 'x'
    assert scanner.add('b') == '' and scanner.flush() == '' and scanner.hit == 'x'
