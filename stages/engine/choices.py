"""Several answers to one prompt (n > 1): one prefill, and a fork of its sequence for each further choice.

Choices share the prompt's full blocks; each has a copy of the block that is still open and of the state. They differ in
their seed alone, so a choice gives the tokens that a request with that seed would.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from kernels.sample import splitmix64
from kv.block import Lease
from stages.engine.interface import BLOCK_TOKENS, Sequence
from stages.engine.memory import EngineMemory

_ALL = (1 << 64) - 1


def choice_seed(seed: int, choice: int) -> int:
    """The seed of a choice, 64 bits; choice 0 has the request's own. Source: ours (design 3: it derives from it)."""
    return seed if choice == 0 else splitmix64((seed + splitmix64(choice)) & _ALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Held for one further choice: a state slot, and a block when the prompt ends within one."""

    slot: int
    lease: Lease


def reserve(memory: EngineMemory, num_prompt_tokens: int, num_further: int) -> list[Room] | None:
    """Room for so many further choices, or None (and nothing is held)."""
    rooms: list[Room] = []
    for _ in range(num_further):
        lease = memory.allocate(1 if num_prompt_tokens % BLOCK_TOKENS else 0)
        slot = memory.take_state() if lease is not None else None
        if lease is None or slot is None:
            memory.release([] if lease is None else [lease])
            give_back(memory, rooms)
            return None
        rooms.append(Room(slot=slot, lease=lease))
    return rooms


def give_back(memory: EngineMemory, rooms: SequenceOf[Room]) -> None:
    """Room that no choice needs."""
    memory.release([room.lease for room in rooms])
    for room in rooms:
        memory.give_state(room.slot)


def fork(memory: EngineMemory, seq: Sequence, choice: int, token: int, room: Room) -> tuple[Sequence, list[Lease]]:
    """Another choice of a sequence whose prompt is computed and of whose output no KV is written yet.

    token: its first. Returns it with the leases of its blocks. `seq` may run on at once: what is shared is never
    written again.
    """
    full = seq.num_prompt_tokens // BLOCK_TOKENS
    shared = memory.hold(seq.block_table[:full])
    for old, new in zip(seq.block_table[full : full + 1], room.lease.blocks, strict=False):
        memory.kv.blocks[new] = memory.kv.blocks[old]
    memory.kv.states[room.slot] = memory.kv.states[seq.state_slot]
    child = replace(
        seq,
        choice=choice,
        block_table=[*seq.block_table[:full], *room.lease.blocks],
        state_slot=room.slot,
        seed=choice_seed(seq.seed, choice),
        output=[token],
        first_tokens=[],
    )
    return child, [shared, room.lease]
