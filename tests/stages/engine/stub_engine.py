"""Stub engines for tests: real memory and runner, dirty from the start, so that whatever is read unwritten shows."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Sequences
from itertools import count

import numpy as np

from kv.block import Lease
from kv.plan import KVPlan, plan
from pipeline.outbox import Entry
from stages.engine.decode_engine import DecodeJob
from stages.engine.interface import BLOCK_TOKENS, Bytes, SamplingParams, Sequence, Tokens
from stages.engine.memory import EngineMemory
from stages.engine.stub import KEEP_TOKENS, LAYOUT, WINDOW_TOKENS, StubOptions, StubRunner

DIRT = 0xA5  # another tenant's bytes
_numbers = count(1)


def prompt(num_tokens: int, seed: int = 0) -> Tokens:
    """Ids that no other seed repeats."""
    return np.random.default_rng((seed, 17)).integers(0, 128_000, num_tokens, np.uint32)


def plan_of(num_tokens: int, hit_tokens: int = 0, snapshots: Iterable[int] = ()) -> KVPlan:
    """The plan that a stub's prefill worker makes."""
    return plan(
        num_tokens, hit_tokens, keep=KEEP_TOKENS, window=WINDOW_TOKENS, windows=1, snapshots=frozenset(snapshots)
    )


def sampling(max_tokens: int = 1_000, eos_ids: tuple[int, ...] = (1,), *, ignore_eos: bool = True) -> SamplingParams:
    """Sampling that only its length ends."""
    return SamplingParams(
        temperature=1.0, top_p=1.0, top_k=0, max_tokens=max_tokens, eos_ids=eos_ids, ignore_eos=ignore_eos
    )


class Stub:
    """One stub engine's memory and runner."""

    def __init__(
        self,
        num_blocks: int = 64,
        num_states: int = 8,
        *,
        dirt: int = DIRT,
        runner: type[StubRunner] = StubRunner,
        max_context_tokens: int = 1 << 20,
    ) -> None:
        self.memory = EngineMemory(LAYOUT, num_blocks, num_states, shared=False)
        self.memory.kv.blocks[:] = dirt
        self.memory.kv.states[:] = dirt
        self.runner = runner(self.memory.kv, StubOptions(max_context_tokens=max_context_tokens))

    def admit(
        self,
        ids: Tokens,
        *,
        hit: Sequences[int] = (),
        seed: int = 7,
        kv_plan: KVPlan | None = None,
        sampled: SamplingParams | None = None,
        rid: str = "",
    ) -> tuple[Sequence, list[Lease]]:
        """A prompt with fresh blocks after those that are `hit`."""
        lease = self.memory.allocate(-(-len(ids) // BLOCK_TOKENS) - len(hit))
        slot = self.memory.take_state()
        assert lease is not None
        assert slot is not None
        seq = Sequence(
            rid=rid or f"{next(_numbers):032x}",
            attempt=0,
            choice=0,
            ids=ids,
            tail_ids=ids[-3:],
            num_prompt_tokens=len(ids),
            plan=kv_plan or plan_of(len(ids), len(hit) * BLOCK_TOKENS),
            block_table=[*hit, *lease.blocks],
            state_slot=slot,
            seed=seed,
            sampling=sampled or sampling(),
        )
        return seq, [lease]

    def store(self, blocks: Bytes) -> tuple[int, ...]:
        """Blocks that hold these bytes, [b, block_bytes], as a hit would find them."""
        lease = self.memory.allocate(len(blocks))
        assert lease is not None
        self.memory.kv.blocks[list(lease.blocks)] = blocks
        return lease.blocks

    def prefill(self, seq: Sequence, ends: Iterable[int] = ()) -> int:
        """Compute the prompt in chunks that end at `ends`; appends the first token."""
        start = seq.plan.replay_from
        for end in sorted({end for end in ends if start < end < seq.num_prompt_tokens}):
            assert self.runner.prefill(seq, start, end) is None
            start = end
        token = self.runner.prefill(seq, start, seq.num_prompt_tokens)
        assert token is not None
        seq.output.append(token)
        return token

    def receive(self, source: Stub, seq: Sequence, sampled: SamplingParams | None = None) -> tuple[Sequence, Lease]:
        """The sequence after a handoff: bytes of blocks and state copied, nothing else shared."""
        lease = self.memory.allocate(len(seq.block_table))
        slot = self.memory.take_state()
        assert lease is not None
        assert slot is not None
        self.memory.kv.blocks[list(lease.blocks)] = source.blocks_of(seq)
        self.memory.kv.states[slot] = source.memory.kv.states[seq.state_slot]
        copy = Sequence(
            rid=seq.rid,
            attempt=seq.attempt,
            choice=seq.choice,
            ids=np.empty(0, np.uint32),
            tail_ids=seq.tail_ids,
            num_prompt_tokens=seq.num_prompt_tokens,
            plan=seq.plan,
            block_table=list(lease.blocks),
            state_slot=slot,
            seed=seq.seed,
            sampling=sampled or seq.sampling,
            output=list(seq.output),
        )
        return copy, lease

    def step(self, seqs: list[Sequence]) -> None:
        """One step of a batch; blocks are added as needed."""
        for seq in seqs:
            if (seq.num_tokens - 1) // BLOCK_TOKENS == len(seq.block_table):
                lease = self.memory.allocate(1)
                assert lease is not None
                seq.block_table.extend(lease.blocks)
        for seq, token in zip(seqs, self.runner.decode(seqs), strict=True):
            seq.output.append(token)

    def decode(self, seq: Sequence, num_tokens: int) -> list[int]:
        """Decode alone. Returns all output tokens."""
        for _ in range(num_tokens):
            self.step([seq])
        return seq.output

    def blocks_of(self, seq: Sequence) -> Bytes:
        """A copy of the sequence's blocks, [b, block_bytes], in order."""
        return self.memory.kv.blocks[seq.block_table]

    def rows_of(self, seq: Sequence) -> bytes:
        """All bytes of the sequence's blocks, in order."""
        return bytes(self.blocks_of(seq).data)

    def state_of(self, seq: Sequence) -> bytes:
        """All bytes of its state."""
        return bytes(self.memory.kv.states[seq.state_slot].data)


def answer(ids: Tokens, num_tokens: int, seed: int = 7) -> list[int]:
    """The tokens of a cold run in an engine of its own."""
    stub = Stub(num_blocks=len(ids) // BLOCK_TOKENS + num_tokens // BLOCK_TOKENS + 2, num_states=1)
    seq, _ = stub.admit(ids, seed=seed)
    stub.prefill(seq)
    return stub.decode(seq, num_tokens - 1)


def decode_job(seq: Sequence, leases: list[Lease]) -> DecodeJob:
    """A job with an outbox entry of its own."""
    return DecodeJob(seq, Entry(next(_numbers), "codec-a", seq.rid, 0), leases)
