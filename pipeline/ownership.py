"""The owner's side of a codec worker: drives one state machine per request and carries out its actions.

What may happen to a request is decided in pipeline/owner.py; what its tokens become, in pipeline/stream.py (frames and
handles: pipeline/streams.py); what comes in, in pipeline/admission.py; how it leaves for lookup, in
pipeline/dispatch.py. This file is the hands.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import msgspec
import structlog

from pipeline import blob, eager
from pipeline.admission import Admission
from pipeline.bus import Bus
from pipeline.clockwork import ended, every
from pipeline.delivery import note_body
from pipeline.dispatch import Dispatcher
from pipeline.endings import Endings
from pipeline.errors import ErrorCode, RequestError, TransientError
from pipeline.events import (
    Accepted,
    Cancelled,
    Find,
    FinishReason,
    Found,
    HandoffEnded,
    KVTransferred,
    Outcome,
    PrefillNoted,
    Span,
    StageFailed,
)
from pipeline.jetstream import Delivery, fence
from pipeline.liveness import HolderWatch
from pipeline.membership import Membership
from pipeline.metrics import count
from pipeline.owner import (
    SUPERSEDED,
    AckIntake,
    Action,
    Arm,
    AskFence,
    AskFind,
    Cancel,
    CancelAsked,
    Delivered,
    Disarm,
    Dispatch,
    Encode,
    Encoded,
    EndStream,
    Fenced,
    Finished,
    Forget,
    HolderLost,
    NotReady,
    Owner,
    OwnerLimits,
    Progress,
    Refused,
    Restart,
    Signal,
    Started,
    State,
    Superseded,
    TimedOut,
    Timer,
)
from pipeline.request import Head, Request
from pipeline.stage import CodecStage
from pipeline.stream import Stream
from pipeline.streams import StreamTable
from pipeline.subscribers import Subscribers
from pipeline.timers import Timers
from pipeline.wants import Wants
from pipeline.wire import decode_control, encode

log = structlog.get_logger()

STAGE_TIMEOUT_S = 0.5  # lookup accepted, no engine spoke: ask again. Source: ours, 20 x the accept timeout
# The PubAck says that a request is accepted; the note says by whom. A first token that comes sooner says more, and a
# message that wakes the subscriber would delay it. Source: ours
ACCEPTANCE_NOTE_S = 0.05
MAX_TOMBSTONES = 100_000  # of requests never seen: whoever cancels what does not exist fills at most this
_ASKING = (State.FINDING, State.FENCING)
_TAKEN = (Outcome.ACCEPTED, Outcome.QUEUED)
_BEFORE_ENGINE = frozenset(
    (State.NEW, State.FINDING, State.FENCING, State.ENCODING, State.OFFERED, State.WAITING, State.LOOKUP)
)


class Ownership:
    """All requests that this process owns."""

    def __init__(self, bus: Bus, membership: Membership, codec: CodecStage, epoch: int) -> None:
        self.bus = bus
        self.worker = bus.worker
        self.limits = bus.topology.limits
        self.epoch = epoch
        self.requests: dict[str, Request] = {}
        self.ended: dict[str, Request] = {}  # still answers Want, for `keep_finished_s`
        self._waiting: dict[str, int] = {}  # bytes of the bodies of requests that no engine has taken yet, by rid
        self._waiting_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._done: list[str] = []  # ack subjects of requests that are over
        self._cancelled: dict[tuple[str, str], float] = {}  # (tenant, rid) unseen so far -> until when it is remembered
        self._membership = membership
        self._timers = Timers(self._loop, lambda rid, timer: self._signal(rid, TimedOut(timer)))
        self._owner_limits = owner_limits(bus)
        self.streams = StreamTable(self.worker, bus.tell, resend_after_s=self.limits.resend_after_s)
        self.streams.on_ended = self._stream_ended
        self.streams.on_contradiction = self._stream_contradicted
        self.streams.on_failed = self._stream_failed
        self.streams.on_stopped = self._stream_stopped
        self.streams.on_more = lambda stream: _ignore(self._loop.call_soon(self.streams.pump, stream))
        self._subscribers = Subscribers(bus)
        self._admission = Admission(bus, membership, codec, self._subscribers, self._take)
        self._dispatcher = Dispatcher(bus, membership, codec, epoch)
        self._endings = Endings(self.worker, codec, self.streams)
        self._watch = HolderWatch(bus, membership, self._holder_lost)
        self._wants = Wants(bus, self._subscribers, self.streams, find=self._find, heard=self._want_heard)
        self._subscribe()

    def _subscribe(self) -> None:
        topology, worker = self.bus.topology, self.worker
        self.bus.subscribe(topology.subject("tokens", worker=worker), self._frame)
        self.bus.subscribe(topology.subject("control", worker=worker), self._control, control=True)
        self.bus.subscribe(topology.subject("everyone"), self._control, control=True)
        self.bus.subscribe(topology.pattern("cancel"), self._cancel_asked, control=True)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, then finish what is in hand (at most `drain_s`) and give the rest back."""
        ticks = [
            self._loop.create_task(every(self.limits.ack_tokens_s, self._tick_acks)),
            self._loop.create_task(every(self.limits.ack_in_progress_s, self._tick_in_progress)),
            self._loop.create_task(every(self.limits.beacon_s, self._tick_holders)),
        ]
        self._membership.on_change.append(lambda _beacon: self._top_up())
        self._top_up()
        await stop.wait()
        self._admission.stop()
        await self._drain()
        for task in ticks:
            task.cancel()
        await asyncio.gather(*ticks, return_exceptions=True)
        self._timers.close()

    async def _drain(self) -> None:
        drained_by = self._loop.time() + self.limits.drain_s
        while self.requests and self._loop.time() < drained_by:  # noqa: ASYNC110 - a dict has no event
            await asyncio.sleep(self.limits.ack_tokens_s)
        for request in list(self.requests.values()):
            count("requests_given_back")
            self.bus.publish(request.delivery.ack, b"-NAK")
        self._tick_acks()
        await self.bus.flush()

    def _top_up(self) -> None:
        self._admission.top_up(len(self._waiting), self._waiting_bytes)

    def _recount(self, request: Request) -> None:
        """Keep the sums that `_top_up` needs: counting anew would cost 0.3 ms at every end among 1,000 requests."""
        if request.machine.state in _BEFORE_ENGINE:
            num_bytes = len(request.body)
            self._waiting_bytes += num_bytes - self._waiting.get(request.rid, 0)
            self._waiting[request.rid] = num_bytes
        else:
            self._waiting_bytes -= self._waiting.pop(request.rid, 0)

    # --- requests in

    def _take(self, head: Head, delivery: Delivery, body: bytes) -> None:
        known = self._find(head.rid)
        if known is not None and known.head.tenant != head.tenant:
            self._admission.refuse(head, RequestError(ErrorCode.INVALID_REQUEST, "this request id is in use"))
            self.bus.publish(delivery.ack, b"+TERM")
            return
        if head.rid in self.ended:
            self.bus.publish(delivery.ack, b"+ACK")
            return
        if known is not None:
            # redelivered to the process that has it: the newest ack subject is as good as any
            known.delivery = replace(known.delivery, ack=delivery.ack)
            return
        request = Request(
            head=head,
            delivery=delivery,
            machine=Owner(head.rid, self._owner_limits, 0.0),
            subscriber=self._subscribers.get(head.reply, head.tag),
            body=body,
            started_ns=time.time_ns(),
            uses_blob=bool(head.blob),
            want_at=self._loop.time() if head.window_bytes else -1.0,
            wanted=(0,) if head.window_bytes else (),
        )
        self._begin(request)

    def _begin(self, request: Request) -> None:
        remaining_s = (request.deadline_ns - request.started_ns) / 1e9
        machine = request.machine
        machine.timeout_s = max(remaining_s, 0.0)
        request.spans["intake"] = Span("intake", self.worker, request.delivery.time_ns, request.started_ns)
        self.requests[request.rid] = request
        count("requests_taken")
        actions = machine.on(Started(request.delivery.num_delivered))
        # what is over before it began costs nothing: its start is not carried out
        if self._cancelled.pop((request.head.tenant, request.rid), None) is not None:
            actions = machine.on(CancelAsked("cancelled by the publisher"))
        elif remaining_s <= 0:
            actions = machine.on(TimedOut(Timer.DEADLINE))
        self._run(request, actions)
        # after what the request waits for; it carries no number
        self._loop.call_later(ACCEPTANCE_NOTE_S, self._say_accepted, request)

    # --- signals and actions

    def _signal(self, rid: str, signal: Signal) -> None:
        request = self.requests.get(rid)
        if request is not None:
            self.signal(request, signal)

    def _say_accepted(self, request: Request) -> None:
        """Who has no event yet may like to know that somebody has the request."""
        if request.rid in self.requests and not any(stream.tokens or stream.over for stream in request.streams):
            note = note_body("request_accepted", rid=request.rid, owner=self.worker)
            request.subscriber.note(request.tag, request.machine.attempt, note)

    def signal(self, request: Request, signal: Signal) -> None:
        """Give one signal to a request's machine and carry out the answer."""
        self._run(request, request.machine.on(signal))

    def _run(self, request: Request, actions: list[Action]) -> None:
        self._recount(request)
        for action in actions:
            _CARRY_OUT[type(action)](self, request, action)

    def _arm(self, request: Request, action: Arm) -> None:
        self._timers.arm(request.rid, action.timer, action.delay_s)

    def _disarm(self, request: Request, action: Disarm) -> None:
        self._timers.disarm(request.rid, action.timer)

    def _ask_find(self, request: Request, _action: AskFind) -> None:
        self.bus.tell(self.bus.topology.subject("everyone"), encode(Find(request.rid, self.worker)))

    def _ask_fence(self, request: Request, _action: AskFence) -> None:
        self._spawn(self._fence(request))

    def _encode(self, request: Request, _action: Encode) -> None:
        short = not request.head.blob and len(request.body) <= self.bus.max_inline_bytes
        self._spawn(self._encoding(request), at_once=short)

    def _dispatch(self, request: Request, action: Dispatch) -> None:
        if request.encoding is not None:
            self._dispatcher.send(request, request.encoding, named=action.named)

    def _cancel(self, request: Request, action: Cancel) -> None:
        message = encode(Cancelled(request.rid, action.attempt, action.reason))
        self.bus.tell(self._control_subject(action.worker), message)

    def _restart(self, request: Request, action: Restart) -> None:
        """New handles: frames of an earlier attempt match nothing from now on."""
        for stream in request.streams:
            if stream.handle:
                self.streams.release(stream.handle)
            prefix = stream.out.prefix(request.tag, action.attempt, stream.choice)
            stream.begin_attempt(self.streams.issue(stream), prefix)

    def _progress(self, request: Request, action: Progress) -> None:
        if any(len(stream.tokens) for stream in request.streams):
            return  # tokens are progress enough
        note = note_body("request_progress", rid=request.rid, stage=action.stage)
        request.subscriber.note(request.tag, request.machine.attempt, note)

    def _end(self, request: Request, action: EndStream) -> None:
        self._endings.end(request, action)
        self._check_delivered(request)

    def _ack_intake(self, request: Request, _action: AckIntake) -> None:
        self._endings.settle(request)
        self._done.append(request.delivery.ack)
        if request.uses_blob:
            self._spawn(blob.purge(self.bus, request.head.tenant, request.rid))
        self._forget(request, Forget())
        self.ended[request.rid] = request
        self._loop.call_later(self.limits.keep_finished_s, self.ended.pop, request.rid, None)

    def _forget(self, request: Request, _action: Forget) -> None:
        for stream in request.streams:
            self.streams.release(stream.handle)
        for timer in Timer:
            self._timers.disarm(request.rid, timer)
        self.requests.pop(request.rid, None)
        self._waiting_bytes -= self._waiting.pop(request.rid, 0)
        self._top_up()

    def _spawn(self, work: Coroutine[Any, Any, None], *, at_once: bool = False) -> None:
        task = eager.start(work) if at_once else self._loop.create_task(work)
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(ended)

    async def _fence(self, request: Request) -> None:
        while request.machine.state is State.FENCING:
            try:
                attempt = await fence(self.bus)
            except TransientError as error:
                count("fence_failed")
                log.warning("no attempt number yet", rid=request.rid, error=str(error))
                await asyncio.sleep(self.limits.retry_pause_s)
                continue
            self.signal(request, Fenced(attempt))
            return

    async def _encoding(self, request: Request) -> None:
        start_ns = time.time_ns()
        try:
            request.encoding = await self._dispatcher.encode(request)
        except RequestError as error:
            self._refuse(request, error)
        except TransientError as error:
            log.debug("cannot encode yet", rid=request.rid, error=str(error))
            self.signal(request, NotReady())
        except Exception:
            # a bug of ours fails this request, never the worker
            log.exception("codec failed", rid=request.rid)
            count("requests_failed_internal")
            self._refuse(request, RequestError(ErrorCode.INTERNAL, "the codec stage failed"))
        else:
            request.body = b""
            request.spans["codec"] = Span("codec", self.worker, start_ns, time.time_ns())
            self._encoded(request)

    def _refuse(self, request: Request, error: RequestError) -> None:
        if request.machine.state in (State.ENDING, State.ENDED):
            return
        self._endings.refuse(request, error)
        self.signal(request, Refused(error.code, error.message))

    def _encoded(self, request: Request) -> None:
        encoding = request.encoding
        if encoding is None or request.machine.state is not State.ENCODING:
            return
        self._endings.open_streams(request)
        if encoding.too_long:
            self._endings.end_unprocessed(request, FinishReason.PROMPT_LENGTH_EXCEEDED)
            self.signal(request, Finished(FinishReason.PROMPT_LENGTH_EXCEEDED))
            return
        self._restart(request, Restart(request.machine.attempt))
        self.signal(request, Encoded())
        for stream in request.streams:
            stream.open()

    def _check_delivered(self, request: Request) -> None:
        if request.machine.state is State.ENDING and request.delivered:
            self.signal(request, Delivered())

    # --- what the bus brings

    def _find(self, rid: str) -> Request | None:
        return self.requests.get(rid) or self.ended.get(rid)

    def _want_heard(self, request: Request) -> None:
        request.want_at = self._loop.time()
        self._check_delivered(request)

    def _frame(self, _subject: str, source: str, payload: bytes, _headers: bytes | None) -> None:
        self.streams.on_frame(source, payload, self._loop.time())

    def _control(self, _subject: str, _reply: str, payload: bytes, _headers: bytes | None) -> None:
        try:
            message = decode_control(payload)
        except msgspec.DecodeError:
            count("control_malformed")
            return
        match message:
            case Find():
                self._answer_find(message)
            case Cancelled():
                if message.reason == SUPERSEDED:
                    self._signal(message.rid, Superseded(message.attempt))
            case HandoffEnded():
                pass  # for engines
            case _:
                self._about_request(message)

    def _answer_find(self, message: Find) -> None:
        request = self.requests.get(message.rid)
        # who only asks himself has nothing: two that found each other would both forget the request
        if request is not None and message.asker != self.worker and request.machine.state not in _ASKING:
            answer = Found(message.rid, self.worker, self.epoch, request.machine.attempt, "owner")
            self.bus.tell(self._control_subject(message.asker), encode(answer))

    def _about_request(self, message: Accepted | PrefillNoted | KVTransferred | StageFailed | Found) -> None:
        request = self.requests.get(message.rid)
        if request is None:
            if isinstance(message, Accepted):
                self._late_accept(message)
            return
        if isinstance(message, Accepted | PrefillNoted | KVTransferred) and message.attempt == request.machine.attempt:
            if not isinstance(message, Accepted):
                request.spans.update((span.stage, span) for span in message.spans)
            at_prefill = isinstance(message, PrefillNoted) and not message.decode
            self._endings.learn_plan(request, message.plan, final=at_prefill or isinstance(message, KVTransferred))
            self._check_delivered(request)
        self.signal(request, message)

    def _late_accept(self, message: Accepted) -> None:
        """Work of ours was taken after it was over."""
        if message.owner == self.worker and message.outcome in _TAKEN and message.stage != "lookup":
            count("accepts_of_ended_requests")
            tombstone = encode(Cancelled(message.rid, message.attempt, "not owned here"))
            self.bus.tell(self._control_subject(message.worker), tombstone)

    def _cancel_asked(self, subject: str, reply: str, payload: bytes, _headers: bytes | None) -> None:
        try:
            rid = str(msgspec.json.decode(payload)["rid"])
        except (msgspec.DecodeError, KeyError, TypeError):
            count("cancels_malformed")
            return
        tenant = subject.rsplit(".", 1)[-1]
        request = self.requests.get(rid)
        if request is None:
            # remembered, so that a cancel may overtake its request
            if len(self._cancelled) < MAX_TOMBSTONES:
                self._cancelled[tenant, rid] = self._loop.time() + self.limits.tombstone_s
        elif request.head.tenant != tenant:
            count("cancels_of_other_tenants")
        else:
            if reply:
                self.bus.tell(reply, note_body("cancelled", rid=rid))
            self.signal(request, CancelAsked("cancelled by the publisher"))

    def _control_subject(self, worker: str) -> str:
        topology = self.bus.topology
        return topology.subject("control", worker=worker) if worker else topology.subject("everyone")

    # --- what streams say

    def _stream_ended(self, stream: Stream) -> None:
        request = self.requests.get(stream.rid)
        if request is None or not all(other.over for other in request.streams):
            return
        if request.machine.state is State.ENDING:
            self._check_delivered(request)
        elif stream.ending is not None and stream.ending.failure is None:
            self.signal(request, Finished(FinishReason(stream.ending.name)))

    def _stream_contradicted(self, stream: Stream, why: str) -> None:
        self._signal(stream.rid, Refused(ErrorCode.STREAM_LOST, why))

    def _stream_failed(self, stream: Stream, why: str) -> None:
        """A bug in a parser: this request ends with what its subscriber has so far."""
        request = self.requests.get(stream.rid)
        if request is not None:
            count("requests_failed_internal")
            self.signal(request, Refused(ErrorCode.INTERNAL, why))

    def _stream_stopped(self, stream: Stream) -> None:
        """A stop string was found: the engine may stop this choice here."""
        request = self.requests.get(stream.rid)
        holder = request.machine.holders.get("decode") if request else None
        if request is not None and holder is not None:
            message = Cancelled(stream.rid, request.machine.attempt, "stop", stream.choice, stream.finish_at)
            self.bus.tell(self._control_subject(holder.worker), encode(message))

    # --- clocks

    def _tick_acks(self) -> None:
        """Positions to engines, ends to the broker: twenty times a second, so that many share a write."""
        self.streams.acknowledge(self._loop.time())
        done, self._done = self._done, []
        for ack in done:
            self.bus.tell(ack, b"+ACK")

    def _tick_in_progress(self) -> None:
        now = self._loop.time()
        for key in [key for key, until in self._cancelled.items() if until < now]:
            del self._cancelled[key]
        for request in list(self.requests.values()):
            self.bus.publish(request.delivery.ack, b"+WPI")
            if request.want_at >= 0 and now - request.want_at > self.limits.want_silence_s:
                self._subscriber_silent(request)
        self._top_up()

    def _subscriber_silent(self, request: Request) -> None:
        """It once said Want and then nothing: it is gone."""
        count("subscribers_silent")
        request.want_at = -1.0
        ending = request.machine.state is State.ENDING
        self.signal(request, Delivered() if ending else CancelAsked("the subscriber went silent"))

    def _tick_holders(self) -> None:
        holders = (request.machine.holder() for request in self.requests.values())
        for worker, epoch in {(holder.worker, holder.epoch) for holder in holders if holder is not None}:
            self._watch.check(worker, epoch)

    def _holder_lost(self, worker: str, epoch: int) -> None:
        for request in list(self.requests.values()):
            holder = request.machine.holder()
            if holder is not None and holder.worker == worker and holder.epoch <= epoch:
                count("holders_lost")
                self.signal(request, HolderLost(worker, holder.epoch))


