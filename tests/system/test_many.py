"""Two hundred requests at once end in two hundred exact answers, also while workers are stopped under them."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from pipeline.client import Client, Stream
from tests.system.answers import Answer, ask, chat, connected, take, words
from tests.system.fleet import GIVE_UP_S, STAGES, Fleet
from tidemill.up import UpOptions, local_set

NUM_REQUESTS = 200
STEP_S = 0.004  # slow enough that a signal finds streams in their middle


@pytest.fixture(scope="module")
def bodies() -> list[dict[str, Any]]:
    """Distinct prompts, a third of which share their beginning; distinct seeds."""
    shared = words(300, seed=0)
    return [
        chat(f"{shared} {index}" if index % 3 == 0 else words(20 + index, seed=index + 1), seed=index, max_tokens=100)
        for index in range(NUM_REQUESTS)
    ]


@pytest.fixture(scope="module")
def undisturbed(fleet: Fleet, bodies: list[dict[str, Any]]) -> list[Answer]:
    """Each answer as it is when nothing else goes on."""

    async def one_by_one() -> list[Answer]:
        async with connected(fleet.url) as client:
            return [await ask(client, body) for body in bodies]

    return asyncio.run(one_by_one())


class Crowd:
    """Many streams read side by side; `half_way` is set once most of them are in their middle."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.answers: list[Answer] = []
        self.half_way = asyncio.Event()
        self._middle: set[int] = set()

    async def read(self, bodies: list[dict[str, Any]]) -> list[Answer]:
        streams = await asyncio.gather(*(self.client.publish(body) for body in bodies))
        self.answers = [Answer() for _ in streams]
        async with asyncio.timeout(GIVE_UP_S):
            await asyncio.gather(*(self._follow(index, stream) for index, stream in enumerate(streams)))
        return self.answers

    async def _follow(self, index: int, stream: Stream) -> None:
        async for event in stream:
            take(self.answers[index], event)
            if len(self.answers[index].numbers) >= 20:
                self._middle.add(index)
            if len(self._middle) >= NUM_REQUESTS // 4:
                self.half_way.set()


def assert_same(answers: list[Answer], expected: list[Answer]) -> None:
    incomplete = [index for index, answer in enumerate(answers) if not answer.complete]
    assert not incomplete, [(index, answers[index].end, answers[index].numbers[-3:]) for index in incomplete[:5]]
    wrong = [index for index, answer in enumerate(answers) if answer.end != "length"]
    assert not wrong, [(index, answers[index].error) for index in wrong[:5]]
    differing = [i for i, (a, b) in enumerate(zip(answers, expected, strict=True)) if a.deltas != b.deltas]
    assert not differing, f"answers {differing} are not the undisturbed ones"


async def test_two_hundred_requests_at_once_all_end_with_their_own_answer(
    fleet: Fleet, bodies: list[dict[str, Any]], undisturbed: list[Answer]
):
    async with connected(fleet.url) as client:
        assert_same(await Crowd(client).read(bodies), undisturbed)


async def test_two_hundred_requests_over_a_batching_connection(
    fleet: Fleet, bodies: list[dict[str, Any]], undisturbed: list[Answer]
):
    async with connected(fleet.url, batch=True) as client:
        assert_same(await Crowd(client).read(bodies), undisturbed)


@pytest.mark.parametrize("stage", STAGES)
async def test_sigterm_of_one_of_two_workers_loses_nothing(
    fleet: Fleet, bodies: list[dict[str, Any]], undisturbed: list[Answer], stage: str
):
    step_s = STEP_S if stage == "decode" else 0.0
    leaving = fleet.start(stage, name=f"{stage}-leaving", stub_step_s=step_s)
    await fleet.ready()
    async with connected(fleet.url) as client:
        crowd = Crowd(client)
        reading = asyncio.create_task(crowd.read(bodies))
        await crowd.half_way.wait()
        leaving.drain()
        assert_same(await reading, undisturbed)
    assert await asyncio.to_thread(fleet.end, leaving) == 0


@pytest.mark.parametrize("stage", STAGES)
async def test_sigterm_of_the_only_worker_of_a_kind_loses_nothing_when_a_supervisor_restarts_it(
    bodies: list[dict[str, Any]], undisturbed: list[Answer], stage: str, tmp_path: Path
):
    reports: list[str] = []
    options = UpOptions(engine="stub", options={"stub_step_s": str(STEP_S)}, log_dir=tmp_path)
    async with local_set(options, report=reports.append) as running:
        await running.wait_ready(reports.append)
        async with connected(running.nats[0]) as client:
            crowd, latecomers = Crowd(client), Crowd(client)
            reading = asyncio.create_task(crowd.read(bodies[:150]))
            await crowd.half_way.wait()
            running.workers.children[f"{stage}-0"].send(signal.SIGTERM)
            rest = await latecomers.read(bodies[150:])
            assert_same(await reading + rest, undisturbed)
    assert running.workers.children[f"{stage}-0"].num_starts == 2, reports
