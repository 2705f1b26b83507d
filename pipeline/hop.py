"""A request stage between two hops: takes an event from a queue group, hands the stage's events on.

Every event that the stage yields is one alternative, best first; the next one is asked for only when the engine
chosen before was busy or silent. So a balancing stage is an async generator and knows nothing of retries.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
import structlog

from pipeline import eager
from pipeline.bus import Bus
from pipeline.errors import RequestError, TransientError
from pipeline.events import Accepted, Cancelled, Outcome, PrefixMatched, PromptEncoded, Span, StageFailed
from pipeline.metrics import count
from pipeline.offers import Offers, first_taker
from pipeline.stage import RequestStage
from pipeline.tombstones import Tombstones
from pipeline.wire import decode_control, decode_prompt, encode

log = structlog.get_logger()

STAGE = "lookup"
NEXT = "prefill"
ANSWER_AFTER_S = 0.012  # half the owner's accept timeout, and twice what engines keep their notes for. Source: ours


class LookupHop:
    """Runs the lookup stage: PromptEncoded in, PrefixMatched to the engine that takes it."""

    def __init__(self, bus: Bus, stage: RequestStage, epoch: int) -> None:
        self._bus = bus
        self._stage = stage
        self._epoch = epoch
        self._offers = Offers(bus)
        self._tombstones = Tombstones(bus.topology.limits.tombstone_s)
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        topology = bus.topology
        self._subscriptions = [bus.subscribe(topology.subject("encoded"), self._event, group=topology.group("encoded"))]
        bus.subscribe(topology.named("encoded", bus.worker), self._event)
        bus.subscribe(topology.subject("control", worker=bus.worker), self._control, control=True)
        bus.subscribe(topology.subject("everyone"), self._control, control=True)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`; then leave the queue group and finish what is in hand."""
        while not stop.is_set():
            try:
                await asyncio.wait_for(stop.wait(), self._bus.topology.limits.ack_in_progress_s)
            except TimeoutError:
                self._tombstones.sweep()
        for subscription in self._subscriptions:
            self._bus.data.unsubscribe_sync(subscription)
        await self._bus.flush()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=self._bus.topology.limits.drain_s)

    def _event(self, _subject: str, _reply: str, payload: bytes, _headers: bytes | None) -> None:
        start_ns = time.time_ns()
        try:
            event = decode_prompt(payload)
        except msgspec.DecodeError:
            count("events_malformed")
            return
        env = event.env
        if env.deadline_ns <= start_ns or self._tombstones.is_dead(env.rid, env.attempt):
            count("work_refused_dead")
            self._answer(event, Outcome.DEAD)
            return
        if not self._tombstones.take(env.rid, env.attempt):
            self._answer(event, Outcome.DUPLICATE)
            return
        # The engine that takes it tells the owner so itself, which says more: our own answer is for when that
        # takes its time. One message less for most requests, and none that the request would wait for.
        task = eager.start(self._match(event, start_ns))
        if task is not None:  # else the owner has been told already why it is not in hand
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            timer = self._loop.call_later(ANSWER_AFTER_S, self._answer, event, Outcome.ACCEPTED)
            task.add_done_callback(lambda _done: timer.cancel())

    async def _match(self, event: PromptEncoded, start_ns: int) -> None:
        env = event.env
        try:
            async with aclosing(self._candidates(event, start_ns)) as candidates:
                answer = await first_taker(self._offers, (env.rid, env.attempt, NEXT), candidates)
        except RequestError as error:
            self._fail(event, error.code, error.message, transient=False)
            return
        except TransientError as error:
            self._fail(event, "internal", str(error), transient=True)
            return
        except Exception:
            # a bug fails this request, never the worker
            log.exception("lookup failed", rid=env.rid)
            count("requests_failed_internal")
            self._fail(event, "internal", "the lookup stage failed", transient=False)
            return
        finally:
            self._tombstones.give_back(env.rid, env.attempt)  # whatever came of it: it may be offered again
        if answer is None:
            busy = Accepted(env.rid, env.attempt, NEXT, self._bus.worker, self._epoch, Outcome.BUSY, env.owner)
            self._tell(env.owner, busy)

    async def _candidates(self, event: PromptEncoded, start_ns: int) -> AsyncGenerator[tuple[str, bytes]]:
        async with aclosing(self._stage.handle(event)) as alternatives:
            async for matched in alternatives:
                if self._tombstones.is_dead(event.env.rid, event.env.attempt):
                    return
                span = Span(STAGE, self._bus.worker, start_ns, time.time_ns(), f"hit {matched.expected_hit_tokens}")
                yield self._addressed(matched, span)

    def _addressed(self, matched: PrefixMatched, span: Span) -> tuple[str, bytes]:
        event = msgspec.structs.replace(matched, sender=self._bus.worker, spans=(*matched.prompt.spans, span))
        return self._bus.topology.subject("matched", worker=matched.engine), encode(event)

    def _answer(self, event: PromptEncoded, outcome: Outcome) -> None:
        env = event.env
        self._tell(env.owner, Accepted(env.rid, env.attempt, STAGE, self._bus.worker, self._epoch, outcome, env.owner))

    def _fail(self, event: PromptEncoded, code: str, message: str, *, transient: bool) -> None:
        env = event.env
        failed = StageFailed(env.rid, env.attempt, STAGE, self._bus.worker, self._epoch, code, message, transient)
        self._tell(env.owner, failed)

    def _tell(self, worker: str, message: Any) -> None:
        self._bus.tell(self._bus.topology.subject("control", worker=worker), encode(message))

    def _control(self, _subject: str, _reply: str, payload: bytes, _headers: bytes | None) -> None:
        try:
            message = decode_control(payload)
        except msgspec.DecodeError:
            count("control_malformed")
            return
        if isinstance(message, Accepted):
            self._offers.answered(message)
        elif isinstance(message, Cancelled) and message.choice < 0:
            self._tombstones.bury(message.rid, message.attempt)
