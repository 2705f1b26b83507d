"""What a bus client is: nats-py's client with synchronous publish and subscribe, and its plain implementation.

`Client` is the interface and what both implementations share; `StockClient` runs it over nats-py's own queues,
tasks and flusher; `pipeline.fastnats.FastClient` is the hot path. One contract test runs on both.
Source: facts-bus 8.1, 10, 11.1.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any

import nats.aio.client
from nats import errors
from nats.aio.client import PING_PROTO
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.protocol import command

from pipeline.fastparse import OnMessage
from pipeline.headers import format_headers

log = logging.getLogger(__name__)

# A publisher that never waits may run ahead of the socket by this many times `pending_size` (2 MiB) before it is
# refused: 16 MiB is a second of the fastest frame traffic measured (facts-bus 4.1). Source: ours.
OVERRUN_FACTOR = 8
LARGE_PAYLOAD_BYTES = 16_384  # from here on three writes are cheaper than one copy. Source: measured, ours
CACHED_SUBJECTS = 4_096  # facts-bus 2.7: at most 512 hot subjects per publisher

_SUBSCRIBABLE = re.compile(r"(?:>|(?:[^\s.*>]+|\*)(?:\.(?:[^\s.*>]+|\*))*(?:\.>)?)")
_PUBLISHING = (nats.aio.client.Client.CONNECTED, nats.aio.client.Client.DRAINING_SUBS)
_BLANK = re.compile(rb"[\s\x00]")
_CALLBACKS = (
    "error_cb", "disconnected_cb", "closed_cb", "discovered_server_cb", "reconnected_cb", "lame_duck_mode_cb",
)  # fmt: skip


class BusDisconnected(ConnectionError):  # noqa: N818 -- a state of the world more than an error
    """Nothing was sent: the client is not connected. Publish again later; nothing is buffered over a reconnect."""


class BusOverrun(ConnectionError):  # noqa: N818 -- as above
    """Nothing was sent: the socket does not take what was published before. `await drain_if_over()` prevents it."""

    def __init__(self, num_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"{num_bytes} bytes wait for the socket, the limit is {limit_bytes}")
        self.num_bytes = num_bytes
        self.limit_bytes = limit_bytes


class PayloadTooLargeError(ValueError):
    """Nothing was sent: payload and headers exceed the server's max_payload, which would cut the connection."""

    def __init__(self, num_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"message of {num_bytes} bytes, the server's max_payload is {limit_bytes}")
        self.num_bytes = num_bytes
        self.limit_bytes = limit_bytes


def _log_callback_error(error: BaseException, where: str) -> None:
    log.error("callback of %s failed", where, exc_info=error)


