"""transfer: the reader's end of the handoff. Answers an offer, reads the KV one-sidedly, verifies, hands it to decode.

Nothing writes foreign memory; a byte is used only after its checksum and the lease have been checked on the copy.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import structlog

from kv.block import Lease
from kv.handoff import DecodeAction, DecodeHandoff, DecodeInput, FailReason
from kv.links import LinkError, Links
from kv.plan import KVPlan, PlanKind
from kv.region import RegionReader, RevokedError
from kv.transfer import INLINE_BYTES, ChecksumError, Offer, OfferError, TransferResult, transfer
from pipeline import eager
from pipeline.clockwork import ended
from pipeline.engine_host import EngineHost
from pipeline.events import (
    Beacon,
    Envelope,
    HandoffEnded,
    KVTransferred,
    Outcome,
    PrefillFinished,
    Span,
    StageFailed,
)
from pipeline.metrics import count
from pipeline.outbox import Entry
from pipeline.stage import Answer, EngineLoad, Held
from pipeline.wire import encode
from stages.constraints import Constraints, Follow
from stages.decode import Decode
from stages.engine import choices
from stages.engine.choices import Room
from stages.engine.decode_engine import finish_of
from stages.engine.interface import BLOCK_TOKENS, Sequence
from stages.engine.memory import EngineMemory
from stages.prefill import PARTIAL_KEY, sampling_params

log = structlog.get_logger()

NOTHING_READ = TransferResult(num_bytes=0, num_blocks_read=0, num_blocks_had=0)
MAX_QUEUED_OFFERS = 64  # bounded waiting place (design 2.9); beyond it an offer is busy


@dataclass(slots=True, eq=False)
class _Reading:
    """An offer in hand."""

    event: PrefillFinished
    offer: Offer
    handoff: DecodeHandoff
    leases: list[Lease] = field(default_factory=list)  # of blocks that were here already, then of fresh ones
    slot: int = -1
    rooms: list[Room] = field(default_factory=list)  # for choices beyond the first
    constraint: Follow | None = None
    result: TransferResult = NOTHING_READ
    arrived_ns: int = field(default_factory=time.time_ns)

    @property
    def key(self) -> tuple[str, int]:
        return self.event.env.rid, self.event.env.attempt

    @property
    def had(self) -> tuple[int, ...]:
        """Blocks that were here already."""
        return self.leases[0].blocks

    @property
    def fresh(self) -> tuple[int, ...]:
        """Blocks to read into."""
        return self.leases[1].blocks


@dataclass(slots=True)
class Transfer:
    """Engine stage of a decode worker: everything up to the first decode step. Cancels and loads are decode's too."""

    host: EngineHost
    memory: EngineMemory
    decode: Decode
    links: Links
    constraints: Constraints | None = None  # None: this engine cannot constrain
    verify: bool = True  # off only in the test that shows why it is on
    name: str = "transfer"
    _readings: dict[tuple[str, int], _Reading] = field(default_factory=dict)
    _queue: deque[_Reading] = field(default_factory=deque)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def start(self) -> None:
        """Attach regions as soon as their owners announce them: the first offer then needs no round trip."""
        self.host.membership.on_change.append(self._heard)
        self.decode.on_freed = self._admit_queued

    # --- what the host asks (pipeline.stage.EngineStage)

    def envelope(self, event: PrefillFinished) -> Envelope:
        """See EngineStage."""
        return event.env

    def submit(self, event: PrefillFinished) -> Answer:
        """OK, LATER or NEVER; never more than there is room for."""
        card = self.decode.card
        try:
            offer = Offer.from_wire(event.offer)
        except OfferError as error:
            count("offers_malformed")
            return Answer(Outcome.REFUSED, str(error))
        if event.fingerprint != card.fingerprint:
            return Answer(Outcome.BUSY, f"serves {card.fingerprint}, not {event.fingerprint}")
        if never := self._never_fits(event, offer):
            return Answer(Outcome.REFUSED, never)
        reading = _Reading(event, offer, DecodeHandoff(offer.epoch))
        if not self._queue and self._reserve(reading):
            return self._admit(reading)
        if len(self._queue) >= MAX_QUEUED_OFFERS:
            return Answer(Outcome.BUSY, "the offer queue is full", retry_after_s=0.1)
        self._readings[reading.key] = reading
        self._queue.append(reading)
        return self._carry_out(reading, reading.handoff.on(DecodeInput.DELAY))

    def _never_fits(self, event: PrefillFinished, offer: Offer) -> str:
        """Why this engine could not take an offer even when empty; '' if it could."""
        num_choices, memory = len(event.first_tokens), self.memory
        if not num_choices or num_choices != len(event.env.handles):
            return f"{num_choices} first tokens for {len(event.env.handles)} handles"
        if event.sampling.grammar and self.constraints is None:
            return f"the engine {self.decode.card.name} cannot constrain its output"
        if offer.num_blocks + num_choices > memory.num_blocks:
            return f"{offer.num_blocks} blocks never fit into {memory.num_blocks}"
        if num_choices > memory.num_states:
            return f"{num_choices} choices never fit into {memory.num_states} state slots"
        return ""

    def _admit(self, reading: _Reading) -> Answer:
        self._readings[reading.key] = reading
        answer = self._carry_out(reading, reading.handoff.on(DecodeInput.ADMIT))
        # read (or failed) at once: the notes that say so, say that it was taken
        told = reading.key not in self._readings
        return Answer(answer.outcome, owner_knows=told, sender_knows=told)

    def repeat(self, event: PrefillFinished) -> Answer:
        """See EngineStage."""
        reading = self._readings.get((event.env.rid, event.env.attempt))
        if reading is None:
            # read long ago, but the note that said so was lost or belongs to an earlier offer of the same KV
            self._tell_ended(event, "")
            return Answer(Outcome.DUPLICATE)
        if reading.offer.epoch == event.offer.ticket.epoch:
            return self._carry_out(reading, reading.handoff.on(DecodeInput.REPEAT))
        if reading in self._queue:
            # nothing of the earlier offer was read yet: the newer one takes its place
            self._queue.remove(reading)
            del self._readings[reading.key]
            answer = self.submit(event)
            if answer.outcome not in (Outcome.ACCEPTED, Outcome.QUEUED):
                self.host.forget(*reading.key)
            return answer
        return Answer(Outcome.BUSY, "an earlier offer is being read", retry_after_s=0.02)

    def cancel(self, rid: str, attempt: int) -> None:
        """See EngineStage."""
        for key in [key for key in self._readings if key[0] == rid and (attempt < 0 or key[1] <= attempt)]:
            self._on(self._readings[key], DecodeInput.CANCEL)
        self.decode.cancel(rid, attempt)

    def stop_choice(self, rid: str, attempt: int, choice: int, position: int) -> None:
        """See EngineStage."""
        self.decode.stop_choice(rid, attempt, choice, position)

    def unknown_entry(self, entry: Entry) -> None:
        """See EngineStage."""
        self.decode.unknown_entry(entry)

    def handoff_ended(self, message: HandoffEnded) -> None:
        """For producers only."""

    def holds(self) -> list[Held]:
        """See EngineStage."""
        reading = [
            Held(r.event.env.rid, r.event.env.attempt, self.name, r.event.env.owner) for r in self._readings.values()
        ]
        return reading + self.decode.holds()

    def tick(self) -> None:
        """Offers whose lease ran out while they waited."""
        for reading in [r for r in self._queue if r.offer.lapsed()]:
            self._on(reading, DecodeInput.EXPIRE)

    def load(self) -> EngineLoad:
        """See EngineStage."""
        return self.decode.load(len(self._readings))

    # --- from the offer to the first step

    def _heard(self, beacon: Beacon) -> None:
        if beacon.ticket is not None and self.links.attached(beacon.ticket) is None:
            self._keep(asyncio.get_running_loop().create_task(self._attach_early(beacon)))

    async def _attach_early(self, beacon: Beacon) -> None:
        if beacon.ticket is None:
            return
        try:
            await asyncio.sleep(0)  # attach needs a task (pipeline/eager.py)
            await self.links.attach(beacon.ticket)
        except LinkError as error:
            count("links_failed")
            log.debug("region not attached", holder=beacon.worker, error=str(error))

    def _reserve(self, reading: _Reading) -> bool:
        """Blocks (those that are here already are held, not read again) and a state slot."""
        offer = reading.offer
        full = reading.event.num_prompt_tokens // BLOCK_TOKENS
        had = self.memory.match(reading.event.offer.block_keys[: 16 * full], full)
        fresh = self.memory.allocate(offer.num_blocks - len(had.blocks))
        slot = self.memory.take_state() if fresh is not None else None
        further = len(reading.event.first_tokens) - 1
        rooms = choices.reserve(self.memory, reading.event.num_prompt_tokens, further) if slot is not None else None
        if fresh is None or slot is None or rooms is None:
            self.memory.release([had] if fresh is None else [had, fresh])
            if slot is not None:
                self.memory.give_state(slot)
            return False
        reading.leases, reading.slot, reading.rooms = [had, fresh], slot, rooms
        return True

    def _admit_queued(self) -> None:
        while self._queue and self._reserve(self._queue[0]):
            self._on(self._queue.popleft(), DecodeInput.ADMIT)

    def _on(self, reading: _Reading, what: DecodeInput, reason: FailReason | None = None) -> None:
        answer = self._carry_out(reading, reading.handoff.on(what, reason))
        if answer.outcome is Outcome.ACCEPTED:
            self.host.answer(reading.event, answer)

    def _carry_out(self, reading: _Reading, actions: tuple[DecodeAction, ...]) -> Answer:
        answer = Answer(Outcome.DUPLICATE)
        for action in actions:
            match action:
                case DecodeAction.SAY_OK | DecodeAction.SAY_LATER | DecodeAction.SAY_NEVER:
                    answer = _SAYS[action]
                case DecodeAction.READ:
                    self._spawn(self._read(reading))
                case DecodeAction.FREE:
                    self._free(reading)
                case DecodeAction.NOTE_RELEASED if DecodeAction.DECODE not in actions:
                    self._note(reading, "")
                case DecodeAction.NOTE_RELEASED:
                    pass  # part of DECODE: the request waits for the first step and not for the note
                case DecodeAction.NOTE_FAILED:
                    self._failed(reading)
                case DecodeAction.DECODE:
                    self._begin_decode(reading)
                case DecodeAction.VERIFY:
                    pass  # part of the copy: each block is verified while it is in the cache
        return answer

    async def _read(self, reading: _Reading) -> None:
        try:
            reader = self.links.attached(reading.event.offer.ticket)
            if reader is None:
                await asyncio.sleep(0)  # attach needs a task (pipeline/eager.py)
                reader = await self.links.attach(reading.event.offer.ticket)
            reading.result = await self._copy(reading, reader)
            if reading.event.sampling.grammar and self.constraints is not None:
                reading.constraint = await self.constraints.follow(reading.event.sampling.grammar)
        except LinkError as error:
            self._reading_failed(reading, FailReason.LINK, error)
        except RevokedError as error:
            self._reading_failed(reading, FailReason.REVOKED, error)
        except ChecksumError as error:
            count("kv_checksum_errors", len(error.blocks) + len(error.state))
            self._reading_failed(reading, FailReason.CHECKSUM, error)
        except OfferError as error:
            self._reading_failed(reading, FailReason.MALFORMED, error)
        except Exception as error:
            # a bug fails this handoff and gives its blocks back; the worker lives
            log.exception("reading KV failed", rid=reading.event.env.rid)
            self._reading_failed(reading, FailReason.INTERNAL, error)
        else:
            self._on(reading, DecodeInput.COPIED)
            self._on(reading, DecodeInput.VERIFIED)

    async def _copy(self, reading: _Reading, reader: RegionReader) -> TransferResult:
        offer = reading.offer
        lacking = range(len(reading.had), offer.num_blocks)
        views = self.memory.block_views(reading.fresh)
        state = self.memory.kv.states[reading.slot]
        num_bytes = sum(offer.blocks[lacking.start :, 1].tolist()) + offer.state_bytes
        if num_bytes <= INLINE_BYTES:
            return transfer(reader, offer, views, state, lacking, verify=self.verify)
        return await asyncio.to_thread(transfer, reader, offer, views, state, lacking, verify=self.verify)

    def _reading_failed(self, reading: _Reading, reason: FailReason, error: Exception) -> None:
        log.warning("KV not read", rid=reading.event.env.rid, reason=str(reason), error=str(error))
        self._on(reading, DecodeInput.FAIL, reason)

    def _begin_decode(self, reading: _Reading) -> None:
        event, env = reading.event, reading.event.env
        self._seal(reading)
        spans = self._spans(reading)
        del self._readings[reading.key]
        plan = event.plan
        seq = Sequence(
            rid=env.rid,
            attempt=env.attempt,
            choice=0,
            ids=np.empty(0, np.uint32),
            tail_ids=np.frombuffer(event.tail_ids, "<u4"),
            num_prompt_tokens=event.num_prompt_tokens,
            plan=KVPlan(
                prompt_tokens=plan.prompt_tokens,
                hit_tokens=plan.hit_tokens,
                compute_from=plan.compute_from,
                replay_from=plan.replay_from,
                kind=PlanKind.HIT,
            ),
            block_table=[*reading.had, *reading.fresh],
            state_slot=reading.slot,
            seed=plan.seed,
            sampling=sampling_params(event.sampling),
            output=[event.first_tokens[0]],
        )
        entries = self._begin_choices(reading, seq)
        self.host.note(partial(self._note, reading, ""))
        if any(entry.finish for entry in entries):
            self._tell_transferred(reading, spans, entries)  # the last event waits for it: usage is part of that
        else:
            self.host.note(partial(self._tell_transferred, reading, spans, entries))

    def _begin_choices(self, reading: _Reading, seq: Sequence) -> list[Entry]:
        """Decode every choice that its first token did not end (prefill has told that); forks come before any step."""
        env, context = reading.event.env, self.decode.card.max_context_tokens
        rooms, running = list(reading.rooms), list[tuple[Sequence, list[Lease]]]()
        for choice, token in enumerate(reading.event.first_tokens):
            if finish_of(replace(seq, output=[token]), token, context):
                continue
            if not running:
                first = replace(seq, choice=choice, seed=choices.choice_seed(seq.seed, choice), output=[token])
                running.append((first, reading.leases))
            else:
                running.append(choices.fork(self.memory, seq, choice, token, rooms.pop()))
        choices.give_back(self.memory, rooms)
        if reading.constraint is not None:
            for one, _ in running:
                one.constraint = reading.constraint(one.output)
        return [self.decode.begin(one, leases, env.handles[one.choice], env.owner) for one, leases in running]

    def _tell_transferred(self, reading: _Reading, spans: tuple[Span, ...], entries: list[Entry]) -> None:
        """The owner hears that the KV is here, and once more with the end, until it acknowledges that."""
        event, env, read = reading.event, reading.event.env, reading.result
        note = KVTransferred(
            env.rid,
            env.attempt,
            self.host.worker,
            self.host.epoch,
            read.num_bytes,
            read.num_blocks_read,
            read.num_blocks_had,
            spans,
            event.plan,
        )
        for entry in entries:
            entry.note = encode(note)
        self.host.tell(env.owner, note)

    def _seal(self, reading: _Reading) -> None:
        """Full blocks may be hit by the next handoff of the same prefix."""
        for number, block in enumerate(reading.fresh, start=len(reading.had)):
            key = reading.offer.block_keys[number]
            if key != PARTIAL_KEY and self.verify:
                self.memory.seal(block, key, reading.offer.checksums[number], approximate=False)

    def _spans(self, reading: _Reading) -> tuple[Span, ...]:
        start_ns = reading.event.spans[-1].start_ns if reading.event.spans else reading.arrived_ns
        result = reading.result
        text = f"{result.num_bytes} bytes, {result.num_blocks_had} blocks here already"
        # with those before it: prefill's own note may come after the answer's end
        return (*reading.event.spans[:-1], Span(self.name, self.host.worker, start_ns, time.time_ns(), text))

    def _note(self, reading: _Reading, reason: str) -> None:
        self._tell_ended(reading.event, reason)

    def _tell_ended(self, event: PrefillFinished, reason: str) -> None:
        epoch = event.offer.ticket.epoch
        self.host.tell(event.sender, HandoffEnded(event.env.rid, event.env.attempt, self.host.worker, epoch, reason))

    def _failed(self, reading: _Reading) -> None:
        """Both ends hear of it: prefill frees its KV, the owner starts another attempt."""
        env = reading.event.env
        reason = str(reading.handoff.reason or FailReason.INTERNAL)
        self._readings.pop(reading.key, None)
        if reading in self._queue:
            self._queue.remove(reading)
        self._note(reading, reason)
        self.host.forget(env.rid, env.attempt)
        if reason != FailReason.CANCELLED:
            failed = StageFailed(
                env.rid, env.attempt, self.name, self.host.worker, self.host.epoch, "internal", reason, True
            )
            self.host.tell(env.owner, failed)

    def _free(self, reading: _Reading) -> None:
        self.memory.release(reading.leases)
        choices.give_back(self.memory, reading.rooms)
        if reading.slot >= 0:
            self.memory.give_state(reading.slot)
        reading.leases, reading.rooms = [], []
        reading.slot = -1

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = eager.start(work)
        if task is not None:
            self._keep(task)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(ended)


_SAYS = {
    DecodeAction.SAY_OK: Answer(Outcome.ACCEPTED),
    DecodeAction.SAY_LATER: Answer(Outcome.QUEUED),
    DecodeAction.SAY_NEVER: Answer(Outcome.REFUSED),
}
