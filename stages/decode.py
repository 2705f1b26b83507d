"""decode: continuous batching of what transfer has read; a row of tokens a step to every owner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kv.block import Lease
from pipeline.engine_host import EngineHost
from pipeline.events import StageFailed
from pipeline.metrics import count
from pipeline.outbox import Entry
from pipeline.stage import EngineLoad, Held
from pipeline.stepper import Stepper
from stages.engine.decode_engine import DecodeEngine, DecodeJob, DecodeResult
from stages.engine.interface import BLOCK_TOKENS, ModelCard, Sequence
from stages.engine.memory import EngineMemory


@dataclass(slots=True)
class Decode:
    """The decode half of a decode worker. `begin` takes a verified sequence; tokens leave through the outbox."""

    host: EngineHost
    card: ModelCard
    memory: EngineMemory
    engine: DecodeEngine
    max_running: int
    name: str = "decode"
    _stepper: Stepper = field(init=False)
    on_freed: Callable[[], None] = lambda: None
    _jobs: dict[int, DecodeJob] = field(default_factory=dict)  # by identity of the outbox entry

    def start(self) -> None:
        """Begin to step; call on the running loop."""
        self._stepper = Stepper(self.engine, self._stepped, self._step_failed)

    def close(self) -> None:
        """Stop stepping."""
        self._stepper.close()

    def begin(self, seq: Sequence, leases: list[Lease], handle: int, owner: str) -> Entry:
        """Decode a sequence, the first step perhaps at once. The caller gives the entry its note."""
        entry = self.host.outbox.open(handle, owner, seq.rid, 0)
        entry.tokens.extend(seq.output)  # position 0: prefill has sent it, but only we can repeat it later
        job = DecodeJob(seq, entry, leases)
        self._jobs[id(entry)] = job
        self.engine.submit(job)
        self._stepper.wake()
        return entry

    def cancel(self, rid: str, attempt: int) -> None:
        """Attempts up to this one (-1 = all) leave the batch before the next step."""
        for job in [job for job in self._jobs.values() if job.seq.rid == rid]:
            if attempt < 0 or job.seq.attempt <= attempt:
                self._stop(job)

    def stop_choice(self, rid: str, attempt: int, choice: int, position: int) -> None:
        """Parse ended a choice at `position`; later tokens are waste and counted."""
        for job in self._jobs.values():
            seq = job.seq
            if (seq.rid, seq.attempt, seq.choice) == (rid, attempt, choice):
                count("tokens_after_stop", max(len(seq.output) - position, 0))
                self._stop(job)
                return

    def unknown_entry(self, entry: Entry) -> None:
        """Its owner forgot it: the sequence is for nobody."""
        job = self._jobs.get(id(entry))
        if job is not None:
            count("decodes_for_nobody")
            self._stop(job)

    def holds(self) -> list[Held]:
        """Sequences in hand."""
        return [Held(job.seq.rid, job.seq.attempt, self.name, job.entry.owner) for job in self._jobs.values()]

    def load(self, num_reading: int) -> EngineLoad:
        """What the beacon says; `num_reading`: offers in hand that are not decoding yet."""
        running = len(self._jobs)
        return EngineLoad(
            free_slots=max(min(self.memory.free_states, self.max_running - running - num_reading), 0),
            running=running,
            queued=num_reading,
            queued_tokens=0,
            kv_used=self.memory.used_share,
            model=self.card.name,
            fingerprint=self.card.fingerprint,
            layout=self.card.layout.digest().hex(),
            max_prompt_tokens=self.memory.num_blocks * BLOCK_TOKENS,
        )

    def _stop(self, job: DecodeJob) -> None:
        job.stopped = True
        self.host.outbox.forget(job.entry)
        self._stepper.wake()

    def _stepped(self, result: DecodeResult) -> None:
        self.host.outbox.push(result.rows)
        self.host.bus.push()
        for job in result.over:
            self._release(job)
        if result.over:
            self.on_freed()

    def _step_failed(self, error: BaseException) -> None:
        for job in self.engine.fail_all():
            message = f"decode failed: {type(error).__name__}"
            seq, host = job.seq, self.host
            failed = StageFailed(
                seq.rid, seq.attempt, self.name, host.worker, host.epoch, "internal", message, transient=True
            )
            host.tell(job.entry.owner, failed)
            host.outbox.forget(job.entry)
            self._release(job)

    def _release(self, job: DecodeJob) -> None:
        if self._jobs.pop(id(job.entry), None) is not None:
            self.memory.release(job.leases)
            self.memory.give_state(job.seq.state_slot)
