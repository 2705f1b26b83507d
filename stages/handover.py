"""The producer's end of the transfer stage: offers finished KV to decode engines until one has read it.

What is allowed when is kv.handoff's table; this file chooses engines, sends offers, keeps leases.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from kv.handoff import PREFILL_ENDS, FailReason, PrefillAction, PrefillHandoff, PrefillInput, PrefillState
from kv.transfer import to_wire
from pipeline import eager
from pipeline.engine_host import EngineHost
from pipeline.events import (
    Accepted,
    Envelope,
    HandoffEnded,
    KVOffer,
    Outcome,
    Plan,
    PrefillFinished,
    RegionTicket,
    Sampling,
    Span,
    StageFailed,
)
from pipeline.metrics import count
from pipeline.wire import encode
from stages.assigned import Assigned
from stages.balance import rank_decode
from stages.engine.interface import ModelCard, Sequence
from stages.engine.memory import EngineMemory

log = structlog.get_logger()

STAGE = "transfer"
_TRIES_OF_ONE = 2  # the same offer again to the same engine, before it counts as lost
_TRIES_OF_SLOW = 40  # while its beacons are fresh: a second. Source: ours, twice holder_silent_s
_PAUSE_S = 0.02  # first pause when every decode engine is full; doubles to 0.5 s. Source: ours
_MAX_PAUSE_S = 0.5


@dataclass(slots=True, eq=False)
class Handover:
    """One prompt's finished KV, from the first offer to the end."""

    env: Envelope
    plan: Plan
    sampling: Sampling
    seq: Sequence
    block_keys: bytes
    checksums: bytes
    tail_ids: bytes
    spans: tuple[Span, ...]  # up to prefill's
    handoff: PrefillHandoff | None = None
    target: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    lease_ends_ns: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """Request id and attempt."""
        return self.env.rid, self.env.attempt


