"""Block keys, checksums, and the pool that keeps blocks by content.

A key is a hash of everything before and inside the block (model, layout, tenant, user, all token ids so far),
so equal keys mean equal bytes, and a longest common prefix is found key by key. A sealed block never changes.

Letters: n tokens, b blocks.
Source: facts-system R4, R9, R14, R15; the chain and the pool: ours.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kv.layout import BLOCK_TOKENS

KEY_BYTES = 16  # 128 bits: 2^32 blocks meet by chance with probability 2^-65
CHECKSUM_BYTES = 16  # xxh3-128: 100 GB/s in cache here, so that checking always is affordable (bench/handoff.py)

_digest: Callable[[Any], bytes] = xxhash.xxh3_128_digest  # its stubs do not know numpy's buffers
_ID_BYTES = 4
_CHUNK_BYTES = BLOCK_TOKENS * _ID_BYTES


class PoolError(ValueError):
    """A caller broke the pool's rules: a bug there, not a shortage of blocks."""


class LeaseError(PoolError):
    """A lease was released twice or used after its release."""


def salt(tenant: str, user: str, secret: bytes) -> bytes:
    """16 bytes that separate the caches of tenants and their users; useless to guess without `secret`."""
    key = blake2b(secret, digest_size=32).digest()  # blake2b takes at most 64 key bytes; secrets may be longer
    return blake2b(_pack((tenant.encode(), user.encode())), key=key, digest_size=KEY_BYTES).digest()


def root_of(fingerprint: str, layout_digest: bytes, salt_: bytes) -> bytes:
    """The parent of a prompt's first block key, from a salt that travelled in an event: 16 bytes."""
    return blake2b(_pack((fingerprint.encode(), layout_digest, salt_)), digest_size=KEY_BYTES).digest()


def chain_keys(root: bytes, ids: NDArray[np.uint32], images: Mapping[int, bytes] | None = None) -> bytes:
    """Keys of the whole blocks of a prompt: [n // 128] times 16 bytes; the tail below 128 tokens has none.

    ids: uint32 [n]. root: 16 bytes, or the key of the block before `ids`. images: digest of the image content
    that block i shows, by i: equal placeholder ids with other pictures must not hit.

    Raises:
        ValueError: `root` is not 16 bytes, or `ids` is not one-dimensional uint32.
    """
    if len(root) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(root)}")
    if ids.dtype != np.uint32 or ids.ndim != 1:
        raise ValueError(f"ids are uint32 [n], not {ids.dtype} {ids.shape}")
    data = ids.astype("<u4", copy=False).tobytes()
    keys: list[bytes] = []
    parent = root
    for index, start in enumerate(range(0, len(data) - _CHUNK_BYTES + 1, _CHUNK_BYTES)):
        content = parent + data[start : start + _CHUNK_BYTES]
        if images and index in images:
            content += _pack((images[index],))
        parent = blake2b(content, digest_size=KEY_BYTES).digest()
        keys.append(parent)
    return b"".join(keys)


def split_keys(keys: bytes) -> list[bytes]:
    """Concatenated keys, one by one. Raises: ValueError when the length is no multiple of 16."""
    if len(keys) % KEY_BYTES:
        raise ValueError(f"{len(keys)} bytes are not whole {KEY_BYTES}-byte keys")
    return np.frombuffer(keys, f"V{KEY_BYTES}").tolist() if keys else []


def checksum(buf: bytes | memoryview | NDArray[np.uint8]) -> bytes:
    """xxh3-128 of contiguous bytes: 16 bytes. Finds accidents; keys, not checksums, resist an attacker."""
    return _digest(buf)


