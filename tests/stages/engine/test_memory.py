from __future__ import annotations

import random
import sys
import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv.block import Lease, LeaseError, PoolError, checksum
from kv.region import RegionReader
from stages.engine.memory import EngineMemory
from stages.engine.stub import LAYOUT

NUM_BLOCKS, NUM_STATES = 12, 5


def memory(num_blocks: int = NUM_BLOCKS, num_states: int = NUM_STATES) -> EngineMemory:
    return EngineMemory(LAYOUT, num_blocks, num_states, shared=False)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def allocated(kv: EngineMemory, count: int) -> Lease:
    lease = kv.allocate(count)
    assert lease is not None
    return lease


def store(kv: EngineMemory, numbers: list[int]) -> Lease:
    """Blocks sealed under these keys, each with bytes of its own; still held."""
    lease = allocated(kv, len(numbers))
    for block, number in zip(lease.blocks, numbers, strict=True):
        kv.kv.blocks[block] = number
        kv.seal(block, key(number), checksum(kv.kv.blocks[block]), approximate=False)
    return lease


def test_blocks_and_states_fill_the_region_without_overlap():
    kv = memory()
    assert kv.region.num_bytes == NUM_BLOCKS * LAYOUT.block_bytes + NUM_STATES * LAYOUT.state_bytes
    descs = np.concatenate([kv.block_descs(range(NUM_BLOCKS)), *(kv.state_desc(slot) for slot in range(NUM_STATES))])
    RegionReader.of(kv.region).check_bounds(descs)
    order = descs[np.argsort(descs[:, 0])]
    assert order[0, 0] == 0
    assert (order[1:, 0] == order[:-1].sum(axis=1)).all()
    assert order[-1].sum() == kv.region.num_bytes


def test_a_descriptor_leads_a_reader_to_the_block_or_state_of_that_number():
    kv = memory()
    kv.kv.blocks[:] = np.arange(NUM_BLOCKS)[:, None] + 1
    kv.kv.states[:] = np.arange(NUM_STATES)[:, None] + 101
    reader, epoch = RegionReader.of(kv.region), kv.region.grant()
    blocks = [np.empty(LAYOUT.block_bytes, np.uint8) for _ in range(3)]
    reader.read_into(kv.block_descs([7, 0, 11]), blocks, epoch=epoch)
    assert [(int(b.min()), int(b.max())) for b in blocks] == [(8, 8), (1, 1), (12, 12)]
    state = np.empty(LAYOUT.state_bytes, np.uint8)
    reader.read_into(kv.state_desc(4), [state], epoch=epoch)
    assert (state == 105).all()
    assert kv.block_descs([]).shape == (0, 2)


def test_views_write_into_the_region():
    kv = memory()
    for number, view in enumerate(kv.block_views([3, 1])):
        view[:] = 50 + number
    assert (kv.kv.blocks[3] == 50).all()
    assert (kv.kv.blocks[1] == 51).all()


def test_only_the_last_block_of_an_allocation_is_cleared():
    kv = memory()
    kv.kv.blocks[:] = 0xEE
    lease = allocated(kv, 3)
    assert [bool(kv.kv.blocks[block].any()) for block in lease.blocks] == [True, True, False]
    assert allocated(kv, 0).blocks == ()


def test_without_room_nothing_is_taken():
    kv = memory()
    lease = allocated(kv, NUM_BLOCKS - 2)
    assert kv.allocate(3) is None
    assert kv._manager.num_available == 2
    assert kv.used_share == pytest.approx(10 / 12)
    kv.release([lease])
    assert (kv._manager.num_available, kv.used_share) == (NUM_BLOCKS, 0.0)


