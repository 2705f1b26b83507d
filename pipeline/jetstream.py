"""JetStream as the pipeline needs it: declare streams and consumers, probe, fence. Raw API, no per-message tasks.

Streams are created or compared, never deleted or recreated: recreating one deletes its consumers, and every other
replica that reads through them then waits for messages that never come. Source: facts-bus 3.4, 10, 11.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pipeline.bus import Bus
from pipeline.errors import SetupError, TransientError
from pipeline.topology import ConsumerSpec, StreamSpec

NS = 1_000_000_000
_IN_USE = {10058, 10013, 10148, 10105}  # stream, consumer: there already. Source: nats-errors


@dataclass(frozen=True, slots=True)
class Delivery:
    """What an intake message's ack subject tells. `time_ns` is the broker's clock at storing."""

    ack: str
    num_delivered: int
    stream_seq: int
    time_ns: int


def parse_ack(subject: str) -> Delivery:
    """`$JS.ACK…` in its old (9 tokens) and new (11 or more, with domain and account) form.

    Raises: ValueError for anything else.
    """
    tokens = subject.split(".")
    if len(tokens) < 9 or len(tokens) == 10 or tokens[:2] != ["$JS", "ACK"]:
        raise ValueError(f"not a JetStream ack subject: {subject!r}")
    at = 4 if len(tokens) == 9 else 6
    return Delivery(subject, int(tokens[at]), int(tokens[at + 1]), int(tokens[at + 3]))


async def ensure(bus: Bus) -> None:
    """Create what topics.yaml declares, or compare with what is there; probe that a publish is stored.

    Raises: SetupError naming what is missing: JetStream itself, a permission, storage, a differing stream.
    """
    try:
        account = await bus.ask_json("$JS.API.INFO", {})
    except TransientError as error:
        raise SetupError(
            "this account has no JetStream: start nats-server with -js, or check its permissions on $JS.API.>"
        ) from error
    if "error" in account:
        raise SetupError(f"JetStream is not enabled for this account: {account['error'].get('description')}")
    for stream in bus.topology.streams.values():
        await _ensure_stream(bus, stream)
    for consumer in bus.topology.consumers.values():
        await ensure_consumer(bus, consumer)
    try:
        await fence(bus)
    except TransientError as error:
        raise SetupError(f"the broker does not store what is published to it: {error}") from error


def _stream_config(spec: StreamSpec) -> dict[str, Any]:
    config: dict[str, Any] = {
        "name": spec.name,
        "subjects": list(spec.subjects),
        "retention": spec.retention,
        "storage": spec.storage,
        "discard": spec.discard,
        "num_replicas": 1,
        "max_age": int(spec.max_age_s * NS),
        "duplicate_window": int(spec.duplicate_window_s * NS),
        "max_bytes": spec.max_bytes,
        "max_msgs": spec.max_msgs or -1,
        "max_msgs_per_subject": spec.max_msgs_per_subject or -1,
        "discard_new_per_subject": spec.per_subject,
        "allow_direct": spec.direct,
    }
    return {key: value for key, value in config.items() if value not in (0, False)}


async def _ensure_stream(bus: Bus, spec: StreamSpec) -> None:
    config = _stream_config(spec)
    answer = await _api(bus, f"STREAM.CREATE.{spec.name}", config)
    error = answer.get("error")
    if error is None:
        return
    if error.get("err_code") not in _IN_USE:
        raise SetupError(f"cannot create the stream {spec.name}: {error.get('description')}")
    info = await _api(bus, f"STREAM.INFO.{spec.name}", {})
    have = info.get("config", {})
    differs = [key for key in ("subjects", "retention", "storage", "discard") if have.get(key) != config.get(key)]
    if differs:
        detail = ", ".join(f"{key} is {have.get(key)!r}, expected {config.get(key)!r}" for key in differs)
        raise SetupError(f"the stream {spec.name} exists and differs: {detail}")
    updated = await _api(bus, f"STREAM.UPDATE.{spec.name}", {**have, **config})
    if "error" in updated:
        raise SetupError(f"the stream {spec.name} cannot be updated: {updated['error'].get('description')}")


async def ensure_consumer(bus: Bus, spec: ConsumerSpec) -> None:
    """Create a durable consumer, or leave the one that is there.

    Raises: SetupError when the broker refuses.
    """
    config = {
        "durable_name": spec.name,
        "filter_subject": spec.filter,
        "ack_policy": "explicit",
        "ack_wait": int(spec.ack_wait_s * NS),
        "max_deliver": -1,
        "max_ack_pending": spec.max_ack_pending,
        "max_waiting": 512,  # pulls under way: the server's default; each codec worker has a few of its own
    }
    request = {"stream_name": spec.stream, "config": config}
    answer = await _api(bus, f"CONSUMER.DURABLE.CREATE.{spec.stream}.{spec.name}", request)
    error = answer.get("error")
    if error and error.get("err_code") not in _IN_USE:
        raise SetupError(f"cannot create the consumer {spec.name}: {error.get('description')}")


async def _api(bus: Bus, call: str, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return await bus.ask_json(f"$JS.API.{call}", request)
    except TransientError as error:
        raise SetupError(f"JetStream did not answer {call}: {error}") from error


async def fence(bus: Bus) -> int:
    """A new attempt number, larger than every earlier one, that survives the broker.

    Raises: TransientError when the broker did not store it.
    """
    answer = json.loads(await bus.ask(bus.topology.subject("fence"), b"", timeout_s=2.0))
    if "error" in answer:
        raise TransientError(f"FENCE refused: {answer['error'].get('description')}")
    return int(answer["seq"])
