"""One request in flight: how long until its first and its second token, and how large its messages are."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass

from bench.cost import TOKENS
from bench.prompts import body
from bench.raw import Chain
from pipeline.bus import Bus
from pipeline.client import Client
from pipeline.topology import Topology

CHAIN = ("intake", "encoded", "matched", "offer", "tokens", "events")  # topics of the causal deliveries, in order
SHORTEST = 2  # tokens: position 0 comes from prefill, position 1 is the first of decode
PROBES = 20
_SETTLE_S = 0.05  # until the last messages of a request have passed the tap


@dataclass(frozen=True, slots=True)
class Slices:
    """How one round is cut: so many slices, each of chain rounds and of requests of either length."""

    slices: int = 10
    chain_rounds: int = 40
    requests: int = 25


@dataclass(frozen=True, slots=True)
class Latency:
    """Medians in seconds from `publish` to the event of position 0 (`first_s`) and 1 (`second_s`)."""

    first_s: float
    second_s: float


async def one_in_flight(client: Client, rounds: int, max_tokens: int) -> tuple[list[float], list[float]]:
    """Publish a request, stream it to its end, publish the next; seconds to the events of position 0 and 1."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        data = body(max_tokens)
        start = time.perf_counter()
        async for event in await client.publish(data):
            if event.number is not None and event.number < 2:
                times[event.number].append(time.perf_counter() - start)
    return times


async def beside_chain(url: str, chain: Chain, plan: Slices, timeout_s: float) -> tuple[float, Latency, Latency]:
    """Medians of the chain, of short answers and of longer ones, all of the same stretch of time.

    They take turns a few dozen requests long, so that what else the machine does meets them alike.
    Raises: TimeoutError, RuntimeError.
    """
    floor: list[float] = []
    short: list[tuple[list[float], list[float]]] = []
    longer: list[tuple[list[float], list[float]]] = []
    async with asyncio.timeout(timeout_s), await Client.connect([url]) as client:
        for _ in range(plan.slices):
            floor += await asyncio.to_thread(chain.times, plan.chain_rounds)
            short.append(await one_in_flight(client, plan.requests, SHORTEST))
            longer.append(await one_in_flight(client, plan.requests, TOKENS))
    return statistics.median(floor), _latency(short), _latency(longer)


def _latency(slices: list[tuple[list[float], list[float]]]) -> Latency:
    first, second = ([seconds for part in parts for seconds in part] for parts in zip(*slices, strict=True))
    return Latency(statistics.median(first), statistics.median(second))


async def causal_sizes(url: str, codec: str, decode: str, timeout_s: float) -> dict[str, int]:
    """Median payload (and header) bytes of each delivery between `publish` and the event of position 1.

    codec, decode: ids of the only workers of these stages. Raises: TimeoutError.
    """
    topology = Topology.load()
    seen: dict[str, list[int]] = defaultdict(list)
    from_decode = topology.subject("acks", worker=decode)

    def tap(topic: str, subject: str) -> None:
        def on_message(_subject: str, reply: str, payload: bytes, headers: bytes | None) -> None:
            # prefill's frame carries position 0, and only the event of position 1 ends the chain
            if (topic != "tokens" or reply == from_decode) and (topic != "events" or payload.startswith(b'{"n":1,')):
                seen[topic].append(len(payload) + len(headers or b""))

        bus.subscribe(subject, on_message)

    async with asyncio.timeout(timeout_s), await Client.connect([url]) as client:
        bus = await Bus.connect([url], "tap", topology, single=True)
        for topic in CHAIN[:4]:
            tap(topic, topology.pattern(topic))
        tap("tokens", topology.subject("tokens", worker=codec))
        tap("events", "_INBOX.>")
        await bus.flush()
        for _ in range(PROBES):
            async for _event in await client.publish(body(SHORTEST)):
                pass
        await asyncio.sleep(_SETTLE_S)
        await bus.close()
    return {topic: int(statistics.median(seen[topic])) for topic in CHAIN}
