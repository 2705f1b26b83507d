"""Which engine: pure functions from beacons to an order of preference. The live pipeline and the replay share them.

Prefill by work that is really left (uncached tokens queued plus this prompt's own), so that a prefix hit is worth
exactly what it saves and never outweighs a long queue. Decode by KV bytes in use, then by the number of requests.
Source: facts-system R58, R59, R61; weights: ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pipeline.events import Beacon

BLOCK_TOKENS = 128


def rank_prefill(
    beacons: Iterable[Beacon],
    hit_blocks: Mapping[str, int],
    prompt_tokens: int,
    assigned_tokens: Mapping[str, int],
    *,
    fingerprint: str,
) -> list[Beacon]:
    """Engines that serve this model, the least work first.

    hit_blocks: holder -> blocks of this prompt it stores. assigned_tokens: worker -> tokens sent to it since its
    last beacon (otherwise all lookups choose the same engine at the same instant).
    """

    def work_tokens(beacon: Beacon) -> tuple[bool, int, int, str]:
        own = max(prompt_tokens - BLOCK_TOKENS * hit_blocks.get(beacon.worker, 0), 1)
        queued = beacon.queued_tokens + assigned_tokens.get(beacon.worker, 0)
        return beacon.free_slots <= 0, queued + own, beacon.running + beacon.queued, beacon.worker

    return sorted((b for b in beacons if b.fingerprint == fingerprint), key=work_tokens)


def rank_decode(
    beacons: Iterable[Beacon], assigned: Mapping[str, int], *, fingerprint: str, layout: str
) -> list[Beacon]:
    """Engines that can take this KV, the emptiest first. assigned: worker -> requests sent since its last beacon."""

    def fullness(beacon: Beacon) -> tuple[bool, float, int, str]:
        requests = beacon.running + beacon.queued + assigned.get(beacon.worker, 0)
        return beacon.free_slots <= assigned.get(beacon.worker, 0), round(beacon.kv_used, 2), requests, beacon.worker

    return sorted((b for b in beacons if b.fingerprint == fingerprint and b.layout == layout), key=fullness)
