"""Forks of one prompt: each choice gives what a request with its seed gives, and nothing is lost or shared wrongly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kv.block import Lease
from stages.engine.choices import choice_seed, fork, give_back, reserve
from stages.engine.interface import Sequence
from tests.stages.engine.stub_engine import Stub, sampling


def prompt(n: int) -> np.ndarray:
    return np.random.default_rng(n).integers(3, 100_000, n).astype(np.uint32)


def forked(stub: Stub, n: int, num_choices: int) -> list[tuple[Sequence, list[Lease]]]:
    seq, leases = stub.admit(prompt(n), sampled=replace(sampling(), num_choices=num_choices))
    stub.prefill(seq)
    rooms = reserve(stub.memory, n, num_choices - 1)
    assert rooms is not None
    first = (replace(seq, output=[seq.first_tokens[0]]), leases)
    return [first, *(fork(stub.memory, seq, c + 1, seq.first_tokens[c + 1], room) for c, room in enumerate(rooms))]


def test_seeds_of_choices_differ_and_the_first_has_the_requests_own():
    seeds = [choice_seed(seed, choice) for seed in (0, 7, 2**64 - 1) for choice in range(8)]
    assert len(set(seeds)) == 24
    assert [choice_seed(seed, 0) for seed in (0, 7)] == [0, 7]
    assert all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize("n", [1, 100, 128, 200, 256, 300])
def test_a_choice_gives_the_tokens_of_a_request_with_its_seed(n: int):
    stub = Stub()
    seqs = [seq for seq, _ in forked(stub, n, 3)]
    for _ in range(150):  # over a block's border
        for seq in seqs:
            need = -(-(seq.num_tokens) // 128) - len(seq.block_table)
            if need:
                lease = stub.memory.allocate(need)
                assert lease is not None
                seq.block_table.extend(lease.blocks)
        for seq, token in zip(seqs, stub.runner.decode(seqs), strict=True):
            seq.output.append(token)
    for choice, seq in enumerate(seqs):
        alone = Stub()
        single, _ = alone.admit(prompt(n), seed=choice_seed(7, choice))
        alone.prefill(single)
        for _ in range(150):
            need = -(-(single.num_tokens) // 128) - len(single.block_table)
            if need:
                lease = alone.memory.allocate(need)
                assert lease is not None
                single.block_table.extend(lease.blocks)
            single.output += alone.runner.decode([single])
        assert seq.output == single.output
    assert len({tuple(seq.output) for seq in seqs}) == 3


@pytest.mark.parametrize("n", [100, 256, 300])
def test_everything_held_is_given_back_in_any_order(n: int):
    stub = Stub(num_blocks=12, num_states=4)
    held = forked(stub, n, 4)
    stub.memory.check()
    for seq, leases in [held[1], held[0], held[3], held[2]]:
        stub.memory.release(leases)
        stub.memory.give_state(seq.state_slot)
        stub.memory.check()
    everything = stub.memory.allocate(12)
    assert everything is not None
    assert stub.memory.free_states == 4


def test_blocks_are_shared_up_to_the_open_one():
    held = forked(Stub(), 300, 3)
    tables = [seq.block_table for seq, _ in held]
    assert [table[:2] for table in tables[1:]] == [tables[0][:2]] * 2
    assert len({table[2] for table in tables}) == 3


@pytest.mark.parametrize(("blocks", "states"), [(4, 8), (64, 2)])
def test_too_little_room_holds_nothing(blocks: int, states: int):
    stub = Stub(num_blocks=blocks, num_states=states)
    stub.admit(prompt(300))
    free = stub.memory.free_states
    assert reserve(stub.memory, 300, 3) is None
    stub.memory.check()
    assert stub.memory.free_states == free
    lease = stub.memory.allocate(blocks - 3)
    assert lease is not None


def test_room_that_nobody_needs_is_given_back():
    stub = Stub(num_blocks=6, num_states=4)
    rooms = reserve(stub.memory, 300, 3)
    assert rooms is not None
    give_back(stub.memory, rooms)
    assert stub.memory.allocate(6) is not None
    assert stub.memory.free_states == 4
