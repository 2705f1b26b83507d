"""Steps on the loop and in a thread; both go on after a step, or whoever hears of it, has failed."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Callable

import pytest

from pipeline.stepper import Stepper
from tests.pipeline.fabric import eventually


class Mill:
    """An engine: each piece of work is one step; an exception among them is raised."""

    def __init__(self, *, inline: bool, pace_s: float = 0.0) -> None:
        self.inline = inline
        self.pace_s = pace_s
        self.work: deque[int | Exception] = deque()
        self.threads: set[int] = set()
        self.started_at: list[float] = []
        self.during: Callable[[], None] = lambda: None

    def step(self) -> int | None:
        self.threads.add(threading.get_ident())
        if not self.work:
            return None
        self.during()
        piece = self.work.popleft()
        if self.inline:
            self.started_at.append(asyncio.get_running_loop().time())
        if isinstance(piece, Exception):
            raise piece
        return piece


@pytest.fixture(params=[True, False], ids=["inline", "threaded"])
def mill(request: pytest.FixtureRequest) -> Mill:
    return Mill(inline=request.param)


class Yard:
    """A stepper around a mill, and what it reported."""

    def __init__(self, mill: Mill) -> None:
        self.mill = mill
        self.results: list[int] = []
        self.failures: list[BaseException] = []
        self.stepper = Stepper(mill, self.results.append, self.failures.append)

    def add(self, *pieces: int | Exception) -> None:
        self.mill.work.extend(pieces)
        self.stepper.wake()


async def test_results_come_in_order_on_the_loop(mill: Mill):
    yard = Yard(mill)
    heard_in: set[int] = set()

    def heard(result: int) -> None:
        yard.results.append(result)
        heard_in.add(threading.get_ident())

    yard.stepper._on_result = heard
    yard.add(*range(100))
    await eventually(lambda: len(yard.results) == 100)
    assert yard.results == list(range(100))
    assert heard_in == {threading.get_ident()}
    yard.stepper.close()


async def test_a_thread_of_its_own_steps_unless_inline(mill: Mill):
    yard = Yard(mill)
    yard.add(1)
    await eventually(lambda: yard.results == [1])
    assert (threading.get_ident() in mill.threads) is mill.inline
    assert len(mill.threads) == 1
    yard.stepper.close()


async def test_an_idle_engine_steps_again_when_woken(mill: Mill):
    yard = Yard(mill)
    for number in range(5):
        yard.add(number)
        await eventually(lambda: yard.results == list(range(number + 1)))  # noqa: B023 - awaited in the loop
    yard.stepper.close()


async def test_many_wakes_are_one(mill: Mill):
    yard = Yard(mill)
    for number in range(50):
        yard.add(number)
        yard.stepper.wake()
    await eventually(lambda: len(yard.results) == 50)
    assert yard.results == list(range(50))
    yard.stepper.close()


async def test_a_step_that_raises_is_reported_and_work_that_is_woken_for_goes_on(mill: Mill):
    yard = Yard(mill)
    bug = ZeroDivisionError("bug")
    yard.add(1, bug, 2)
    await eventually(lambda: yard.failures)
    assert yard.failures == [bug]
    yard.stepper.wake()
    await eventually(lambda: yard.results == [1, 2])
    yard.stepper.close()


async def test_who_hears_of_a_failure_may_wake_the_engine_from_there(mill: Mill):
    yard = Yard(mill)
    yard.stepper._on_failure = lambda _error: yard.stepper.wake()
    yard.add(ZeroDivisionError(), 1, ZeroDivisionError(), 2)
    await eventually(lambda: yard.results == [1, 2], "the work after the failures")
    yard.stepper.close()


async def test_a_listener_that_fails_does_not_stop_the_engine(mill: Mill):
    loop, complaints = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _loop, context: complaints.append(context["exception"]))
    yard = Yard(mill)

    def fail_once(result: int) -> None:
        yard.results.append(result)
        if result == 0:
            raise ZeroDivisionError

    yard.stepper._on_result = fail_once
    yard.add(0, 1, 2)
    await eventually(lambda: yard.results == [0, 1, 2], "the steps after the failure")
    assert [type(error) for error in complaints] == [ZeroDivisionError]
    yard.stepper.close()


async def test_a_wake_during_a_step_is_not_lost(mill: Mill):
    yard = Yard(mill)
    mill.during = yard.stepper.wake
    for number in range(20):
        yard.add(number)
        await eventually(lambda: len(yard.results) == number + 1)  # noqa: B023 - awaited in the loop
    yard.stepper.close()


async def test_the_result_of_a_paced_step_comes_when_its_time_is_over():
    yard = Yard(Mill(inline=True, pace_s=0.02))
    told_at: list[float] = []
    yard.stepper._on_result = lambda _result: told_at.append(asyncio.get_running_loop().time())
    yard.add(1, 2)
    await eventually(lambda: len(told_at) == 2)
    assert all(told - started > 0.018 for started, told in zip(yard.mill.started_at, told_at, strict=True))
    yard.stepper.close()


async def test_nothing_steps_after_close(mill: Mill):
    yard = Yard(mill)
    yard.add(1)
    await eventually(lambda: yard.results == [1])
    yard.stepper.close()
    yard.add(2)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert list(mill.work) == [2]
    if yard.stepper._thread:
        assert not yard.stepper._thread.is_alive()


async def test_close_waits_for_the_step_under_way():
    mill = Mill(inline=False)
    entered, leave = threading.Event(), threading.Event()

    def during() -> None:
        entered.set()
        leave.wait(10)

    mill.during = during
    yard = Yard(mill)
    yard.add(1)
    await asyncio.to_thread(entered.wait, 10)
    threading.Timer(0.02, leave.set).start()
    yard.stepper.close()
    assert not mill.work
    await eventually(lambda: yard.results == [1])


@pytest.mark.parametrize("wakes", [False, True])
async def test_a_paced_engine_starts_steps_no_sooner_than_its_pace(wakes: bool):
    yard = Yard(Mill(inline=True, pace_s=0.02))
    if wakes:
        yard.mill.during = yard.stepper.wake
    yard.add(*range(6))
    await eventually(lambda: len(yard.results) == 6)
    starts = yard.mill.started_at
    gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert min(gaps) > 0.018  # a timer may fire a grain early
    yard.stepper.close()


async def test_the_loop_is_free_while_a_thread_computes():
    slow, leave = Mill(inline=False), threading.Event()

    def during() -> None:
        leave.wait(10)

    slow.during = during
    waiting, quick = Yard(slow), Yard(Mill(inline=True))
    waiting.add(1)
    quick.add(*range(10))
    await eventually(lambda: len(quick.results) == 10)
    assert waiting.results == []
    leave.set()
    await eventually(lambda: waiting.results == [1])
    for yard in (waiting, quick):
        yard.stepper.close()


async def test_an_idle_engine_steps_in_the_tick_that_brings_the_work_and_then_takes_its_turn():
    yard = Yard(Mill(inline=True))
    yard.add(1, 2)
    assert yard.results == [1]
    yard.add(3)
    assert yard.results == [1]
    await eventually(lambda: yard.results == [1, 2, 3])
    yard.stepper.close()


async def test_a_listener_that_fails_at_once_does_not_fail_who_brings_the_work():
    complaints: list[BaseException] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context["exception"]))
    yard = Yard(Mill(inline=True))
    yard.stepper._on_result = lambda result: 1 // result
    yard.add(0)
    assert [type(error) for error in complaints] == [ZeroDivisionError]
    yard.stepper.close()
