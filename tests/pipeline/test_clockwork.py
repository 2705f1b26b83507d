from __future__ import annotations

import asyncio

import pytest

from pipeline import clockwork, metrics
from pipeline.clockwork import within
from tests.pipeline.fabric import eventually


async def test_a_clock_goes_on_after_a_call_that_raised():
    calls: list[int] = []
    failed = metrics.counters["ticks_failed"]

    def call() -> None:
        calls.append(len(calls))
        if len(calls) == 2:
            raise ZeroDivisionError

    clock = asyncio.get_running_loop().create_task(clockwork.every(0.001, call))
    await eventually(lambda: len(calls) >= 4)
    clock.cancel()
    assert metrics.counters["ticks_failed"] == failed + 1


async def test_a_background_task_that_failed_is_counted_and_a_cancelled_one_is_not():
    failed = metrics.counters["tasks_failed"]

    async def break_down() -> None:
        raise ValueError("on purpose")

    tasks = [asyncio.get_running_loop().create_task(work) for work in (break_down(), asyncio.sleep(60))]
    for task in tasks:
        task.add_done_callback(clockwork.ended)
    tasks[1].cancel()
    await asyncio.wait(tasks)
    await asyncio.sleep(0)
    assert metrics.counters["tasks_failed"] == failed + 1


async def test_what_ends_in_time_gives_its_result_or_its_error():
    async def fail() -> None:
        raise ZeroDivisionError

    await within(5, asyncio.sleep(0))
    with pytest.raises(ZeroDivisionError):
        await within(5, fail())


async def test_what_takes_too_long_is_cancelled_until_it_obeys():
    asked = 0

    async def deaf() -> None:
        nonlocal asked
        while asked < 3:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                asked += 1

    with pytest.raises(TimeoutError):
        await within(0.01, deaf())
    assert asked == 3


async def test_a_cancel_from_outside_reaches_the_work():
    reached = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            reached.set()

    waiting = asyncio.ensure_future(within(60, work()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert reached.is_set()
