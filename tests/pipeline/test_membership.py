"""The table of live workers, filled by real beacons."""

from __future__ import annotations

import pytest

from pipeline.events import Beacon
from pipeline.membership import FORGET_S, Membership
from pipeline.wire import encode
from tests.pipeline.fabric import Counted, eventually, joined, limited, new_worker

PATIENT = limited(beacon_fresh_s=3600.0)  # fresh for the whole test


def beacon(worker: str, epoch: int = 1, roles: tuple[str, ...] = ("prefill",), *, draining: bool = False) -> Beacon:
    return Beacon(worker, epoch, roles, draining=draining)


async def test_an_announced_worker_is_fresh_for_each_of_its_roles(nats_url: str):
    async with joined(nats_url, topology=PATIENT) as bus, joined(nats_url) as other:
        membership, name = Membership(bus), new_worker()
        await bus.flush()
        Membership(other).announce(beacon(name, roles=("codec", "parse")))
        await eventually(lambda: membership.epoch(name))
        for role in ("codec", "parse"):
            assert [b.worker for b in membership.fresh(role)] == [name]
        assert membership.fresh("prefill") == []
        assert [member.beacon.worker for member in membership] == [name]
        assert membership.silent_s(name) < 60


async def test_an_unknown_worker_has_been_silent_for_ever_and_has_no_epoch(nats_url: str):
    async with joined(nats_url) as bus:
        membership = Membership(bus)
        assert membership.silent_s("nobody") == float("inf")
        assert membership.epoch("nobody") == 0
        assert list(membership) == []


async def test_a_worker_ceases_to_be_fresh_but_stays_known(nats_url: str):
    async with joined(nats_url, topology=limited(beacon_fresh_s=0.05)) as bus:
        membership, name = Membership(bus), new_worker()
        membership.announce(beacon(name))
        await eventually(lambda: membership.fresh("prefill"))
        await eventually(lambda: not membership.fresh("prefill"))
        assert membership.epoch(name) == 1
        assert 0.05 < membership.silent_s(name) < 60
        membership.announce(beacon(name))
        await eventually(lambda: membership.fresh("prefill"))


async def test_a_draining_worker_gets_no_new_work_but_is_known(nats_url: str):
    async with joined(nats_url, topology=PATIENT) as bus:
        membership, name = Membership(bus), new_worker()
        membership.announce(beacon(name))
        await eventually(lambda: membership.fresh("prefill"))
        membership.announce(beacon(name, draining=True))
        await eventually(lambda: not membership.fresh("prefill"))
        assert membership.epoch(name) == 1


async def test_a_higher_epoch_replaces_a_worker_and_the_lower_one_is_an_echo(nats_url: str):
    async with joined(nats_url, topology=PATIENT) as bus:
        membership, name, echoes = Membership(bus), new_worker(), Counted("beacons_of_lower_epoch")
        for epoch in (5, 7, 6, 7):
            membership.announce(beacon(name, epoch, roles=(f"of-{epoch}",)))
        await eventually(lambda: echoes() == 1)
        assert membership.epoch(name) == 7
        assert [b.worker for b in membership.fresh("of-7")] == [name]
        assert membership.fresh("of-5") == membership.fresh("of-6") == []


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"{}", b"\x90", encode(beacon("x"))[:-1], encode(("x", "y", ()))])
async def test_rubbish_is_counted_and_the_next_beacon_taken(nats_url: str, payload: bytes):
    async with joined(nats_url, topology=PATIENT) as bus:
        membership, name, malformed = Membership(bus), new_worker(), Counted("beacons_malformed")
        bus.tell(bus.topology.subject("beacon", worker=name), payload)
        membership.announce(beacon(name))
        await eventually(lambda: membership.epoch(name))
        assert malformed() == 1
        assert bus.control.callback_errors == 0


async def test_who_was_silent_for_long_is_forgotten_when_another_speaks(nats_url: str):
    async with joined(nats_url) as bus:
        membership, gone, there = Membership(bus), new_worker(), new_worker()
        membership.announce(beacon(gone))
        await eventually(lambda: membership.epoch(gone))
        membership.members[gone].heard_at -= FORGET_S + 1
        membership.announce(beacon(there))
        await eventually(lambda: membership.epoch(there))
        assert set(membership.members) == {there}


async def test_whoever_asked_is_told_of_every_beacon_that_was_taken(nats_url: str):
    async with joined(nats_url) as bus:
        membership, name, told = Membership(bus), new_worker(), []
        membership.on_change.append(lambda b: told.append(b.epoch))
        for epoch in (2, 1, 3):
            membership.announce(beacon(name, epoch))
        await eventually(lambda: len(told) == 2)
        assert told == [2, 3]
