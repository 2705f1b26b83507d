"""The standing pull on a real broker: room, restarts, lost consumers, and what arrives after the stop."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from pipeline.bus import Bus
from pipeline.intake import Intake
from pipeline.jetstream import ensure
from tests.pipeline.fabric import TOPOLOGY, Counted, eventually, joined
from tidemill.nats_server import EmbeddedNats

CONSUMER = TOPOLOGY.consumers["codec_interactive"]
SUBJECT = "v1.in.interactive.default"


@pytest.fixture
def server() -> Iterator[EmbeddedNats]:
    with EmbeddedNats() as server:
        yield server


class Desk:
    """An intake and what it delivered. Acknowledges at once, unless told otherwise."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.bodies: list[bytes] = []
        self.acks: list[str] = []
        self.acknowledges = True
        self.intake = Intake(bus, CONSUMER, self._message)

    def _message(self, _subject: str, ack: str, payload: bytes, _headers: bytes | None) -> None:
        self.bodies.append(payload)
        self.acks.append(ack)
        if self.acknowledges:
            self.bus.publish(ack, b"+ACK")


@asynccontextmanager
async def desk_at(url: str) -> AsyncIterator[Desk]:
    async with joined(url) as bus:
        await ensure(bus)
        desk = Desk(bus)
        await bus.flush()
        yield desk


async def store(bus: Bus, *bodies: bytes) -> None:
    for body in bodies:
        assert "error" not in json.loads(await bus.ask(SUBJECT, body))


async def waiting_pulls(bus: Bus) -> int:
    """Messages that the broker knows it may still deliver: requests waiting at the consumer."""
    info = await bus.ask_json(f"$JS.API.CONSUMER.INFO.{CONSUMER.stream}.{CONSUMER.name}", {})
    return int(info["num_waiting"])


async def left(bus: Bus) -> int:
    info = await bus.ask_json(f"$JS.API.STREAM.INFO.{CONSUMER.stream}", {})
    return int(info["state"]["messages"])


def numbered(start: int, stop: int) -> list[bytes]:
    return [b"%d" % number for number in range(start, stop)]


async def test_it_pulls_as_many_as_there_is_room_and_no_more(server: EmbeddedNats):
    async with desk_at(server.url) as desk:
        await store(desk.bus, *numbered(0, 10))
        desk.intake.top_up(4)
        assert desk.intake.outstanding == 4
        await eventually(lambda: len(desk.bodies) == 4)
        assert desk.bodies == numbered(0, 4)
        await desk.bus.flush()
        assert await waiting_pulls(desk.bus) == 0
        assert desk.intake.outstanding == 0
        desk.intake.top_up(100)
        await eventually(lambda: len(desk.bodies) == 10)
        assert desk.bodies == numbered(0, 10)
        assert desk.intake.outstanding == 94


@pytest.mark.parametrize("room", [0, -3])
async def test_no_room_means_no_pull(server: EmbeddedNats, room: int):
    async with desk_at(server.url) as desk:
        desk.intake.top_up(room)
        assert desk.intake.outstanding == 0
        await desk.bus.flush()
        assert await waiting_pulls(desk.bus) == 0


async def test_it_asks_again_only_below_half_of_the_room(server: EmbeddedNats):
    async with desk_at(server.url) as desk:
        desk.intake.top_up(10)
        await store(desk.bus, *numbered(0, 5))
        await eventually(lambda: len(desk.bodies) == 5)
        desk.intake.top_up(10)
        assert desk.intake.outstanding == 5  # exactly half
        await store(desk.bus, b"5")
        await eventually(lambda: len(desk.bodies) == 6)
        desk.intake.top_up(10)
        assert desk.intake.outstanding == 10
        await desk.bus.flush()
        assert await waiting_pulls(desk.bus) == 2
        await store(desk.bus, *numbered(6, 16))
        await eventually(lambda: len(desk.bodies) == 16)
        assert desk.intake.outstanding == 0


async def test_two_intakes_share_the_work_and_nothing_comes_twice(server: EmbeddedNats):
    async with desk_at(server.url) as one, desk_at(server.url) as two:
        for desk in (one, two):
            desk.intake.top_up(50)
        await store(one.bus, *numbered(0, 60))
        await eventually(lambda: len(one.bodies) + len(two.bodies) >= 60)
        assert sorted([*one.bodies, *two.bodies]) == sorted(numbered(0, 60))


async def test_messages_published_around_a_broker_restart_arrive(server: EmbeddedNats):
    async with desk_at(server.url) as desk:
        desk.intake.top_up(100)
        await store(desk.bus, b"before")
        await eventually(lambda: desk.bodies == [b"before"])
        server.kill()
        await eventually(lambda: not desk.bus.data.is_connected)
        await asyncio.to_thread(server.start)
        async with joined(server.url) as publisher:
            await _stored_at_last(publisher, b"after")
        # nobody calls top_up: the reconnect alone must do
        await eventually(lambda: b"after" in desk.bodies, "the message after the restart")
        assert set(desk.bodies) == {b"before", b"after"}  # the first may come again: its ack may have been lost


