"""Counters of one process. Every drop, retry and surprise has one; beacons carry them, `tidemill ps` shows them."""

from __future__ import annotations

from collections import Counter

counters: Counter[str] = Counter()


def count(name: str, amount: int = 1) -> None:
    """Add to a counter; names read `noun_participle`, e.g. `frames_unknown_handle`."""
    counters[name] += amount


def snapshot() -> dict[str, int]:
    """All non-zero counters, by name."""
    return {name: value for name, value in sorted(counters.items()) if value}