def _pack(parts: Iterable[bytes]) -> bytes:
    """Length before each part, so that ("ab", "c") and ("a", "bc") differ."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolEvent:
    """What an index elsewhere should know: these keys (16 bytes each) can be hit now, or no longer."""

    stored: bool
    keys: bytes


class Lease:
    """A hold on blocks: they are neither evicted nor given away until it is released, exactly once.

    `blocks`: pool block numbers in the order asked for.
    """

    __slots__ = ("_release", "blocks")

    def __init__(self, blocks: tuple[int, ...], release: Callable[[tuple[int, ...]], None]) -> None:
        self.blocks = blocks
        self._release: Callable[[tuple[int, ...]], None] | None = release

    @property
    def released(self) -> bool:
        """Whether the hold is over."""
        return self._release is None

    def release(self) -> None:
        """End the hold. Raises: LeaseError the second time."""
        if self._release is None:
            raise LeaseError(f"lease of blocks {self.blocks[:4]} was released already")
        release, self._release = self._release, None
        release(self.blocks)


@dataclass(slots=True)
class _Block:
    """refs = living leases that name it. key and checksum are set while it is sealed."""

    refs: int = 0
    key: bytes | None = None
    checksum: bytes = b""
    approximate: bool = False


@dataclass(slots=True, kw_only=True)
class PoolCounts:
    """What happened since the start; every drop is in one of them."""

    sealed: int = 0
    duplicates: int = 0  # seals of a key that another block already holds
    evicted: int = 0
    dropped: int = 0
    refused: int = 0  # allocations that found no room


@dataclass(slots=True)
class BlockManager:
    """A fixed pool: every block is free, cached (sealed, nobody holds it), or held by leases.

    Cached blocks are evicted least recently used first, within one released lease the deepest first, since a
    child without its parent can never be hit. Not thread-safe: one loop owns it. It moves no bytes.
    """

    num_blocks: int
    counts: PoolCounts = field(default_factory=PoolCounts)
    _blocks: list[_Block] = field(init=False, repr=False)
    _free: list[int] = field(init=False, repr=False)
    _cached: OrderedDict[int, None] = field(init=False, repr=False, default_factory=OrderedDict)
    _by_key: dict[bytes, int] = field(init=False, repr=False, default_factory=dict)
    _changes: dict[bytes, bool] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise PoolError(f"a pool has at least one block, not {self.num_blocks}")
        self._blocks = [_Block() for _ in range(self.num_blocks)]
        self._free = list(range(self.num_blocks - 1, -1, -1))

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could give now: free ones and cached ones that it may evict."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Sealed blocks that nobody holds."""
        return len(self._cached)

    def match(self, keys: bytes, *, exact: bool = True) -> list[int]:
        """Blocks of the longest stored prefix of `keys`. They are not held yet: `pin` them before any `allocate`.

        exact: stop before a block that a bounded replay computed.
        """
        found: list[int] = []
        for key in split_keys(keys):
            block = self._by_key.get(key)
            if block is None or (exact and self._blocks[block].approximate):
                break
            found.append(block)
        return found

    def pin(self, blocks: Sequence[int]) -> Lease:
        """Hold sealed or already held blocks. Raises: PoolError when one is free."""
        for block in blocks:
            entry = self._entry(block)
            if entry.key is None and entry.refs == 0:
                raise PoolError(f"block {block} is free: there is nothing to pin")
        for block in blocks:
            self._blocks[block].refs += 1
            self._cached.pop(block, None)
        return Lease(tuple(blocks), self._unpin)

    def allocate(self, count: int) -> Lease | None:
        """Hold `count` blocks of undefined contents, evicting cached ones; None without room (nothing changed)."""
        if count < 0:
            raise PoolError(f"cannot allocate {count} blocks")
        if count > self.num_available:
            self.counts.refused += 1
            return None
        blocks = tuple(self._free.pop() if self._free else self._evict() for _ in range(count))
        for block in blocks:
            self._blocks[block].refs = 1
        return Lease(blocks, self._unpin)

    def seal(self, block: int, key: bytes, checksum: bytes, *, approximate: bool = False) -> int:
        """Declare a held block complete under `key`; from now on nobody writes it. Returns the canonical block.

        That is another one when the key is stored already: the second writer's block stays private and is freed
        with its lease. Exact contents take the place of approximate ones.

        Raises:
            PoolError: the block is not held, or is sealed under another key, or key or checksum has a wrong length.
        """
        entry = self._entry(block)
        if len(key) != KEY_BYTES or len(checksum) != CHECKSUM_BYTES:
            raise PoolError(f"key and checksum have 16 bytes, not {len(key)} and {len(checksum)}")
        if entry.refs == 0:
            raise PoolError(f"block {block} is not held: its bytes may change")
        if entry.key is not None and entry.key != key:
            raise PoolError(f"block {block} is sealed under another key")
        canonical = self._by_key.get(key)
        if canonical is not None and self._blocks[canonical].approximate and not approximate:
            self.drop(key)
            canonical = None
        if canonical is not None:
            self.counts.duplicates += 1
            return canonical
        entry.key, entry.checksum, entry.approximate = key, checksum, approximate
        self._by_key[key] = block
        self.counts.sealed += 1
        self._note(key, stored=True)
        return block

    def drop(self, key: bytes) -> bool:
        """Forget contents (a failed checksum): never matched again; held blocks are freed with their lease."""
        block = self._by_key.get(key)
        if block is None:
            return False
        self.counts.dropped += 1
        self._unseal(block)
        if self._blocks[block].refs == 0:
            del self._cached[block]
            self._free.append(block)
        return True

    def key(self, block: int) -> bytes | None:
        """The key under which that block is sealed; None while its bytes may change."""
        return self._entry(block).key

    def checksum(self, block: int) -> bytes:
        """Checksum given when the block was sealed. Raises: PoolError when it is not sealed."""
        entry = self._entry(block)
        if entry.key is None:
            raise PoolError(f"block {block} is not sealed")
        return entry.checksum

    def stored_keys(self) -> bytes:
        """All keys that can be hit, for a snapshot to an index."""
        return b"".join(self._by_key)

    def drain_events(self) -> list[PoolEvent]:
        """What can be hit now and could not at the last call, and the other way round: one event of each at most.

        Net changes only, so what nobody drains stays below two keys a block.
        """
        changes, self._changes = self._changes, {}
        joined = ((kind, b"".join(key for key, stored in changes.items() if stored is kind)) for kind in (False, True))
        return [PoolEvent(stored=kind, keys=keys) for kind, keys in joined if keys]

    def check(self) -> None:
        """Raises: PoolError when the pool contradicts itself. Cheap enough for whenever an engine is idle."""
        free, cached = set(self._free), set(self._cached)
        if len(free) != len(self._free):
            raise PoolError("a block is free twice")
        for number, block in enumerate(self._blocks):
            if block.refs < 0:
                raise PoolError(f"block {number} has {block.refs} references")
            if (number in free) != (block.refs == 0 and block.key is None):
                raise PoolError(f"block {number}: free list disagrees ({block})")
            if (number in cached) != (block.refs == 0 and block.key is not None):
                raise PoolError(f"block {number}: cache disagrees ({block})")
            if block.key is not None and self._by_key.get(block.key) != number:
                raise PoolError(f"block {number} is not found by its key")
        if len(self._by_key) != sum(block.key is not None for block in self._blocks):
            raise PoolError("a key names a block that is not sealed under it")

    def _entry(self, block: int) -> _Block:
        if not 0 <= block < self.num_blocks:
            raise PoolError(f"block {block} is outside the pool of {self.num_blocks}")
        return self._blocks[block]

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._unseal(block)
        self.counts.evicted += 1
        return block

    def _unseal(self, block: int) -> None:
        entry = self._blocks[block]
        if entry.key is not None:
            del self._by_key[entry.key]
            self._note(entry.key, stored=False)
        entry.key, entry.checksum, entry.approximate = None, b"", False

    def _note(self, key: bytes, *, stored: bool) -> None:
        if self._changes.get(key) is (not stored):
            del self._changes[key]  # back to what the last drain told
        else:
            self._changes[key] = stored

    def _unpin(self, blocks: tuple[int, ...]) -> None:
        for block in reversed(blocks):  # the deepest becomes the oldest
            entry = self._blocks[block]
            entry.refs -= 1
            if entry.refs == 0:
                if entry.key is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None
