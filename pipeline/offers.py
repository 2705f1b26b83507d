"""The sender's half of the accept handshake: offer work to one candidate after the other until one takes it.

An answer must come within the accept timeout (25 ms); silence or `busy` moves on to the next candidate. A late
accept is harmless: the owner binds to the first engine it hears and cancels the twin. Source: design 2.4.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from pipeline.bus import Bus
from pipeline.events import Accepted, Outcome
from pipeline.metrics import count

Key = tuple[str, int, str]  # rid, attempt, stage that answers


class Offers:
    """Open offers of one process. Feed it every `Accepted` that the control subject brings."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._timeout_s = bus.topology.limits.accept_timeout_s
        self._open: dict[Key, asyncio.Future[Accepted]] = {}

    def answered(self, message: Accepted) -> None:
        """An answer to one of our offers (others are ignored)."""
        future = self._open.get((message.rid, message.attempt, message.stage))
        if future is not None and not future.done():
            future.set_result(message)

    async def send(self, key: Key, subject: str, payload: bytes) -> Accepted | None:
        """Offer to one subject; its answer, or None after the timeout."""
        future: asyncio.Future[Accepted] = asyncio.get_running_loop().create_future()
        self._open[key] = future
        loop = asyncio.get_running_loop()
        # two turns after the time: what a late loop has not read yet still counts as answered (see Timers)
        timer = loop.call_later(self._timeout_s, loop.call_soon, loop.call_soon, _give_up, future)
        try:
            self._bus.publish(subject, payload)
            self._bus.push()
            return await future
        except TimeoutError:
            count("offers_unanswered")
            return None
        finally:
            timer.cancel()
            if self._open.get(key) is future:
                del self._open[key]


def _give_up(future: asyncio.Future[Accepted]) -> None:
    if not future.done():
        future.set_exception(TimeoutError())


async def first_taker(
    offers: Offers, key: Key, candidates: AsyncIterator[tuple[str, bytes]] | Iterable[tuple[str, bytes]]
) -> Accepted | None:
    """Offer to each candidate (subject, payload) in turn.

    Returns the first answer that settles it: taken, refused for good, or dead. None when all were busy or silent.
    """
    if not isinstance(candidates, AsyncIterator):
        candidates = _iterate(candidates)
    async for subject, payload in candidates:
        answer = await offers.send(key, subject, payload)
        if answer is not None and answer.outcome is not Outcome.BUSY:
            return answer
    return None


async def _iterate(candidates: Iterable[tuple[str, bytes]]) -> AsyncIterator[tuple[str, bytes]]:
    for candidate in candidates:
        yield candidate
