"""A lookup hop on a real bus: owner and engines are real, the stage is a few lines."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from pipeline.bus import Bus
from pipeline.errors import ErrorCode, RequestError, TransientError
from pipeline.events import Accepted, Cancelled, Envelope, Outcome, PrefixMatched, PromptEncoded, StageFailed
from pipeline.hop import ANSWER_AFTER_S, LookupHop
from pipeline.topology import Topology
from pipeline.wire import decode_matched, encode
from tests.pipeline.fabric import (
    Counted,
    Ear,
    accepted,
    envelope,
    eventually,
    joined,
    limited,
    new_rid,
    new_worker,
    prompt,
    publish_event,
)

PATIENT = limited(accept_timeout_s=60.0)


class Choosing:
    """A stage that names engines in order; `before` runs first and may raise."""

    def __init__(self, *engines: str) -> None:
        self.engines = engines
        self.before: Callable[[], None] = lambda: None
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_yielded = 0

    async def handle(self, event: PromptEncoded) -> AsyncGenerator[PrefixMatched]:
        self.before()
        await self.gate.wait()
        for engine in self.engines:
            self.num_yielded += 1
            yield PrefixMatched(event, 128, engine, "")


class Engines:
    """Engines that answer with a given outcome, told to sender and (unless busy) owner, as an engine host does."""

    def __init__(self, bus: Bus, **outcomes: Outcome) -> None:
        self.heard: list[PrefixMatched] = []
        self.names = {key: new_worker(key) for key in outcomes}
        self._bus = bus
        for key, outcome in outcomes.items():
            bus.subscribe(bus.topology.subject("matched", worker=self.names[key]), self._answering(key, outcome))

    def _answering(self, key: str, outcome: Outcome) -> Callable[[str, str, bytes, bytes | None], None]:
        def on_event(_subject: str, _reply: str, payload: bytes, _headers: bytes | None) -> None:
            event = decode_matched(payload)
            self.heard.append(event)
            answer = encode(accepted(event.prompt.env, self.names[key], outcome))
            self._bus.tell(self._bus.topology.subject("control", worker=event.sender), answer)

        return on_event


class Hopping:
    """A running hop, its stage, and an owner that listens."""

    def __init__(self, owner: Bus, bus: Bus, stage: Choosing) -> None:
        self.owner, self.bus, self.stage = owner, bus, stage
        self.ear = Ear.of_worker(owner)
        self.hop = LookupHop(bus, stage, epoch=5)
        self.stop = asyncio.Event()
        self.running = asyncio.ensure_future(self.hop.run(self.stop))

    def offer(self, *, named: bool = True, **fields: Any) -> Envelope:
        env = envelope(self.owner.worker, **fields)
        topology = self.bus.topology
        subject = topology.named("encoded", self.bus.worker) if named else topology.subject("encoded")
        publish_event(self.owner, subject, prompt(env))
        return env

    async def all_said(self) -> None:
        """Until what the hop still meant to say about its requests would have been heard."""
        await asyncio.sleep(2 * ANSWER_AFTER_S)
        await self.bus.flush()
        await self.owner.flush()

    def tell(self, message: Cancelled) -> None:
        self.owner.tell(self.bus.topology.subject("control", worker=self.bus.worker), encode(message))


@asynccontextmanager
async def hopping(url: str, *engines: str, topology: Topology = PATIENT) -> AsyncIterator[Hopping]:
    async with joined(url, topology=topology) as owner, joined(url, topology=topology) as bus:
        hopping = Hopping(owner, bus, Choosing(*engines))
        await owner.flush()
        await bus.flush()
        yield hopping
        hopping.stop.set()
        await hopping.running


async def test_the_owner_hears_of_it_when_the_engines_take_their_time(nats_url: str):
    async with hopping(nats_url, new_worker()) as it:
        env = it.offer()
        message = await it.ear.first(Accepted)
        assert (message.rid, message.stage, message.worker, message.epoch, message.outcome) == (
            env.rid, "lookup", it.bus.worker, 5, Outcome.ACCEPTED,
        )  # fmt: skip


async def test_the_chosen_engine_gets_it_and_alone_tells_the_owner(nats_url: str):
    async with joined(nats_url) as far:
        engines = Engines(far, first=Outcome.ACCEPTED)
        await far.flush()
        async with hopping(nats_url, engines.names["first"]) as it:
            env = it.offer()
            await eventually(lambda: engines.heard and not it.hop._tasks)
            event = engines.heard[0]
            assert (event.engine, event.sender) == (engines.names["first"], it.bus.worker)
            assert event.prompt.env == env
            assert event.prompt.ids == prompt(env).ids
            assert [(span.stage, span.worker, span.note) for span in event.spans] == [
                ("lookup", it.bus.worker, "hit 128")
            ]
            await it.all_said()
            assert it.ear.outcomes == []


async def test_engines_are_tried_in_the_stages_order_until_one_takes_it(nats_url: str):
    async with joined(nats_url) as far:
        engines = Engines(far, a=Outcome.BUSY, b=Outcome.ACCEPTED, c=Outcome.ACCEPTED)
        await far.flush()
        async with hopping(nats_url, *engines.names.values()) as it:
            it.offer()
            await eventually(lambda: len(engines.heard) == 2 and not it.hop._tasks)
            assert [event.engine for event in engines.heard] == [engines.names["a"], engines.names["b"]]
            assert it.stage.num_yielded == 2
            await it.all_said()
            assert it.ear.outcomes == []  # the engine itself speaks for prefill


async def test_when_all_are_busy_the_owner_is_told(nats_url: str):
    async with joined(nats_url) as far:
        engines = Engines(far, a=Outcome.BUSY, b=Outcome.BUSY)
        await far.flush()
        async with hopping(nats_url, *engines.names.values()) as it:
            env = it.offer()
            await eventually(lambda: it.ear.outcomes == ["busy"])
            busy = it.ear.controls[0]
            assert (busy.rid, busy.stage, busy.worker, busy.outcome) == (
                env.rid, "prefill", it.bus.worker, Outcome.BUSY,
            )  # fmt: skip


async def test_no_engine_at_all_is_busy_and_nothing_else(nats_url: str):
    """An `accepted` after it would have the owner wait for an engine that nobody asked."""
    async with hopping(nats_url) as it:
        it.offer()
        await eventually(lambda: it.ear.outcomes)
        await it.bus.flush()
        await it.owner.flush()
        assert it.ear.outcomes == ["busy"]


async def test_a_failure_that_comes_at_once_is_all_that_the_owner_hears(nats_url: str):
    async with hopping(nats_url) as it:
        it.stage.before = _raising(TransientError("no index yet"))
        it.offer()
        await it.ear.first(StageFailed)
        await it.bus.flush()
        await it.owner.flush()
        assert len(it.ear.payloads) == 1


async def test_silent_engines_are_busy_in_the_end(nats_url: str):
    async with hopping(nats_url, new_worker(), new_worker(), topology=limited(accept_timeout_s=0.02)) as it:
        it.offer()
        await eventually(lambda: it.ear.outcomes == ["accepted", "busy"])
        assert it.stage.num_yielded == 2


async def test_what_an_engine_refuses_for_good_is_not_offered_again(nats_url: str):
    for outcome in (Outcome.REFUSED, Outcome.DEAD):
        async with joined(nats_url) as far:
            engines = Engines(far, a=outcome, b=Outcome.ACCEPTED)
            await far.flush()
            async with hopping(nats_url, *engines.names.values()) as it:
                it.offer()
                await eventually(lambda: engines.heard and not it.hop._tasks)  # noqa: B023
                assert len(engines.heard) == 1
                await it.all_said()
                assert it.ear.outcomes == []


async def test_late_work_is_refused_before_the_stage_sees_it(nats_url: str):
    async with hopping(nats_url) as it:
        refused = Counted("work_refused_dead")
        it.offer(deadline_ns=time.time_ns() - 1)
        await eventually(lambda: it.ear.outcomes == ["dead"])
        assert refused() == 1
        assert it.stage.num_yielded == 0


async def test_a_cancel_that_overtook_its_request_kills_it_on_arrival(nats_url: str):
    async with hopping(nats_url) as it:
        env = envelope(it.owner.worker)
        it.tell(Cancelled(env.rid, 3, "enough"))
        await eventually(lambda: it.hop._tombstones.is_dead(env.rid, 3))
        it.offer(rid=env.rid, attempt=3)
        it.offer(rid=env.rid, attempt=4)
        await eventually(lambda: it.ear.outcomes == ["dead", "busy"])
        it.tell(Cancelled(env.rid, -1, "enough"))
        await eventually(lambda: it.hop._tombstones.is_dead(env.rid, 5))


async def test_a_cancel_stops_the_search_for_an_engine(nats_url: str):
    async with joined(nats_url) as far:
        engines = Engines(far, a=Outcome.ACCEPTED)
        await far.flush()
        async with hopping(nats_url, engines.names["a"]) as it:
            it.stage.gate.clear()
            env = it.offer()
            await it.ear.first(Accepted)
            it.tell(Cancelled(env.rid, 0, "enough"))
            await eventually(lambda: it.hop._tombstones.is_dead(env.rid, 0))
            it.stage.gate.set()
            await eventually(lambda: not it.hop._tasks)
            assert engines.heard == []


async def test_the_end_of_one_choice_is_no_tombstone(nats_url: str):
    async with hopping(nats_url) as it:
        env = envelope(it.owner.worker)
        it.tell(Cancelled(env.rid, 0, "stop", choice=0, position=4))
        other = new_rid()
        it.tell(Cancelled(other, 0, "enough"))
        await eventually(lambda: it.hop._tombstones.is_dead(other, 0))  # so the first one has been heard too
        it.offer(rid=env.rid)
        await eventually(lambda: it.ear.outcomes == ["busy"])


async def test_every_kind_of_failure_of_the_stage_is_told_to_the_owner_and_the_next_request_served(nats_url: str):
    async with hopping(nats_url) as it:
        for error, code, transient, message in (
            (RequestError(ErrorCode.MODEL_NOT_FOUND, "no such model"), "model_not_found", False, "no such model"),
            (TransientError("no index yet"), "internal", True, "no index yet"),
            (ZeroDivisionError("secret"), "internal", False, "the lookup stage failed"),
        ):
            it.stage.before = _raising(error)
            it.ear.payloads.clear()
            env = it.offer()
            failed = await it.ear.first(StageFailed)
            assert (failed.rid, failed.stage, failed.worker) == (env.rid, "lookup", it.bus.worker)
            assert (failed.code, failed.transient, failed.message) == (code, transient, message)
        it.stage.before = lambda: None
        it.ear.payloads.clear()
        it.offer()
        await eventually(lambda: it.ear.outcomes == ["busy"])


def _raising(error: Exception) -> Callable[[], None]:
    def before() -> None:
        raise error

    return before


async def test_an_engine_name_that_is_none_fails_that_request_only(nats_url: str):
    async with hopping(nats_url, "no such.name") as it:
        it.offer()
        failed = await it.ear.first(StageFailed)
        assert (failed.code, failed.transient) == ("internal", False)


async def test_rubbish_is_counted_and_harms_nothing(nats_url: str):
    async with hopping(nats_url) as it:
        events, controls = Counted("events_malformed"), Counted("control_malformed")
        it.owner.publish(it.bus.topology.named("encoded", it.bus.worker), b"\xc1")
        it.owner.tell(it.bus.topology.subject("control", worker=it.bus.worker), b"rubbish")
        await eventually(lambda: events() == controls() == 1)
        it.offer()
        await eventually(lambda: it.ear.outcomes == ["busy"])


async def test_two_hops_share_the_queue_group(nats_url: str):
    async with hopping(nats_url) as one, hopping(nats_url) as two:
        for _ in range(40):
            one.offer(named=False)
        await eventually(lambda: one.ear.outcomes.count("busy") == 40)
        by = {message.worker for message in one.ear.controls if isinstance(message, Accepted)}
        assert by == {one.bus.worker, two.bus.worker}


async def test_a_stopping_hop_leaves_the_queue_group_first_and_finishes_what_is_in_hand(nats_url: str):
    async with joined(nats_url) as far:
        engines = Engines(far, a=Outcome.ACCEPTED)
        await far.flush()
        async with hopping(nats_url, engines.names["a"]) as staying, hopping(nats_url, engines.names["a"]) as leaving:
            leaving.stage.gate.clear()
            env = leaving.offer()
            await leaving.ear.first(Accepted)
            leaving.stop.set()
            group = leaving.hop._subscriptions[0]._id
            await eventually(lambda: group not in leaving.bus.data._subs, "its leaving of the group")
            await leaving.bus.flush()
            for _ in range(20):
                staying.offer(named=False)
            await eventually(lambda: len(engines.heard) == 20)
            assert {event.sender for event in engines.heard} == {staying.bus.worker}
            assert not leaving.running.done()
            leaving.stage.gate.set()
            await asyncio.wait_for(asyncio.shield(leaving.running), 10)
            await eventually(lambda: env.rid in {event.prompt.env.rid for event in engines.heard})


async def test_a_stopping_hop_waits_no_longer_than_it_may(nats_url: str):
    async with hopping(nats_url, topology=limited(drain_s=0.05)) as it:
        it.stage.gate.clear()
        it.offer()
        await it.ear.first(Accepted)
        it.stop.set()
        await asyncio.wait_for(asyncio.shield(it.running), 10)
        assert len(it.hop._tasks) == 1
        it.stage.gate.set()
        with contextlib.suppress(TimeoutError):
            await eventually(lambda: not it.hop._tasks)
