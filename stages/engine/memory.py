"""An engine's memory: one region of KV blocks and state slots, with the managers of both.

The region is what a decode engine reads from: [num_blocks x block_bytes | num_slots x state_bytes]. The block
manager belongs to one thread; a decode step grows block tables from the engine's thread, so calls take a lock.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kv.block import BlockManager, Lease, PoolError, PoolEvent, checksum
from kv.layout import Layout
from kv.region import Region
from stages.engine.interface import Bytes, KVMemory


class EngineMemory:
    """Blocks and state slots of one engine. Owns the region."""

    def __init__(self, layout: Layout, num_blocks: int, num_states: int, *, shared: bool) -> None:
        """shared: other processes may read it (a memfd); else private memory."""
        self.layout = layout
        self.num_blocks = num_blocks
        self.num_states = num_states
        self._states_at = num_blocks * layout.block_bytes
        num_bytes = self._states_at + num_states * layout.state_bytes
        self.region = Region.shared(num_bytes) if shared else Region.local(num_bytes)
        raw = self.region.array
        self.kv = KVMemory(
            blocks=raw[: self._states_at].reshape(num_blocks, layout.block_bytes),
            states=raw[self._states_at : num_bytes].reshape(num_states, layout.state_bytes),
        )
        self._manager = BlockManager(num_blocks)
        self._free_states = list(range(num_states))
        self._taken_states: set[int] = set()
        self._lock = threading.Lock()

    @property
    def free_states(self) -> int:
        """State slots that nobody has."""
        return len(self._free_states)

    @property
    def used_share(self) -> float:
        """Share of blocks that are held, 0..1."""
        return 1.0 - self._manager.num_available / self.num_blocks

    def match(self, keys: bytes, at_most: int) -> Lease:
        """Hold the longest stored prefix of `keys`, at most so many blocks."""
        with self._lock:
            return self._manager.pin(self._manager.match(keys)[:at_most])

    def hold(self, blocks: Sequence[int]) -> Lease:
        """Hold blocks that somebody holds already. Raises: PoolError when one is free."""
        with self._lock:
            return self._manager.pin(blocks)

    def allocate(self, count: int) -> Lease | None:
        """Hold `count` blocks, the last of them zeroed (it may stay partial); None without room."""
        with self._lock:
            lease = self._manager.allocate(count)
        if lease is not None and lease.blocks:
            self.kv.blocks[lease.blocks[-1]] = 0
        return lease

    def release(self, leases: Sequence[Lease]) -> None:
        """End several holds."""
        with self._lock:
            for lease in leases:
                lease.release()

    def take_state(self) -> int | None:
        """A state slot, or None."""
        with self._lock:
            if not self._free_states:
                return None
            slot = self._free_states.pop()
            self._taken_states.add(slot)
            return slot

    def give_state(self, slot: int) -> None:
        """Return a state slot. Raises: PoolError when nobody has it."""
        with self._lock:
            if slot not in self._taken_states:
                raise PoolError(f"state slot {slot} is not taken")
            self._taken_states.remove(slot)
            self._free_states.append(slot)

    def seal(self, block: int, key: bytes, digest: bytes, *, approximate: bool) -> None:
        """Declare a block complete and hittable under its key."""
        with self._lock:
            self._manager.seal(block, key, digest, approximate=approximate)

    def sealed_checksum(self, block: int) -> bytes | None:
        """The checksum a sealed block was given, None when it is not sealed."""
        with self._lock:
            return self._manager.checksum(block) if self._manager.key(block) is not None else None

    def drop_if_bad(self, blocks: Sequence[int]) -> int:
        """Verify sealed blocks against their checksums and forget those that differ; returns how many did."""
        bad = 0
        for block in blocks:
            digest = self.sealed_checksum(block)
            if digest is not None and checksum(self.kv.blocks[block]) != digest:
                with self._lock:
                    key = self._manager.key(block)
                    bad += key is not None and self._manager.drop(key)
        return bad

    def drain_events(self) -> list[PoolEvent]:
        """Changes of what can be hit since the last call."""
        with self._lock:
            return self._manager.drain_events()

    def stored_keys(self) -> bytes:
        """All keys that can be hit."""
        with self._lock:
            return self._manager.stored_keys()

    def check(self) -> None:
        """Raises: PoolError when the pool contradicts itself."""
        with self._lock:
            self._manager.check()
            free = set(self._free_states)
            if len(free) != len(self._free_states) or free | self._taken_states != set(range(self.num_states)):
                raise PoolError("a state slot is lost or free twice")
            if free & self._taken_states:
                raise PoolError("a state slot is free and taken")

    def block_descs(self, blocks: Sequence[int]) -> npt.NDArray[np.int64]:
        """[n, 2] (offset, length) of blocks in the region."""
        size = self.layout.block_bytes
        descs = np.empty((len(blocks), 2), np.int64)
        descs[:, 0] = np.asarray(blocks, np.int64) * size
        descs[:, 1] = size
        return descs

    def state_desc(self, slot: int) -> npt.NDArray[np.int64]:
        """[1, 2] (offset, length) of a state slot in the region."""
        size = self.layout.state_bytes
        return np.array([[self._states_at + slot * size, size]], np.int64)

    def block_views(self, blocks: Sequence[int]) -> list[Bytes]:
        """Writable views of blocks."""
        return [self.kv.blocks[block] for block in blocks]

    def close(self) -> None:
        """Give the region back. The views must not be used any more."""
        self.region.close()
