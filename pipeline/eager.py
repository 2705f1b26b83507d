"""Start a coroutine at once, in the caller's own tick, and make it a task only if it has to wait.

Most handlers of a hop never wait: encoding a short body, choosing an engine, reading KV that is mapped already.
`create_task` would put each of them off by one turn of the loop, which is a third of a hop's latency.
Python 3.12 has eager tasks; this is the same for 3.11. What runs before the first wait has no current task, so
`asyncio.timeout` and `asyncio.TaskGroup` do not belong there.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any


def start(work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Run until the first wait; the task that does the rest, or None when nothing is left to do.

    Raises: whatever the coroutine raises before it waits.
    """
    try:
        waits_for = work.send(None)
    except StopIteration:
        return None
    return asyncio.get_running_loop().create_task(_rest(work, waits_for))


async def _rest(work: Coroutine[Any, Any, None], waits_for: Any) -> None:
    await _resumed(work, waits_for)


@types.coroutine
def _resumed(work: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """Hand the task what the coroutine waits for, and the coroutine what comes of it, to the end."""
    while True:
        failure: BaseException | None = None
        result = None
        try:
            result = yield waits_for
        except BaseException as error:  # noqa: BLE001 - a cancel too belongs to the coroutine
            failure = error
        try:
            waits_for = work.send(result) if failure is None else work.throw(failure)
        except StopIteration:
            return