async def _stored_at_last(bus: Bus, body: bytes) -> None:
    """JetStream recovers a little later than the server listens."""
    header = secrets.token_hex(8)
    for _ in range(500):
        try:
            ack = await bus.control.request(SUBJECT, body, timeout=1.0, headers={"Nats-Msg-Id": header})
        except Exception:  # noqa: BLE001 - whatever it is, try again
            await asyncio.sleep(0.01)
            continue
        if "error" not in json.loads(ack.data):
            return
    raise AssertionError("the broker never came back")


async def test_what_arrives_after_the_stop_goes_back_and_on_to_another(server: EmbeddedNats):
    async with desk_at(server.url) as stopping:
        stopping.intake.top_up(10)
        await eventually_async(lambda: waiting_pulls(stopping.bus), 1)
        stopping.intake.stop()
        assert stopping.intake.outstanding == 0
        async with desk_at(server.url) as other:
            other.intake.top_up(10)
            await store(other.bus, *numbered(0, 6))
            await eventually(lambda: sorted(other.bodies) == numbered(0, 6), "everything at the other one")
        assert stopping.bodies == []
        stopping.intake.top_up(10)
        assert stopping.intake.outstanding == 0  # stopped is stopped


async def eventually_async(ask: Callable[[], object], wanted: int) -> None:
    for _ in range(500):
        if await ask() == wanted:  # type: ignore[misc]
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"never {wanted}")


async def test_a_deleted_consumer_is_made_again(server: EmbeddedNats):
    async with desk_at(server.url) as desk:
        refused = Counted("intake_pulls_refused")
        desk.intake.top_up(10)
        await eventually_async(lambda: waiting_pulls(desk.bus), 1)
        await desk.bus.ask_json(f"$JS.API.CONSUMER.DELETE.{CONSUMER.stream}.{CONSUMER.name}", {})
        await eventually(lambda: refused() == 1)  # 409 Consumer Deleted
        assert desk.intake.outstanding == 0
        await store(desk.bus, b"later")
        await eventually(lambda: desk.bodies == [b"later"])


async def test_a_pull_on_a_consumer_that_never_was_makes_it(server: EmbeddedNats):
    async with desk_at(server.url) as desk:
        await desk.bus.ask_json(f"$JS.API.CONSUMER.DELETE.{CONSUMER.stream}.{CONSUMER.name}", {})
        refused = Counted("intake_pulls_refused")
        desk.intake.top_up(10)  # 503: nobody listens on its subject
        await eventually(lambda: refused() == 1)
        await store(desk.bus, b"x")
        await eventually(lambda: desk.bodies == [b"x"])


async def test_a_missing_stream_is_waited_for(server: EmbeddedNats):
    async with desk_at(server.url) as desk:
        await desk.bus.ask_json(f"$JS.API.STREAM.DELETE.{CONSUMER.stream}", {})
        desk.intake.top_up(10)
        refused = Counted("intake_pulls_refused")
        await eventually(lambda: refused() >= 1)
        await ensure(desk.bus)
        await store(desk.bus, b"x")
        await eventually(lambda: desk.bodies == [b"x"])


async def test_a_pull_that_ran_out_is_renewed_at_once(server: EmbeddedNats, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pipeline.intake.NS", 10_000_000)  # a hundredth: 0.3 s
    async with desk_at(server.url) as desk:
        refused = Counted("intake_pulls_refused")
        desk.intake.top_up(10)
        first = list(desk.intake._pulls)
        await eventually(lambda: list(desk.intake._pulls) not in ([], first), "another pull")
        assert refused() == 0
        assert desk.intake.outstanding == 10
        await store(desk.bus, b"x")
        await eventually(lambda: desk.bodies == [b"x"])


async def test_pulls_whose_heartbeat_stopped_are_given_up_by_the_next_top_up(
    server: EmbeddedNats, monkeypatch: pytest.MonkeyPatch
):
    async with desk_at(server.url) as desk:
        lost = Counted("intake_pulls_lost")
        desk.intake.top_up(10)
        monkeypatch.setattr(desk.intake, "_loop_time", lambda: asyncio.get_running_loop().time() + 6.0)
        desk.intake.top_up(10)
        assert lost() == 1
        assert desk.intake.outstanding == 10
        await eventually_async(lambda: waiting_pulls(desk.bus), 2)
        await store(desk.bus, b"x")
        await eventually(lambda: desk.bodies == [b"x"])


async def test_a_message_that_nobody_acknowledged_comes_again(server: EmbeddedNats):
    async with desk_at(server.url) as desk:
        desk.acknowledges = False
        desk.intake.top_up(10)
        await store(desk.bus, b"x")
        await eventually(lambda: len(desk.bodies) == 1)
        desk.bus.publish(desk.acks[0], b"-NAK")
        await eventually(lambda: len(desk.bodies) == 2)
        assert desk.acks[0].split(".")[4:6] == ["1", "1"]
        assert desk.acks[1].split(".")[4:6] == ["2", "1"]
        desk.bus.publish(desk.acks[1], b"+ACK")
        await eventually_async(lambda: left(desk.bus), 0)
