"""A cancel stops the work wherever it is, ends the stream with `abort`, and poisons nothing for those who come next."""

from __future__ import annotations

import asyncio
import random
import secrets
import sys

import pytest

from pipeline.client import Client
from pipeline.events import Beacon
from tests.system.answers import Answer, ask, chat, collect, connected, words
from tests.system.fleet import ROOT, Fleet, watching
from tidemill.engines import STUB_STATES

FOREVER = 100_000  # tokens; at STEP_S each nobody waits for the end
STEP_S = 0.005
ENGINES = ("prefill-0", "decode-0")


@pytest.fixture(scope="module")
def slow(new_fleet: Fleet) -> Fleet:
    """A set whose decode and prefill both take their time."""
    new_fleet.start_all(stub_step_s=STEP_S, stub_prefill_tokens_per_s=20_000)
    asyncio.run(new_fleet.ready())
    return new_fleet


def idle(beacon: Beacon) -> bool:
    """Nothing in hand, every slot and every block free."""
    return (beacon.running, beacon.queued, beacon.free_slots, beacon.kv_used) == (0, 0, STUB_STATES, 0.0)


async def tidemill(*arguments: str) -> tuple[int, str]:
    """Run the command line; its exit code and everything it said."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tidemill", *arguments),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


async def test_a_cancel_in_mid_stream_ends_it_with_abort_and_stops_decode(slow: Fleet):
    async with connected(slow.url) as client, watching(slow.url, *ENGINES) as watch:
        stream = await client.publish(chat("go on and on", max_tokens=FOREVER))
        answer = await collect(stream, until=10)
        await watch.until(lambda: watch.beacons["decode-0"].running == 1)
        client.cancel(stream.rid)
        await collect(stream, answer)
        assert answer.end == "abort"
        assert answer.complete
        assert answer.bodies[-1]["choices"][0]["finish_reason"] == "abort"
        assert 0 < answer.usage["completion_tokens"] < FOREVER
        await watch.until(lambda: watch.beacons["decode-0"].running == 0)
        await watch.until(lambda: watch.beacons["decode-0"].kv_used == 0)


async def test_a_cancel_in_prefill_stops_it_and_the_next_prompt_is_computed(slow: Fleet):
    async with connected(slow.url) as client, watching(slow.url, *ENGINES) as watch:
        stream = await client.publish(chat(words(100_000, seed=1)))
        await watch.until(lambda: watch.beacons["prefill-0"].running == 1)
        client.cancel(stream.rid)
        answer = await collect(stream)
        assert answer.end == "abort"
        assert answer.complete
        assert (await ask(client, chat("me next"))).end == "length"
        await watch.until(lambda: watch.count("prefills_cancelled") == 1)
        await watch.until(lambda: watch.beacons["prefill-0"].kv_used == 0)


async def test_a_cancel_that_overtakes_its_request_ends_it_before_any_work(slow: Fleet):
    rid = secrets.token_hex(16)
    async with connected(slow.url) as client:
        assert not await client.cancel_and_wait(rid)
        answer = await ask(client, chat("too late"), rid=rid)
    assert answer.end == "abort"
    assert answer.complete
    assert answer.numbers == [0]


async def test_no_tenant_cancels_the_request_of_another(slow: Fleet):
    async with (
        connected(slow.url, "ant") as ant,
        connected(slow.url, "bee") as bee,
        watching(slow.url, *ENGINES) as watch,
    ):
        stream = await ant.publish(chat("mine", max_tokens=200))
        answer = await collect(stream, until=5)
        assert not await bee.cancel_and_wait(stream.rid)
        await collect(stream, answer)
        await watch.until(lambda: watch.count("cancels_of_other_tenants") == 1)
    assert answer.end == "length"


async def test_the_command_cancels_a_request_and_fails_for_an_unknown_one(slow: Fleet):
    async with connected(slow.url) as client:
        stream = await client.publish(chat("stop me", max_tokens=FOREVER))
        answer = await collect(stream, until=5)
        code, said = await tidemill("cancel", stream.rid, "--nats", slow.url)
        assert code == 0, said
        await collect(stream, answer)
    assert answer.end == "abort"
    unknown = secrets.token_hex(16)
    code, said = await tidemill("cancel", unknown, "--nats", slow.url)
    assert code != 0
    assert unknown in said
    assert "Traceback" not in said


async def test_cancels_at_random_moments_leave_every_slot_free_and_every_later_request_whole(slow: Fleet):
    chance = random.Random(7)

    async def cancelled(client: Client, seed: int) -> Answer:
        body = chat(words(chance.randint(1, 2_000), seed=seed), seed=seed, max_tokens=FOREVER)
        stream = await client.publish(body)
        answer = Answer()
        if chance.random() < 0.5:
            await collect(stream, answer, until=chance.randint(1, 40))
        else:
            await asyncio.sleep(chance.random() * 0.1)  # not for an outcome: to hit each stage now and then
        client.cancel(stream.rid)
        return await collect(stream, answer)

    async with connected(slow.url) as client, watching(slow.url, *ENGINES) as watch:
        answers = await asyncio.gather(*(cancelled(client, seed) for seed in range(100)))
        assert {answer.end for answer in answers} == {"abort"}
        assert all(answer.complete for answer in answers)
        good = await asyncio.gather(*(ask(client, chat("well?", seed=seed)) for seed in range(20)))
        assert {answer.end for answer in good} == {"length"}
        await watch.until(lambda: all(idle(watch.beacons[name]) for name in ENGINES))
