"""The floor of the hop bench: a chain of deliveries over a NATS client that does nothing else.

A hundred lines of protocol (PUB, SUB, MSG, PING) on uvloop, no headers, no reconnect, no TLS: what any client in
Python can reach. `chain_p50` lets one message at a time travel client -> A -> B -> ... -> A -> client, each
letter an OS process; with six sizes these are the causal deliveries of a request up to its first decoded token:
codec, lookup, prefill, decode, codec, client. Source: facts-bus 2.4, 3.1; ours.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import cast
from urllib.parse import urlparse

import uvloop

WARM_UP_ROUNDS = 100  # connections, caches of the server and the first page faults. Source: ours
READY = "ready"
TIMEOUT_S = 120.0

OnPayload = Callable[[str, bytes], None]


class RawClient(asyncio.Protocol):
    """PUB and SUB on one connection. `on_message(subject, payload)` is called for every message."""

    def __init__(self, on_message: OnPayload) -> None:
        self._on_message = on_message
        self._transport: asyncio.WriteTransport | None = None
        self._buffer = b""
        self._error = "connection lost"
        self._pong: asyncio.Future[None] | None = None

    @classmethod
    async def connect(cls, url: str, on_message: OnPayload) -> RawClient:
        """Connect to `nats://host:port`."""
        parsed, loop = urlparse(url), asyncio.get_running_loop()
        _, client = await loop.create_connection(lambda: cls(on_message), parsed.hostname or "", parsed.port or 4222)
        client.write(b'CONNECT {"verbose":false,"pedantic":false,"lang":"raw","version":"1"}\r\n')
        await client.flush()
        return client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's is one, without inheriting from it

    def data_received(self, data: bytes) -> None:
        """Called by the loop: dispatch every whole operation, keep the rest."""
        data, position = self._buffer + data, 0
        while (line_end := data.find(b"\r\n", position)) >= 0:
            words = data[position:line_end].split()
            after = line_end + 2
            if words[0] == b"MSG":
                end = after + int(words[-1])
                if len(data) < end + 2:
                    break
                self._on_message(words[1].decode(), data[after:end])
                after = end + 2
            elif words[0] == b"PING":
                self.write(b"PONG\r\n")
            elif words[0] == b"PONG" and self._pong is not None:
                self._pong.set_result(None)
            elif words[0] == b"-ERR":
                self._error = data[position:line_end].decode()
            position = after
        self._buffer = data[position:]

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop: without its connection a process of the chain has nothing left to do."""
        raise SystemExit(f"{self._error} {exc or ''}")

    def write(self, data: bytes) -> None:
        """Hand bytes to the socket."""
        if self._transport is None:
            raise ConnectionError("not connected")
        self._transport.write(data)

    def publish(self, subject: str, payload: bytes) -> None:
        """One message."""
        self.write(b"PUB %b %d\r\n%b\r\n" % (subject.encode(), len(payload), payload))

    def subscribe(self, subject: str, sid: int) -> None:
        """Interest in a subject."""
        self.write(b"SUB %b %d\r\n" % (subject.encode(), sid))

    async def flush(self) -> None:
        """Wait until the server has seen everything written so far."""
        self._pong = asyncio.get_running_loop().create_future()
        self.write(b"PING\r\n")
        await self._pong
        self._pong = None


def receivers(num_deliveries: int) -> list[str]:
    """Who receives each delivery: process A first and before the client, others in between.

    Raises: ValueError for fewer than three deliveries.
    """
    if num_deliveries < 3:
        raise ValueError(f"a chain has at least 3 deliveries (A, A, client), not {num_deliveries}")
    return ["A", *(f"B{index}" for index in range(1, num_deliveries - 2)), "A", "client"]


async def _forward(url: str, prefix: str, name: str, sizes: list[int]) -> None:
    """One process of the chain: pass on what arrives, with the next delivery's size. Runs until it is ended."""
    payloads = [b"x" * size for size in sizes]

    def pass_on(subject: str, _payload: bytes) -> None:
        hop = int(subject.rpartition(".")[2]) + 1
        client.publish(f"{prefix}.{hop}", payloads[hop])

    client = await RawClient.connect(url, pass_on)
    for hop, receiver in enumerate(receivers(len(sizes))):
        if receiver == name:
            client.subscribe(f"{prefix}.{hop}", hop + 1)
    await client.flush()
    print(READY, flush=True)
    await asyncio.Event().wait()


async def _measure(url: str, prefix: str, sizes: list[int], rounds: int) -> list[float]:
    """The client's process: seconds of each round trip."""
    loop, first = asyncio.get_running_loop(), b"x" * sizes[0]
    arrived: asyncio.Future[None] = loop.create_future()
    client = await RawClient.connect(url, lambda _subject, _payload: arrived.set_result(None))
    client.subscribe(f"{prefix}.{len(sizes) - 1}", 1)
    await client.flush()
    times = []
    for _ in range(WARM_UP_ROUNDS + rounds):
        arrived = loop.create_future()
        start = time.perf_counter()
        client.publish(f"{prefix}.0", first)
        await arrived
        times.append(time.perf_counter() - start)
    return times[WARM_UP_ROUNDS:]


def chain_p50(url: str, sizes: list[int], rounds: int) -> list[float]:
    """Seconds from publish to return of each round of the chain, in order; the caller takes the median.

    sizes: payload bytes of each delivery, in order. Spawns one process per name and one for the client, and ends
    them all. Blocks. Raises: ValueError for a chain too short, RuntimeError if a process fails.
    """
    prefix, names = f"raw.{secrets.token_hex(4)}", sorted(set(receivers(len(sizes))) - {"client"})
    with ExitStack() as stack:
        for process in [_spawn(stack, url, prefix, name, sizes, 0) for name in names]:
            if process.stdout is None or process.stdout.readline().strip() != READY:
                raise RuntimeError("a process of the raw chain did not start")
        measured, _ = _spawn(stack, url, prefix, "client", sizes, rounds).communicate(timeout=TIMEOUT_S)
    if not measured:
        raise RuntimeError("the client of the raw chain failed")
    times: list[float] = json.loads(measured)
    return times


def _spawn(stack: ExitStack, url: str, prefix: str, name: str, sizes: list[int], rounds: int) -> subprocess.Popen[str]:
    arguments = json.dumps([url, prefix, name, sizes, rounds])
    command = [sys.executable, str(Path(__file__).resolve()), arguments]
    process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))  # noqa: S603 -- ourselves
    stack.callback(process.kill)
    return process


def _main() -> None:
    url, prefix, name, sizes, rounds = json.loads(sys.argv[1])
    if name == "client":
        print(json.dumps(uvloop.run(_measure(url, prefix, sizes, rounds))))
    else:
        uvloop.run(_forward(url, prefix, name, sizes))


if __name__ == "__main__":
    _main()
