from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench.sse import Event, EventDecoder

STREAM = (
    '\ufeffdata: {"text": "héllo ✓"}\n\n'
    ": a comment\r\n"
    "event: note\r\ndata: one\r\ndata:two\r\n\r\n"
    "data: three\r\rdata\n\nid: 4\nretry: 5\n\n"
    'error: {"message": "bad"}\n\ndata: [DONE]\n\n'
).encode()
EVENTS = [
    Event("message", '{"text": "héllo ✓"}'),
    Event("note", "one\ntwo"),
    Event("message", "three"),
    Event("message", ""),
    Event("error", '{"message": "bad"}'),
    Event("message", "[DONE]"),
]


def decode(*pieces: bytes) -> list[Event]:
    decoder = EventDecoder()
    events = [event for piece in pieces for event in decoder.feed(piece)]
    return events + decoder.close()


def test_whole() -> None:
    assert decode(STREAM) == EVENTS


def test_byte_by_byte() -> None:
    assert decode(*(STREAM[i : i + 1] for i in range(len(STREAM)))) == EVENTS


def test_split_in_two_at_every_boundary() -> None:
    for cut in range(len(STREAM) + 1):
        assert decode(STREAM[:cut], STREAM[cut:]) == EVENTS, cut


@given(st.lists(st.integers(0, len(STREAM)), max_size=30))
def test_split_anywhere(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    assert decode(*(STREAM[a:b] for a, b in itertools.pairwise(edges))) == EVENTS


@given(st.lists(st.binary(max_size=8)))
def test_any_bytes_are_cut_independent(pieces: list[bytes]) -> None:
    assert decode(*pieces) == decode(b"".join(pieces))


def test_events_come_as_soon_as_they_are_complete() -> None:
    decoder = EventDecoder()
    assert decoder.feed(b"data: a\n") == []
    assert decoder.feed(b"\ndata: b") == [Event("message", "a")]


@pytest.mark.parametrize("end", ["", "\n", "\r", "\r\n"])
def test_close_gives_an_event_without_its_blank_line(end: str) -> None:
    assert decode(f"data: [DONE]{end}".encode()) == [Event("message", "[DONE]")]
