"""The client: publish a request, stream its answer, resume it, cancel it.

A stream survives the loss of this connection, of the owner, of any engine: every event has a number, the client
says which one it lacks (`Want`), ignores what it has, and so sees each event exactly once. Source: design 2.6, 3.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from pipeline import blob
from pipeline.batch import BatchReader
from pipeline.bus import Bus
from pipeline.clockwork import every
from pipeline.errors import ErrorCode, RequestError, TidemillError, TransientError
from pipeline.headers import format_headers, parse_headers
from pipeline.topology import Topology

WINDOW_BYTES = 1 << 20  # credit given with every Want. Source: facts-bus 11.8
# A request that was accepted ends within 5 s of its deadline, and says so every 5 s before its first token; a resumed
# one is found by its new owner after the broker's ack_wait. What is silent for longer is lost. Source: ours
SILENCE_PAST_DEADLINE_S = 15.0
RESUME_SILENCE_S = 60.0
# With one Msg-Id: the broker drops what it has already. A storing broker answers in milliseconds, so two seconds mean
# that the message or its answer was lost; without a connection four tries span 0.6 s, a few reconnects. Source: ours
LAST_WANTS_S = 0.01  # ours; a request stays with its owner so much longer
_PUBLISH_TRIES = 4
_ACK_TIMEOUT_S = 2.0
# Ends of a whole request. One that ends so before it was encoded has one stream, however many choices it asked for.
_TOLD_ONCE = frozenset({*ErrorCode, "abort"})
_FULL = (10077, 10122)  # stream or tenant limit reached. Source: nats-errors


class StreamLostError(TidemillError):
    """Nobody knows this request (any more): it ended long ago, or never existed."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a stream. `body`: the protocol's own JSON, not decoded. `end`: how this choice ended, else ''.

    `number` is None for notes (acceptance, progress, timeline), which are not part of the answer.
    """

    body: bytes
    number: int | None
    attempt: int
    choice: int = 0
    end: str = ""

    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)


class _Json(msgspec.Struct):
    a: int
    event: msgspec.Raw
    n: int | None = None
    c: int = 0
    end: str = ""


@dataclass(eq=False)
class Stream:
    """One request's events, in order, each once. Iterate it; it ends after the last choice's end."""

    client: Client
    rid: str
    tag: int
    num_choices: int = 1
    reply: str = ""
    following: list[int] = field(default_factory=list)  # next event number, per choice
    want_subject: str = ""
    _queue: asyncio.Queue[Event | Exception | None] = field(default_factory=asyncio.Queue)
    _attempt: int = 0
    _ended: set[int] = field(default_factory=set)
    silence_s: float = RESUME_SILENCE_S  # after so much of it the stream is lost
    _queued_bytes: int = 0  # arrived and not yet read: no credit is given for them
    _read_bytes: int = 0  # since the last Want
    _gap_told_at: float = 0.0
    heard_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.following = self.following or [0] * self.num_choices

    @property
    def ended(self) -> bool:
        """Whether every choice has ended."""
        return len(self._ended) >= self.num_choices

    async def __aiter__(self) -> AsyncIterator[Event]:
        while (event := await self._queue.get()) is not None:
            if isinstance(event, Exception):
                raise event
            self._read(event)
            yield event

    @property
    def window_bytes(self) -> int:
        """Credit: what a whole window has left beside the events that wait to be read."""
        return max(WINDOW_BYTES - self._queued_bytes, 1)

    def _read(self, event: Event) -> None:
        if event.number is None:
            return
        self._queued_bytes -= len(event.body)
        self._read_bytes += len(event.body)
        if self._read_bytes > WINDOW_BYTES // 2 and not self.ended:
            self.want()

    def take(self, event: Event, want_subject: str) -> None:
        """An event from the bus: passed on if it is the next one, asked for again if one is missing."""
        self.heard_at = time.monotonic()
        if want_subject:
            self.want_subject = want_subject
        if event.number is None:
            self._note(event)
        elif event.choice >= self.num_choices:
            pass  # not asked for: `resume` named fewer choices than the request has
        elif event.attempt < self._attempt or event.number < self.following[event.choice]:
            pass  # known already, or of an attempt that was given up
        elif event.number > self.following[event.choice]:
            self._gap()
        else:
            self._next(event)

    def _note(self, event: Event) -> None:
        if event.body.startswith(b'{"type":"request_unknown"'):
            self.client.want_anyone(self)
        elif not self.ended:
            self._queue.put_nowait(event)

    def _next(self, event: Event) -> None:
        self._attempt = event.attempt
        self.following[event.choice] += 1
        self._queued_bytes += len(event.body)
        self._queue.put_nowait(event)
        if event.end:
            self._ended.add(event.choice)
            if event.number == 0 and event.end in _TOLD_ONCE and not any(self.following[1:]):
                # over before it was known how many choices there are: choice 0 speaks for all
                self._ended.update(range(self.num_choices))
                self.following = [1] * self.num_choices
        if self.ended:
            self.client.want_later(self)
            self._queue.put_nowait(None)
            self.client.forget(self)

    def _gap(self) -> None:
        now = time.monotonic()
        if now - self._gap_told_at > self.client.limits.resend_after_s:
            self._gap_told_at = now
            self.want(resend=True)

    def want(self, *, resend: bool = False) -> None:
        """Acknowledge, give credit, and (resend) ask for everything from the next event on."""
        self._read_bytes = 0
        self.client.want(self, resend=resend)

    def fail(self, error: Exception) -> None:
        """End the iteration with an error."""
        self._queue.put_nowait(error)
        self.client.forget(self)


class Client:
    """One connection of one tenant. `async with Client.connected(...)`, or `connect` and `close`."""

    def __init__(self, bus: Bus, tenant: str, *, batch: bool) -> None:
        self._bus = bus
        self.tenant = tenant
        self.limits = bus.topology.limits
        self._batch = batch
        self._connection = secrets.token_hex(16)
        self._inbox = f"_INBOX.{self._connection}"
        self._streams: dict[str, Stream] = {}  # by last token of the reply subject
        self._tags: dict[int, Stream] = {}
        self._acks: dict[str, asyncio.Future[tuple[bytes, bytes | None]]] = {}
        self._serial = 0
        self._last_wants: list[Stream] = []
        self._decode_json = msgspec.json.Decoder(_Json).decode
        self._batches = BatchReader()
        bus.subscribe(f"{self._inbox}.ack.*", self._acked)
        bus.subscribe(f"{self._inbox}.s.*", self._event)
        bus.subscribe(f"{self._inbox}.batch", self._events)
        bus.on_reconnect(self._resume_all)
        self._watch = asyncio.get_running_loop().create_task(every(self.limits.want_renew_s / 4, self._renew))

    @classmethod
    async def connect(
        cls, urls: Sequence[str], tenant: str = "default", *, topology: Topology | None = None, batch: bool = False
    ) -> Client:
        """Connect. batch: events of all streams of this connection come in one message per tick (cheaper).

        Raises: SetupError when no broker answers.
        """
        bus = await Bus.connect(urls, f"client-{secrets.token_hex(4)}", topology or Topology.load(), single=True)
        return cls(bus, tenant, batch=batch)

    async def close(self) -> None:
        """Close the connection. Open streams end with an error here; their requests are cancelled after 30 s."""
        self._watch.cancel()
        if self._last_wants:
            self._send_last_wants()
            await self._bus.flush()
        for stream in [*self._streams.values()]:
            stream.fail(StreamLostError("the client was closed"))
        await self._bus.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def publish(
        self,
        body: bytes | Mapping[str, Any],
        *,
        protocol: str = "chat_completions",
        request_class: str = "interactive",
        timeout_s: float | None = None,
        rid: str | None = None,
        timeline: bool = False,
    ) -> Stream:
        """Publish a request; returns when the broker has stored it.

        Raises: RequestError (payload_too_large naming both numbers; overloaded), TransientError (no broker).
        """
        data = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
        if len(data) > self.limits.max_body_bytes:
            raise blob.too_large(len(data), self.limits.max_body_bytes)
        stream = self._open(rid or secrets.token_hex(16), num_choices=_choices(body))
        headers = {
            "Nats-Msg-Id": f"{self.tenant}:{stream.rid}",
            "Tm-Protocol": protocol,
            "Tm-Reply": stream.reply,
            "Tm-Window": str(WINDOW_BYTES),
        }
        stream.silence_s = (timeout_s or self.limits.default_timeout_s) + SILENCE_PAST_DEADLINE_S
        if timeout_s is not None:
            headers["Tm-Timeout"] = repr(timeout_s)
        if timeline:
            headers["Tm-Timeline"] = "1"
        if self._batch:
            headers["Tm-Batch"] = str(stream.tag)
        try:
            if len(data) > self._bus.max_inline_bytes:
                headers["Tm-Blob"] = (await blob.put(self._bus, self.tenant, stream.rid, "body", data)).text()
                data = b""
            subject = self._bus.topology.subject("intake", request_class=request_class, tenant=self.tenant)
            await self._store(subject, data, format_headers(headers))
        except BaseException:
            self.forget(stream)
            raise
        return stream

    def resume(self, rid: str, following: Sequence[int] = (0,)) -> Stream:
        """Take up a request's stream from the events numbered `following` (per choice)."""
        stream = self._open(rid, num_choices=len(following))
        stream.following = list(following)
        self.want_anyone(stream)
        return stream

    def cancel(self, rid: str) -> None:
        """Cancel a request wherever it is; its stream then ends with `abort`."""
        subject = self._bus.topology.subject("cancel", tenant=self.tenant)
        self._bus.publish(subject, json.dumps({"rid": rid}).encode())

    async def cancel_and_wait(self, rid: str, timeout_s: float = 1.0) -> bool:
        """Cancel and say whether an owner has answered."""
        subject = self._bus.topology.subject("cancel", tenant=self.tenant)
        try:
            await self._bus.ask(subject, json.dumps({"rid": rid}).encode(), timeout_s)
        except TransientError:
            return False
        return True

    def _open(self, rid: str, num_choices: int) -> Stream:
        self._serial += 1
        stream = Stream(self, rid, self._serial, num_choices)
        stream.reply = f"{self._inbox}.batch" if self._batch else f"{self._inbox}.s.{self._serial}"
        self._streams[str(self._serial)] = stream
        self._tags[self._serial] = stream
        return stream

    def forget(self, stream: Stream) -> None:
        """No more events for this stream."""
        self._streams.pop(str(stream.tag), None)
        self._tags.pop(stream.tag, None)
        self._batches.forget(stream.tag)

    async def _store(self, subject: str, data: bytes, headers: bytes) -> None:
        """Publish to intake until the broker has acknowledged it."""
        for attempt in range(_PUBLISH_TRIES):
            answer = await self._ask_ack(subject, data, headers)
            if answer is None:
                await asyncio.sleep(0.1 * attempt)
                continue
            error = answer.get("error")
            if error is None:
                return
            if error.get("err_code") in _FULL or "maximum" in str(error.get("description")):
                raise RequestError(ErrorCode.OVERLOADED, f"intake is full: {error.get('description')}")
            raise TransientError(f"the broker did not store the request: {error.get('description')}")
        raise TransientError("the broker did not acknowledge the request (is a tidemill worker's JetStream there?)")

    async def _ask_ack(self, subject: str, data: bytes, headers: bytes) -> dict[str, Any] | None:
        self._serial += 1
        token = str(self._serial)
        future: asyncio.Future[tuple[bytes, bytes | None]] = asyncio.get_running_loop().create_future()
        self._acks[token] = future
        try:
            self._bus.data.publish_nowait(subject, data, f"{self._inbox}.ack.{token}", headers)
            payload, raw = await asyncio.wait_for(future, _ACK_TIMEOUT_S)
        except (TimeoutError, ConnectionError):
            return None
        finally:
            del self._acks[token]
        if parse_headers(raw)[0] == 503:
            return None
        answer: dict[str, Any] = json.loads(payload)
        return answer

    def _acked(self, subject: str, _reply: str, payload: bytes, headers: bytes | None) -> None:
        future = self._acks.get(subject.rsplit(".", 1)[-1])
        if future is not None and not future.done():
            future.set_result((payload, headers))

    # --- events and wants

    def _event(self, subject: str, reply: str, payload: bytes, headers: bytes | None) -> None:
        stream = self._streams.get(subject.rsplit(".", 1)[-1])
        if stream is None:
            return
        if not payload and headers and parse_headers(headers)[0] == 503:
            self.want_anyone(stream)  # the owner is gone: nobody listens on its want subject
            return
        message = self._decode_json(payload)
        event = Event(bytes(message.event), message.n, message.a, message.c, message.end)
        stream.take(event, reply)

    def _events(self, _subject: str, reply: str, payload: bytes, _headers: bytes | None) -> None:
        if payload.startswith(b"{"):
            self._unknown(json.loads(payload)["event"])
            return
        for tag, attempt, choice, number, end, body in self._batches.read(reply, payload):
            stream = self._tags.get(tag)
            if stream is not None:
                stream.take(Event(body, number, attempt, choice, end), reply)

    def _unknown(self, note: dict[str, Any]) -> None:
        """An owner that does not know a request cannot know its tag either: it answers in JSON."""
        for stream in list(self._streams.values()):
            if note.get("type") == "request_unknown" and note.get("rid") == stream.rid:
                self.want_anyone(stream)

    def want(self, stream: Stream, *, resend: bool) -> None:
        """Send a stream's Want to its owner; without one, to everyone."""
        if not stream.want_subject:
            self.want_anyone(stream)
            return
        # no responders on this reply subject tell that the owner is gone
        gone = f"{self._inbox}.s.{stream.tag}"
        self._bus.publish(stream.want_subject, self._want_body(stream, resend=resend), gone)

    def want_later(self, stream: Stream) -> None:
        """The last acknowledgement of a stream that has ended: nobody waits for it, so several may share a write."""
        if not self._last_wants:
            asyncio.get_running_loop().call_later(LAST_WANTS_S, self._send_last_wants)
        self._last_wants.append(stream)

    def _send_last_wants(self) -> None:
        streams, self._last_wants = self._last_wants, []
        for stream in streams:
            self.want(stream, resend=False)

    def want_anyone(self, stream: Stream) -> None:
        """Broadcast a stream's Want: whoever owns the request answers with its events."""
        stream.want_subject = ""
        self._bus.publish(self._bus.topology.subject("want_any"), self._want_body(stream, resend=True))

    def _want_body(self, stream: Stream, *, resend: bool) -> bytes:
        want = {
            "rid": stream.rid,
            "next": stream.following,
            "window_bytes": stream.window_bytes,
            "reply": stream.reply,
            "resend": resend,
            "tag": stream.tag if self._batch else -1,
        }
        return msgspec.json.encode(want)

    def _resume_all(self) -> None:
        for stream in self._streams.values():
            stream.want(resend=True)

    def _renew(self) -> None:
        """A Want at least every 10 s; to everyone when a stream has been silent as long."""
        now = time.monotonic()
        for stream in list(self._streams.values()):
            silent_s = now - stream.heard_at
            if silent_s > stream.silence_s:
                stream.fail(
                    StreamLostError(f"nothing was heard of {stream.rid} for {silent_s:.0f} s: no codec worker lives")
                )
            elif silent_s > self.limits.want_renew_s:
                self.want_anyone(stream)
            else:
                stream.want()


def _choices(body: bytes | Mapping[str, Any]) -> int:
    """How many choices a body asks for; a body that cannot be read is answered as one."""
    if isinstance(body, bytes):
        try:
            body = json.loads(body)
        except ValueError:
            return 1
    wanted = body.get("n", 1) if isinstance(body, Mapping) else 1
    return wanted if isinstance(wanted, int) and 1 <= wanted <= 128 else 1