class Client(nats.aio.client.Client):
    """A nats-py client with synchronous publish and subscribe. One event loop, one thread.

    `on_callback_error(error, where)` is told of everything that a callback raises (`where`: a subject or the name
    of a nats-py callback); `callback_errors` counts them. The connection lives on.
    """

    after: Client | None = None  # the client whose writes go first (the fast one obeys)

    def __init__(self) -> None:
        super().__init__()
        self.callback_errors = 0
        self.on_callback_error: Callable[[BaseException, str], None] = _log_callback_error
        self._heads: dict[bytes | str, bytes] = {}  # subject -> "PUB subject "
        self._unsent_bytes = 0  # in the socket's own buffer, when it was last written to

    async def connect(  # type: ignore[override]  # every option of nats-py goes through unchanged
        self, servers: str | list[str] = "nats://localhost:4222", **options: Any
    ) -> None:
        """Connect as nats-py does, with its options; its callbacks may raise without harm (facts-bus 10.1)."""
        for name in _CALLBACKS:
            if options.get(name) is not None:
                options[name] = self._guarded(name, options[name])
        await super().connect(servers, **options)

    def subscribe_sync(self, subject: str, callback: OnMessage, queue: str = "") -> Subscription:
        """Call `callback(subject, reply, payload, raw_headers)` for every message; kept over reconnects.

        Raises: BusDisconnected before the first connect and after close, nats.errors.BadSubjectError.
        """
        raise NotImplementedError

    def unsubscribe_sync(self, subscription: Subscription) -> None:
        """Take no more messages; a second time is harmless."""
        sid = subscription._id  # noqa: SLF001 -- the handle's only name for itself
        if sid not in self._subs:
            return
        self._remove_sub(sid)
        subscription._stop_processing()  # noqa: SLF001 -- as Subscription.unsubscribe does
        if self.is_connected:
            self._append(command.unsub_cmd(sid, 0))

    def publish_nowait(
        self, subject: str | bytes, payload: bytes, reply: str | bytes = b"", headers: bytes = b""
    ) -> None:
        """Send at the end of this event-loop tick, together with everything else of the tick.

        `payload` may not change afterwards; `headers` are raw (`format_headers`).
        Raises: BusDisconnected, BusOverrun, PayloadTooLargeError, nats.errors.BadSubjectError. Then nothing is sent.
        """
        if self._status not in _PUBLISHING:
            raise BusDisconnected(f"not connected, nothing sent to {subject!r}")
        size = len(payload) + len(headers)
        if size > self._max_payload:
            raise PayloadTooLargeError(size, self._max_payload)
        if self._pending_data_size + self._unsent_bytes > self._max_pending_size:
            self._refuse_overrun()
        head = self._heads.get(subject) or self._head(subject)
        if reply:
            head = b"%b%b " % (head, _checked(reply))
        head = b"H%b%d %d\r\n%b" % (head, len(headers), size, headers) if headers else b"%b%d\r\n" % (head, size)
        if size < LARGE_PAYLOAD_BYTES:
            self._pending.append(b"%b%b\r\n" % (head, payload))
        else:
            self._pending += (head, payload, b"\r\n")
        self._pending_data_size += len(head) + len(payload) + 2
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += size
        self._kick()

    def push(self) -> None:
        """Write what is pending now, if no other message was read together with the one at hand.

        For what a request waits for: the rest of the handler then runs while it is on its way. Under load, when many
        messages are read at once, their answers still share a write.
        """

    @property
    def buffered_bytes(self) -> int:
        """Published but not yet taken by the socket."""
        return self._pending_data_size

    async def drain_if_over(self) -> None:
        """Wait while more than `pending_size` (an option of `connect`, 2 MiB) is buffered.

        Raises: BusDisconnected if the connection is lost meanwhile.
        """
        if self.buffered_bytes > self._max_pending_size and not await self._drained():
            raise BusDisconnected("connection lost while waiting for the socket")

    async def _drained(self) -> bool:
        """Write what is pending and wait until the socket took most of it; False if the connection is lost."""
        transport = self._transport
        if not self.is_connected or transport is None:
            return False
        self._flush_now()
        try:
            async with asyncio.timeout(self._flush_timeout):
                await transport.drain()  # type: ignore[no-untyped-call]
        except TimeoutError:
            await self._error_cb(errors.FlushTimeoutError())
        except OSError:
            return False
        return not transport.at_eof()

    def callback_failed(self, error: BaseException, where: str) -> None:
        """Count and report what a callback raised."""
        self.callback_errors += 1
        try:
            self.on_callback_error(error, where)
        except Exception:
            log.exception("on_callback_error failed for %s", where)

    def _guarded(self, name: str, callback: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        async def guarded(*arguments: Any) -> None:
            try:
                await callback(*arguments)
            except Exception as error:  # noqa: BLE001 -- facts-bus 10.1, 10.2: it would end reading or reconnecting
                self.callback_failed(error, name)

        return guarded

    def _kick(self) -> None:
        """Have what is pending written soon."""
        raise NotImplementedError

    def _flush_now(self) -> None:
        """Write what is pending."""
        raise NotImplementedError

    def _append(self, line: bytes) -> None:
        self._pending.append(line)
        self._pending_data_size += len(line)
        self._kick()

    def _head(self, subject: str | bytes) -> bytes:
        head = b"PUB %b " % _checked(subject)
        if len(self._heads) >= CACHED_SUBJECTS:
            self._heads.clear()
        self._heads[subject] = head
        return head

    def _refuse_overrun(self) -> None:
        limit = self._max_pending_size * OVERRUN_FACTOR
        if self.buffered_bytes > limit:
            raise BusOverrun(self.buffered_bytes, limit)

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        if not self.is_connected:  # nats-py would write to the dead socket and fail
            self._pending, self._pending_data_size = [], 0
        await super()._close(status, do_cbs)

    def _check_subscribable(self, subject: str, queue: str) -> None:
        if not _SUBSCRIBABLE.fullmatch(subject) or _BLANK.search(queue.encode()):
            raise errors.BadSubjectError
        if self._reading_task is None or self.is_closed or self.is_draining:
            raise BusDisconnected(f"not connected, cannot subscribe to {subject!r}")

    async def _send_ping(self, future: asyncio.Future[bool] | None = None) -> None:
        # nats-py writes PING ahead of what is pending, so that its flush() is no barrier
        self._pongs.append(future or asyncio.get_running_loop().create_future())
        if self.is_connected and self._transport is not None:
            self._flush_now()
            self._transport.write(PING_PROTO)

    async def _process_pong(self) -> None:
        self.take_pong()

    def take_pong(self) -> None:
        """Wake whoever waits in `flush`. One that gave up must not end the read loop, as it does in nats-py."""
        if self._pongs:
            waiting = self._pongs.pop(0)
            if not waiting.done():
                waiting.set_result(True)
            self._pongs_received += 1
            self._pings_outstanding = 0


def _checked(subject: str | bytes) -> bytes:
    """The bytes of a subject to publish to. Raises: nats.errors.BadSubjectError."""
    raw = subject.encode() if isinstance(subject, str) else subject
    if not raw or _BLANK.search(raw):
        raise errors.BadSubjectError
    return raw


class StockClient(Client):
    """The same methods over nats-py's own queues, tasks and flusher."""

    def subscribe_sync(self, subject: str, callback: OnMessage, queue: str = "") -> Subscription:
        """See Client."""
        self._check_subscribable(subject, queue)
        self._sid += 1
        subscription = Subscription(self, self._sid, subject, queue=queue, cb=self._adapted(callback))
        subscription._start(self._error_cb)  # type: ignore[no-untyped-call]  # noqa: SLF001 -- as Client.subscribe does
        self._subs[self._sid] = subscription
        if self.is_connected:
            self._append(command.sub_cmd(subject, queue, self._sid))
        return subscription

    def _adapted(self, callback: OnMessage) -> Callable[[Msg], Awaitable[None]]:
        async def adapted(message: Msg) -> None:
            if message.sid not in self._subs:
                return  # unsubscribed since it was queued
            try:
                callback(message.subject, message.reply, message.data, _raw(message.headers))
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 -- as in FastClient
                self.callback_failed(error, message.subject)

        return adapted

    def _kick(self) -> None:
        if self._flush_queue is not None and self._flush_queue.empty():
            self._flush_queue.put_nowait(asyncio.get_running_loop().create_future())

    def _flush_now(self) -> None:
        if self._pending and self._transport is not None:
            self._transport.writelines(self._pending)
            self._pending, self._pending_data_size = [], 0


def _raw(headers: dict[str, str] | None) -> bytes | None:
    """The raw form of what nats-py parsed."""
    if not headers:
        return None
    status, description = headers.pop("Status", None), headers.pop("Description", "")
    return format_headers(headers, int(status) if status else None, description)
