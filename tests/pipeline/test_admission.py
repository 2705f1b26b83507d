"""Intake messages as anyone may publish them: taken, answered and taken off, or counted and taken off."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from pipeline.admission import Admission
from pipeline.bus import Bus
from pipeline.events import Beacon
from pipeline.jetstream import Delivery, ensure
from pipeline.membership import Membership
from pipeline.request import Head
from pipeline.subscribers import Subscribers
from pipeline.topology import Topology
from tests.pipeline.fabric import (
    GIVE_UP_S,
    Counted,
    Ear,
    EchoCodec,
    Reader,
    eventually,
    joined,
    limited,
    new_rid,
    new_worker,
)

PATIENT = limited(beacon_fresh_s=3600.0)


class Gate:
    """An admission, what it let in, and a publisher."""

    def __init__(self, bus: Bus, publisher: Bus) -> None:
        self.bus, self.publisher = bus, publisher
        self.taken: list[tuple[Head, Delivery, bytes]] = []
        self.membership = Membership(bus)
        self.reader = Reader(publisher)
        self.admission = Admission(bus, self.membership, EchoCodec(), Subscribers(bus), self._take)

    def _take(self, head: Head, delivery: Delivery, body: bytes) -> None:
        self.taken.append((head, delivery, body))
        self.bus.publish(delivery.ack, b"+ACK")

    async def publish(
        self,
        body: bytes = b"{}",
        *,
        request_class: str = "batch",
        tenant: str = "default",
        rid: str = "",
        **fields: str,
    ) -> str:
        """Store a request as a publisher would; an empty header is left out."""
        rid = rid or new_rid()
        headers = {"Nats-Msg-Id": f"{tenant}:{rid}", "Tm-Reply": self.reader.reply}
        headers |= {name.replace("_", "-"): value for name, value in fields.items()}
        headers = {name: value for name, value in headers.items() if value}
        subject = f"v1.in.{request_class}.{tenant}"
        answer = await self.publisher.control.request(subject, body, timeout=5.0, headers=headers)
        assert "error" not in json.loads(answer.data)
        return rid

    async def stored(self) -> int:
        """Messages that intake still has."""
        info = await self.bus.ask_json("$JS.API.STREAM.INFO.INTAKE", {})
        return int(info["state"]["messages"])

    async def taken_off(self) -> None:
        """Wait until the queue is empty: nothing is delivered again."""
        async with asyncio.timeout(GIVE_UP_S):
            while await self.stored():  # noqa: ASYNC110 - the broker has no event
                await asyncio.sleep(0.002)


@asynccontextmanager
async def gate_at(url: str, topology: Topology = PATIENT) -> AsyncIterator[Gate]:
    async with joined(url, topology=topology) as bus, joined(url) as publisher:
        await ensure(bus)
        await bus.ask_json("$JS.API.STREAM.PURGE.INTAKE", {})
        gate = Gate(bus, publisher)
        await bus.flush()
        await publisher.flush()
        yield gate
        gate.admission.stop()


async def test_a_good_request_is_taken_with_its_head_its_delivery_and_its_body(nats_url: str):
    async with gate_at(nats_url) as gate:
        gate.admission.top_up(0, 0)
        before_ns = time.time_ns()
        rid = await gate.publish(
            b'{"x": 1}', tenant="acme", Tm_Protocol="responses", Tm_Timeout="12.5", Tm_Batch="7", Tm_Timeline="1"
        )
        await eventually(lambda: gate.taken)
        head, delivery, body = gate.taken[0]
        assert body == b'{"x": 1}'
        assert (head.rid, head.tenant, head.request_class) == (rid, "acme", "batch")
        assert (head.protocol, head.timeout_s, head.reply) == ("responses", 12.5, gate.reader.reply)
        assert (head.tag, head.timeline, head.blob) == (7, True, "")
        assert delivery.num_delivered == 1
        assert before_ns - 10**9 < delivery.time_ns < time.time_ns() + 10**9
        await gate.taken_off()


async def test_both_classes_are_pulled(nats_url: str):
    async with gate_at(nats_url) as gate:
        gate.admission.top_up(0, 0)
        for request_class in ("interactive", "batch"):
            await gate.publish(request_class=request_class)
        await eventually(lambda: len(gate.taken) == 2)
        assert {head.request_class for head, _, _ in gate.taken} == {"interactive", "batch"}
        assert gate.taken[0][0].protocol == "chat_completions"
        assert gate.taken[0][0].timeout_s == gate.bus.topology.limits.default_timeout_s


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"Tm_Protocol": "telex"}, "Tm-Protocol"),
        ({"Tm_Timeout": "soon"}, "Tm-Timeout"),
        ({"Tm_Timeout": "0"}, "Tm-Timeout"),
        ({"Tm_Timeout": "nan"}, "Tm-Timeout"),
        ({"Tm_Timeout": "1e9"}, "Tm-Timeout"),
        ({"Tm_Batch": "-1"}, "Tm-Batch"),
        ({"Tm_Batch": "18446744073709551616"}, "Tm-Batch"),
        ({"Nats_Msg_Id": ""}, "Nats-Msg-Id"),
        ({"Nats_Msg_Id": "stranger:" + "a" * 32}, "Nats-Msg-Id"),
        ({"rid": "not-hex"}, "Nats-Msg-Id"),
    ],
    ids=str,
)
async def test_a_malformed_head_is_answered_with_a_named_error_and_taken_off(
    nats_url: str, fields: dict[str, Any], param: str
):
    async with gate_at(nats_url) as gate:
        malformed = Counted("requests_malformed")
        gate.admission.top_up(0, 0)
        await gate.publish(**fields)
        await eventually(lambda: gate.reader.events)
        event = gate.reader.events[0]
        assert (event["n"], event["a"], event["c"], event["end"]) == (0, 0, 0, "invalid_request")
        assert event["event"]["error"]["code"] == "invalid_request"
        assert event["event"]["error"]["param"] == param
        assert (gate.taken, malformed()) == ([], 1)
        await gate.taken_off()


async def test_who_asked_for_batches_is_refused_in_a_batch(nats_url: str):
    async with gate_at(nats_url) as gate:
        ear = Ear(gate.publisher, "_INBOX.refused.batch", control=False)
        await gate.publisher.flush()
        gate.admission.top_up(0, 0)
        await gate.publish(Tm_Batch="77", Tm_Timeout="-1", Tm_Reply="_INBOX.refused.batch")
        await eventually(lambda: ear.payloads)
        [[tag, attempt, choice, number, end, body]] = msgspec.msgpack.decode(ear.payloads[0])
        assert (tag, attempt, choice, number, end) == (77, 0, 0, 0, "invalid_request")
        assert json.loads(body)["error"]["param"] == "Tm-Timeout"


@pytest.mark.parametrize(
    "reply", ["", "v1.ctl", "v1.out.stranger.x", "_INBOX.*", "$JS.API.INFO", "v1.in.batch.default", "no-inbox"]
)
async def test_what_cannot_be_answered_is_counted_and_taken_off(nats_url: str, reply: str):
    async with gate_at(nats_url) as gate:
        unanswerable = Counted("requests_unanswerable")
        gate.admission.top_up(0, 0)
        await gate.publish(Tm_Reply=reply)
        await eventually(lambda: unanswerable() == 1)
        await gate.taken_off()
        assert gate.taken == []


async def test_a_message_without_any_header_is_counted_and_taken_off(nats_url: str):
    async with gate_at(nats_url) as gate:
        unanswerable = Counted("requests_unanswerable")
        gate.admission.top_up(0, 0)
        await gate.publisher.ask("v1.in.interactive.default", b"\xff\x00")
        await eventually(lambda: unanswerable() == 1)
        await gate.taken_off()


async def beacons(gate: Gate, *beacons: Beacon) -> None:
    for beacon in beacons:
        gate.membership.announce(beacon)
        await eventually(lambda: gate.membership.epoch(beacon.worker) == 1)  # noqa: B023 - awaited in the loop


def engine(role: str, free_slots: int, *, draining: bool = False) -> Beacon:
    return Beacon(new_worker(role), 1, (role,), draining=draining, free_slots=free_slots)


def outstanding(gate: Gate) -> set[int]:
    return {intake.outstanding for intake in gate.admission._intakes}


async def test_with_no_engine_only_what_may_wait_here_is_asked_for(nats_url: str):
    async with gate_at(nats_url) as gate:
        gate.admission.top_up(0, 0)
        assert outstanding(gate) == {128}  # of each class


async def test_engine_credit_is_the_scarcer_roles_and_shared_among_owners(nats_url: str):
    async with gate_at(nats_url) as gate:
        await beacons(
            gate,
            *(engine("prefill", 30), engine("prefill", 40), engine("prefill", 99, draining=True)),
            *(engine("decode", 61), engine("codec", 0), engine("codec", 0)),
        )
        gate.admission.top_up(0, 0)
        assert outstanding(gate) == {(61 // 2 + 256) // 2}


async def test_what_waits_here_takes_room_away(nats_url: str):
    async with gate_at(nats_url) as gate:
        gate.admission.top_up(200, 0)
        assert outstanding(gate) == {28}
    async with gate_at(nats_url) as gate:
        gate.admission.top_up(300, 0)
        assert outstanding(gate) == {0}


async def test_bodies_above_the_byte_limit_stop_the_asking(nats_url: str):
    limit = PATIENT.limits.waiting_bytes
    async with gate_at(nats_url) as gate:
        gate.admission.top_up(1, limit)
        assert outstanding(gate) == {0}
        gate.admission.top_up(1, limit - 1)
        assert outstanding(gate) == {127}


async def test_after_the_stop_nothing_is_taken(nats_url: str):
    async with gate_at(nats_url) as gate, gate_at(nats_url) as other:
        gate.admission.top_up(0, 0)
        await gate.bus.flush()
        gate.admission.stop()
        other.admission.top_up(0, 0)
        rids = [await other.publish() for _ in range(5)]
        await eventually(lambda: len(other.taken) == 5)
        assert sorted(head.rid for head, _, _ in other.taken) == sorted(rids)
        assert gate.taken == []
