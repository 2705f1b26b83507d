"""The handoff protocol: two state machines without I/O, one at each end.

Prefill offers finished KV; decode answers OK, LATER or NEVER and reads it by itself out of prefill's region.
Whatever is lost, doubled, late or reordered: decode sends one terminal message for an offer, prefill frees the
blocks once, and only after revoking the lease, so that nobody can take bytes for good that were reused.

Every offer has its own lease; the lease's epoch (`kv.region`) is the offer's number here. Answers and notes
that carry another number belong to an earlier offer and change nothing.

Source: facts-system R44-R46, R49; facts-kv A3 (the life-time bugs of others) and A4; the tables: ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class HandoffError(RuntimeError):
    """A caller did what the state does not allow: a bug there."""


class FailReason(StrEnum):
    """Why decode did not get the KV. What prefill does about it: `reading_failed`."""

    LINK = "link"  # the region could not be reached
    NO_ROOM = "no_room"  # it waited for room in vain, or the engine drains
    INTERNAL = "internal"
    CHECKSUM = "checksum"  # the bytes are not those that were offered
    MALFORMED = "malformed"  # the offer contradicts itself or the layout
    REVOKED = "revoked"  # the lease ended during the copy
    EXPIRED = "expired"  # the lease ended before the copy began
    CANCELLED = "cancelled"  # nobody needs it


class PrefillState(StrEnum):
    """Where one prompt's KV stands at its producer."""

    OFFERED = "offered"
    QUEUED = "queued"
    ACCEPTED = "accepted"
    REFUSED = "refused"  # nobody has it in hand; it is held for another offer
    RELEASED = "released"
    FAILED = "failed"
    EXPIRED = "expired"


