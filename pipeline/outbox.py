"""Tokens on their way to owners: kept by the engine until acknowledged, sent as one frame per owner and step.

Finished choices are kept too (at most 60 s); their unacknowledged ends are repeated every 100 ms together with
the note that the owner needs for usage. Source: design 2.5; facts-bus 4.3.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from pipeline.metrics import count
from pipeline.wire import AckKind, WireError, decode_acks, encode_frame

_MAX_ROW_TOKENS = 255  # a row's count is one byte
# A frame is closed beyond it, far below any broker's max_payload (1 MiB by default). Source: ours, 128 KiB of tokens
_MAX_FRAME_TOKENS = 32_768
_MAX_FRAME_ROWS = 8_192  # likewise: 14 bytes a row, 112 KiB


@dataclass(slots=True, eq=False)
class Entry:
    """Unacknowledged tokens of one handle of one owner. `first` is the position of tokens[0].

    Handles are numbers that their owner issued: two owners may well have issued the same one.
    """

    handle: int
    owner: str
    rid: str
    first: int
    tokens: array[int] = field(default_factory=lambda: array("I"))
    finish: int = 0
    note: bytes = b""  # a control message that is repeated with the end
    finished_at: float = 0.0
    closed: bool = False  # nobody waits for it any more


class TokenRow(NamedTuple):
    """Tokens of one entry from one step. `finish`: 0 or 1 + index into FINISH_CODES.

    A named tuple, because one is made for every token: 0.5 us against 1.3 us of a frozen dataclass.
    """

    entry: Entry
    position: int
    tokens: tuple[int, ...]
    finish: int = 0


class _Columns:
    """One frame in the making."""

    __slots__ = ("counts", "finishes", "handles", "positions", "tokens")

    def __init__(self) -> None:
        self.handles = array("Q")
        self.positions = array("I")
        self.counts = bytearray()
        self.finishes = bytearray()
        self.tokens = array("I")

    def add(self, handle: int, position: int, tokens: tuple[int, ...] | array[int], finish: int) -> None:
        num = len(tokens)
        if num > _MAX_ROW_TOKENS:
            for at in range(0, num, _MAX_ROW_TOKENS):
                part = tokens[at : at + _MAX_ROW_TOKENS]
                self.add(handle, position + at, part, finish if at + len(part) == num else 0)
            return
        self.handles.append(handle)
        self.positions.append(position)
        self.counts.append(num)
        self.finishes.append(finish)
        self.tokens.extend(tokens)

    @property
    def full(self) -> bool:
        return len(self.tokens) > _MAX_FRAME_TOKENS or len(self.handles) > _MAX_FRAME_ROWS


_Frames = dict[str, list[_Columns]]


def _columns(frames: _Frames, owner: str) -> _Columns:
    """The frame in the making for an owner: another one when that is full."""
    of_owner = frames.get(owner)
    if of_owner is None:
        of_owner = frames[owner] = [_Columns()]
    elif of_owner[-1].full:
        of_owner.append(_Columns())
    return of_owner[-1]


class Outbox:
    """All unacknowledged tokens of one engine process."""

    def __init__(self, epoch: int, send: Callable[[str, bytes], bool], note: Callable[[str, bytes], bool]) -> None:
        self._epoch = epoch
        self._send = send  # (owner, frame)
        self._note = note  # (owner, control message)
        self._entries: dict[tuple[str, int], Entry] = {}
        self._step = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def owners(self) -> set[str]:
        """Whose acknowledgement is waited for."""
        return {entry.owner for entry in self._entries.values()}

    def open(self, handle: int, owner: str, rid: str, position: int, note: bytes = b"") -> Entry:
        """Tokens of this handle follow, the first at `position`; what was open under it is closed."""
        before = self._entries.get((owner, handle))
        if before is not None:
            self.forget(before)
        entry = self._entries[owner, handle] = Entry(handle, owner, rid, position, note=note)
        return entry

    def push(self, rows: Iterable[TokenRow]) -> None:
        """Keep a step's rows and send them, one frame per owner."""
        self._step += 1
        frames: _Frames = {}
        now = time.monotonic()
        columns, of_owner = _Columns(), ""
        for entry, position, tokens, finish in rows:
            if entry.closed:
                continue  # forgotten meanwhile: its owner has no use for it
            owner = entry.owner
            if owner != of_owner or columns.full:
                columns, of_owner = _columns(frames, owner), owner
            if len(tokens) == 1 and not finish:
                # nearly every row there is: what `add` would do, without the call
                entry.tokens.append(tokens[0])
                columns.handles.append(entry.handle)
                columns.positions.append(position)
                columns.counts.append(1)
                columns.finishes.append(0)
                columns.tokens.append(tokens[0])
                continue
            entry.tokens.extend(tokens)
            if finish:
                entry.finish = finish
                entry.finished_at = now
            columns.add(entry.handle, position, tokens, finish)
        self._publish(frames)

    def _publish(self, frames: _Frames) -> None:
        now_ns = time.time_ns()
        for owner, of_owner in frames.items():
            for c in of_owner:
                frame = encode_frame(
                    self._epoch, self._step, now_ns, c.handles, c.positions, c.counts, c.finishes, c.tokens
                )
                self._send(owner, frame)

    def forget(self, entry: Entry) -> None:
        """Drop what is kept of a handle."""
        entry.closed = True
        if self._entries.get((entry.owner, entry.handle)) is entry:
            del self._entries[entry.owner, entry.handle]

    def acknowledged(self, owner: str, payload: bytes) -> list[Entry]:
        """Take an owner's acknowledgement message; returns entries that the owner does not know."""
        try:
            kind, handles, positions = decode_acks(payload)
        except WireError:
            count("acks_malformed")
            return []
        unknown: list[Entry] = []
        again: _Frames = {}
        for handle, position in zip(handles, positions, strict=True):
            entry = self._entries.get((owner, handle))
            if entry is None:
                continue
            if kind is AckKind.FORGET:
                self.forget(entry)
                unknown.append(entry)
                continue
            self._trim(entry, position)
            if kind is AckKind.RESEND:
                count("tokens_resent", len(entry.tokens))
                _columns(again, owner).add(handle, entry.first, entry.tokens, entry.finish)
        self._publish(again)
        return unknown

    def _trim(self, entry: Entry, position: int) -> None:
        known = min(max(position - entry.first, 0), len(entry.tokens))
        del entry.tokens[:known]
        entry.first += known
        if entry.finish and position > entry.first + len(entry.tokens):
            self.forget(entry)  # the end counts as one position more: it may have come without a token

    def repeat_ends(self, keep_s: float, after_s: float) -> None:
        """Send unacknowledged ends again; drop those older than `keep_s`."""
        now = time.monotonic()
        again: _Frames = {}
        for entry in list(self._entries.values()):
            if not entry.finish or now - entry.finished_at < after_s:
                continue
            if now - entry.finished_at > keep_s:
                count("tokens_never_acknowledged", len(entry.tokens))
                self.forget(entry)
                continue
            _columns(again, entry.owner).add(entry.handle, entry.first, entry.tokens, entry.finish)
            if entry.note:
                self._note(entry.owner, entry.note)
        self._publish(again)
