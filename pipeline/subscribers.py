"""Where events go: checked reply subjects, and one batching subscriber per connection."""

from __future__ import annotations

import asyncio

from pipeline.bus import Bus
from pipeline.delivery import BatchSubscriber, Subscriber
from pipeline.errors import RequestError
from pipeline.request import check_reply

MAX_BATCHES = 10_000  # a new connection makes a new reply; old ones hold nothing between ticks, so all may go


class Subscribers:
    """The reply subjects that one owner process publishes to."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._want_subject = bus.topology.subject("want", worker=bus.worker)
        self._out_prefix = bus.topology.subject("events", tenant="-", connection="-").removesuffix("-.-")
        self._batches: dict[str, BatchSubscriber] = {}
        self._soon = asyncio.get_running_loop().call_soon

    def check(self, reply: str, tenant: str) -> str:
        """The reply, if this tenant may have events sent there. Raises: RequestError(invalid_request)."""
        return check_reply(reply, tenant, self._out_prefix)

    def is_inbox(self, reply: str) -> bool:
        """Whether anybody may be answered there: an inbox belongs to no tenant."""
        try:
            return bool(self.check(reply, "-")) and reply.startswith("_INBOX.")
        except RequestError:
            return False

    def get(self, reply: str, tag: int) -> Subscriber:
        """The way to a checked reply subject; requests of one batching connection (tag >= 0) share one."""
        if tag < 0:
            return Subscriber(self._bus.publish, reply, self._want_subject)
        batch = self._batches.get(reply)
        if batch is None:
            if len(self._batches) > MAX_BATCHES:
                self._batches.clear()
            batch = BatchSubscriber(
                self._bus.publish, reply, self._want_subject, self._bus.max_inline_bytes, self._soon
            )
            self._batches[reply] = batch
        return batch