class PrefillInput(StrEnum):
    """What prefill hears of an offer: decode's answers and note, the clock's, the owner's."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"
    DONE = "done"  # the note of a good read
    UNREAD = "unread"  # a note of failure at decode's side: another may read it
    BAD = "bad"  # a note of failure that another reader would meet as well
    LOST = "lost"  # the decode worker is dead or hung
    EXPIRE = "expire"
    CANCEL = "cancel"  # the owner gave up, or the attempt is not the newest


class PrefillAction(StrEnum):
    """What the caller does, in this order."""

    REVOKE = "revoke"  # `Region.revoke` of the current offer
    FREE = "free"  # release the KV's lease in the pool
    CHOOSE = "choose"  # another decode engine, then `offer`
    REPORT = "report"  # tell the owner that this attempt failed


_P, _I, _A = PrefillState, PrefillInput, PrefillAction
_END = (_A.REVOKE, _A.FREE)
_END_BADLY = (_A.REVOKE, _A.FREE, _A.REPORT)
_AGAIN = (_A.REVOKE, _A.CHOOSE)
_OUT_THERE = {
    _I.DONE: (_P.RELEASED, _END),
    _I.UNREAD: (_P.REFUSED, _AGAIN),
    _I.BAD: (_P.FAILED, _END_BADLY),
    _I.LOST: (_P.REFUSED, _AGAIN),
    _I.EXPIRE: (_P.EXPIRED, _END_BADLY),
    _I.CANCEL: (_P.FAILED, _END),
}
# What is not here is late or doubled and changes nothing.
PREFILL_TABLE: dict[PrefillState, dict[PrefillInput, tuple[PrefillState, tuple[PrefillAction, ...]]]] = {
    _P.OFFERED: {
        _I.OK: (_P.ACCEPTED, ()),
        _I.LATER: (_P.QUEUED, ()),
        _I.NEVER: (_P.REFUSED, _AGAIN),
        **_OUT_THERE,
    },
    _P.QUEUED: {_I.OK: (_P.ACCEPTED, ()), **_OUT_THERE},
    _P.ACCEPTED: _OUT_THERE,
    _P.REFUSED: {
        _I.DONE: (_P.RELEASED, _END),  # given up too early: it had read all before the lease was revoked
        _I.EXPIRE: (_P.EXPIRED, _END_BADLY),
        _I.CANCEL: (_P.FAILED, _END),
    },
    _P.RELEASED: {},
    _P.FAILED: {},
    _P.EXPIRED: {},
}
PREFILL_ENDS = frozenset({_P.RELEASED, _P.FAILED, _P.EXPIRED})
_WITHOUT_OFFER = frozenset({_I.EXPIRE, _I.CANCEL})  # these concern the KV, whoever it was offered to
_READ_ELSEWHERE = frozenset({FailReason.LINK, FailReason.NO_ROOM, FailReason.INTERNAL, FailReason.REVOKED})


def reading_failed(reason: str) -> PrefillInput:
    """What a note of failure means to prefill. An unknown reason comes from a newer version: not worth another try."""
    if reason == FailReason.CANCELLED:
        return PrefillInput.CANCEL
    return PrefillInput.UNREAD if reason in _READ_ELSEWHERE else PrefillInput.BAD


@dataclass(slots=True)
class PrefillHandoff:
    """One finished prompt's KV at its producer, from the first offer to the end.

    current: epoch of the newest offer's lease. Revoke it and free the KV exactly when told.
    """

    current: int
    state: PrefillState = PrefillState.OFFERED
    num_offers: int = 1
    num_ignored: int = 0  # late, doubled or of an earlier offer

    @property
    def ended(self) -> bool:
        """Whether the KV is freed: nothing changes any more."""
        return self.state in PREFILL_ENDS

    def offer(self, epoch: int) -> None:
        """The same KV is offered again, under a new lease. Raises: HandoffError unless it is in nobody's hand."""
        if self.state is not PrefillState.REFUSED:
            raise HandoffError(f"cannot offer again what is {self.state}")
        if epoch == self.current:
            raise HandoffError(f"epoch {epoch} was revoked: every offer has its own lease")
        self.current, self.state = epoch, PrefillState.OFFERED
        self.num_offers += 1

    def on(self, what: PrefillInput, epoch: int | None = None) -> tuple[PrefillAction, ...]:
        """Apply what was heard of the offer with that epoch; `EXPIRE` and `CANCEL` need none. Returns what to do.

        Raises:
            HandoffError: the epoch is missing.
        """
        if what not in _WITHOUT_OFFER:
            if epoch is None:
                raise HandoffError(f"{what} concerns an offer: its epoch is missing")
            if epoch != self.current:
                self.num_ignored += 1
                return ()
        step = PREFILL_TABLE[self.state].get(what)
        if step is None:
            self.num_ignored += 1
            return ()
        self.state, actions = step
        return actions


class DecodeState(StrEnum):
    """Where one offer stands at its consumer."""

    OFFERED = "offered"
    QUEUED = "queued"
    READING = "reading"
    VERIFYING = "verifying"
    STOPPING = "stopping"  # cancelled, but a copy still writes into our blocks
    DONE = "done"
    FAILED = "failed"
    REFUSED = "refused"


class DecodeInput(StrEnum):
    """What happens to an offer at its consumer."""

    ADMIT = "admit"  # blocks and a state slot are allocated for it
    DELAY = "delay"
    REFUSE = "refuse"
    COPIED = "copied"  # all bytes are here and the lease still stood after the copy
    VERIFIED = "verified"
    FAIL = "fail"  # with a reason
    CANCEL = "cancel"
    EXPIRE = "expire"
    REPEAT = "repeat"  # the same offer again


class DecodeAction(StrEnum):
    """What the caller does, in this order."""

    FREE = "free"  # release the destination blocks and the state slot
    SAY_OK = "say_ok"
    SAY_LATER = "say_later"
    SAY_NEVER = "say_never"
    READ = "read"  # start the copy
    VERIFY = "verify"
    NOTE_RELEASED = "note_released"
    NOTE_FAILED = "note_failed"  # with `reason`
    DECODE = "decode"  # the request may run


