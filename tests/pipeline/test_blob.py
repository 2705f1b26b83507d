"""Blobs in and out of a real BLOB stream."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from pipeline import blob
from pipeline.blob import BlobRef, digest_of, split
from pipeline.bus import Bus
from pipeline.errors import ErrorCode, RequestError, TransientError
from pipeline.jetstream import ensure
from tests.pipeline.fabric import TOPOLOGY, eventually, joined, new_rid
from tidemill.nats_server import EmbeddedNats

PART = TOPOLOGY.limits.blob_part_bytes
MAX = TOPOLOGY.limits.max_body_bytes
SIZES = (0, 1, PART - 1, PART, PART + 1, 20 * PART + 7)


@pytest.fixture
def server() -> Iterator[EmbeddedNats]:
    with EmbeddedNats() as server:
        yield server


async def stored_parts(bus: Bus) -> int:
    info = await bus.ask_json("$JS.API.STREAM.INFO.BLOB", {})
    return int(info["state"]["messages"])


@pytest.mark.parametrize("size", SIZES)
async def test_what_is_put_is_got(nats_url: str, size: int):
    async with joined(nats_url) as bus:
        await ensure(bus)
        rid, data = new_rid(), os.urandom(size)
        ref = await blob.put(bus, "default", rid, "body", data)
        assert (ref.num_bytes, ref.num_parts) == (size, max(1, -(-size // PART)))
        assert await blob.get(bus, "default", rid, BlobRef.parse(ref.text()), MAX) == data


async def test_many_blobs_at_once_do_not_mix(nats_url: str):
    async with joined(nats_url) as bus, joined(nats_url) as reader:
        await ensure(bus)
        rids, bodies = [new_rid() for _ in range(8)], [os.urandom(PART * 3 + index) for index in range(8)]
        refs = await asyncio.gather(*(blob.put(bus, "t", *args) for args in zip(rids, ["b"] * 8, bodies, strict=True)))
        got = await asyncio.gather(*(blob.get(reader, "t", *a, MAX) for a in zip(rids, refs, strict=True)))
        assert got == bodies


async def test_a_missing_part_is_the_publishers_fault_and_named(nats_url: str):
    async with joined(nats_url) as bus:
        await ensure(bus)
        rid = new_rid()
        ref = await blob.put(bus, "default", rid, "body", bytes(2 * PART))
        longer = BlobRef("body", 3, ref.num_bytes, ref.digest)
        with pytest.raises(RequestError, match="part 2 of 3 is missing") as refusal:
            await blob.get(bus, "default", rid, longer, MAX)
        assert refusal.value.code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    "false",
    [
        BlobRef("body", 2, 2 * PART, digest_of(b"other")),
        BlobRef("body", 2, 2 * PART - 1, digest_of(bytes(2 * PART))),
        BlobRef("body", 1, 2 * PART, digest_of(bytes(2 * PART))),
    ],
    ids=["digest", "bytes", "parts"],
)
async def test_parts_that_are_not_what_the_reference_says_are_refused(nats_url: str, false: BlobRef):
    async with joined(nats_url) as bus:
        await ensure(bus)
        rid = new_rid()
        await blob.put(bus, "default", rid, "body", bytes(2 * PART))
        with pytest.raises(RequestError, match="do not match"):
            await blob.get(bus, "default", rid, false, MAX)


async def test_a_part_that_was_exchanged_is_noticed(nats_url: str):
    async with joined(nats_url) as bus:
        await ensure(bus)
        rid = new_rid()
        ref = await blob.put(bus, "default", rid, "body", bytes(2 * PART))
        await bus.ask(f"v1.blob.default.{rid}.body-1", b"\1" + bytes(PART - 1))
        with pytest.raises(RequestError, match="do not match"):
            await blob.get(bus, "default", rid, ref, MAX)


async def test_a_reference_above_the_limit_is_413_naming_both_numbers(nats_url: str):
    async with joined(nats_url) as bus:
        with pytest.raises(RequestError, match=r"1001 bytes.*1000 bytes") as refusal:
            await blob.get(bus, "default", new_rid(), BlobRef("body", 1, 1001, "0" * 32), 1000)
        assert refusal.value.code is ErrorCode.PAYLOAD_TOO_LARGE


async def test_content_above_the_limit_behind_a_small_claim_is_413_and_reading_stops_early(nats_url: str):
    async with joined(nats_url) as bus:
        await ensure(bus)
        rid, data = new_rid(), bytes(30 * PART)
        await blob.put(bus, "default", rid, "body", data)
        before = bus.control.stats["in_bytes"]
        with pytest.raises(RequestError, match=f"at most {PART} bytes") as refusal:
            await blob.get(bus, "default", rid, BlobRef("body", 30, 10, "0" * 32), PART)
        assert refusal.value.code is ErrorCode.PAYLOAD_TOO_LARGE
        assert bus.control.stats["in_bytes"] - before < 10 * PART


async def test_purge_removes_every_part_of_that_request_only(server: EmbeddedNats):
    async with joined(server.url) as bus:
        await ensure(bus)
        mine, other = new_rid(), new_rid()
        await blob.put(bus, "default", mine, "body", bytes(3 * PART))
        await blob.put(bus, "default", mine, "ids", bytes(PART))
        kept = await blob.put(bus, "default", other, "body", b"kept")
        await blob.put(bus, "stranger", mine, "body", b"kept too")
        await blob.purge(bus, "default", mine)
        assert await stored_parts(bus) == 2
        assert await blob.get(bus, "default", other, kept, MAX) == b"kept"
        await blob.purge(bus, "default", mine)  # nothing left is no fault


async def test_a_full_stream_is_transient_and_named(server: EmbeddedNats):
    async with joined(server.url) as bus:
        config = {"name": "BLOB", "subjects": ["v1.blob.>"], "max_msgs": 2, "discard": "new", "allow_direct": True}
        await bus.ask_json("$JS.API.STREAM.CREATE.BLOB", config)
        with pytest.raises(TransientError, match="BLOB refused part"):
            await blob.put(bus, "default", new_rid(), "body", bytes(12 * PART))


async def test_no_stream_and_no_broker_are_transient_both_ways(server: EmbeddedNats):
    async with joined(server.url) as bus:
        for _ in range(2):
            with pytest.raises(TransientError):
                await blob.put(bus, "default", new_rid(), "body", bytes(12 * PART))
            with pytest.raises(TransientError):
                await blob.get(bus, "default", new_rid(), BlobRef("body", 12, PART, "0" * 32), MAX)
            await blob.purge(bus, "default", new_rid())  # leaves them to max_age
            server.kill()
            await eventually(lambda: not bus.control.is_connected)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ";;;",
        "body",
        "body;1;2",
        "body;1;2;d;more",
        "body;one;2;d",
        "body;1;two;d",
        "body;0;2;d",
        "body;-1;2;d",
        "body;1;-2;d",
        "body;65537;2;d",
        ";1;2;d",
        "bo.dy;1;2;d",
        "bo dy;1;2;d",
        "*;1;2;d",
        "b\N{LATIN SMALL LETTER O WITH DIAERESIS}dy;1;2;d",
        "body;" + "9" * 5000 + ";2;d",
    ],
)
def test_rubbish_is_no_reference(text: str):
    with pytest.raises(RequestError, match="not a blob reference") as refusal:
        BlobRef.parse(text)
    assert refusal.value.code is ErrorCode.INVALID_REQUEST
    assert len(refusal.value.message) < 200


@pytest.mark.parametrize(("size", "parts"), [(0, [0]), (1, [1]), (4, [4]), (5, [4, 1]), (8, [4, 4])])
def test_split_leaves_nothing_out(size: int, parts: list[int]):
    data = bytes(range(size))
    assert [len(part) for part in split(data, 4)] == parts
    assert b"".join(split(data, 4)) == data
