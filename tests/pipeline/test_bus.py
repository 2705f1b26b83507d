"""The bus of one worker, on a real broker that is also killed, restarted, and told to refuse."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from pipeline.bus import MIN_PAYLOAD_BYTES, Bus
from pipeline.errors import SetupError, TransientError
from tests.pipeline.fabric import TOPOLOGY, Counted, Ear, eventually, joined, new_worker
from tidemill.nats_server import EmbeddedNats

USERS = """{users: [
  {user: free, password: free},
  {user: bound, password: bound, permissions: {publish: {deny: ["v1.beacon.>"]}, subscribe: {deny: ["v1.want"]}}}
]}"""


@pytest.fixture
def own_server() -> Iterator[EmbeddedNats]:
    """A broker that the test may kill."""
    with EmbeddedNats() as server:
        yield server


@pytest.fixture(scope="module")
def guarded_server() -> Iterator[EmbeddedNats]:
    """A broker with users."""
    with EmbeddedNats(settings={"authorization": USERS}) as server:
        yield server


def as_user(server: EmbeddedNats, user: str) -> str:
    return server.url.replace("nats://", f"nats://{user}:{user}@")


@pytest.fixture(params=[True, False], ids=["fast", "stock"])
def fast(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def test_both_connections_carry_messages_with_subject_reply_payload_and_headers(nats_url: str, fast: bool):
    async with joined(nats_url, fast=fast) as bus, joined(nats_url, fast=fast) as other:
        got: list[tuple[str, str, bytes, bytes | None]] = []
        for name, control in (("d", False), ("c", True)):
            bus.subscribe(f"{bus.worker}.{name}", lambda *message: got.append(message), control=control)
        await bus.flush()
        assert other.publish(f"{bus.worker}.d", b"data", "back")
        assert other.tell(f"{bus.worker}.c", b"control")
        await eventually(lambda: len(got) == 2)
        assert sorted(got) == [(f"{bus.worker}.c", "", b"control", None), (f"{bus.worker}.d", "back", b"data", None)]


async def test_one_of_a_queue_group_gets_each_message(nats_url: str):
    async with joined(nats_url) as first, joined(nats_url) as second:
        subject, got = f"{first.worker}.work", []
        for bus in (first, second):
            bus.subscribe(subject, lambda _s, _r, payload, _h: got.append(payload), group="g")
            await bus.flush()
        for index in range(50):
            first.publish(subject, b"%d" % index)
        await eventually(lambda: len(got) >= 50)
        await first.flush()
        assert sorted(got) == sorted(b"%d" % index for index in range(50))


async def test_ask_returns_the_answer(nats_url: str):
    async with joined(nats_url) as bus, joined(nats_url) as other:
        Ear(other, f"{other.worker}.ask", reply_with=b'{"answer": 42}')
        await other.flush()
        assert await bus.ask(f"{other.worker}.ask") == b'{"answer": 42}'
        assert await bus.ask_json(f"{other.worker}.ask", {}) == {"answer": 42}


async def test_asking_nobody_fails_at_once_and_asking_a_mute_one_after_the_timeout(nats_url: str):
    async with joined(nats_url) as bus, joined(nats_url) as other:
        Ear(other, f"{other.worker}.mute")
        await other.flush()
        with pytest.raises(TransientError, match="NoResponders"):
            await bus.ask(f"{other.worker}.nobody", timeout_s=60.0)
        with pytest.raises(TransientError, match="Timeout"):
            await bus.ask(f"{other.worker}.mute", timeout_s=0.02)


async def test_a_message_above_max_payload_is_refused_and_the_connection_lives(nats_url: str):
    async with joined(nats_url) as bus:
        too_large, disconnects = Counted("publish_too_large"), Counted("bus_disconnects")
        assert not bus.publish("x", bytes(bus.data.max_payload + 1))
        assert bus.publish("x", bytes(bus.data.max_payload))
        await bus.flush()
        assert (too_large(), disconnects()) == (1, 0)


async def test_the_inline_limit_is_a_share_of_the_live_max_payload(nats_url: str):
    async with joined(nats_url) as bus:
        assert bus.max_inline_bytes == bus.data.max_payload * 3 // 4 == 786_432


async def test_publishing_while_disconnected_is_refused_and_never_buffered(own_server: EmbeddedNats, fast: bool):
    async with joined(own_server.url, fast=fast) as bus:
        ear = Ear(bus, f"{bus.worker}.x", control=False)
        reconnects = []
        bus.on_reconnect(lambda: reconnects.append(1))
        await bus.flush()
        refused = Counted("publish_disconnected")
        own_server.kill()
        await eventually(lambda: not bus.data.is_connected and not bus.control.is_connected)
        assert not bus.publish(f"{bus.worker}.x", b"lost")
        assert not bus.tell(f"{bus.worker}.x", b"lost")
        with pytest.raises(TransientError, match="not connected"):
            await bus.ask(f"{bus.worker}.x", timeout_s=60.0)
        assert refused() == 3
        await asyncio.to_thread(own_server.start)
        await eventually(lambda: reconnects and bus.control.is_connected)
        assert bus.publish(f"{bus.worker}.x", b"kept")
        await eventually(lambda: ear.payloads)
        assert ear.payloads == [b"kept"]  # the subscription came back, what was refused did not
        assert reconnects == [1]


def failing() -> None:
    raise ZeroDivisionError


async def test_everybody_who_asked_is_told_of_a_reconnect_though_one_of_them_fails(own_server: EmbeddedNats):
    async with joined(own_server.url) as bus:
        told = []
        bus.on_reconnect(lambda: told.append("first"))
        bus.on_reconnect(failing)
        bus.on_reconnect(lambda: told.append("last"))
        own_server.kill()
        await asyncio.to_thread(own_server.start)
        await eventually(lambda: told == ["first", "last"], "the last one's call")


async def test_a_callback_that_fails_is_counted_by_the_client_and_the_next_message_comes(nats_url: str, fast: bool):
    async with joined(nats_url, fast=fast) as bus:
        got: list[bytes] = []

        def call(_subject: str, _reply: str, payload: bytes, _headers: bytes | None) -> None:
            got.append(payload)
            if payload == b"bad":
                raise ZeroDivisionError

        bus.subscribe(f"{bus.worker}.x", call)
        bus.publish(f"{bus.worker}.x", b"bad")
        bus.publish(f"{bus.worker}.x", b"good")
        await eventually(lambda: got == [b"bad", b"good"])
        assert bus.data.callback_errors == 1


async def test_what_was_told_last_arrives_although_the_bus_closes_at_once(nats_url: str, fast: bool):
    async with joined(nats_url) as listener:
        ear = Ear(listener, f"{listener.worker}.last")
        await listener.flush()
        async with joined(nats_url, fast=fast) as leaver:
            leaver.tell(f"{listener.worker}.last", b"c")
            leaver.publish(f"{listener.worker}.last", b"d")
        await eventually(lambda: len(ear.payloads) == 2)


async def test_denied_subjects_are_all_named(guarded_server: EmbeddedNats, fast: bool):
    async with joined(as_user(guarded_server, "bound"), fast=fast) as bus:
        await bus.check_permissions()  # nothing was tried yet
        bus.subscribe("v1.want", lambda *_: None, control=True)
        bus.tell("v1.beacon.me", b"")
        await bus.flush()
        with pytest.raises(SetupError, match=r"refuses 2 subjects") as refusal:
            await bus.check_permissions()
        assert '"v1.beacon.me"' in str(refusal.value)
        assert '"v1.want"' in str(refusal.value)
        assert bus.data.is_connected
        assert bus.control.is_connected


async def test_what_the_broker_allows_passes_the_check(guarded_server: EmbeddedNats):
    async with joined(as_user(guarded_server, "free")) as bus:
        bus.subscribe("v1.want", lambda *_: None)
        bus.tell("v1.beacon.me", b"")
        await bus.check_permissions()


async def test_a_wrong_password_is_a_setup_error_that_says_so(guarded_server: EmbeddedNats):
    with pytest.raises(SetupError, match=r"(?i)authorization"):
        await Bus.connect([as_user(guarded_server, "stranger")], new_worker(), TOPOLOGY, timeout_s=0.5)


async def test_no_broker_is_a_setup_error_naming_the_url():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody answers there
        url = f"nats://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SetupError, match=url):
            await Bus.connect([url], new_worker(), TOPOLOGY, timeout_s=0.3)


async def test_a_broker_that_allows_too_small_messages_is_refused_with_both_numbers():
    refused = pytest.raises(SetupError, match=f"102400 bytes, at least {MIN_PAYLOAD_BYTES}")
    with EmbeddedNats(settings={"max_payload": "100KB"}) as server, refused:
        await Bus.connect([server.url], new_worker(), TOPOLOGY)


async def test_one_connection_serves_as_both_for_a_client(nats_url: str):
    async with joined(nats_url, single=True) as bus:
        assert bus.data is bus.control
        await bus.flush()
    assert bus.data.is_closed
