"""The three shapes of a stage. None of them names a subject, a queue group, a retry or a limit.

request   `handle(event)` yields events: codec, lookup
engine    `submit`, `step`, `cancel`, `holds`: prefill, transfer + decode
stream    `open(...)` gives one choice's parser, fed token by token: parse
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.errors import ErrorCode
from pipeline.events import Envelope, HandoffEnded, Outcome, Plan, RegionTicket, Sampling
from pipeline.outbox import Entry


class RequestStage(Protocol):
    """Event in, events out. Errors: RequestError ends the request, TransientError retries it."""

    def handle(self, event: Any) -> AsyncGenerator[Any]:
        """Do the stage's work for one event."""
        ...


@dataclass(frozen=True, slots=True)
class Answer:
    """An engine's immediate answer to offered work.

    owner_knows, sender_knows: what has just been told to them says it already.
    """

    outcome: Outcome
    reason: str = ""
    retry_after_s: float = 0.0
    plan: Plan | None = None
    owner_knows: bool = False
    sender_knows: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What an engine reports in its beacon."""

    free_slots: int
    running: int
    queued: int
    queued_tokens: int
    kv_used: float
    model: str
    fingerprint: str
    layout: str
    max_prompt_tokens: int
    ticket: RegionTicket | None = None
    index_seq: int = 0


@dataclass(frozen=True, slots=True)
class Held:
    """A request that an engine has in hand."""

    rid: str
    attempt: int
    stage: str
    owner: str


class EngineStage(Protocol):
    """Engine glue. Every method runs on the loop and returns at once; computing happens in steps."""

    name: str

    def envelope(self, event: Any) -> Envelope:
        """The envelope of one of its input events."""
        ...

    def submit(self, event: Any) -> Answer:
        """Take offered work, or say why not. No computing before the answer."""
        ...

    def repeat(self, event: Any) -> Answer:
        """The same work was offered again: say again what became of it."""
        ...

    def cancel(self, rid: str, attempt: int) -> None:
        """Drop attempts up to this one (-1 = all) within one step or chunk; unknown ones are fine."""
        ...

    def stop_choice(self, rid: str, attempt: int, choice: int, position: int) -> None:
        """Parse found the end of a choice: tokens from `position` on are waste."""
        ...

    def unknown_entry(self, entry: Entry) -> None:
        """The owner does not know this handle (any more): its tokens are waste."""
        ...

    def handoff_ended(self, message: HandoffEnded) -> None:
        """The reader's terminal note about KV that this stage offered."""
        ...

    def holds(self) -> list[Held]:
        """Requests in hand."""
        ...

    def tick(self) -> None:
        """Called ten times a second: leases, retries, idle checks."""
        ...

    def load(self) -> EngineLoad:
        """What the beacon says of it."""
        ...


class TokenStream(Protocol):
    """One choice's parser: a pure function of the tokens fed so far, so that it can be run again."""

    can_stop: bool  # whether `feed` may ever set `stopped`

    @property
    def stopped(self) -> bool:
        """True once a stop string was found: nothing after the token just fed counts."""
        ...

    def feed(self, token: int) -> bytes | None:
        """The one event (JSON) that this token caused, or None."""
        ...

    @property
    def pieces(self) -> Sequence[bytes | None] | None:
        """By token, the varying part of the event that `feed` would give, which is then frame[0] + piece + frame[1].

        None while the next event may be of another form; an entry that is None says: feed this token. The table and
        the frame hold until the next `feed`; the same table serves many streams.
        """
        ...

    def passed(self, num_tokens: int) -> None:
        """So many tokens became events through `pieces`, without being fed."""
        ...

    @property
    def frame(self) -> tuple[bytes, bytes]:
        """What stands around pieces, without NUL bytes; changed only by `feed`."""
        ...

    def finish(self, reason: str, plan: Plan, num_tokens: int) -> bytes:
        """The terminal event."""
        ...


class Encoding(Protocol):
    """What the codec stage made of a request: enough to dispatch it and to open its streams.

    ids: u32le; block_keys: 16 bytes for every full 128 tokens.
    """

    model: str
    fingerprint: str
    sampling: Sampling
    seed: int | None
    num_prompt_tokens: int
    too_long: bool
    ids: bytes
    block_keys: bytes
    salt: bytes

    def open(self, rid: str, created: int, choice: int) -> TokenStream:
        """A fresh parser for one choice."""
        ...


class CodecStage(RequestStage, Protocol):
    """A request stage that can also word a failure in the protocol of the request."""

    def failure(self, protocol: str, code: ErrorCode, message: str, param: str | None = None) -> bytes:
        """The protocol's own error body (JSON)."""
        ...
