"""Runs an engine's steps off the loop that answers the bus, or on it when a step takes microseconds.

The torch engine steps in a thread of its own; results cross back with one `call_soon_threadsafe` a step. The stub
engine only pretends to compute: its steps run as loop callbacks, paced by a timer, because a thread hop (100 us,
facts-spikes 4) would be all that one measures.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Protocol

import structlog

log = structlog.get_logger()


class Stepping(Protocol):
    """What can be stepped. `pace_s`: seconds that a step pretends to take; only inline engines have one."""

    inline: bool
    pace_s: float

    def step(self) -> Any | None:
        """Do one step; None when there is nothing to do."""
        ...


class Stepper:
    """Steps an engine while it has work. `on_result` runs on the loop; `on_failure` when a step raised."""

    def __init__(
        self, engine: Stepping, on_result: Callable[[Any], None], on_failure: Callable[[BaseException], None]
    ) -> None:
        self._engine = engine
        self._on_result = on_result
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._stepping = False  # inline: a step is under way
        self._closed = False
        self._work = threading.Event()
        self._thread: threading.Thread | None = None
        if not engine.inline:
            self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """There is new work (or a cancel to obey)."""
        if self._thread is not None:
            self._work.set()
        elif not self._scheduled and not self._closed:
            self._scheduled = True
            if not self._stepping:
                self._begin()

    def _begin(self) -> None:
        """An idle engine that does not pretend to take time steps at once: its result leaves in the caller's tick.

        The step after it waits for its turn of the loop, so that one that always has work starves nobody.
        """
        if self._engine.pace_s > 0:
            self._loop.call_soon(self._tick)
            return
        try:
            self._tick()
        except Exception as error:  # noqa: BLE001 - reported by the loop
            # a bug of whoever hears of the step is not one of whoever brought the work: the step goes on
            self._loop.call_exception_handler({"message": "a step's result was not taken", "exception": error})

    def close(self) -> None:
        """Stop stepping. A step under way is finished first."""
        self._closed = True
        self._work.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def _tick(self) -> None:
        if self._closed:
            return
        started = self._loop.time()
        self._scheduled = False  # before the step: a wake from within it, or from on_failure, must count
        self._stepping = True
        result = self._step()
        self._stepping = False
        if result is None:
            if self._scheduled:
                self._loop.call_soon(self._tick)
            return
        pause_s = self._engine.pace_s
        self._scheduled = True
        if pause_s > 0:
            # what a real engine computed in that time is not there any sooner
            self._loop.call_at(started + pause_s, self._deliver, result)
        else:
            self._deliver(result)

    def _deliver(self, result: Any) -> None:
        # before on_result, which may fail: the engine steps on
        self._loop.call_soon(self._tick)
        self._on_result(result)

    def _step(self) -> Any | None:
        try:
            return self._engine.step()
        except Exception as error:
            # a bug in an engine fails what it runs, never the worker
            log.exception("engine step failed")
            self._on_failure(error)
            return None

    def _run(self) -> None:
        while not self._closed:
            self._work.wait()
            self._work.clear()
            while not self._closed:
                try:
                    result = self._engine.step()
                except Exception as error:
                    log.exception("engine step failed")
                    self._loop.call_soon_threadsafe(self._on_failure, error)
                    break
                if result is None:
                    break
                self._loop.call_soon_threadsafe(self._on_result, result)
