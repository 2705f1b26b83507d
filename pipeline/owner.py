"""The owner of a request, as a pure state machine: signals and a clock in, actions out. No I/O, no loop.

One `Owner` exists per request in the codec worker that pulled it. `TABLE` is the whole behaviour: which signal
is understood in which state, where it may lead, and the function that does it. docs/protocol.md draws it.
Whatever is lost, doubled, late or dead, the terminal event is out when the deadline passes, and `ENDED` is reached
`end_grace_s` later at the latest: the deadline timer is armed first and disarmed by nothing but the end.

Progress within one attempt is monotone: an answer from a later stage implies all earlier ones, so a lost answer
costs nothing. Only a new fencing number (`Fenced`) starts another attempt.

Source: design 2.1-2.4, 2.8, 2.9; facts-bus 11.4, 11.5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pipeline.errors import ErrorCode
from pipeline.events import Accepted, FinishReason, Found, KVTransferred, Outcome, PrefillNoted, StageFailed

SUPERSEDED = "superseded"  # a cancel with this reason says that a higher attempt has begun
MAX_DEATHS = 3  # design 2.7: in hand at a third worker death -> worker_lost
ALL_ATTEMPTS = -1  # in a Cancel: whatever attempt a worker has in hand


class State(StrEnum):
    """Where a request is, as its owner knows it."""

    NEW = "new"
    FINDING = "finding"  # a repeated delivery: does somebody have it?
    FENCING = "fencing"  # waiting for a new attempt number
    ENCODING = "encoding"
    OFFERED = "offered"  # sent to lookup, unanswered
    WAITING = "waiting"  # nobody had room, or nobody answered
    LOOKUP = "lookup"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"
    ENDING = "ending"  # the last event is out, the subscriber has not acknowledged it
    ENDED = "ended"


class Timer(StrEnum):
    """The owner's timers; each request has at most one of a name."""

    FIND = "find"
    ACCEPT = "accept"
    RETRY = "retry"
    STAGE = "stage"
    DEADLINE = "deadline"
    PROGRESS = "progress"


@dataclass(frozen=True, slots=True)
class Started:
    """The intake message was delivered, for the `num_delivered`-th time."""

    num_delivered: int


@dataclass(frozen=True, slots=True)
class Fenced:
    """FENCE gave a new attempt number."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Encoded:
    """The codec stage has token ids."""


@dataclass(frozen=True, slots=True)
class NotReady:
    """The codec stage cannot encode yet (no engine has told what it serves)."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A stage of this very process ended the request: a bad body, an unknown model, a stream that contradicts."""

    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Every choice has its finish reason (or the request ends with one before any token)."""

    reason: FinishReason


@dataclass(frozen=True, slots=True)
class TimedOut:
    """A timer that the machine armed has fired."""

    timer: Timer


@dataclass(frozen=True, slots=True)
class HolderLost:
    """The worker in hand is gone: no responders to a ping, no answer, or a raised epoch."""

    worker: str
    epoch: int


@dataclass(frozen=True, slots=True)
class CancelAsked:
    """The publisher cancelled, or the subscriber went silent."""

    reason: str


@dataclass(frozen=True, slots=True)
class Superseded:
    """Another owner has started an attempt above `dead_attempt`: whoever is at or below it owns nothing any more."""

    dead_attempt: int


@dataclass(frozen=True, slots=True)
class Delivered:
    """The subscriber has the last event, or publishing counts as delivery."""


Signal = (
    Started
    | Fenced
    | Encoded
    | NotReady
    | Refused
    | Finished
    | TimedOut
    | HolderLost
    | CancelAsked
    | Superseded
    | Delivered
    | Accepted
    | PrefillNoted
    | KVTransferred
    | StageFailed
    | Found
)


@dataclass(frozen=True, slots=True)
class Arm:
    """Start (or restart) a timer."""

    timer: Timer
    delay_s: float


@dataclass(frozen=True, slots=True)
class Disarm:
    """Stop a timer."""

    timer: Timer


@dataclass(frozen=True, slots=True)
class AskFind:
    """Broadcast `Find`."""


@dataclass(frozen=True, slots=True)
class AskFence:
    """Publish to FENCE; the PubAck's sequence comes back as `Fenced`."""


