from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv.block import (
    BlockManager,
    Lease,
    LeaseError,
    PoolError,
    PoolEvent,
    chain_keys,
    checksum,
    root_of,
    salt,
    split_keys,
)

ROOT = root_of("f1", b"L" * 16, salt("acme", "ann", b"secret"))
IDS = np.arange(1000, 1000 + 700, dtype=np.uint32)


def key(i: int) -> bytes:
    return i.to_bytes(16, "big")


def fill(pool: BlockManager, keys: range) -> Lease:
    lease = pool.allocate(len(keys))
    assert lease is not None
    for block, k in zip(lease.blocks, keys, strict=True):
        assert pool.seal(block, key(k), checksum(key(k))) == block
    return lease


def test_a_key_names_the_whole_prefix():
    keys = split_keys(chain_keys(ROOT, IDS))
    assert len(keys) == 700 // 128 == len(set(keys))
    for position in range(640):
        changed = IDS.copy()
        changed[position] += 1
        other = split_keys(chain_keys(ROOT, changed))
        same = position // 128
        assert other[:same] == keys[:same]
        assert not set(other[same:]) & set(keys)


def test_the_chain_can_be_continued_from_any_block():
    keys = split_keys(chain_keys(ROOT, IDS))
    assert split_keys(chain_keys(keys[1], IDS[256:])) == keys[2:]


def test_the_chain_is_blake2b_of_parent_and_little_endian_ids():
    parent = ROOT
    for i, got in enumerate(split_keys(chain_keys(ROOT, IDS))):
        raw = b"".join(int(t).to_bytes(4, "little") for t in IDS[128 * i : 128 * i + 128])
        parent = blake2b(parent + raw, digest_size=16).digest()
        assert got == parent


@pytest.mark.parametrize("count", [0, 1, 127])
def test_less_than_a_block_has_no_key(count: int):
    assert chain_keys(ROOT, IDS[:count]) == b""


def test_images_are_part_of_the_key():
    plain = split_keys(chain_keys(ROOT, IDS))
    ann, bob = (split_keys(chain_keys(ROOT, IDS, {1: digest})) for digest in (b"cat", b"dog"))
    assert plain[0] == ann[0] == bob[0]
    assert len({plain[1], ann[1], bob[1]}) == len({plain[4], ann[4], bob[4]}) == 3


def test_every_part_of_a_root_separates_caches():
    base = ("f1", b"L" * 16, "acme", "ann", b"secret")
    others = ("f2", b"M" * 16, "acma", "ana", b"secreu")

    def root(fingerprint: str, layout: bytes, tenant: str, user: str, secret: bytes) -> bytes:
        return root_of(fingerprint, layout, salt(tenant, user, secret))

    roots = {root(*base)}
    for i, other in enumerate(others):
        changed: list[Any] = [*base[:i], other, *base[i + 1 :]]
        roots.add(root(*changed))
    assert len(roots) == 6


def test_tenant_and_user_cannot_be_shifted_into_each_other():
    assert salt("ab", "c", b"s") != salt("a", "bc", b"s") != salt("abc", "", b"s")


def test_a_travelled_salt_gives_the_same_root():
    assert root_of("f1", b"L" * 16, salt("acme", "ann", b"secret")) == ROOT


def test_a_long_secret_counts_whole():
    assert salt("a", "b", b"s" * 100) != salt("a", "b", b"s" * 101)


def test_wrong_roots_and_ids_are_refused():
    with pytest.raises(ValueError, match="a key has 16 bytes, not 3"):
        chain_keys(b"abc", IDS)
    with pytest.raises(ValueError, match=r"uint32 \[n\], not int64"):
        chain_keys(ROOT, IDS.astype(np.int64))
    with pytest.raises(ValueError, match="17 bytes are not whole"):
        split_keys(b"x" * 17)


