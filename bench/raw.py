"""The floor of the hop bench: a chain of deliveries over a NATS client that does nothing else.

A hundred lines of protocol (PUB, SUB, MSG, PING) on uvloop, no headers, no reconnect, no TLS: what any client in
Python can reach. `Chain` lets one message at a time travel client -> A -> B -> ... -> A -> client, each
letter an OS process; with six sizes these are the causal deliveries of a request up to its first decoded token:
codec, lookup, prefill, decode, codec, client. Source: facts-bus 2.4, 3.1; ours.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Self, cast
from urllib.parse import urlparse

import uvloop

WARM_UP_ROUNDS = 100  # connections, caches of the server and the first page faults. Source: ours
READY = "ready"
TIMEOUT_S = 60.0

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


async def _measure(url: str, prefix: str, sizes: list[int]) -> None:
    """The client's process: for each number read, so many round trips, and a line with the seconds of each."""
    loop, first = asyncio.get_running_loop(), b"x" * sizes[0]
    arrived: asyncio.Future[None] = loop.create_future()
    client = await RawClient.connect(url, lambda _subject, _payload: arrived.set_result(None))
    client.subscribe(f"{prefix}.{len(sizes) - 1}", 1)
    await client.flush()
    print(READY, flush=True)
    # in a thread: the loop answers the server's pings meanwhile
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        times = []
        for _ in range(int(line)):
            arrived = loop.create_future()
            start = time.perf_counter()
            client.publish(f"{prefix}.0", first)
            await arrived
            times.append(time.perf_counter() - start)
        print(json.dumps(times), flush=True)


class Chain:
    """A running chain. `with` spawns a process for each name and one for the client, and ends them all.

    sizes: payload bytes of each delivery, in order.
    Raises: ValueError for a chain too short, RuntimeError if a process does not start.
    """

    def __init__(self, url: str, sizes: list[int]) -> None:
        self._names = [*sorted(set(receivers(len(sizes))) - {"client"}), "client"]
        self._arguments = (url, f"raw.{secrets.token_hex(4)}", sizes)
        self._processes = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as starting:
            started = [_spawn(starting, *self._arguments, name) for name in self._names]
            if any(_line(process) != READY for process in started):
                raise RuntimeError("a process of the raw chain did not start")
            self._client = started[-1]
            self.times(WARM_UP_ROUNDS)
            self._processes = starting.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.close()

    def times(self, rounds: int) -> list[float]:
        """Seconds from publish to return of each round, in order. Blocks. Raises: RuntimeError if a process fails."""
        if self._client.stdin is not None:
            self._client.stdin.write(f"{rounds}\n")
            self._client.stdin.flush()
        measured = _line(self._client)
        if not measured:
            raise RuntimeError("the client of the raw chain failed")
        times: list[float] = json.loads(measured)
        return times


def _line(process: subprocess.Popen[str]) -> str:
    """The next line that a process prints, '' when it ended or is silent for too long."""
    if process.stdout is None or not select.select([process.stdout], [], [], TIMEOUT_S)[0]:
        return ""
    return process.stdout.readline().strip()


def _spawn(stack: ExitStack, url: str, prefix: str, sizes: list[int], name: str) -> subprocess.Popen[str]:
    arguments = json.dumps([url, prefix, name, sizes])
    command = [sys.executable, str(Path(__file__).resolve()), arguments]
    pipe = subprocess.PIPE
    process = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))  # noqa: S603 -- ourselves
    stack.callback(process.kill)
    return process


def _main() -> None:
    url, prefix, name, sizes = json.loads(sys.argv[1])
    if name == "client":
        uvloop.run(_measure(url, prefix, sizes))
    else:
        uvloop.run(_forward(url, prefix, name, sizes))


if __name__ == "__main__":
    _main()
