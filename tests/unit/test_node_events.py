"""The reader of server-sent events: the same events however the stream is cut, and bounded whatever comes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from diagnosis.contracts.control import CollectEvent, HelloEvent
from node_daemon.events import EVENT_BYTES_MAX, EventParser, read_event

STREAM = (
    b": welcome\n\n"
    b'event: hello\ndata: {"period_ms": 500}\n\n'
    b"data: one\ndata:two\r\ndata\r\n\r\n"
    b"event: later\rdata: x\r\r"
    b"event: nothing\n\n"
    b"id: 7\nretry: 1\nevent: last\ndata: y\n\n"
    b"event: unfinished\ndata: z\n"
)
EVENTS = [
    ("hello", '{"period_ms": 500}'),
    ("message", "one\ntwo\n"),
    ("later", "x"),
    ("last", "y"),
]


def fed(parts: list[bytes]) -> list[tuple[str, str]]:
    parser = EventParser()
    return [event for part in parts for event in parser.feed(part)]


def test_a_whole_stream_is_cut_into_events() -> None:
    assert fed([STREAM]) == EVENTS


def test_byte_by_byte_gives_the_same_events() -> None:
    assert fed([bytes([byte]) for byte in STREAM]) == EVENTS


@given(st.lists(st.integers(1, len(STREAM) - 1), max_size=12, unique=True))
@example([STREAM.index(b"\r\n") + 1])
def test_any_cut_gives_the_same_events(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    assert fed([STREAM[a:b] for a, b in pairwise(places)]) == EVENTS


def held(parser: EventParser) -> int:
    return len(parser._line) + sum(map(len, parser._data)) + len(parser._kind)


def test_an_endless_line_is_bounded_and_the_next_event_is_read() -> None:
    parser = EventParser()
    parser.feed(b"data: ")
    for _ in range(200):
        assert parser.feed(b"x" * 10_000) == []
        assert held(parser) <= 2 * EVENT_BYTES_MAX
    assert parser.feed(b"\n\ndata: next\n\n") == [("message", "next")]


def test_an_event_of_endless_lines_is_bounded_and_the_next_one_is_read() -> None:
    parser = EventParser()
    for _ in range(100_000):
        parser.feed(b"data: 0123456789\n")
    assert held(parser) <= 2 * EVENT_BYTES_MAX
    assert parser.feed(b"\nevent: e\ndata: next\n\n") == [("e", "next")]


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=20))
def test_noise_never_raises(parts: list[bytes]) -> None:
    for kind, data in fed(parts):
        read_event(kind, data)


def test_known_events_are_read_and_others_passed_over() -> None:
    assert read_event("hello", '{"period_ms": 500, "of_a_newer_controller": 1}') == HelloEvent(period_ms=500)
    collect = read_event("collect", '{"incident": "a1", "job_id": 7, "restart": 0, "ranks": [3]}')
    assert collect == CollectEvent(incident="a1", job_id=7, restart=0, ranks=[3])
    for kind, data in (("reboot", "{}"), ("hello", "{}"), ("hello", "[" * 100_000), ("collect", '{"ranks": "x"}')):
        assert read_event(kind, data) is None
