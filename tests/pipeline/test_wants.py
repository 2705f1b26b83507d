"""Want messages over a real bus to real streams: acknowledgement, credit, repair, resume, and what is none of it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from pipeline.bus import Bus
from pipeline.endings import Endings
from pipeline.events import Plan
from pipeline.request import Request
from pipeline.streams import StreamTable
from pipeline.subscribers import Subscribers
from pipeline.wants import REWIND_TOKEN_S, Wants
from tests.pipeline.fabric import (
    STOP,
    Counted,
    Ear,
    EchoCodec,
    Reader,
    encoded,
    eventually,
    frame_of,
    joined,
    new_request,
    new_rid,
)

EVENT_BYTES = len(b'{"token":1}')


class Owned:
    """One owner's wants, with one request of some choices, and its reader."""

    def __init__(self, bus: Bus, far: Bus, *, choices: int, tag: int = -1) -> None:
        self.bus, self.far = bus, far
        self.reader = Reader(far)
        self.heard: list[str] = []
        self.table = StreamTable(bus.worker, bus.tell, resend_after_s=1.0)
        self.subscribers = Subscribers(bus)
        subscriber = self.subscribers.get(self.reader.reply, tag)
        self.request = new_request(bus, subscriber, tag=tag)
        self.request.encoding = encoded(choices)
        Endings(bus.worker, EchoCodec(), self.table).open_streams(self.request)
        for stream in self.request.streams:
            stream.begin_attempt(self.table.issue(stream), stream.prefix)
        self.wants = Wants(bus, self.subscribers, self.table, find=self._find, heard=lambda r: self.heard.append(r.rid))

    def _find(self, rid: str) -> Request | None:
        return self.request if rid == self.request.rid else None

    def tokens(self, position: int, *tokens: int, choice: int = 0, finish: int = 0) -> None:
        """What an engine sent."""
        stream = self.request.streams[choice]
        if finish:
            stream.plan = Plan(2, 0, 0, 0, 0)
        self.table.on_frame("", frame_of(stream.handle, position, tokens, finish), 0.0)

    def want(self, *, broadcast: bool = False, raw: bytes | None = None, **fields: Any) -> None:
        topology = self.bus.topology
        subject = topology.subject("want_any") if broadcast else topology.subject("want", worker=self.bus.worker)
        body = json.dumps({"rid": self.request.rid, **fields}).encode() if raw is None else raw
        self.far.tell(subject, body)

    async def wanted(self, **fields: Any) -> None:
        """Send a Want and wait until it was taken, with all that it caused."""
        before = len(self.heard)
        self.want(**fields)
        await eventually(lambda: len(self.heard) > before, "the Want")
        await self.settled()

    async def settled(self) -> None:
        """Whatever was published has arrived."""
        await self.bus.flush()
        await self.far.flush()


@asynccontextmanager
async def owned(url: str, *, choices: int = 1, tag: int = -1) -> AsyncIterator[Owned]:
    async with joined(url) as bus, joined(url) as far:
        owned = Owned(bus, far, choices=choices, tag=tag)
        await owned.settled()
        yield owned


async def test_without_any_want_everything_is_published(nats_url: str):
    async with owned(nats_url) as it:
        it.tokens(0, 1, 2, 3, finish=STOP)
        await it.settled()
        assert it.reader.numbers() == [0, 1, 2, 3]
        assert it.reader.ends == ["stop"]


@pytest.mark.parametrize("broadcast", [False, True])
async def test_a_want_acknowledges_and_is_heard(nats_url: str, broadcast: bool):
    async with owned(nats_url) as it:
        it.tokens(0, 1, 2)
        await it.wanted(next=2, broadcast=broadcast)
        assert it.request.wanted == (2,)
        assert it.heard == [it.request.rid]
        assert it.reader.numbers() == [0, 1]  # nothing came twice


