"""From a request's body to the event that lookup workers get, on a real bus with a real BLOB stream."""

from __future__ import annotations

import json
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pipeline import blob
from pipeline.bus import Bus
from pipeline.dispatch import Dispatcher
from pipeline.errors import ErrorCode, RequestError, TransientError
from pipeline.events import Beacon, Plan, PromptEncoded, Span
from pipeline.jetstream import ensure
from pipeline.membership import Membership
from pipeline.request import Request
from pipeline.subscribers import Subscribers
from pipeline.topology import Topology
from pipeline.wire import decode_prompt
from tests.pipeline.fabric import Ear, EchoCodec, encoded, eventually, joined, limited, new_request, new_worker

PATIENT = limited(beacon_fresh_s=3600.0)


class Desk:
    """A dispatcher and a request of its owner; `queue` hears what the queue group gets."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.codec = EchoCodec()
        self.membership = Membership(bus)
        self.dispatcher = Dispatcher(bus, self.membership, self.codec, epoch=4)
        self.queue = Ear(bus, bus.topology.subject("encoded"), control=False)

    def request(self, body: Any = None, **head: Any) -> Request:
        request = new_request(self.bus, Subscribers(self.bus).get("_INBOX.x.y", -1), **head)
        request.body = json.dumps(body or {}).encode()
        return request

    async def sent(self, request: Request, *, named: bool = False, ear: Ear | None = None) -> PromptEncoded:
        ear = ear or self.queue
        before = len(ear.payloads)
        self.dispatcher.send(request, encoded(), named=named)
        await eventually(lambda: len(ear.payloads) > before)
        return decode_prompt(ear.payloads[-1])


@asynccontextmanager
async def desk_at(url: str, topology: Topology = PATIENT) -> AsyncIterator[Desk]:
    async with joined(url, topology=topology) as bus:
        await ensure(bus)
        desk = Desk(bus)
        await bus.flush()
        yield desk


async def test_a_body_is_given_to_the_codec_with_who_asks(nats_url: str):
    async with desk_at(nats_url) as desk:
        request = desk.request({"ids": [3, 4, 5]})
        encoding = await desk.dispatcher.encode(request)
        assert encoding.num_prompt_tokens == 3
        assert desk.codec.bodies == [request.body]
        assert (request.ids_ref, request.uses_blob) == ("", False)


async def test_a_body_in_blob_is_fetched(nats_url: str):
    async with desk_at(nats_url) as desk:
        request = desk.request()
        body = json.dumps({"ids": list(range(200_000))}).encode()
        ref = await blob.put(desk.bus, "default", request.rid, "body", body)
        request = desk.request(rid=request.rid, blob=ref.text())
        assert (await desk.dispatcher.encode(request)).num_prompt_tokens == 200_000
        assert request.body == body


async def test_many_token_ids_go_through_blob(nats_url: str):
    async with desk_at(nats_url) as desk:
        request = desk.request({"ids": [1, 2], "repeat": 20_000})
        encoding = await desk.dispatcher.encode(request)
        assert request.uses_blob
        ref = blob.BlobRef.parse(request.ids_ref)
        assert await blob.get(desk.bus, "default", request.rid, ref, 1 << 20) == encoding.ids
        event = await desk.sent(request)
        assert (event.ids, event.ids_ref) == (b"", request.ids_ref)


async def test_ids_at_the_limit_and_ids_that_are_too_many_for_the_model_stay_out_of_blob(nats_url: str):
    async with desk_at(nats_url) as desk:
        at_limit = desk.bus.topology.limits.inline_ids_bytes // 8
        for body in ({"repeat": at_limit}, {"repeat": at_limit + 1, "too_long": True}):
            request = desk.request(body)
            await desk.dispatcher.encode(request)
            assert request.ids_ref == ""


async def test_the_publishers_faults_are_request_errors(nats_url: str):
    async with desk_at(nats_url, limited(max_body_bytes=1000)) as desk:
        large = desk.request({"x": "y" * 1000})
        with pytest.raises(RequestError, match=r"\d+ bytes; at most 1000 bytes") as refusal:
            await desk.dispatcher.encode(large)
        assert refusal.value.code is ErrorCode.PAYLOAD_TOO_LARGE
        for text in ("nonsense", "b\N{LATIN SMALL LETTER O WITH DIAERESIS}dy;1;2;d", "body;1;2;d"):
            with pytest.raises(RequestError) as refusal:
                await desk.dispatcher.encode(desk.request(blob=text))
            assert refusal.value.code is ErrorCode.INVALID_REQUEST


async def test_a_blob_stream_that_does_not_take_the_ids_is_transient(nats_url: str):
    async with desk_at(nats_url) as desk:
        await desk.bus.ask_json("$JS.API.STREAM.DELETE.BLOB", {})
        with pytest.raises(TransientError):
            await desk.dispatcher.encode(desk.request({"repeat": 70_000}))
        await ensure(desk.bus)


async def test_the_event_carries_everything_about_the_request(nats_url: str):
    async with desk_at(nats_url) as desk:
        request = desk.request()
        request.spans["codec"] = Span("codec", desk.bus.worker, 1, 2)
        request.plan = Plan(2, 1, 1, 0, 7)
        request.machine.attempt = 6
        event = await desk.sent(request)
        env = event.env
        assert (env.rid, env.tenant, env.request_class, env.attempt) == (request.rid, "default", "interactive", 6)
        assert (env.owner, env.owner_epoch, event.sender) == (desk.bus.worker, 4, desk.bus.worker)
        assert env.deadline_ns == request.delivery.time_ns + 60 * 10**9
        assert (env.intake_ack, env.plan) == (request.delivery.ack, request.plan)
        assert env.seed == int(request.rid[:16], 16)
        assert event.ids == array("I", (1, 2)).tobytes()
        assert event.spans == (request.spans["codec"],)
        assert desk.dispatcher._envelope(request, encoded(seed=11)).seed == 11


async def heard(desk: Desk, *lookups: str, draining: bool = False) -> dict[str, Ear]:
    ears = {name: Ear(desk.bus, desk.bus.topology.named("encoded", name), control=False) for name in lookups}
    await desk.bus.flush()
    for name in lookups:
        desk.membership.announce(Beacon(name, 1, ("lookup",), draining=draining))
        await eventually(lambda: desk.membership.epoch(name))  # noqa: B023 - awaited in the loop
    return ears


async def test_named_sends_go_to_each_fresh_worker_once_and_then_to_the_group_again(nats_url: str):
    async with desk_at(nats_url) as desk:
        ears = await heard(desk, new_worker(), new_worker())
        await heard(desk, new_worker(), draining=True)
        request = desk.request()
        for tried in (1, 2):
            desk.dispatcher.send(request, encoded(), named=True)
            await eventually(lambda: sum(len(ear.payloads) for ear in ears.values()) == tried)  # noqa: B023
        assert [len(ear.payloads) for ear in ears.values()] == [1, 1]
        assert set(request.dispatched_to) == set(ears)
        await desk.sent(request, named=True)  # all were tried
        assert request.dispatched_to == ()
        await desk.sent(request)
        assert [len(ear.payloads) for ear in ears.values()] == [1, 1]


async def test_with_nobody_to_name_the_group_is_asked(nats_url: str):
    async with desk_at(nats_url) as desk:
        assert (await desk.sent(desk.request(), named=True)).model == "m"
