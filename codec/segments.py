"""A cache of encoded text segments: agents repeat their whole history every turn, and so do system and tool prompts.

Segments are encoded independently of each other, so a cached one is exact. It took a 58k-token agent turn from 88 to
3-5 ms. Source: facts-codec (segment cache).
"""

from __future__ import annotations

import os
from collections import OrderedDict
from hashlib import blake2b
from threading import Lock

# bytes beside the value: 16-byte key (49 as an object), the value's object header, the ordered dict's node and slot
ENTRY_OVERHEAD_BYTES = 256


class SegmentCache:
    """Segment digest -> encoded ids (u32le bytes), least recently used goes first. Safe to share between threads.

    The digest is keyed with a secret of this process: nobody can craft two texts that share an entry.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = Lock()
        self._hasher = blake2b(digest_size=16, key=os.urandom(32))

    def digest(self, segment: str) -> bytes:
        """The 16-byte key of a segment."""
        hasher = self._hasher.copy()  # half the cost of hashing the key again
        hasher.update(segment.encode())
        return hasher.digest()

    def get(self, digest: bytes) -> bytes | None:
        """The ids of a segment, None when they are not here."""
        with self._lock:
            ids = self._entries.get(digest)
            if ids is None:
                self.num_misses += 1
                return None
            self._entries.move_to_end(digest)
            self.num_hits += 1
            return ids

    def put(self, digest: bytes, ids: bytes) -> None:
        """Keep a segment's ids; one that is larger than the whole cache is not kept."""
        size = len(ids) + ENTRY_OVERHEAD_BYTES
        if size > self.max_bytes:
            return
        with self._lock:
            if digest in self._entries:  # two threads encoded the same segment
                return
            self._entries[digest] = ids
            self.num_bytes += size
            while self.num_bytes > self.max_bytes:
                _, dropped = self._entries.popitem(last=False)
                self.num_bytes -= len(dropped) + ENTRY_OVERHEAD_BYTES

    def check(self) -> None:
        """Raise AssertionError unless the byte count is that of the entries and within the bound."""
        with self._lock:
            counted = sum(len(ids) + ENTRY_OVERHEAD_BYTES for ids in self._entries.values())
            if counted != self.num_bytes or counted > self.max_bytes:
                raise AssertionError(f"{counted} bytes of entries, {self.num_bytes} counted, {self.max_bytes} allowed")
