"""A worker's view of its colleagues, fed by real beacons over a real broker."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from pipeline.bus import Bus
from pipeline.events import Beacon
from pipeline.membership import Membership
from pipeline.topology import Topology
from stages.engine.stub import LAYOUT

GIVE_UP_S = 30.0  # a safety net, far above what anything here takes
FINGERPRINT = "stub-1"
LAYOUT_DIGEST = LAYOUT.digest().hex()


def engine(worker: str, *roles: str, **load: Any) -> Beacon:
    """A prefill engine's beacon, unless told otherwise."""
    usual: dict[str, Any] = {
        "free_slots": 8,
        "model": "stub",
        "fingerprint": FINGERPRINT,
        "layout": LAYOUT_DIGEST,
        "max_prompt_tokens": 60_000,
    }
    return Beacon(worker, load.pop("epoch", 1), roles or ("prefill",), **(usual | load))


class Town:
    """`membership` is under test on `bus`; the colleagues speak through `other`, another connection."""

    def __init__(self, bus: Bus, other: Bus) -> None:
        self.bus = bus
        self.other = other
        self.membership = Membership(bus)
        self._colleagues = Membership(other)
        self._heard: dict[str, Beacon] = {}
        self._changed = asyncio.Event()
        self.membership.on_change.append(self._on_change)

    def _on_change(self, beacon: Beacon) -> None:
        self._heard[beacon.worker] = beacon
        self._changed.set()

    async def announce(self, *beacons: Beacon) -> None:
        """Return once `membership` has heard them all."""
        for beacon in beacons:
            self._heard.pop(beacon.worker, None)
            self._colleagues.announce(beacon)
        await self.until(lambda: all(self._heard.get(beacon.worker) == beacon for beacon in beacons))

    async def until(self, holds: Callable[[], Any]) -> None:
        """Return when it holds; it is looked at after every beacon. Raises: TimeoutError."""
        async with asyncio.timeout(GIVE_UP_S):
            while not holds():
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def town(url: str, fresh_s: float = 600.0) -> AsyncIterator[Town]:
    """fresh_s: how long a beacon counts; the default makes a busy machine no fault."""
    topology = Topology.load()
    topology = dataclasses.replace(topology, limits=dataclasses.replace(topology.limits, beacon_fresh_s=fresh_s))
    bus = await Bus.connect([url], f"lookup-{secrets.token_hex(4)}", topology)
    try:
        other = await Bus.connect([url], f"other-{secrets.token_hex(4)}", topology, single=True)
        try:
            here = Town(bus, other)
            await bus.flush()
            yield here
        finally:
            await other.close()
    finally:
        await bus.close()
