"""Notes that no request waits for: gathered for a moment, then told all at once, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from pipeline.metrics import count

log = structlog.get_logger()


class Notes:
    """Calls that tell somebody something, run `delay_s` after the first of them came."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._loop = asyncio.get_running_loop()
        self._calls: list[Callable[[], None]] = []

    def add(self, tell: Callable[[], None]) -> None:
        """One note. What it raises is logged and counted, and keeps no other from being told."""
        if not self._calls:
            self._loop.call_later(self._delay_s, self.send)
        self._calls.append(tell)

    def send(self) -> None:
        """Tell what has gathered."""
        calls, self._calls = self._calls, []
        for tell in calls:
            try:
                tell()
            except Exception:
                # a bug in one note must not silence the others
                log.exception("a note was not told")
                count("notes_failed")