def test_a_match_is_held_and_at_most_as_long_as_asked():
    kv = memory()
    kv.release([store(kv, [1, 2, 3])])
    keys = b"".join(map(key, (1, 2, 3, 4)))
    hit = kv.match(keys, 2)
    assert [int(kv.kv.blocks[block, 0]) for block in hit.blocks] == [1, 2]
    rest = allocated(kv, NUM_BLOCKS - 2)  # evicts the third, never the held
    assert kv.allocate(1) is None
    assert [int(kv.kv.blocks[block, 0]) for block in hit.blocks] == [1, 2]
    again = kv.match(keys, 4)
    assert again.blocks == hit.blocks
    kv.release([hit, rest, again])
    assert kv.match(keys, 0).blocks == ()
    kv.check()


def test_a_lease_or_slot_that_is_given_back_twice_is_an_error():
    kv = memory()
    lease, slot = allocated(kv, 2), kv.take_state()
    assert slot is not None
    kv.release([lease])
    kv.give_state(slot)
    with pytest.raises(LeaseError):
        kv.release([lease])
    with pytest.raises(PoolError, match=f"state slot {slot}"):
        kv.give_state(slot)
    with pytest.raises(PoolError):
        kv.give_state(NUM_STATES)
    kv.check()


def test_a_lost_slot_is_found_by_check():
    kv = memory()
    kv._free_states.append(0)
    with pytest.raises(PoolError, match="state slot"):
        kv.check()


def test_a_spoilt_block_is_dropped_and_the_others_stay():
    kv = memory()
    lease = store(kv, [1, 2, 3])
    private = allocated(kv, 1)
    kv.kv.blocks[lease.blocks[1], 100] ^= 1
    assert kv.drop_if_bad([*lease.blocks, *private.blocks]) == 1
    assert kv.drop_if_bad(lease.blocks) == 0
    assert [kv.sealed_checksum(block) is not None for block in lease.blocks] == [True, False, True]
    hit = kv.match(b"".join(map(key, (1, 2, 3))), 3)
    assert hit.blocks == lease.blocks[:1]
    kv.release([lease, private, hit])
    assert kv._manager.num_available == NUM_BLOCKS
    kv.check()


def test_events_and_stored_keys_tell_what_can_be_hit():
    kv = memory()
    lease = store(kv, [1, 2])
    told = [(event.stored, event.keys) for event in kv.drain_events()]
    assert told == [(True, key(1) + key(2))]
    assert kv.drain_events() == []
    kv.release([lease])
    filled = allocated(kv, NUM_BLOCKS)
    assert [(event.stored, event.keys) for event in kv.drain_events()] == [(False, key(2) + key(1))]
    assert kv.stored_keys() == b""
    kv.release([filled])


