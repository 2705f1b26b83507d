"""Streams and consumers as topics.yaml declares them, on brokers that have them, have others, or have none."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest

from pipeline.bus import Bus
from pipeline.errors import SetupError, TransientError
from pipeline.jetstream import NS, Delivery, ensure, ensure_consumer, fence, parse_ack
from pipeline.topology import Topology
from tests.pipeline.fabric import TOPOLOGY, Ear, eventually, joined, new_worker
from tidemill.nats_server import EmbeddedNats

ACCOUNTS = """{
  WITH: {jetstream: enabled, users: [{user: with, password: with}]},
  WITHOUT: {users: [{user: without, password: without}]},
  NARROW: {jetstream: enabled, users: [
    {user: narrow, password: narrow, permissions: {publish: {deny: ["$JS.API.STREAM.CREATE.BLOB"]}}}]}
}"""


@pytest.fixture
def server() -> Iterator[EmbeddedNats]:
    """A broker without any stream."""
    with EmbeddedNats() as server:
        yield server


@pytest.fixture(scope="module")
def accounts() -> Iterator[EmbeddedNats]:
    with EmbeddedNats(settings={"accounts": ACCOUNTS}) as server:
        yield server


def as_user(server: EmbeddedNats, user: str) -> str:
    return server.url.replace("nats://", f"nats://{user}:{user}@")


async def config_of(bus: Bus, stream: str) -> dict[str, Any]:
    info = await bus.ask_json(f"$JS.API.STREAM.INFO.{stream}", {})
    config: dict[str, Any] = info["config"]
    return config


async def make_stream(bus: Bus, **config: Any) -> None:
    answer = await bus.ask_json(f"$JS.API.STREAM.CREATE.{config['name']}", config)
    assert "error" not in answer, answer


def with_stream(name: str, **changes: Any) -> Topology:
    changed = dataclasses.replace(TOPOLOGY.streams[name], **changes)
    return dataclasses.replace(TOPOLOGY, streams={**TOPOLOGY.streams, name: changed})


async def test_ensure_creates_what_topics_yaml_declares(server: EmbeddedNats):
    async with joined(server.url) as bus:
        await ensure(bus)
        for spec in TOPOLOGY.streams.values():
            config = await config_of(bus, spec.name)
            assert tuple(config["subjects"]) == spec.subjects
            assert config["retention"] == spec.retention
            assert config["storage"] == spec.storage == "file"
            assert config["max_age"] == spec.max_age_s * NS
            assert config["max_bytes"] == spec.max_bytes
        intake = await config_of(bus, "INTAKE")
        assert intake["duplicate_window"] == 120 * NS
        assert intake["discard_new_per_subject"] is True
        assert intake["max_msgs_per_subject"] == TOPOLOGY.streams["INTAKE"].max_msgs_per_subject
        for consumer in TOPOLOGY.consumers.values():
            info = await bus.ask_json(f"$JS.API.CONSUMER.INFO.{consumer.stream}.{consumer.name}", {})
            assert info["config"]["max_deliver"] == -1
            assert info["config"]["ack_wait"] == consumer.ack_wait_s * NS
            assert info["config"]["filter_subject"] == consumer.filter


async def test_ensure_again_and_from_many_workers_at_once_changes_nothing(server: EmbeddedNats):
    async with joined(server.url) as one, joined(server.url) as two, joined(server.url) as three:
        await asyncio.gather(ensure(one), ensure(two), ensure(three))
        assert await fence(one) == 4  # each of the three has tried it once; nobody has begun it anew
        await ensure(one)
        assert await fence(two) == 6  # nothing was made anew


async def test_a_stream_that_differs_in_kind_is_named_with_both_values(server: EmbeddedNats):
    async with joined(server.url) as bus:
        await make_stream(bus, name="INTAKE", subjects=["v1.in.>"], storage="memory", retention="limits")
        with pytest.raises(SetupError, match="INTAKE exists and differs") as refusal:
            await ensure(bus)
        for part in ("subjects is ['v1.in.>']", "storage is 'memory', expected 'file'", "'workqueue'"):
            assert part in str(refusal.value)
        assert (await config_of(bus, "INTAKE"))["storage"] == "memory"  # it is not ours to recreate


async def test_a_limit_that_differs_is_brought_up_to_date_and_messages_stay(server: EmbeddedNats):
    async with joined(server.url, topology=with_stream("BLOB", max_age_s=60.0)) as old:
        await ensure(old)
        await old.ask("v1.blob.t.r.p-0", b"part")
    async with joined(server.url) as bus:
        await ensure(bus)
        info = await bus.ask_json("$JS.API.STREAM.INFO.BLOB", {})
        assert info["config"]["max_age"] == TOPOLOGY.streams["BLOB"].max_age_s * NS
        assert info["state"]["messages"] == 1


async def test_subjects_that_another_stream_has_are_a_setup_error(server: EmbeddedNats):
    async with joined(server.url) as bus:
        await make_stream(bus, name="OTHER", subjects=["v1.fence"])
        with pytest.raises(SetupError, match=r"FENCE.*overlap"):
            await ensure(bus)


async def test_too_little_storage_is_a_setup_error():
    with EmbeddedNats(jetstream={"max_file_store": "1MB"}) as server:
        async with joined(server.url) as bus:
            with pytest.raises(SetupError, match=r"cannot create the stream .*storage"):
                await ensure(bus)


async def test_an_account_without_jetstream_is_a_setup_error_that_says_what_to_do(accounts: EmbeddedNats):
    async with joined(as_user(accounts, "without")) as bus:
        with pytest.raises(SetupError, match=r"(?i)jetstream") as refusal:
            await ensure(bus)
        assert "account" in str(refusal.value)
    async with joined(as_user(accounts, "with")) as bus:
        await ensure(bus)


async def test_a_denied_api_call_is_a_setup_error_naming_it(accounts: EmbeddedNats, monkeypatch: pytest.MonkeyPatch):
    async with joined(as_user(accounts, "narrow")) as bus:
        real = bus.ask_json
        # a denied request is never answered: the test need not wait 5 s to know
        monkeypatch.setattr(bus, "ask_json", lambda subject, request: real(subject, request, 0.3))
        with pytest.raises(SetupError, match=r"STREAM\.CREATE\.BLOB"):
            await ensure(bus)


async def test_a_consumer_of_a_missing_stream_is_a_setup_error(server: EmbeddedNats):
    async with joined(server.url) as bus:
        with pytest.raises(SetupError, match=r"consumer codec_interactive.*not found"):
            await ensure_consumer(bus, TOPOLOGY.consumers["codec_interactive"])


async def test_fencing_numbers_rise_for_everyone_and_survive_a_killed_broker(server: EmbeddedNats):
    async with joined(server.url) as one, joined(server.url) as two:
        await ensure(one)
        before = sorted([*await asyncio.gather(*(fence(bus) for bus in (one, two) * 10))])
        assert before == list(range(2, 22))
        server.kill()
        await asyncio.to_thread(server.start)
        await eventually(lambda: one.control.is_connected)
        after = 0
        while not after:
            try:
                after = await fence(one)
            except TransientError:  # JetStream still recovers
                await asyncio.sleep(0.01)
        assert after > 21


async def test_no_fence_stream_is_transient(server: EmbeddedNats):
    async with joined(server.url) as bus:
        with pytest.raises(TransientError):
            await fence(bus)


async def test_a_refused_fence_is_transient_and_says_why(server: EmbeddedNats):
    async with joined(server.url) as bus:
        # one message of one byte fits nowhere into a stream of one byte
        await make_stream(bus, name="FENCE", subjects=["v1.fence"], max_bytes=1, discard="new")
        with pytest.raises(TransientError, match=r"FENCE refused: .*maximum bytes"):
            await fence(bus)


OLD = "$JS.ACK.INTAKE.codec_batch.3.17.5.1700000000000000001.2"
NEW = "$JS.ACK._.hash.INTAKE.codec_batch.3.17.5.1700000000000000001.2"


@pytest.mark.parametrize("subject", [OLD, NEW, NEW + ".token"], ids=["old", "new", "new with token"])
def test_ack_subjects_of_both_forms_tell_the_same(subject: str):
    assert parse_ack(subject) == Delivery(subject, num_delivered=3, stream_seq=17, time_ns=1700000000000000001)


@pytest.mark.parametrize(
    "subject",
    [
        "",
        ".",
        "$JS.ACK",
        "$JS.ACK.S.C.1.2.3.4",
        OLD.replace("$JS", "JS"),
        OLD.replace("ACK", "NAK"),
        OLD.replace(".3.", ".three."),
        OLD.replace("1700000000000000001", ""),
        OLD + ".10",  # tokens
        NEW.replace(".17.", ".x."),
        "." * 40,
    ],
)
def test_anything_else_is_no_ack_subject(subject: str):
    with pytest.raises(ValueError, match=r"ack subject|invalid literal"):
        parse_ack(subject)


async def test_a_real_delivery_is_parsed(server: EmbeddedNats):
    async with joined(server.url) as bus:
        await ensure(bus)
        ear = Ear(bus, f"{bus.worker}.in", control=False)
        ack = json.loads(await bus.ask(f"v1.in.batch.{new_worker('tenant')}", b"body"))
        deliveries: list[Delivery] = []
        for number in (1, 2):
            bus.publish("$JS.API.CONSUMER.MSG.NEXT.INTAKE.codec_batch", b"1", f"{bus.worker}.in")
            await eventually(lambda: len(ear.payloads) == number, "the message")  # noqa: B023 - awaited in the loop
            deliveries.append(parse_ack(ear.replies[-1]))
            bus.publish(deliveries[-1].ack, b"-NAK")
        assert [(d.num_delivered, d.stream_seq) for d in deliveries] == [(1, ack["seq"]), (2, ack["seq"])]
        assert deliveries[0].time_ns == deliveries[1].time_ns  # the time of storing, not of delivering
