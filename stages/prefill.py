"""prefill: takes matched prompts, computes their KV, sends position 0 to the owner and the KV on its way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np
import structlog

import kv.plan
from kv.block import Lease, split_keys
from kv.links import RegionServer
from pipeline import blob
from pipeline.engine_host import EngineHost
from pipeline.errors import RequestError, TransientError
from pipeline.events import (
    FINISH_CODES,
    Envelope,
    HandoffEnded,
    IndexChanged,
    Outcome,
    Plan,
    PrefillNoted,
    PrefixMatched,
    PromptEncoded,
    RegionTicket,
    Sampling,
    Span,
    StageFailed,
)
from pipeline.metrics import count
from pipeline.outbox import Entry, TokenRow
from pipeline.stage import Answer, EngineLoad, Held
from pipeline.stepper import Stepper
from pipeline.wire import encode
from stages.constraints import ConstraintError, Constraints
from stages.engine.decode_engine import finish_of
from stages.engine.interface import BLOCK_TOKENS, ModelCard, SamplingParams, Sequence
from stages.engine.memory import EngineMemory
from stages.engine.prefill_engine import PrefillEngine, PrefillJob
from stages.handover import Handover, Sender

log = structlog.get_logger()

MAX_QUEUED_S = 2.0  # of work: more waits with its owner, who may find another engine. Source: design 2.9
UNMEASURED_TOKENS = 1 << 20  # that may be queued until the first prompt has told how fast this engine is
PARTIAL_KEY = bytes(16)  # of a last block that is not full: never stored, never hit


@dataclass(slots=True)
class _Prompt:
    """A prompt in hand."""

    event: PrefixMatched
    job: PrefillJob
    plan: Plan
    leases: list[Lease]
    taken_ns: int
    started_ns: int = 0
    handover: Handover | None = None
    entries: list[Entry] = field(default_factory=list)  # of its choices


@dataclass(slots=True)
class Prefill:
    """Engine stage of a prefill worker."""

    host: EngineHost
    card: ModelCard
    memory: EngineMemory
    engine: PrefillEngine
    constraints: Constraints | None = None  # None: this engine cannot constrain
    name: str = "prefill"
    _prompts: dict[tuple[str, int], _Prompt] = field(default_factory=dict)
    _fetches: set[asyncio.Task[None]] = field(default_factory=set)
    _index_seq: int = 0
    _most_queued_tokens: int = UNMEASURED_TOKENS
    _engine_free_ns: int = 0
    _server: RegionServer = field(init=False)
    _ticket: RegionTicket = field(init=False)
    _sender: Sender = field(init=False)
    _stepper: Stepper = field(init=False)
    _index_subject: str = field(init=False)

    def start(self) -> None:
        """Open the region to readers and begin to step; call on the running loop."""
        region = self.memory.region
        self._server = RegionServer(region)
        address = self._server.address
        self._ticket = RegionTicket(self.host.worker, region.region_id, 0, region.num_bytes, "shm", address)
        self._sender = Sender(self.host, self.card, self.memory, self.ticket, self._handed_over)
        self._stepper = Stepper(self.engine, self._stepped, self._step_failed)
        topology, worker = self.host.bus.topology, self.host.worker
        self._index_subject = topology.subject("index", worker=worker)
        self.host.bus.subscribe(topology.subject("index_sync", worker=worker), self._index_wanted, control=True)

    def close(self) -> None:
        """Stop stepping and close the region."""
        self._stepper.close()
        self._server.close()
        self.memory.close()

    def ticket(self, epoch: int = 0) -> RegionTicket:
        """How to reach this engine's region, under a lease."""
        return msgspec.structs.replace(self._ticket, epoch=epoch)

    # --- what the host asks (pipeline.stage.EngineStage)

    def envelope(self, event: PrefixMatched) -> Envelope:
        """See EngineStage."""
        return event.prompt.env

    def submit(self, event: PrefixMatched) -> Answer:
        """Pin what is hit, reserve the rest, queue the prompt."""
        prompt = event.prompt
        if prompt.fingerprint != self.card.fingerprint:
            return Answer(Outcome.BUSY, f"serves {self.card.fingerprint}, not {prompt.fingerprint}")
        if never := self._never_served(prompt):
            return Answer(Outcome.REFUSED, never)
        if self._queued_tokens() > self._most_queued_tokens:
            return Answer(Outcome.BUSY, "the prefill queue is full", retry_after_s=0.1)
        taken = self._reserve(event)
        if taken is None:
            count("prefill_no_room")
            return Answer(Outcome.BUSY, "no free KV blocks or state slots", retry_after_s=0.05)
        self._prompts[taken.job.key] = taken
        if prompt.ids_ref or prompt.sampling.grammar:
            self._spawn(self._prepare(taken))
        else:
            self._begin(taken, prompt.ids)
        # an engine that was idle may be done already, and its note or its failure has told the owner more
        told = bool(taken.entries) or taken.job.key not in self._prompts
        return Answer(Outcome.ACCEPTED, plan=taken.plan, owner_knows=told)

    def _never_served(self, prompt: PromptEncoded) -> str:
        """Why this engine could not serve a prompt even when idle; '' if it could."""
        num_handles, sampling = len(prompt.env.handles), prompt.sampling
        if sampling.grammar and self.constraints is None:
            return f"the engine {self.card.name} cannot constrain its output"
        if num_handles != sampling.num_choices:
            return f"{num_handles} handles for {sampling.num_choices} choices"
        if prompt.num_prompt_tokens > self.max_prompt_tokens:
            return f"a prompt of {prompt.num_prompt_tokens} tokens never fits"
        return ""

    def repeat(self, event: PrefixMatched) -> Answer:
        """See EngineStage."""
        env = event.prompt.env
        known = self._prompts.get((env.rid, env.attempt))
        return Answer(Outcome.DUPLICATE, plan=known.plan if known else None)

    def cancel(self, rid: str, attempt: int) -> None:
        """See EngineStage."""
        for key in [key for key in self._prompts if key[0] == rid and (attempt < 0 or key[1] <= attempt)]:
            taken = self._prompts.get(key)
            if taken is None:
                continue  # it left with a step that the one before it caused
            if taken.handover is not None:
                self._sender.cancel(taken.handover)
            else:
                taken.job.cancelled = True
                self._stepper.wake()
            for entry in taken.entries:
                self.host.outbox.forget(entry)

    def stop_choice(self, rid: str, attempt: int, choice: int, position: int) -> None:
        """A stop string within the first token: nothing is left to do here."""

    def unknown_entry(self, entry: Entry) -> None:
        """The outbox has forgotten it already; a prompt whose owner is gone is cancelled by its new owner."""

    def handoff_ended(self, message: HandoffEnded) -> None:
        """See EngineStage."""
        self._sender.ended(message)

    def holds(self) -> list[Held]:
        """See EngineStage."""
        return [
            Held(taken.job.seq.rid, taken.job.seq.attempt, self.name, taken.event.prompt.env.owner)
            for taken in self._prompts.values()
        ]

    def tick(self) -> None:
        """See EngineStage."""
        self._sender.tick()

    def load(self) -> EngineLoad:
        """See EngineStage."""
        return EngineLoad(
            free_slots=0 if self._queued_tokens() > self._most_queued_tokens else self.memory.free_states,
            running=min(len(self._prompts), 1),
            queued=max(len(self._prompts) - 1, 0),
            queued_tokens=self._queued_tokens(),
            kv_used=self.memory.used_share,
            model=self.card.name,
            fingerprint=self.card.fingerprint,
            layout=self.card.layout.digest().hex(),
            max_prompt_tokens=self.max_prompt_tokens,
            ticket=self.ticket(),
            index_seq=self._index_seq,
        )

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that fits the model and this pool; one token is left for the answer."""
        return min(self.card.max_context_tokens - 1, self.memory.num_blocks * BLOCK_TOKENS)

    # --- from acceptance to the end

    def _queued_tokens(self) -> int:
        return sum(
            taken.job.seq.num_prompt_tokens - taken.job.computed_to
            for taken in self._prompts.values()
            if taken.handover is None
        )

    def _reserve(self, event: PrefixMatched) -> _Prompt | None:
        prompt, env = event.prompt, event.prompt.env
        n = prompt.num_prompt_tokens
        hit = self.memory.match(prompt.block_keys, (n - 1) // BLOCK_TOKENS)
        plan = kv.plan.plan(
            n,
            len(hit.blocks) * BLOCK_TOKENS,
            keep=self.card.keep_tokens,
            window=self.card.window_tokens,
            windows=self.card.replay_windows,
        )
        fresh = self.memory.allocate(-(-n // BLOCK_TOKENS) - len(hit.blocks))
        slot = self.memory.take_state() if fresh is not None else None
        if fresh is None or slot is None:
            self.memory.release([hit] if fresh is None else [hit, fresh])
            return None
        seq = Sequence(
            rid=env.rid,
            attempt=env.attempt,
            choice=0,
            ids=np.empty(0, np.uint32),
            tail_ids=np.empty(0, np.uint32),
            num_prompt_tokens=n,
            plan=plan,
            block_table=[*hit.blocks, *fresh.blocks],
            state_slot=slot,
            seed=env.seed,
            sampling=sampling_params(prompt.sampling),
        )
        told = Plan(n, plan.hit_tokens, plan.compute_from, plan.replay_from, env.seed)
        job = PrefillJob(seq, num_known_blocks=len(hit.blocks))
        return _Prompt(event, job, told, [hit, fresh], time.time_ns())

    async def _prepare(self, taken: _Prompt) -> None:
        """Fetch the ids of a long prompt and compile a constraint, then begin."""
        prompt = taken.event.prompt
        try:
            ids = await self._fetched_ids(prompt) if prompt.ids_ref else prompt.ids
            if prompt.sampling.grammar and self.constraints is not None:
                taken.job.seq.constraint = await self.constraints.begin(prompt.sampling.grammar)
        except ConstraintError as error:
            self._end_unprocessed(taken, error)
            return
        except (RequestError, TransientError) as error:
            self._fail(taken, f"token ids not read: {error}", transient=True)
            return
        except Exception as error:
            # a bug fails this prompt and gives its blocks back; the worker lives
            log.exception("preparing a prompt failed", rid=prompt.env.rid)
            self._fail(taken, f"not prepared: {type(error).__name__}", transient=True)
            return
        if taken.job.cancelled:
            count("prefills_cancelled")
            self._release(taken)
        else:
            self._begin(taken, ids)

    async def _fetched_ids(self, prompt: PromptEncoded) -> bytes:
        ref = blob.BlobRef.parse(prompt.ids_ref)
        return await blob.get(self.host.bus, prompt.env.tenant, prompt.env.rid, ref, 4 * self.max_prompt_tokens)

    def _end_unprocessed(self, taken: _Prompt, error: ConstraintError) -> None:
        """A finish reason without a token: the request's own grammar cannot be served."""
        log.info("constraint refused", rid=taken.event.prompt.env.rid, finish=str(error.finish), reason=str(error))
        finish = FINISH_CODES.index(error.finish) + 1
        self._tell_first(taken, [((), finish)] * taken.job.seq.sampling.num_choices, taken.event.spans, decode="")
        self._release(taken)

    def _begin(self, taken: _Prompt, ids: bytes) -> None:
        if len(ids) != 4 * taken.job.seq.num_prompt_tokens:
            self._fail(taken, f"{len(ids)} bytes of ids for {taken.job.seq.num_prompt_tokens} tokens", transient=False)
            return
        taken.job.seq.ids = np.frombuffer(ids, "<u4")
        taken.started_ns = time.time_ns()
        self.engine.submit(taken.job)
        self._stepper.wake()

    def _stepped(self, jobs: list[PrefillJob]) -> None:
        for job in jobs:
            taken = self._prompts.get(job.key)
            if taken is None:
                continue
            if job.first_token < 0:
                count("prefills_cancelled")
                self._release(taken)
            elif self.host.is_dead(*job.key):
                count("prefills_finished_for_nobody")
                self._release(taken)
            else:
                self._finished(taken)

    def _step_failed(self, error: BaseException) -> None:
        for job in self.engine.fail_all():
            taken = self._prompts.get(job.key)
            if taken is not None:
                self._fail(taken, f"prefill failed: {type(error).__name__}", transient=True)

    def _measure(self, taken: _Prompt, ended_ns: int) -> None:
        """How many tokens two seconds of work are, by the prompt that was just finished (it had the engine alone)."""
        begun_ns = max(taken.started_ns, self._engine_free_ns)
        self._engine_free_ns = ended_ns
        seconds = max(self._engine_free_ns - begun_ns, 1_000) / 1e9
        self._most_queued_tokens = max(int(MAX_QUEUED_S * taken.job.seq.plan.computed_tokens / seconds), BLOCK_TOKENS)

    def _finished(self, taken: _Prompt) -> None:
        job = taken.job
        seq = job.seq
        ended_ns = time.time_ns()
        seq.output.append(job.first_token)
        ends = [finish_of(seq, token, self.card.max_context_tokens) for token in seq.first_tokens]
        over = all(ends)
        span = Span(self.name, self.host.worker, taken.taken_ns, ended_ns, str(seq.plan.kind))
        spans = (*taken.event.spans, span)
        decode = "" if over else self._sender.choose()
        # first what decode waits for; its leases hold the blocks, sealed or not
        taken.handover = None if over else self._sender.hand_over(self._offer(taken, spans), decode)
        if job.key not in self._prompts:
            return  # the offer failed, and with it this attempt
        self._measure(taken, ended_ns)
        self._seal(taken)
        firsts = [((token,), end) for token, end in zip(seq.first_tokens, ends, strict=True)]
        self._tell_first(taken, firsts, spans, decode=decode)
        if over:
            self._release(taken)

    def _tell_first(
        self, taken: _Prompt, firsts: Iterable[tuple[tuple[int, ...], int]], spans: tuple[Span, ...], *, decode: str
    ) -> None:
        """Position 0 of every choice (tokens, finish code), and the note that says where the rest comes from."""
        env = taken.event.prompt.env
        note = PrefillNoted(env.rid, env.attempt, taken.plan, decode, spans, self.host.worker, self.host.epoch)
        repeated = b"" if decode else encode(note)
        rows = []
        for handle, (tokens, finish) in zip(env.handles, firsts, strict=True):
            entry = self.host.outbox.open(handle, env.owner, env.rid, 0, repeated)
            rows.append(TokenRow(entry, 0, tokens, finish))
        taken.entries = [row.entry for row in rows]
        self.host.outbox.push(rows)
        self.host.note(partial(self.host.tell, env.owner, note))

    def _seal(self, taken: _Prompt) -> None:
        seq, known = taken.job.seq, taken.job.num_known_blocks
        keys = split_keys(taken.event.prompt.block_keys)
        for number in range(known, seq.num_prompt_tokens // BLOCK_TOKENS):
            digest = taken.job.checksums[number - known]
            approximate = seq.plan.approximate
            self.memory.seal(seq.block_table[number], keys[number], digest, approximate=approximate)
        self._publish_index()

    def _offer(self, taken: _Prompt, spans: tuple[Span, ...]) -> Handover:
        job, prompt = taken.job, taken.event.prompt
        seq = job.seq
        known = [self.memory.sealed_checksum(block) or bytes(16) for block in seq.block_table[: job.num_known_blocks]]
        full = seq.num_prompt_tokens // BLOCK_TOKENS
        keys = prompt.block_keys[: 16 * full] + PARTIAL_KEY * (len(seq.block_table) - full)
        return Handover(
            env=prompt.env,
            plan=taken.plan,
            sampling=prompt.sampling,
            seq=seq,
            block_keys=keys,
            checksums=b"".join((*known, *job.checksums)),
            tail_ids=seq.ids[-3:].astype("<u4").tobytes(),
            spans=spans,
        )

    def _handed_over(self, handover: Handover) -> None:
        """The handoff has ended, well or not: its blocks are free again."""
        taken = self._prompts.get((handover.env.rid, handover.env.attempt))
        if taken is not None:
            for entry in taken.entries:
                if not entry.finish:  # one that ended here is for us to repeat until it is acknowledged
                    self.host.outbox.forget(entry)
            self._release(taken)

    def _fail(self, taken: _Prompt, message: str, *, transient: bool) -> None:
        env = taken.event.prompt.env
        log.warning("prefill failed", rid=env.rid, reason=message)
        failed = StageFailed(
            env.rid, env.attempt, self.name, self.host.worker, self.host.epoch, "internal", message, transient
        )
        self.host.tell(env.owner, failed)
        self.host.forget(env.rid, env.attempt)
        self._release(taken)

    def _release(self, taken: _Prompt) -> None:
        if self._prompts.pop(taken.job.key, None) is None:
            return
        self.memory.release(taken.leases)
        self.memory.give_state(taken.job.seq.state_slot)
        self._publish_index()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._fetches.add(task)
        task.add_done_callback(self._fetches.discard)

    # --- what lookup should know

    def _publish_index(self) -> None:
        for event in self.memory.drain_events():
            self._index_seq += 1
            stored, removed = (event.keys, b"") if event.stored else (b"", event.keys)
            change = IndexChanged(self.host.worker, self.host.epoch, self._index_seq, stored, removed)
            self.host.bus.tell(self._index_subject, encode(change))

    def _index_wanted(self, _subject: str, reply: str, _payload: bytes, _headers: bytes | None) -> None:
        keys = self.memory.stored_keys()
        snapshot = IndexChanged(self.host.worker, self.host.epoch, self._index_seq, keys, b"", snapshot=True)
        self.host.bus.tell(reply, encode(snapshot))


def sampling_params(sampling: Sampling) -> SamplingParams:
    """An event's sampling as the engines want it."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        eos_ids=sampling.eos_ids,
        ignore_eos=sampling.ignore_eos and not sampling.grammar,  # where a constrained text ends, nothing can follow
        num_choices=sampling.num_choices,
    )
