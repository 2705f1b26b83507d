"""The bus side of an engine worker: accept handshake, tombstones, tokens out, acknowledgements in.

One host serves one process; a process runs the prefill stage or the transfer + decode stages. The stages decide
and compute (stages/prefill.py, stages/transfer.py, stages/decode.py); this file speaks for them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import structlog

from pipeline.bus import Bus
from pipeline.clockwork import every
from pipeline.events import Accepted, Cancelled, Envelope, HandoffEnded, Outcome, StageFailed, Struct
from pipeline.membership import Membership
from pipeline.metrics import count
from pipeline.notes import Notes
from pipeline.offers import Offers
from pipeline.outbox import Outbox
from pipeline.stage import Answer, EngineStage
from pipeline.tombstones import Tombstones
from pipeline.wire import decode_control, encode

log = structlog.get_logger()

# A stopping engine waits for owners that were heard this recently. Source: ours; twice silence and ping of a holder.
GONE_S = 2.0
# Notes that nobody waits for leave so much later, many in one write: each would wake two processes that then compete
# with the request's own way (measured, one in flight: the hops to and from decode fell from 540 to 290 us together).
# Their receivers look for them after 25 ms. Source: ours
NOTE_S = 0.005


class EngineHost:
    """Speaks on the bus for one engine stage."""

    def __init__(self, bus: Bus, membership: Membership, epoch: int) -> None:
        self.bus = bus
        self.membership = membership
        self.epoch = epoch
        self.worker = bus.worker
        self.limits = bus.topology.limits
        self.offers = Offers(bus)
        self.draining = False
        self._notes = Notes(NOTE_S)
        self._stage: EngineStage
        self._tombstones = Tombstones(self.limits.tombstone_s)
        topology = bus.topology
        self._ack_subject = topology.subject("acks", worker=self.worker)
        self._token_subjects: dict[str, str] = {}
        self._control_subjects: dict[str, str] = {}
        self.outbox = Outbox(epoch, self._send_frame, self._send_note)
        bus.subscribe(self._ack_subject, self._acked, control=True)
        bus.subscribe(topology.subject("control", worker=self.worker), self._control, control=True)
        bus.subscribe(topology.subject("everyone"), self._control, control=True)

    def serve(self, stage: EngineStage, topic: str, decode: Callable[[bytes], Any]) -> None:
        """Take events of a topic for a stage."""
        self._stage = stage

        def on_event(_subject: str, _reply: str, payload: bytes, _headers: bytes | None) -> None:
            try:
                event = decode(payload)
            except msgspec.DecodeError:
                count("events_malformed")
                return
            self._offered(event)

        self.bus.subscribe(self.bus.topology.subject(topic, worker=self.worker), on_event)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, then refuse new work and finish what is in hand, at most `drain_s`."""
        tick = asyncio.get_running_loop().create_task(every(self.limits.repeat_end_s, self._tick))
        await stop.wait()
        self.draining = True
        drained_by = time.monotonic() + self.limits.drain_s
        while self._in_hand() and time.monotonic() < drained_by:  # noqa: ASYNC110 - no event
            await asyncio.sleep(self.limits.ack_tokens_s)
        for held in self._stage.holds():
            failed = StageFailed(
                held.rid, held.attempt, held.stage, self.worker, self.epoch, "internal", "the worker stopped", True
            )
            self.tell(held.owner, failed)
        tick.cancel()
        await asyncio.gather(tick, return_exceptions=True)
        self._notes.send()
        await self.bus.flush()

    def _in_hand(self) -> bool:
        """Whether somebody still needs this worker: tokens of a dead owner are for nobody."""
        owners = {held.owner for held in self._stage.holds()} | self.outbox.owners
        cut_off = not self.bus.control.is_connected  # then nobody can be heard
        return any(cut_off or self.membership.silent_s(owner) < GONE_S for owner in owners)

    def _tick(self) -> None:
        self.outbox.repeat_ends(self.limits.keep_tokens_s, self.limits.repeat_end_s)
        self._tombstones.sweep()
        self._stage.tick()

    def is_dead(self, rid: str, attempt: int) -> bool:
        """Whether work for this attempt was cancelled or overtaken."""
        return self._tombstones.is_dead(rid, attempt)

    def forget(self, rid: str, attempt: int) -> None:
        """Work that was taken failed here: it may be offered again."""
        self._tombstones.give_back(rid, attempt)

    def _offered(self, event: Any) -> None:
        env: Envelope = self._stage.envelope(event)
        if env.deadline_ns <= time.time_ns() or self.is_dead(env.rid, env.attempt):
            count("work_refused_dead")
            self.answer(event, Answer(Outcome.DEAD))
            return
        if not self._tombstones.take(env.rid, env.attempt):
            self.answer(event, self._stage.repeat(event))
            return
        if env.attempt:
            self._stage.cancel(env.rid, env.attempt - 1)  # the owner of an earlier attempt died and told nobody
        stopping = Answer(Outcome.BUSY, "the worker is stopping")
        answer = stopping if self.draining else self._submit(event)
        if answer.outcome not in (Outcome.ACCEPTED, Outcome.QUEUED):
            self._tombstones.give_back(env.rid, env.attempt)
        self.answer(event, answer)

    def _submit(self, event: Any) -> Answer:
        try:
            return self._stage.submit(event)
        except Exception:
            # a bug in a stage must not look like work in hand: this request fails, the worker lives
            log.exception("engine stage failed to take work", stage=self._stage.name)
            count("submits_failed")
            return Answer(Outcome.BUSY, "the stage failed to take it")

    def answer(self, event: Any, answer: Answer) -> None:
        """Tell sender and owner what becomes of offered work: with the notes that it was taken, anything else now."""
        if answer.outcome is Outcome.ACCEPTED:
            self._notes.add(partial(self._tell_answer, event, answer))
        else:
            self._notes.send()  # in the order in which the work was answered
            self._tell_answer(event, answer)

    def _tell_answer(self, event: Any, answer: Answer) -> None:
        env: Envelope = self._stage.envelope(event)
        # `busy` is the sender's to resolve; the owner hears of it only when nobody took the work
        to_owner = event.sender != env.owner and answer.outcome is not Outcome.BUSY and not answer.owner_knows
        receivers = [event.sender] * (not answer.sender_knows) + [env.owner] * to_owner
        if not receivers:
            return
        message = encode(
            Accepted(
                env.rid,
                env.attempt,
                self._stage.name,
                self.worker,
                self.epoch,
                answer.outcome,
                env.owner,
                answer.reason,
                retry_after_s=answer.retry_after_s,
                plan=answer.plan,
            )
        )
        for receiver in receivers:
            self.bus.tell(self._control_subject(receiver), message)

    def tell(self, worker: str, message: Struct) -> None:
        """A control message to one worker."""
        self.bus.tell(self._control_subject(worker), encode(message))

    def note(self, tell: Callable[[], None]) -> None:
        """Call this a moment later, with all other notes: it tells what no request waits for."""
        self._notes.add(tell)

    def _send_frame(self, owner: str, frame: bytes) -> bool:
        subject = self._token_subjects.get(owner)
        if subject is None:
            subject = self._token_subjects[owner] = self.bus.topology.subject("tokens", worker=owner)
        return self.bus.publish(subject, frame, self._ack_subject)

    def _send_note(self, owner: str, note: bytes) -> bool:
        return self.bus.tell(self._control_subject(owner), note)

    def _control_subject(self, worker: str) -> str:
        subject = self._control_subjects.get(worker)
        if subject is None:
            if len(self._control_subjects) > 10_000:
                self._control_subjects.clear()  # workers come and go; the cache must not grow for ever
            subject = self._control_subjects[worker] = self.bus.topology.subject("control", worker=worker)
        return subject

    def _acked(self, _subject: str, owner: str, payload: bytes, _headers: bytes | None) -> None:
        # the NATS reply of an acknowledgement is its owner's id
        for entry in self.outbox.acknowledged(owner, payload):
            self._stage.unknown_entry(entry)

    def _control(self, _subject: str, _reply: str, payload: bytes, _headers: bytes | None) -> None:
        try:
            message = decode_control(payload)
        except msgspec.DecodeError:
            count("control_malformed")
            return
        match message:
            case Accepted():
                self.offers.answered(message)
            case Cancelled() if message.choice >= 0:
                self._stage.stop_choice(message.rid, message.attempt, message.choice, message.position)
            case Cancelled():
                self._tombstones.bury(message.rid, message.attempt)
                self._stage.cancel(message.rid, message.attempt)
            case HandoffEnded():
                self._stage.handoff_ended(message)
            case _:
                pass  # for owners
