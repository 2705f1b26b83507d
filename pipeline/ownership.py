"""The owner's side of a codec worker: pulls requests, drives one state machine each, carries out its actions.

What may happen to a request is decided in pipeline/owner.py; what its tokens become, in pipeline/streams.py. This
file is the hands: messages in, actions out, clocks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, assert_never

import msgspec
import structlog

from pipeline import blob
from pipeline.bus import Bus
from pipeline.delivery import BatchSubscriber, Subscriber, note_body
from pipeline.errors import ErrorCode, RequestError, TransientError
from pipeline.events import (
    ENVELOPE_VERSION,
    Accepted,
    Cancelled,
    Envelope,
    Find,
    FinishReason,
    Found,
    HandoffEnded,
    KVTransferred,
    Outcome,
    Plan,
    PrefillNoted,
    PromptEncoded,
    RequestBody,
    Span,
    StageFailed,
)
from pipeline.headers import parse_headers
from pipeline.intake import Intake
from pipeline.jetstream import fence, parse_ack
from pipeline.liveness import HolderWatch
from pipeline.membership import Membership
from pipeline.metrics import count
from pipeline.owner import (
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
    TimedOut,
    Timer,
)
from pipeline.request import Head, Request, check_reply, read_head
from pipeline.stage import CodecStage, TokenStream
from pipeline.streams import Ending, Stream, StreamTable
from pipeline.timers import Timers
from pipeline.wants import Wants
from pipeline.wire import WireError, decode_control, encode

log = structlog.get_logger()

STAGE_TIMEOUT_S = 0.5  # lookup accepted, no engine spoke: ask again. Source: ours, 20 x the accept timeout


class _NoTokens:
    """The parser of a request that ended before it had one: its only event is the failure."""

    stopped = False

    def feed(self, token: int) -> bytes | None:
        raise AssertionError(f"token {token} for a request that never started")

    def finish(self, reason: str, plan: Plan, num_tokens: int) -> bytes:
        return note_body("ended", reason=reason)


class Ownership:
    """All requests that this process owns."""

    def __init__(self, bus: Bus, membership: Membership, codec: CodecStage, epoch: int) -> None:
        self.bus = bus
        self.membership = membership
        self.epoch = epoch
        self.worker = bus.worker
        self.limits = bus.topology.limits
        self.requests: dict[str, Request] = {}
        self.ended: dict[str, Request] = {}
        self._codec = codec
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._cancelled: dict[str, float] = {}  # rid -> when its tombstone may go
        self._timers = Timers(self._loop, lambda rid, timer: self._signal(rid, TimedOut(timer)))
        self._want_subject = bus.topology.subject("want", worker=self.worker)
        self._out_prefix = bus.topology.subject("events", tenant="-", connection="-").removesuffix("-.-")
        self._batches: dict[str, BatchSubscriber] = {}
        self._owner_limits = OwnerLimits(
            accept_timeout_s=self.limits.accept_timeout_s,
            accept_tries=self.limits.accept_tries,
            retry_pause_s=self.limits.retry_pause_s,
            find_timeout_s=self.limits.find_timeout_s,
            stage_timeout_s=STAGE_TIMEOUT_S,
            progress_s=self.limits.progress_s,
            max_attempts=self.limits.max_attempts,
        )
        self.streams = StreamTable(self.worker, bus.tell, resend_after_s=self.limits.resend_after_s)
        self.streams.on_ended = self._stream_ended
        self.streams.on_contradiction = self._stream_contradicted
        self.streams.on_stopped = self._stream_stopped
        self.streams.on_more = self._pump_soon
        self.wants = Wants(self)
        self._watch = HolderWatch(bus, membership, self._holder_lost)
        self._intakes = [Intake(bus, consumer, self._intake) for consumer in bus.topology.consumers.values()]
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
            self._loop.create_task(self._every(self.limits.ack_tokens_s, self._tick_acks)),
            self._loop.create_task(self._every(self.limits.ack_in_progress_s, self._tick_in_progress)),
            self._loop.create_task(self._every(self.limits.beacon_s, self._tick_holders)),
        ]
        self.membership.on_change.append(lambda beacon: self.top_up())
        self.top_up()
        await stop.wait()
        for intake in self._intakes:
            intake.stop()
        await self._drain()
        for task in ticks:
            task.cancel()
        await asyncio.gather(*ticks, return_exceptions=True)
        self._timers.close()

    async def _every(self, period_s: float, call: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(period_s)
            call()

    async def _drain(self) -> None:
        async def emptied() -> None:
            while self.requests:
                await asyncio.sleep(self.limits.ack_tokens_s)

        try:
            await asyncio.wait_for(emptied(), self.limits.drain_s)
        except TimeoutError:
            for request in list(self.requests.values()):
                count("requests_given_back")
                self.bus.publish(request.delivery.ack, b"-NAK")
        self._tick_acks()
        await self.bus.flush()

    # --- intake

    def room(self) -> int:
        """How many more requests this worker would pull: its share of engine credit plus what may wait here."""
        waiting = sum(1 for request in self.requests.values() if request.machine.state in _BEFORE_ENGINE)
        owners = max(1, len(self.membership.fresh("codec")))
        free = [sum(b.free_slots for b in self.membership.fresh(role)) for role in ("prefill", "decode")]
        return min(free) // owners + self.limits.waiting_requests - waiting

    def top_up(self) -> None:
        """Ask intake for as much as there is room for."""
        waiting_bytes = sum(len(request.body) for request in self.requests.values())
        room = self.room() if waiting_bytes < self.limits.waiting_bytes else 0
        for intake in self._intakes:
            intake.top_up(room)

    def _intake(self, subject: str, ack: str, payload: bytes, raw_headers: bytes | None) -> None:
        delivery = parse_ack(ack)
        headers = parse_headers(raw_headers or b"")[2]
        tenant = subject.rsplit(".", 1)[-1]
        try:
            reply = check_reply(headers.get("Tm-Reply", ""), tenant, self._out_prefix)
        except RequestError as error:
            # nobody to tell: the message is taken off the queue, counted and logged
            count("requests_unanswerable")
            log.warning("request without a usable reply", subject=subject, error=error.message)
            self.bus.publish(ack, b"+TERM")
            return
        try:
            head = read_head(subject, headers, reply, self.limits)
        except RequestError as error:
            count("requests_malformed")
            failure = self._codec.failure(headers.get("Tm-Protocol", ""), error.code, error.message, error.param)
            subscriber = Subscriber(self.bus.publish, reply, self._want_subject)
            subscriber.event(subscriber.prefix(0, 0, 0), 0, failure, error.code)
            self.bus.publish(ack, b"+TERM")
            return
        known = self.requests.get(head.rid)
        if known is not None:
            # redelivered to the process that has it: the newest ack subject is as good as any
            known.delivery = replace(known.delivery, ack=ack)
            return
        if head.rid in self.ended:
            self.bus.publish(ack, b"+ACK")
            return
        self._take(Request(
            head=head,
            delivery=delivery,
            machine=Owner(head.rid, self._owner_limits, 0.0),
            subscriber=self.subscriber(head.reply, head.tag),
            body=payload,
            started_ns=time.time_ns(),
            uses_blob=bool(head.blob),
        ))

    def _take(self, request: Request) -> None:
        now_ns = time.time_ns()
        remaining_s = (request.deadline_ns - now_ns) / 1e9
        request.machine.timeout_s = max(remaining_s, 0.0)
        request.spans["intake"] = Span("intake", self.worker, request.delivery.time_ns, now_ns)
        self.requests[request.rid] = request
        count("requests_taken")
        request.subscriber.note(request.head.tag, 0, note_body("request_accepted", rid=request.rid, owner=self.worker))
        if self._cancelled.pop(request.rid, None) is not None:
            actions = request.machine.on(Started(1)) and request.machine.on(CancelAsked("cancelled by the publisher"))
        elif remaining_s <= 0:
            actions = request.machine.on(Started(1)) and request.machine.on(TimedOut(Timer.DEADLINE))
        else:
            actions = request.machine.on(Started(request.delivery.num_delivered))
        self._run(request, actions)

    def subscriber(self, reply: str, tag: int) -> Subscriber:
        """Where events for a reply subject go; requests of one batching connection share one."""
        if tag < 0:
            return Subscriber(self.bus.publish, reply, self._want_subject)
        batch = self._batches.get(reply)
        if batch is None:
            # bounded: a new connection makes a new reply; old ones hold no state between ticks
            if len(self._batches) > 10_000:
                self._batches.clear()
            batch = BatchSubscriber(self.bus.publish, reply, self._want_subject, self.bus.max_inline_bytes)
            self._batches[reply] = batch
        return batch

    # --- signals and actions

    def _signal(self, rid: str, signal: Signal) -> None:
        request = self.requests.get(rid)
        if request is not None:
            self._run(request, request.machine.on(signal))

    def now(self) -> float:
        """The loop's clock, seconds."""
        return self._loop.time()

    def signal(self, request: Request, signal: Signal) -> None:
        """Give one signal to a request's machine and carry out the answer."""
        self._run(request, request.machine.on(signal))

    def _run(self, request: Request, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Arm():
                    self._timers.arm(request.rid, action.timer, action.delay_s)
                case Disarm():
                    self._timers.disarm(request.rid, action.timer)
                case AskFind():
                    self.bus.tell(self.bus.topology.subject("everyone"), encode(Find(request.rid, self.worker)))
                case AskFence():
                    self._spawn(self._fence(request))
                case Encode():
                    self._spawn(self._encode(request))
                case Dispatch():
                    self._dispatch(request, action.named)
                case Cancel():
                    self._cancel(request, action)
                case Restart():
                    self._restart(request, action.attempt)
                case Progress():
                    self._progress(request, action.stage)
                case EndStream():
                    self._end(request, action)
                case AckIntake():
                    self._ack_intake(request)
                case Forget():
                    self._forget(request)
                case _:
                    assert_never(action)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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

    async def _encode(self, request: Request) -> None:
        start_ns = time.time_ns()
        head = request.head
        try:
            if head.blob:
                ref = blob.BlobRef.parse(head.blob)
                request.body = await blob.get(self.bus, head.tenant, head.rid, ref, self.limits.max_body_bytes)
            if len(request.body) > self.limits.max_body_bytes:
                raise blob.too_large(len(request.body), self.limits.max_body_bytes)
            event = RequestBody(head.rid, head.tenant, head.protocol, request.body)
            async for encoding in self._codec.handle(event):
                request.encoding = encoding
            await self._store_ids(request)
        except RequestError as error:
            self._refuse(request, error)
            return
        except TransientError as error:
            log.debug("cannot encode yet", rid=head.rid, error=str(error))
            self.signal(request, NotReady())
            return
        except Exception:
            # a bug of ours fails this request, never the worker (house rule 5)
            log.exception("codec failed", rid=head.rid)
            count("requests_failed_internal")
            self._refuse(request, RequestError(ErrorCode.INTERNAL, "the codec stage failed"))
            return
        request.body = b""
        request.spans["codec"] = Span("codec", self.worker, start_ns, time.time_ns())
        if request.machine.state is State.ENCODING:
            self._encoded(request)

    def _refuse(self, request: Request, error: RequestError) -> None:
        if request.machine.state in (State.ENDING, State.ENDED):
            return
        failure = self._codec.failure(request.head.protocol, error.code, error.message, error.param)
        self._open_streams(request, Ending(error.code, failure))
        self.signal(request, Refused(error.code, error.message))

    async def _store_ids(self, request: Request) -> None:
        encoding = request.encoding
        if encoding is None:
            raise RequestError(ErrorCode.INTERNAL, "the codec stage said nothing")
        if len(encoding.ids) > self.limits.inline_ids_bytes and not encoding.too_long:
            ref = await blob.put(self.bus, request.head.tenant, request.rid, "ids", encoding.ids)
            request.ids_ref = ref.text()
            request.uses_blob = True

    def _encoded(self, request: Request) -> None:
        encoding = request.encoding
        assert encoding is not None  # _encode set it
        self._open_streams(request, None)
        if encoding.too_long:
            request.plan = self._empty_plan(request)
            self._give_plan(request)
            for stream in request.streams:
                stream.end(Ending(FinishReason.PROMPT_LENGTH_EXCEEDED))
            self.signal(request, Finished(FinishReason.PROMPT_LENGTH_EXCEEDED))
            return
        self._restart(request, request.machine.attempt)
        self.signal(request, Encoded())

    def _open_streams(self, request: Request, ending: Ending | None) -> None:
        if request.streams:
            return
        encoding = request.encoding
        choices = encoding.sampling.num_choices if encoding else 1

        def opener(choice: int) -> Callable[[], TokenStream]:
            if encoding is None:
                return _NoTokens
            return lambda: encoding.open(request.rid, request.created, choice)

        for choice in range(choices):
            stream = Stream(request.rid, choice, opener(choice), request.subscriber)
            stream.prefix = request.subscriber.prefix(request.head.tag, request.machine.attempt, choice)
            if request.head.timeline and choice == choices - 1:
                stream.before_end = partial(self._timeline, request)
            if ending is not None:
                stream.end(ending)
            request.streams.append(stream)

    def _restart(self, request: Request, attempt: int) -> None:
        for stream in request.streams:
            if stream.handle:
                self.streams.release(stream.handle)
            prefix = stream.out.prefix(request.head.tag, attempt, stream.choice)
            stream.begin_attempt(self.streams.issue(stream), prefix)

    def _dispatch(self, request: Request, named: bool) -> None:
        encoding = request.encoding
        assert encoding is not None  # the machine dispatches only what is encoded
        machine = request.machine
        env = Envelope(
            version=ENVELOPE_VERSION,
            rid=request.rid,
            tenant=request.head.tenant,
            request_class=request.head.request_class,
            attempt=machine.attempt,
            deadline_ns=request.deadline_ns,
            owner=self.worker,
            owner_epoch=self.epoch,
            handles=tuple(stream.handle for stream in request.streams),
            seed=self._seed(request),
            intake_ack=request.delivery.ack,
            plan=request.plan,
            forced_tokens=max((len(stream.tokens) for stream in request.streams), default=0),
        )
        event = PromptEncoded(
            env=env,
            model=encoding.model,
            fingerprint=encoding.fingerprint,
            num_prompt_tokens=encoding.num_prompt_tokens,
            ids=b"" if request.ids_ref else encoding.ids,
            ids_ref=request.ids_ref,
            block_keys=encoding.block_keys,
            sampling=encoding.sampling,
            sender=self.worker,
            spans=(request.spans["codec"],) if "codec" in request.spans else (),
            salt=encoding.salt,
        )
        self.bus.publish(self._lookup_subject(request, named), encode(event))

    def _lookup_subject(self, request: Request, named: bool) -> str:
        topology = self.bus.topology
        if not named:
            return topology.subject("encoded")
        workers = [b.worker for b in self.membership.fresh("lookup") if b.worker != request.dispatched_to]
        if not workers:
            return topology.subject("encoded")
        request.dispatched_to = workers[int(request.rid[:8], 16) % len(workers)]
        return topology.named("encoded", request.dispatched_to)

    @staticmethod
    def _seed(request: Request) -> int:
        seed = request.encoding.seed if request.encoding else None
        return seed if seed is not None else int(request.rid[:16], 16)

    def _cancel(self, request: Request, action: Cancel) -> None:
        message = encode(Cancelled(request.rid, action.attempt, action.reason))
        topology = self.bus.topology
        if action.worker:
            self.bus.tell(topology.subject("control", worker=action.worker), message)
        else:
            self.bus.tell(topology.subject("everyone"), message)

    def _progress(self, request: Request, stage: str) -> None:
        if request.streams and any(len(stream.tokens) for stream in request.streams):
            return  # tokens are progress enough
        note = note_body("request_progress", rid=request.rid, stage=stage)
        request.subscriber.note(request.head.tag, request.machine.attempt, note)

    def _end(self, request: Request, end: EndStream) -> None:
        """Give every unfinished choice its ending and publish what can be published."""
        count(f"requests_ended_{end.code or end.reason}")
        if end.code is not None:
            failure = self._codec.failure(request.head.protocol, end.code, end.message)
            ending = Ending(end.code, failure)
        else:
            ending = Ending(end.reason or FinishReason.ABORT)
        self._open_streams(request, None)
        if request.plan is None and end.code is None and request.encoding is not None and end.message:
            request.plan = self._empty_plan(request)
        if request.encoding is None and ending.failure is None:
            failure = self._codec.failure(request.head.protocol, ErrorCode.INVALID_REQUEST, end.message or "ended early")
            ending = Ending(ending.name, failure)
        for stream in request.streams:
            if stream.ending is None:
                stream.end(ending)
        self._give_plan(request)
        for stream in request.streams:
            self.streams.pump(stream)
        self.check_delivered(request)

    @staticmethod
    def _empty_plan(request: Request) -> Plan:
        tokens = request.encoding.num_prompt_tokens if request.encoding else 0
        return Plan(prompt_tokens=tokens, hit_tokens=0, compute_from=0, replay_from=0, seed=0)

    def check_delivered(self, request: Request) -> None:
        """The request is over when its subscriber has the last event of every choice."""
        if request.machine.state is not State.ENDING:
            return
        if any(stream.terminal_n < 0 for stream in request.streams):
            return
        if request.want_at >= 0 and any(
            following <= stream.terminal_n
            for stream, following in zip(request.streams, request.wanted, strict=False)
        ):
            return
        self.signal(request, Delivered())

    def _ack_intake(self, request: Request) -> None:
        self.bus.publish(request.delivery.ack, b"+ACK")
        if request.uses_blob:
            self._spawn(blob.purge(self.bus, request.head.tenant, request.rid))
        self._forget(request)
        self.ended[request.rid] = request
        self._loop.call_later(self.limits.keep_finished_s, self.ended.pop, request.rid, None)

    def _forget(self, request: Request) -> None:
        self._tick_acks()
        for stream in request.streams:
            self.streams.release(stream.handle)
        for timer in Timer:
            self._timers.disarm(request.rid, timer)
        self.requests.pop(request.rid, None)
        self.top_up()

    # --- what the bus brings

    def _frame(self, _subject: str, source: str, payload: bytes, _headers: bytes | None) -> None:
        self.streams.on_frame(source, payload, self._loop.time())

    def _control(self, _subject: str, _reply: str, payload: bytes, _headers: bytes | None) -> None:
        try:
            message = decode_control(payload)
        except (msgspec.DecodeError, WireError):
            count("control_malformed")
            return
        match message:
            case Find():
                if message.rid in self.requests and message.asker != self.worker:
                    machine = self.requests[message.rid].machine
                    answer = Found(message.rid, self.worker, self.epoch, machine.attempt, "owner")
                    self.bus.tell(self.bus.topology.subject("control", worker=message.asker), encode(answer))
            case Cancelled() | HandoffEnded():
                pass  # for engines
            case _:
                self._about_request(message)

    def _about_request(self, message: Accepted | PrefillNoted | KVTransferred | StageFailed | Found) -> None:
        request = self.requests.get(message.rid)
        if request is None:
            ours = isinstance(message, Accepted) and message.owner == self.worker and message.rid not in self.ended
            if ours and isinstance(message, Accepted) and message.outcome in _TAKEN:
                count("accepts_of_unknown_requests")
                late = encode(Cancelled(message.rid, message.attempt, "not owned here"))
                self.bus.tell(self.bus.topology.subject("control", worker=message.worker), late)
            return
        if isinstance(message, Accepted | PrefillNoted | KVTransferred) and message.attempt == request.machine.attempt:
            self._learn(request, message)
        self.signal(request, message)

    def _learn(self, request: Request, message: Accepted | PrefillNoted | KVTransferred) -> None:
        if not isinstance(message, Accepted):
            for span in message.spans:
                request.spans[span.stage] = span
        if request.plan is None and message.plan is not None:
            request.plan = message.plan
            self._give_plan(request)

    def _give_plan(self, request: Request) -> None:
        for stream in request.streams:
            if stream.plan is None and request.plan is not None:
                stream.plan = request.plan
                if stream.finish_at >= 0:
                    self.streams.pump(stream)
        self.check_delivered(request)

    def _stream_ended(self, stream: Stream) -> None:
        request = self.requests.get(stream.rid)
        if request is None or any(other.finish_at < 0 or other.at < other.finish_at for other in request.streams):
            return
        if request.machine.state is State.ENDING:
            self.check_delivered(request)
        elif stream.ending is not None and stream.ending.failure is None:
            self.signal(request, Finished(FinishReason(stream.ending.name)))

    def _pump_soon(self, stream: Stream) -> None:
        self._loop.call_soon(self.streams.pump, stream)

    def _stream_contradicted(self, stream: Stream, why: str) -> None:
        request = self.requests.get(stream.rid)
        if request is not None:
            self.signal(request, Refused(ErrorCode.STREAM_LOST, why))

    def _stream_stopped(self, stream: Stream) -> None:
        """A stop string was found: the engine may stop this choice here."""
        request = self.requests.get(stream.rid)
        holder = request.machine.holders.get("decode") if request else None
        if request is not None and holder is not None:
            message = Cancelled(stream.rid, request.machine.attempt, "stop", stream.choice, stream.finish_at)
            self.bus.tell(self.bus.topology.subject("control", worker=holder.worker), encode(message))

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
            self._cancelled[rid] = self._loop.time() + self.limits.tombstone_s
            return
        if request.head.tenant != tenant:
            count("cancels_of_other_tenants")
            return
        if reply:
            self.bus.tell(reply, note_body("cancelled", rid=rid))
        self.signal(request, CancelAsked("cancelled by the publisher"))

    # --- clocks

    def _tick_acks(self) -> None:
        self.streams.acknowledge(self._loop.time())

    def _tick_in_progress(self) -> None:
        now = self._loop.time()
        for rid in [rid for rid, until in self._cancelled.items() if until < now]:
            del self._cancelled[rid]
        for request in list(self.requests.values()):
            self.bus.publish(request.delivery.ack, b"+WPI")
            self.wants.check_silence(request, now)
        self.top_up()

    def _tick_holders(self) -> None:
        for request in self.requests.values():
            holder = request.machine.holder()
            if holder is not None:
                self._watch.check(holder.worker, holder.epoch)

    def _holder_lost(self, worker: str, epoch: int) -> None:
        for request in list(self.requests.values()):
            holder = request.machine.holder()
            if holder is not None and holder.worker == worker and holder.epoch <= epoch:
                count("holders_lost")
                self.signal(request, HolderLost(worker, holder.epoch))

    def _timeline(self, request: Request) -> None:
        """Tell the subscriber which stage had the request when; sent just before the last event."""
        now_ns = time.time_ns()
        spans = dict(request.spans)
        first_ns = spans["prefill"].end_ns if "prefill" in spans else 0
        if first_ns:
            tokens = sum(len(stream.tokens) for stream in request.streams)
            decode = request.machine.holders.get("decode")
            if decode is not None and "transfer" in spans:
                spans["decode"] = Span("decode", decode.worker, spans["transfer"].end_ns, now_ns, f"{tokens} tokens")
            events = sum(stream.n for stream in request.streams)
            spans["parse"] = Span("parse", self.worker, first_ns, now_ns, f"{events} events")
        note = note_body("request_timeline", rid=request.rid, spans=[msgspec.structs.asdict(s) for s in spans.values()])
        request.subscriber.note(request.head.tag, request.machine.attempt, note)


_TAKEN = (Outcome.ACCEPTED, Outcome.QUEUED)
_BEFORE_ENGINE = (
    State.NEW,
    State.FINDING,
    State.FENCING,
    State.ENCODING,
    State.OFFERED,
    State.WAITING,
    State.LOOKUP,
)
