"""The plain rows of a frame, a column at a time: streams that only run on, which is nearly all of them.

A stream is *plain* while its next token can only cause one more event of the form frame[0] + piece + frame[1]: its
tokens are in order, its window is open, its subscriber gathers, its parser has a table of pieces. Its running state
then lies in columns indexed by slot, and a frame's thousand rows cost a dozen numpy calls and three list
comprehensions instead of a thousand method calls (alone on a core 0.2-0.5 us a token against 0.9). `recall` brings
it back into the stream's own fields before anything else may look at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.delivery import Subscriber
from pipeline.stream import MAX_NUMBER, UNLIMITED_BYTES, Stream
from pipeline.wire import Frame

INDEX_BITS = 24  # of a handle's 64: the lower ones are a slot, the upper 40 its generation. Source: ours
INDEX_MASK = (1 << INDEX_BITS) - 1
# Connections come and go: beyond it all streams are recalled and the list begins anew. Source: ours, far above the
# connections that one owner serves at a time, so that it is rare.
MAX_SUBSCRIBERS = 4_096
KEPT_TOKENS = 64  # of a stream in its columns, before they move to the stream. Source: ours; 3 us a move

Slots = npt.NDArray[np.int64]


class PlainRows:
    """Columns of all plain streams of one table, by slot. Streams of one table of pieces only; others stay out."""

    def __init__(self) -> None:
        self._streams: dict[int, Stream] = {}
        self._pieces: Sequence[bytes | None] = ()
        self._outs: dict[Subscriber, int] = {}
        self._out_list: list[Subscriber] = []
        self._sources: dict[str, int] = {}
        self._allocate(1_024)

    def __len__(self) -> int:
        return len(self._streams)

    def _allocate(self, num_slots: int) -> None:
        self._handle = np.zeros(num_slots, np.uint64)  # 0: not plain
        self._at = np.zeros(num_slots, np.int64)
        self._n = np.zeros(num_slots, np.uint32)
        self._budget = np.zeros(num_slots, np.int64)
        self._frame_bytes = np.zeros(num_slots, np.int64)
        self._out = np.zeros(num_slots, np.int32)
        self._source = np.zeros(num_slots, np.int32)
        self._fill = np.zeros(num_slots, np.int64)
        self._tokens = np.zeros((num_slots, KEPT_TOKENS), np.uint32)
        self._sizes = np.zeros((num_slots, KEPT_TOKENS), np.uint16)

    def _grow(self, num_slots: int) -> None:
        """More slots; whoever is plain comes back with its next row."""
        for stream in list(self._streams.values()):
            self.recall(stream)
        self._allocate(num_slots)

    def adopt(self, stream: Stream) -> None:
        """Take a stream over if it is plain. Its subscriber is told its frame."""
        pieces = stream.parser.pieces if stream.plain and stream.out.gathers and stream.source else None
        if pieces is None or stream.columns is not None:
            return
        if len(self._outs) > MAX_SUBSCRIBERS:
            for each in list(self._streams.values()):
                self.recall(each)
        slot = stream.handle & INDEX_MASK
        if slot >= len(self._handle):
            self._grow(max(2 * len(self._handle), slot + 1))
        if not self._streams:
            self._pieces = pieces
            self._outs.clear()
            self._out_list = []
            self._sources.clear()
        elif pieces is not self._pieces:
            return
        budget = (stream.limit_bytes if stream.limit_bytes >= 0 else UNLIMITED_BYTES) - stream.sent_bytes
        if budget <= 0 or stream.n > MAX_NUMBER - 2 * KEPT_TOKENS:
            return
        frame = stream.parser.frame
        stream.out.frame(stream.prefix, stream.handle, frame)
        self._handle[slot], self._at[slot], self._n[slot] = stream.handle, stream.at, stream.n
        self._budget[slot], self._frame_bytes[slot] = budget, len(frame[0]) + len(frame[1])
        self._out[slot], self._source[slot] = _number(self._outs, stream.out), _number(self._sources, stream.source)
        if len(self._out_list) != len(self._outs):
            self._out_list = list(self._outs)
        self._fill[slot] = 0
        self._streams[slot] = stream
        stream.columns = self

    def recall(self, stream: Stream) -> None:
        """See stream.Columns."""
        slot = stream.handle & INDEX_MASK
        self._move(slot, stream)
        self._handle[slot] = 0
        del self._streams[slot]
        stream.columns = None

    def _move(self, slot: int, stream: Stream) -> None:
        """Kept tokens into the stream's own fields."""
        fill = int(self._fill[slot])
        if fill:
            sizes = self._sizes[slot, :fill] + self._frame_bytes[slot]
            stream.passed(self._tokens[slot, :fill].tobytes(), sizes)
            self._fill[slot] = 0

    def take(self, source: str, frame: Frame) -> npt.NDArray[np.bool_]:
        """Take what rows are plain; returns which were not, [N]."""
        handles = np.asarray(frame.handles)
        slots = (handles & np.uint64(INDEX_MASK)).astype(np.int64)
        np.minimum(slots, len(self._handle) - 1, out=slots)  # a slot beyond has another handle than its row
        counts = np.frombuffer(frame.counts, np.uint8)
        plain: npt.NDArray[np.bool_] = self._handle[slots] == handles
        plain &= self._at[slots] == np.asarray(frame.positions)
        plain &= counts == 1
        plain &= np.frombuffer(frame.finishes, np.uint8) == 0
        plain &= self._budget[slots] > 0
        plain &= self._source[slots] == self._sources.get(source, -1)
        if not plain.any():
            return np.logical_not(plain)
        tokens = np.asarray(frame.tokens)
        if len(tokens) != len(counts):
            tokens = tokens[(np.cumsum(counts) - 1)[plain]]
        elif not plain.all():
            tokens = tokens[plain]
        self._run_on(slots, tokens, plain)
        return np.logical_not(plain)

    def _run_on(self, slots: Slots, tokens: npt.NDArray[np.uint32], plain: npt.NDArray[np.bool_]) -> None:
        """Take the plain rows; those whose token has no piece are taken out of `plain` again."""
        table = self._pieces
        try:
            pieces = list(map(table.__getitem__, tokens.tolist()))
        except IndexError:  # no token of this vocabulary: whose it is, the slow way tells
            plain[:] = False
            return
        rows = slots[plain]  # a row that stands twice in a frame is taken twice, which changes nothing
        if None in pieces:
            has = np.fromiter((piece is not None for piece in pieces), bool, len(pieces))
            plain[np.flatnonzero(plain)[~has]] = False
            rows, tokens = rows[has], tokens[has]
        whole = [piece for piece in pieces if piece is not None]
        sizes = np.fromiter(map(len, whole), np.uint16, len(whole))
        self._publish(rows, self._n[rows], sizes, whole)
        self._keep(rows, tokens, sizes)

    def _publish(
        self, rows: Slots, numbers: npt.NDArray[np.uint32], sizes: npt.NDArray[np.uint16], pieces: list[bytes]
    ) -> None:
        outs = self._out[rows]
        if len(outs) and (outs == outs[0]).all():
            self._out_list[outs[0]].pieces(self._handle[rows], numbers, sizes, pieces)
            return
        for number in np.unique(outs):
            at = np.flatnonzero(outs == number)
            some = [pieces[index] for index in at.tolist()]
            self._out_list[number].pieces(self._handle[rows[at]], numbers[at], sizes[at], some)

    def _keep(self, rows: Slots, tokens: npt.NDArray[np.uint32], sizes: npt.NDArray[np.uint16]) -> None:
        fill = self._fill[rows]
        self._tokens[rows, fill] = tokens
        self._sizes[rows, fill] = sizes
        fill += 1
        self._fill[rows] = fill
        self._at[rows] += 1
        self._n[rows] += np.uint32(1)
        self._budget[rows] -= self._frame_bytes[rows] + sizes
        for slot in rows[fill == KEPT_TOKENS].tolist():
            self._move(slot, self._streams[slot])

    def flush(self) -> None:
        """Send what the subscribers of plain rows have gathered."""
        for out in self._out_list:
            out.flush()

    def positions(self) -> list[int]:
        """Next expected position by slot; meaningful for plain streams."""
        at: list[int] = self._at.tolist()
        return at


def _number(known: dict[Any, int], one: Any) -> int:
    """Its place, a new one if it is new."""
    return known.setdefault(one, len(known))
