"""Small real parts for tests of the fabric: buses on one broker, events, and stages of a few lines."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from pipeline.bus import Bus
from pipeline.delivery import Subscriber
from pipeline.errors import ErrorCode, RequestError, TransientError
from pipeline.events import (
    Accepted,
    Envelope,
    HandoffEnded,
    Outcome,
    Plan,
    PrefixMatched,
    PromptEncoded,
    RequestBody,
    Sampling,
    Struct,
)
from pipeline.jetstream import Delivery
from pipeline.metrics import counters
from pipeline.outbox import Entry
from pipeline.owner import Owner
from pipeline.ownership import owner_limits
from pipeline.request import Head, Request
from pipeline.stage import Answer, EngineLoad, Held
from pipeline.topology import Topology
from pipeline.wire import decode_control, encode, encode_frame

GIVE_UP_S = 10.0  # a safety net, far above what anything here takes
TOPOLOGY = Topology.load()
FINGERPRINT = "f" * 16


async def eventually(holds: Callable[[], Any], what: str = "it", timeout_s: float = GIVE_UP_S) -> None:
    """Return once `holds()` is true."""
    give_up_at = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < give_up_at, f"{what} did not come true"
        await asyncio.sleep(0.002)


def limited(**limits: Any) -> Topology:
    """topics.yaml with other limits."""
    return dataclasses.replace(TOPOLOGY, limits=dataclasses.replace(TOPOLOGY.limits, **limits))


def new_worker(role: str = "worker") -> str:
    """An id that no other test has."""
    return f"{role}-{secrets.token_hex(4)}"


def new_rid() -> str:
    return secrets.token_hex(16)


@asynccontextmanager
async def joined(url: str, worker: str = "", topology: Topology = TOPOLOGY, **options: Any) -> AsyncIterator[Bus]:
    """A bus for the time of the body."""
    bus = await Bus.connect([url], worker or new_worker(), topology, **options)
    try:
        yield bus
    finally:
        await bus.close()


class Counted:
    """How much a counter of this process has grown since."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._before = counters[name]

    def __call__(self) -> int:
        return counters[self._name] - self._before


class Ear:
    """Everything that comes on one subject: `payloads`, and `controls` decoded."""

    def __init__(self, bus: Bus, subject: str, *, control: bool = True, reply_with: bytes | None = None) -> None:
        self.payloads: list[bytes] = []
        self.subjects: list[str] = []
        self.replies: list[str] = []
        self._bus = bus
        self._reply_with = reply_with
        bus.subscribe(subject, self._heard, control=control)

    @classmethod
    def of_worker(cls, bus: Bus, worker: str = "") -> Ear:
        """What a worker is told on its control subject."""
        return cls(bus, bus.topology.subject("control", worker=worker or bus.worker))

    def _heard(self, subject: str, reply: str, payload: bytes, _headers: bytes | None) -> None:
        self.subjects.append(subject)
        self.replies.append(reply)
        self.payloads.append(payload)
        if self._reply_with is not None and reply:
            self._bus.tell(reply, self._reply_with)

    @property
    def controls(self) -> list[Any]:
        return [decode_control(payload) for payload in self.payloads]

    @property
    def outcomes(self) -> list[str]:
        return [str(message.outcome) for message in self.controls if isinstance(message, Accepted)]

    async def first(self, kind: type[Struct]) -> Any:
        """The first control message of a kind; waits for it."""
        await eventually(lambda: any(isinstance(m, kind) for m in self.controls), f"a {kind.__name__}")
        return next(m for m in self.controls if isinstance(m, kind))


def envelope(owner: str, rid: str = "", **fields: Any) -> Envelope:
    given: dict[str, Any] = {
        "version": 1,
        "rid": rid or new_rid(),
        "tenant": "default",
        "request_class": "interactive",
        "attempt": 0,
        "deadline_ns": time.time_ns() + 60_000_000_000,
        "owner": owner,
        "owner_epoch": 1,
        "handles": (7,),
        "seed": 1,
    }
    return Envelope(**{**given, **fields})


