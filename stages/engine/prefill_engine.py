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


@dataclass(slots=True)
class PrefillJob:
    """A prompt on its way. `checksums`: [blocks + 1] of blocks, then state, once it is done."""

    seq: Sequence
    num_known_blocks: int  # leading blocks whose checksum the pool knows already
    computed_to: int = 0
    first_token: int = -1
    checksums: list[bytes] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int]:
        """Request id and attempt."""
        return self.seq.rid, self.seq.attempt


class PrefillEngine:
    """Runs prefill jobs. `submit` and `cancel` may be called from another thread than `step`."""

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
        self._queue: deque[PrefillJob] = deque()
        self._cancelled: set[tuple[str, int]] = set()

    def submit(self, job: PrefillJob) -> None:
        """Queue a job."""
        job.computed_to = job.seq.plan.replay_from
        self._queue.append(job)

    def cancel(self, key: tuple[str, int]) -> None:
        """The job is dropped before its next chunk and comes back from `step` with no first token."""
        self._cancelled.add(key)

    def step(self) -> list[PrefillJob] | None:
        """One chunk of the head; returns finished (or cancelled) jobs, None when idle."""
        if not self._queue:
            self._cancelled.clear()
            return None
        job = self._queue[0]
        if job.key in self._cancelled:
            self._queue.popleft()
            return [job]
        start = job.computed_to
        end = min(start - start % BLOCK_TOKENS + CHUNK_TOKENS, job.seq.num_prompt_tokens)
        self.pace_s = (end - start) / self._tokens_per_s if self._tokens_per_s else 0.0
        token = self._runner.prefill(job.seq, start, end)
        job.computed_to = end
        if token is None:
            return []
        job.first_token = token
        job.checksums = self._checksums(job)
        if self._chaos is not None:
            self._chaos(job.seq)
        self._queue.popleft()
        return [job]

    def fail_all(self) -> list[PrefillJob]:
        """A step raised: give up everything that is queued, the head is what raised."""
        jobs = list(self._queue)
        self._queue.clear()
        return jobs

    def _checksums(self, job: PrefillJob) -> list[bytes]:
        blocks: list[Bytes] = [self._memory.blocks[block] for block in job.seq.block_table[job.num_known_blocks :]]
        return [checksum(view) for view in (*blocks, self._memory.states[job.seq.state_slot])]
