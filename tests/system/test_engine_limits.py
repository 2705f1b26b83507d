"""What engines refuse, delay and detect: long prompts, deadlines that pass in a queue, spoiled KV."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from tests.system.answers import Answer, ask, chat, collect, connected, words
from tests.system.fleet import Fleet, watching

PROMPT = chat(words(300, seed=1), max_tokens=24)


@pytest.fixture(scope="module")
def front(new_fleet: Fleet) -> Fleet:
    """Everything but the engines."""
    new_fleet.start("codec", name="codec-0")
    new_fleet.start("lookup", name="lookup-0")
    return new_fleet


@asynccontextmanager
async def a_pair(
    front: Fleet, name: str, *, prefill: Mapping[str, object], decode: Mapping[str, object]
) -> AsyncIterator[None]:
    """A prefill and a decode worker with options of their own."""
    with (
        front.running("prefill", name=f"prefill-{name}", **prefill),
        front.running("decode", name=f"decode-{name}", **decode),
    ):
        await front.ready()
        yield


async def clean_answer(front: Fleet) -> Answer:
    async with a_pair(front, "clean", prefill={}, decode={}), connected(front.url) as client:
        return await ask(client, PROMPT)


async def test_a_flipped_byte_is_caught_by_its_checksum_and_the_answer_is_the_clean_one(front: Fleet):
    clean = await clean_answer(front)
    assert clean.complete
    async with (
        a_pair(front, "flip", prefill={"stub_flip_blocks": 1}, decode={}),
        watching(front.url, "decode-flip", "prefill-flip") as watch,
        connected(front.url) as client,
    ):
        answer = await ask(client, PROMPT)
        await watch.until(lambda: watch.count("kv_checksum_errors", "decode") == 1)
        await watch.until(lambda: watch.count("kv_blocks_bad", "prefill") == 1)
        again = await ask(client, PROMPT)
    assert answer.complete
    assert answer.deltas == clean.deltas
    assert answer.hit_tokens == 0
    assert again.deltas == clean.deltas
    assert again.hit_tokens > 0


async def test_without_checksums_a_flipped_byte_changes_the_answer(front: Fleet):
    clean = await clean_answer(front)
    async with (
        a_pair(front, "blind", prefill={"stub_flip_blocks": 1}, decode={"verify": "false"}),
        connected(front.url) as client,
    ):
        answer = await ask(client, PROMPT)
    assert answer.complete
    assert answer.text.startswith("[stub engine]")
    assert answer.deltas != clean.deltas


async def test_a_prompt_beyond_the_context_ends_with_its_finish_reason(front: Fleet):
    small = {"stub_max_context_tokens": 200}
    async with a_pair(front, "small", prefill=small, decode=small), connected(front.url) as client:
        long = await ask(client, chat(words(300)))
        whole = await ask(client, chat(words(300), stream=False))
        short = await ask(client, {**chat("hi"), "max_tokens": None})
    assert long.end == whole.end == "prompt_length_exceeded"
    assert long.bodies[-1]["choices"][0]["finish_reason"] == "prompt_length_exceeded"
    assert whole.bodies[-1]["choices"][0]["finish_reason"] == "prompt_length_exceeded"
    assert long.usage["completion_tokens"] == 0
    assert long.usage["prompt_tokens"] > 300
    assert short.complete
    assert short.end == "length"
    assert short.usage["prompt_tokens"] + short.usage["completion_tokens"] in (199, 200)


async def test_a_deadline_that_passes_in_the_prefill_queue_names_prefill(front: Fleet):
    async with (
        a_pair(front, "slow", prefill={"stub_prefill_tokens_per_s": 1_000}, decode={}),
        connected(front.url) as client,
    ):
        ahead = await client.publish(chat(words(1_000, seed=1)))
        late = await ask(client, chat(words(1_000, seed=2)), timeout_s=0.5)
        assert late.end == late.error["code"] == "deadline_exceeded"
        assert "prefill" in late.error["message"]
        assert (await collect(ahead)).complete
        assert (await ask(client, chat("quick"))).complete


async def test_a_deadline_that_passes_in_mid_stream_names_decode(front: Fleet):
    async with (
        a_pair(front, "slow", prefill={}, decode={"stub_step_s": 0.05}),
        connected(front.url) as client,
        watching(front.url, "decode-slow") as watch,
    ):
        late = await ask(client, chat("long story", max_tokens=1_000), timeout_s=1.0)
        assert late.end == late.error["code"] == "deadline_exceeded"
        assert "decode" in late.error["message"]
        assert late.complete
        assert len(late.numbers) > 5
        await watch.until(lambda: watch.beacons["decode-slow"].running == 0)


async def test_without_engines_a_request_waits_and_its_deadline_names_codec(front: Fleet):
    async with connected(front.url) as client:
        late = await ask(client, chat("anyone?"), timeout_s=0.5)
    assert late.end == late.error["code"] == "deadline_exceeded"
    assert "codec" in late.error["message"]


async def test_a_request_waits_for_an_engine_that_comes_later(front: Fleet):
    async with connected(front.url) as client:
        early = asyncio.create_task(ask(client, chat("patience")))
        async with a_pair(front, "later", prefill={}, decode={}):
            answer = await early
    assert answer.complete
    assert answer.end == "length"


async def test_more_requests_than_slots_and_blocks_all_end(front: Fleet):
    tight = {"kv_blocks": 40, "states": 4}
    async with a_pair(front, "tight", prefill=tight, decode=tight), connected(front.url) as client:
        bodies = [chat(words(300, seed=seed), seed=seed) for seed in range(40)]
        answers = await asyncio.gather(*(ask(client, body) for body in bodies))
    assert all(answer.complete for answer in answers)
    assert {answer.end for answer in answers} == {"length"}
