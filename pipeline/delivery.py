"""Events on their way out: one message per event (JSON), or one msgpack batch per connection and tick.

JSON, for any NATS client:   {"n":7,"a":0,"c":0,"event":{…}}, the terminal one with "end":"stop" before the event.
Batch, on request:           an array of [tag, a, c, n, end, event]; `tag` is the u64 that the publisher gave.
    end nil                  a whole event
    end a string             the whole last event of the choice
    n nil, end "frame"       what stands around the stream's pieces from now on: its handle (u64), head, NUL, tail
    n nil, end nil           a note
and of [handles, numbers, sizes, pieces], columns of running streams: u64, u32 and u16 little-endian, then the pieces
one after another; the event is head + piece + tail of the frame of that handle, from the same owner.

Chunks of one stream differ in a few bytes of 220; sending the rest once saves everyone on the way most of the work.
Rows are packed by hand; any msgpack decoder reads them (pipeline/batch.py does). Every message carries the owner's
want subject as its NATS reply.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import orjson

Publish = Callable[[str, bytes, str], bool]
Soon = Callable[[Callable[[], None]], object]
Column = npt.NDArray[np.unsignedinteger[Any]]

_pack_running = struct.Struct(">BIBBH").pack  # n as uint32, nil, bin16
_NIL, _UINT32, _BIN16 = 0xC0, 0xCE, 0xC5
_BIN32 = 0xC6
_MAX_BIN16 = 0xFFFF


class Subscriber:
    """Where the events of some requests go. JSON form: every event is a message."""

    gathers = False  # whether events are held back until `flush`

    def __init__(self, publish: Publish, reply: str, want: str) -> None:
        self._publish = publish
        self.reply = reply
        self.want = want

    def prefix(self, tag: int, attempt: int, choice: int) -> bytes:  # noqa: ARG002 - the batch form needs it
        """What every event of a stream repeats."""
        return b',"a":%d,"c":%d' % (attempt, choice)

    def event(self, prefix: bytes, n: int, event: bytes, end: str = "") -> None:
        """A numbered event; `end` names how the choice ended, '' while it runs."""
        if end:
            prefix = b'%b,"end":"%b"' % (prefix, end.encode())
        self._publish(self.reply, b'{"n":%d%b,"event":%b}' % (n, prefix, event), self.want)

    def note(self, tag: int, attempt: int, event: bytes) -> None:  # noqa: ARG002 - the batch form needs it
        """Progress and acceptance: they carry no number."""
        self._publish(self.reply, b'{"a":%d,"event":%b}' % (attempt, event), self.want)

    def frame(self, prefix: bytes, handle: int, parts: tuple[bytes, bytes]) -> None:
        """What stands around the pieces of a stream from now on. Only a gathering subscriber takes pieces."""
        raise NotImplementedError

    def pieces(self, handles: Column, numbers: Column, sizes: Column, pieces: list[bytes]) -> None:
        """Events of running streams by columns: u64, u32, u16 [N], and N pieces."""
        raise NotImplementedError

    def flush(self) -> None:
        """Nothing is held back in this form."""


class BatchSubscriber(Subscriber):
    """One message per flush with everything that the streams of one connection have to say."""

    gathers = True

    def __init__(self, publish: Publish, reply: str, want: str, max_bytes: int, soon: Soon | None = None) -> None:
        """soon: runs what is to be done at the end of this tick, so that its frames share a message; None: at once."""
        super().__init__(publish, reply, want)
        self._soon = soon
        self._due = False
        self._parts: list[bytes] = []  # three for each event: prefix, middle, the event itself
        self._max_bytes = max_bytes

    def prefix(self, tag: int, attempt: int, choice: int) -> bytes:
        """See Subscriber; `tag` is the publisher's name for the request."""
        return b"\x96" + b"".join(map(_packed, (tag, attempt, choice)))

    def event(self, prefix: bytes, n: int, event: bytes, end: str = "") -> None:
        """See Subscriber."""
        size = len(event)
        if end or size > _MAX_BIN16:
            name = end.encode()
            ending = bytes((0xD9, len(name))) + name if end else b"\xc0"
            middle = struct.pack(">BI", _UINT32, n) + ending + struct.pack(">BI", _BIN32, size)
        else:
            middle = _pack_running(_UINT32, n, _NIL, _BIN16, size)
        self._parts += (prefix, middle, event)

    def frame(self, prefix: bytes, handle: int, parts: tuple[bytes, bytes]) -> None:
        """See Subscriber."""
        body = struct.pack("<Q", handle) + b"\0".join(parts)
        self._parts += (prefix + b"\xc0", b"\xa5frame" + struct.pack(">BI", _BIN32, len(body)), body)

    def pieces(self, handles: Column, numbers: Column, sizes: Column, pieces: list[bytes]) -> None:
        """See Subscriber."""
        if 16 * len(pieces) + int(sizes.sum()) > self._max_bytes and len(pieces) > 1:
            half = len(pieces) // 2
            self.pieces(handles[:half], numbers[:half], sizes[:half], pieces[:half])
            self.pieces(handles[half:], numbers[half:], sizes[half:], pieces[half:])
            return
        columns = (handles.astype("<u8"), numbers.astype("<u4"), sizes.astype("<u2"))
        head = b"\x94" + b"".join(_bin(column.tobytes()) for column in columns)
        body = b"".join(pieces)
        self._parts += (head, struct.pack(">BI", _BIN32, len(body)), body)

    def note(self, tag: int, attempt: int, event: bytes) -> None:
        """See Subscriber."""
        head = struct.pack(">BBQBI", 0x96, 0xCF, tag, _UINT32, attempt)
        self._parts += (head + b"\xc0\xc0\xc0", struct.pack(">BI", _BIN32, len(event)), event)
        self.flush()

    def flush(self) -> None:
        """Send what has gathered, in messages of at most `max_bytes` (one event may be larger)."""
        if self._soon is None:
            self._flush_now()
        elif self._parts and not self._due:
            self._due = True
            self._soon(self._flush_now)

    def _flush_now(self) -> None:
        self._due = False
        if not self._parts:
            return
        if sum(map(len, self._parts)) <= self._max_bytes:
            self._send(self._parts)
        else:
            self._send_in_pieces()
        self._parts.clear()

    def _send(self, parts: list[bytes]) -> None:
        head = struct.pack(">BI", 0xDD, len(parts) // 3)
        self._publish(self.reply, b"".join([head, *parts]), self.want)

    def _send_in_pieces(self) -> None:
        start = num_bytes = 0
        for at in range(0, len(self._parts), 3):
            event_bytes = sum(map(len, self._parts[at : at + 3]))
            if num_bytes + event_bytes > self._max_bytes and at > start:
                self._send(self._parts[start:at])
                start, num_bytes = at, 0
            num_bytes += event_bytes
        self._send(self._parts[start:])


def _bin(data: bytes) -> bytes:
    return struct.pack(">BI", _BIN32, len(data)) + data


_packed = msgspec.msgpack.Encoder().encode  # a number in as few bytes as it takes


def note_body(kind: str, **fields: object) -> bytes:
    """The JSON of a note: {"type": kind, …}."""
    return orjson.dumps({"type": kind, **fields})
