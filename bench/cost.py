"""Many requests in flight: CPU time of every worker and of the broker per request; the client's is its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass

from bench.processes import Fleet, spent
from bench.prompts import body
from pipeline.client import Client

IN_FLIGHT = 16
TOKENS = 16


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU milliseconds per request by role; the client's beside them; what the wall clock said."""

    by_role: dict[str, float]
    client: float
    requests_per_s: float

    @property
    def total(self) -> float:
        """Of all workers and the broker."""
        return sum(self.by_role.values())


async def cost(fleet: Fleet, num_requests: int, timeout_s: float) -> Cost:
    """Run `num_requests` of 16 tokens, 16 in flight, after a tenth as many to warm up.

    Raises: TimeoutError; RuntimeError when an answer ends otherwise than by its length.
    """
    async with asyncio.timeout(timeout_s), await Client.connect([fleet.url], batch=True) as client:
        await _run(client, max(num_requests // 10, IN_FLIGHT))
        before, own, start = fleet.cpu(), time.process_time_ns(), time.perf_counter()
        await _run(client, num_requests)
        after, own_after, end = fleet.cpu(), time.process_time_ns(), time.perf_counter()
    per_request = {role: ns / num_requests / 1e6 for role, ns in spent(before, after).items()}
    return Cost(per_request, (own_after - own) / num_requests / 1e6, num_requests / (end - start))


async def _run(client: Client, num_requests: int) -> None:
    left = iter(range(num_requests))
    async with asyncio.TaskGroup() as group:
        for _ in range(IN_FLIGHT):
            group.create_task(_one_after_another(client, left))


async def _one_after_another(client: Client, left: Iterator[int]) -> None:
    for _ in left:
        end = ""
        async for event in await client.publish(body(TOKENS)):
            end = event.end or end
        if end != "length":
            raise RuntimeError(f"an answer ended by {end!r}, not by its length")