async def test_a_window_holds_events_back_until_the_next_want_opens_it(nats_url: str):
    async with owned(nats_url) as it:
        await it.wanted(next=0, window_bytes=2 * EVENT_BYTES)
        it.tokens(0, 1, 2, 3, 4, 5)
        await it.settled()
        assert it.reader.numbers() == [0, 1]
        await it.wanted(next=2, window_bytes=2 * EVENT_BYTES)
        assert it.reader.numbers() == [0, 1, 2, 3]
        it.tokens(5, 6, finish=STOP)
        await it.wanted(next=4, window_bytes=1 << 20)
        assert it.reader.numbers() == [0, 1, 2, 3, 4, 5, 6]
        assert it.reader.ends == ["stop"]


async def test_a_window_larger_than_any_is_cut(nats_url: str):
    async with owned(nats_url) as it:
        await it.wanted(next=0, window_bytes=1 << 50)
        assert it.request.streams[0].limit_bytes == 64 << 20


async def test_resend_repeats_from_next_on_with_the_same_bytes(nats_url: str):
    async with owned(nats_url) as it:
        it.tokens(0, 10, 11, 12, finish=STOP)
        await it.settled()
        before = it.reader.events
        await it.wanted(next=1, resend=True)
        assert it.reader.numbers() == [0, 1, 2, 3, 1, 2, 3]
        assert it.reader.events[4:] == before[1:]


async def test_asking_again_and_again_repeats_once_until_its_cost_is_paid(nats_url: str):
    async with owned(nats_url) as it:
        it.tokens(0, *range(10, 60), finish=STOP)
        it.request.rewind_from_s = math.inf
        for _ in range(20):
            await it.wanted(next=0, resend=True)
        assert it.reader.numbers() == list(range(51))
        it.request.rewind_from_s = 0.0
        asked_s = time.monotonic()
        await it.wanted(next=0, resend=True)
        assert it.reader.numbers() == 2 * list(range(51))
        assert it.request.rewind_from_s >= asked_s + 50 * REWIND_TOKEN_S


async def test_another_connection_gets_its_events_at_once_whoever_asked_before(nats_url: str):
    async with owned(nats_url) as it:
        it.tokens(0, 1, 2, 3)
        it.request.rewind_from_s = math.inf
        other = Reader(it.far, "_INBOX.other")
        await it.settled()
        await it.wanted(next=1, reply=other.reply)
        assert other.numbers() == [1, 2]


async def test_the_same_next_twice_with_more_to_come_means_that_events_were_lost(nats_url: str):
    async with owned(nats_url) as it:
        it.tokens(0, 1, 2, 3)
        await it.wanted(next=1)
        assert it.reader.numbers() == [0, 1, 2]
        await it.wanted(next=1)
        assert it.reader.numbers() == [0, 1, 2, 1, 2]
        await it.wanted(next=3)
        await it.wanted(next=3)  # it has everything: nothing is stuck
        assert it.reader.numbers() == [0, 1, 2, 1, 2]


async def test_another_reply_takes_the_stream_up_there(nats_url: str):
    async with owned(nats_url) as it:
        it.tokens(0, 1, 2)
        await it.settled()
        other = Reader(it.far)
        await it.settled()
        await it.wanted(next=1, reply=other.reply)
        it.tokens(2, 3, finish=STOP)
        await it.settled()
        assert it.reader.numbers() == [0, 1]
        assert other.numbers() == [1, 2, 3]
        assert it.request.subscriber.reply == other.reply


async def test_a_batching_connection_may_take_a_stream_up_under_its_own_tag(nats_url: str):
    async with owned(nats_url, tag=5) as it:
        ear = Ear(it.far, "_INBOX.other.batch", control=False)
        await it.settled()
        for tag in (9, 10):  # the second time on the very same reply
            await it.wanted(next=0, reply="_INBOX.other.batch", tag=tag, resend=True)
        it.tokens(0, 1)
        await it.settled()
        rows = [row for payload in ear.payloads for row in msgspec.msgpack.decode(payload)]
        assert [row[:4] for row in rows] == [[10, 0, 0, 0]]


