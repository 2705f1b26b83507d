from __future__ import annotations

import contextlib
import itertools
import struct
from array import array
from typing import Any

import msgspec
import pytest

from pipeline.batch import BatchError, BatchReader

OWNER, TAG = "codec-1", 41
FRAME = [TAG, 3, 1, None, "frame", struct.pack("<Q", 7) + b'{"text":"' + b"\0" + b'"}']
GOOD = msgspec.msgpack.encode([FRAME, [array("Q", [7]).tobytes(), array("I", [5]).tobytes(), b"\2\0", b"hi"]])


def batch(*rows: Any) -> bytes:
    return msgspec.msgpack.encode(list(rows))


def columns(*events: tuple[int, int, bytes]) -> list[bytes]:
    """A row of columns; events: handle, number, piece."""
    handles, numbers, pieces = zip(*events, strict=True)
    sizes = array("H", [len(piece) for piece in pieces])
    return [array("Q", handles).tobytes(), array("I", numbers).tobytes(), sizes.tobytes(), b"".join(pieces)]


def test_whole_events_ends_and_notes_come_back_as_they_went():
    rows = BatchReader().read(
        OWNER,
        batch([TAG, 0, 1, 0, None, b"first"], [TAG, 0, 1, 1, "stop", b"last"], [TAG, 2, None, None, None, b"note"]),
    )
    assert rows == [
        (TAG, 0, 1, 0, "", b"first"),
        (TAG, 0, 1, 1, "stop", b"last"),
        (TAG, 2, 0, None, "", b"note"),
    ]


def test_pieces_stand_in_the_frame_of_their_handle():
    reader = BatchReader()
    other = [TAG + 1, 0, 0, None, "frame", struct.pack("<Q", 9) + b"<\0>"]
    assert reader.read(OWNER, batch(FRAME, other)) == []
    assert reader.read(OWNER, batch(columns((7, 5, b"hi"), (9, 0, b""), (7, 6, "🦀".encode())))) == [
        (TAG, 3, 1, 5, "", b'{"text":"hi"}'),
        (TAG + 1, 0, 0, 0, "", b"<>"),
        (TAG, 3, 1, 6, "", '{"text":"🦀"}'.encode()),
    ]


def test_a_frame_holds_from_its_place_in_a_batch_until_the_next_one():
    reader = BatchReader()
    newer = [TAG, 4, 1, None, "frame", struct.pack("<Q", 7) + b"[\0]"]
    rows = reader.read(OWNER, batch(FRAME, columns((7, 0, b"a")), newer, columns((7, 1, b"b"))))
    assert rows == [(TAG, 3, 1, 0, "", b'{"text":"a"}'), (TAG, 4, 1, 1, "", b"[b]")]


def test_a_piece_without_a_frame_is_left_out_and_its_neighbours_are_not():
    reader = BatchReader()
    reader.read(OWNER, batch(FRAME))
    rows = reader.read(OWNER, batch(columns((8, 1, b"lost"), (7, 2, b"here"))))
    assert rows == [(TAG, 3, 1, 2, "", b'{"text":"here"}')]


def test_handles_belong_to_the_owner_that_sent_them():
    reader = BatchReader()
    reader.read(OWNER, batch(FRAME))
    assert reader.read("codec-2", batch(columns((7, 5, b"hi")))) == []


def test_a_forgotten_tag_takes_its_frames_along_and_no_others():
    reader = BatchReader()
    kept = [TAG + 1, 0, 0, None, "frame", struct.pack("<Q", 9) + b"<\0>"]
    reader.read(OWNER, batch(FRAME, kept))
    reader.read("codec-2", batch(FRAME))
    reader.forget(TAG)
    reader.forget(TAG)
    assert reader.read("codec-2", batch(columns((7, 5, b"x")))) == []
    assert reader.read(OWNER, batch(columns((7, 5, b"x"), (9, 6, b"y")))) == [(TAG + 1, 0, 0, 6, "", b"<y>")]


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"{}", batch(1), batch([1, 2, 3]), GOOD[:-1]])
def test_rubbish_is_named_as_such(payload: bytes):
    with pytest.raises(BatchError):
        BatchReader().read(OWNER, payload)


# The reader promises DecodeError and ValueError, but lets what memoryview and struct say through.


@pytest.mark.parametrize(
    "row",
    [
        [b"abc"] * 4,
        [1, 2, 3, 4],
        [TAG, 0, 0, None, "frame", b"short"],
        [TAG, 0, 0, None, "frame", None],
        [[TAG], 0, 0, None, "frame", bytes(8)],
    ],
)
def test_a_row_of_other_fields_is_named_as_such(row: list[Any]):
    with pytest.raises(BatchError):
        BatchReader().read(OWNER, batch(row))


def test_a_flipped_byte_raises_only_what_the_reader_promises():
    for at, flip in itertools.product(range(len(GOOD)), range(1, 256)):
        payload = bytearray(GOOD)
        payload[at] ^= flip
        with contextlib.suppress(BatchError):
            BatchReader().read(OWNER, bytes(payload))


def test_columns_of_different_lengths_are_no_batch():
    good = columns((7, 5, b"hi"), (7, 6, b"ho"))
    with pytest.raises(ValueError, match="zip"):
        BatchReader().read(OWNER, batch([good[0], good[1][:4], *good[2:]]))