def test_a_checksum_finds_any_flipped_bit():
    data = np.arange(300, dtype=np.uint8)
    good = checksum(data)
    for bit in range(0, 2400, 7):
        data[bit // 8] ^= 1 << bit % 8
        assert checksum(data) != good
        data[bit // 8] ^= 1 << bit % 8
    assert checksum(data.tobytes()) == good


def test_match_stops_at_the_first_missing_block():
    pool = BlockManager(8)
    blocks = fill(pool, range(5)).blocks
    pool.drop(key(3))
    assert pool.match(b"".join(map(key, range(5)))) == list(blocks[:3])
    assert pool.match(key(9) + key(0)) == []
    assert pool.match(b"") == []


def test_released_blocks_stay_until_room_is_needed_deepest_first():
    pool = BlockManager(4)
    fill(pool, range(3)).release()
    assert (pool.num_cached, pool.num_available) == (3, 4)
    extra = pool.allocate(2)
    assert extra is not None
    assert pool.match(b"".join(map(key, range(3)))) == pool.match(key(0) + key(1))
    assert pool.counts.evicted == 1
    assert len(pool.match(key(0) + key(1))) == 2


def test_the_least_recently_used_prefix_goes_first():
    pool = BlockManager(4)
    fill(pool, range(2)).release()
    fill(pool, range(10, 12)).release()
    pool.pin(pool.match(key(0) + key(1))).release()
    assert pool.allocate(2) is not None
    assert len(pool.match(key(0) + key(1))) == 2
    assert pool.match(key(10)) == []


def test_held_blocks_are_never_evicted():
    pool = BlockManager(3)
    fill(pool, range(2)).release()
    lease = pool.pin(pool.match(key(0) + key(1)))
    assert pool.allocate(2) is None
    assert pool.counts.refused == 1
    assert len(pool.match(key(0) + key(1))) == 2
    lease.release()
    assert pool.allocate(2) is not None


def test_a_lease_ends_exactly_once():
    pool = BlockManager(2)
    lease = fill(pool, range(2))
    again = pool.pin(lease.blocks)
    lease.release()
    with pytest.raises(LeaseError, match="released already"):
        lease.release()
    assert lease.released
    assert pool.num_cached == 0  # the second lease still holds them
    again.release()
    assert pool.num_cached == 2
    pool.check()


def test_unsealed_blocks_are_free_at_once_after_release():
    pool = BlockManager(2)
    lease = pool.allocate(2)
    assert lease is not None
    lease.release()
    assert (pool.num_cached, pool.num_available, pool.drain_events()) == (0, 2, [])


def test_the_second_writer_of_a_key_gets_the_first_ones_block():
    pool = BlockManager(3)
    first = fill(pool, range(1)).blocks[0]
    second = pool.allocate(1)
    assert second is not None
    assert pool.seal(second.blocks[0], key(0), checksum(b"x")) == first
    assert pool.key(second.blocks[0]) is None
    assert pool.checksum(first) == checksum(key(0))
    assert pool.counts.duplicates == 1
    second.release()
    assert pool.num_available == 2


def test_sealing_twice_under_one_key_changes_nothing_but_under_another_is_an_error():
    pool = BlockManager(2)
    block = fill(pool, range(1)).blocks[0]
    assert pool.seal(block, key(0), checksum(b"other")) == block
    assert pool.checksum(block) == checksum(key(0))
    with pytest.raises(PoolError, match="sealed under another key"):
        pool.seal(block, key(1), checksum(b"x"))


def test_a_dropped_block_is_never_hit_again_and_freed_with_its_last_lease():
    pool = BlockManager(1)
    lease = fill(pool, range(1))
    assert pool.drop(key(0))
    assert not pool.drop(key(0))
    assert pool.match(key(0)) == []
    assert pool.num_available == 0
    lease.release()
    assert (pool.num_available, pool.num_cached) == (1, 0)
    pool.check()


def test_approximate_blocks_are_hit_only_when_that_is_allowed():
    pool = BlockManager(3)
    lease = pool.allocate(2)
    assert lease is not None
    rough, exact = lease.blocks
    pool.seal(rough, key(0), checksum(b"rough"), approximate=True)
    assert pool.match(key(0)) == []
    assert pool.match(key(0), exact=False) == [rough]
    assert pool.seal(exact, key(0), checksum(b"exact")) == exact
    assert pool.match(key(0)) == pool.match(key(0), exact=False) == [exact]
    lease.release()
    pool.check()


def test_events_tell_net_changes_and_stay_bounded():
    pool = BlockManager(2)
    fill(pool, range(2)).release()
    assert pool.drain_events() == [PoolEvent(stored=True, keys=key(0) + key(1))]
    for i in range(10, 1010):
        fill(pool, range(i, i + 1)).release()
    assert len(pool._changes) <= 2 * pool.num_blocks
    assert pool.drain_events() == [
        PoolEvent(stored=False, keys=key(1) + key(0)),
        PoolEvent(stored=True, keys=key(1008) + key(1009)),
    ]
    assert pool.drain_events() == []
    assert pool.stored_keys() == key(1008) + key(1009)


def test_wrong_calls_are_named():
    pool = BlockManager(2)
    for call, words in (
        (lambda: BlockManager(0), "at least one block"),
        (lambda: pool.pin([0]), "block 0 is free"),
        (lambda: pool.pin([7]), "outside the pool of 2"),
        (lambda: pool.seal(0, key(0), checksum(b"")), "not held"),
        (lambda: pool.seal(0, b"k", checksum(b"")), "16 bytes, not 1 and 16"),
        (lambda: pool.seal(-1, key(0), checksum(b"")), "outside"),
        (lambda: pool.allocate(-1), "cannot allocate -1"),
        (lambda: pool.checksum(0), "not sealed"),
    ):
        with pytest.raises(PoolError, match=words):
            call()
    pool.check()


class PoolStory(RuleBasedStateMachine):
    """Requests come, grow, end and are aborted; a plain dictionary remembers what must be true."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockManager(12)
        self.held: list[tuple[Lease, ...]] = []
        self.index: set[bytes] = set()

    @rule(chain=st.integers(0, 3), depth=st.integers(1, 5))
    def admit(self, chain: int, depth: int) -> None:
        keys = [key(100 * chain + i) for i in range(depth)]
        hit = self.pool.match(b"".join(keys))
        assert all(self.pool.key(b) == k for b, k in zip(hit, keys, strict=False))
        pins = self.pool.pin(hit)
        fresh = self.pool.allocate(depth - len(hit) + 1)
        if fresh is None:
            pins.release()
            return
        assert not set(fresh.blocks) & set(hit)
        for block, k in zip(fresh.blocks, keys[len(hit) :], strict=False):
            self.pool.seal(block, k, checksum(k))
        self.held.append((pins, fresh))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def append(self, which: int) -> None:
        request = which % len(self.held)
        more = self.pool.allocate(1)
        if more is not None:
            self.held[request] += (more,)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def end(self, which: int) -> None:
        for lease in self.held.pop(which % len(self.held)):
            lease.release()

    @rule(which=st.integers(0, 3), depth=st.integers(0, 5))
    def corrupt(self, which: int, depth: int) -> None:
        self.pool.drop(key(100 * which + depth))

    @rule()
    def tell_index(self) -> None:
        for event in self.pool.drain_events():
            keys = set(split_keys(event.keys))
            assert keys.isdisjoint(self.index) if event.stored else keys <= self.index
            self.index = self.index | keys if event.stored else self.index - keys
        assert self.index == set(split_keys(self.pool.stored_keys()))

    @invariant()
    def pool_is_sound(self) -> None:
        self.pool.check()
        held = {b for request in self.held for lease in request for b in lease.blocks}
        assert self.pool.num_available == 12 - len(held)


TestPoolStory = PoolStory.TestCase
TestPoolStory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
