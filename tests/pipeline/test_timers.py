from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.timers import _MIN_CLEARED, Timers


class Loop:
    """A loop's clock and `call_at`, moved by hand."""

    class Handle:
        def __init__(self, at: float, call: Callable[[], None]) -> None:
            self.at, self.call, self.cancelled = at, call, False

        def cancel(self) -> None:
            self.cancelled = True

    def __init__(self) -> None:
        self.now = 50.0
        self.handles: list[Loop.Handle] = []

    def time(self) -> float:
        return self.now

    def call_at(self, at: float, call: Callable[[], None]) -> Loop.Handle:
        self.handles.append(self.Handle(at, call))
        return self.handles[-1]

    def call_soon(self, call: Callable[..., None], *arguments: Any) -> None:
        call(*arguments)

    @property
    def pending(self) -> list[Loop.Handle]:
        return [handle for handle in self.handles if not handle.cancelled]

    def advance(self, to: float) -> None:
        while due := [handle for handle in self.pending if handle.at <= to]:
            handle = min(due, key=lambda handle: handle.at)
            self.handles.remove(handle)
            self.now = max(self.now, handle.at)
            handle.call()
        self.now = to


def timers_on(loop: Any, fired: list[Any]) -> Timers:
    return Timers(loop, lambda key, name: fired.append((key, name)))


def test_timers_fire_in_order_of_time_and_then_of_arming():
    loop: Any = Loop()
    fired: list[Any] = []
    timers = timers_on(loop, fired)
    for key, delay_s in (("a", 3.0), ("b", 1.0), ("c", 2.0), ("d", 1.0)):
        timers.arm(key, "stage", delay_s)
    loop.advance(50.9)
    assert fired == []
    loop.advance(51.5)
    assert fired == [("b", "stage"), ("d", "stage")]
    loop.advance(60.0)
    assert fired[2:] == [("c", "stage"), ("a", "stage")]


def test_arming_again_replaces_and_disarming_stops():
    loop: Any = Loop()
    fired: list[Any] = []
    timers = timers_on(loop, fired)
    timers.arm("a", "retry", 1.0)
    timers.arm("a", "stage", 1.0)
    timers.arm("a", "retry", 5.0)
    timers.disarm("a", "stage")
    timers.disarm("a", "never armed")
    loop.advance(54.0)
    assert fired == []
    loop.advance(56.0)
    assert fired == [("a", "retry")]
    loop.advance(100.0)
    assert len(fired) == 1


def test_an_earlier_time_wins_when_armed_again():
    loop: Any = Loop()
    fired: list[Any] = []
    timers = timers_on(loop, fired)
    timers.arm("a", "retry", 9.0)
    timers.arm("a", "retry", 1.0)
    loop.advance(51.1)
    assert fired == [("a", "retry")]


def test_a_callback_may_disarm_what_is_due_with_it_and_arm_anew():
    loop: Any = Loop()
    fired: list[Any] = []

    def fire(key: str, name: str) -> None:
        fired.append((key, name, loop.now))
        if name == "first":
            timers.disarm(key, "second")
            timers.arm(key, "third", 2.0)
            timers.arm(key, "first", 4.0) if loop.now < 52 else None

    timers = Timers(loop, fire)
    timers.arm("a", "first", 1.0)
    timers.arm("a", "second", 1.0)
    loop.advance(53.5)
    assert fired == [("a", "first", 51.0), ("a", "third", 53.0)]
    loop.advance(60.0)
    assert [name for _, name, _ in fired] == ["first", "third", "first", "third"]


def test_a_callback_that_raises_does_not_silence_the_others():
    loop: Any = Loop()
    fired: list[Any] = []

    def fire(key: str, name: str) -> None:
        if key == "bad":
            raise ZeroDivisionError
        fired.append(key)

    timers = Timers(loop, fire)
    for key in ("bad", "good", "later"):
        timers.arm(key, "stage", 2.0 if key == "later" else 1.0)
    with pytest.raises(ZeroDivisionError):
        loop.advance(51.0)
    loop.advance(60.0)
    assert fired == ["good", "later"]


def test_many_timers_use_one_handle_and_behave_like_a_table():
    rng, loop = random.Random(8), Loop()
    fired: list[Any] = []
    timers = timers_on(loop, fired)
    table: dict[tuple[int, str], float] = {}
    expected: list[tuple[float, tuple[int, str]]] = []
    for _ in range(5_000):
        key = (rng.randrange(300), rng.choice(["stage", "retry"]))
        if rng.random() < 0.3:
            timers.disarm(*key)
            table.pop(key, None)
        else:
            delay_s = rng.randrange(1, 100) / 10
            timers.arm(*key, delay_s)
            table[key] = loop.now + delay_s
        if rng.random() < 0.1:
            loop.advance(loop.now + 0.5)
            due = sorted((at, key) for key, at in table.items() if at <= loop.now + 0.001)
            expected += due
            for _, over in due:
                del table[over]
        assert len(loop.pending) <= 1
    loop.advance(loop.now + 100)
    expected += sorted((at, key) for key, at in table.items())
    assert sorted(fired) == sorted(key for _, key in expected)
    assert len(fired) == len(expected)


def test_requests_that_are_over_do_not_fill_the_memory():
    loop: Any = Loop()
    fired: list[Any] = []
    timers = timers_on(loop, fired)
    timers.arm("lasting", "deadline", 601.0)
    for rid in range(20_000):
        timers.arm(rid, "deadline", 600.0)
        timers.disarm(rid, "deadline")
    assert len(timers._heap) <= _MIN_CLEARED + 10
    loop.advance(700.0)
    assert fired == [("lasting", "deadline")]


def test_nothing_fires_after_close():
    loop: Any = Loop()
    fired: list[Any] = []
    timers = timers_on(loop, fired)
    timers.arm("a", "stage", 1.0)
    timers.close()
    loop.advance(60.0)
    assert fired == []
    timers.arm("b", "stage", 20.0)
    loop.advance(90.0)
    assert fired == [("b", "stage")]


async def test_they_run_on_a_real_loop():
    fired: asyncio.Queue[tuple[Any, Any]] = asyncio.Queue()
    timers = Timers(asyncio.get_running_loop(), lambda key, name: fired.put_nowait((key, name)))
    timers.arm("a", "second", 0.02)
    timers.arm("a", "first", 0.01)
    async with asyncio.timeout(10):
        assert [await fired.get(), await fired.get()] == [("a", "first"), ("a", "second")]
    timers.close()
