"""The prefill scheduler: first come first served, in chunks; steps run wherever the stepper runs them.

A head that is not ready blocks those behind it (facts-system R41); balance between engines hides it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kv.block import checksum
from stages.engine.interface import BLOCK_TOKENS, Bytes, KVMemory, Runner, Sequence

# Longest time between two looks at cancels is one chunk. Source: ours; facts-system R38 pins ends at checkpoints.
CHUNK_TOKENS = 512


@dataclass(slots=True, eq=False)
class PrefillJob:
    """A prompt on its way. `checksums`: [blocks + 1] of blocks, then state, once it is done.

    `cancelled` is a wish that the next step obeys: the job comes back with no first token, unless it is done by then.
    It may be set at any time, by any thread, even before `submit`.
    """

    seq: Sequence
    num_known_blocks: int  # leading blocks whose checksum the pool knows already
    computed_to: int = 0
    first_token: int = -1
    cancelled: bool = False
    checksums: list[bytes] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int]:
        """Request id and attempt."""
        return self.seq.rid, self.seq.attempt


class PrefillEngine:
    """Runs prefill jobs. Another thread than `step`'s may `submit` and call `fail_all`.

    Every job that was submitted comes back exactly once: from `step`, or from `fail_all`.
    """

    def __init__(
        self,
        runner: Runner,
        memory: KVMemory,
        *,
        inline: bool,
        tokens_per_s: float = 0.0,
        chaos: Callable[[Sequence], None] | None = None,
    ) -> None:
        """tokens_per_s: pretended rate, 0 = none. chaos: may spoil bytes of a finished prompt after its checksums."""
        self.inline = inline
        self.pace_s = 0.0
        self._runner = runner
        self._memory = memory
        self._tokens_per_s = tokens_per_s
        self._chaos = chaos
        self._inbox: deque[PrefillJob] = deque()  # from the other thread; the queue belongs to step's
        self._queue: deque[PrefillJob] = deque()
        self._failed: deque[PrefillJob] = deque()  # to the other thread

    def submit(self, job: PrefillJob) -> None:
        """Queue a job."""
        job.computed_to = job.seq.plan.replay_from
        self._inbox.append(job)

    def step(self) -> list[PrefillJob] | None:
        """One chunk of the head; returns finished or else cancelled jobs, None when idle."""
        while self._inbox:
            self._queue.append(self._inbox.popleft())
        if not self._queue:
            return None
        if cancelled := self._take_cancelled():
            self.pace_s = 0.0
            return cancelled
        job = self._queue[0]
        try:
            done = self._chunk(job)
        except BaseException:
            # here and not in fail_all: by then another step may have begun
            self._failed.extend(self._queue)
            self._queue.clear()
            raise
        if not done:
            return []
        self._queue.popleft()
        return [job]

    def _take_cancelled(self) -> list[PrefillJob]:
        """Jobs to drop, wherever they wait: what they hold is needed by others."""
        cancelled: list[PrefillJob] = []
        queue: deque[PrefillJob] = deque()
        for job in self._queue:
            (cancelled if job.cancelled else queue).append(job)
        if cancelled:
            self._queue = queue
        return cancelled

    def _chunk(self, job: PrefillJob) -> bool:
        """Compute up to the next checkpoint; True at the prompt's end."""
        start = job.computed_to
        end = min(start - start % BLOCK_TOKENS + CHUNK_TOKENS, job.seq.prefill_end)
        self.pace_s = (end - start) / self._tokens_per_s if self._tokens_per_s else 0.0
        token = self._runner.prefill(job.seq, start, end)
        job.computed_to = end
        if token is None:
            return False
        job.first_token = token
        job.checksums = self._checksums(job)
        if self._chaos is not None:
            self._chaos(job.seq)
        return True

    def fail_all(self) -> list[PrefillJob]:
        """The jobs in hand when a step raised (the first is what raised); they have left the engine."""
        return [self._failed.popleft() for _ in range(len(self._failed))]

    def _checksums(self, job: PrefillJob) -> list[bytes]:
        blocks: list[Bytes] = [self._memory.blocks[block] for block in job.seq.block_table[job.num_known_blocks :]]
        return [checksum(view) for view in (*blocks, self._memory.states[job.seq.state_slot])]
