"""Many cancellable timers on one event-loop timer. Re-arming is a heap push; stale entries are skipped.

A request that is over leaves an entry until its deadline would have come, so the heap is cleared of stale entries
when they are most of it.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Hashable
from typing import Any

_MIN_CLEARED = 1_000  # fewer stale entries are not worth a pass. Source: ours


class Timers:
    """Named timers: (key, name) -> callback. Times are in seconds of the loop's clock."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fire: Callable[[Any, Any], None]) -> None:
        self._loop = loop
        self._fire = fire
        self._heap: list[tuple[float, int, Hashable, Hashable]] = []
        self._armed: dict[tuple[Hashable, Hashable], int] = {}
        self._serial = 0
        self._handle: asyncio.TimerHandle | None = None
        self._wakes_at = float("inf")

    def arm(self, key: Hashable, name: Hashable, delay_s: float) -> None:
        """Fire `(key, name)` after `delay_s`; replaces an earlier one of that name."""
        self._serial += 1
        self._armed[key, name] = self._serial
        at = self._loop.time() + delay_s
        if len(self._heap) > 2 * len(self._armed) + _MIN_CLEARED:
            self._clear_stale()
        heapq.heappush(self._heap, (at, self._serial, key, name))
        self._wake(at)

    def disarm(self, key: Hashable, name: Hashable) -> None:
        """Stop a timer; unknown ones are fine."""
        self._armed.pop((key, name), None)

    def close(self) -> None:
        """Stop everything."""
        self._armed.clear()
        self._heap.clear()
        if self._handle:
            self._handle.cancel()
        self._wakes_at = float("inf")

    def _clear_stale(self) -> None:
        self._heap = [entry for entry in self._heap if self._armed.get(entry[2:]) == entry[1]]
        heapq.heapify(self._heap)

    def _wake(self, at: float) -> None:
        if at >= self._wakes_at:
            return
        if self._handle:
            self._handle.cancel()
        self._wakes_at = at
        self._handle = self._loop.call_at(at, self._due)

    def _due(self) -> None:
        # A loop that comes late may have the awaited answer in a socket that it has not read yet: two turns from
        # here it has. Timers that judge others must not count our own lag.
        self._handle = None
        self._loop.call_soon(self._loop.call_soon, self._run)

    def _run(self) -> None:
        self._wakes_at = float("inf")
        # libuv's timers have millisecond grain: what is due within it fires now
        now = self._loop.time() + 0.001
        try:
            while self._heap and self._heap[0][0] <= now:
                _, serial, key, name = heapq.heappop(self._heap)
                if self._armed.get((key, name)) == serial:
                    del self._armed[key, name]
                    self._fire(key, name)
        finally:
            self._wake_for_next()  # a callback that raised must not silence the timers of others

    def _wake_for_next(self) -> None:
        while self._heap and self._armed.get(self._heap[0][2:]) != self._heap[0][1]:
            heapq.heappop(self._heap)
        if self._heap:
            self._wake(self._heap[0][0])