async def test_next_counts_per_choice_and_one_number_stands_for_all(nats_url: str):
    async with owned(nats_url, choices=3) as it:
        for choice in range(3):
            it.tokens(0, 1, 2, choice=choice)
        await it.wanted(next=[2, 1, 0])
        assert it.request.wanted == (2, 1, 0)
        for given, taken in (([1], (1, 0, 0)), ([1, 1, 1, 9, 9], (1, 1, 1)), (2, (2, 2, 2)), ([], (0, 0, 0))):
            await it.wanted(next=given)
            assert it.request.wanted == taken


async def test_next_beyond_what_there_is_skips_what_the_subscriber_has_from_an_earlier_owner(nats_url: str):
    async with owned(nats_url) as it:
        await it.wanted(next=3)
        it.tokens(0, 1, 2, 3, 4, 5)
        await it.settled()
        assert it.reader.numbers() == [3, 4]


@pytest.mark.parametrize("number", [2**32 - 1, 2**62, 10**23])
async def test_a_next_out_of_this_world_harms_nobody(nats_url: str, number: int):
    async with owned(nats_url) as it:
        await it.wanted(next=number)
        it.tokens(0, 1, 2, finish=STOP)
        await it.wanted(next=0, resend=True)
        assert it.reader.numbers() == [0, 1, 2]
        assert it.bus.control.callback_errors == it.bus.data.callback_errors == 0


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b"\xff",
        b"{}",
        b'{"rid": 7}',
        b'{"rid": "%r", "next": -1}',
        b'{"rid": "%r", "next": [0, -1]}',
        b'{"rid": "%r", "next": "x"}',
        b'{"rid": "%r", "next": 1.5}',
        b'{"rid": "%r", "next": 1e400}',
        b'{"rid": "%r", "window_bytes": 0}',
        b'{"rid": "%r", "window_bytes": -1}',
        b'{"rid": "%r", "window_bytes": null}',
        b'{"rid": "%r", "reply": 7}',
        b'{"rid": "%r", "resend": "yes"}',
        b'{"rid": "%r", "tag": 18446744073709551616}',
        b'{"rid": "%r", "reply": "v1.ctl"}',
        b'{"rid": "%r", "reply": "v1.out.stranger.c"}',
        b'{"rid": "%r", "reply": "_INBOX.*"}',
        b'{"rid": "%r", "reply": "_INBOX.a b"}',
    ],
)
@pytest.mark.parametrize("broadcast", [False, True])
async def test_a_malformed_want_is_counted_and_changes_nothing(nats_url: str, raw: bytes, broadcast: bool):
    async with owned(nats_url) as it:
        malformed, before = Counted("wants_malformed"), it.request.subscriber
        it.want(raw=raw.replace(b"%r", it.request.rid.encode()), broadcast=broadcast)
        await eventually(lambda: malformed() == 1)
        assert it.heard == []
        assert it.request.subscriber is before
        assert it.bus.control.callback_errors == 0


async def test_the_tenants_own_out_space_may_take_a_stream_up(nats_url: str):
    async with owned(nats_url) as it:
        other = Reader(it.far, "v1.out.default.me")
        await it.settled()
        await it.wanted(next=0, reply=other.reply)
        it.tokens(0, 1)
        await it.settled()
        assert other.numbers() == [0]


async def test_an_owner_that_does_not_know_a_request_says_so_if_asked_by_name_and_keeps_silent_if_all_are(
    nats_url: str,
):
    async with owned(nats_url) as it:
        unknown, rid, other = Counted("wants_of_unknown_requests"), new_rid(), Reader(it.far)
        await it.settled()
        it.want(raw=json.dumps({"rid": rid, "reply": other.reply}).encode(), broadcast=True)
        it.want(raw=json.dumps({"rid": rid, "reply": "v1.ctl"}).encode())  # no inbox: no answer
        it.want(raw=json.dumps({"rid": rid, "reply": other.reply}).encode())
        await eventually(lambda: other.messages)
        assert other.messages == [{"a": 0, "event": {"type": "request_unknown", "rid": rid}}]
        assert unknown() == 1


async def test_a_want_before_there_are_streams_is_a_sign_of_life(nats_url: str):
    async with owned(nats_url) as it:
        it.request.streams.clear()
        await it.wanted(next=0)
        assert it.heard == [it.request.rid]
        assert it.request.wanted == ()
