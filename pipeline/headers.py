"""NATS message headers: a status line, then `Name: value` lines. Source: nats-adr (ADR-4)."""

from __future__ import annotations

import re
from collections.abc import Mapping

_VERSION = b"NATS/1.0"
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")  # a token of RFC 7230, as nats-py demands
_LINE_BREAK = re.compile(r"[\r\n]")


class HeaderError(ValueError):
    """Bytes that are no NATS headers, or a name or value that cannot be one."""


def parse_headers(raw: bytes | None) -> tuple[int | None, str, dict[str, str]]:
    """Status (None for an ordinary message), its description, and the fields; of a repeated name the last counts.

    Raises: HeaderError.
    """
    if not raw:
        return None, "", {}
    first, *lines = raw.split(b"\r\n")
    if not first.startswith(_VERSION):
        raise HeaderError(f"headers start with {first[:32]!r}, not NATS/1.0")
    status, _, description = first[len(_VERSION) :].strip().partition(b" ")
    if status and not (status.isdigit() and len(status) == 3):
        raise HeaderError(f"{status[:32]!r} is no status")
    fields: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if colon:
            fields[name.strip().decode("ascii", "replace")] = value.strip().decode("utf-8", "replace")
    return int(status) if status else None, description.strip().decode("utf-8", "replace"), fields


def format_headers(fields: Mapping[str, str], status: int | None = None, description: str = "") -> bytes:
    """The raw headers to publish. Raises: HeaderError for a name that is no token or a value with a line break."""
    for name, value in fields.items():
        if not _NAME.fullmatch(name) or _LINE_BREAK.search(value):
            raise HeaderError(f"header {name!r}: {value!r} cannot be sent")
    first = f"NATS/1.0 {status} {description}".rstrip() if status is not None else "NATS/1.0"
    return "\r\n".join([first, *(f"{name}: {value}" for name, value in fields.items()), "", ""]).encode()
