from __future__ import annotations

import pytest

from agent_core.models import sse
from agent_core.models.sse import EventParser


def parsed(*pieces: bytes) -> list[bytes]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)]


TWO = "data: héllo\ndata: again\n\nid: 7\nretry: 5\ndata: wörld\n\n"


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_events_are_the_same_wherever_they_are_cut(end: str) -> None:
    wire = TWO.replace("\n", end).encode()

    for at in range(len(wire) + 1):
        assert parsed(wire[:at], wire[at:]) == ["héllo\nagain".encode(), "wörld".encode()]
    assert parsed(*(wire[at : at + 1] for at in range(len(wire)))) == parsed(wire)


@pytest.mark.parametrize(
    ("wire", "expected"),
    [
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b"data:a\n\n", [b"a"]),
        (b"data:  a \n\n", [b" a "]),
        (b"data: a: b\n\n", [b"a: b"]),
        (b"data: a\r\n\rdata: b\n\r\n", [b"a", b"b"]),
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        (b"data: \xef\xbb\xbf\n\n", [b"\xef\xbb\xbf"]),
        (b": keep-alive\n\ndata: a\n\n", [b"a"]),
        (b"data: a\n: within\n\n", [b"a"]),
        (b"event: error\ndata: a\n\n", [b"a"]),
        (b"event: ping\ndata: a\n\ndata: b\n\n", [b"b"]),
        (b"event: message_stop\n\n", []),
        (b"data\n\n", []),
        (b"data:\n\n", []),
        (b"datas: a\nnonsense\n\n", []),
        (b"\n\n\n", []),
        (b"data: a\x0b\x0c\xc2\x85\xe2\x80\xa8b\n\n", [b"a\x0b\x0c\xc2\x85\xe2\x80\xa8b"]),
        (b"data: never ended\n", []),
        (b"data: a\n\ndata: never ended", [b"a"]),
        (b"", []),
    ],
)
def test_lines_mean_what_the_standard_says(wire: bytes, expected: list[bytes]) -> None:
    assert parsed(wire) == expected
    assert parsed(*(wire[at : at + 1] for at in range(len(wire)))) == expected


def test_an_event_without_end_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    parser = EventParser()
    for _ in range(50):
        assert parser.feed(b": 20 bytes of that\n\n") == []

    for _ in range(12):
        assert parser.feed(b"data: ab") == []
    with pytest.raises(ValueError, match="without end"):
        parser.feed(b"data: ab")
