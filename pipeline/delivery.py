"""Events on their way out: one message per event (JSON), or one msgpack batch per connection and tick.

JSON, for any NATS client:   {"n":7,"a":0,"c":0,"event":{…}}, the terminal one with "end":"stop" before the event.
Batch, on request:           an array of [tag, a, c, n, end, event]; `tag` is the u64 that the publisher gave.
    end nil                  a whole event
    end a string             the whole last event of the choice
    end false                a piece: the event is what stood before the NUL of the stream's frame + piece + the rest
    n nil, end "frame"       the frame of the pieces that follow: two parts with a NUL between them
    n nil, end nil           a note

Chunks of one stream differ in a few bytes of 220; sending the rest once halves the work of everyone on the way. The
batch is packed by hand from a prefix per stream: 0.2 us an event instead of 1.1 us (bench/results). Any msgpack
decoder reads it (pipeline/batch.py does). Every message carries the owner's want subject as its NATS reply.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgspec
import orjson

Publish = Callable[[str, bytes, str], bool]

# The middle of a running event: pack_running(UINT32, n, NIL, BIN16, size of the event up to MAX_BIN16)
pack_running = struct.Struct(">BIBBH").pack
NIL, FALSE, UINT32, BIN16 = 0xC0, 0xC2, 0xCE, 0xC5
_BIN32 = 0xC6
MAX_BIN16 = 0xFFFF


class Subscriber:
    """Where the events of some requests go. JSON form: every event is a message."""

    gathers = False  # whether events are held back until `flush`
    add: Callable[[bytes], None]  # of a gathering one: the next part; three make an event (see `event`)

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

    def frame(self, prefix: bytes, parts: tuple[bytes, bytes]) -> None:
        """Whole events need none."""

    def flush(self) -> None:
        """Nothing is held back in this form."""


class BatchSubscriber(Subscriber):
    """One message per flush with everything that the streams of one connection have to say."""

    gathers = True

    def __init__(self, publish: Publish, reply: str, want: str, max_bytes: int) -> None:
        super().__init__(publish, reply, want)
        self._parts: list[bytes] = []  # three for each event: prefix, middle, the event itself
        self.add = self._parts.append
        self._max_bytes = max_bytes

    def prefix(self, tag: int, attempt: int, choice: int) -> bytes:
        """See Subscriber; `tag` is the publisher's name for the request."""
        return b"\x96" + b"".join(map(_packed, (tag, attempt, choice)))

    def event(self, prefix: bytes, n: int, event: bytes, end: str = "") -> None:
        """See Subscriber."""
        size = len(event)
        if end or size > MAX_BIN16:
            name = end.encode()
            ending = bytes((0xD9, len(name))) + name if end else b"\xc0"
            middle = struct.pack(">BI", UINT32, n) + ending + struct.pack(">BI", _BIN32, size)
        else:
            middle = pack_running(UINT32, n, NIL, BIN16, size)
        self._parts += (prefix, middle, event)

    def frame(self, prefix: bytes, parts: tuple[bytes, bytes]) -> None:
        """What stands around the pieces of a stream from now on."""
        body = b"\0".join(parts)
        self._parts += (prefix + b"\xc0", b"\xa5frame" + struct.pack(">BI", _BIN32, len(body)), body)

    def note(self, tag: int, attempt: int, event: bytes) -> None:
        """See Subscriber."""
        head = struct.pack(">BBQBI", 0x96, 0xCF, tag, UINT32, attempt)
        self._parts += (head + b"\xc0\xc0\xc0", struct.pack(">BI", _BIN32, len(event)), event)
        self.flush()

    def flush(self) -> None:
        """Send what has gathered, in messages of at most `max_bytes` (one event may be larger)."""
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


_packed = msgspec.msgpack.Encoder().encode  # a number in as few bytes as it takes


def note_body(kind: str, **fields: object) -> bytes:
    """The JSON of a note: {"type": kind, …}."""
    return orjson.dumps({"type": kind, **fields})
