"""Is the worker that holds requests still there? Beacon silence raises the question, a ping answers it.

No responders = dead; no answer in time = hung; another epoch = a new process under the old id. Source: design 2.4.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from pipeline.bus import Bus
from pipeline.errors import TransientError
from pipeline.membership import Membership
from pipeline.metrics import count


class HolderWatch:
    """Calls `lost(worker, epoch)` once for a holder that is gone. At most one ping a worker is under way."""

    def __init__(self, bus: Bus, membership: Membership, lost: Callable[[str, int], None]) -> None:
        self._bus = bus
        self._membership = membership
        self._lost = lost
        self._limits = bus.topology.limits
        self._pings: dict[str, asyncio.Task[None]] = {}
        self._connected_at = -math.inf  # silence before our own reconnect says nothing about others
        bus.on_reconnect(self._reconnected)

    def check(self, worker: str, epoch: int) -> None:
        """Call often, for every holder of a request in hand."""
        if self._membership.epoch(worker) > epoch:
            self._lost(worker, epoch)
        elif worker not in self._pings and self._silent_s(worker) > self._limits.holder_silent_s:
            task = asyncio.get_running_loop().create_task(self._ping(worker, epoch))
            self._pings[worker] = task
            task.add_done_callback(lambda _done: self._pings.pop(worker, None))

    def _reconnected(self) -> None:
        self._connected_at = time.monotonic()

    def _silent_s(self, worker: str) -> float:
        return min(self._membership.silent_s(worker), time.monotonic() - self._connected_at)

    async def _ping(self, worker: str, epoch: int) -> None:
        count("holders_pinged")
        connected_at = self._connected_at
        if not self._bus.control.is_connected:
            return  # it is us who are cut off
        try:
            await self._bus.ask(self._bus.topology.subject("ping", worker=worker), b"", self._limits.ping_timeout_s)
        except TransientError:
            if connected_at != self._connected_at:
                return  # our own reconnect may have swallowed ping or answer
            # our own loop may be what is late: beacons that wait in its socket are read in this pause
            await asyncio.sleep(self._limits.beacon_s)
            if self._silent_s(worker) > self._limits.holder_silent_s and self._bus.control.is_connected:
                self._lost(worker, epoch)