def owner_limits(bus: Bus) -> OwnerLimits:
    """The machine's timings, from topics.yaml."""
    limits = bus.topology.limits
    return OwnerLimits(
        accept_timeout_s=limits.accept_timeout_s,
        accept_tries=limits.accept_tries,
        retry_pause_s=limits.retry_pause_s,
        find_timeout_s=limits.find_timeout_s,
        stage_timeout_s=STAGE_TIMEOUT_S,
        progress_s=limits.progress_s,
        max_attempts=limits.max_attempts,
        end_grace_s=limits.end_grace_s,
    )


def _ignore(_handle: object) -> None:
    """A callback's result that nobody needs."""


# Every action of the machine and the hand that carries it out; a missing one fails a test, not a request.
_CARRY_OUT: dict[type[Action], Callable[[Ownership, Request, Any], None]] = {
    Arm: Ownership._arm,
    Disarm: Ownership._disarm,
    AskFind: Ownership._ask_find,
    AskFence: Ownership._ask_fence,
    Encode: Ownership._encode,
    Dispatch: Ownership._dispatch,
    Cancel: Ownership._cancel,
    Restart: Ownership._restart,
    Progress: Ownership._progress,
    EndStream: Ownership._end,
    AckIntake: Ownership._ack_intake,
    Forget: Ownership._forget,
}