class Sender:
    """All handovers of one prefill worker."""

    def __init__(
        self,
        host: EngineHost,
        card: ModelCard,
        memory: EngineMemory,
        ticket: Callable[[int], RegionTicket],
        on_end: Callable[[Handover], None],
    ) -> None:
        self._host = host
        self._fingerprint = card.fingerprint
        self._layout = card.layout.digest().hex()
        self._memory = memory
        self._ticket = ticket
        self._on_end = on_end
        self._open: dict[tuple[str, int], Handover] = {}
        self._assigned = Assigned()

    def choose(self, skip: frozenset[str] = frozenset()) -> str:
        """The decode engine to offer to, '' when there is none."""
        beacons = [b for b in self._host.membership.fresh("decode") if b.worker not in skip]
        assigned = self._assigned.expire()
        ranked = rank_decode(beacons, assigned, fingerprint=self._fingerprint, layout=self._layout)
        return ranked[0].worker if ranked else ""

    def hand_over(self, handover: Handover, decode: str) -> Handover:
        """Begin; `on_end` is called once it is over, whatever happens."""
        self._open[handover.key] = handover
        handover.task = eager.start(self._run(handover, decode))
        return handover

    def cancel(self, handover: Handover) -> None:
        """Nobody needs it any more."""
        self._apply(handover, PrefillInput.CANCEL)

    def ended(self, message: HandoffEnded) -> None:
        """A reader's terminal note."""
        handover = self._open.get((message.rid, message.attempt))
        if handover is None:
            return
        handoff = handover.handoff
        if handoff is not None and message.lease == handoff.current:
            # read within the tick in which the offer came: then this note is also the answer to it
            taken = Outcome.DUPLICATE
            accepted = Accepted(message.rid, message.attempt, STAGE, message.worker, 0, taken, handover.env.owner)
            self._host.offers.answered(accepted)
        if message.reason:
            count("handoffs_failed")
            log.warning("handoff failed", rid=message.rid, reason=message.reason, decode=message.worker)
            if message.reason == FailReason.CHECKSUM:
                bad = self._memory.drop_if_bad(handover.seq.block_table)
                count("kv_blocks_bad", bad)
        # the reader has told the owner as well, which starts a new attempt: this KV is not offered again
        self._apply(handover, PrefillInput.BAD if message.reason else PrefillInput.DONE, message.lease)

    def tick(self) -> None:
        """End leases that are over."""
        now_ns = time.time_ns()
        for handover in list(self._open.values()):
            if handover.lease_ends_ns and now_ns > handover.lease_ends_ns:
                count("handoffs_expired")
                self._apply(handover, PrefillInput.EXPIRE)

    def _apply(self, handover: Handover, what: PrefillInput, epoch: int | None = None) -> None:
        handoff = handover.handoff
        if handoff is None:
            self._end(handover)  # cancelled before the first offer
            return
        for action in handoff.on(what, epoch):
            match action:
                case PrefillAction.REVOKE:
                    self._memory.region.revoke(handoff.current)
                case PrefillAction.FREE:
                    self._end(handover)
                case PrefillAction.REPORT:
                    self._report(handover, str(what))
                case PrefillAction.CHOOSE:
                    pass  # _run does
        handover.changed.set()

    def _end(self, handover: Handover) -> None:
        if self._open.pop(handover.key, None) is not None:
            self._on_end(handover)

    def _report(self, handover: Handover, why: str) -> None:
        env, host = handover.env, self._host
        message = f"handoff ended: {why}"
        failed = StageFailed(env.rid, env.attempt, "prefill", host.worker, host.epoch, "internal", message, True)
        host.tell(env.owner, failed)

    async def _run(self, handover: Handover, decode: str) -> None:
        try:
            await self._offer_around(handover, decode)
        except Exception:
            # a bug fails this handoff and frees its KV; the worker lives
            log.exception("handing over failed", rid=handover.env.rid)
            self._report(handover, "internal")
            self._apply(handover, PrefillInput.CANCEL)

    async def _offer_around(self, handover: Handover, decode: str) -> None:
        """Offer until somebody has read it or nobody needs it."""
        busy: set[str] = set()
        pause_s = _PAUSE_S
        while handover.key in self._open:
            if not decode:
                busy.clear()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
                if time.time_ns() > handover.env.deadline_ns:
                    self._apply(handover, PrefillInput.CANCEL)
                    return
            else:
                await self._offer(handover, decode)
                if await self._settled(handover):
                    return
                busy.add(decode)
            decode = self.choose(frozenset(busy))

    async def _offer(self, handover: Handover, decode: str) -> None:
        epoch = self._memory.region.grant()
        if handover.handoff is None:
            handover.handoff = PrefillHandoff(epoch)
        else:
            handover.handoff.offer(epoch)
        handover.target = decode
        handover.changed.clear()
        handover.lease_ends_ns = time.time_ns() + int(self._host.limits.lease_s * 1e9)
        self._assigned.add(decode, 1)
        payload = encode(self._event(handover, epoch))
        subject = self._host.bus.topology.subject("offer", worker=decode)
        key = (*handover.key, STAGE)
        answer = None
        tries = 0
        while answer is None and (tries < _TRIES_OF_ONE or self._only_slow(handover, decode, tries)):
            answer = await self._host.offers.send(key, subject, payload)
            tries += 1
        outcome = answer.outcome if answer else None
        self._apply(handover, _HEARD.get(outcome, PrefillInput.LOST), epoch)

    def _only_slow(self, handover: Handover, decode: str, tries: int) -> bool:
        """Whether a silent engine still announces itself: it answers late, and a revoked lease would waste its read."""
        fresh = self._host.membership.silent_s(decode) <= self._host.limits.beacon_fresh_s
        return fresh and tries < _TRIES_OF_SLOW and handover.key in self._open

    async def _settled(self, handover: Handover) -> bool:
        """Wait while a reader has it; False when it must be offered to another."""
        handoff = handover.handoff
        while handoff is not None and handoff.state is not PrefillState.REFUSED:
            if handoff.state in PREFILL_ENDS:
                return True
            handover.changed.clear()
            await handover.changed.wait()
        return handover.key not in self._open

    def _event(self, handover: Handover, epoch: int) -> PrefillFinished:
        seq, memory = handover.seq, self._memory
        offer = KVOffer(
            ticket=self._ticket(epoch),
            block_keys=handover.block_keys,
            blocks=to_wire(memory.block_descs(seq.block_table)),
            state=to_wire(memory.state_desc(seq.state_slot)),
            checksums=handover.checksums,
            lease_ns=handover.lease_ends_ns,
        )
        return PrefillFinished(
            env=handover.env,
            fingerprint=self._fingerprint,
            num_prompt_tokens=seq.num_prompt_tokens,
            plan=handover.plan,
            sampling=handover.sampling,
            first_tokens=tuple(seq.first_tokens),
            tail_ids=handover.tail_ids,
            offer=offer,
            sender=self._host.worker,
            spans=(*handover.spans, Span(STAGE, self._host.worker, time.time_ns(), 0)),
        )


_HEARD: dict[Outcome | None, PrefillInput] = {
    Outcome.ACCEPTED: PrefillInput.OK,
    Outcome.DUPLICATE: PrefillInput.OK,
    Outcome.QUEUED: PrefillInput.LATER,
    Outcome.BUSY: PrefillInput.NEVER,
    Outcome.REFUSED: PrefillInput.CANCEL,  # the owner was told and ends the request
    Outcome.DEAD: PrefillInput.CANCEL,
}
