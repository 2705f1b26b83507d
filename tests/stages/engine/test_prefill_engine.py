from __future__ import annotations

import random
import threading
from itertools import pairwise

import numpy as np
import pytest

from kv.block import checksum
from stages.engine.interface import BLOCK_TOKENS, Sequence
from stages.engine.prefill_engine import CHUNK_TOKENS, PrefillEngine, PrefillJob
from stages.engine.stub import LAYOUT, StubRunner
from tests.stages.engine.stub_engine import DIRT, Stub, answer, prompt


class Watched(StubRunner):
    """A stub runner that notes its chunks and raises where it is told to."""

    chunks: list[tuple[str, int, int]]
    bad_rid = ""

    def prefill(self, seq: Sequence, start: int, end: int) -> int | None:
        self.chunks.append((seq.rid, start, end))
        if seq.rid == self.bad_rid:
            raise ArithmeticError(seq.rid)
        return super().prefill(seq, start, end)


class Half:
    """A prefill engine over dirty memory."""

    def __init__(self, tokens_per_s: float = 0.0) -> None:
        self.stub = Stub(num_blocks=200, num_states=40, runner=Watched)
        assert isinstance(self.stub.runner, Watched)
        self.runner = self.stub.runner
        self.runner.chunks = []
        self.engine = PrefillEngine(self.runner, self.stub.memory.kv, inline=True, tokens_per_s=tokens_per_s)

    def submit(self, num_tokens: int, rid: str = "", hit: tuple[int, ...] = ()) -> PrefillJob:
        job = PrefillJob(self.stub.admit(prompt(num_tokens), hit=hit, rid=rid)[0], num_known_blocks=len(hit))
        self.engine.submit(job)
        return job

    def run(self) -> list[PrefillJob]:
        """Step until idle."""
        done: list[PrefillJob] = []
        while (jobs := self.engine.step()) is not None:
            done += jobs
        return done


def test_prompts_are_computed_first_come_first_served():
    half = Half()
    jobs = [half.submit(n) for n in (1_500, 1, 700)]
    assert half.run() == jobs
    assert [job.seq.rid for job in jobs] == list(dict.fromkeys(rid for rid, _, _ in half.runner.chunks))
    assert [job.first_token for job in jobs] == [answer(prompt(n), 1)[0] for n in (1_500, 1, 700)]
    assert half.engine.step() is None


@pytest.mark.parametrize(
    ("num_tokens", "hit_blocks"), [(1, 0), (512, 0), (513, 0), (2_000, 0), (2_000, 3), (2_000, 15)]
)
def test_chunks_join_and_end_at_block_borders(num_tokens: int, hit_blocks: int):
    half = Half()
    whole, _ = half.stub.admit(prompt(num_tokens))
    half.stub.prefill(whole)
    half.runner.chunks.clear()
    job = half.submit(num_tokens, hit=tuple(whole.block_table[:hit_blocks]))
    assert half.run() == [job]
    chunks = [(start, end) for _, start, end in half.runner.chunks]
    assert (chunks[0][0], chunks[-1][1]) == (job.seq.plan.replay_from, num_tokens)
    assert all(before[1] == after[0] for before, after in pairwise(chunks))
    assert all(end - start <= CHUNK_TOKENS for start, end in chunks)
    assert all(end % BLOCK_TOKENS == 0 for _, end in chunks[:-1])
    assert job.computed_to == num_tokens


def test_checksums_are_of_the_blocks_that_were_computed_and_of_the_state():
    half = Half()
    whole = half.submit(1_000)
    half.run()
    job = half.submit(1_000, hit=tuple(whole.seq.block_table[:5]))
    half.run()
    assert len(whole.checksums) == 8 + 1
    assert job.checksums == whole.checksums[5:]
    kv = half.stub.memory.kv
    assert whole.checksums[:-1] == [checksum(kv.blocks[block]) for block in whole.seq.block_table]
    assert whole.checksums[-1] == checksum(kv.states[whole.seq.state_slot])


