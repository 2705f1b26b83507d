"""A NATS protocol parser that hands messages over synchronously.

The parser of nats-py matches seven regular expressions per operation and awaits a coroutine per message; this one
splits the control line once and calls the listener of the subscription directly. Whatever needs an `await` (messages
of subscriptions that nats-py itself serves, INFO, -ERR) is left to the coroutine `parse`, in order: bytes behind it
wait until it is done. The stock parser still judges INFO, -ERR and everything unknown.

Source: facts-bus 0.2, 2.3 (why), nats-adr (MSG, HMSG, PING, PONG, +OK, -ERR, INFO).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from nats.errors import ProtocolError
from nats.protocol.parser import Parser

OnMessage = Callable[[str, str, bytes, bytes | None], None]  # subject, reply, payload, raw headers

# Longest line without an end that is waited for. The server's longest is an INFO that lists every peer: a thousand
# peers are 30 KB. Source: ours.
MAX_LINE_BYTES = 1_048_576
# The server allows max_payload up to 64 MiB (facts-bus 6), eight digits. A longer figure is a torn stream.
MAX_SIZE_DIGITS = 8

_Message = tuple[int, bytes, bytes, bytes, bytes | None]  # sid, subject, reply, payload, raw headers


def _is_size(word: bytes) -> bool:
    return word.isdigit() and len(word) <= MAX_SIZE_DIGITS


def _header_bytes(words: list[bytes]) -> int:
    """The header length of an HMSG line, taken out of its words; -1 if it is none or longer than the message."""
    if words[0] != b"HMSG" or not (5 <= len(words) <= 6 and _is_size(words[-1]) and _is_size(words[-2])):
        return -1
    header_bytes = int(words.pop(-2))
    return header_bytes if header_bytes <= int(words[-1]) else -1


class Host(Protocol):
    """What the parser needs of its client."""

    listeners: dict[bytes, OnMessage]  # by subscription id, as its digits

    def answer_ping(self) -> None:
        """Send a PONG."""

    def take_pong(self) -> None:
        """A PONG came."""

    def count_in(self, messages: int, num_bytes: int) -> None:
        """So many messages were received."""

    def callback_failed(self, error: BaseException, where: str) -> None:
        """A callback raised. Nothing it raises may end the read loop: the connection would live on, deaf."""

    def serves(self, sid: bytes) -> bool:
        """Whether nats-py itself has a subscription with this id."""

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        """The stock way of a message."""


class FastParser:
    """Takes the place of nats-py's `Parser` (`reset`, `parse`) and adds `feed` for the synchronous way.

    `open` is False from a reset until the next read loop starts: bytes of a connection that was given up are not
    dispatched. `busy` is True while `parse` runs, when `feed` must not be called. `more`, for the listener that is
    being called: whether something was read behind its message.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._stock = Parser(host)
        self.open = False
        self.busy = False
        self.more = False
        self.reset()

    def reset(self) -> None:
        """Forget everything half received."""
        self.open = False
        self._buffer = b""
        self._position = 0
        self._op_start = 0
        self._chunks: list[bytes] = []  # of a message that is still incomplete
        self._have_bytes = 0
        self._need_bytes = 0

    def feed(self, data: bytes) -> bytes:
        """Dispatch what needs no await. Returns the rest, which starts with an operation that does (for `parse`)."""
        if not self._take(data) or self._run() is None:
            return b""
        rest = self._buffer[self._op_start :]
        self._buffer, self._position = b"", 0
        return rest

    async def parse(self, data: bytes = b"") -> None:
        """Dispatch everything, awaiting where it must.

        Raises: nats.errors.ProtocolError on bytes that are not the protocol; the client then reconnects.
        """
        if not self._take(data):
            return
        self.busy = True
        try:
            while (operation := self._run()) is not None:
                if isinstance(operation, bytes):
                    await self._line(operation)
                else:
                    await self._message(operation)
        finally:
            self.busy = False

    def _take(self, data: bytes) -> bool:
        """Add bytes; False while the message they belong to is known to be incomplete."""
        if self._need_bytes:
            self._chunks.append(data)
            self._have_bytes += len(data)
            if self._have_bytes < self._need_bytes:
                return False
            data = b"".join(self._chunks)
            self._chunks, self._need_bytes = [], 0
        elif self._position < len(self._buffer):
            data = self._buffer[self._position :] + data
        self._buffer, self._position = data, 0
        return True

    def _run(self) -> _Message | bytes | None:
        """Dispatch synchronously up to the first operation that needs an await, which is returned; None = all done.

        One loop, not a call per step: each call would cost a tenth of a message.
        """
        buffer, position, listeners = self._buffer, self._position, self._host.listeners
        end, messages, num_bytes = len(buffer), 0, 0
        try:
            while position < end:
                line_end = buffer.find(b"\r\n", position)
                if line_end < 0:
                    return self._unfinished_line(position)
                words = buffer[position:line_end].split()
                self._op_start, position = position, line_end + 2
                header_bytes = _header_bytes(words) if words and words[0] != b"MSG" else 0
                # MSG (or, without its header length, HMSG), subject, id, perhaps reply, size
                is_message = 4 <= len(words) <= 5 and words[-1].isdigit() and len(words[-1]) <= MAX_SIZE_DIGITS
                if header_bytes < 0 or not is_message:
                    if self._signal(words):
                        continue
                    return buffer[self._op_start : position]
                body_end = position + int(words[-1])
                if body_end + 2 > end:
                    self._gather(body_end + 2)
                    position = end
                    return None
                headers = buffer[position : position + header_bytes] if header_bytes else None
                payload = buffer[position + header_bytes : body_end]
                position = body_end + 2
                listener = listeners.get(words[2])
                if listener is None:
                    if self._host.serves(words[2]):
                        return int(words[2]), words[1], words[3] if len(words) == 5 else b"", payload, headers
                    continue  # unsubscribed a moment ago
                messages += 1
                num_bytes += len(payload)
                self.more = position < end
                try:
                    listener(words[1].decode(), words[3].decode() if len(words) == 5 else "", payload, headers)
                except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 -- facts-bus 10.1: see Host
                    self._host.callback_failed(error, words[1].decode("utf-8", "replace"))
            return None
        finally:
            self._position = position
            self.more = False
            if messages:
                self._host.count_in(messages, num_bytes)

    def _unfinished_line(self, position: int) -> bytes | None:
        """None to wait for the rest of a line; the line if it is too long to be one."""
        if len(self._buffer) - position <= MAX_LINE_BYTES:
            return None
        self._op_start = position
        return self._buffer[position:]

    def _gather(self, need_end: int) -> None:
        """Keep the pieces of the message at `_op_start` until its `need_end` is there, to join them once."""
        self._chunks = [self._buffer[self._op_start :]]
        self._have_bytes = len(self._chunks[0])
        self._need_bytes = need_end - self._op_start

    def _signal(self, words: list[bytes]) -> bool:
        """Answer an operation of one word; False if it is none."""
        match words:
            case [b"PING"]:
                self._host.answer_ping()
            case [b"PONG"]:
                self._host.take_pong()
            case [b"+OK"]:
                pass
            case _:
                return False
        return True

    async def _message(self, message: _Message) -> None:
        sid, subject, reply, payload, headers = message
        try:
            await self._host._process_msg(sid, subject, reply, payload, headers or b"")  # noqa: SLF001 -- nats-py's own
        except Exception as error:  # noqa: BLE001 -- facts-bus 10.1: see Host
            self._host.callback_failed(error, subject.decode("utf-8", "replace"))

    async def _line(self, line: bytes) -> None:
        words = line.split()
        if not line.endswith(b"\r\n") or words[:1] in ([], [b"MSG"], [b"HMSG"]) or words == [b"-ERR"]:
            raise ProtocolError(f"nats: malformed line {line[:64]!r}")
        try:
            await self._stock.parse(line)
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            # INFO that is not the expected JSON; in nats-py it ends the read loop for good
            raise ProtocolError(f"nats: malformed line {line[:64]!r}") from error
        finally:
            self._stock.reset()
