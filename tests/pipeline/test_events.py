"""Events as neighbours of another version send them: fields more, fields less, and fields that are none."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec
import pytest

from pipeline import events
from pipeline.events import FINISH_CODES, OTHER_FORMATS, Accepted, Control, FinishReason, Outcome, Struct
from pipeline.topology import Topology
from pipeline.wire import decode_control, decode_matched, decode_offer, decode_prompt, encode
from tests.pipeline.fabric import accepted, envelope, matched, prompt

KINDS = [
    kind for _, kind in inspect.getmembers(events, inspect.isclass) if issubclass(kind, Struct) and kind is not Struct
]
SAMPLES: dict[Any, Any] = {
    str: "text", int: 7, float: 0.5, bytes: b"\x01", bool: True, Outcome: Outcome.QUEUED,
    tuple[str, ...]: ("a", "b"), tuple[int, ...]: (1, 2), dict[str, int]: {"x": 1},
}  # fmt: skip


def sample(kind: Any) -> Any:
    """An event with something in every field."""
    values = []
    for field in msgspec.structs.fields(kind):
        options = [t for t in (getattr(field.type, "__args__", ()) or (field.type,)) if t is not type(None)]
        inner = field.type if field.type in SAMPLES else options[0]
        if inner in SAMPLES:
            values.append(SAMPLES[inner])
        elif isinstance(inner, type) and issubclass(inner, Struct):
            made = sample(inner)
            values.append((made,) if str(field.type).startswith("tuple") else made)
        else:
            raise AssertionError(f"no sample for {kind.__name__}.{field.name}: {field.type}")
    return kind(*values)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_event_comes_back_as_it_went(kind: Any):
    event = sample(kind)
    assert msgspec.msgpack.decode(encode(event), type=kind) == event


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_fields_that_a_newer_sender_appended_are_ignored(kind: Any):
    event = sample(kind)
    wire = msgspec.msgpack.decode(encode(event))
    assert msgspec.msgpack.decode(encode([*wire, "new", {"x": [1]}]), type=kind) == event


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_fields_that_an_older_sender_lacks_are_filled_in(kind: Any):
    event = sample(kind)
    wire = msgspec.msgpack.decode(encode(event))
    tagged = len(wire) - len(kind.__struct_fields__)
    required = tagged + len(kind.__struct_fields__) - len(kind.__struct_defaults__)
    got = msgspec.msgpack.decode(encode(wire[:required]), type=kind)
    for name, default in zip(reversed(kind.__struct_fields__), reversed(kind.__struct_defaults__), strict=False):
        assert getattr(got, name) == (default.factory() if hasattr(default, "factory") else default)
    with pytest.raises(msgspec.DecodeError):
        msgspec.msgpack.decode(encode(wire[: required - 1]), type=kind)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_event_cannot_be_changed(kind: Any):
    event = sample(kind)
    with pytest.raises(AttributeError):
        setattr(event, kind.__struct_fields__[0], "other")


@pytest.mark.parametrize("kind", Control.__args__, ids=lambda kind: kind.__name__)
def test_control_messages_are_told_apart(kind: Any):
    assert type(decode_control(encode(sample(kind)))) is kind


def test_hops_decode_their_own_kind_only():
    env = envelope("owner")
    assert decode_prompt(encode(prompt(env))) == prompt(env)
    assert decode_matched(encode(matched(env, "e", "s"))) == matched(env, "e", "s")
    for decode in (decode_prompt, decode_matched, decode_offer):
        with pytest.raises(msgspec.DecodeError):
            decode(encode(accepted(env, "w", Outcome.BUSY)))


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_message_that_was_cut_is_no_message(cut: int):
    payload = encode(accepted(envelope("owner"), "w", Outcome.BUSY))
    with pytest.raises(msgspec.DecodeError):
        decode_control(payload[:-cut])


def test_an_outcome_that_is_none_is_no_message():
    payload = encode(Accepted("r", 0, "prefill", "w", 1, Outcome.BUSY)).replace(b"busy", b"fine")
    with pytest.raises(msgspec.DecodeError):
        decode_control(payload)


def test_finish_codes_are_the_closed_list_in_its_order():
    assert tuple(FinishReason) == FINISH_CODES
    assert FINISH_CODES[:2] == ("stop", "length")  # numbers on the wire: never reordered


def test_every_event_that_topics_yaml_names_is_a_struct_or_has_a_described_format():
    structs = {kind.__name__ for kind in KINDS}
    for topic in Topology.load().topics.values():
        assert topic.event in structs or topic.event in OTHER_FORMATS or topic.event == "Control"