_D, _E, _B = DecodeState, DecodeInput, DecodeAction
_GIVE_UP = (_D.FAILED, (_B.NOTE_FAILED,))
_FREE_AND_GIVE_UP = (_D.FAILED, (_B.FREE, _B.NOTE_FAILED))
_WAITING = {
    _E.ADMIT: (_D.READING, (_B.SAY_OK, _B.READ)),
    _E.FAIL: _GIVE_UP,
    _E.CANCEL: _GIVE_UP,
    _E.EXPIRE: _GIVE_UP,
}
# One terminal message an offer: SAY_NEVER, NOTE_RELEASED or NOTE_FAILED; told again, the same, when asked again.
DECODE_TABLE: dict[DecodeState, dict[DecodeInput, tuple[DecodeState, tuple[DecodeAction, ...]]]] = {
    _D.OFFERED: {
        **_WAITING,
        _E.DELAY: (_D.QUEUED, (_B.SAY_LATER,)),
        _E.REFUSE: (_D.REFUSED, (_B.SAY_NEVER,)),
    },
    _D.QUEUED: {**_WAITING, _E.REPEAT: (_D.QUEUED, (_B.SAY_LATER,))},
    _D.READING: {
        _E.COPIED: (_D.VERIFYING, (_B.VERIFY,)),
        _E.FAIL: _FREE_AND_GIVE_UP,
        _E.CANCEL: (_D.STOPPING, ()),
        _E.REPEAT: (_D.READING, (_B.SAY_OK,)),
    },
    _D.VERIFYING: {
        _E.VERIFIED: (_D.DONE, (_B.NOTE_RELEASED, _B.DECODE)),
        _E.FAIL: _FREE_AND_GIVE_UP,
        _E.CANCEL: (_D.STOPPING, ()),
        _E.REPEAT: (_D.VERIFYING, (_B.SAY_OK,)),
    },
    _D.STOPPING: {_E.COPIED: _FREE_AND_GIVE_UP, _E.VERIFIED: _FREE_AND_GIVE_UP, _E.FAIL: _FREE_AND_GIVE_UP},
    _D.DONE: {_E.REPEAT: (_D.DONE, (_B.NOTE_RELEASED,))},
    _D.FAILED: {_E.REPEAT: (_D.FAILED, (_B.NOTE_FAILED,))},
    _D.REFUSED: {_E.REPEAT: (_D.REFUSED, (_B.SAY_NEVER,))},
}
DECODE_ENDS = frozenset({_D.DONE, _D.FAILED, _D.REFUSED})
_REASONS = {_E.CANCEL: FailReason.CANCELLED, _E.EXPIRE: FailReason.EXPIRED}


@dataclass(slots=True)
class DecodeHandoff:
    """One offer at its consumer, from its arrival to the terminal message. `reason` is set once it has failed."""

    epoch: int
    state: DecodeState = DecodeState.OFFERED
    reason: FailReason | None = None
    num_ignored: int = field(default=0, kw_only=True)

    @property
    def ended(self) -> bool:
        """Whether the terminal message was sent."""
        return self.state in DECODE_ENDS

    def on(self, what: DecodeInput, reason: FailReason | None = None) -> tuple[DecodeAction, ...]:
        """Apply what happened; `FAIL` needs a reason, and the first one counts. Returns what to do.

        Raises:
            HandoffError: `FAIL` without a reason.
        """
        if what is DecodeInput.FAIL and reason is None:
            raise HandoffError("a failure needs a reason")
        step = DECODE_TABLE[self.state].get(what)
        if step is None:
            self.num_ignored += 1
            return ()
        if self.reason is None:
            self.reason = reason if what is DecodeInput.FAIL else _REASONS.get(what)
        self.state, actions = step
        return actions
