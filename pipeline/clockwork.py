"""Things that must go on: periodic calls and background tasks whose bugs are logged and counted, never swallowed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from pipeline.metrics import count

log = structlog.get_logger()

_CANCEL_AGAIN_S = 0.1


async def every(period_s: float, call: Callable[[], None]) -> None:
    """Call for ever, a period apart. A call that raises is logged and counted, and the next one comes all the same."""
    while True:
        await asyncio.sleep(period_s)
        try:
            call()
        except Exception:
            # a clock that stopped would stop everything that hangs on it, silently and for good
            log.exception("a periodic call failed", call=getattr(call, "__qualname__", repr(call)))
            count("ticks_failed")


async def within(timeout_s: float, work: Coroutine[Any, Any, None]) -> None:
    """Await `work`, at most so long; then it is cancelled until it obeys.

    `asyncio.timeout` cancels once, and a library that loses that (`wait_for` of Python 3.11 does when its result comes
    at the same moment) goes on for ever: the likely cause of a worker, seen once, that never gave up a wrong password.
    Raises: TimeoutError, and what `work` raises.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if task.done():
            task.result()
            return
    finally:
        while not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_CANCEL_AGAIN_S)
    raise TimeoutError


def ended(task: asyncio.Task[None]) -> None:
    """A done callback for tasks that nobody awaits."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a background task failed", task=task.get_name(), exc_info=error)
        count("tasks_failed")
