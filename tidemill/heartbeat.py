"""A worker's sign of life to the supervisor that started it: one byte per second, written by its event loop.

The loop writes it, not a thread: a worker whose loop is stuck answers nobody, whatever its threads still do.
"""

from __future__ import annotations

import asyncio
import os

HEARTBEAT_FD_VARIABLE = "TIDEMILL_HEARTBEAT_FD"
BEAT_S = 1.0  # a tenth of the silence after which the supervisor kills


async def beat(interval_s: float = BEAT_S) -> None:
    """Write one byte per interval to the pipe inherited from the supervisor, until cancelled.

    The first byte says "ready": start this when the worker really serves. Returns at once in a process that nobody
    supervises, and when the supervisor's end of the pipe is gone.
    """
    text = os.environ.get(HEARTBEAT_FD_VARIABLE)
    if text is None:
        return
    fd = int(text)
    os.set_blocking(fd, False)
    while True:
        try:
            os.write(fd, b".")
        except BlockingIOError:
            pass  # the supervisor is behind; the bytes it has not read yet say the same
        except BrokenPipeError:
            return
        await asyncio.sleep(interval_s)
