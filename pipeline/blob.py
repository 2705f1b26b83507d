"""Big bodies and big id arrays, in parts of at most 256 KiB, in the file stream BLOB.

The message that needs them carries a reference: `name;parts;bytes;digest`. Whatever an accepted request needs is
as durable as the request itself. Source: design 2.10; facts-bus 6.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import dataclass

import nats.errors

from pipeline.bus import Bus
from pipeline.errors import ErrorCode, RequestError, TransientError

_WINDOW = 8  # parts in flight; more wins nothing on one connection. Source: ours


@dataclass(frozen=True, slots=True)
class BlobRef:
    """Names the parts of one blob of one request. `digest`: blake2b-128, hex, of the whole."""

    name: str
    num_parts: int
    num_bytes: int
    digest: str

    def text(self) -> str:
        """As it stands in a header or an event."""
        return f"{self.name};{self.num_parts};{self.num_bytes};{self.digest}"

    @classmethod
    def parse(cls, text: str) -> BlobRef:
        """Raises: RequestError(invalid_request) when it is not a reference."""
        name, *rest = text.split(";")
        try:
            parts, size, digest = rest
            ref = cls(name, int(parts), int(size), digest)
        except ValueError as error:
            raise RequestError(ErrorCode.INVALID_REQUEST, f"not a blob reference: {text[:80]!r}") from error
        if not (name.isascii() and name.isalnum()) or not 0 < ref.num_parts <= 65_536 or ref.num_bytes < 0:
            raise RequestError(ErrorCode.INVALID_REQUEST, f"not a blob reference: {text[:80]!r}")
        return ref


def digest_of(data: bytes) -> str:
    """blake2b-128 of the whole blob, hex."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def split(data: bytes, part_bytes: int) -> list[bytes]:
    """Parts of at most `part_bytes`; one empty part for empty data."""
    return [data[at : at + part_bytes] for at in range(0, len(data), part_bytes)] or [b""]


async def put(bus: Bus, tenant: str, rid: str, name: str, data: bytes) -> BlobRef:
    """Store a blob; when this returns every part has been acknowledged by the broker.

    Raises: TransientError when the broker did not store a part.
    """
    parts = split(data, bus.topology.limits.blob_part_bytes)
    gate = asyncio.Semaphore(_WINDOW)

    async def put_part(index: int, part: bytes) -> None:
        async with gate:
            answer = json.loads(await bus.ask(_subject(bus, tenant, rid, name, index), part, timeout_s=5.0))
            if "error" in answer:
                raise TransientError(f"BLOB refused part {index} of {name}: {answer['error'].get('description')}")

    # no TaskGroup: it would need a task (pipeline/eager.py), and wrap what whoever retries looks for
    parting = (put_part(index, part) for index, part in enumerate(parts))
    for failure in await asyncio.gather(*parting, return_exceptions=True):
        if failure is not None:
            raise failure
    return BlobRef(name, len(parts), len(data), digest_of(data))


async def get(bus: Bus, tenant: str, rid: str, ref: BlobRef, max_bytes: int) -> bytes:
    """The whole blob, verified.

    Raises: RequestError(payload_too_large) naming both numbers, RequestError(invalid_request) when parts are
    missing or the digest differs, TransientError when the broker is away.
    """
    if ref.num_bytes > max_bytes:
        raise too_large(ref.num_bytes, max_bytes)
    parts: list[bytes] = []
    for start in range(0, ref.num_parts, _WINDOW):
        window = range(start, min(start + _WINDOW, ref.num_parts))
        parts += await asyncio.gather(*(_get_part(bus, tenant, rid, ref, index) for index in window))
        if sum(map(len, parts)) > max_bytes:
            raise too_large(sum(map(len, parts)), max_bytes)
    data = b"".join(parts)
    if len(data) != ref.num_bytes or digest_of(data) != ref.digest:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"blob {ref.name}: its parts do not match its reference")
    return data


async def _get_part(bus: Bus, tenant: str, rid: str, ref: BlobRef, index: int) -> bytes:
    subject = _subject(bus, tenant, rid, ref.name, index)
    stream = bus.topology.topics["blob"].stream
    if not bus.control.is_connected:
        raise TransientError(f"blob part {index} of {ref.name} not read: not connected")
    try:
        answer = await bus.control.request(f"$JS.API.DIRECT.GET.{stream}.{subject}", b"", timeout=5.0)
    except (nats.errors.Error, TimeoutError, OSError) as error:
        raise TransientError(f"blob part {index} of {ref.name} not read: {error}") from error
    if answer.headers and answer.headers.get("Status") == "404":
        raise RequestError(ErrorCode.INVALID_REQUEST, f"blob {ref.name}: part {index} of {ref.num_parts} is missing")
    return bytes(answer.data)


def too_large(num_bytes: int, max_bytes: int) -> RequestError:
    """413, naming both numbers."""
    return RequestError(
        ErrorCode.PAYLOAD_TOO_LARGE, f"the body has {num_bytes} bytes; at most {max_bytes} bytes are accepted"
    )


async def purge(bus: Bus, tenant: str, rid: str) -> None:
    """Remove every part of a request that is over. A failure leaves them to the stream's max_age."""
    pattern = bus.topology.pattern("blob", tenant=tenant, rid=rid)
    stream = bus.topology.topics["blob"].stream
    try:
        await bus.ask_json(f"$JS.API.STREAM.PURGE.{stream}", {"filter": pattern})
    except TransientError:
        return


def _subject(bus: Bus, tenant: str, rid: str, name: str, index: int) -> str:
    return bus.topology.subject("blob", tenant=tenant, rid=rid, part=f"{name}-{index}")
