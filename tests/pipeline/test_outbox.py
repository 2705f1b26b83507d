"""The engine's end of the token path. Both ends under a lossy network: test_streams.py."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import pytest

from pipeline import outbox as module
from pipeline.metrics import counters
from pipeline.outbox import Entry, Outbox, TokenRow
from pipeline.wire import AckKind, decode_frame, encode_acks

ONE, TWO = (1 << 32) | 5, (2 << 32) | 6
RID, OTHER_RID = "5a" * 16, "6b" * 16
STOP = 1


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def time_ns(self) -> int:
        return 12_345


@dataclass
class Sent:
    """What left the outbox, rows decoded: (owner, handle, position, tokens, finish)."""

    rows: list[tuple[str, int, int, list[int], int]] = field(default_factory=list)
    notes: list[tuple[str, bytes]] = field(default_factory=list)
    frames: list[bytes] = field(default_factory=list)

    def frame(self, owner: str, payload: bytes) -> bool:
        self.frames.append(payload)
        frame, at = decode_frame(payload), 0
        columns = zip(frame.handles, frame.positions, frame.counts, frame.finishes, strict=True)
        for handle, position, num, finish in columns:
            self.rows.append((owner, handle, position, list(frame.tokens[at : at + num]), finish))
            at += num
        return True

    def note(self, owner: str, payload: bytes) -> bool:
        self.notes.append((owner, payload))
        return True

    def take(self) -> list[tuple[str, int, int, list[int], int]]:
        rows, self.rows = self.rows, []
        return rows


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def opened(note: bytes = b"") -> tuple[Outbox, Sent, Entry]:
    sent = Sent()
    outbox = Outbox(9, sent.frame, sent.note)
    return outbox, sent, outbox.open(ONE, "codec-1", RID, 0, note)


def acks(kind: AckKind, *rows: tuple[int, int]) -> bytes:
    return encode_acks(kind, array("Q", [handle for handle, _ in rows]), array("I", [position for _, position in rows]))


def test_a_step_sends_one_frame_to_each_owner():
    outbox, sent, one = opened()
    two = outbox.open(TWO, "codec-1", OTHER_RID, 3)
    far = outbox.open(ONE, "codec-2", "7c" * 16, 0)
    outbox.push([TokenRow(one, 0, (11,)), TokenRow(far, 0, (21, 22)), TokenRow(two, 3, (31,), STOP)])
    assert len(sent.frames) == 2
    assert sorted(sent.take()) == [
        ("codec-1", ONE, 0, [11], 0),
        ("codec-1", TWO, 3, [31], STOP),
        ("codec-2", ONE, 0, [21, 22], 0),
    ]
    assert (decode_frame(sent.frames[0]).epoch, decode_frame(sent.frames[0]).step) == (9, 1)


def test_equal_handles_of_two_owners_never_mix():
    outbox, sent, one = opened()
    far = outbox.open(ONE, "codec-2", OTHER_RID, 0)
    outbox.push([TokenRow(one, 0, (11, 12)), TokenRow(far, 0, (21, 22))])
    assert outbox.acknowledged("codec-2", acks(AckKind.HAVE, (ONE, 1))) == []
    assert (list(one.tokens), list(far.tokens)) == ([11, 12], [22])
    assert outbox.acknowledged("codec-1", acks(AckKind.FORGET, (ONE, 0))) == [one]
    outbox.push([TokenRow(one, 2, (13,)), TokenRow(far, 2, (23,))])
    sent.take()
    outbox.acknowledged("codec-2", acks(AckKind.RESEND, (ONE, 1)))
    assert sent.take() == [("codec-2", ONE, 1, [22, 23], 0)]
    assert (len(outbox), outbox.owners) == (1, {"codec-2"})


def test_acknowledged_tokens_are_dropped_and_the_rest_is_resent_on_request():
    outbox, sent, one = opened()
    outbox.push([TokenRow(one, 0, (11, 12, 13, 14))])
    outbox.acknowledged("codec-1", acks(AckKind.HAVE, (ONE, 3)))
    outbox.acknowledged("codec-1", acks(AckKind.HAVE, (ONE, 2)))  # late: it brings nothing back
    assert (one.first, list(one.tokens)) == (3, [14])
    sent.take()
    outbox.acknowledged("codec-1", acks(AckKind.RESEND, (ONE, 3)))
    assert sent.take() == [("codec-1", ONE, 3, [14], 0)]


def test_more_acknowledged_than_sent_forgets_only_what_was_sent():
    outbox, _, one = opened()
    outbox.push([TokenRow(one, 0, (11, 12))])
    outbox.acknowledged("codec-1", acks(AckKind.HAVE, (ONE, 2**32 - 1)))
    assert (one.first, list(one.tokens), len(outbox)) == (2, [], 1)


def test_an_end_is_kept_until_it_is_acknowledged_itself():
    outbox, sent, one = opened()
    outbox.push([TokenRow(one, 0, (11, 12)), TokenRow(one, 2, (), STOP)])
    outbox.acknowledged("codec-1", acks(AckKind.HAVE, (ONE, 2)))
    sent.take()
    outbox.repeat_ends(60, 0)
    assert sent.take() == [("codec-1", ONE, 2, [], STOP)]
    outbox.acknowledged("codec-1", acks(AckKind.HAVE, (ONE, 3)))
    assert len(outbox) == 0
    outbox.repeat_ends(60, 0)
    assert sent.take() == []


def test_ends_are_repeated_with_their_note_until_they_expire(clock):
    outbox, sent, one = opened(note=b"KV transferred")
    running = outbox.open(TWO, "codec-1", OTHER_RID, 0, b"not over")
    outbox.push([TokenRow(one, 0, (11,), STOP), TokenRow(running, 0, (31,))])
    sent.take()
    clock.now_s += 0.05
    outbox.repeat_ends(60, 0.1)
    assert (sent.take(), sent.notes) == ([], [])
    for _ in range(3):
        clock.now_s += 0.1
        outbox.repeat_ends(60, 0.1)
    assert sent.take() == [("codec-1", ONE, 0, [11], STOP)] * 3
    assert sent.notes == [("codec-1", b"KV transferred")] * 3
    before = counters["tokens_never_acknowledged"]
    clock.now_s += 60
    outbox.repeat_ends(60, 0.1)
    assert (sent.take(), one.closed, len(outbox)) == ([], True, 1)
    assert counters["tokens_never_acknowledged"] == before + 1
    assert not running.closed


def test_what_is_forgotten_is_not_sent_any_more():
    outbox, sent, one = opened()
    outbox.forget(one)
    outbox.forget(one)
    outbox.push([TokenRow(one, 0, (11,), STOP)])
    outbox.acknowledged("codec-1", acks(AckKind.RESEND, (ONE, 0)))
    assert (sent.take(), list(one.tokens)) == ([], [])


def test_opening_a_handle_again_silences_whoever_had_it():
    outbox, sent, one = opened()
    second = outbox.open(ONE, "codec-1", RID, 0)
    outbox.push([TokenRow(one, 0, (11,))])
    assert (sent.take(), one.closed, second.closed) == ([], True, False)


def test_forgetting_a_closed_entry_spares_its_successor():
    outbox, _, one = opened()
    second = outbox.open(ONE, "codec-1", RID, 0)
    outbox.forget(one)
    assert (len(outbox), second.closed) == (1, False)


@pytest.mark.parametrize("num", [254, 255, 256, 600])
def test_rows_are_split_at_what_a_count_byte_can_say(num):
    outbox, sent, one = opened()
    tokens = tuple(range(1_000, 1_000 + num))
    outbox.push([TokenRow(one, 0, tokens, STOP)])
    outbox.acknowledged("codec-1", acks(AckKind.RESEND, (ONE, 0)))
    rows = sent.take()
    assert len(rows) == 2 * -(-num // 255)
    for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
        assert [token for row in half for token in row[3]] == list(tokens)
        assert [row[2] for row in half] == list(range(0, num, 255))
        assert [row[4] for row in half] == [0] * (len(half) - 1) + [STOP]


def test_no_frame_grows_beyond_what_a_broker_takes():
    outbox, sent, _ = opened()
    entries = [outbox.open((3 << 32) | index, "codec-1", RID, 0) for index in range(100)]
    for entry in entries:
        entry.tokens.extend(range(4_000))
        outbox.push([TokenRow(entry, 4_000, (1,), STOP)])
    sent.frames.clear()
    sent.take()
    outbox.repeat_ends(60, 0)
    assert len(sent.frames) > 1
    assert max(map(len, sent.frames)) < 256 << 10
    assert sum(len(row[3]) for row in sent.take()) == 100 * 4_001


def test_malformed_acknowledgements_are_counted_and_dropped():
    outbox, _, one = opened()
    outbox.push([TokenRow(one, 0, (11,))])
    before = counters["acks_malformed"]
    assert outbox.acknowledged("codec-1", b"rubbish") == []
    assert outbox.acknowledged("codec-1", acks(AckKind.HAVE, (ONE, 1))[:-1]) == []
    assert (counters["acks_malformed"], list(one.tokens)) == (before + 2, [11])
