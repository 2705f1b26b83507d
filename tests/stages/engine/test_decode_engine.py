from __future__ import annotations

import random
import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.events import FINISH_CODES, FinishReason
from pipeline.outbox import TokenRow
from stages.engine.decode_engine import DecodeEngine, DecodeJob, DecodeResult, finish_of
from stages.engine.interface import BLOCK_TOKENS, SamplingParams, Sequence
from stages.engine.stub import LAYOUT, StubRunner
from tests.stages.engine.stub_engine import Stub, answer, decode_job, prompt, sampling

STOP = FINISH_CODES.index(FinishReason.STOP) + 1
LENGTH = FINISH_CODES.index(FinishReason.LENGTH) + 1
NO_RESOURCE = FINISH_CODES.index(FinishReason.INSUFFICIENT_SYSTEM_RESOURCE) + 1


class Watched(StubRunner):
    """A stub runner during whose step somebody else may act."""

    batches: list[int]
    to_stop: list[DecodeJob]
    raises = False

    def decode(self, seqs: list[Sequence]) -> list[int]:
        self.batches.append(len(seqs))
        for job in self.to_stop:
            job.stopped = True
        if self.raises:
            raise ArithmeticError("decode")
        return super().decode(seqs)


class Half:
    """A decode engine whose sequences come from a prefill engine of its own; does what the decode stage does."""

    def __init__(self, num_blocks: int = 400, max_batch: int = 64, max_context_tokens: int = 1 << 20) -> None:
        self.source = Stub(num_blocks=40, num_states=1)
        self.stub = Stub(num_blocks, 64, runner=Watched, max_context_tokens=max_context_tokens)
        self.memory = self.stub.memory
        assert isinstance(self.stub.runner, Watched)
        self.runner = self.stub.runner
        self.runner.batches, self.runner.to_stop = [], []
        self.engine = DecodeEngine(self.runner, self.memory, max_batch=max_batch, inline=True)
        self.rows: dict[int, list[TokenRow]] = {}
        self.over: list[DecodeJob] = []

    def submit(self, num_tokens: int, seed: int = 7, sampled: SamplingParams | None = None) -> DecodeJob:
        first, leases = self.source.admit(prompt(num_tokens, seed), seed=seed)
        self.source.prefill(first)
        seq, lease = self.stub.receive(self.source, first, sampled)
        self.source.memory.release(leases)
        self.source.memory.give_state(first.state_slot)
        job = decode_job(seq, [lease])
        self.engine.submit(job)
        return job

    def step(self) -> DecodeResult | None:
        result = self.engine.step()
        if result is not None:
            for row in result.rows:
                self.rows.setdefault(row.entry.handle, []).append(row)
            self.finish(result.over)
        return result

    def finish(self, jobs: list[DecodeJob]) -> None:
        for job in jobs:
            self.memory.release(job.leases)
            self.memory.give_state(job.seq.state_slot)
            self.over.append(job)

    def run(self) -> None:
        while self.step() is not None:
            pass

    def finish_code(self, job: DecodeJob) -> int:
        """Of its last row; every row before continues the one before it and says nothing of an end."""
        rows = self.rows[job.entry.handle]
        tokens = [token for row in rows for token in row.tokens]
        assert tokens == job.seq.output[1:]
        assert [row.position for row in rows] == list(range(1, len(rows) + 1))
        assert [row.finish for row in rows[:-1]] == [0] * (len(rows) - 1)
        return rows[-1].finish

    def check_idle(self) -> None:
        self.memory.check()
        assert self.memory._manager.num_available == self.memory.num_blocks
        assert self.memory.free_states == self.memory.num_states
        assert self.engine.step() is None


def test_every_token_of_every_sequence_is_that_of_a_lone_run():
    half = Half()
    jobs = [half.submit(n, seed, sampling(max_tokens=200)) for seed, n in enumerate((1, 127, 128, 250, 256))]
    half.run()
    assert [half.finish_code(job) for job in jobs] == [LENGTH] * 5
    for seed, job in enumerate(jobs):
        assert job.seq.output == answer(prompt(job.seq.num_prompt_tokens, seed), 200, seed)
    half.check_idle()


def test_sequences_enter_and_leave_the_batch_at_any_step():
    half = Half()
    first = half.submit(10, 1, sampling(max_tokens=4))
    half.step()
    second = half.submit(20, 2, sampling(max_tokens=9))
    half.run()
    assert half.runner.batches == [1, 2, 2, 1, 1, 1, 1, 1, 1]
    assert half.over == [first, second]
    half.check_idle()


def test_what_does_not_fit_the_batch_waits_its_turn():
    half = Half(max_batch=2)
    jobs = [half.submit(10, seed, sampling(max_tokens=3 + seed)) for seed in range(5)]
    half.run()
    assert max(half.runner.batches) == 2
    assert half.over == jobs
    assert [len(job.seq.output) for job in jobs] == [3, 4, 5, 6, 7]
    half.check_idle()


