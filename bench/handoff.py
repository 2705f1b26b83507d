"""How fast decode reads prefill's KV out of another process, as shares of this machine's memcpy.

    python -m bench.handoff [--json] [--seconds 10]

Every figure is a ratio of the median time of `np.copyto` between two private buffers to the median time of the
read, both of the same run, alternating, and rotating over 512 MiB so that no cache helps either.
`link`: one descriptor, epoch checked. `verified`: V4.1 blocks of 114,048 bytes, epoch and xxh3-128 checked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import numpy as np

from kv.block import checksum
from kv.layout import Bytes
from kv.links import RegionServer, ShmLink
from kv.region import Region, RegionReader
from kv.transfer import Offer, rows, transfer

MIB = 1 << 20
POOL_BYTES = 512 * MIB  # far above any cache of this machine
BLOCK_BYTES = 114_048  # of V4.1. Source: facts-model 7.1
SIZES = (MIB, 64 * MIB)


@dataclass(frozen=True, slots=True)
class Ticket:
    """What an offer would carry."""

    region: str
    num_bytes: int
    link: str
    address: str
    epoch: int


def own(pipe: Connection) -> None:
    """The prefill side: a region of random bytes, handed to whoever asks until the pipe closes."""
    asyncio.run(_serve(pipe))


async def _serve(pipe: Connection) -> None:
    with Region.shared(POOL_BYTES) as region:
        region.array[:] = np.random.default_rng(1).integers(0, 256, POOL_BYTES, dtype=np.uint8)
        with RegionServer(region) as server:
            pipe.send(Ticket(region.region_id, region.num_bytes, "shm", server.address, region.grant()))
            await asyncio.to_thread(pipe.recv)


class Reads:
    """Reads of one size; each call takes the next part of the pool."""

    def __init__(self, size: int, reader: RegionReader, epoch: int, dest: Bytes, private: Bytes) -> None:
        """dest, private: uint8 [POOL_BYTES], touched."""
        self.size, self.reader, self.epoch, self.dest, self.private = size, reader, epoch, dest, private
        self.num_blocks = size // BLOCK_BYTES
        self.offers = [self._offer(start) for start in range(0, POOL_BYTES, size)]
        self.turn = 0

    def _offer(self, start: int) -> Offer:
        blocks = rows(range(self.num_blocks), BLOCK_BYTES, start)
        sums = tuple(checksum(self.reader.array[o : o + n]) for o, n in blocks.tolist())
        keys = (bytes(16),) * self.num_blocks
        state = np.empty((0, 2), np.int64)
        return Offer(epoch=self.epoch, block_keys=keys, blocks=blocks, state=state, checksums=sums, lease_ns=0)

    def _next(self) -> tuple[int, Bytes]:
        self.turn = (self.turn + 1) % len(self.offers)
        start = (self.turn * 5 + 3) % len(self.offers) * self.size
        return self.turn, self.dest[start : start + self.size]

    def memcpy(self, num_bytes: int) -> None:
        """The yardstick: private to private."""
        turn, dest = self._next()
        np.copyto(dest[:num_bytes], self.private[turn * self.size :][:num_bytes])

    def link(self) -> None:
        """One descriptor of the whole size."""
        turn, dest = self._next()
        self.reader.read_into(np.array([[turn * self.size, self.size]]), [dest], epoch=self.epoch)

    def verified(self) -> None:
        """Block by block, as a handoff reads."""
        turn, dest = self._next()
        blocks = list(dest[: self.num_blocks * BLOCK_BYTES].reshape(-1, BLOCK_BYTES))
        transfer(self.reader, self.offers[turn], blocks, dest[:0], range(self.num_blocks))


def ratio(baseline: Callable[[], None], job: Callable[[], None], seconds: float) -> tuple[float, float]:
    """(median time of the baseline / median time of the job, median time of the job in seconds)."""
    times: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[1]) < 5:
        for taken, run in zip(times, (baseline, job), strict=True):
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
    base, own_time = (statistics.median(taken) for taken in times)
    return base / own_time, own_time


def measure(seconds: float) -> dict[str, float]:
    """All figures; `seconds` are shared among them."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    owner = multiprocessing.get_context("spawn").Process(target=own, args=(there,))
    owner.start()
    try:
        ticket = here.recv()
        start = time.perf_counter()
        reader = asyncio.run(ShmLink().attach(ticket, timeout_s=30))
        found = {"attach_512mib_ms": 1e3 * (time.perf_counter() - start)}
        dest, private = np.ones(POOL_BYTES, np.uint8), np.ones(POOL_BYTES, np.uint8)
        for size in SIZES:
            reads = Reads(size, reader, ticket.epoch, dest, private)
            payload, name = reads.num_blocks * BLOCK_BYTES, f"{size // MIB}mib"
            share = seconds / (2 * len(SIZES))
            for what, job, num_bytes in (("link", reads.link, size), ("verified", reads.verified, payload)):
                found[f"{what}_ratio_{name}"], taken = ratio(partial(reads.memcpy, num_bytes), job, share)
                found[f"{what}_gb_s_{name}"] = num_bytes / taken / 1e9
    finally:
        here.send(None)
        owner.join()
    return {name: round(value, 3) for name, value in found.items()}


def main() -> None:
    """Print the figures, one JSON object with --json."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    found = measure(options.seconds)
    print(json.dumps(found) if options.json else "\n".join(f"{name:24} {value:10.3f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
