"""A thousand streams and more at once: CPU time per token, from decode's frame to bytes at the subscriber.

The subscriber is one connection of this process in the batch form (docs/protocol.md). It does what any must: decode
the batch, find the stream, check the event's number, keep its bytes, say Want. What it keeps of every stream is the
last event; a sample is checked to be JSON after the timed part.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from bench.processes import BROKER, Fleet, spent
from bench.prompts import body
from pipeline.batch import BatchReader
from pipeline.bus import Bus
from pipeline.headers import format_headers
from pipeline.topology import Topology

TENANT = "default"
WINDOW_BYTES = 1 << 20  # credit with every Want, as pipeline.client gives
SAMPLE_EVERY = 1_009  # events; a prime, so that the sample walks through the streams
POLL_S = 0.01
# 500 requests a second: arriving requests are bench.cost's subject, here they only must not stand in the tokens' way
RAMP_REQUESTS, RAMP_PAUSE_S = 10, 0.02


class Subscriber:
    """One connection that publishes many requests and takes all their events."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._inbox = f"_INBOX.{secrets.token_hex(8)}"
        self._read = BatchReader().read
        # by tag: what is known of each stream, in lists because a look-up costs half of an object's
        self._rids: list[str] = []
        self._next: list[int] = []  # number of the event that comes next
        self._credit_bytes: list[int] = []  # left until the next Want; -1: none said yet
        self.last: list[bytes] = []
        self.ends: list[str] = []
        self.samples: list[bytes] = []
        self.num_events = 0
        self.num_bytes = 0
        self.num_begun = 0
        self.faults: list[str] = []
        bus.subscribe(f"{self._inbox}.batch", self._events)
        bus.subscribe(f"{self._inbox}.ack", self._stored)

    @property
    def num_ended(self) -> int:
        """Streams that had their last event."""
        return len(self.ends)

    def publish(self, max_tokens: int) -> None:
        """Send one request."""
        rid, tag = secrets.token_hex(16), len(self._rids)
        headers = {"Nats-Msg-Id": f"{TENANT}:{rid}", "Tm-Reply": f"{self._inbox}.batch", "Tm-Batch": str(tag)}
        self._rids.append(rid)
        self._next.append(0)
        self._credit_bytes.append(-1)
        self.last.append(b"")
        subject = self._bus.topology.subject("intake", request_class="interactive", tenant=TENANT)
        self._bus.data.publish_nowait(subject, body(max_tokens), f"{self._inbox}.ack", format_headers(headers))

    def check(self) -> None:
        """Raises: RuntimeError when an event was lost or came twice, or a request was not stored."""
        if self.faults:
            raise RuntimeError(f"{len(self.faults)} faults, the first: {self.faults[0]}")

    def _stored(self, _subject: str, _reply: str, payload: bytes, _headers: bytes | None) -> None:
        if b'"error"' in payload or not payload:
            self.faults.append(f"a request was not stored: {payload!r}")

    def _events(self, _subject: str, want: str, payload: bytes, _headers: bytes | None) -> None:
        following, last, credit_bytes, counted = self._next, self.last, self._credit_bytes, 0
        for tag, _attempt, _choice, number, end, event in self._read(want, payload):
            if number is None:
                continue  # accepted, progress
            if number != following[tag]:
                self.faults.append(f"stream {tag}: event {number} came in the place of {following[tag]}")
                continue
            following[tag] = number + 1
            last[tag] = event
            credit_bytes[tag] = left = credit_bytes[tag] - len(event)
            counted += 1
            if end or left < 0:
                self._want(tag, end, want)
        self.num_events += counted
        self.num_bytes += len(payload)
        if counted and self.num_events // SAMPLE_EVERY > len(self.samples):
            self.samples.append(event)

    def _want(self, tag: int, end: str, subject: str) -> None:
        """Acknowledge and give credit: at the first event, after half of the credit, and at the end."""
        self.num_begun += self._next[tag] == 1
        if end:
            self.ends.append(end)
        self._credit_bytes[tag] = WINDOW_BYTES // 2
        want = {
            "rid": self._rids[tag],
            "next": self._next[tag],
            "window_bytes": WINDOW_BYTES,
            "reply": f"{self._inbox}.batch",
        }
        self._bus.publish(subject, msgspec.json.encode(want))