def test_an_engine_without_work_is_idle():
    half = Half()
    assert half.step() is None
    assert half.runner.batches == []


def test_an_eos_token_ends_a_sequence_and_is_delivered():
    text = answer(prompt(30, 3), 20, 3)
    eos = text[9]
    half = Half()
    obeys = half.submit(30, 3, sampling(eos_ids=(1, eos), ignore_eos=False))
    ignores = half.submit(30, 3, sampling(max_tokens=20, eos_ids=(1, eos)))
    half.run()
    assert half.finish_code(obeys) == STOP
    assert obeys.seq.output == text[:10]
    assert half.finish_code(ignores) == LENGTH
    assert ignores.seq.output == text
    half.check_idle()


def test_an_eos_at_the_length_limit_is_a_stop():
    text = answer(prompt(30, 3), 10, 3)
    half = Half()
    job = half.submit(30, 3, sampling(max_tokens=10, eos_ids=(text[9],), ignore_eos=False))
    half.run()
    assert half.finish_code(job) == STOP


def test_the_context_limit_ends_a_sequence():
    half = Half(max_context_tokens=300)
    job = half.submit(256)
    half.run()
    assert half.finish_code(job) == LENGTH
    assert job.seq.num_tokens == 300
    assert len(job.seq.block_table) == 3
    half.check_idle()


@pytest.mark.parametrize(
    ("token", "num_output", "max_tokens", "context", "code"),
    [
        (5, 3, 10, 100, 0),
        (5, 10, 10, 100, LENGTH),
        (5, 3, 10, 53, LENGTH),
        (5, 3, 10, 54, 0),
        (1, 3, 10, 100, STOP),
        (1, 10, 10, 100, STOP),
    ],
)
def test_how_a_sequence_ends(token: int, num_output: int, max_tokens: int, context: int, code: int):
    seq, _ = Stub().admit(prompt(50), sampled=sampling(max_tokens, ignore_eos=False))
    seq.output = [7] * (num_output - 1) + [token]
    assert finish_of(seq, token, context) == code


@pytest.mark.parametrize("num_tokens", [100, 127, 128, 129])
def test_a_sequence_gets_a_clean_block_at_each_border_and_gives_all_back(num_tokens: int):
    half = Half()
    job = half.submit(num_tokens, 7, sampling(max_tokens=300))
    while (half.step()) is not None and not half.over:
        written = job.seq.num_tokens - 1
        assert len(job.seq.block_table) == -(-written // BLOCK_TOKENS)
        rows = half.stub.blocks_of(job.seq).reshape(-1)
        assert not rows[16 * written :].any()  # nothing of who had the block before
    assert len({block for lease in job.leases for block in lease.blocks}) == len(job.seq.block_table)
    half.check_idle()


def test_without_blocks_the_longest_output_ends_and_the_others_go_on():
    half = Half(num_blocks=2)
    long = half.submit(50, 1)
    for _ in range(20):
        half.step()
    needy = half.submit(120, 2, sampling(max_tokens=30))
    while not half.over:
        half.step()
    assert half.over == [long]
    assert half.finish_code(long) == NO_RESOURCE
    assert half.rows[long.entry.handle][-1].tokens == ()
    assert long.leases == []
    half.run()
    assert half.finish_code(needy) == LENGTH
    assert needy.seq.output == answer(prompt(120, 2), 30, 2)
    half.check_idle()


def test_a_sequence_that_is_itself_the_longest_ends():
    half = Half(num_blocks=2)
    long = half.submit(120, 1)
    half.step()
    other = half.submit(10, 2, sampling(max_tokens=100))
    half.run()
    assert half.over == [long, other]
    assert len(long.seq.output) == 9
    assert half.finish_code(long) == NO_RESOURCE
    assert half.finish_code(other) == LENGTH
    assert other.seq.output == answer(prompt(10, 2), 100, 2)
    half.check_idle()


def test_blocks_that_others_hold_too_do_not_save_anyone():
    half = Half(num_blocks=3)
    long, job = half.submit(60, 1), half.submit(128, 2)
    half.engine.step()
    shared = half.memory._manager.pin(long.leases[0].blocks)  # as a hit would
    grown = half.memory.allocate(half.memory._manager.num_available)
    assert grown is not None
    job.seq.output.extend([7] * (2 * BLOCK_TOKENS - job.seq.num_tokens + 1))
    result = half.engine.step()
    assert result is not None
    assert result.over == [job]
    half.finish(result.over)
    long.stopped = True
    half.run()
    half.memory.release([shared, grown])
    half.check_idle()


def test_a_stopped_sequence_leaves_before_the_next_step_wherever_it_is():
    half = Half(max_batch=1)
    running, waiting, next_one = half.submit(10, 1), half.submit(20, 2), half.submit(30, 3, sampling(max_tokens=3))
    half.step()
    running.stopped = waiting.stopped = True
    half.step()
    assert half.over == [running, waiting]
    assert len(running.seq.output) == 2
    assert waiting.entry.handle not in half.rows
    half.run()
    assert half.over == [running, waiting, next_one]
    half.check_idle()


def test_all_stopped_is_a_step_without_tokens():
    half = Half()
    job = half.submit(10)
    job.stopped = True
    result = half.step()
    assert result is not None
    assert (result.rows, result.over) == ([], [job])
    half.check_idle()


def test_a_stop_that_arrives_amid_a_step_is_obeyed_by_the_next():
    half = Half()
    jobs = [half.submit(10, seed, sampling(max_tokens=2 + 2 * seed)) for seed in range(3)]
    half.runner.to_stop = jobs  # one of them ends by itself in the very same step
    half.step()
    assert half.over == jobs[:1]
    half.step()
    assert half.over == jobs
    half.check_idle()


def test_after_a_failed_step_every_sequence_comes_back_once_and_the_engine_works_on():
    half = Half(max_batch=2, num_blocks=6)
    stopped, running, waiting = (half.submit(10, seed) for seed in (1, 2, 3))
    half.step()
    stopped.stopped = True
    half.runner.raises = True
    with pytest.raises(ArithmeticError):
        half.step()
    half.runner.raises = False
    later = half.submit(20, 4, sampling(max_tokens=3))  # before anybody has asked what failed
    half.step()
    failed = half.engine.fail_all()
    assert set(failed) == {stopped, running, waiting}
    assert len(failed) == 3
    assert half.engine.fail_all() == []
    half.finish(failed)
    half.run()
    assert half.over[-1] is later
    half.check_idle()


def test_a_victim_of_a_failed_step_comes_back_once_as_well():
    half = Half(num_blocks=2)
    half.submit(120, 1)
    half.submit(120, 2)
    for _ in range(8):
        half.step()
    half.runner.raises = True
    with pytest.raises(ArithmeticError):
        half.step()
    failed = half.engine.fail_all()
    assert len(failed) == len(set(failed)) == 2
    half.finish(failed)
    half.check_idle()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(4, 30), st.integers(1, 6))