def test_nothing_of_another_tenant_is_in_what_is_offered():
    half = Half()
    memory = half.stub.memory
    assert (memory.kv.blocks == DIRT).all()
    clean = Stub(num_blocks=16, num_states=1, dirt=0)
    for num_tokens in (1, 127, 128, 300, 1_000):
        expected, leases = clean.admit(prompt(num_tokens))
        clean.prefill(expected)
        for hit_blocks in range((num_tokens - 1) // BLOCK_TOKENS + 1):
            hit = half.stub.store(clean.blocks_of(expected)[:hit_blocks])
            job = half.submit(num_tokens, hit=hit)
            half.run()
            assert (half.stub.blocks_of(job.seq) == clean.blocks_of(expected)).all()
            assert half.stub.state_of(job.seq) == clean.state_of(expected)
            memory.give_state(job.seq.state_slot)
        clean.memory.release(leases)
        clean.memory.give_state(expected.state_slot)


def test_a_prompt_cancelled_in_the_queue_comes_back_at_once_and_is_never_computed():
    half = Half()
    head, second, third = (half.submit(n) for n in (2_000, 300, 400))
    assert half.engine.step() == []
    second.cancelled = True
    assert half.engine.step() == [second]
    assert (second.first_token, second.checksums) == (-1, [])
    assert half.run() == [head, third]
    assert second.seq.rid not in {rid for rid, _, _ in half.runner.chunks}


def test_a_prompt_cancelled_amid_its_chunks_computes_no_other():
    half = Half()
    job, other = half.submit(2_000), half.submit(10)
    half.engine.step()
    half.engine.step()
    job.cancelled = True
    assert half.engine.step() == [job]
    assert job.first_token == -1
    assert len(half.runner.chunks) == 2
    assert half.run() == [other]


def test_a_prompt_cancelled_before_it_was_queued_is_not_computed():
    half = Half()
    job = PrefillJob(half.stub.admit(prompt(100))[0], num_known_blocks=0)
    job.cancelled = True
    half.engine.submit(job)
    assert half.run() == [job]
    assert half.runner.chunks == []


def test_a_cancel_that_comes_too_late_changes_nothing():
    half = Half()
    job = half.submit(100, rid="f" * 32)
    busy = half.submit(1_000)
    assert half.engine.step() == [job]
    job.cancelled = True
    half.engine.step()
    again = half.submit(100, rid="f" * 32)
    assert half.run() == [busy, again]
    assert again.first_token >= 0


def test_two_cancels_bring_a_prompt_back_once():
    half = Half()
    job = half.submit(100)
    job.cancelled = True
    job.cancelled = True
    assert half.run() == [job]


def test_after_a_failed_step_every_prompt_comes_back_once_and_the_engine_works_on():
    half = Half()
    half.runner.bad_rid = "b" * 32
    first = half.submit(100)
    bad, behind = half.submit(900, rid="b" * 32), half.submit(50)
    assert half.engine.step() == [first]
    first.cancelled = True
    with pytest.raises(ArithmeticError):
        half.engine.step()
    later = half.submit(60)  # before anybody has asked what failed
    assert half.engine.step() == [later]
    assert half.engine.fail_all() == [bad, behind]
    assert half.engine.fail_all() == []
    assert half.engine.step() is None


def test_the_pretended_rate_paces_each_chunk():
    half = Half(tokens_per_s=1_000)
    half.submit(600)
    dropped = half.submit(5)
    paces = []
    while half.engine.step() is not None:
        paces.append(half.engine.pace_s)
        dropped.cancelled = True
    assert paces == [0.512, 0.0, 0.088]
    assert Half().engine.pace_s == 0.0


def test_chaos_spoils_a_prompt_after_its_checksums():
    half = Half()
    spoilt: list[Sequence] = []

    def spoil(seq: Sequence) -> None:
        spoilt.append(seq)
        half.stub.memory.kv.blocks[seq.block_table[0], 0] ^= 1

    half.engine = PrefillEngine(half.runner, half.stub.memory.kv, inline=True, chaos=spoil)
    job = half.submit(700)
    half.run()
    assert spoilt == [job.seq]
    sums = [checksum(half.stub.memory.kv.blocks[block]) for block in job.seq.block_table]
    assert [a == b for a, b in zip(sums, job.checksums, strict=False)] == [False, *[True] * 5]


def test_every_prompt_comes_back_once_whatever_another_thread_does():
    half = Half()
    rng = random.Random(5)
    jobs = [
        PrefillJob(half.stub.admit(prompt(rng.choice([1, 200, 900]), number))[0], num_known_blocks=0)
        for number in range(40)
    ]
    fed = threading.Event()

    def feed() -> None:
        for number, job in enumerate(jobs):
            half.engine.submit(job)
            jobs[rng.randrange(number + 1)].cancelled = True
        fed.set()

    feeder = threading.Thread(target=feed)
    feeder.start()
    back: list[PrefillJob] = []
    while not fed.is_set() or half.engine._inbox:
        back += half.engine.step() or []
    feeder.join()
    back += half.run()
    assert len(back) == len(jobs)
    assert set(back) == set(jobs)
    for number, job in enumerate(jobs):
        if job.first_token >= 0:
            assert half.stub.decode(_begun(job), 7)[1:] == answer(job.seq.ids, 8)[1:], number


def _begun(job: PrefillJob) -> Sequence:
    job.seq.output.append(job.first_token)
    return job.seq


def test_the_layout_leaves_no_byte_of_a_full_block_unwritten():
    half = Half()
    job = half.submit(2 * BLOCK_TOKENS)
    half.run()
    first = half.stub.blocks_of(job.seq)
    other = Half()
    other.stub.memory.kv.blocks[:] = 0x11
    again = other.submit(2 * BLOCK_TOKENS)
    other.run()
    assert (other.stub.blocks_of(again.seq) == first).all()
    assert first.shape == (2, LAYOUT.block_bytes)
    assert np.count_nonzero(first) > 0.9 * first.size
