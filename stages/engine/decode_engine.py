"""The decode scheduler: continuous batching of everything that was handed over; one step, one token a sequence.

A decode engine never recomputes: out of blocks, the sequence with the longest output ends with
`insufficient_system_resource`. Source: facts-system R50.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from kv.block import Lease
from pipeline.events import FINISH_CODES, FinishReason
from pipeline.outbox import Entry, TokenRow
from stages.engine.interface import BLOCK_TOKENS, Runner, Sequence
from stages.engine.memory import EngineMemory

_STOP = FINISH_CODES.index(FinishReason.STOP) + 1
_LENGTH = FINISH_CODES.index(FinishReason.LENGTH) + 1
_GRAMMAR_ERROR = FINISH_CODES.index(FinishReason.GRAMMAR_ERROR) + 1
_NO_RESOURCE = FINISH_CODES.index(FinishReason.INSUFFICIENT_SYSTEM_RESOURCE) + 1


def finish_of(seq: Sequence, token: int, max_context_tokens: int) -> int:
    """The finish code after `token` was appended to `seq.output`, 0 while it runs on."""
    sampling, num_output = seq.sampling, len(seq.output)
    if token in sampling.eos_ids and not sampling.ignore_eos:
        return _STOP
    if num_output >= sampling.max_tokens or seq.num_prompt_tokens + num_output >= max_context_tokens:
        return _LENGTH
    return 0


@dataclass(slots=True, eq=False)
class DecodeJob:
    """One choice being decoded, and what it holds. `stopped` is a wish that the next step obeys."""

    seq: Sequence
    entry: Entry
    leases: list[Lease] = field(default_factory=list)
    stopped: bool = False
    ends: frozenset[int] = field(init=False)  # tokens that may be the last

    def __post_init__(self) -> None:
        sampling = self.seq.sampling
        self.ends = frozenset() if sampling.ignore_eos else frozenset(sampling.eos_ids)

    @property
    def key(self) -> tuple[str, int]:
        """Request id and attempt."""
        return self.seq.rid, self.seq.attempt


@dataclass(slots=True)
class DecodeResult:
    """One step: rows to send, jobs that are over (finished, cancelled or stopped)."""

    rows: list[TokenRow]
    over: list[DecodeJob]


class DecodeEngine:
    """Runs decode jobs. Another thread than `step`'s may `submit`, set a job's `stopped` and call `fail_all`.

    Every job that was submitted comes back exactly once: in a result's `over`, or from `fail_all`.
    """

    def __init__(
        self, runner: Runner, memory: EngineMemory, *, max_batch: int, inline: bool, pace_s: float = 0.0
    ) -> None:
        self.inline = inline
        self.pace_s = pace_s
        self._runner = runner
        self._memory = memory
        self._max_batch = max_batch
        self._inbox: deque[DecodeJob] = deque()  # from the other thread; all below belongs to step's
        self._waiting: deque[DecodeJob] = deque()
        self._running: list[DecodeJob] = []
        self._failed: deque[DecodeJob] = deque()  # to the other thread

    def submit(self, job: DecodeJob) -> None:
        """Enter the batch at the next step, or as soon as there is room in it."""
        self._inbox.append(job)

    def step(self) -> DecodeResult | None:
        """One token for each running sequence; None when idle."""
        over = self._admit()
        if not self._running and not over:
            return None
        result = DecodeResult([], over)
        try:
            self._grow(result)
            if self._running:
                self._decode(result)
        except BaseException:
            # here and not in fail_all: by then another step may have begun
            self._failed.extend((*over, *self._running, *self._waiting))
            self._running, self._waiting = [], deque()
            raise
        return result

    def _admit(self) -> list[DecodeJob]:
        """Let stopped jobs out, wherever they are, and waiting ones in; returns the former."""
        while self._inbox:
            self._waiting.append(self._inbox.popleft())
        over: list[DecodeJob] = []
        self._running = _without_stopped(self._running, over)
        if self._waiting:
            self._waiting = deque(_without_stopped(self._waiting, over))
        while self._waiting and len(self._running) < self._max_batch:
            self._running.append(self._waiting.popleft())
        return over

    def _decode(self, result: DecodeResult) -> None:
        jobs, still = self._running, list[DecodeJob]()
        tokens = self._runner.decode([job.seq for job in jobs])
        context = self._runner.card.max_context_tokens
        add_row, run_on = result.rows.append, still.append
        for job, token in zip(jobs, tokens, strict=True):
            seq = job.seq
            output = seq.output
            position = len(output)
            if seq.constraint is not None and seq.constraint.fault:
                # nothing that could follow was allowed: what is there so far stands, the request ends by name
                add_row(TokenRow(job.entry, position, (), _GRAMMAR_ERROR))
                result.over.append(job)
                continue
            output.append(token)
            # what cannot be the end is not asked for its reason: a call a token would cost a tenth of the step
            most = min(seq.sampling.max_tokens, context - seq.num_prompt_tokens)
            if position + 1 < most and token not in job.ends:
                add_row(TokenRow(job.entry, position, (token,), 0))
                run_on(job)
                continue
            finish = finish_of(seq, token, context)
            add_row(TokenRow(job.entry, position, (token,), finish))
            (result.over if finish else still).append(job)
        self._running = still

    def _grow(self, result: DecodeResult) -> None:
        """Every sequence needs the block of the position it writes now."""
        # written out: a call a sequence would cost a tenth of the step
        short = [
            job
            for job in self._running
            if (job.seq.num_prompt_tokens + len(job.seq.output) - 1) // BLOCK_TOKENS >= len(job.seq.block_table)
        ]
        for job in short:
            while job not in result.over:
                lease = self._memory.allocate(1)
                if lease is not None:
                    job.leases.append(lease)
                    job.seq.block_table.extend(lease.blocks)
                    break
                self._give_up_longest(result)

    def _give_up_longest(self, result: DecodeResult) -> None:
        victim = max(self._running, key=lambda job: len(job.seq.output))
        self._running.remove(victim)
        self._memory.release(victim.leases)
        victim.leases = []
        result.rows.append(TokenRow(victim.entry, len(victim.seq.output), (), _NO_RESOURCE))
        result.over.append(victim)

    def fail_all(self) -> list[DecodeJob]:
        """The jobs in hand when a step raised; they have left the engine."""
        return [self._failed.popleft() for _ in range(len(self._failed))]


def _without_stopped(jobs: Iterable[DecodeJob], stopped: list[DecodeJob]) -> list[DecodeJob]:
    """The jobs that run on; the others are appended to `stopped`. Looks once: the wish may come at any moment."""
    running: list[DecodeJob] = []
    for job in jobs:
        (stopped if job.stopped else running).append(job)
    return running
