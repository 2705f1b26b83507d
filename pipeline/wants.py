"""`Want`: the one message of a subscriber. Acknowledgement, credit, gap repair, resume and sign of life at once.

JSON: {"rid": "…", "next": 12 | [12, …], "window_bytes": 1048576, "reply": "_INBOX.…", "resend": false, "tag": -1}.
`next` is the number of the first event that the subscriber lacks, per choice. Another `reply` than before, `resend`,
or the same `next` twice means that events were lost: they are derived again from the tokens. `tag` >= 0 asks for
batches from now on and names the stream in them. Source: design 2.6; decisions/0002.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from pipeline.bus import Bus
from pipeline.delivery import Subscriber, note_body
from pipeline.errors import RequestError
from pipeline.metrics import count
from pipeline.request import Request
from pipeline.stream import MAX_WINDOW_BYTES
from pipeline.streams import StreamTable
from pipeline.subscribers import Subscribers

# The pause before events of so many tokens are derived again for the same subscriber. Parsing one takes 1.5 us, its
# event a few more, so one that asks without end takes a small share of this process; who asked too early asks again
# (with its next event, or when it renews its Want). Source: bench/hops.py; the pause is ours
REWIND_TOKEN_S = 100e-6


class WantMessage(msgspec.Struct):
    """The JSON of a Want, as it comes in."""

    rid: str
    next: int | list[int] = 0
    window_bytes: int = 1 << 20
    reply: str = ""
    resend: bool = False
    tag: int = -1  # with a `reply` of its own: >= 0 asks for batches and names the stream in them


class Wants:
    """Answers Want messages for the requests of one owner.

    find: the request of a rid, running or ended a while ago. heard: called after each Want that was taken.
    """

    def __init__(
        self,
        bus: Bus,
        subscribers: Subscribers,
        streams: StreamTable,
        *,
        find: Callable[[str], Request | None],
        heard: Callable[[Request], None],
    ) -> None:
        self._bus = bus
        self._subscribers = subscribers
        self._streams = streams
        self._request = find
        self._heard = heard
        self._decode = msgspec.json.Decoder(WantMessage).decode
        bus.subscribe(bus.topology.subject("want", worker=bus.worker), self._direct, control=True)
        bus.subscribe(bus.topology.subject("want_any"), self._broadcast, control=True)

    def _direct(self, _subject: str, _reply: str, payload: bytes, _headers: bytes | None) -> None:
        want = self._read(payload)
        if want is None:
            return
        request = self._request(want.rid)
        if request is not None:
            self._take(request, want)
        elif self._subscribers.is_inbox(want.reply):
            count("wants_of_unknown_requests")
            note = b'{"a":0,"event":%b}' % note_body("request_unknown", rid=want.rid)
            self._bus.publish(want.reply, note)

    def _broadcast(self, _subject: str, _reply: str, payload: bytes, _headers: bytes | None) -> None:
        want = self._read(payload)
        request = self._request(want.rid) if want else None
        if want is not None and request is not None:
            self._take(request, want)

    def _read(self, payload: bytes) -> WantMessage | None:
        try:
            want = self._decode(payload)
        except msgspec.DecodeError:
            count("wants_malformed")
            return None
        numbers = [want.next] if isinstance(want.next, int) else want.next
        if want.window_bytes <= 0 or any(number < 0 for number in numbers) or want.tag >= 1 << 64:
            count("wants_malformed")
            return None
        return want

    def _take(self, request: Request, want: WantMessage) -> None:
        out = self._out(request, want)
        if out is None:
            return
        numbers = [want.next] * len(request.streams) if isinstance(want.next, int) else want.next
        numbers = (numbers + [0] * len(request.streams))[: len(request.streams)]
        window_bytes = min(want.window_bytes, MAX_WINDOW_BYTES)
        before, request.wanted = request.wanted, tuple(numbers)
        now_s, num_rewound = time.monotonic(), 0
        may_rewind = now_s >= request.rewind_from_s
        for index, stream in enumerate(request.streams):
            stream.recall()
            following = numbers[index]
            stuck = index < len(before) and before[index] == following < stream.n
            prefix = out.prefix(request.tag, request.machine.attempt, stream.choice)
            again = may_rewind and (want.resend or stuck)
            num_rewound += stream.fed if again else 0
            stream.want(following, window_bytes, out, prefix, again)
            self._streams.pump(stream)
        if num_rewound:
            request.rewind_from_s = now_s + num_rewound * REWIND_TOKEN_S
        request.subscriber = out
        self._heard(request)

    def _out(self, request: Request, want: WantMessage) -> Subscriber | None:
        # one connection may take the same request up again, under another tag
        if not want.reply or (want.reply == request.subscriber.reply and want.tag in (-1, request.tag)):
            return request.subscriber
        try:
            reply = self._subscribers.check(want.reply, request.head.tenant)
        except RequestError:
            count("wants_malformed")
            return None
        request.tag = want.tag
        return self._subscribers.get(reply, want.tag)
