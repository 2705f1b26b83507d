"""A cache of encoded text segments: agents repeat their whole history every turn, and so do system and tool prompts.

Segments are encoded independently of each other, so a cached one is exact. It took a 58k-token agent turn from 88 to
3-5 ms. Source: facts-codec (segment cache).
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from threading import Lock

ENTRY_OVERHEAD_BYTES = 160  # beside text and ids: two object headers' slack, the ordered dict's node and slot


def _size_bytes(segment: str, ids: bytes) -> int:
    return sys.getsizeof(segment) + sys.getsizeof(ids) + ENTRY_OVERHEAD_BYTES


class SegmentCache:
    """Segment -> encoded ids (u32le bytes), least recently used goes first. Safe to share between threads.

    The text itself is the key: compared byte by byte, so no two texts can share an entry.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0
        self._entries: OrderedDict[str, bytes] = OrderedDict()
        self._lock = Lock()

    def get(self, segment: str) -> bytes | None:
        """The ids of a segment, None when they are not here."""
        with self._lock:
            ids = self._entries.get(segment)
            if ids is None:
                self.num_misses += 1
                return None
            self._entries.move_to_end(segment)
            self.num_hits += 1
            return ids

    def put(self, segment: str, ids: bytes) -> None:
        """Keep a segment's ids; one that is larger than the whole cache is not kept."""
        size = _size_bytes(segment, ids)
        if size > self.max_bytes:
            return
        with self._lock:
            if segment in self._entries:  # two threads encoded the same segment
                return
            self._entries[segment] = ids
            self.num_bytes += size
            while self.num_bytes > self.max_bytes:
                self.num_bytes -= _size_bytes(*self._entries.popitem(last=False))

    def check(self) -> None:
        """Raise AssertionError unless the byte count is that of the entries and within the bound."""
        with self._lock:
            counted = sum(_size_bytes(segment, ids) for segment, ids in self._entries.items())
            if counted != self.num_bytes or counted > self.max_bytes:
                raise AssertionError(f"{counted} bytes of entries, {self.num_bytes} counted, {self.max_bytes} allowed")
