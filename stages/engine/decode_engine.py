"""The decode scheduler: continuous batching of everything that was handed over; one step, one token a sequence.

A decode engine never recomputes: out of blocks, the sequence with the longest output ends with
`insufficient_system_resource`. Source: facts-system R50.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kv.block import Lease
from pipeline.events import FINISH_CODES, FinishReason
from pipeline.outbox import Entry, TokenRow
from stages.engine.interface import BLOCK_TOKENS, Runner, Sequence
from stages.engine.memory import EngineMemory

_STOP = FINISH_CODES.index(FinishReason.STOP) + 1
_LENGTH = FINISH_CODES.index(FinishReason.LENGTH) + 1
_NO_RESOURCE = FINISH_CODES.index(FinishReason.INSUFFICIENT_SYSTEM_RESOURCE) + 1


def finish_of(seq: Sequence, token: int, max_context_tokens: int) -> int:
    """The finish code after `token` was appended to `seq.output`, 0 while it runs on."""
    sampling = seq.sampling
    if token in sampling.eos_ids and not sampling.ignore_eos:
        return _STOP
    if len(seq.output) >= sampling.max_tokens or seq.num_tokens >= max_context_tokens:
        return _LENGTH
    return 0


@dataclass(slots=True)
class DecodeJob:
    """One choice being decoded, and what it holds."""

    seq: Sequence
    entry: Entry
    leases: list[Lease] = field(default_factory=list)
    stopped: bool = False

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
    """Runs decode jobs. `submit`, `cancel` and `stop` may be called from another thread than `step`."""

    def __init__(
        self, runner: Runner, memory: EngineMemory, *, max_batch: int, inline: bool, pace_s: float = 0.0
    ) -> None:
        self.inline = inline
        self.pace_s = pace_s
        self._runner = runner
        self._memory = memory
        self._max_batch = max_batch
        self._inbox: deque[DecodeJob] = deque()
        self._running: list[DecodeJob] = []

    @property
    def num_running(self) -> int:
        """Jobs in the batch or about to enter it."""
        return len(self._running) + len(self._inbox)

    def submit(self, job: DecodeJob) -> None:
        """Enter the batch at the next step."""
        self._inbox.append(job)

    def step(self) -> DecodeResult | None:
        """One token for each running sequence; None when idle."""
        while self._inbox and len(self._running) < self._max_batch:
            self._running.append(self._inbox.popleft())
        if not self._running:
            return None
        over = [job for job in self._running if job.stopped]
        if over:
            self._running = [job for job in self._running if not job.stopped]
        rows: list[TokenRow] = []
        self._grow(rows, over)
        if self._running:
            self._decode(rows, over)
        return DecodeResult(rows, over)

    def _decode(self, rows: list[TokenRow], over: list[DecodeJob]) -> None:
        jobs = self._running
        tokens = self._runner.decode([job.seq for job in jobs])
        context = self._runner.card.max_context_tokens
        finished = False
        for job, token in zip(jobs, tokens, strict=True):
            seq = job.seq
            seq.output.append(token)
            finish = finish_of(seq, token, context)
            rows.append(TokenRow(job.entry, len(seq.output) - 1, (token,), finish))
            if finish:
                finished = True
                over.append(job)
                job.stopped = True
        if finished:
            self._running = [job for job in jobs if not job.stopped]

    def _grow(self, rows: list[TokenRow], over: list[DecodeJob]) -> None:
        """Every sequence needs the block of the position it writes now."""
        for job in list(self._running):
            if job.stopped or (job.seq.num_tokens - 1) // BLOCK_TOKENS < len(job.seq.block_table):
                continue
            lease = self._memory.allocate(1)
            while lease is None:
                victim = max(self._running, key=lambda candidate: len(candidate.seq.output))
                rows.append(TokenRow(victim.entry, len(victim.seq.output), (), _NO_RESOURCE))
                self._running.remove(victim)
                victim.stopped = True
                self._memory.release(victim.leases)
                victim.leases = []
                over.append(victim)
                if victim is job:
                    break
                lease = self._memory.allocate(1)
            if lease is not None:
                job.leases.append(lease)
                job.seq.block_table.extend(lease.blocks)

    def fail_all(self) -> list[DecodeJob]:
        """A step raised: give up everything in hand."""
        jobs = [*self._running, *self._inbox]
        self._running = []
        self._inbox.clear()
        return jobs
