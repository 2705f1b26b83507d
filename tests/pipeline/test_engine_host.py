"""An engine host with a small stage: the accept handshake, tombstones, tokens out and acknowledgements in."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pipeline.bus import Bus
from pipeline.engine_host import EngineHost
from pipeline.events import Accepted, Beacon, Cancelled, Envelope, HandoffEnded, Outcome, Plan, StageFailed, Struct
from pipeline.membership import Membership
from pipeline.outbox import TokenRow
from pipeline.stage import Answer
from pipeline.topology import Topology
from pipeline.wire import AckKind, decode_frame, decode_matched, encode, encode_acks
from tests.pipeline.fabric import (
    TOPOLOGY,
    Counted,
    Ear,
    SmallEngine,
    envelope,
    eventually,
    joined,
    limited,
    matched,
    new_rid,
    publish_event,
)


class Hosted:
    """A running host with its stage, a lookup worker that offers, and an owner that listens."""

    def __init__(self, bus: Bus, sender: Bus, owner: Bus) -> None:
        self.bus, self.sender, self.owner = bus, sender, owner
        self.host = EngineHost(bus, Membership(bus), epoch=9)
        self.stage = SmallEngine()
        self.host.serve(self.stage, "matched", decode_matched)
        self.to_sender, self.to_owner = Ear.of_worker(sender), Ear.of_worker(owner)
        self.frames = Ear(owner, owner.topology.subject("tokens", worker=owner.worker), control=False)
        self.stop = asyncio.Event()
        self.running = asyncio.ensure_future(self.host.run(self.stop))

    def offer(self, *, by_owner: bool = False, **fields: Any) -> Envelope:
        env = envelope(self.owner.worker, **fields)
        sender = self.owner if by_owner else self.sender
        subject = self.bus.topology.subject("matched", worker=self.bus.worker)
        publish_event(sender, subject, matched(env, self.bus.worker, sender.worker))
        return env

    def tell(self, message: Struct, *, everyone: bool = False) -> None:
        topology = self.bus.topology
        subject = topology.subject("everyone") if everyone else topology.subject("control", worker=self.bus.worker)
        self.owner.tell(subject, encode(message))

    def acknowledge(self, kind: AckKind, handle: int, position: int, owner: str = "") -> None:
        acks = encode_acks(kind, array("Q", (handle,)), array("I", (position,)))
        self.owner.tell(self.bus.topology.subject("acks", worker=self.bus.worker), acks, owner or self.owner.worker)

    async def owner_is_heard(self) -> None:
        """Its beacon: a stopping host waits for owners that live."""
        self.host.membership.announce(Beacon(self.owner.worker, 1, ("codec",)))
        await eventually(lambda: self.host.membership.epoch(self.owner.worker))

    @property
    def tokens(self) -> list[int]:
        return [token for payload in self.frames.payloads for token in decode_frame(payload).tokens]


@asynccontextmanager
async def hosted(url: str, topology: Topology = TOPOLOGY) -> AsyncIterator[Hosted]:
    async with joined(url, topology=topology) as bus, joined(url) as sender, joined(url) as owner:
        hosted = Hosted(bus, sender, owner)
        for each in (bus, sender, owner):
            await each.flush()
        yield hosted
        hosted.stage.held.clear()
        for entry in list(hosted.host.outbox._entries.values()):
            hosted.host.outbox.forget(entry)
        hosted.stop.set()
        await hosted.running


async def test_taken_work_is_told_to_sender_and_owner_with_the_plan(nats_url: str):
    async with hosted(nats_url) as it:
        plan = Plan(prompt_tokens=2, hit_tokens=1, compute_from=1, replay_from=0, seed=3)
        it.stage.will = Answer(Outcome.ACCEPTED, plan=plan)
        env = it.offer()
        for ear in (it.to_sender, it.to_owner):
            message = await ear.first(Accepted)
            assert (message.rid, message.attempt, message.stage) == (env.rid, 0, "prefill")
            assert (message.worker, message.epoch, message.owner) == (it.bus.worker, 9, it.owner.worker)
            assert (message.outcome, message.plan) == (Outcome.ACCEPTED, plan)
        assert list(it.stage.held) == [(env.rid, 0)]


async def test_an_owner_that_offers_itself_is_told_once(nats_url: str):
    async with hosted(nats_url) as it:
        it.offer(by_owner=True)
        await it.to_owner.first(Accepted)
        await it.bus.flush()
        await it.owner.flush()
        assert len(it.to_owner.payloads) == 1


async def test_busy_is_the_senders_to_resolve_and_may_be_offered_again(nats_url: str):
    async with hosted(nats_url) as it:
        it.stage.will = Answer(Outcome.BUSY, "full", retry_after_s=0.5)
        env = it.offer()
        busy = await it.to_sender.first(Accepted)
        assert (busy.outcome, busy.reason, busy.retry_after_s) == (Outcome.BUSY, "full", 0.5)
        it.stage.will = Answer(Outcome.QUEUED)
        it.offer(rid=env.rid)
        await eventually(lambda: it.to_sender.outcomes == ["busy", "queued"])
        await eventually(lambda: it.to_owner.outcomes == ["queued"])


async def test_what_can_never_be_taken_is_told_to_both(nats_url: str):
    async with hosted(nats_url) as it:
        it.stage.will = Answer(Outcome.REFUSED, "too long for any engine")
        it.offer()
        for ear in (it.to_sender, it.to_owner):
            assert (await ear.first(Accepted)).reason == "too long for any engine"


async def test_the_same_attempt_again_is_a_duplicate_and_the_stage_takes_it_once(nats_url: str):
    async with hosted(nats_url) as it:
        env = it.offer()
        for _ in range(3):
            it.offer(rid=env.rid)
        await eventually(lambda: it.to_sender.outcomes == ["accepted", *["duplicate"] * 3])
        assert len(it.stage.held) == 1


async def test_late_work_is_dead(nats_url: str):
    async with hosted(nats_url) as it:
        it.offer(deadline_ns=time.time_ns() - 1)
        await eventually(lambda: it.to_sender.outcomes == it.to_owner.outcomes == ["dead"])
        assert it.stage.held == {}


async def test_a_higher_attempt_supersedes_and_a_lower_one_is_dead(nats_url: str):
    async with hosted(nats_url) as it:
        env = it.offer(attempt=4)
        it.offer(rid=env.rid, attempt=7)
        it.offer(rid=env.rid, attempt=5)
        await eventually(lambda: it.to_sender.outcomes == ["accepted", "accepted", "dead"])
        assert it.host.is_dead(env.rid, 6)
        assert not it.host.is_dead(env.rid, 7)


async def test_a_cancel_reaches_the_stage_and_kills_what_comes_after_it(nats_url: str):
    async with hosted(nats_url) as it:
        for everyone, attempt, again in ((False, 0, 0), (True, -1, 99)):
            it.to_sender.payloads.clear()
            env = it.offer()
            await it.to_sender.first(Accepted)
            it.tell(Cancelled(env.rid, attempt, "enough"), everyone=everyone)
            await eventually(lambda: it.stage.cancelled[-1:] == [(env.rid, attempt)])  # noqa: B023
            assert it.stage.held == {}
            it.offer(rid=env.rid, attempt=again)
            await eventually(lambda: it.to_sender.outcomes == ["accepted", "dead"])


async def test_a_cancel_up_to_an_attempt_leaves_the_next_one_alone(nats_url: str):
    async with hosted(nats_url) as it:
        rid = new_rid()
        it.tell(Cancelled(rid, 3, "superseded"))
        await eventually(lambda: it.stage.cancelled == [(rid, 3)])
        it.offer(rid=rid, attempt=4)
        await eventually(lambda: it.to_sender.outcomes == ["accepted"])


async def test_the_end_of_a_choice_and_of_a_handoff_reach_the_stage(nats_url: str):
    async with hosted(nats_url) as it:
        rid = new_rid()
        it.tell(Cancelled(rid, 2, "stop", choice=1, position=40))
        ended = HandoffEnded(rid, 2, "decode-x", 5, "checksum")
        it.tell(ended)
        await eventually(lambda: it.stage.ended == [ended])
        assert it.stage.stopped == [(rid, 2, 1, 40)]
        assert it.stage.cancelled == []
        assert not it.host.is_dead(rid, 2)


async def test_work_that_failed_here_may_be_offered_again(nats_url: str):
    async with hosted(nats_url) as it:
        env = it.offer()
        await it.to_sender.first(Accepted)
        it.host.forget(env.rid, env.attempt)
        it.offer(rid=env.rid)
        await eventually(lambda: it.to_sender.outcomes == ["accepted", "accepted"])


async def test_a_stage_that_fails_to_take_work_does_not_hold_it(nats_url: str):
    async with hosted(nats_url) as it:
        failed = Counted("submits_failed")
        it.stage.broken = True
        env = it.offer()
        await eventually(lambda: it.to_sender.outcomes == ["busy"])
        assert failed() == 1
        it.stage.broken = False
        it.offer(rid=env.rid)
        await eventually(lambda: it.to_sender.outcomes == ["busy", "accepted"], "its second chance")


async def test_rubbish_is_counted_and_harms_nothing(nats_url: str):
    async with hosted(nats_url) as it:
        counts = [Counted(name) for name in ("events_malformed", "control_malformed", "acks_malformed")]
        topology, worker = it.bus.topology, it.bus.worker
        it.owner.publish(topology.subject("matched", worker=worker), b"\xc1")
        it.owner.tell(topology.subject("control", worker=worker), b"rubbish")
        it.owner.tell(topology.subject("acks", worker=worker), b"rubbish", it.owner.worker)
        await eventually(lambda: [count() for count in counts] == [1, 1, 1])
        it.offer()
        await it.to_sender.first(Accepted)


async def test_tokens_go_to_the_owner_and_name_where_acknowledgements_go(nats_url: str):
    async with hosted(nats_url) as it:
        entry = it.host.outbox.open(77, it.owner.worker, new_rid(), 0)
        it.host.outbox.push([TokenRow(entry, 0, (5, 6))])
        await eventually(lambda: it.tokens == [5, 6])
        frame = decode_frame(it.frames.payloads[0])
        assert (list(frame.handles), list(frame.positions), frame.epoch) == ([77], [0], 9)
        assert it.frames.replies == [it.bus.topology.subject("acks", worker=it.bus.worker)]


async def test_acknowledged_tokens_are_dropped_and_missing_ones_sent_again(nats_url: str):
    async with hosted(nats_url) as it:
        entry = it.host.outbox.open(77, it.owner.worker, new_rid(), 0)
        it.host.outbox.push([TokenRow(entry, 0, (5, 6, 7))])
        it.acknowledge(AckKind.HAVE, 77, 1)
        await eventually(lambda: list(entry.tokens) == [6, 7])
        it.acknowledge(AckKind.RESEND, 77, 2)
        await eventually(lambda: it.tokens == [5, 6, 7, 7])
        it.host.outbox.push([TokenRow(entry, 3, (8,), 1)])
        it.acknowledge(AckKind.HAVE, 77, 5)  # four tokens and the end
        await eventually(lambda: len(it.host.outbox) == 0)


async def test_an_end_that_nobody_acknowledged_is_repeated_with_its_note(nats_url: str):
    async with hosted(nats_url, limited(repeat_end_s=0.01)) as it:
        note = encode(HandoffEnded(new_rid(), 0, it.bus.worker, 1))
        entry = it.host.outbox.open(77, it.owner.worker, new_rid(), 0, note)
        it.host.outbox.push([TokenRow(entry, 0, (5,), 2)])
        await eventually(lambda: len(it.frames.payloads) >= 3)
        await eventually(lambda: note in it.to_owner.payloads)
        it.acknowledge(AckKind.HAVE, 77, 2)
        await eventually(lambda: len(it.host.outbox) == 0)


async def test_a_handle_that_its_owner_does_not_know_reaches_the_stage(nats_url: str):
    async with hosted(nats_url) as it:
        entry = it.host.outbox.open(77, it.owner.worker, new_rid(), 0)
        it.acknowledge(AckKind.FORGET, 77, 0, owner="another-owner")  # who issued the same number
        it.acknowledge(AckKind.FORGET, 78, 0)
        it.acknowledge(AckKind.FORGET, 77, 0)
        await eventually(lambda: it.stage.unknown)
        assert it.stage.unknown == [entry]
        assert entry.closed
        assert len(it.host.outbox) == 0


async def test_the_stage_ticks_while_the_host_runs(nats_url: str):
    async with hosted(nats_url, limited(repeat_end_s=0.005)) as it:
        await eventually(lambda: it.stage.ticks > 3)


async def test_a_draining_host_is_busy_to_new_work_and_waits_for_what_it_holds(nats_url: str):
    async with hosted(nats_url) as it:
        held = it.offer()
        await it.to_sender.first(Accepted)
        await it.owner_is_heard()
        it.stop.set()
        await eventually(lambda: it.host.draining)
        it.offer()
        it.offer(rid=held.rid)
        await eventually(lambda: it.to_sender.outcomes == ["accepted", "busy", "duplicate"])
        assert not it.running.done()
        it.stage.held.clear()
        await asyncio.wait_for(it.running, 10)
        assert not any(isinstance(message, StageFailed) for message in it.to_owner.controls)


async def test_a_draining_host_waits_for_the_last_acknowledgement(nats_url: str):
    async with hosted(nats_url) as it:
        entry = it.host.outbox.open(77, it.owner.worker, new_rid(), 0)
        it.host.outbox.push([TokenRow(entry, 0, (5,), 1)])
        await it.owner_is_heard()
        it.stop.set()
        await eventually(lambda: len(it.frames.payloads) >= 2)  # it repeats the end while it drains
        assert not it.running.done()
        it.acknowledge(AckKind.HAVE, 77, 2)
        await asyncio.wait_for(it.running, 10)


async def test_what_is_not_finished_in_time_goes_back_to_its_owner(nats_url: str):
    async with hosted(nats_url, limited(drain_s=0.05)) as it:
        env = it.offer()
        await it.to_sender.first(Accepted)
        await it.owner_is_heard()
        it.stop.set()
        failed = await it.to_owner.first(StageFailed)
        assert (failed.rid, failed.attempt, failed.stage, failed.worker) == (env.rid, 0, "prefill", it.bus.worker)
        assert failed.transient


async def test_a_stopping_host_waits_for_nobody_whom_it_has_not_heard(nats_url: str):
    async with hosted(nats_url) as it:
        env = it.offer()
        it.host.outbox.push([TokenRow(it.host.outbox.open(77, it.owner.worker, env.rid, 0), 0, (5,), 1)])
        await it.to_sender.first(Accepted)
        it.stop.set()
        await asyncio.wait_for(it.running, 10)
        assert (await it.to_owner.first(StageFailed)).rid == env.rid  # told all the same


async def test_a_higher_attempt_drops_the_lower_one_that_the_stage_still_has(nats_url: str):
    async with hosted(nats_url) as it:
        env = it.offer()
        it.offer(rid=env.rid, attempt=5)
        await eventually(lambda: it.to_sender.outcomes == ["accepted", "accepted"])
        assert it.stage.cancelled == [(env.rid, 4)]
        assert list(it.stage.held) == [(env.rid, 5)]


@pytest.mark.parametrize("name", ["a b", "*", ""])
async def test_a_sender_whose_name_is_no_subject_harms_nobody_else(nats_url: str, name: str):
    async with hosted(nats_url) as it:
        subject = it.bus.topology.subject("matched", worker=it.bus.worker)
        publish_event(it.sender, subject, matched(envelope(it.owner.worker), it.bus.worker, name))
        it.offer()
        await it.to_sender.first(Accepted)
