"""A stream survives its reader: another one takes it up at any number, a slow one loses nothing."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from nats.aio.client import Client as NatsClient

from pipeline.client import Client
from pipeline.topology import Topology
from tests.system.answers import Answer, ask, ask_raw, chat, collect, connected, raw_connection, take
from tests.system.fleet import GIVE_UP_S, Fleet, watching

STEP_S = 0.005


@pytest.fixture(scope="module")
def paced(new_fleet: Fleet) -> Fleet:
    """A set whose streams take a while."""
    new_fleet.start_all(stub_step_s=STEP_S)
    asyncio.run(new_fleet.ready())
    return new_fleet


@pytest.mark.parametrize("following", [0, 1, 7, 30])
async def test_a_second_client_takes_up_a_running_stream_at_any_number(paced: Fleet, following: int):
    body = chat("to be continued", max_tokens=150, seed=following)
    async with connected(paced.url) as first, connected(paced.url) as second:
        whole = await ask(second, body)
        stream = await first.publish(body)
        await collect(stream, until=31)
        rest = await collect(second.resume(stream.rid, [following]))
    assert rest.numbers == list(range(following, len(whole.numbers)))
    assert rest.deltas == whole.deltas[following:]
    assert rest.end == "length"


async def test_a_second_client_reads_a_stream_that_has_ended(paced: Fleet):
    async with connected(paced.url) as first, connected(paced.url) as second:
        stream = await first.publish(chat("over already"))
        whole = await collect(stream)
        again = await collect(second.resume(stream.rid, [0]))
        tail = await collect(second.resume(stream.rid, [10]))
    assert again.bodies == whole.bodies
    assert tail.numbers == whole.numbers[10:]
    assert tail.bodies == whole.bodies[10:]


async def test_a_batching_client_takes_up_what_another_began_and_back_again(paced: Fleet):
    body = chat("this way and that", max_tokens=150)
    async with connected(paced.url) as first, connected(paced.url, batch=True) as second:
        whole = await ask(first, body)
        stream = await first.publish(body)
        answer = await collect(stream, until=20)
        await collect(second.resume(stream.rid, [20]), answer, until=50)
        await collect(first.resume(stream.rid, [50]), answer)
    assert answer.complete
    assert answer.deltas == whole.deltas


async def test_a_client_whose_connection_breaks_sees_each_event_once(paced: Fleet):
    body = chat("hold the line", max_tokens=200)
    async with connected(paced.url) as client:
        whole = await ask(client, body)
        stream, answer = await client.publish(body), Answer()
        async with asyncio.timeout(GIVE_UP_S):
            async for event in stream:
                take(answer, event)
                if len(answer.numbers) in (5, 40, 80) and event.number is not None:
                    await client._bus.data.force_reconnect()
    assert answer.complete
    assert answer.deltas == whole.deltas


class Reader:
    """A subscriber that says every Want by hand."""

    def __init__(self, connection: NatsClient, window_bytes: int) -> None:
        self.rid = secrets.token_hex(16)
        self.answer = Answer()
        self._connection = connection
        self._window_bytes = window_bytes
        self._inbox = connection.new_inbox()
        self._want_subject = "v1.want"
        self.unexpected: list[int] = []

    async def begin(self, body: dict[str, Any]) -> None:
        self._events = await self._connection.subscribe(self._inbox)
        headers = {"Nats-Msg-Id": f"default:{self.rid}", "Tm-Reply": self._inbox}
        js = self._connection.jetstream()
        await js.publish("v1.in.interactive.default", json.dumps(body).encode(), headers=headers)
        await self._next()  # the acceptance says where to send Want
        await self.want()

    async def want(self) -> None:
        want = {"rid": self.rid, "next": len(self.answer.numbers), "window_bytes": self._window_bytes}
        await self._connection.publish(self._want_subject, json.dumps({**want, "reply": self._inbox}).encode())

    async def read(self, num_bytes: int) -> None:
        """Take events until that many bytes of bodies, or the end."""
        while num_bytes > 0 and not self.answer.end:
            num_bytes -= await self._next()

    async def _next(self) -> int:
        message = await self._events.next_msg(timeout=GIVE_UP_S)
        self._want_subject = message.reply
        event = json.loads(message.data)
        number = event.get("n")
        if number is not None and number != len(self.answer.numbers):
            self.unexpected.append(number)
            return 0
        self.answer.add(number, event.get("end", ""), event["event"])
        return len(message.data) if number is not None else 0

    @property
    def waiting(self) -> int:
        """Messages that have arrived and were not read."""
        return self._events.pending_msgs


async def test_a_slow_reader_with_a_small_window_loses_nothing_and_delays_no_decode(paced: Fleet):
    body = chat("slowly now", max_tokens=300)
    async with (
        raw_connection(paced.url) as connection,
        watching(paced.url, "decode-0") as watch,
        connected(paced.url) as client,
    ):
        whole = await ask(client, body)
        reader = Reader(connection, window_bytes=2_000)
        await reader.begin(body)
        await reader.read(1)
        # decode ends although hardly anything was read
        await watch.until(lambda: watch.beacons["decode-0"].running == 0)
        held_back = 300 - reader.waiting
        while not reader.answer.end:
            await reader.want()
            await reader.read(1_000)
        await reader.want()  # it has everything
    assert held_back > 200, "a window of 2,000 bytes let more than a third of the answer through"
    assert reader.unexpected == []
    assert reader.answer.complete
    assert reader.answer.deltas == whole.deltas


async def test_a_reader_that_never_says_want_is_served_at_most_once_and_whole(paced: Fleet):
    async with raw_connection(paced.url) as connection:
        answer = await ask_raw(connection, json.dumps(chat("no reply needed")).encode())
    assert answer.complete
    assert answer.end == "length"


async def test_what_nobody_asked_for_is_ignored(paced: Fleet):
    """Rubbish on the public subjects is counted and changes nothing."""
    async with (
        raw_connection(paced.url) as connection,
        watching(paced.url, "codec-0") as watch,
        connected(paced.url) as client,
    ):
        stream = await client.publish(chat("unimpressed", max_tokens=100))
        answer = await collect(stream, until=5)
        wants: list[bytes] = [
            b"",
            b"{",
            b'"x"',
            b'{"rid": 7}',
            json.dumps({"rid": stream.rid, "next": -1}).encode(),
            json.dumps({"rid": stream.rid, "next": 0, "window_bytes": 0}).encode(),
            json.dumps({"rid": stream.rid, "next": 0, "reply": "v1.ctl"}).encode(),
        ]
        for want in wants:
            await connection.publish("v1.want", want)
            await connection.publish("v1.want.codec-0", want)
            await connection.publish("v1.cancel.default", want.replace(stream.rid.encode(), b"0" * 32))
        for subject in ("v1.ctl", "v1.ctl.codec-0", "v1.tokens.codec-0", "v1.lookup", "v1.prefill.prefill-0"):
            await connection.publish(subject, secrets.token_bytes(50))
            await connection.publish(subject, b"")
        for subject in ("v1.transfer.decode-0", "v1.ack.decode-0", "v1.beacon.x", "v1.index.prefill-0"):
            await connection.publish(subject, secrets.token_bytes(50))
            await connection.publish(subject, b"")
        await collect(stream, answer)
        await watch.until(lambda: watch.count("wants_malformed", "codec") >= 2 * len(wants))
        assert (await ask(client, chat("still there?"))).complete
    assert answer.complete
    assert answer.end == "length"
    assert all(worker.alive for worker in paced.workers.values())


@pytest.fixture
async def quick_to_doubt(paced: Fleet) -> AsyncIterator[Client]:
    """A client that renews its Want often."""
    topology = Topology.load()
    eager = replace(topology, limits=replace(topology.limits, want_renew_s=0.2))
    async with await Client.connect([paced.url], topology=eager) as client:
        yield client


async def test_renewed_wants_in_the_middle_of_a_stream_repeat_no_event(quick_to_doubt: Client):
    answer = await ask(quick_to_doubt, chat("again and again", max_tokens=300))
    assert answer.complete
    assert answer.end == "length"