@dataclass(frozen=True, slots=True)
class Encode:
    """Run the codec stage (or reuse its result)."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send the encoded prompt to lookup: to the queue group, or to a named worker not in `tried`."""

    named: bool


@dataclass(frozen=True, slots=True)
class Cancel:
    """Send a tombstone for attempts <= `attempt` (-1 = all): to one worker, or to everyone when `worker` is ''."""

    worker: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Restart:
    """A new attempt begins: drop the old handles, issue new ones."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Tell the subscriber where the request waits (carries no number)."""

    stage: str


@dataclass(frozen=True, slots=True)
class EndStream:
    """Publish the terminal event: a finish reason, or (`code` set) a named error.

    `message` set: the request ends without what an engine would have said of it (its plan).
    """

    reason: FinishReason | None = None
    code: ErrorCode | None = None
    message: str = ""
    stage: str = ""


@dataclass(frozen=True, slots=True)
class AckIntake:
    """The request is over: take it off the work queue and forget it after a while."""


@dataclass(frozen=True, slots=True)
class Forget:
    """Another owner has it: drop it without acknowledging anything."""


Action = (
    Arm | Disarm | AskFind | AskFence | Encode | Dispatch | Cancel | Restart | Progress | EndStream | AckIntake | Forget
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerLimits:
    """The timings of one owner, in seconds; from topics.yaml."""

    accept_timeout_s: float
    accept_tries: int
    retry_pause_s: float
    find_timeout_s: float
    stage_timeout_s: float
    progress_s: float
    max_attempts: int
    end_grace_s: float = 5.0  # design 2.1: after its deadline a request has ended at the latest


@dataclass(slots=True)
class Holder:
    """A worker bound to a role of this attempt."""

    worker: str
    epoch: int


# Position of a stage on the request's way: an answer of a higher rank implies the lower ones.
RANK = {State.OFFERED: 0, State.WAITING: 0, State.LOOKUP: 1, State.PREFILL: 2, State.TRANSFER: 3, State.DECODE: 4}
STAGE_STATE = {
    "lookup": State.LOOKUP,
    "prefill": State.PREFILL,
    "transfer": State.DECODE,
    "decode": State.DECODE,
}
# Whose silence matters: in TRANSFER the KV is still prefill's.
_WATCHED = {State.PREFILL: "prefill", State.TRANSFER: "prefill", State.DECODE: "decode"}
_IN_HAND = (Outcome.ACCEPTED, Outcome.QUEUED, Outcome.DUPLICATE)
MAX_PAUSE_S = 1.0
# A receiver's own wish is followed up to here: it is a hint from the wire. Source: ours
MAX_RETRY_AFTER_S = 5.0
_MAX_DOUBLINGS = 16  # beyond any sensible pause; 2**1024 is no float any more


def role_of(stage: str) -> str:
    """The role that holds a request in a stage: transfer and decode are one worker."""
    return "decode" if stage == "transfer" else stage


@dataclass(slots=True)
class Owner:
    """The machine of one request. Feed `on`, carry out what it returns, in order."""

    rid: str
    limits: OwnerLimits
    timeout_s: float  # from the delivery to the deadline
    state: State = State.NEW
    attempt: int = 0
    tries: int = 0  # of the present dispatch
    pauses: int = 0
    attempts: int = 0
    deaths: int = 0
    encoded: bool = False
    waits_for: str = ""  # the stage that said busy last
    holders: dict[str, Holder] = field(default_factory=dict)  # role -> who

    def on(self, signal: Signal) -> list[Action]:
        """Take one signal; return what to do. Signals that a state does not know are ignored.

        What may be answered while it is still being carried out (Encode, AskFence, EndStream) is last in its list.
        """
        row = TABLE.get((self.state, type(signal)))
        if row is None:
            return []
        if isinstance(signal, _OF_ATTEMPT) and signal.attempt != self.attempt:
            return self._superseded(signal) if signal.attempt < self.attempt else []
        return row.do(self, signal)

    @property
    def stage(self) -> str:
        """The name of the stage that the request is in, for errors and progress notes."""
        return {State.OFFERED: "lookup", State.WAITING: self.waits_for or "lookup", State.ENCODING: "codec"}.get(
            self.state, str(self.state)
        )

    def holder(self) -> Holder | None:
        """The worker whose silence matters now."""
        role = _WATCHED.get(self.state)
        return self.holders.get(role) if role else None

    def _superseded(self, signal: Any) -> list[Action]:
        """A worker still works for an attempt that was given up."""
        if isinstance(signal, StageFailed) or (isinstance(signal, Accepted) and signal.outcome not in _IN_HAND):
            return []
        return [Cancel(signal.worker, signal.attempt, SUPERSEDED)]

    def _start(self, signal: Started) -> list[Action]:
        deadline: list[Action] = [Arm(Timer.DEADLINE, self.timeout_s), Arm(Timer.PROGRESS, self.limits.progress_s)]
        if signal.num_delivered > 1:
            self.state = State.FINDING
            return [*deadline, AskFind(), Arm(Timer.FIND, self.limits.find_timeout_s)]
        self.state = State.ENCODING
        return [*deadline, Encode()]

    def _found(self, signal: Found) -> list[Action]:
        if signal.stage != "owner":
            return []  # a holder without its owner: the next attempt supersedes it
        self.state = State.ENDED
        return [Forget()]

    def _other_owner(self, signal: Superseded) -> list[Action]:
        if signal.dead_attempt < self.attempt:
            return []  # our own word, or an older owner's
        self.state = State.ENDED
        return [Forget()]

    def _fence(self, _signal: TimedOut) -> list[Action]:
        self.state = State.FENCING
        return [AskFence()]

    def _fenced(self, signal: Fenced) -> list[Action]:
        if signal.attempt <= self.attempt:
            return [AskFence()]
        self.attempt = signal.attempt
        self.attempts += 1
        self.holders.clear()
        if self.encoded:
            return [Restart(signal.attempt), *self._dispatch()]
        self.state = State.ENCODING
        # An owner before us is gone, and with it the knowledge of who holds the request: everyone is told.
        return [Cancel("", signal.attempt - 1, SUPERSEDED), Restart(signal.attempt), Encode()]

    def _encoded(self, _signal: Encoded) -> list[Action]:
        self.encoded = True
        return self._dispatch()

    def _dispatch(self) -> list[Action]:
        self.state = State.OFFERED
        self.tries = 1
        return [Dispatch(named=False), Arm(Timer.ACCEPT, self.limits.accept_timeout_s)]

    def _accept_timeout(self, _signal: TimedOut) -> list[Action]:
        if self.tries >= self.limits.accept_tries:
            return self._wait("lookup")
        self.tries += 1
        return [Dispatch(named=True), Arm(Timer.ACCEPT, self.limits.accept_timeout_s)]

    def _wait(self, stage: str, at_least_s: float = 0.0) -> list[Action]:
        self.state = State.WAITING
        self.waits_for = stage
        pause_s = min(self.limits.retry_pause_s * 2 ** min(self.pauses, _MAX_DOUBLINGS), MAX_PAUSE_S)
        pause_s = max(pause_s, min(at_least_s, MAX_RETRY_AFTER_S))
        self.pauses += 1
        return [Disarm(Timer.ACCEPT), Disarm(Timer.STAGE), Arm(Timer.RETRY, pause_s)]

    def _not_ready(self, _signal: NotReady) -> list[Action]:
        return self._wait("codec")

    def _retry(self, _signal: TimedOut) -> list[Action]:
        if self.encoded:
            return self._dispatch()
        self.state = State.ENCODING
        return [Encode()]

    def _accepted(self, signal: Accepted) -> list[Action]:
        if signal.stage not in STAGE_STATE:
            return []
        if signal.outcome in _IN_HAND:
            return self._bind(signal.stage, signal.worker, signal.epoch)
        if not self._matters(signal.stage, signal.worker):
            return []
        if signal.outcome is Outcome.BUSY and self.state in (State.OFFERED, State.LOOKUP):
            # a decode engine's is for prefill to resolve
            return [] if role_of(signal.stage) == "decode" else self._wait(signal.stage, signal.retry_after_s)
        if signal.outcome is Outcome.REFUSED:
            message = f"{signal.stage} can never take it: {signal.reason or 'no room for it anywhere'}"
            reason = FinishReason.INSUFFICIENT_SYSTEM_RESOURCE
            return self._end(EndStream(reason=reason, message=message, stage=signal.stage))
        return []

    def _matters(self, stage: str, worker: str) -> bool:
        """Whether a worker's trouble is the request's: not if another holds that role, nor if it is past it."""
        role = role_of(stage)
        held = self.holders.get(role)
        if RANK[self.state] > _LAST_RANK.get(role, RANK[State.DECODE]):
            return False
        return held is None or held.worker == worker or role == "lookup"

    def _twin(self, role: str, worker: str, epoch: int) -> list[Action]:
        """The first engine per role is the holder, any other is its twin. Lookup holds nothing: the last counts."""
        if role == "lookup":
            self.holders[role] = Holder(worker, epoch)
        held = self.holders.setdefault(role, Holder(worker, epoch))
        if held.worker == worker and epoch <= held.epoch:
            return []  # the holder, or an echo of the process that had its id before
        return [Cancel(worker, self.attempt, "twin")]

    def _bind(self, stage: str, worker: str, epoch: int) -> list[Action]:
        """A worker says that it has the request in hand."""
        twin = self._twin(role_of(stage), worker, epoch)
        reached = STAGE_STATE[stage]
        if twin or RANK[reached] <= RANK[self.state]:
            return twin
        self.state = reached
        stops: list[Action] = [Disarm(Timer.ACCEPT), Disarm(Timer.RETRY)]
        if reached is State.LOOKUP:
            # Lookup computes for microseconds; if no engine speaks up in this time it died or its words did.
            return [*stops, Arm(Timer.STAGE, self.limits.stage_timeout_s)]
        self.pauses = 0
        return [*stops, Disarm(Timer.STAGE)]

    def _late(self, signal: Accepted | PrefillNoted | KVTransferred) -> list[Action]:
        """The request has ended meanwhile. Its holder is left alone, it may still repeat what usage needs."""
        if isinstance(signal, Accepted):
            in_hand = signal.outcome in _IN_HAND and signal.stage in STAGE_STATE
            return self._twin(role_of(signal.stage), signal.worker, signal.epoch) if in_hand else []
        role = "prefill" if isinstance(signal, PrefillNoted) else "decode"
        return self._twin(role, signal.worker, signal.epoch)

    def _stage_timeout(self, _signal: TimedOut) -> list[Action]:
        return self._dispatch()

    def _prefill_noted(self, signal: PrefillNoted) -> list[Action]:
        actions = self._bind("prefill", signal.worker, signal.epoch)
        if signal.decode and self.state is State.PREFILL and self.holders["prefill"].worker == signal.worker:
            self.state = State.TRANSFER
        return actions

    def _transferred(self, signal: KVTransferred) -> list[Action]:
        return self._bind("decode", signal.worker, signal.epoch)

    def _failed(self, signal: StageFailed) -> list[Action]:
        if not self._matters(signal.stage, signal.worker):
            return []
        if not signal.transient:
            code = ErrorCode(signal.code) if signal.code in set(ErrorCode) else ErrorCode.INTERNAL
            return self._end(EndStream(code=code, message=signal.message, stage=signal.stage))
        if signal.stage == "lookup":
            # nobody has computed anything, so there is nothing to fence off: the same attempt, a little later
            return [] if self.state is State.WAITING else self._wait("lookup")
        return self._again(f"{signal.stage}: {signal.message}")

    def _holder_lost(self, signal: HolderLost) -> list[Action]:
        held = self.holder()
        if held is None or held.worker != signal.worker or signal.epoch < held.epoch:
            return []
        self.deaths += 1
        if self.deaths >= MAX_DEATHS:
            message = f"in hand at {self.deaths} worker deaths, the last of {signal.worker}"
            return self._end(EndStream(code=ErrorCode.WORKER_LOST, message=message, stage=self.stage))
        return self._again(f"lost {signal.worker}")

    def _again(self, why: str) -> list[Action]:
        if self.attempts + 1 >= self.limits.max_attempts:
            message = f"{self.attempts + 1} attempts failed, the last: {why}"
            return self._end(EndStream(code=ErrorCode.WORKER_LOST, message=message, stage=self.stage))
        cancels = self._cancel_holders(why)
        self.state = State.FENCING
        return [*cancels, Disarm(Timer.ACCEPT), Disarm(Timer.RETRY), Disarm(Timer.STAGE), AskFence()]

    def _cancel_holders(self, reason: str) -> list[Action]:
        return [Cancel(held.worker, self.attempt, reason) for held in self.holders.values()]

    def _deadline(self, _signal: TimedOut) -> list[Action]:
        message = f"the deadline passed while the request was in {self.stage}"
        *before, end = self._end(EndStream(code=ErrorCode.DEADLINE_EXCEEDED, message=message, stage=self.stage))
        return [*before, Arm(Timer.DEADLINE, self.limits.end_grace_s), end]

    def _asked_to_cancel(self, signal: CancelAsked) -> list[Action]:
        return self._end(EndStream(reason=FinishReason.ABORT, message=signal.reason, stage=self.stage))

    def _refused(self, signal: Refused) -> list[Action]:
        return self._end(EndStream(code=signal.code, message=signal.message, stage=self.stage))

    def _finished(self, signal: Finished) -> list[Action]:
        self.state = State.ENDING
        return [EndStream(reason=signal.reason)]

    def _end(self, end: EndStream) -> list[Action]:
        """End before the tokens did: everyone who may have the request in hand is told."""
        tombstone: list[Action] = []
        if self.encoded or self.state in (State.FINDING, State.FENCING):
            # not encoded yet: whoever has it got it from an owner before us, under an attempt that we do not know
            attempt = self.attempt if self.encoded else ALL_ATTEMPTS
            tombstone = [Cancel("", attempt, end.code or end.reason or "ended")]
        self.state = State.ENDING
        stops: list[Action] = [Disarm(timer) for timer in Timer if timer is not Timer.DEADLINE]
        return [*tombstone, *stops, end]

    def _progress(self, _signal: TimedOut) -> list[Action]:
        return [Progress(self.stage), Arm(Timer.PROGRESS, self.limits.progress_s)]

    def _delivered(self, _signal: Delivered) -> list[Action]:
        self.state = State.ENDED
        return [Disarm(Timer.DEADLINE), Disarm(Timer.PROGRESS), AckIntake()]

    def _timed_out(self, signal: TimedOut) -> list[Action]:
        row = ON_TIMER.get((self.state, signal.timer))
        return row.do(self, signal) if row else []


Handler = Callable[[Owner, Any], list[Action]]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: what a signal does in a state, and every state that the request may then be in."""

    do: Handler
    leads_to: tuple[State, ...]


_OF_ATTEMPT = (Accepted, PrefillNoted, KVTransferred, StageFailed)
_HELD = (State.PREFILL, State.TRANSFER, State.DECODE)  # an engine has it in hand
_ASKED = (State.OFFERED, State.WAITING, State.LOOKUP)  # or may have, and its word is under way
_RUNNING = (*_ASKED, *_HELD)
_LIVE = (State.FINDING, State.FENCING, State.ENCODING, *_RUNNING)
# The last state in which trouble in a role is the request's: prefill keeps the KV until decode has it.
_LAST_RANK = {"lookup": RANK[State.LOOKUP], "prefill": RANK[State.TRANSFER], "decode": RANK[State.DECODE]}


def _onward(state: State, *reached: State) -> tuple[State, ...]:
    """A state, those of `reached` that are not behind it, and the end."""
    return (state, *(s for s in reached if RANK[s] > RANK[state]), State.ENDING)


def _accept_leads_to(state: State) -> tuple[State, ...]:
    busy = (State.WAITING,) if state in (State.OFFERED, State.LOOKUP) else ()
    return (*_onward(state, State.LOOKUP, State.PREFILL, State.DECODE), *busy)


def _failure_leads_to(state: State) -> tuple[State, ...]:
    paused = (State.WAITING,) if state in (State.OFFERED, State.LOOKUP) else ()
    return (state, *paused, State.FENCING, State.ENDING)


ON_TIMER: dict[tuple[State, Timer], Row] = {
    (State.FINDING, Timer.FIND): Row(Owner._fence, (State.FENCING,)),
    (State.OFFERED, Timer.ACCEPT): Row(Owner._accept_timeout, (State.OFFERED, State.WAITING)),
    (State.WAITING, Timer.RETRY): Row(Owner._retry, (State.OFFERED, State.ENCODING)),
    (State.LOOKUP, Timer.STAGE): Row(Owner._stage_timeout, (State.OFFERED,)),
    **{(state, Timer.DEADLINE): Row(Owner._deadline, (State.ENDING,)) for state in _LIVE},
    # an end that the subscriber never acknowledged is given up at the deadline, a late end a little after it
    (State.ENDING, Timer.DEADLINE): Row(Owner._delivered, (State.ENDED,)),
    **{(state, Timer.PROGRESS): Row(Owner._progress, (state,)) for state in _LIVE},
}


def _timer_leads_to(state: State) -> tuple[State, ...]:
    """Where the timers of a state lead; any other timer is a late echo and leads nowhere."""
    reached = [to for (at, _timer), row in ON_TIMER.items() if at is state for to in row.leads_to]
    return tuple(dict.fromkeys([state, *reached]))


_ENDS = (State.ENDING,)

TABLE: dict[tuple[State, type], Row] = {
    (State.NEW, Started): Row(Owner._start, (State.FINDING, State.ENCODING)),
    **{(state, Superseded): Row(Owner._other_owner, (state, State.ENDED)) for state in (*_LIVE, State.ENDING)},
    (State.FINDING, Found): Row(Owner._found, (State.FINDING, State.ENDED)),
    (State.FENCING, Fenced): Row(Owner._fenced, (State.ENCODING, State.OFFERED, State.FENCING)),
    (State.ENCODING, Encoded): Row(Owner._encoded, (State.OFFERED,)),
    (State.ENCODING, NotReady): Row(Owner._not_ready, (State.WAITING,)),
    **{(state, Accepted): Row(Owner._accepted, _accept_leads_to(state)) for state in _RUNNING},
    **{(state, PrefillNoted): Row(Owner._prefill_noted, (state,)) for state in (State.TRANSFER, State.DECODE)},
    **{
        (state, PrefillNoted): Row(Owner._prefill_noted, (State.PREFILL, State.TRANSFER))
        for state in (*_ASKED, State.PREFILL)
    },
    **{(state, KVTransferred): Row(Owner._transferred, (State.DECODE,)) for state in _RUNNING},
    **{(state, StageFailed): Row(Owner._failed, _failure_leads_to(state)) for state in _RUNNING},
    **{(state, HolderLost): Row(Owner._holder_lost, (state, State.FENCING, State.ENDING)) for state in _HELD},
    # whoever speaks up while a new attempt is asked for works for one that was given up
    **{(State.FENCING, word): Row(Owner._superseded, (State.FENCING,)) for word in _OF_ATTEMPT[:3]},
    **{(State.ENDING, word): Row(Owner._late, (State.ENDING,)) for word in _OF_ATTEMPT[:3]},
    **{(state, Finished): Row(Owner._finished, _ENDS) for state in (State.ENCODING, *_RUNNING)},
    # a choice may end while the owner already asks for a new attempt: the tokens are what counts
    (State.FENCING, Finished): Row(Owner._finished, _ENDS),
    **{(state, Refused): Row(Owner._refused, _ENDS) for state in _LIVE},
    **{(state, CancelAsked): Row(Owner._asked_to_cancel, _ENDS) for state in _LIVE},
    **{(state, TimedOut): Row(Owner._timed_out, _timer_leads_to(state)) for state in (*_LIVE, State.ENDING)},
    (State.ENDING, Delivered): Row(Owner._delivered, (State.ENDED,)),
}
