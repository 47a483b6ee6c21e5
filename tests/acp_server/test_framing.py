from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acp_server.framing import MAX_LINE_BYTES, LineSplitter


def test_lines_come_without_their_newline_and_in_order():
    splitter = LineSplitter()

    assert splitter.feed(b"one\ntwo\n\nthree") == [b"one", b"two", b""]
    assert splitter.feed(b" four\n") == [b"three four"]


@pytest.mark.requirement("ACP-002", "B106")
@given(st.text(max_size=200), st.lists(st.integers(0, 400), max_size=20))
def test_however_the_bytes_are_cut_the_lines_are_the_same(text, cuts):
    data = text.encode("utf-8", "replace") + b"\n"
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    splitter = LineSplitter()

    pieces = [data[start:end] for start, end in pairwise(edges)]
    lines = [line for piece in pieces for line in splitter.feed(piece)]

    assert lines == data.split(b"\n")[:-1]
    assert splitter.finish() == b""


@pytest.mark.requirement("B103")
@pytest.mark.parametrize("n_bytes", [65_535, 65_536, 65_537, 2**20])
def test_a_line_beyond_the_usual_stream_limits_is_one_line(n_bytes):
    splitter = LineSplitter()

    assert splitter.feed(b"x" * n_bytes + b"\n") == [b"x" * n_bytes]


def test_a_line_of_exactly_the_limit_passes_and_one_byte_more_does_not():
    splitter = LineSplitter(max_line_bytes=4)

    assert splitter.feed(b"1234\n12345\n1234\n") == [b"1234", None, b"1234"]


def test_a_line_that_is_too_long_is_dropped_up_to_its_newline_whatever_its_pieces():
    splitter = LineSplitter(max_line_bytes=4)

    lines = [line for byte in b"123456789\nok\n" for line in splitter.feed(bytes([byte]))]

    assert lines == [None, b"ok"]


def test_nothing_of_a_line_that_is_too_long_is_kept_in_memory():
    splitter = LineSplitter(max_line_bytes=4)

    splitter.feed(b"x" * 1000)
    splitter.feed(b"x" * 1000)

    assert splitter._parts == []


@pytest.mark.requirement("B097")
def test_half_a_line_before_the_end_is_the_last_line():
    splitter = LineSplitter()
    splitter.feed(b"one\nhalf")

    assert splitter.finish() == b"half"
    assert splitter.finish() == b""


def test_half_a_line_that_is_too_long_is_reported_at_the_end():
    splitter = LineSplitter(max_line_bytes=4)
    splitter.feed(b"12345")

    assert splitter.finish() is None
    assert splitter.finish() == b""


def test_the_limit_is_far_above_what_people_send():
    assert MAX_LINE_BYTES == 64 * 2**20
