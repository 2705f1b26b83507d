"""Reads batches of events: the receiving half of pipeline/delivery.py's second form."""

from __future__ import annotations

import msgspec

# tag, attempt, choice, number, end, event; choice and number are nil in notes
_Row = tuple[int, int, int | None, int | None, str | bool | None, bytes]
# the same with frames applied: number None is a note, end "" runs on
Row = tuple[int, int, int, int | None, str, bytes]


class BatchReader:
    """Decodes the batches of one connection. Remembers the frame of every stream until `forget`."""

    def __init__(self) -> None:
        self._decode = msgspec.msgpack.Decoder(list[_Row]).decode
        self._frames: dict[tuple[int, int], tuple[bytes, bytes]] = {}

    def read(self, payload: bytes) -> list[Row]:
        """The events of a batch, whole. A piece whose frame was lost is left out: the gap has it sent again.

        Raises: msgspec.DecodeError.
        """
        rows: list[Row] = []
        add, frames = rows.append, self._frames
        for tag, attempt, choice, number, end, event in self._decode(payload):
            if end is False:
                frame = frames.get((tag, choice))  # type: ignore[arg-type]  # a piece has a choice
                if frame is not None:
                    add((tag, attempt, choice, number, "", frame[0] + event + frame[1]))  # type: ignore[arg-type]
            elif number is None and end == "frame":
                head, _, tail = event.partition(b"\0")
                frames[tag, choice or 0] = head, tail
            else:
                add((tag, attempt, choice or 0, number, end or "", event))  # type: ignore[arg-type]
        return rows

    def forget(self, tag: int, num_choices: int) -> None:
        """No more events of this tag."""
        for choice in range(num_choices):
            self._frames.pop((tag, choice), None)
