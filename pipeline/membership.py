"""Who is there: beacons in, a table of live workers out.

A worker is fresh for 0.3 s after its last beacon; new work goes to fresh ones only. Silence is measured on this
worker's own clock, from arrival. A lower epoch of a known worker is an old process's echo and is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from pipeline.bus import Bus
from pipeline.events import Beacon
from pipeline.metrics import count
from pipeline.wire import encode

_decode = msgspec.msgpack.Decoder(Beacon).decode

# A worker that was silent this long is forgotten. Source: ours; long enough for every holder check (0.5 s).
FORGET_S = 10.0


@dataclass(slots=True)
class Member:
    """A worker as last heard. `heard_at` is on time.monotonic()."""

    beacon: Beacon
    heard_at: float


class Membership:
    """The table of one process. `on_change` runs after every beacon that was taken."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._fresh_s = bus.topology.limits.beacon_fresh_s
        self.members: dict[str, Member] = {}
        self.on_change: list[Callable[[Beacon], None]] = []
        bus.subscribe(bus.topology.pattern("beacon"), self._heard, control=True)

    def announce(self, beacon: Beacon) -> None:
        """Publish this worker's own beacon."""
        self._bus.tell(self._bus.topology.subject("beacon", worker=beacon.worker), encode(beacon))

    def fresh(self, role: str) -> list[Beacon]:
        """Beacons of workers of a role that are fresh and not draining."""
        now = time.monotonic()
        return [
            member.beacon
            for member in self.members.values()
            if role in member.beacon.roles and not member.beacon.draining and now - member.heard_at <= self._fresh_s
        ]

    def silent_s(self, worker: str) -> float:
        """Seconds since a worker was heard; infinite when unknown."""
        member = self.members.get(worker)
        return time.monotonic() - member.heard_at if member else float("inf")

    def epoch(self, worker: str) -> int:
        """Its last epoch, 0 when unknown."""
        member = self.members.get(worker)
        return member.beacon.epoch if member else 0

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members.values())

    def _heard(self, _subject: str, _reply: str, payload: bytes, _headers: bytes | None) -> None:
        try:
            beacon = _decode(payload)
        except msgspec.DecodeError:
            count("beacons_malformed")
            return
        now = time.monotonic()
        known = self.members.get(beacon.worker)
        if known and beacon.epoch < known.beacon.epoch:
            count("beacons_of_lower_epoch")
            return
        self.members[beacon.worker] = Member(beacon, now)
        for worker in [w for w, member in self.members.items() if now - member.heard_at > FORGET_S]:
            del self.members[worker]
        for call in self.on_change:
            call(beacon)
