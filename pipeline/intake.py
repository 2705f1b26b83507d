"""The standing pull of one intake consumer: keeps a number of messages asked for, equal to the room there is.

nats-py's `fetch` creates tasks per message and loses a pull over a reconnect (facts-bus 3.1, 10.8); this keeps
one inbox, asks again when what is outstanding falls below half of the room, and starts over after a reconnect
or when the heartbeat stops.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable

import structlog

from pipeline.bus import Bus
from pipeline.clockwork import ended
from pipeline.errors import SetupError
from pipeline.headers import parse_headers
from pipeline.jetstream import NS, ensure_consumer
from pipeline.metrics import count
from pipeline.topology import ConsumerSpec

log = structlog.get_logger()

PULL_EXPIRES_S = 30  # a pull is renewed at the latest then
HEARTBEAT_S = 2  # the broker says so often that a pull still stands; two missed = pull again

OnIntake = Callable[[str, str, bytes, bytes | None], None]


class Intake:
    """Pulls from one consumer. Call `top_up(room)` whenever room changes; `stop()` asks for nothing more."""

    def __init__(self, bus: Bus, consumer: ConsumerSpec, on_message: OnIntake) -> None:
        self._bus = bus
        self._consumer = consumer
        self._on_message = on_message
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{consumer.stream}.{consumer.name}"
        # unguessable: a reply subject that a publisher may name must never be one of ours
        self._inbox = f"_INBOX.{secrets.token_hex(16)}.pull"
        self._pulls: dict[str, int] = {}  # reply subject -> messages still to come
        self._serial = 0
        self._room = 0
        self._stopped = False
        self._heard_at = 0.0
        self._recreating: asyncio.Task[None] | None = None
        bus.subscribe(f"{self._inbox}.*", self._message)
        bus.on_reconnect(self._start_over)

    @property
    def outstanding(self) -> int:
        """Messages asked for and not yet delivered."""
        return sum(self._pulls.values())

    def top_up(self, room: int) -> None:
        """Say how many more requests this worker could take now."""
        self._room = room
        if self._stopped or room <= 0:
            return
        if self._pulls and self._loop_time() - self._heard_at > 2 * HEARTBEAT_S + 1:
            count("intake_pulls_lost")
            self._pulls.clear()
        outstanding = self.outstanding
        if outstanding * 2 < room:
            self._pull(room - outstanding)

    def stop(self) -> None:
        """Ask for nothing more. What was delivered stays with the owner."""
        self._stopped = True
        self._pulls.clear()

    def _pull(self, batch: int) -> None:
        self._serial += 1
        reply = f"{self._inbox}.{self._serial}"
        request = {"batch": batch, "expires": PULL_EXPIRES_S * NS, "idle_heartbeat": HEARTBEAT_S * NS}
        if self._bus.publish(self._subject, json.dumps(request).encode(), reply):
            self._pulls[reply] = batch
            self._heard_at = self._loop_time()

    def _message(self, subject: str, reply: str, payload: bytes, headers: bytes | None) -> None:
        self._heard_at = self._loop_time()
        if not reply.startswith("$JS.ACK."):
            self._status(subject, headers)
            return
        self._delivered_one()
        if self._stopped:
            # asked for before the stop: give it back at once
            self._bus.publish(reply, b"-NAK")
            return
        self._on_message(subject, reply, payload, headers)

    def _delivered_one(self) -> None:
        # the broker serves pulls in order, so the oldest one shrinks
        for pull in self._pulls:
            self._pulls[pull] -= 1
            if self._pulls[pull] <= 0:
                del self._pulls[pull]
            return

    def _status(self, subject: str, headers: bytes | None) -> None:
        status, description, _fields = parse_headers(headers or b"")
        if status == 100:
            return  # idle heartbeat
        self._pulls.pop(subject, None)
        if status in (404, 408):
            self.top_up(self._room)
            return
        count("intake_pulls_refused")
        log.warning("intake pull ended", consumer=self._consumer.name, status=status, description=description)
        asyncio.get_running_loop().call_later(0.5, self._recreate)

    def _recreate(self) -> None:
        if self._stopped:
            return
        self._recreating = asyncio.get_running_loop().create_task(self._ensure_and_pull())
        self._recreating.add_done_callback(ended)

    async def _ensure_and_pull(self) -> None:
        try:
            await ensure_consumer(self._bus, self._consumer)
        except SetupError as error:
            log.warning("consumer not available", consumer=self._consumer.name, error=str(error))
            asyncio.get_running_loop().call_later(1.0, self._recreate)
            return
        self.top_up(self._room)

    def _start_over(self) -> None:
        self._pulls.clear()
        self.top_up(self._room)

    @staticmethod
    def _loop_time() -> float:
        return asyncio.get_running_loop().time()
