"""Reads batches of events: the receiving half of pipeline/delivery.py's second form."""

from __future__ import annotations

import struct
from itertools import accumulate
from typing import Any

import msgpack

# tag, attempt, choice, number (None: a note), end ("" runs on), the whole event
Row = tuple[int, int, int, int | None, str, bytes]
_Frame = tuple[int, int, int, bytes, bytes]  # tag, attempt, choice, head, tail

_COLUMNS = 4  # fields of a row of columns; all others have six


class BatchError(ValueError):
    """Bytes that are not a batch of events."""


class BatchReader:
    """Decodes the batches of one connection. Remembers frames by owner and handle until their tag is forgotten."""

    def __init__(self) -> None:
        self._frames: dict[str, dict[int, _Frame]] = {}
        self._places: dict[int, list[tuple[str, int]]] = {}  # tag -> where its frames are

    def read(self, owner: str, payload: bytes) -> list[Row]:
        """The events of a batch, whole. Pieces whose frame was lost are left out: the gap has them sent again.

        owner: the NATS reply of the message. Raises: BatchError for anything that is no batch.
        """
        rows: list[Row] = []
        try:
            for fields in msgpack.unpackb(payload):
                self._row(owner, fields, rows)
        except (ValueError, TypeError, struct.error) as error:
            raise BatchError(f"not a batch: {error}") from error
        return rows

    def _row(self, owner: str, fields: list[Any], rows: list[Row]) -> None:
        if len(fields) == _COLUMNS:
            self._columns(owner, fields, rows)
            return
        tag, attempt, choice, number, end, event = fields
        if number is None and end == "frame":
            self._frame(owner, tag, attempt, choice, event)
        else:
            rows.append((tag, attempt, choice or 0, number, end or "", event))

    def _frame(self, owner: str, tag: int, attempt: int, choice: int, event: bytes) -> None:
        (handle,) = struct.unpack_from("<Q", event)
        head, _, tail = event[8:].partition(b"\0")
        self._frames.setdefault(owner, {})[handle] = tag, attempt, choice, head, tail
        self._places.setdefault(tag, []).append((owner, handle))

    def _columns(self, owner: str, fields: list[bytes], rows: list[Row]) -> None:
        frame_of = self._frames.get(owner, {}).get
        handles, numbers, sizes, pieces = fields
        columns = (memoryview(handles).cast("Q"), memoryview(numbers).cast("I"), memoryview(sizes).cast("H"))
        rows += [
            (frame[0], frame[1], frame[2], number, "", frame[3] + pieces[end - size : end] + frame[4])
            for handle, number, size, end in zip(*columns, accumulate(columns[2]), strict=True)
            if (frame := frame_of(handle)) is not None
        ]

    def forget(self, tag: int) -> None:
        """No more events of this tag."""
        for owner, handle in self._places.pop(tag, ()):
            self._frames[owner].pop(handle, None)
