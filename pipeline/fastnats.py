"""The hot path over nats-py: synchronous dispatch, one write per event-loop tick, refusal while disconnected.

`FastClient` keeps connect, auth, TLS, reconnect, request and JetStream of nats-py and replaces what costs CPU per
message: the parser (`pipeline.fastparse`), the reading task between socket and parser, the queue and task per
subscription, and the flusher task. `make_client` is the switch to nats-py as it is.

Order: what one client publishes leaves in order, `publish` and `publish_nowait` alike; what one connection receives
is dispatched in order to `subscribe_sync` callbacks, whatever the subject (facts-spikes 6.3).
Source: facts-bus 0.2, 2.2, 2.3, 8.1, 10, 11.1.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from importlib.metadata import version
from typing import Any
from urllib.parse import ParseResult

from nats.aio.client import DEFAULT_BUFFER_SIZE, PONG_PROTO, Srv
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.protocol import command

from pipeline.busclient import BusDisconnected, BusOverrun, Client, PayloadTooLargeError, StockClient
from pipeline.fastparse import FastParser, OnMessage
from pipeline.headers import HeaderError, format_headers, parse_headers

__all__ = [
    "BusDisconnected",
    "BusOverrun",
    "Client",
    "FastClient",
    "HeaderError",
    "OnMessage",
    "PayloadTooLargeError",
    "StockClient",
    "format_headers",
    "make_client",
    "parse_headers",
]

SUPPORTED = ((2, 16), (2, 17))  # nats-py from, below; pyproject.toml pins the same
# What we use of nats-py beyond its public API; a test asserts that each is there and is what we take it for.
PRIVATE_CLIENT = (
    "_attempt_reconnect", "_close", "_connect_to_server", "_flush_pending", "_process_msg", "_process_pong",
    "_read_loop", "_remove_sub", "_send_ping",
)  # fmt: skip
PRIVATE_STATE = (
    "_error_cb", "_flush_queue", "_flush_timeout", "_max_payload", "_max_pending_size", "_pending",
    "_pending_data_size", "_pings_outstanding", "_pongs", "_pongs_received", "_ps", "_reading_task", "_sid",
    "_status", "_subs", "_transport",
)  # fmt: skip
PRIVATE_TRANSPORT = ("_bare_io_reader", "_bare_io_writer", "_io_reader", "_io_writer")

# Pieces smaller than this on average are joined into one write; larger ones are handed over as they are: a copy costs
# more than uvloop's handling of a buffer. Source: measured, ours.
JOINED_BYTES = 4_096


class _Wire(asyncio.StreamReaderProtocol):
    """Hands received bytes straight to the parser; keeps them for the reading task when that must come first.

    `held_bytes` lie in the stream reader. The synchronous way is open only while there are none, so order holds.
    """

    def __init__(self, reader: asyncio.StreamReader) -> None:
        super().__init__(reader)
        self.parser: FastParser | None = None
        self.held_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Dispatch, or keep."""
        parser = self.parser
        if parser is not None and parser.open and not parser.busy and not self.held_bytes:
            data = parser.feed(data)
            if not data:
                return
        self.held_bytes += len(data)
        super().data_received(data)


class _FastTransport(TcpTransport):
    """nats-py's TCP transport over a `_Wire`."""

    wire: _Wire
    socket: asyncio.Transport

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        loop = asyncio.get_running_loop()
        wire, reader = self._new_wire(buffer_size)
        async with asyncio.timeout(connect_timeout):
            transport, _ = await loop.create_connection(lambda: wire, uri.hostname or "", uri.port or 0)
        self._adopt(transport, wire, reader)
        self._bare_io_reader, self._bare_io_writer = self._io_reader, self._io_writer

    async def connect_tls(
        self, uri: str | ParseResult, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: int
    ) -> None:
        name = uri if isinstance(uri, str) else uri.hostname
        wire, reader = self._new_wire(buffer_size)
        async with asyncio.timeout(connect_timeout):
            transport = await asyncio.get_running_loop().start_tls(self.socket, wire, ssl_context, server_hostname=name)
        if transport is None:  # what the type allows
            raise ConnectionError("connection lost during the TLS handshake")
        self._adopt(transport, wire, reader)

    async def read(self, buffer_size: int) -> bytes:
        data = await super().read(buffer_size)
        self.wire.held_bytes -= len(data)
        return bytes(data)

    async def readline(self) -> bytes:
        line = await super().readline()  # type: ignore[no-untyped-call]
        self.wire.held_bytes -= len(line)
        return bytes(line)

    @staticmethod
    def _new_wire(buffer_size: int) -> tuple[_Wire, asyncio.StreamReader]:
        reader = asyncio.StreamReader(limit=buffer_size)
        return _Wire(reader), reader

    def _adopt(self, transport: asyncio.Transport, wire: _Wire, reader: asyncio.StreamReader) -> None:
        self.socket, self.wire = transport, wire
        self._io_reader = reader
        self._io_writer = asyncio.StreamWriter(transport, wire, reader, asyncio.get_running_loop())


