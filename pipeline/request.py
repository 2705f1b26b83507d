"""One request in its owner: what the intake message said, and everything the owner keeps about it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from pipeline.delivery import Subscriber
from pipeline.errors import ErrorCode, RequestError
from pipeline.events import Plan, Span
from pipeline.jetstream import NS, Delivery
from pipeline.owner import Owner
from pipeline.stage import Encoding
from pipeline.stream import Stream
from pipeline.topology import Limits

PROTOCOLS = ("chat_completions", "responses", "messages", "completions")
CLASSES = ("interactive", "batch")

_RID = re.compile(r"[0-9a-f]{32}\Z")
_SUBJECT = re.compile(r"(?=.{1,255}\Z)[!-)+-=?-~]+\Z")  # printable, no wildcard
_NUMBER = re.compile(r"[0-9.eE+-]{1,40}\Z")  # float() also takes blanks, underscores, words and other scripts' digits


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The checked headers of an intake message. `tag` >= 0 asks for batches and names this request in them."""

    rid: str
    tenant: str
    request_class: str
    protocol: str
    timeout_s: float
    reply: str
    tag: int
    blob: str
    timeline: bool
    window_bytes: int  # the first Want, said with the request itself; 0 = none


def check_reply(reply: str, tenant: str, out_prefix: str) -> str:
    """A subject that events may be sent to: an inbox, or the tenant's own `out` space. Never a subject of ours.

    Raises: RequestError(invalid_request).
    """
    allowed = reply.startswith(("_INBOX.", f"{out_prefix}{tenant}."))
    if not allowed or not _SUBJECT.match(reply) or ".." in reply or reply.endswith("."):
        message = f"Tm-Reply must be a subject below _INBOX. or {out_prefix}{tenant}., not {reply[:80]!r}"
        raise RequestError(ErrorCode.INVALID_REQUEST, message, param="Tm-Reply")
    return reply


def _number(headers: dict[str, str], name: str, default: float) -> float:
    text = headers.get(name)
    if text is None:
        return default
    try:
        return float(text if _NUMBER.match(text) else "")
    except ValueError as error:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"{name} is not a number: {text[:40]!r}", param=name) from error


def _unsigned(text: str | None, name: str, default: int) -> int:
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) < 2**64):
        raise RequestError(ErrorCode.INVALID_REQUEST, f"{name} must be an unsigned 64-bit number", param=name)
    return int(text)


def read_head(subject: str, headers: dict[str, str], reply: str, limits: Limits) -> Head:
    """Check an intake message's subject and headers. `reply` is checked already.

    Raises: RequestError(invalid_request) naming the header.
    """
    _version, _in, request_class, tenant = subject.split(".")
    message_id = headers.get("Nats-Msg-Id", "")
    rid = message_id.removeprefix(f"{tenant}:")
    if rid == message_id or not _RID.match(rid):
        message = f"Nats-Msg-Id must be {tenant}:<32 hex digits>, not {message_id[:80]!r}"
        raise RequestError(ErrorCode.INVALID_REQUEST, message, param="Nats-Msg-Id")
    if request_class not in CLASSES:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"unknown class {request_class!r}, not one of {CLASSES}")
    protocol = headers.get("Tm-Protocol", "chat_completions")
    if protocol not in PROTOCOLS:
        message = f"unknown Tm-Protocol {protocol[:40]!r}, not one of {', '.join(PROTOCOLS)}"
        raise RequestError(ErrorCode.INVALID_REQUEST, message, param="Tm-Protocol")
    timeout_s = _number(headers, "Tm-Timeout", limits.default_timeout_s)
    if not 0 < timeout_s <= limits.max_timeout_s:
        message = f"Tm-Timeout must be above 0 and at most {limits.max_timeout_s} seconds"
        raise RequestError(ErrorCode.INVALID_REQUEST, message, param="Tm-Timeout")
    return Head(
        rid=rid,
        tenant=tenant,
        request_class=request_class,
        protocol=protocol,
        timeout_s=timeout_s,
        reply=reply,
        tag=_unsigned(headers.get("Tm-Batch"), "Tm-Batch", -1),
        blob=headers.get("Tm-Blob", ""),
        timeline=headers.get("Tm-Timeline") == "1",
        window_bytes=_unsigned(headers.get("Tm-Window"), "Tm-Window", 0),
    )


@dataclass(slots=True, eq=False)
class Request:
    """A request that this process owns. `body` is dropped once it is encoded."""

    head: Head
    delivery: Delivery
    machine: Owner
    subscriber: Subscriber
    body: bytes
    started_ns: int
    encoding: Encoding | None = None
    ids_ref: str = ""
    streams: list[Stream] = field(default_factory=list)
    spans: dict[str, Span] = field(default_factory=dict)
    plan: Plan | None = None
    want_at: float = -1.0  # loop time of the last Want; -1: none yet
    wanted: tuple[int, ...] = ()
    rewind_from_s: float = 0.0  # not earlier are events that were sent once derived again for the same subscriber
    dispatched_to: tuple[str, ...] = ()  # lookup workers that this dispatch has tried by name
    uses_blob: bool = False
    tag: int = field(init=False)  # of the subscriber as it is now: another connection may take the stream up

    def __post_init__(self) -> None:
        self.tag = self.head.tag

    @property
    def rid(self) -> str:
        """32 hex digits."""
        return self.head.rid

    @property
    def deadline_ns(self) -> int:
        """On the broker's clock."""
        return self.delivery.time_ns + int(self.head.timeout_s * NS)

    @property
    def created(self) -> int:
        """Unix seconds of acceptance, from the broker: the same for every owner of this request."""
        return self.delivery.time_ns // NS

    @property
    def delivered(self) -> bool:
        """Whether the subscriber has the last event of every choice; publishing counts if it never said Want."""
        if any(stream.terminal_n < 0 for stream in self.streams):
            return False
        if self.want_at < 0:
            return True
        return all(n > stream.terminal_n for stream, n in zip(self.streams, self.wanted, strict=False))
