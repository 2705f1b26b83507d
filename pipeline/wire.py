"""Bytes on the wire: msgpack for events, one columnar binary layout for token frames and acknowledgements.

A frame (little-endian) holds one step's tokens of one engine for one owner:

    offset  size       field
    0       u16        magic 0x7D31
    2       u8         version
    3       u8         flags (bit 0: logprobs follow)
    4       u32        count N of rows
    8       u64        epoch of the engine
    16      u64        step number
    24      u64        wall clock, ns
    32      u64[N]     handle
    .       u32[N]     first position
    .       u8[N]      number of tokens (0..255)
    .       u8[N]      finish: 0 = runs on, else 1 + index into FINISH_CODES
    .       pad to 4
    .       u32[sum]   tokens

Columns, because a frame of a thousand rows then costs 0.2 us a token. Source: facts-bus 4.1, 11.7.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import msgspec

from pipeline.events import FINISH_CODES, Control, PrefillFinished, PrefixMatched, PromptEncoded

FRAME_MAGIC = 0x7D31
FRAME_VERSION = 1
_HEAD = struct.Struct("<HBBIQQQ")
_ACK = struct.Struct("<HBBI")
ACK_MAGIC = 0x7D32

# What a row may say about its end; anything else is another version's.
_KNOWN_ENDS = bytes(range(len(FINISH_CODES) + 1))

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode

decode_prompt = msgspec.msgpack.Decoder(PromptEncoded).decode
decode_matched = msgspec.msgpack.Decoder(PrefixMatched).decode
decode_offer = msgspec.msgpack.Decoder(PrefillFinished).decode
decode_control = msgspec.msgpack.Decoder(Control).decode


class WireError(ValueError):
    """Bytes that are not what their subject promises. Counted and dropped by the receiver, never guessed at."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A decoded frame. Columns share the payload's memory; they are valid as long as it is."""

    epoch: int
    step: int
    time_ns: int
    handles: Sequence[int]  # [N] u64
    positions: Sequence[int]  # [N] u32
    counts: bytes  # [N]
    finishes: bytes  # [N]
    tokens: Sequence[int]  # [sum(counts)] u32


def encode_frame(
    epoch: int,
    step: int,
    time_ns: int,
    handles: array[int],
    positions: array[int],
    counts: bytes | bytearray,
    finishes: bytes | bytearray,
    tokens: array[int],
) -> bytes:
    """Columns to bytes. handles: 'Q'; positions, tokens: 'I'; counts, finishes: one byte a row."""
    num_rows = len(handles)
    head = _HEAD.pack(FRAME_MAGIC, FRAME_VERSION, 0, num_rows, epoch, step, time_ns)
    pad = b"\0" * (-(2 * num_rows) % 4)
    return b"".join((head, handles.tobytes(), positions.tobytes(), counts, finishes, pad, tokens.tobytes()))


def decode_frame(payload: bytes) -> Frame:
    """Bytes to columns.

    Raises: WireError when the magic, version, a finish code or any length is wrong.
    """
    if len(payload) < _HEAD.size:
        raise WireError(f"frame of {len(payload)} bytes is shorter than its header of {_HEAD.size}")
    magic, version, _flags, num_rows, epoch, step, time_ns = _HEAD.unpack_from(payload)
    if magic != FRAME_MAGIC or version != FRAME_VERSION:
        raise WireError(f"not a frame: magic {magic:#x}, version {version}")
    at_positions = _HEAD.size + 8 * num_rows
    at_counts = at_positions + 4 * num_rows
    at_finishes = at_counts + num_rows
    at_tokens = at_finishes + num_rows + (-(2 * num_rows) % 4)
    counts = payload[at_counts:at_finishes]
    if at_tokens + 4 * sum(counts) != len(payload):
        raise WireError(f"frame of {len(payload)} bytes, but its {num_rows} rows say {at_tokens + 4 * sum(counts)}")
    finishes = payload[at_finishes : at_finishes + num_rows]
    if unknown := finishes.translate(None, _KNOWN_ENDS):
        raise WireError(f"unknown finish code {unknown[0]}")
    view = memoryview(payload)
    return Frame(
        epoch,
        step,
        time_ns,
        view[_HEAD.size : at_positions].cast("Q"),
        view[at_positions:at_counts].cast("I"),
        counts,
        finishes,
        view[at_tokens:].cast("I"),
    )


class AckKind(IntEnum):
    """What an owner says about positions of handles."""

    HAVE = 0  # everything below is received: forget it
    RESEND = 1  # everything below is received, what follows is missing: send it again
    FORGET = 2  # unknown handle: stop and forget


def encode_acks(kind: AckKind, handles: array[int], positions: array[int]) -> bytes:
    """Columns: for each handle the next position that the owner lacks. The end counts as one position more."""
    return _ACK.pack(ACK_MAGIC, FRAME_VERSION, kind, len(handles)) + handles.tobytes() + positions.tobytes()


def decode_acks(payload: bytes) -> tuple[AckKind, Sequence[int], Sequence[int]]:
    """-> (kind, handles, positions).

    Raises: WireError on a wrong magic, version, kind or length.
    """
    if len(payload) < _ACK.size:
        raise WireError("acknowledgement shorter than its header")
    magic, version, kind, num_rows = _ACK.unpack_from(payload)
    known = magic == ACK_MAGIC and version == FRAME_VERSION and kind <= AckKind.FORGET
    if not known or len(payload) != _ACK.size + 12 * num_rows:
        raise WireError(f"not an acknowledgement of {num_rows} rows: {len(payload)} bytes, magic {magic:#x}")
    view = memoryview(payload)
    split = _ACK.size + 8 * num_rows
    return AckKind(kind), view[_ACK.size : split].cast("Q"), view[split:].cast("I")
