"""Where events may go, and who shares a batch."""

from __future__ import annotations

import msgspec
import pytest

from pipeline.delivery import BatchSubscriber
from pipeline.errors import ErrorCode, RequestError
from pipeline.subscribers import MAX_BATCHES, Subscribers
from tests.pipeline.fabric import Ear, Reader, eventually, joined


async def test_a_json_subscriber_publishes_each_event_and_names_its_want_subject(nats_url: str):
    async with joined(nats_url) as bus:
        reader, subscribers = Reader(bus), Subscribers(bus)
        one = subscribers.get(reader.reply, -1)
        one.event(one.prefix(0, 3, 1), 7, b'{"x":1}')
        one.event(one.prefix(0, 3, 1), 8, b"{}", "stop")
        await eventually(lambda: len(reader.messages) == 2)
        assert reader.messages == [
            {"n": 7, "a": 3, "c": 1, "event": {"x": 1}},
            {"n": 8, "a": 3, "c": 1, "end": "stop", "event": {}},
        ]
        assert reader.want_subjects == {bus.topology.subject("want", worker=bus.worker)}


async def test_requests_of_one_batching_connection_share_a_message(nats_url: str):
    async with joined(nats_url) as bus:
        subscribers, reply = Subscribers(bus), "_INBOX.batching.a"
        ear = Ear(bus, reply, control=False)
        first, second = subscribers.get(reply, 1), subscribers.get(reply, 2)
        assert first is second
        for tag in (1, 2):
            first.event(first.prefix(tag, 0, 0), 0, b"{}")
        first.flush()
        await eventually(lambda: ear.payloads)
        assert msgspec.msgpack.decode(ear.payloads[0]) == [[tag, 0, 0, 0, None, b"{}"] for tag in (1, 2)]
        assert subscribers.get("_INBOX.batching.b", 1) is not first
        assert not isinstance(subscribers.get(reply, -1), BatchSubscriber)


async def test_batches_of_connections_that_went_do_not_pile_up(nats_url: str):
    async with joined(nats_url) as bus:
        subscribers = Subscribers(bus)
        for number in range(MAX_BATCHES + 10):
            subscribers.get(f"_INBOX.many.{number}", 0)
        assert len(subscribers._batches) <= MAX_BATCHES + 1


@pytest.mark.parametrize("reply", ["_INBOX.a.b", "v1.out.mine.c1"])
async def test_an_inbox_and_the_tenants_own_space_may_be_sent_to(nats_url: str, reply: str):
    async with joined(nats_url) as bus:
        assert Subscribers(bus).check(reply, "mine") == reply


@pytest.mark.parametrize(
    "reply", ["", "v1.out.other.c1", "v1.out.mine", "v1.ctl", "$JS.API.INFO", "_INBOX.*", "v1.out.mine.>", "_INBOX. a"]
)
async def test_nothing_else_may(nats_url: str, reply: str):
    async with joined(nats_url) as bus:
        with pytest.raises(RequestError, match="Tm-Reply") as refusal:
            Subscribers(bus).check(reply, "mine")
        assert refusal.value.code is ErrorCode.INVALID_REQUEST