def prompt(env: Envelope, sender: str = "") -> PromptEncoded:
    return PromptEncoded(
        env=env,
        model="m",
        fingerprint=FINGERPRINT,
        num_prompt_tokens=2,
        ids=array("I", (1, 2)).tobytes(),
        ids_ref="",
        block_keys=b"",
        sampling=Sampling(max_tokens=8, temperature=0.0, top_p=1.0),
        sender=sender or env.owner,
    )


def matched(env: Envelope, engine: str, sender: str) -> PrefixMatched:
    return PrefixMatched(prompt(env), 0, engine, sender)


def accepted(env: Envelope, worker: str, outcome: Outcome, stage: str = "prefill") -> Accepted:
    return Accepted(env.rid, env.attempt, stage, worker, 1, outcome, env.owner)


class Echo:
    """A choice's parser: every token is an event."""

    can_stop = True
    stopped = False

    def __init__(self, stop_at: int = -1) -> None:
        self._stop_at = stop_at

    def feed(self, token: int) -> bytes | None:
        self.stopped = token == self._stop_at
        return b'{"token":%d}' % token

    pieces = None
    frame = (b"", b"")

    def passed(self, num_tokens: int) -> None:
        """See TokenStream."""

    def finish(self, reason: str, plan: Plan, num_tokens: int) -> bytes:
        return json.dumps({"reason": reason, "hit": plan.hit_tokens, "tokens": num_tokens}).encode()


@dataclasses.dataclass
class Encoded:
    """What EchoCodec makes of a body."""

    ids: bytes
    sampling: Sampling
    num_prompt_tokens: int
    too_long: bool = False
    stop_at: int = -1
    model: str = "m"
    fingerprint: str = FINGERPRINT
    seed: int | None = None
    block_keys: bytes = b""
    salt: bytes = b""

    def open(self, rid: str, created: int, choice: int) -> Echo:
        return Echo(self.stop_at)


