"""The owner of a request, as a pure state machine: signals and a clock in, actions out. No I/O, no loop.

One `Owner` exists per request in the codec worker that pulled it. `TABLE` is the whole behaviour: which signal
is understood in which state, where it may lead, and the function that does it. docs/protocol.md draws it.
Whatever is lost, doubled, late or dead, `ENDED` is reached at the latest when the deadline passes: the deadline
timer is armed first and never disarmed.

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

MAX_DEATHS = 3  # design 2.7: in hand at a third worker death -> worker_lost


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
    """Send a tombstone for attempts <= `attempt`: to one worker, or to everyone when `worker` is ''."""

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
    """Publish the terminal event: a finish reason, or (`code` set) a named error."""

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
    Arm
    | Disarm
    | AskFind
    | AskFence
    | Encode
    | Dispatch
    | Cancel
    | Restart
    | Progress
    | EndStream
    | AckIntake
    | Forget
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
# In which role a worker of a state holds the request; TRANSFER is still prefill's.
_IN_HAND = (Outcome.ACCEPTED, Outcome.QUEUED, Outcome.DUPLICATE)
MAX_PAUSE_S = 1.0


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
        """Take one signal; return what to do. Signals that a state does not know are ignored."""
        attempt = getattr(signal, "attempt", None)
        if attempt is not None and not isinstance(signal, Fenced | Found) and attempt != self.attempt:
            return self._of_other_attempt(signal)
        row = TABLE.get((self.state, type(signal)))
        return row.do(self, signal) if row else []

    @property
    def stage(self) -> str:
        """The name of the stage that the request is in, for errors and progress notes."""
        return {State.OFFERED: "lookup", State.WAITING: self.waits_for or "lookup", State.ENCODING: "codec"}.get(
            self.state, str(self.state)
        )

    def holder(self) -> Holder | None:
        """The worker whose silence matters now."""
        role = {State.PREFILL: "prefill", State.TRANSFER: "prefill", State.DECODE: "decode"}.get(self.state)
        return self.holders.get(role) if role else None

    def _of_other_attempt(self, signal: Any) -> list[Action]:
        if isinstance(signal, Accepted) and signal.attempt < self.attempt and signal.outcome in _IN_HAND:
            return [Cancel(signal.worker, signal.attempt, "superseded")]
        return []

    def _start(self, signal: Started) -> list[Action]:
        deadline: list[Action] = [Arm(Timer.DEADLINE, self.timeout_s), Arm(Timer.PROGRESS, self.limits.progress_s)]
        if signal.num_delivered > 1:
            self.state = State.FINDING
            return [*deadline, AskFind(), Arm(Timer.FIND, self.limits.find_timeout_s)]
        self.state = State.ENCODING
        return [*deadline, Encode()]

    def _found(self, _signal: Found) -> list[Action]:
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
        restart: list[Action] = [Restart(signal.attempt)]
        if self.encoded:
            return restart + self._dispatch()
        self.state = State.ENCODING
        return [*restart, Encode()]

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
        pause_s = min(self.limits.retry_pause_s * 2**self.pauses, MAX_PAUSE_S)
        self.pauses += 1
        return [Disarm(Timer.ACCEPT), Disarm(Timer.STAGE), Arm(Timer.RETRY, max(pause_s, at_least_s))]

    def _not_ready(self, _signal: NotReady) -> list[Action]:
        return self._wait("codec")

    def _retry(self, _signal: TimedOut) -> list[Action]:
        if self.encoded:
            return self._dispatch()
        self.state = State.ENCODING
        return [Encode()]

    def _accepted(self, signal: Accepted) -> list[Action]:
        if signal.outcome in _IN_HAND:
            return self._bind(signal.stage, signal.worker, signal.epoch)
        rank = RANK[STAGE_STATE.get(signal.stage, State.LOOKUP)]
        if rank < RANK[self.state]:
            return []
        if signal.outcome is Outcome.BUSY and self.state in (State.OFFERED, State.LOOKUP):
            return self._wait(signal.stage, signal.retry_after_s)
        if signal.outcome is Outcome.REFUSED:
            return self._end(EndStream(reason=FinishReason.INSUFFICIENT_SYSTEM_RESOURCE, stage=signal.stage))
        return []

    def _bind(self, stage: str, worker: str, epoch: int) -> list[Action]:
        """A worker says that it has the request: the first per role is the holder, any other is its twin."""
        role = "decode" if stage == "transfer" else stage
        held = self.holders.setdefault(role, Holder(worker, epoch))
        if role != "lookup" and (held.worker, held.epoch) != (worker, epoch):
            return [Cancel(worker, self.attempt, "twin")]
        reached = STAGE_STATE[stage]
        if RANK[reached] <= RANK[self.state]:
            return []
        self.state = reached
        self.pauses = 0
        stops: list[Action] = [Disarm(Timer.ACCEPT), Disarm(Timer.RETRY), Disarm(Timer.STAGE)]
        if reached is State.LOOKUP:
            # Lookup computes for microseconds; if no engine speaks up in this time it died or its words did.
            stops[2] = Arm(Timer.STAGE, self.limits.stage_timeout_s)
        return stops

    def _stage_timeout(self, _signal: TimedOut) -> list[Action]:
        return self._dispatch()

    def _prefill_noted(self, signal: PrefillNoted) -> list[Action]:
        actions = self._bind("prefill", signal.worker, signal.epoch)
        if signal.decode and self.state is State.PREFILL and not any(isinstance(a, Cancel) for a in actions):
            self.state = State.TRANSFER
        return actions

    def _transferred(self, signal: KVTransferred) -> list[Action]:
        return self._bind("decode", signal.worker, signal.epoch)

    def _failed(self, signal: StageFailed) -> list[Action]:
        role = "decode" if signal.stage == "transfer" else signal.stage
        held = self.holders.get(role)
        if held is not None and held.worker != signal.worker:
            return []  # a twin's trouble is its own
        if not signal.transient:
            code = ErrorCode(signal.code) if signal.code in set(ErrorCode) else ErrorCode.INTERNAL
            return self._end(EndStream(code=code, message=signal.message, stage=signal.stage))
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
        return self._end(EndStream(code=ErrorCode.DEADLINE_EXCEEDED, message=message, stage=self.stage))

    def _asked_to_cancel(self, signal: CancelAsked) -> list[Action]:
        return self._end(EndStream(reason=FinishReason.ABORT, message=signal.reason, stage=self.stage))

    def _refused(self, signal: Refused) -> list[Action]:
        return self._end(EndStream(code=signal.code, message=signal.message, stage=self.stage))

    def _finished(self, signal: Finished) -> list[Action]:
        self.state = State.ENDING
        return [EndStream(reason=signal.reason)]

    def _end(self, end: EndStream) -> list[Action]:
        """End before the tokens did: everyone who may have the request in hand is told."""
        nobody = self.state in (State.NEW, State.FINDING, State.ENCODING)
        self.state = State.ENDING
        tombstone: list[Action] = [] if nobody else [Cancel("", self.attempt, end.code or end.reason or "ended")]
        stops: list[Action] = [Disarm(timer) for timer in Timer if timer is not Timer.DEADLINE]
        return [*tombstone, *stops, end]

    def _progress(self, _signal: TimedOut) -> list[Action]:
        return [Progress(self.stage), Arm(Timer.PROGRESS, self.limits.progress_s)]

    def _delivered(self, _signal: Delivered) -> list[Action]:
        self.state = State.ENDED
        return [Disarm(Timer.DEADLINE), Disarm(Timer.PROGRESS), AckIntake()]

    def _timed_out(self, signal: TimedOut) -> list[Action]:
        handler = _ON_TIMER.get((self.state, signal.timer))
        return handler(self, signal) if handler else []


Handler = Callable[[Owner, Any], list[Action]]

_RUNNING = (State.OFFERED, State.WAITING, State.LOOKUP, State.PREFILL, State.TRANSFER, State.DECODE)
_LIVE = (State.FINDING, State.FENCING, State.ENCODING, *_RUNNING)

_ON_TIMER: dict[tuple[State, Timer], Handler] = {
    (State.FINDING, Timer.FIND): Owner._fence,
    (State.OFFERED, Timer.ACCEPT): Owner._accept_timeout,
    (State.WAITING, Timer.RETRY): Owner._retry,
    (State.LOOKUP, Timer.STAGE): Owner._stage_timeout,
    **{(state, Timer.DEADLINE): Owner._deadline for state in _LIVE},
    # an end that the subscriber never acknowledged is given up at the deadline
    (State.ENDING, Timer.DEADLINE): Owner._delivered,
    **{(state, Timer.PROGRESS): Owner._progress for state in _LIVE},
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: where a signal may lead from a state, and what does it."""

    do: Handler
    leads_to: tuple[State, ...]