@dataclass(frozen=True, slots=True)
class TokenRate:
    """CPU microseconds per token by role (the subscriber among them) in the steady part, and what passed in it."""

    by_role: dict[str, float]
    tokens_per_s: float
    event_bytes: int  # median of the events, without what the batch adds
    wire_bytes: float  # mean, with it

    @property
    def total(self) -> float:
        """From frame to bytes at the subscriber: codec (it parses), broker, subscriber. Decode has made its frame."""
        return sum(self.by_role[role] for role in ("codec", BROKER, "subscriber"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much to run. The timed part begins when every stream has begun and `warm_tokens` have come."""

    num_streams: int
    max_tokens: int
    warm_tokens: int  # the stub draws from 100,000 words, each of which the codec meets once for the first time
    longest_s: float  # of the timed part; it also ends with the first stream
    timeout_s: float = 90.0


async def token_rate(fleet: Fleet, load: Load) -> TokenRate:
    """Run the streams and take the CPU times of their steady part.

    Raises: TimeoutError; RuntimeError when a stream lacks an event, has one twice, or ends otherwise than by length.
    """
    bus = await Bus.connect([fleet.url], "subscriber", Topology.load(), single=True)
    subscriber = Subscriber(bus)
    async with _told_how_far(load, subscriber):
        for number in range(load.num_streams):
            subscriber.publish(load.max_tokens)
            if number % RAMP_REQUESTS == 0:
                await asyncio.sleep(RAMP_PAUSE_S)
        while subscriber.num_begun < load.num_streams or subscriber.num_events < load.warm_tokens:
            subscriber.check()
            await asyncio.sleep(POLL_S)  # an event per token would be part of what is measured
        rate = await _steady(fleet, subscriber, load.longest_s)
        while subscriber.num_ended < load.num_streams:
            subscriber.check()
            await asyncio.sleep(POLL_S)
    _check_answers(subscriber)
    await bus.close()
    return rate


@asynccontextmanager
async def _told_how_far(load: Load, subscriber: Subscriber) -> AsyncIterator[None]:
    """A timeout that says what is missing."""
    try:
        async with asyncio.timeout(load.timeout_s):
            yield
    except TimeoutError as error:
        message = f"of {load.num_streams} streams {subscriber.num_begun} began and {subscriber.num_ended} ended"
        raise TimeoutError(f"{message} within {load.timeout_s:g} s, {subscriber.num_events} events came") from error


async def _steady(fleet: Fleet, subscriber: Subscriber, longest_s: float) -> TokenRate:
    if subscriber.num_ended > 0:
        raise RuntimeError("the first stream ended before the last one began: let them run longer")
    cpu, own = fleet.cpu(), time.process_time_ns()
    start, events, num_bytes = time.perf_counter(), subscriber.num_events, subscriber.num_bytes
    while subscriber.num_ended == 0 and time.perf_counter() - start < longest_s:  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
    used = spent(cpu, fleet.cpu()) | {"subscriber": time.process_time_ns() - own}
    seconds, events = time.perf_counter() - start, subscriber.num_events - events
    by_role = {role: ns / events / 1e3 for role, ns in used.items()}
    event_bytes = int(statistics.median(map(len, subscriber.samples)))
    return TokenRate(by_role, events / seconds, event_bytes, (subscriber.num_bytes - num_bytes) / events)


def _check_answers(subscriber: Subscriber) -> None:
    """All streams ended by their length, with each number once (or `check` would have said so), and events are JSON."""
    if set(subscriber.ends) != {"length"}:
        raise RuntimeError(f"streams ended by {sorted(set(subscriber.ends))}, not all by their length")
    for event in (*subscriber.samples, *subscriber.last):
        json.loads(event)
