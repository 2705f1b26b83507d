"""`Want`: the one message of a subscriber. Acknowledgement, credit, gap repair, resume and sign of life at once.

JSON: {"rid": "…", "next": 12 | [12, …], "window_bytes": 1048576, "reply": "_INBOX.…", "resend": false}. `next` is
the number of the first event that the subscriber lacks, per choice. Another `reply` than before, `resend`, or the
same `next` twice means that events were lost: they are derived again from the tokens. Source: design 2.6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pipeline.delivery import Subscriber, note_body
from pipeline.errors import RequestError
from pipeline.metrics import count
from pipeline.owner import CancelAsked, Delivered, State
from pipeline.request import Request, check_reply

if TYPE_CHECKING:
    from pipeline.ownership import Ownership

MAX_WINDOW_BYTES = 64 << 20  # a subscriber cannot make the broker hold more for it than its max_pending


class WantMessage(msgspec.Struct):
    """The JSON of a Want, as it comes in."""

    rid: str
    next: int | list[int] = 0
    window_bytes: int = 1 << 20
    reply: str = ""
    resend: bool = False
    tag: int = -1


class Wants:
    """Answers Want messages for the requests of one owner."""

    def __init__(self, ownership: Ownership) -> None:
        self._owner = ownership
        self._decode = msgspec.json.Decoder(WantMessage).decode
        bus = ownership.bus
        self._out_prefix = bus.topology.subject("events", tenant="-", connection="-").removesuffix("-.-")
        bus.subscribe(bus.topology.subject("want", worker=ownership.worker), self._direct, control=True)
        bus.subscribe(bus.topology.subject("want_any"), self._broadcast, control=True)

    def _direct(self, _subject: str, _reply: str, payload: bytes, _headers: bytes | None) -> None:
        want = self._read(payload)
        if want is None:
            return
        request = self._find(want.rid)
        if request is not None:
            self._take(request, want)
        elif want.reply.startswith("_INBOX."):
            count("wants_of_unknown_requests")
            note = b'{"a":0,"event":%b}' % note_body("request_unknown", rid=want.rid)
            self._owner.bus.publish(want.reply, note)

    def _broadcast(self, _subject: str, _reply: str, payload: bytes, _headers: bytes | None) -> None:
        want = self._read(payload)
        request = self._find(want.rid) if want else None
        if want is not None and request is not None:
            self._take(request, want)

    def _read(self, payload: bytes) -> WantMessage | None:
        try:
            want = self._decode(payload)
        except msgspec.DecodeError:
            count("wants_malformed")
            return None
        numbers = [want.next] if isinstance(want.next, int) else want.next
        if not 0 < want.window_bytes or any(number < 0 for number in numbers):
            count("wants_malformed")
            return None
        return want

    def _find(self, rid: str) -> Request | None:
        return self._owner.requests.get(rid) or self._owner.ended.get(rid)

    def _take(self, request: Request, want: WantMessage) -> None:
        out = self._out(request, want)
        if out is None:
            return
        numbers = [want.next] * len(request.streams) if isinstance(want.next, int) else want.next
        window_bytes = min(want.window_bytes, MAX_WINDOW_BYTES)
        before = request.wanted
        request.wanted = tuple(numbers)
        request.want_at = self._owner.now()
        for index, stream in enumerate(request.streams):
            following = numbers[index] if index < len(numbers) else 0
            stuck = index < len(before) and before[index] == following < stream.n
            prefix = out.prefix(request.head.tag, request.machine.attempt, stream.choice)
            stream.want(following, window_bytes, out, prefix, want.resend or stuck)
            self._owner.streams.pump(stream)
        request.subscriber = out
        self._owner.check_delivered(request)

    def _out(self, request: Request, want: WantMessage) -> Subscriber | None:
        if not want.reply or want.reply == request.subscriber.reply:
            return request.subscriber
        try:
            reply = check_reply(want.reply, request.head.tenant, self._out_prefix)
        except RequestError:
            count("wants_malformed")
            return None
        return self._owner.subscriber(reply, request.head.tag)

    def check_silence(self, request: Request, now_s: float) -> None:
        """A subscriber that once said Want and then nothing for `want_silence_s` is gone."""
        if request.want_at < 0 or now_s - request.want_at < self._owner.limits.want_silence_s:
            return
        count("subscribers_silent")
        if request.machine.state is State.ENDING:
            self._owner.signal(request, Delivered())
        else:
            request.want_at = now_s
            self._owner.signal(request, CancelAsked("the subscriber went silent"))
