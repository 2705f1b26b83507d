from __future__ import annotations

import msgpack
import orjson
import pytest

from pipeline.delivery import BatchSubscriber, Subscriber, note_body


class Wire:
    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes, str]] = []

    def publish(self, subject: str, payload: bytes, reply: str) -> bool:
        self.sent.append((subject, payload, reply))
        return True


def batch(wire: Wire, max_bytes: int = 10_000) -> BatchSubscriber:
    return BatchSubscriber(wire.publish, "_INBOX.k.batch", "v1.want.codec-4", max_bytes)


def test_in_json_form_every_event_is_a_message():
    wire = Wire()
    out = Subscriber(wire.publish, "_INBOX.k.1", "v1.want.codec-4")
    prefix = out.prefix(77, 12, 3)
    out.event(prefix, 5, b'{"x":"\xc3\xa4"}')
    out.event(prefix, 6, b"[]", "stop")
    out.note(77, 12, note_body("request_progress", stage="prefill"))
    out.flush()
    assert {(subject, reply) for subject, _, reply in wire.sent} == {("_INBOX.k.1", "v1.want.codec-4")}
    assert [orjson.loads(payload) for _, payload, _ in wire.sent] == [
        {"n": 5, "a": 12, "c": 3, "event": {"x": "ä"}},
        {"n": 6, "a": 12, "c": 3, "end": "stop", "event": []},
        {"a": 12, "event": {"type": "request_progress", "stage": "prefill"}},
    ]


@pytest.mark.parametrize("size", [0, 1, 255, 65_535, 65_536, 200_000])
@pytest.mark.parametrize("end", ["", "insufficient_system_resource"])
def test_in_batch_form_any_msgpack_decoder_reads_every_event(size, end):
    wire = Wire()
    out = batch(wire, 1 << 20)
    event = b"e" * size
    out.event(out.prefix(2**64 - 1, 2**32 - 1, 255), 2**32 - 2, event, end)
    out.event(out.prefix(0, 0, 0), 0, b"second")
    out.flush()
    assert len(wire.sent) == 1
    assert msgpack.unpackb(wire.sent[0][1]) == [
        [2**64 - 1, 2**32 - 1, 255, 2**32 - 2, end or None, event],
        [0, 0, 0, 0, None, b"second"],
    ]


def test_a_batch_is_sent_with_the_flush_and_only_when_there_is_something():
    wire = Wire()
    out = batch(wire)
    out.flush()
    assert wire.sent == []
    for n in range(20):  # more than a short msgpack array holds
        out.event(out.prefix(9, 1, 0), n, b"x")
    assert wire.sent == []
    out.flush()
    out.flush()
    assert [row[3] for row in msgpack.unpackb(wire.sent[0][1])] == list(range(20))
    assert len(wire.sent) == 1


def test_a_note_leaves_at_once_and_keeps_its_place():
    wire = Wire()
    out = batch(wire)
    out.event(out.prefix(9, 1, 0), 4, b"x")
    out.note(9, 1, b"{}")
    assert msgpack.unpackb(wire.sent[0][1]) == [[9, 1, 0, 4, None, b"x"], [9, 1, None, None, None, b"{}"]]


def test_a_batch_stays_near_its_limit():
    wire = Wire()
    out = batch(wire, 5_000)
    for n in range(100):
        out.event(out.prefix(9, 1, 0), n, b"y" * 300)
    out.flush()
    assert max(len(payload) for _, payload, _ in wire.sent) <= 5_000 + 400
    numbers = [row[3] for _, payload, _ in wire.sent for row in msgpack.unpackb(payload)]
    assert numbers == list(range(100))
