"""Token frames in, numbered events out: the owner's side of every stream it issued a handle for.

A handle is an index into `_slots` plus a generation, so a stale frame matches nothing; generations begin anywhere, so
a frame for the process that had this worker's id before matches nothing either. Rows of streams that only run
on are taken many at a time (pipeline/plain.py), all others one by one (pipeline/stream.py). Source: design 2.5-2.7.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Iterable
from itertools import repeat

import structlog

from pipeline.delivery import Subscriber
from pipeline.metrics import count
from pipeline.plain import INDEX_BITS, INDEX_MASK, PlainRows
from pipeline.stream import ContradictionError, Stream, nothing
from pipeline.wire import AckKind, Frame, WireError, decode_frame, encode_acks

log = structlog.get_logger()

# A column costs about 40 us whatever its length, a row taken by itself 0.7 us. Source: measured, ours
FEW_ROWS = 64
FIRST_GENERATION_BITS = 39  # of the 40: half of them are left to count up in. Source: ours


def _forget(handles: array[int]) -> bytes:
    return encode_acks(AckKind.FORGET, handles, array("I", bytes(4 * len(handles))))


class StreamTable:
    """All streams that this owner process issued handles for."""

    def __init__(self, owner: str, publish: Callable[[str, bytes, str], object], *, resend_after_s: float) -> None:
        """publish(subject, payload, reply): on the control connection."""
        self._owner = owner
        self._publish = publish
        self._resend_after_s = resend_after_s
        self._slots: list[Stream | None] = []
        self._generations: list[int] = []
        self._free: list[int] = []
        self._gaps: set[Stream] = set()
        self._plain = PlainRows()
        self._many = False  # whether the frame at hand has enough rows for columns to pay
        self._parting: dict[str, array[int]] = {}  # released handles that their engines may forget, by source
        self.on_ended: Callable[[Stream], None] = nothing
        self.on_contradiction: Callable[[Stream, str], None] = nothing
        self.on_failed: Callable[[Stream, str], None] = self._unheard_failure
        self.on_stopped: Callable[[Stream], None] = nothing
        self.on_more: Callable[[Stream], None] = nothing

    def issue(self, stream: Stream) -> int:
        """A handle for a stream: valid until `release`."""
        if self._free:
            index = self._free.pop()
        else:
            index = len(self._slots)
            self._slots.append(None)
            self._generations.append(secrets.randbits(FIRST_GENERATION_BITS))
        self._generations[index] += 1
        self._slots[index] = stream
        return self._generations[index] << INDEX_BITS | index

    def release(self, handle: int) -> None:
        """Frames for this handle match nothing from now on; its engine is told with the next acknowledgements."""
        index = handle & INDEX_MASK
        stream = self._slots[index] if index < len(self._slots) else None
        if stream is not None and stream.handle == handle:
            stream.recall()
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
        if len(frame.counts) < FEW_ROWS:
            self._rows(source, frame, repeat(True, len(frame.counts)), now_s)
            return
        self._many = True
        others = self._plain.take(source, frame)
        if others.any():
            self._rows(source, frame, others.tolist(), now_s)
        self._plain.flush()
        self._many = False

    def _rows(self, source: str, frame: Frame, wanted: Iterable[bool], now_s: float) -> None:
        """Take the wanted rows of a frame one by one."""
        slots, tokens, num_slots = self._slots, frame.tokens, len(self._slots)
        unknown = array("Q")
        outs: set[Subscriber] = set()
        at = 0
        for handle, position, num_tokens, finish, here in zip(
            frame.handles, frame.positions, frame.counts, frame.finishes, wanted, strict=True
        ):
            end = at + num_tokens
            if here:
                index = handle & INDEX_MASK
                stream = slots[index] if index < num_slots else None
                if stream is None or stream.handle != handle:
                    unknown.append(handle)
                else:
                    stream.source = source
                    if num_tokens == 1 and not finish and stream.may_run_on(position) and not self._many:
                        self._run_on(stream, tokens[at])
                    else:
                        self._row(stream, position, tuple(tokens[at:end]), finish, now_s)
                    if stream.out.gathers:
                        outs.add(stream.out)
            at = end
        for out in outs:
            out.flush()
        if unknown and source:
            count("frames_unknown_handle", len(unknown))
            self._publish(source, _forget(unknown), self._owner)

    def _run_on(self, stream: Stream, token: int) -> None:
        try:
            stream.run_on(token)
        except Exception as error:  # noqa: BLE001 - logged there
            self._parser_failed(stream, error)

    def _row(self, stream: Stream, position: int, tokens: tuple[int, ...], finish: int, now_s: float) -> None:
        stream.recall()
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
        stream.recall()
        running = stream.finish_at < 0
        try:
            more = stream.pump()
            stream.settle()
            if stream.plain and self._many:
                self._plain.adopt(stream)
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
        """A bug in a parser fails this stream, never the others of the frame."""
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
        running_at = self._plain.positions() if len(self._plain) else []
        for stream in self._slots:
            if stream is None or not stream.source or (stream.finish_at >= 0 and stream.plan is None):
                continue
            at = stream.at if stream.columns is None else running_at[stream.handle & INDEX_MASK]
            position = at + stream.end_seen
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