def test_whatever_happens_every_sequence_ends_once_and_nothing_is_lost(seed: int, num_blocks: int, max_batch: int):
    rng = random.Random(seed)
    half = Half(num_blocks=num_blocks, max_batch=max_batch)
    jobs: list[DecodeJob] = []
    for _ in range(300):
        if rng.random() < 0.1 and half.memory._manager.num_available >= 3 and half.memory.free_states:
            sampled = sampling(max_tokens=rng.choice([2, 10, 200]))
            jobs.append(half.submit(rng.choice([1, 100, 127, 128, 129, 300]), len(jobs), sampled))
        if jobs and rng.random() < 0.03:
            rng.choice(jobs).stopped = True
        half.step()
        half.memory.check()
    half.run()
    assert Counter(map(id, half.over)) == Counter(map(id, jobs))
    for number, job in enumerate(jobs):
        if job.entry.handle in half.rows:
            code = half.finish_code(job)
            assert code in {LENGTH, NO_RESOURCE} or job.stopped
        text = answer(prompt(job.seq.num_prompt_tokens, number), len(job.seq.output), number)
        assert job.seq.output == text
    half.check_idle()


def test_every_sequence_ends_once_whatever_another_thread_does():
    half = Half(num_blocks=60, max_batch=4)
    rng = random.Random(3)
    engine = half.engine
    half.engine = DecodeEngine(half.runner, half.memory, max_batch=0, inline=True)  # `submit` makes, does not queue
    jobs = [half.submit(rng.choice([1, 100, 128]), seed, sampling(max_tokens=rng.randint(2, 60))) for seed in range(40)]
    half.engine = engine
    fed = threading.Event()

    def feed() -> None:
        for number, job in enumerate(jobs):
            engine.submit(job)
            jobs[rng.randrange(number + 1)].stopped = rng.random() < 0.5
        fed.set()

    feeder = threading.Thread(target=feed)
    feeder.start()
    while not fed.is_set():
        half.step()
    feeder.join()
    half.run()
    assert Counter(map(id, half.over)) == Counter(map(id, jobs))
    half.check_idle()


def test_no_byte_of_another_tenant_is_near_a_handed_over_sequence():
    half = Half()
    half.memory.kv.blocks[:] = 0xEE
    half.memory.kv.states[:] = 0xEE
    job = half.submit(200, 5, sampling(max_tokens=150))
    half.run()
    clean = Stub(dirt=0)
    seq, _ = clean.admit(prompt(200, 5), seed=5)
    clean.prefill(seq)
    clean.decode(seq, 149)
    assert job.seq.output == seq.output
    assert (half.stub.blocks_of(job.seq) == clean.blocks_of(seq)).all()
    assert half.stub.state_of(job.seq) == clean.state_of(seq)
    assert np.count_nonzero((half.memory.kv.blocks == 0xEE).all(axis=1)) == half.memory.num_blocks - len(
        job.seq.block_table
    )
    assert LAYOUT.block_bytes == half.memory.kv.blocks.shape[1]