class EchoCodec:
    """Encodes a JSON body {"ids", "n", "too_long", "stop_at", "num_ids"}; {"raise": name} asks for a failure."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.ready = True

    async def handle(self, event: RequestBody) -> AsyncGenerator[Encoded]:
        self.bodies.append(event.body)
        if not self.ready:
            raise TransientError("no engine is known")
        try:
            body = json.loads(event.body)
        except ValueError as error:
            raise RequestError(ErrorCode.INVALID_REQUEST, "the body is not JSON", param="body") from error
        if body.get("raise") == "bug":
            raise ZeroDivisionError
        ids = array("I", body.get("ids", [1, 2])).tobytes() * body.get("repeat", 1)
        sampling = Sampling(max_tokens=8, temperature=0.0, top_p=1.0, num_choices=body.get("n", 1))
        yield Encoded(ids, sampling, len(ids) // 4, body.get("too_long", False), body.get("stop_at", -1))

    def failure(self, protocol: str, code: ErrorCode, message: str, param: str | None = None) -> bytes:
        return json.dumps({"error": {"code": code, "message": message, "param": param}}).encode()


class SmallEngine:
    """An engine stage that takes what it is told to take and remembers what it is told."""

    name = "prefill"

    def __init__(self) -> None:
        self.will = Answer(Outcome.ACCEPTED)
        self.broken = False
        self.held: dict[tuple[str, int], Held] = {}
        self.cancelled: list[tuple[str, int]] = []
        self.stopped: list[tuple[str, int, int, int]] = []
        self.unknown: list[Entry] = []
        self.ended: list[HandoffEnded] = []
        self.ticks = 0

    def envelope(self, event: PrefixMatched) -> Envelope:
        return event.prompt.env

    def submit(self, event: PrefixMatched) -> Answer:
        if self.broken:
            raise ZeroDivisionError
        env = event.prompt.env
        if self.will.outcome in (Outcome.ACCEPTED, Outcome.QUEUED):
            self.held[env.rid, env.attempt] = Held(env.rid, env.attempt, self.name, env.owner)
        return self.will

    def repeat(self, event: PrefixMatched) -> Answer:
        return Answer(Outcome.DUPLICATE)

    def cancel(self, rid: str, attempt: int) -> None:
        self.cancelled.append((rid, attempt))
        for key in [key for key in self.held if key[0] == rid and (attempt < 0 or key[1] <= attempt)]:
            del self.held[key]

    def stop_choice(self, rid: str, attempt: int, choice: int, position: int) -> None:
        self.stopped.append((rid, attempt, choice, position))

    def unknown_entry(self, entry: Entry) -> None:
        self.unknown.append(entry)

    def handoff_ended(self, message: HandoffEnded) -> None:
        self.ended.append(message)

    def holds(self) -> list[Held]:
        return list(self.held.values())

    def tick(self) -> None:
        self.ticks += 1

    def load(self) -> EngineLoad:
        return EngineLoad(
            free_slots=4, running=0, queued=0, queued_tokens=0, kv_used=0.0, model="m", fingerprint=FINGERPRINT,
            layout="", max_prompt_tokens=100,
        )  # fmt: skip


def new_request(bus: Bus, subscriber: Subscriber, rid: str = "", **head: Any) -> Request:
    """A request in its owner, just taken from intake."""
    given: dict[str, Any] = {
        "rid": rid or new_rid(),
        "tenant": "default",
        "request_class": "interactive",
        "protocol": "chat_completions",
        "timeout_s": 60.0,
        "reply": subscriber.reply,
        "tag": -1,
        "blob": "",
        "timeline": False,
        "window_bytes": 0,
    }
    checked = Head(**{**given, **head})
    return Request(
        head=checked,
        delivery=Delivery("$JS.ACK.none", 1, 1, time.time_ns()),
        machine=Owner(checked.rid, owner_limits(bus), 60.0),
        subscriber=subscriber,
        body=b"",
        started_ns=time.time_ns(),
    )


def encoded(num_choices: int = 1, **fields: Any) -> Encoded:
    sampling = Sampling(max_tokens=8, temperature=0.0, top_p=1.0, num_choices=num_choices)
    return Encoded(array("I", (1, 2)).tobytes(), sampling, 2, **fields)


def frame_of(handle: int, position: int, tokens: tuple[int, ...], finish: int = 0) -> bytes:
    """One row of one engine's step."""
    columns = array("Q", (handle,)), array("I", (position,)), bytes((len(tokens),)), bytes((finish,))
    return encode_frame(1, 1, 0, *columns, array("I", tokens))


STOP, LENGTH = 1, 2  # finish codes in frames


class Reader:
    """A subscriber of the JSON form: what was published to one reply subject."""

    def __init__(self, bus: Bus, reply: str = "") -> None:
        self.reply = reply or f"_INBOX.{new_worker('reader')}.e"
        self.rid = ""
        self._ear = Ear(bus, self.reply, control=False)

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [json.loads(payload) for payload in self._ear.payloads]

    @property
    def want_subjects(self) -> set[str]:
        return set(self._ear.replies)

    @property
    def notes(self) -> list[str]:
        return [m["event"]["type"] for m in self.messages if "n" not in m]

    @property
    def events(self) -> list[dict[str, Any]]:
        return [m for m in self.messages if "n" in m]

    def numbers(self, choice: int = 0) -> list[int]:
        return [m["n"] for m in self.events if m["c"] == choice]

    @property
    def ends(self) -> list[str]:
        return [m["end"] for m in self.events if "end" in m]


def publish_event(bus: Bus, subject: str, event: Struct) -> None:
    assert bus.publish(subject, encode(event))
