"""Token frames in, numbered events out: against a reference that derives the events from the tokens at once."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field

import msgpack
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import stream as module
from pipeline.delivery import BatchSubscriber, Subscriber
from pipeline.events import FinishReason, Plan
from pipeline.metrics import counters
from pipeline.outbox import Outbox, TokenRow
from pipeline.plain import INDEX_BITS, INDEX_MASK
from pipeline.stream import Ending, Stream
from pipeline.streams import StreamTable
from pipeline.wire import AckKind, decode_acks, encode_frame

PLAN = Plan(611, 512, 384, 256, 17)
RID = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"
STOP_TOKEN = 999
LENGTH = 2  # 1 + the index of FinishReason.LENGTH


class Letters:
    """A parser: every token but the multiples of five causes an event that depends on all tokens before it."""

    def __init__(self) -> None:
        self.stopped = False
        self.can_stop = True
        self._sum = 0

    def feed(self, token: int) -> bytes | None:
        self._sum = self._sum * 31 + token & 0xFFFF
        self.stopped = token == STOP_TOKEN
        return None if token % 5 == 0 else b'{"t":%d,"s":%d}' % (token, self._sum)

    pieces = None
    frame = (b"", b"")

    def passed(self, num_tokens: int) -> None:
        """See TokenStream."""

    def finish(self, reason: str, plan: Plan, num_tokens: int) -> bytes:
        return orjson.dumps({"finish": reason, "prompt": plan.prompt_tokens, "tokens": num_tokens})


def derived(tokens: list[int], reason: str) -> list[tuple[int, str, bytes]]:
    """(number, end, event) of a whole choice."""
    parser = Letters()
    events = [event for token in tokens if (event := parser.feed(token)) is not None]
    events.append(parser.finish(reason, PLAN, len(tokens)))
    return [(n, reason if n == len(events) - 1 else "", event) for n, event in enumerate(events)]


@dataclass
class Inbox:
    """What was published, decoded."""

    got: list[tuple[int, str, bytes]] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)
    num_messages: int = 0

    def take_json(self, _subject: str, payload: bytes, reply: str) -> bool:
        assert reply == "v1.want.codec-1"
        self.num_messages += 1
        message = orjson.loads(payload)
        raw = payload[payload.index(b'"event":') + 8 : -1]
        self.got.append((message["n"], message.get("end", ""), raw))
        self.attempts.append(message["a"])
        return True

    def take_batch(self, _subject: str, payload: bytes, _reply: str) -> bool:
        self.num_messages += 1
        for tag, attempt, choice, n, end, event in msgpack.unpackb(payload):
            assert (tag, choice) == (77, 3)
            self.got.append((n, end or "", event))
            self.attempts.append(attempt)
        return True

    def json_out(self) -> Subscriber:
        return Subscriber(self.take_json, "_INBOX.a.1", "v1.want.codec-1")

    def batch_out(self) -> BatchSubscriber:
        return BatchSubscriber(self.take_batch, "_INBOX.a.batch", "v1.want.codec-1", 100_000)


@dataclass
class Heard:
    """What the table told its owner and the engines."""

    acks: list[tuple[str, AckKind, list[int], list[int]]] = field(default_factory=list)
    ended: list[Stream] = field(default_factory=list)
    stopped: list[tuple[Stream, int]] = field(default_factory=list)
    contradictions: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    more: list[Stream] = field(default_factory=list)

    def publish(self, subject: str, payload: bytes, reply: str) -> None:
        assert reply == "codec-1"
        kind, handles, positions = decode_acks(payload)
        self.acks.append((subject, kind, list(handles), list(positions)))


def table_with(heard: Heard) -> StreamTable:
    table = StreamTable("codec-1", heard.publish, resend_after_s=0.02)
    table.on_ended = heard.ended.append
    table.on_stopped = lambda stream: heard.stopped.append((stream, stream.finish_at))
    table.on_contradiction = lambda _stream, why: heard.contradictions.append(why)
    table.on_more = heard.more.append
    return table


def open_stream(table: StreamTable, out: Subscriber, attempt: int = 0, parser=Letters) -> Stream:
    stream = Stream(RID, 3, parser, out)
    stream.begin_attempt(table.issue(stream), out.prefix(77, attempt, 3))
    return stream


def again(table: StreamTable, stream: Stream, attempt: int) -> None:
    """A new attempt, as the owner begins it."""
    table.release(stream.handle)
    stream.begin_attempt(table.issue(stream), stream.out.prefix(77, attempt, 3))


def frame(*rows: tuple[int, int, list[int], int], step: int = 1) -> bytes:
    tokens = array("I", [token for row in rows for token in row[2]])
    counts, finishes = bytes(len(row[2]) for row in rows), bytes(row[3] for row in rows)
    handles, positions = array("Q", [row[0] for row in rows]), array("I", [row[1] for row in rows])
    return encode_frame(5, step, 0, handles, positions, counts, finishes, tokens)


def tokens_of(seed: int, num: int) -> list[int]:
    return random.Random(seed).choices(range(1, 900), k=num)


class LossyPair:
    """An engine's outbox and an owner's table with a network between that a random generator rules."""

    def __init__(self, rng: random.Random, out: Subscriber) -> None:
        self.rng, self.now = rng, 0.0
        self.net: list[tuple[str, bytes]] = []
        self.outbox = Outbox(5, self._frame, self._note)
        self.heard = Heard()
        self.table = table_with(self.heard)
        self.table._publish = self._ack
        self.stream = open_stream(self.table, out)
        self.entry = self.outbox.open(self.stream.handle, "codec-1", RID, 0, note=b"the plan")

    def _frame(self, owner: str, payload: bytes) -> bool:
        self.net.append(("frame", payload))
        return True

    def _note(self, owner: str, payload: bytes) -> bool:
        self.net.append(("note", payload))
        return True

    def _ack(self, subject: str, payload: bytes, reply: str) -> None:
        self.net.append(("ack", payload))

    def deliver(self, index: int) -> None:
        kind, payload = self.net.pop(index)
        if kind == "frame":
            self.table.on_frame("v1.ack.decode-1", payload, self.now)
        elif kind == "ack":
            self.outbox.acknowledged("codec-1", payload)
        else:
            self.stream.plan = PLAN
            self.table.pump(self.stream)

    def misbehave(self) -> None:
        while self.net and self.rng.random() < 0.7:
            index = self.rng.randrange(len(self.net))
            fate = self.rng.random()
            if fate < 0.3:
                del self.net[index]
            elif fate < 0.5:
                self.net.append(self.net[index])
            else:
                self.deliver(index)

    def tick(self) -> None:
        self.now += 0.05
        self.table.acknowledge(self.now)
        self.outbox.repeat_ends(1e9, 0.0)

    def settle(self) -> None:
        for _ in range(6):
            while self.net:
                self.deliver(0)
            self.tick()


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 700), st.booleans())
def test_whatever_the_network_does_each_event_comes_once_and_in_order(seed, num, batch):
    rng = random.Random(seed)
    tokens, inbox = tokens_of(seed, num), Inbox()
    pair = LossyPair(rng, inbox.batch_out() if batch else inbox.json_out())
    at = 0
    while at < num:
        size = min(rng.choice([1, 1, 1, 2, 7, 255]), num - at)
        last = at + size == num
        pair.outbox.push([TokenRow(pair.entry, at, tuple(tokens[at : at + size]), LENGTH if last else 0)])
        at += size
        pair.misbehave()
        if rng.random() < 0.2:
            pair.tick()
    pair.settle()
    assert inbox.got == derived(tokens, "length")
    assert not pair.heard.contradictions
    assert len(pair.outbox) == 0, "everything was acknowledged"
    assert pair.stream.ahead == {}


@pytest.mark.parametrize("num", [1, 2, 254, 255, 256, 511])
def test_tokens_one_by_one_and_all_at_once_give_the_same_events(num):
    tokens = tokens_of(num, num)
    whole, single = Inbox(), Inbox()
    for inbox, size in ((whole, 255), (single, 1)):
        table = table_with(Heard())
        stream = open_stream(table, inbox.json_out())
        stream.plan = PLAN
        for at in range(0, num, size):
            part = tokens[at : at + size]
            table.on_frame("e", frame((stream.handle, at, part, LENGTH if at + len(part) == num else 0)), 0.0)
    assert whole.got == single.got == derived(tokens, "length")


def test_batch_and_json_forms_carry_the_same_events():
    tokens = tokens_of(4, 60)
    as_json, as_batch = Inbox(), Inbox()
    for out in (as_json.json_out(), as_batch.batch_out()):
        table = table_with(Heard())
        stream = open_stream(table, out, attempt=9)
        stream.plan = PLAN
        for at, token in enumerate(tokens):
            table.on_frame("e", frame((stream.handle, at, [token], LENGTH if at == 59 else 0)), 0.0)
    assert as_json.got == as_batch.got
    assert set(as_json.attempts) == set(as_batch.attempts) == {9}


def test_the_end_waits_for_the_plan_and_is_not_acknowledged_before():
    heard, inbox = Heard(), Inbox()
    table = table_with(heard)
    stream = open_stream(table, inbox.json_out())
    table.on_frame("e", frame((stream.handle, 0, [4, 6], LENGTH)), 0.0)
    assert [end for _, end, _ in inbox.got] == ["", ""]
    assert heard.ended == [stream]
    table.acknowledge(0.0)
    assert heard.acks == []
    stream.plan = PLAN
    table.pump(stream)
    assert inbox.got == derived([4, 6], "length")
    table.acknowledge(0.1)
    assert heard.acks == [("e", AckKind.HAVE, [stream.handle], [3])], "two tokens and the end"


def test_a_repeat_is_acknowledged_again():
    # the first acknowledgement may have been lost
    heard = Heard()
    table = table_with(heard)
    stream = open_stream(table, Inbox().json_out())
    stream.plan = PLAN
    for now in (0.0, 0.1):
        table.on_frame("e", frame((stream.handle, 0, [4, 6], LENGTH)), now)
        table.acknowledge(now)
    assert heard.acks == [("e", AckKind.HAVE, [stream.handle], [3])] * 2
    table.acknowledge(0.2)
    assert len(heard.acks) == 2


def test_an_end_without_a_token_is_not_forgotten_before_it_has_arrived():
    tokens, inbox = [4, 6, 7], Inbox()
    pair = LossyPair(random.Random(1), inbox.json_out())
    pair.outbox.push([TokenRow(pair.entry, 0, tuple(tokens))])
    pair.deliver(0)
    pair.outbox.push([TokenRow(pair.entry, 3, (), LENGTH)])
    pair.net.clear()  # the end is lost, and what is acknowledged now is every token
    pair.settle()
    assert inbox.got == derived(tokens, "length")
    assert len(pair.outbox) == 0


def test_a_gap_is_asked_for_only_once_it_is_old_enough():
    heard = Heard()
    table = table_with(heard)
    stream = open_stream(table, Inbox().json_out())
    table.on_frame("e", frame((stream.handle, 0, [4], 0)), 1.0)
    table.on_frame("e", frame((stream.handle, 3, [8], 0)), 1.0)
    table.acknowledge(1.01)
    assert heard.acks == [("e", AckKind.HAVE, [stream.handle], [1])]
    table.acknowledge(1.03)
    assert heard.acks[1:] == [("e", AckKind.RESEND, [stream.handle], [1])]
    table.on_frame("e", frame((stream.handle, 1, [6, 7], 0)), 1.04)
    assert list(stream.tokens) == [4, 6, 7, 8]
    table.acknowledge(1.09)
    assert heard.acks[2:] == [("e", AckKind.HAVE, [stream.handle], [4])]


def test_of_two_rows_that_came_too_early_the_longer_one_is_kept():
    table = table_with(Heard())
    stream = open_stream(table, Inbox().json_out())
    for row in ([7, 8, 9], [7]):
        table.on_frame("e", frame((stream.handle, 2, row, LENGTH if len(row) == 3 else 0)), 0.0)
    table.on_frame("e", frame((stream.handle, 0, [4, 6], 0)), 0.0)
    assert list(stream.tokens) == [4, 6, 7, 8, 9]
    assert stream.over


# --- windows and resuming


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 400))
def test_a_window_is_overrun_by_one_event_at_most_and_everything_comes_in_the_end(seed, window_bytes):
    rng = random.Random(seed)
    tokens, inbox = tokens_of(seed, 80), Inbox()
    table = table_with(Heard())
    out = inbox.json_out()
    stream = open_stream(table, out)
    stream.plan = PLAN
    early = rng.randrange(20)
    fed = 0
    credited = following = 0
    for _ in range(2_000):
        if fed < 80 and rng.random() < 0.5:
            table.on_frame("e", frame((stream.handle, fed, [tokens[fed]], LENGTH if fed == 79 else 0)), 0.0)
            fed += 1
        elif fed >= early:
            following = rng.randint(following, len(inbox.got))
            stream.want(following, window_bytes, out, stream.prefix, again=False)
            credited = max(credited, sum(len(e) for _, _, e in inbox.got[:following]) + window_bytes)
            before = len(inbox.got)
            table.pump(stream)
            sizes = [len(e) for _, _, e in inbox.got]
            if len(inbox.got) > before:
                assert sum(sizes[:-1]) < credited
        if stream.terminal_n >= 0:
            break
    assert inbox.got == derived(tokens, "length")


@pytest.mark.parametrize("first_want", [False, True])
@pytest.mark.parametrize("following", [0, 1, 17, 42, 50])
def test_resuming_from_any_number_derives_the_same_bytes(following, first_want):
    tokens = tokens_of(11, 50)
    expected = derived(tokens, "length")
    first, second = Inbox(), Inbox()
    table = table_with(Heard())
    out = first.json_out()
    stream = open_stream(table, out)
    stream.plan = PLAN
    if first_want:
        stream.want(0, 200, out, stream.prefix, again=False)
    table.on_frame("e", frame((stream.handle, 0, tokens, LENGTH)), 0.0)
    stream.want(following, 300, second.json_out(), stream.prefix, again=False)
    table.pump(stream)
    for _ in range(100):
        if stream.terminal_n >= 0:
            break
        before = len(second.got)
        assert sum(len(e) for _, _, e in second.got) >= 300, "the window was closed too early"
        stream.want(following + before, 300, stream.out, stream.prefix, again=False)
        table.pump(stream)
        sent = sum(len(e) for _, _, e in second.got[before:-1])
        assert sent < 300
    assert second.got == expected[following:]


def test_the_first_want_may_ask_again_and_its_window_counts_from_there():
    # asking again while nothing was held back yet once mixed up which event the credit began at
    tokens, inbox = tokens_of(12, 60), Inbox()
    table = table_with(Heard())
    out = inbox.json_out()
    stream = open_stream(table, out)
    table.on_frame("e", frame((stream.handle, 0, tokens, 0)), 0.0)
    events = derived(tokens, "length")[:-1]
    assert inbox.got == events
    window_bytes = sum(len(event) for _, _, event in events[5:20])
    stream.want(5, window_bytes, out, stream.prefix, again=True)
    table.pump(stream)
    assert inbox.got[len(events) :] == events[5:20]
    stream.want(6, window_bytes, out, stream.prefix, again=False)
    table.pump(stream)
    sent = inbox.got[len(events) :]
    assert sent == events[5 : 5 + len(sent)]
    assert sum(len(event) for _, _, event in sent[1:-1]) < window_bytes


def test_a_want_beyond_what_is_known_waits_for_the_tokens_and_skips_what_the_subscriber_has():
    """A second owner starts over; the subscriber has 30 events of the first one."""
    tokens, inbox = tokens_of(13, 50), Inbox()
    expected = derived(tokens, "length")
    table = table_with(Heard())
    out = inbox.json_out()
    opened: list[Letters] = []

    def parser() -> Letters:
        opened.append(Letters())
        return opened[-1]

    stream = open_stream(table, out, parser=parser)
    stream.plan = PLAN
    table.on_frame("e", frame((stream.handle, 0, tokens[:3], 0)), 0.0)
    seen = len(inbox.got)
    for _ in range(2):
        stream.want(30, 10_000, out, stream.prefix, again=False)
        table.pump(stream)
    table.on_frame("e", frame((stream.handle, 3, tokens[3:], LENGTH)), 0.0)
    assert inbox.got[seen:] == expected[30:]
    assert len(opened) == 2, "the same want twice derives nothing again"


@pytest.mark.parametrize("batch", [False, True])
def test_a_want_of_an_impossible_number_breaks_nothing(batch):
    inbox = Inbox()
    table = table_with(Heard())
    out = inbox.batch_out() if batch else inbox.json_out()
    stream = open_stream(table, out)
    stream.want(1 << 62, 1_000, out, stream.prefix, again=False)
    stream.end(Ending("internal", b'{"error":4}'))
    table.pump(stream)
    assert inbox.got == [(2**32 - 1, "internal", b'{"error":4}')]


@pytest.mark.parametrize("early", [False, True])
def test_a_failure_is_heard_by_a_subscriber_that_has_more_events_than_could_be_derived(early):
    inbox = Inbox()
    table = table_with(Heard())
    out = inbox.json_out()
    stream = open_stream(table, out)
    table.on_frame("e", frame((stream.handle, 0, [4, 6], 0)), 0.0)
    if early:
        stream.want(30, 1_000, out, stream.prefix, again=False)
    stream.end(Ending("deadline_exceeded", b'{"error":"late"}'))
    table.pump(stream)
    if not early:
        stream.want(30, 1_000, out, stream.prefix, again=False)
        table.pump(stream)
    assert inbox.got[-1] == (30, "deadline_exceeded", b'{"error":"late"}')
    stream.want(31, 1_000, out, stream.prefix, again=False)
    table.pump(stream)
    assert [n for n, _, _ in inbox.got].count(30) == 1


# --- attempts


@pytest.mark.parametrize("known", [0, 1, 5, 20])
def test_a_new_attempt_repeats_the_tokens_and_the_events_go_on_where_they_were(known):
    tokens, inbox, heard = tokens_of(14, 20), Inbox(), Heard()
    table = table_with(heard)
    stream = open_stream(table, inbox.json_out())
    stream.plan = PLAN
    old = stream.handle
    table.on_frame("e1", frame((old, 0, tokens[:known], 0)), 0.0)
    table.on_frame("e1", frame((old, known + 3, [5], 0)), 0.0)  # a row that came early dies with its attempt
    again(table, stream, 8)
    table.on_frame("e1", frame((old, known, [555], 0)), 0.1)  # nor does a stale frame match anything
    for at, token in enumerate(tokens):
        table.on_frame("e2", frame((stream.handle, at, [token], LENGTH if at == 19 else 0)), 0.2)
    assert inbox.got == derived(tokens, "length")
    assert heard.contradictions == []
    assert inbox.attempts == sorted(inbox.attempts)


def test_the_first_other_token_is_a_contradiction():
    heard, inbox = Heard(), Inbox()
    table = table_with(heard)
    stream = open_stream(table, inbox.json_out())
    table.on_frame("e", frame((stream.handle, 0, [4, 6, 7], 0)), 0.0)
    again(table, stream, 8)
    table.on_frame("e", frame((stream.handle, 0, [4, 6, 8], 0)), 0.1)
    assert heard.contradictions == ["position 2 was 7, attempt repeats 8"]
    assert list(stream.tokens) == [4, 6, 7]


def test_an_attempt_that_ends_before_what_was_delivered_is_a_contradiction():
    heard, inbox = Heard(), Inbox()
    table = table_with(heard)
    stream = open_stream(table, inbox.json_out())
    table.on_frame("e", frame((stream.handle, 0, [4, 6, 7], 0)), 0.0)
    again(table, stream, 8)
    table.on_frame("e", frame((stream.handle, 0, [4, 6], LENGTH)), 0.1)
    assert heard.contradictions == ["3 tokens are here, attempt ends after 2"]
    assert stream.ending is None


def test_a_choice_that_has_ended_stays_over_in_the_next_attempt():
    table = table_with(Heard())
    stream = open_stream(table, Inbox().json_out())
    table.on_frame("e", frame((stream.handle, 0, [4, 6, 7], LENGTH)), 0.0)
    again(table, stream, 8)
    assert stream.over
    assert (stream.at, stream.source) == (0, "")


# --- ends


def test_a_stop_string_ends_the_choice_there_and_is_told_once():
    heard, inbox = Heard(), Inbox()
    table = table_with(heard)
    stream = open_stream(table, inbox.json_out())
    stream.plan = PLAN
    table.on_frame("e", frame((stream.handle, 0, [4, 6, STOP_TOKEN, 8, 9], 0)), 0.0)
    table.on_frame("e", frame((stream.handle, 5, [11], 0)), 0.0)
    assert inbox.got == derived([4, 6, STOP_TOKEN], "stop")
    assert heard.stopped == [(stream, 3)]
    second = Inbox()
    stream.want(0, 10_000, second.json_out(), stream.prefix, again=False)
    table.pump(stream)
    assert second.got == inbox.got
    assert heard.stopped == [(stream, 3)]


def test_a_stop_string_in_the_last_token_wins_over_the_engines_reason():
    inbox = Inbox()
    table = table_with(Heard())
    stream = open_stream(table, inbox.json_out())
    stream.plan = PLAN
    table.on_frame("e", frame((stream.handle, 0, [4, STOP_TOKEN], LENGTH)), 0.0)
    assert inbox.got == derived([4, STOP_TOKEN], "stop")


def test_an_error_needs_no_plan_and_late_tokens_change_nothing():
    inbox = Inbox()
    table = table_with(Heard())
    stream = open_stream(table, inbox.json_out())
    table.on_frame("e", frame((stream.handle, 0, [4, 6], 0)), 0.0)
    stream.end(Ending("worker_lost", b'{"error":1}'))
    table.pump(stream)
    table.on_frame("e", frame((stream.handle, 2, [7], LENGTH)), 0.0)
    assert inbox.got[2:] == [(2, "worker_lost", b'{"error":1}')]


def test_an_error_stays_the_end_when_a_held_back_stop_string_comes_to_light():
    inbox = Inbox()
    table = table_with(Heard())
    out = inbox.json_out()
    stream = open_stream(table, out)
    stream.want(0, 1, out, stream.prefix, again=False)
    table.on_frame("e", frame((stream.handle, 0, [4, STOP_TOKEN, 8], 0)), 0.0)
    stream.end(Ending("worker_lost", b'{"error":3}'))
    stream.want(1, 10_000, out, stream.prefix, again=False)
    table.pump(stream)
    assert inbox.got == [*derived([4, STOP_TOKEN], "stop")[:2], (2, "worker_lost", b'{"error":3}')]


def test_a_parser_that_fails_ends_its_own_stream_only():
    class Faulty(Letters):
        def feed(self, token: int) -> bytes | None:
            if token == 7:
                raise ZeroDivisionError
            return super().feed(token)

    heard, faulty, healthy = Heard(), Inbox(), Inbox()
    table = table_with(heard)
    one = open_stream(table, faulty.json_out(), parser=Faulty)
    two = open_stream(table, healthy.json_out())
    one.plan = two.plan = PLAN
    table.on_frame("e", frame((one.handle, 0, [4, 7, 8], 0), (two.handle, 0, [4, 7, 8], LENGTH)), 0.0)
    assert healthy.got == derived([4, 7, 8], "length")
    assert heard.contradictions == ["the parser failed: ZeroDivisionError"]
    one.end(Ending("internal", b'{"error":2}'))
    table.pump(one)
    table.on_frame("e", frame((one.handle, 3, [9], 0)), 0.0)
    assert faulty.got[1:] == [(1, "internal", b'{"error":2}')]


# --- handles


def test_a_released_handle_matches_nothing_and_its_engine_is_told():
    heard, inbox = Heard(), Inbox()
    table = table_with(heard)
    one = open_stream(table, inbox.json_out())
    table.on_frame("v1.ack.decode-1", frame((one.handle, 0, [4], 0)), 0.0)
    stale = one.handle
    table.release(stale)
    table.release(stale)
    table.acknowledge(0.1)
    assert heard.acks == [("v1.ack.decode-1", AckKind.FORGET, [stale], [0])]
    two = open_stream(table, inbox.json_out())
    assert (two.handle != stale, two.handle & INDEX_MASK) == (True, stale & INDEX_MASK), "the slot is used again"
    before = counters["frames_unknown_handle"]
    unheard = (1 << INDEX_BITS) + 500
    table.on_frame("v1.ack.decode-2", frame((stale, 1, [6, 7], 0), (two.handle, 0, [8], 0), (unheard, 0, [9], 0)), 0.2)
    assert counters["frames_unknown_handle"] == before + 2
    assert heard.acks[1:] == [("v1.ack.decode-2", AckKind.FORGET, [stale, unheard], [0, 0])]
    assert (list(one.tokens), list(two.tokens), len(table)) == ([4], [8], 1)


def test_a_process_that_takes_over_a_workers_id_issues_none_of_its_handles():
    """Else tokens for a request of the dead process would reach another one, perhaps of another tenant."""
    tables = [table_with(Heard()) for _ in range(2)]
    before, after = ({open_stream(table, Inbox().json_out()).handle for _ in range(1_000)} for table in tables)
    assert (len(before), len(after), before & after) == (1_000, 1_000, set())


def test_a_malformed_frame_is_counted_and_dropped():
    table = table_with(Heard())
    stream = open_stream(table, Inbox().json_out())
    before = counters["frames_malformed"]
    table.on_frame("e", frame((stream.handle, 0, [4], 0))[:-1], 0.0)
    table.on_frame("e", frame((stream.handle, 0, [4], len(FinishReason) + 1)), 0.0)
    assert counters["frames_malformed"] == before + 2
    assert len(stream.tokens) == 0


# --- slices


def test_a_long_resume_is_pumped_in_slices(monkeypatch):
    monkeypatch.setattr(module, "PUMP_TOKENS", 100)
    tokens, heard = tokens_of(15, 250), Heard()
    table = table_with(heard)
    stream = open_stream(table, Inbox().json_out())
    stream.plan = PLAN
    for at in range(0, 250, 125):
        table.on_frame("e", frame((stream.handle, at, tokens[at : at + 125], LENGTH if at else 0)), 0.0)
    heard.more.clear()
    second = Inbox()
    stream.want(20, 1 << 20, second.json_out(), stream.prefix, again=False)
    table.pump(stream)
    slices = 1
    while heard.more:
        assert heard.more.pop() is stream
        table.pump(stream)
        slices += 1
    assert slices == 3
    assert second.got == derived(tokens, "length")[20:]


def test_two_streams_of_one_connection_share_its_message():
    inbox = Inbox()
    table = table_with(Heard())
    out = inbox.batch_out()
    one, two = open_stream(table, out), open_stream(table, out)
    table.on_frame("e", frame((one.handle, 0, [4], 0), (two.handle, 0, [6], 0)), 0.0)
    assert (len(inbox.got), inbox.num_messages) == (2, 1)
