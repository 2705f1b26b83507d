"""Intake messages in, checked requests out; and how many to ask for.

What cannot be answered (no usable reply) is taken off the queue, counted and logged; what is malformed is answered
with a named error and taken off; everything else becomes a request that will end.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from pipeline.bus import Bus
from pipeline.errors import RequestError
from pipeline.headers import HeaderError, parse_headers
from pipeline.intake import Intake
from pipeline.jetstream import Delivery, parse_ack
from pipeline.membership import Membership
from pipeline.metrics import count
from pipeline.request import Head, read_head
from pipeline.stage import CodecStage
from pipeline.subscribers import Subscribers

log = structlog.get_logger()

Take = Callable[[Head, Delivery, bytes], None]


class Admission:
    """The intake side of one owner process: standing pulls, header checks, room."""

    def __init__(
        self, bus: Bus, membership: Membership, codec: CodecStage, subscribers: Subscribers, take: Take
    ) -> None:
        self._bus = bus
        self._membership = membership
        self._codec = codec
        self._subscribers = subscribers
        self._take = take
        self._intakes = [Intake(bus, consumer, self._message) for consumer in bus.topology.consumers.values()]

    def top_up(self, waiting_requests: int, waiting_bytes: int) -> None:
        """Ask for this worker's share of engine credit plus what may wait here (decisions/0003).

        waiting: requests in hand that no engine has taken yet, and the bytes of their bodies.
        """
        limits = self._bus.topology.limits
        room = 0
        if waiting_bytes < limits.waiting_bytes:
            owners = max(1, len(self._membership.fresh("codec")))
            free = [sum(b.free_slots for b in self._membership.fresh(role)) for role in ("prefill", "decode")]
            room = min(free) // owners + limits.waiting_requests - waiting_requests
        # half for each class: a standing pull of one that is idle must not keep the other waiting
        for intake in self._intakes:
            intake.top_up(max(room, 0) // len(self._intakes))

    def stop(self) -> None:
        """Ask for nothing more; what still arrives is given back at once."""
        for intake in self._intakes:
            intake.stop()

    def _message(self, subject: str, ack: str, payload: bytes, raw_headers: bytes | None) -> None:
        tenant = subject.rsplit(".", 1)[-1]
        try:
            headers = parse_headers(raw_headers or b"")[2]
            reply = self._subscribers.check(headers.get("Tm-Reply", ""), tenant)
        except (RequestError, HeaderError) as error:
            count("requests_unanswerable")
            log.warning("request without a usable reply", subject=subject, error=str(error))
            self._bus.publish(ack, b"+TERM")
            return
        try:
            head = read_head(subject, headers, reply, self._bus.topology.limits)
        except RequestError as error:
            self._refuse(headers, reply, error)
            self._bus.publish(ack, b"+TERM")
            return
        self._take(head, parse_ack(ack), payload)

    def refuse(self, head: Head, error: RequestError) -> None:
        """Answer a request that cannot be taken with a named error."""
        failure = self._codec.failure(head.protocol, error.code, error.message, error.param)
        subscriber = self._subscribers.get(head.reply, head.tag)
        subscriber.event(subscriber.prefix(head.tag, 0, 0), 0, failure, error.code)
        subscriber.flush()

    def _refuse(self, headers: dict[str, str], reply: str, error: RequestError) -> None:
        count("requests_malformed")
        failure = self._codec.failure(headers.get("Tm-Protocol", ""), error.code, error.message, error.param)
        tag = _readable_tag(headers.get("Tm-Batch", ""))
        subscriber = self._subscribers.get(reply, tag)
        subscriber.event(subscriber.prefix(max(tag, 0), 0, 0), 0, failure, error.code)
        subscriber.flush()


def _readable_tag(text: str) -> int:
    """The tag of a refused request, so that its failure comes in the form that was asked for; -1 if there is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 and int(text) < 1 << 64 else -1