_ENDS = (State.ENDING,)
_AGAIN = (State.FENCING, State.ENDING)
_FORWARD = (*_RUNNING, *_ENDS)

TABLE: dict[tuple[State, type], Row] = {
    (State.NEW, Started): Row(Owner._start, (State.FINDING, State.ENCODING)),
    (State.FINDING, Found): Row(Owner._found, (State.ENDED,)),
    (State.FENCING, Fenced): Row(Owner._fenced, (State.ENCODING, State.OFFERED, State.FENCING)),
    (State.ENCODING, Encoded): Row(Owner._encoded, (State.OFFERED,)),
    (State.ENCODING, NotReady): Row(Owner._not_ready, (State.WAITING,)),
    **{(state, Accepted): Row(Owner._accepted, _FORWARD) for state in _RUNNING},
    **{(state, PrefillNoted): Row(Owner._prefill_noted, _FORWARD) for state in _RUNNING},
    **{(state, KVTransferred): Row(Owner._transferred, _FORWARD) for state in _RUNNING},
    **{(state, StageFailed): Row(Owner._failed, (*_RUNNING, *_AGAIN)) for state in _RUNNING},
    **{(state, HolderLost): Row(Owner._holder_lost, (*_RUNNING, *_AGAIN)) for state in _RUNNING},
    **{(state, Finished): Row(Owner._finished, _ENDS) for state in (State.ENCODING, *_RUNNING)},
    # a choice may end while the owner already asks for a new attempt: the tokens are what counts
    (State.FENCING, Finished): Row(Owner._finished, _ENDS),
    **{(state, Refused): Row(Owner._refused, _ENDS) for state in _LIVE},
    **{(state, CancelAsked): Row(Owner._asked_to_cancel, _ENDS) for state in _LIVE},
    **{(state, TimedOut): Row(Owner._timed_out, (*_LIVE, *_ENDS)) for state in _LIVE},
    (State.ENDING, TimedOut): Row(Owner._timed_out, (State.ENDING, State.ENDED)),
    (State.ENDING, Delivered): Row(Owner._delivered, (State.ENDED,)),
}
