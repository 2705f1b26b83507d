"""Things that must go on: periodic calls and background tasks whose bugs are logged and counted, never swallowed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from pipeline.metrics import count

log = structlog.get_logger()


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


def ended(task: asyncio.Task[None]) -> None:
    """A done callback for tasks that nobody awaits."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a background task failed", task=task.get_name(), exc_info=error)
        count("tasks_failed")
