"""Token frames in, numbered events out: the owner's side of every stream it issued a handle for.

A handle is an index into `_slots` plus a generation, so a stale frame matches nothing. Tokens are kept (4 bytes
each) and events are re-derived from them at will: a slow or reconnecting reader never pauses a decode step.
A later attempt of the same request must repeat the tokens that are already here; the first one that differs ends
the stream as `stream_lost`, never as a contradiction. Source: design 2.5-2.7.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from pipeline.delivery import BIN16, FALSE, UINT32, Subscriber, pack_running
from pipeline.events import FINISH_CODES, Plan
from pipeline.metrics import count
from pipeline.stage import TokenStream
from pipeline.wire import AckKind, WireError, decode_frame, encode_acks

log = structlog.get_logger()

_INDEX_BITS = 32
_INDEX_MASK = (1 << _INDEX_BITS) - 1
_MAX_NUMBER = (1 << 32) - 1  # of an event: u32 in the batch form
# Tokens re-derived in one go before the loop gets its turn: 1 us each, so 2 ms. Source: design 8 (stall < 5 ms).
PUMP_TOKENS = 2_000
UNLIMITED_BYTES = 1 << 62
MAX_WINDOW_BYTES = 64 << 20  # a subscriber cannot make the broker hold more for it than its max_pending


def _nothing(*_: object) -> None:
    """What happens until somebody wants to know."""


class ContradictionError(Exception):
    """A later attempt produced another token than the one delivered."""


@dataclass(slots=True)
class Ending:
    """How a choice ends: with a finish reason, or with a ready-made error event."""

    name: str
    failure: bytes | None = None


class Stream:
    """One choice of one request in its owner. Positions count tokens, numbers count events."""

    __slots__ = (
        "acked",
        "ahead",
        "allowance_bytes",
        "at",
        "before_end",
        "choice",
        "cumulative",
        "end_seen",
        "ending",
        "fed",
        "feed",
        "finish_at",
        "first_windowed",
        "frame_bytes",
        "gap_since",
        "handle",
        "limit_bytes",
        "n",
        "open_parser",
        "out",
        "parser",
        "piece",
        "plain",
        "plan",
        "prefix",
        "rid",
        "sent_bytes",
        "skip_below",
        "source",
        "terminal_n",
        "tokens",
    )

    def __init__(self, rid: str, choice: int, open_parser: Callable[[], TokenStream], out: Subscriber) -> None:
        self.rid = rid
        self.choice = choice
        self.open_parser = open_parser
        self.parser = open_parser()
        self.feed = self.parser.feed
        self.piece = self.parser.piece
        self.out = out
        self.prefix = b""
        self.handle = 0
        self.tokens = array("I")
        self.at = 0  # next position expected of the present attempt
        self.acked = 0
        self.end_seen = False  # the engine's own end of the present attempt is here
        self.ahead: dict[int, tuple[tuple[int, ...], int]] = {}  # rows that arrived before their turn
        self.gap_since = 0.0
        self.source = ""  # where acknowledgements go
        self.finish_at = -1
        self.ending: Ending | None = None
        self.plan: Plan | None = None
        self.fed = 0  # tokens given to the parser
        self.n = 0  # number of the next event
        self.skip_below = 0  # events below are known to the subscriber
        self.terminal_n = -1
        self.sent_bytes = 0
        self.limit_bytes = -1  # -1: no Want yet, nothing is held back
        self.first_windowed = 0
        self.cumulative = array("Q")  # sent_bytes before event first_windowed + i
        self.before_end: Callable[[], None] = _nothing
        self.plain = False  # see settle
        self.frame_bytes = 0  # of the frame that the subscriber has; 0: none that is good for the next piece
        self.allowance_bytes = UNLIMITED_BYTES

    def begin_attempt(self, handle: int, prefix: bytes) -> None:
        """Tokens of a new attempt come next, from position 0, under a new handle."""
        self.handle = handle
        self.prefix = prefix
        self.at = 0
        self.acked = 0
        self.end_seen = False
        self.source = ""
        self.ahead.clear()
        self.plain = False

    @property
    def over(self) -> bool:
        """Whether its end is known; every token up to there is then here, of whatever attempt."""
        return self.finish_at >= 0

    def settle(self) -> None:
        """Work out whether the next token in order can only cause its event: nothing ends, waits or is held back."""
        self.frame_bytes = 0
        self.allowance_bytes = self.limit_bytes if self.limit_bytes >= 0 else UNLIMITED_BYTES
        self.plain = (
            not self.ahead
            and self.finish_at < 0
            and self.n >= self.skip_below
            and self.fed == self.at == len(self.tokens)
            and not self.parser.can_stop
        )

    def receive(self, position: int, tokens: tuple[int, ...], finish: int) -> None:
        """Take a row whose first position is not beyond `at`; what is known already is compared.

        Raises: ContradictionError.
        """
        if position + len(tokens) <= self.at:
            self.acked = -1  # a repeat: our acknowledgement was lost, so say it again
        known = self.tokens
        for token in tokens[max(0, self.at - position) :]:
            if self.at < len(known):
                if known[self.at] != token:
                    raise ContradictionError(f"position {self.at} was {known[self.at]}, attempt repeats {token}")
            else:
                known.append(token)
            self.at += 1
        self.end_seen = self.end_seen or finish > 0
        if finish and self.finish_at < 0:
            if self.at < len(known):
                raise ContradictionError(f"{len(known)} tokens are here, attempt ends after {self.at}")
            self.finish_at = self.at
            self.ending = self.ending or Ending(FINISH_CODES[finish - 1])

    def drain_ahead(self) -> None:
        """Rows that waited for a gap to close."""
        while self.ahead:
            position = min(self.ahead)
            if position > self.at:
                return
            tokens, finish = self.ahead.pop(position)
            self.receive(position, tokens, finish)

    def end(self, ending: Ending) -> None:
        """End here, whatever the engine still sends."""
        self.ending = ending
        self.plain = False
        if self.finish_at < 0:
            self.finish_at = len(self.tokens)

    def give_up(self) -> None:
        """The parser failed: it is given no further token, and the events so far are all there will be."""
        self.plain = False
        self.finish_at = self.fed
        self.ending = None

    def pump(self) -> bool:
        """Feed the parser and publish events while the window is open; True when more could be done at once."""
        budget = PUMP_TOKENS
        tokens, parser = self.tokens, self.parser
        end = self.finish_at if self.finish_at >= 0 else len(tokens)
        while self.fed < end and self.terminal_n < 0:
            if self.sent_bytes >= self.limit_bytes >= 0 and self.n >= self.skip_below:
                return False
            event = parser.feed(tokens[self.fed])
            self.fed += 1
            if event is not None:
                self.emit(event)
            if parser.stopped:
                self.finish_at = end = self.fed
                if self.ending is None or self.ending.failure is None:
                    self.ending = Ending("stop")
            budget -= 1
            if not budget:
                return True
        if self.ending is not None and self.fed >= self.finish_at >= 0 and self.terminal_n < 0:
            self._emit_terminal(self.ending)
        return False

    def emit(self, event: bytes, end: str = "") -> None:
        """Number an event and publish it, unless the subscriber has it."""
        n = self.n
        self.n = n + 1
        if n < self.skip_below:
            return
        if self.limit_bytes >= 0:
            self.cumulative.append(self.sent_bytes)
        self.sent_bytes += len(event)
        self.out.event(self.prefix, n, event, end)

    def _emit_terminal(self, ending: Ending) -> None:
        if self.sent_bytes >= self.limit_bytes >= 0 and self.n >= self.skip_below:
            return
        if ending.failure is not None:
            event = ending.failure
            # the subscriber may have more events than a later owner could derive again before it failed
            self.n = max(self.n, self.skip_below)
        elif self.plan is not None:
            event = self.parser.finish(ending.name, self.plan, self.fed)
        else:
            return  # usage is part of it, so it waits for the plan (repeated with every unacknowledged end)
        self.terminal_n = self.n
        self.before_end()
        self.emit(event, ending.name)

    def want(self, following: int, window_bytes: int, out: Subscriber, prefix: bytes, again: bool) -> None:
        """The subscriber has every event below `following` and takes `window_bytes` more."""
        following = min(following, _MAX_NUMBER)
        ahead_of_us = following > self.n and following != self.skip_below  # told by an owner before us
        if again or out is not self.out or ahead_of_us:
            self._rewind(following)
        self.out = out
        self.prefix = prefix
        if self.limit_bytes < 0:
            self.first_windowed = max(self.n, self.skip_below)
        at = following - self.first_windowed
        known = self.cumulative
        base = known[at] if 0 <= at < len(known) else (self.sent_bytes if following >= self.n else 0)
        self.limit_bytes = max(self.limit_bytes, base + window_bytes)

    def _rewind(self, following: int) -> None:
        """Derive the events again and publish those from `following` on."""
        self.parser = self.open_parser()
        self.feed = self.parser.feed
        self.piece = self.parser.piece
        self.fed = 0
        self.n = 0
        self.terminal_n = -1
        self.skip_below = following
        self.first_windowed = following
        self.cumulative = array("Q")
        self.sent_bytes = 0
        self.limit_bytes = 0 if self.limit_bytes >= 0 else -1


def _forget(handles: array[int]) -> bytes:
    return encode_acks(AckKind.FORGET, handles, array("I", bytes(4 * len(handles))))


class StreamTable:
    """All streams that this owner process issued handles for."""

    def __init__(
        self, owner: str, publish: Callable[[str, bytes, str], object], *, resend_after_s: float
    ) -> None:
        """publish(subject, payload, reply): on the control connection."""
        self._owner = owner
        self._publish = publish
        self._resend_after_s = resend_after_s
        self._slots: list[Stream | None] = []
        self._generations: list[int] = []
        self._free: list[int] = []
        self._gaps: set[Stream] = set()
        self._parting: dict[str, array[int]] = {}  # released handles that their engines may forget, by source
        self.on_ended: Callable[[Stream], None] = _nothing
        self.on_contradiction: Callable[[Stream, str], None] = _nothing
        self.on_failed: Callable[[Stream, str], None] = self._unheard_failure
        self.on_stopped: Callable[[Stream], None] = _nothing
        self.on_more: Callable[[Stream], None] = _nothing

    def issue(self, stream: Stream) -> int:
        """A handle for a stream: valid until `release`."""
        if self._free:
            index = self._free.pop()
        else:
            index = len(self._slots)
            self._slots.append(None)
            self._generations.append(0)
        self._generations[index] += 1
        self._slots[index] = stream
        return self._generations[index] << _INDEX_BITS | index

    def release(self, handle: int) -> None:
        """Frames for this handle match nothing from now on; its engine is told with the next acknowledgements."""
        index = handle & _INDEX_MASK
        stream = self._slots[index] if index < len(self._slots) else None
        if stream is not None and stream.handle == handle:
            self._slots[index] = None
            self._free.append(index)
            self._gaps.discard(stream)
            if stream.source:
                self._parting.setdefault(stream.source, array("Q")).append(handle)

    def __len__(self) -> int:
        return len(self._slots) - len(self._free)

    def on_frame(self, source: str, payload: bytes, now_s: float) -> None:
        """Take a frame; `source` is where its sender listens for acknowledgements."""
        try:
            frame = decode_frame(payload)
        except WireError:
            count("frames_malformed")
            return
        slots, tokens, num_slots = self._slots, frame.tokens, len(self._slots)
        unknown = array("Q")
        outs: set[Subscriber] = set()
        out: Subscriber | None = None
        at = 0
        for handle, position, num_tokens, finish in zip(
            frame.handles, frame.positions, frame.counts, frame.finishes, strict=True
        ):
            index = handle & _INDEX_MASK
            stream = slots[index] if index < num_slots else None
            end = at + num_tokens
            if stream is None or stream.handle != handle:
                unknown.append(handle)
                at = end
                continue
            if stream.out is not out:
                out = stream.out
                if out.gathers:
                    outs.add(out)
            stream.source = source
            ordinary = num_tokens == 1 and not finish and position == stream.at
            if ordinary and stream.plain and stream.sent_bytes < stream.allowance_bytes:
                self._next(stream, tokens[at], out)
            else:
                self._row(stream, position, tuple(tokens[at:end]), finish, now_s)
            at = end
        for out in outs:
            out.flush()
        if unknown and source:
            count("frames_unknown_handle", len(unknown))
            self._publish(source, _forget(unknown), self._owner)

    def _next(self, stream: Stream, token: int, out: Subscriber) -> None:
        """The common case, token after token of every running stream: what `receive` and `pump` would do, unrolled."""
        stream.tokens.append(token)
        stream.at += 1
        stream.fed += 1
        try:
            piece = stream.piece(token) if out.gathers else None
            event = stream.feed(token) if piece is None else None
        except Exception as error:  # noqa: BLE001 - logged there
            self._parser_failed(stream, error)
            return
        if piece is None:
            stream.frame_bytes = 0  # `feed` may have changed it
            if event is not None:
                stream.emit(event)
            return
        if not stream.frame_bytes:
            frame = stream.parser.frame
            stream.frame_bytes = len(frame[0]) + len(frame[1])
            out.frame(stream.prefix, frame)
        n = stream.n
        stream.n = n + 1
        size = len(piece)
        if stream.limit_bytes >= 0:
            stream.cumulative.append(stream.sent_bytes)
        stream.sent_bytes += size + stream.frame_bytes
        out.add(stream.prefix)
        out.add(pack_running(UINT32, n, FALSE, BIN16, size))
        out.add(piece)

    def _row(self, stream: Stream, position: int, tokens: tuple[int, ...], finish: int, now_s: float) -> None:
        if position > stream.at:
            known = stream.ahead.get(position, ((), 0))
            stream.plain = False
            stream.ahead[position] = max(known, (tokens, finish), key=lambda row: (len(row[0]), row[1]))
            if stream not in self._gaps:
                stream.gap_since = now_s
                self._gaps.add(stream)
            return
        try:
            stream.receive(position, tokens, finish)
        except ContradictionError as error:
            count("streams_contradicted")
            self.on_contradiction(stream, str(error))
            return
        self._close_gap(stream)

    def _close_gap(self, stream: Stream) -> None:
        try:
            stream.drain_ahead()
        except ContradictionError as error:
            count("streams_contradicted")
            self.on_contradiction(stream, str(error))
            return
        if not stream.ahead:
            self._gaps.discard(stream)
        self._pump(stream)

    def _pump(self, stream: Stream) -> None:
        running = stream.finish_at < 0
        try:
            more = stream.pump()
            stream.settle()
        except Exception as error:  # noqa: BLE001 - logged there
            self._parser_failed(stream, error)
            return
        if stream.finish_at >= 0:
            if running and stream.parser.stopped:
                self.on_stopped(stream)
            self.on_ended(stream)
        if more:
            self.on_more(stream)

    def _parser_failed(self, stream: Stream, error: Exception) -> None:
        """A bug in a parser fails this stream, never the others of the frame (house rule 5)."""
        log.error("parser failed", rid=stream.rid, choice=stream.choice, exc_info=error)
        count("streams_failed")
        stream.give_up()
        self.on_failed(stream, f"the parser failed: {type(error).__name__}")

    def _unheard_failure(self, stream: Stream, why: str) -> None:
        self.on_contradiction(stream, why)

    def pump(self, stream: Stream) -> None:
        """Publish what became possible (a window opened, an end was set), and flush."""
        self._pump(stream)
        stream.out.flush()

    def acknowledge(self, now_s: float) -> None:
        """Tell every engine which positions are here, and which gaps are older than allowed."""
        have: dict[str, tuple[array[int], array[int]]] = {}
        missing: dict[str, tuple[array[int], array[int]]] = {}
        for stream in self._slots:
            if stream is None or not stream.source or (stream.finish_at >= 0 and stream.plan is None):
                continue
            position = stream.at + stream.end_seen
            if stream in self._gaps and now_s - stream.gap_since >= self._resend_after_s:
                columns = missing.setdefault(stream.source, (array("Q"), array("I")))
                count("streams_resend_asked")
            elif position != stream.acked:
                columns = have.setdefault(stream.source, (array("Q"), array("I")))
            else:
                continue
            stream.acked = position
            columns[0].append(stream.handle)
            columns[1].append(position)
        parting, self._parting = self._parting, {}
        for source, handles in parting.items():
            self._publish(source, _forget(handles), self._owner)
        for kind, by_source in ((AckKind.HAVE, have), (AckKind.RESEND, missing)):
            for source, (handles, positions) in by_source.items():
                self._publish(source, encode_acks(kind, handles, positions), self._owner)
