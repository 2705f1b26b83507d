from __future__ import annotations

import asyncio

import pytest

from pipeline import eager


async def test_a_coroutine_that_never_waits_is_over_when_start_returns() -> None:
    seen: list[int] = []

    async def work() -> None:
        seen.append(1)

    assert eager.start(work()) is None
    assert seen == [1]


async def test_what_follows_a_wait_runs_in_a_task() -> None:
    gate: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    seen: list[str] = []

    async def work() -> None:
        seen.append("before")
        seen.append(await gate)
        await asyncio.sleep(0)
        async with asyncio.timeout(5):
            await asyncio.sleep(0)
        seen.append("after")

    task = eager.start(work())
    assert task is not None
    assert seen == ["before"]
    gate.set_result("gate")
    await task
    assert seen == ["before", "gate", "after"]


async def test_an_error_before_the_wait_is_the_callers_and_one_after_it_the_tasks() -> None:
    async def at_once() -> None:
        raise ValueError("at once")

    async def later() -> None:
        await asyncio.sleep(0)
        raise ValueError("later")

    with pytest.raises(ValueError, match="at once"):
        eager.start(at_once())
    task = eager.start(later())
    assert task is not None
    with pytest.raises(ValueError, match="later"):
        await task


async def test_a_future_that_fails_raises_inside_the_coroutine() -> None:
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    seen: list[str] = []

    async def work() -> None:
        try:
            await gate
        except TimeoutError:
            seen.append("timeout")
        await asyncio.sleep(0)
        seen.append("went on")

    task = eager.start(work())
    assert task is not None
    gate.set_exception(TimeoutError())
    await task
    assert seen == ["timeout", "went on"]


async def test_a_cancel_reaches_the_coroutine() -> None:
    seen: list[str] = []

    async def work() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            seen.append("closed")

    task = eager.start(work())
    assert task is not None
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["closed"]
