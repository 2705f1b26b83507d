"""Dead, hung, restarted or alive: what a watch says of real workers. Our own faults it blames on nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from pipeline.bus import Bus
from pipeline.events import Beacon
from pipeline.liveness import HolderWatch
from pipeline.membership import Membership
from pipeline.topology import Topology
from tests.pipeline.fabric import Counted, Ear, eventually, joined, limited, new_worker
from tidemill.nats_server import EmbeddedNats

QUICK = limited(holder_silent_s=0.05, ping_timeout_s=0.05)
PATIENT = limited(holder_silent_s=0.05, ping_timeout_s=60.0)


class Watched:
    """A watch and whom it has reported as lost."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.membership = Membership(bus)
        self.lost: list[tuple[str, int]] = []
        self.watch = HolderWatch(bus, self.membership, lambda worker, epoch: self.lost.append((worker, epoch)))

    async def silent(self, worker: str, epoch: int = 1) -> None:
        """One beacon of the worker, and then silence for long enough."""
        self.membership.announce(Beacon(worker, epoch, ("decode",)))
        await eventually(lambda: self.membership.epoch(worker) == epoch)
        await eventually(lambda: self.membership.silent_s(worker) > 0.05)

    async def checked(self, worker: str, epoch: int = 1) -> None:
        """Check, and wait for the ping that it may cause."""
        self.watch.check(worker, epoch)
        await eventually(lambda: not self.watch._pings)


def ping_subject(bus: Bus, worker: str) -> str:
    return bus.topology.subject("ping", worker=worker)


@pytest.fixture
def server() -> Iterator[EmbeddedNats]:
    with EmbeddedNats() as server:
        yield server


@pytest.mark.parametrize("heard", [True, False])
async def test_a_silent_worker_that_nobody_answers_for_is_dead_at_once(nats_url: str, heard: bool):
    async with joined(nats_url, topology=PATIENT) as bus:
        watched, name = Watched(bus), new_worker()
        if heard:
            await watched.silent(name)
        await watched.checked(name)
        assert watched.lost == [(name, 1)]


async def test_a_silent_worker_that_does_not_answer_is_hung(nats_url: str):
    async with joined(nats_url, topology=QUICK) as bus, joined(nats_url) as hung:
        watched = Watched(bus)
        pings = Ear(hung, ping_subject(bus, hung.worker))
        await hung.flush()
        await watched.silent(hung.worker)
        await watched.checked(hung.worker)
        assert watched.lost == [(hung.worker, 1)]
        assert len(pings.payloads) == 1


async def test_a_silent_worker_that_answers_is_alive(nats_url: str):
    async with joined(nats_url, topology=PATIENT) as bus, joined(nats_url) as alive:
        watched = Watched(bus)
        pings = Ear(alive, ping_subject(bus, alive.worker), reply_with=b"")
        await alive.flush()
        await watched.silent(alive.worker)
        await watched.checked(alive.worker)
        assert watched.lost == []
        assert len(pings.payloads) == 1


async def test_a_worker_that_was_just_heard_is_not_pinged(nats_url: str):
    async with joined(nats_url, topology=limited(holder_silent_s=3600.0)) as bus:
        watched, name, pinged = Watched(bus), new_worker(), Counted("holders_pinged")
        watched.membership.announce(Beacon(name, 1, ()))
        await eventually(lambda: watched.membership.epoch(name))
        watched.watch.check(name, 1)
        assert (watched.lost, watched.watch._pings, pinged()) == ([], {}, 0)


async def test_a_raised_epoch_is_a_new_process_and_needs_no_ping(nats_url: str):
    async with joined(nats_url, topology=PATIENT) as bus:
        watched, name, pinged = Watched(bus), new_worker(), Counted("holders_pinged")
        await watched.silent(name, epoch=9)
        watched.watch.check(name, 8)
        assert watched.lost == [(name, 8)]
        assert pinged() == 0


async def test_one_ping_a_worker_is_under_way_however_often_one_checks(nats_url: str):
    async with joined(nats_url, topology=QUICK) as bus, joined(nats_url) as hung:
        watched = Watched(bus)
        pings = Ear(hung, ping_subject(bus, hung.worker))
        await hung.flush()
        await watched.silent(hung.worker)
        for _ in range(20):
            watched.watch.check(hung.worker, 1)
        await eventually(lambda: not watched.watch._pings)
        assert len(pings.payloads) == 1
        assert watched.lost == [(hung.worker, 1)]


async def test_a_broker_that_is_away_is_nobodys_death(server: EmbeddedNats):
    async with joined(server.url, topology=QUICK) as bus:
        watched, name = Watched(bus), new_worker()
        await watched.silent(name)
        server.kill()
        await eventually(lambda: not bus.control.is_connected)
        await watched.checked(name)
        assert watched.lost == []


async def test_silence_is_counted_from_our_own_reconnect(server: EmbeddedNats):
    async with joined(server.url, topology=limited(holder_silent_s=0.3, ping_timeout_s=0.05)) as bus:
        watched, name, pinged = Watched(bus), new_worker(), Counted("holders_pinged")
        await watched.silent(name)
        back: list[int] = []

        def reconnected() -> None:
            # in this moment the worker may not be back yet: it is given as long as ever
            watched.watch.check(name, 1)
            back.append(pinged())

        bus.on_reconnect(reconnected)
        server.kill()
        await eventually(lambda: watched.membership.silent_s(name) > 0.3)
        await asyncio.to_thread(server.start)
        await eventually(lambda: back)
        assert back == [0]
        assert watched.watch._pings == {}
        await eventually(lambda: watched.membership.silent_s(name) > 0.3 and watched.watch._silent_s(name) > 0.3)
        await watched.checked(name)
        assert watched.lost == [(name, 1)]  # it stayed away


async def test_a_ping_that_our_reconnect_swallowed_is_nobodys_death(server: EmbeddedNats):
    topology: Topology = limited(holder_silent_s=0.05, ping_timeout_s=1.0)
    async with joined(server.url, topology=topology) as bus:
        watched, reconnects = Watched(bus), []
        bus.on_reconnect(lambda: reconnects.append(1))
        async with joined(server.url) as other:
            pings = Ear(other, ping_subject(bus, other.worker))
            await other.flush()
            await watched.silent(other.worker)
            watched.watch.check(other.worker, 1)
            await eventually(lambda: pings.payloads)
            server.kill()
            await asyncio.to_thread(server.start)
            await eventually(lambda: reconnects and bus.control.is_connected)
            assert watched.watch._pings, "the ping should still be under way"
            await eventually(lambda: not watched.watch._pings)
        assert watched.lost == []
