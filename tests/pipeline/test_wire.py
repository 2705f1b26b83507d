from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.events import FINISH_CODES, Accepted, Find, Outcome, Plan
from pipeline.wire import (
    AckKind,
    WireError,
    decode_acks,
    decode_control,
    decode_frame,
    encode,
    encode_acks,
    encode_frame,
)

u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
rows = st.lists(st.tuples(u64, u32, st.lists(u32, max_size=255), st.integers(0, len(FINISH_CODES))), max_size=9)


def encoded(columns, epoch=3, step=4, time_ns=5) -> bytes:
    return encode_frame(
        epoch,
        step,
        time_ns,
        array("Q", [row[0] for row in columns]),
        array("I", [row[1] for row in columns]),
        bytes(len(row[2]) for row in columns),
        bytes(row[3] for row in columns),
        array("I", [token for row in columns for token in row[2]]),
    )


@settings(derandomize=True, max_examples=200, deadline=None)
@given(rows, u64, u64, u64)
def test_a_frame_is_decoded_back(columns, epoch, step, time_ns):
    frame = decode_frame(encoded(columns, epoch, step, time_ns))
    assert (frame.epoch, frame.step, frame.time_ns) == (epoch, step, time_ns)
    tokens, at, got = list(frame.tokens), 0, []
    for handle, position, num, finish in zip(frame.handles, frame.positions, frame.counts, frame.finishes, strict=True):
        got.append((handle, position, tokens[at : at + num], finish))
        at += num
    assert got == columns


def test_a_frame_lies_in_memory_as_the_module_says():
    frame = encoded([(0x0102030405060708, 9, [10, 11], 1), (12, 13, [], 0), (14, 15, [16], 2)])
    assert frame[:4] == bytes((0x31, 0x7D, 1, 0))
    assert frame[4:8] == bytes((3, 0, 0, 0))
    assert frame[32:40] == bytes((8, 7, 6, 5, 4, 3, 2, 1))
    assert frame[56:60] == bytes((9, 0, 0, 0))
    assert (frame[68:71], frame[71:74], frame[74:76]) == (b"\2\0\1", b"\1\0\2", b"\0\0")
    assert frame[76:] == bytes((10, 0, 0, 0, 11, 0, 0, 0, 16, 0, 0, 0))


@settings(derandomize=True, max_examples=400, deadline=None)
@given(rows, st.data())
def test_corrupted_frames_raise_only_wire_errors(columns, data):
    payload = bytearray(encoded(columns))
    what = data.draw(st.sampled_from(["cut", "grow", "flip"]))
    if what == "cut":
        payload = payload[: data.draw(st.integers(0, len(payload) - 1))]
    elif what == "grow":
        payload += data.draw(st.binary(min_size=1, max_size=9))
    else:
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        frame = decode_frame(bytes(payload))
    except WireError:
        return
    assert what == "flip", "another length is never accepted"
    assert sum(frame.counts) == len(frame.tokens)
    assert len(frame.handles) == len(frame.positions) == len(frame.counts) == len(frame.finishes)
    assert all(finish <= len(FINISH_CODES) for finish in frame.finishes)


@pytest.mark.parametrize(
    "payload", [b"", b"\0" * 31, b"\0" * 32, b"{}" * 40, b"\x31\x7d\x01\x00\xff\xff\xff\xff" + bytes(24)]
)
def test_rubbish_is_no_frame(payload):
    with pytest.raises(WireError):
        decode_frame(payload)


def test_a_finish_code_of_another_version_is_named():
    with pytest.raises(WireError, match="unknown finish code 9"):
        decode_frame(encoded([(1, 2, [3], len(FINISH_CODES) + 1)]))


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.sampled_from(AckKind), st.lists(st.tuples(u64, u32), max_size=20))
def test_acknowledgements_are_decoded_back(kind, columns):
    payload = encode_acks(kind, array("Q", [h for h, _ in columns]), array("I", [p for _, p in columns]))
    got_kind, handles, positions = decode_acks(payload)
    assert (got_kind, list(zip(handles, positions, strict=True))) == (kind, columns)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.lists(st.tuples(u64, u32), max_size=5), st.data())
def test_corrupted_acknowledgements_raise_only_wire_errors(columns, data):
    payload = bytearray(
        encode_acks(AckKind.HAVE, array("Q", [h for h, _ in columns]), array("I", [p for _, p in columns]))
    )
    index = data.draw(st.integers(0, len(payload) - 1))
    payload[index] ^= data.draw(st.integers(1, 255))
    payload = payload[: data.draw(st.sampled_from([len(payload), index]))]
    try:
        _, handles, positions = decode_acks(bytes(payload))
    except WireError:
        return
    assert len(handles) == len(positions) == len(columns)


@pytest.mark.parametrize("at", [0, 2, 3, 4])
def test_each_field_of_an_acknowledgements_head_is_checked(at):
    payload = bytearray(encode_acks(AckKind.RESEND, array("Q", [7]), array("I", [8])))
    payload[at] = 9
    with pytest.raises(WireError):
        decode_acks(bytes(payload))


def test_a_control_message_is_known_by_its_tag():
    plan = Plan(700, 512, 512, 384, 77)
    for message in (Find("ab" * 16, "codec-1"), Accepted("cd" * 16, 5, "prefill", "p-1", 6, Outcome.QUEUED, plan=plan)):
        assert decode_control(encode(message)) == message