class AnyUse(RuleBasedStateMachine):
    """Whatever callers do, an index that follows the events knows what can be hit, and nothing is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = memory()
        self.leases: list[Lease] = []
        self.slots: list[int] = []
        self.index: set[bytes] = set()
        self.content: dict[int, int] = {}  # of blocks that we hold alone
        self.numbers = iter(range(1, 1 << 30))

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        room = self.kv._manager.num_available
        lease = self.kv.allocate(count)
        assert (lease is None) == (count > room)
        if lease is not None:
            others = {block for other in self.leases for block in other.blocks}
            assert not others & set(lease.blocks)
            self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), reuse=st.booleans())
    def seal(self, data: st.DataObject, reuse: bool) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        for block in lease.blocks:
            if self.kv.sealed_checksum(block) is None:
                number = 1 if reuse else next(self.numbers) % 200
                self.kv.kv.blocks[block] = number
                self.kv.seal(block, key(number), checksum(self.kv.kv.blocks[block]), approximate=False)

    @rule(numbers=st.lists(st.integers(1, 30), max_size=4), at_most=st.integers(0, 4))
    def match(self, numbers: list[int], at_most: int) -> None:
        lease = self.kv.match(b"".join(map(key, numbers)), at_most)
        assert len(lease.blocks) <= at_most
        for block, number in zip(lease.blocks, numbers, strict=False):
            assert (self.kv.kv.blocks[block] == number).all()
        self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), share=st.floats(0, 1))
    def fork(self, data: st.DataObject, share: float) -> None:
        """Another choice holds the first blocks of one that has them."""
        lease = data.draw(st.sampled_from(self.leases))
        blocks = lease.blocks[: int(share * len(lease.blocks))]
        fork = self.kv.hold(blocks)
        assert fork.blocks == blocks
        self.leases.append(fork)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.kv.release([self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))])

    @rule(block=st.integers(0, NUM_BLOCKS - 1), spoil=st.booleans())
    def verify(self, block: int, spoil: bool) -> None:
        sealed = self.kv.sealed_checksum(block) is not None
        self.kv.kv.blocks[block, 9] ^= spoil
        assert self.kv.drop_if_bad([block]) == (spoil and sealed)
        assert not spoil or self.kv.sealed_checksum(block) is None

    @rule()
    def take_state(self) -> None:
        slot = self.kv.take_state()
        assert (slot is None) == (len(self.slots) == NUM_STATES)
        if slot is not None:
            assert slot not in self.slots
            self.slots.append(slot)

    @precondition(lambda self: self.slots)
    @rule()
    def give_state(self) -> None:
        self.kv.give_state(self.slots.pop(0))

    @rule()
    def drain(self) -> None:
        for event in self.kv.drain_events():
            keys = {event.keys[at : at + 16] for at in range(0, len(event.keys), 16)}
            self.index = self.index | keys if event.stored else self.index - keys
        stored = self.kv.stored_keys()
        assert self.index == {stored[at : at + 16] for at in range(0, len(stored), 16)}

    @invariant()
    def nothing_is_lost(self) -> None:
        self.kv.check()
        held = {block for lease in self.leases for block in lease.blocks}
        assert self.kv._manager.num_available == NUM_BLOCKS - len(held)
        assert self.kv.free_states == NUM_STATES - len(self.slots)


TestAnyUse = AnyUse.TestCase
TestAnyUse.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class Hammer(threading.Thread):
    """Takes and gives back at random; what it holds carries its mark and must keep it."""

    def __init__(self, kv: EngineMemory, mark: int) -> None:
        super().__init__()
        self.kv, self.mark, self.rng = kv, mark, random.Random(mark)
        self.held: list[tuple[Lease, int]] = []
        self.fault: str = ""

    def run(self) -> None:
        try:
            for _ in range(20_000):
                if self.held and self.rng.random() < 0.5:
                    self.give()
                else:
                    self.take()
            while self.held:
                self.give()
        except (PoolError, IndexError, KeyError, AssertionError) as error:
            self.fault = repr(error)

    def take(self) -> None:
        lease, slot = self.kv.allocate(self.rng.randint(1, 4)), self.kv.take_state()
        if lease is not None and slot is not None:
            self.kv.kv.blocks[list(lease.blocks)] = self.mark
            self.kv.kv.states[slot] = self.mark
            self.held.append((lease, slot))
            return
        if lease is not None:
            self.kv.release([lease])
        if slot is not None:
            self.kv.give_state(slot)

    def give(self) -> None:
        lease, slot = self.held.pop(self.rng.randrange(len(self.held)))
        assert (self.kv.kv.blocks[list(lease.blocks)] == self.mark).all()
        assert (self.kv.kv.states[slot] == self.mark).all()
        self.kv.release([lease])
        self.kv.give_state(slot)


def test_threads_never_share_a_block_or_a_slot():
    kv = memory(num_blocks=6, num_states=6)  # so few that they fight for the last; two threads rarely would
    threads = [Hammer(kv, mark) for mark in range(8)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # a switch after every few bytecodes
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert {thread.fault for thread in threads} == {""}
    assert (kv._manager.num_available, kv.free_states) == (6, 6)
    kv.check()


def test_sizes_that_make_no_memory_are_refused():
    with pytest.raises(PoolError, match="at least one block"):
        memory(num_blocks=0)


def test_a_shared_memory_can_be_read_by_others_and_a_local_one_cannot():
    shared = EngineMemory(LAYOUT, 2, 1, shared=True)
    assert shared.region.is_shared
    assert not memory().region.is_shared
    shared.close()
