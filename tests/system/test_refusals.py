"""Bad input ends in a named error event, and the workers serve the next request as if nothing had been."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest
from nats.aio.client import Client as NatsClient
from nats.js.errors import NoStreamResponseError

from pipeline import blob
from pipeline.client import Client
from pipeline.errors import RequestError
from pipeline.topology import Topology
from tests.system.answers import INTAKE, ask, ask_raw, chat, connected, raw_connection, words
from tests.system.fleet import Fleet, Watch, watching

MAX_BODY_BYTES = Topology.load().limits.max_body_bytes
BODY = json.dumps(chat("hello")).encode()


@pytest.fixture(scope="module")
def pids(fleet: Fleet) -> dict[str, int]:
    """Who was there before the first bad request."""
    return {worker.name: worker.process.pid for worker in fleet.workers.values()}


@pytest.fixture
async def raw(fleet: Fleet, pids: dict[str, int]) -> AsyncIterator[NatsClient]:
    """A plain connection; afterwards every worker must still live and serve."""
    async with raw_connection(fleet.url) as connection:
        yield connection
    async with connected(fleet.url) as client:
        assert (await ask(client, chat("still there?"))).complete
    assert all(fleet[name].alive for name in pids)


@pytest.mark.parametrize(
    ("body", "code", "named"),
    [
        (b"{", "invalid_request", "JSON"),
        (b"", "invalid_request", "JSON"),
        (b"\xff\xfe", "invalid_request", ""),
        (b"[1, 2]", "invalid_request", "object"),
        (json.dumps(chat("x", n=9)).encode(), "invalid_request", "n"),
        (json.dumps({**chat("x"), "model": "gpt-0"}).encode(), "model_not_found", "gpt-0"),
        (json.dumps({**chat("x"), "messages": "hello"}).encode(), "invalid_request", "messages"),
        (json.dumps({**chat("x"), "messages": []}).encode(), "invalid_request", "messages"),
        (json.dumps({**chat("x"), "max_tokens": "many"}).encode(), "invalid_request", "max_tokens"),
        (json.dumps({**chat("x"), "max_tokens": -1}).encode(), "invalid_request", "max_tokens"),
        (json.dumps({**chat("x"), "temperature": "hot"}).encode(), "invalid_request", "temperature"),
        (json.dumps({**chat("x"), "stop": 7}).encode(), "invalid_request", "stop"),
        (json.dumps({**chat("x"), "seed": "s"}).encode(), "invalid_request", "seed"),
        (b'{"a":' * 2_000 + b"1" + b"}" * 2_000, "invalid_request", ""),
    ],
    ids=lambda value: value.decode("ascii", "replace")[-40:] if isinstance(value, bytes) else None,
)
async def test_a_bad_body_is_named(raw: NatsClient, body: bytes, code: str, named: str):
    answer = await ask_raw(raw, body)
    assert answer.end == code
    assert answer.error["code"] == code
    assert named in answer.error["message"]
    assert answer.numbers == [0]


@pytest.mark.parametrize(
    ("headers", "code", "param"),
    [
        ({"Tm-Timeout": "soon"}, "invalid_request", "Tm-Timeout"),
        ({"Tm-Timeout": "-1"}, "invalid_request", "Tm-Timeout"),
        ({"Tm-Timeout": "0"}, "invalid_request", "Tm-Timeout"),
        ({"Tm-Timeout": "nan"}, "invalid_request", "Tm-Timeout"),
        ({"Tm-Timeout": "1e9"}, "invalid_request", "Tm-Timeout"),
        ({"Tm-Timeout": "0.000001"}, "deadline_exceeded", None),
        ({"Tm-Protocol": "telex"}, "invalid_request", "Tm-Protocol"),
        ({"Tm-Protocol": "responses"}, "invalid_request", None),
        ({"Tm-Blob": "nonsense"}, "invalid_request", None),
        ({"Tm-Blob": "body;3;600000;00"}, "invalid_request", None),
        ({"Tm-Batch": "x"}, "invalid_request", "Tm-Batch"),
    ],
    ids=str,
)
async def test_a_bad_header_is_named(raw: NatsClient, headers: dict[str, str], code: str, param: str | None):
    answer = await ask_raw(raw, BODY, headers)
    assert answer.end == code
    assert answer.error["code"] == code
    assert answer.error["param"] == param


@pytest.mark.parametrize("message_id", ["", "stranger:" + "a" * 32, "default:short", "default:" + "A" * 32, "a" * 32])
async def test_a_message_id_of_another_tenant_or_form_is_refused(raw: NatsClient, message_id: str):
    unique = message_id.replace("a" * 16, secrets.token_hex(8), 1)  # or the broker takes a second run for a repeat
    answer = await ask_raw(raw, BODY, {"Nats-Msg-Id": unique})
    assert answer.error["code"] == "invalid_request"
    assert answer.error["param"] == "Nats-Msg-Id"


async def test_an_unknown_class_is_refused_by_the_broker(raw: NatsClient):
    headers = {"Nats-Msg-Id": f"default:{secrets.token_hex(16)}", "Tm-Reply": raw.new_inbox()}
    with pytest.raises(NoStreamResponseError):
        await raw.jetstream().publish("v1.in.whenever.default", BODY, headers=headers)


@pytest.mark.parametrize("reply", ["", "v1.ctl", "v1.in.interactive.default", "_INBOX.*", "$JS.API.INFO", "v1.out.b.x"])
async def test_a_reply_that_nobody_may_use_is_counted_and_harms_nothing(raw: NatsClient, fleet: Fleet, reply: str):
    async with watching(fleet.url) as watch:
        await watch.until(lambda: "codec-0" in watch.counters)
        before = watch.count("requests_unanswerable")
        headers = {"Nats-Msg-Id": f"default:{secrets.token_hex(16)}"} | ({"Tm-Reply": reply} if reply else {})
        await raw.jetstream().publish(INTAKE.format(tenant="default"), BODY, headers=headers)
        await watch.until(lambda: watch.count("requests_unanswerable") == before + 1)


async def test_a_body_of_1_2_mb_is_served(raw: NatsClient, fleet: Fleet):
    body = chat(words(180_000, seed=4), max_tokens=8)
    assert len(json.dumps(body)) > 1_200_000
    async with connected(fleet.url) as client:
        answer = await ask(client, body)
    assert answer.complete
    assert answer.end == "length"
    assert answer.usage["prompt_tokens"] > 180_000


async def test_a_body_of_20_mb_is_refused_by_the_client_naming_both_numbers(fleet: Fleet):
    async with connected(fleet.url) as client:
        with pytest.raises(RequestError, match=f"{20 << 20} bytes.*{MAX_BODY_BYTES} bytes") as refusal:
            await client.publish(b"x" * (20 << 20))
    assert refusal.value.code == "payload_too_large"


async def test_a_reference_to_20_mb_is_refused_naming_both_numbers(raw: NatsClient):
    answer = await ask_raw(raw, b"", {"Tm-Blob": f"body;80;{20 << 20};{'0' * 32}"})
    assert answer.error["code"] == "payload_too_large"
    assert str(20 << 20) in answer.error["message"]
    assert str(MAX_BODY_BYTES) in answer.error["message"]


async def put_parts(raw: NatsClient, rid: str, parts: list[bytes]) -> None:
    for index, part in enumerate(parts):
        await raw.jetstream().publish(f"v1.blob.default.{rid}.body-{index}", part)


async def test_parts_of_20_mb_behind_a_small_claim_are_refused(raw: NatsClient):
    rid, part = secrets.token_hex(16), b"x" * (1_000_000)
    await put_parts(raw, rid, [part] * 20)
    answer = await ask_raw(raw, b"", {"Tm-Blob": f"body;20;1000;{'0' * 32}"}, rid=rid)
    assert answer.error["code"] == "payload_too_large"
    assert str(MAX_BODY_BYTES) in answer.error["message"]


async def test_parts_that_are_not_what_the_reference_says_are_refused(raw: NatsClient):
    rid = secrets.token_hex(16)
    await put_parts(raw, rid, [BODY])
    false = blob.BlobRef("body", 1, len(BODY), blob.digest_of(BODY + b" "))
    answer = await ask_raw(raw, b"", {"Tm-Blob": false.text()}, rid=rid)
    assert answer.error["code"] == "invalid_request"
    assert "match" in answer.error["message"]


async def test_a_hundred_bad_requests_leave_the_good_ones_alone(fleet: Fleet, pids: dict[str, int]):
    async def bad(client: Client, index: int) -> Any:
        return (await ask(client, b"{" * (index + 1))).end

    async with connected(fleet.url) as client:
        bad_ones = [asyncio.create_task(bad(client, index)) for index in range(100)]
        good_ones = [asyncio.create_task(ask(client, chat("well?", seed=seed))) for seed in range(20)]
        assert {await task for task in bad_ones} == {"invalid_request"}
        assert all([(await task).complete for task in good_ones])


async def stored(raw: NatsClient) -> int:
    """Messages that intake still holds, of the classes that are read."""
    info = await raw.jetstream().stream_info("INTAKE", subjects_filter="v1.in.interactive.*")
    return sum((info.state.subjects or {}).values())


async def test_every_refused_request_is_off_the_queue(raw: NatsClient, fleet: Fleet):
    """Runs last in this module: whatever was refused above was also acknowledged."""
    async with watching(fleet.url) as watch:
        await until_empty(raw, watch)


async def until_empty(raw: NatsClient, watch: Watch) -> None:
    """Looks again at every beacon of the owner."""
    beats: set[int] = set()
    while await stored(raw):
        await watch.until(lambda: watch.num_beats not in beats)
        beats.add(watch.num_beats)
