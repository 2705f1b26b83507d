from __future__ import annotations

import asyncio

from pipeline import clockwork, metrics
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
