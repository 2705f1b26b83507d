"""kill -9 of a worker, or of the broker, in mid-stream: every request still ends with its own exact answer."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.client import Client, Stream
from tests.system.answers import Answer, ask, chat, connected, take, words
from tests.system.fleet import GIVE_UP_S, STAGES, Fleet
from tidemill.nats_server import EmbeddedNats

STEP_S = 0.01
BODIES = [chat(words(100 + 40 * seed, seed=seed), seed=seed, max_tokens=100) for seed in range(16)]


class Readers:
    """Reads streams side by side; `flowing` is set once each of `num_flowing` has ten events."""

    def __init__(self, num_flowing: int) -> None:
        self.flowing = asyncio.Event()
        self._num_flowing = num_flowing
        self._under_way = 0

    async def read(self, client: Client, bodies: list[dict[str, Any]]) -> list[Answer]:
        streams = await asyncio.gather(*(client.publish(body) for body in bodies))
        async with asyncio.timeout(GIVE_UP_S):
            return await asyncio.gather(*map(self._follow, streams))

    async def _follow(self, stream: Stream) -> Answer:
        answer = Answer()
        async for event in stream:
            take(answer, event)
            if len(answer.numbers) == 10:
                self._under_way += 1
                if self._under_way >= self._num_flowing:
                    self.flowing.set()
        return answer


def assert_exact(answers: list[Answer], expected: list[Answer]) -> None:
    assert [answer.end for answer in answers] == ["length"] * len(expected), [a.error for a in answers if a.error]
    assert all(answer.complete for answer in answers)
    assert [answer.deltas for answer in answers] == [answer.deltas for answer in expected]


@pytest.fixture(scope="module")
def paced(new_fleet: Fleet) -> Fleet:
    """One worker of each kind, slow enough to be killed in the middle of a stream."""
    new_fleet.start_all(stub_step_s=STEP_S)
    asyncio.run(new_fleet.ready())
    return new_fleet


@pytest.fixture(scope="module")
def undisturbed(paced: Fleet) -> list[Answer]:
    async def all_at_once() -> list[Answer]:
        async with connected(paced.url, "calm") as client:
            return await asyncio.gather(*(ask(client, body) for body in BODIES))

    return asyncio.run(all_at_once())


@pytest.mark.parametrize("stage", STAGES)
async def test_kill_of_one_of_two_workers_in_mid_stream_changes_no_answer(
    paced: Fleet, undisturbed: list[Answer], stage: str
):
    victim = paced.start(stage, name=f"{stage}-victim", stub_step_s=STEP_S)
    await paced.ready()
    readers = Readers(len(BODIES) // 2)
    async with connected(paced.url) as client:
        reading = asyncio.create_task(readers.read(client, BODIES))
        await readers.flowing.wait()
        victim.signal(signal.SIGKILL)
        late = await readers.read(client, BODIES)
        assert_exact(await reading, undisturbed)
        assert_exact(late, undisturbed)
    assert await asyncio.to_thread(paced.end, victim) == -signal.SIGKILL


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[EmbeddedNats]:
    with EmbeddedNats(store_dir=tmp_path / "store") as server:
        yield server


async def test_kill_of_the_broker_in_mid_stream_changes_no_answer(
    own_broker: EmbeddedNats, make_fleet: Callable[[str], Fleet], undisturbed: list[Answer]
):
    fleet = make_fleet(own_broker.url)
    fleet.start_all(stub_step_s=STEP_S)
    await fleet.ready()
    readers = Readers(len(BODIES) // 2)
    async with connected(own_broker.url) as client:
        reading = asyncio.create_task(readers.read(client, BODIES))
        await readers.flowing.wait()
        own_broker.kill()
        own_broker.start()
        assert_exact(await reading, undisturbed)
        assert_exact([await ask(client, BODIES[0])], undisturbed[:1])
    assert all(worker.alive for worker in fleet.workers.values())