class FastClient(Client):
    """Dispatches from the socket callback and writes once per tick."""

    _transport: _FastTransport | None
    _ps: FastParser  # type: ignore[assignment]  # nats-py calls its reset() and parse() only

    def __init__(self) -> None:
        super().__init__()
        self.listeners: dict[bytes, OnMessage] = {}  # by subscription id, as its digits
        self._ps = FastParser(self)
        self._kicked = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def connect(  # type: ignore[override]  # as Client.connect
        self, servers: str | list[str] = "nats://localhost:4222", **options: Any
    ) -> None:
        """See Client. Raises: ValueError for a WebSocket URL, which only StockClient speaks."""
        for url in [servers] if isinstance(servers, str) else servers:
            if url.startswith(("ws://", "wss://")):
                raise ValueError(f"{url}: the fast client speaks TCP and TLS only, use make_client(fast=False)")
        self._loop = asyncio.get_running_loop()
        await super().connect(servers, **options)

    def subscribe_sync(self, subject: str, callback: OnMessage, queue: str = "") -> Subscription:
        """See Client."""
        self._check_subscribable(subject, queue)
        self._sid += 1
        subscription = Subscription(self, self._sid, subject, queue=queue)
        self._subs[self._sid] = subscription  # nats-py subscribes again from here after a reconnect
        self.listeners[b"%d" % self._sid] = callback
        if self.is_connected:
            self._append(command.sub_cmd(subject, queue, self._sid))
        return subscription

    def push(self) -> None:
        """See Client."""
        if not self._ps.more:
            self._flush_now()

    @property
    def buffered_bytes(self) -> int:
        """See Client."""
        socket = self._socket()
        return self._pending_data_size + (socket.get_write_buffer_size() if socket else 0)

    def serves(self, sid: bytes) -> bool:
        """See fastparse.Host."""
        return sid.isdigit() and int(sid) in self._subs

    def answer_ping(self) -> None:
        """See fastparse.Host."""
        self._append(PONG_PROTO)

    def count_in(self, messages: int, num_bytes: int) -> None:
        """See fastparse.Host."""
        self.stats["in_msgs"] += messages
        self.stats["in_bytes"] += num_bytes

    def _socket(self) -> asyncio.Transport | None:
        """The socket to write to; None when there is none or it is going away (the read loop will notice)."""
        transport = self._transport
        if transport is None or not self.is_connected or transport.socket.is_closing():
            return None
        return transport.socket

    def _kick(self) -> None:
        if not self._kicked and self._loop is not None:
            self._kicked = True
            self._loop.call_soon(self._flush_now if self.after is None else self._flush_next_turn)

    def _flush_next_turn(self) -> None:
        if self._loop is not None:
            self._loop.call_soon(self._flush_last)

    def _flush_last(self) -> None:
        """Write, or let the other client write first if it has something in this turn too."""
        other = self.after
        if isinstance(other, FastClient) and other._kicked and self._loop is not None:  # noqa: SLF001 -- one of us
            self._loop.call_soon(self._flush_now)
        else:
            self._flush_now()

    def _flush_now(self) -> None:
        self._kicked = False
        socket = self._socket()
        if socket is None or not self._pending:
            return
        pending, size = self._pending, self._pending_data_size
        self._pending, self._pending_data_size = [], 0
        if size < JOINED_BYTES * len(pending):
            socket.write(b"".join(pending))
        else:
            socket.writelines(pending)
        self._unsent_bytes = socket.get_write_buffer_size()

    async def _flush_pending(self, force_flush: bool = False) -> None:
        if force_flush:
            await self._drained()
        elif self.is_connected:
            self._kick()

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        self.listeners.pop(b"%d" % sid, None)
        super()._remove_sub(sid, max_msgs)

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        await super()._close(status, do_cbs)
        if not self._subs:
            self.listeners.clear()

    async def _connect_to_server(self, s: Srv) -> None:
        s.last_attempt = time.monotonic()
        transport = _FastTransport()  # type: ignore[no-untyped-call]
        await transport.connect(s.uri, DEFAULT_BUFFER_SIZE, self.options["connect_timeout"])
        self._transport = transport

    async def _read_loop(self) -> None:
        if self._transport is None:
            return
        wire = self._transport.wire
        self._ps.open, wire.parser = True, self._ps
        try:
            await super()._read_loop()
        finally:
            wire.parser = None


def make_client(fast: bool = True) -> Client:
    """A client, not yet connected.

    Raises: RuntimeError if nats-py is of another version than the fast one was written for.
    """
    if not fast:
        return StockClient()
    installed = version("nats-py")
    number = tuple(int(part) for part in installed.split(".")[:2])
    if not SUPPORTED[0] <= number < SUPPORTED[1]:
        raise RuntimeError(f"the fast client needs nats-py 2.16, found {installed}; use make_client(fast=False)")
    return FastClient()
