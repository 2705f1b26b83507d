"""The life of a worker process: connect, announce, serve, drain.

SIGTERM or SIGINT starts a drain: the beacon says so, nothing new is taken, what is in hand is finished (at most
`drain_s`), what is not goes back to its owner or to the broker. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import structlog

from pipeline import jetstream, metrics
from pipeline.bus import Bus
from pipeline.clockwork import every
from pipeline.events import Beacon
from pipeline.membership import Membership
from pipeline.stage import EngineLoad
from pipeline.topology import Topology

log = structlog.get_logger()

Service = Callable[[asyncio.Event], Awaitable[None]]
_COUNTERS_EVERY = 10  # beacons; counters are for people, once a second is enough


class Worker:
    """One process on the bus. Services run until `stop` is set, in the order in which they were added."""

    def __init__(self, bus: Bus, roles: Sequence[str]) -> None:
        self.bus = bus
        self.roles = tuple(roles)
        self.epoch = time.time_ns() // 1_000_000  # rises at every start: milliseconds since 1970
        self.membership = Membership(bus)
        self.stop = asyncio.Event()
        self.load: Callable[[], EngineLoad | None] = lambda: None
        self._services: list[Service] = []
        self._beacons = 0
        ping = bus.topology.subject("ping", worker=bus.worker)
        bus.subscribe(ping, self._pinged, control=True)

    @classmethod
    async def join(cls, urls: Sequence[str], worker: str, roles: Sequence[str], topology: Topology) -> Worker:
        """Connect and make sure that the broker has what is needed.

        Raises: SetupError naming what is missing.
        """
        bus = await Bus.connect(urls, worker, topology, fast=os.environ.get("TIDEMILL_STOCK_NATS") != "1")
        try:
            await jetstream.ensure(bus)
        except BaseException:
            await bus.close()
            raise
        return cls(bus, roles)

    def add(self, service: Service) -> None:
        """A service to run."""
        self._services.append(service)

    async def run(self) -> None:
        """Serve until a signal, then drain.

        Raises: SetupError when the broker refuses a subject that this worker needs.
        """
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._signalled)
        self._beat()
        await self.bus.check_permissions()
        async with asyncio.TaskGroup() as group:
            beacon = group.create_task(every(self.bus.topology.limits.beacon_s, self._beat))
            services = [group.create_task(_run(service, self.stop)) for service in self._services]
            await asyncio.wait(services)
            beacon.cancel()
        await self.bus.close()

    def _signalled(self) -> None:
        if self.stop.is_set():
            os._exit(130)  # asked twice: whoever asks does not want to wait
        log.info("draining", worker=self.bus.worker)
        self.stop.set()
        self._beat()

    def _beat(self) -> None:
        self._beacons += 1
        counters = metrics.snapshot() if self._beacons % _COUNTERS_EVERY == 0 else {}
        beacon = Beacon(self.bus.worker, self.epoch, self.roles, draining=self.stop.is_set(), counters=counters)
        load = self.load()
        if load is not None:
            fields = {name: getattr(load, name) for name in load.__dataclass_fields__}
            beacon = msgspec.structs.replace(beacon, **fields)
        self.membership.announce(beacon)

    def _pinged(self, _subject: str, reply: str, _payload: bytes, _headers: bytes | None) -> None:
        if reply:
            self.bus.tell(reply, b"")


async def _run(service: Service, stop: asyncio.Event) -> None:
    await service(stop)
