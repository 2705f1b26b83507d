"""The events of the middle: what travels between stages on core NATS.

Every event is a frozen msgpack array: a decoder ignores fields that a newer sender appended and fills the
ones an older sender lacks, so stages of two neighbouring versions can run side by side. Token ids are
little-endian u32 bytes, never lists (a list of 100 k ids costs 3 ms to decode, bytes 1 us).

Source: facts-bus (serialisation table); design: ours.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

ENVELOPE_VERSION = 1


class Outcome(StrEnum):
    """A receiver's immediate answer to work that was offered to it."""

    ACCEPTED = "accepted"  # in hand and running or about to
    QUEUED = "queued"  # in hand, waiting for room (a decode engine's LATER)
    BUSY = "busy"  # not taken: try elsewhere or later
    DUPLICATE = "duplicate"  # already in hand here, same attempt
    DEAD = "dead"  # cancelled, late, or of a lower attempt: nobody needs it
    REFUSED = "refused"  # can never be taken here (a decode engine's NEVER)


class FinishReason(StrEnum):
    """How an accepted request may end well. Source: facts-system R8 (closed list)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    PROMPT_LENGTH_EXCEEDED = "prompt_length_exceeded"
    INSUFFICIENT_SYSTEM_RESOURCE = "insufficient_system_resource"
    GRAMMAR_ERROR = "grammar_error"
    GRAMMAR_TIMEOUT = "grammar_timeout"
    VE_ERROR = "ve_error"


FINISH_CODES: tuple[FinishReason, ...] = tuple(FinishReason)  # code in a frame = index + 1; 0 = not finished


class Struct(msgspec.Struct, array_like=True, frozen=True, gc=False, omit_defaults=False):
    """Base of everything on the wire: immutable, array-like."""


class Plan(Struct, frozen=True):
    """What the first attempt did and what binds every later one: `kv.plan`'s result, seed and prompt length.

    All in tokens. `hit_tokens` is what usage reports as the cache hit; computing starts at `replay_from`,
    global KV is written from `hit_tokens` on.
    """

    prompt_tokens: int
    hit_tokens: int
    compute_from: int
    replay_from: int
    seed: int


class Envelope(Struct, frozen=True):
    """What every event about a request carries.

    `deadline_ns` is on the broker's clock. `handles` are u64 numbers issued by the owner, one per choice of
    this attempt. `intake_ack` is the subject with which a holder may nak the intake message when the owner
    is gone for good.
    """

    version: int
    rid: str  # 32 hex digits
    tenant: str
    request_class: str  # interactive | batch
    attempt: int  # fencing number
    deadline_ns: int
    owner: str  # worker id
    owner_epoch: int
    handles: tuple[int, ...]
    seed: int
    intake_ack: str = ""
    trace: str = ""
    plan: Plan | None = None  # of the first attempt, once known
    forced_tokens: int = 0  # delivered tokens that a later attempt must reproduce


class Sampling(Struct, frozen=True):
    """What an engine needs to sample: already validated and resolved by the codec stage."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int = 0  # 0 = off
    num_choices: int = 1
    eos_ids: tuple[int, ...] = (1,)
    ignore_eos: bool = False
    top_logprobs: int = -1  # -1 = none wanted
    grammar: str = ""  # a constraint, as text; empty = free


class Span(Struct, frozen=True):
    """One stage's part of a request's timeline. Times in nanoseconds of the worker's wall clock."""

    stage: str
    worker: str
    start_ns: int
    end_ns: int
    note: str = ""


class RequestBody(Struct, frozen=True):
    """What the intake message of a request says, checked: the codec stage's input."""

    rid: str
    tenant: str
    protocol: str
    body: bytes


class PromptEncoded(Struct, frozen=True, tag="PromptEncoded"):
    """codec -> lookup: text has become token ids.

    ids: [n] u32le, empty when `ids_ref` names a BLOB (above 128 KiB).
    block_keys: [n // 128] 16-byte chained block keys, the whole prompt's.
    """

    env: Envelope
    model: str
    fingerprint: str
    num_prompt_tokens: int
    ids: bytes
    ids_ref: str
    block_keys: bytes
    sampling: Sampling
    sender: str
    spans: tuple[Span, ...] = ()
    salt: bytes = b""  # keyed salt of tenant and user: the root of the block keys


class PrefixMatched(Struct, frozen=True, tag="PrefixMatched"):
    """lookup -> the prefill engine it chose. `expected_hit_tokens` is a hint: the engine's own figure counts."""

    prompt: PromptEncoded
    expected_hit_tokens: int
    engine: str
    sender: str
    spans: tuple[Span, ...] = ()


class RegionTicket(Struct, frozen=True):
    """How to reach a prefill engine's registered, read-only memory. `epoch` rises when leases are revoked."""

    holder: str
    region: str
    epoch: int
    num_bytes: int
    link: str  # inproc | shm
    address: str  # of the link: for shm an abstract Unix socket name


class KVOffer(Struct, frozen=True):
    """What decode may read, and how it knows that the bytes are right.

    block_keys: [b] 16 B; blocks, state: [b] and [s] pairs (offset, length) as i64le into the region;
    checksums: [b + s] 16-byte xxh3-128, blocks first. The last block may be partial (its key is then a
    one-off). `lease_ns`: wall clock until which the bytes stay pinned.
    """

    ticket: RegionTicket
    block_keys: bytes
    blocks: bytes
    state: bytes
    checksums: bytes
    lease_ns: int


class PrefillFinished(Struct, frozen=True, tag="PrefillFinished"):
    """prefill -> the decode engine it chose: the handoff's offer. Position 0 of each choice is already sampled.

    first_tokens: [choices]; tail_ids: the last <= 3 prompt ids, u32le (n-gram history).
    """

    env: Envelope
    fingerprint: str
    num_prompt_tokens: int
    plan: Plan
    sampling: Sampling
    first_tokens: tuple[int, ...]
    tail_ids: bytes
    offer: KVOffer
    sender: str
    spans: tuple[Span, ...] = ()


class PrefillNoted(Struct, frozen=True, tag="PrefillNoted"):
    """prefill -> owner: prefill is over; the plan that counts, and who was offered the KV ('' = finished here)."""

    rid: str
    attempt: int
    plan: Plan
    decode: str
    spans: tuple[Span, ...]
    worker: str
    epoch: int


class KVTransferred(Struct, frozen=True, tag="KVTransferred"):
    """decode -> owner: the KV was read and verified; decoding runs."""

    rid: str
    attempt: int
    worker: str
    epoch: int
    num_bytes: int
    num_blocks_read: int
    num_blocks_had: int
    spans: tuple[Span, ...]
    plan: Plan | None = None


class HandoffEnded(Struct, frozen=True, tag="HandoffEnded"):
    """decode -> prefill: the one terminal note of a handoff. reason '' = released after a good read.

    lease: epoch of the offer's lease, which tells this offer from an earlier one.
    """

    rid: str
    attempt: int
    worker: str
    lease: int
    reason: str = ""


class Accepted(Struct, frozen=True, tag="Accepted"):
    """receiver -> sender and owner: the answer to offered work. `retry_after_s` and `load` are hints."""

    rid: str
    attempt: int
    stage: str
    worker: str
    epoch: int
    outcome: Outcome
    owner: str = ""
    reason: str = ""
    load: float = 0.0
    retry_after_s: float = 0.0
    plan: Plan | None = None  # prefill's: its figure of the hit is the one that counts


class StageFailed(Struct, frozen=True, tag="StageFailed"):
    """a stage -> owner: work in hand failed. `transient` = another worker or attempt may do it."""

    rid: str
    attempt: int
    stage: str
    worker: str
    epoch: int
    code: str
    message: str
    transient: bool


class Cancelled(Struct, frozen=True, tag="Cancelled"):
    """owner -> holders (or everyone): a tombstone. Obeyed within one step, remembered 60 s.

    attempt: this and lower ones die (-1 = all). choice >= 0 with position >= 0: parse found the end of that
    choice, tokens from `position` on are waste.
    """

    rid: str
    attempt: int
    reason: str
    choice: int = -1
    position: int = -1


class Find(Struct, frozen=True, tag="Find"):
    """owner -> everyone: who has this request in hand? Asked before a repeated delivery is started over."""

    rid: str
    asker: str


class Found(Struct, frozen=True, tag="Found"):
    """owner or holder -> asker: it is here. `num_tokens` = tokens generated so far by a holder."""

    rid: str
    worker: str
    epoch: int
    attempt: int
    stage: str
    num_tokens: int = 0


class Beacon(Struct, frozen=True):
    """Any worker -> everyone, 10 per second: who it is, what it serves and how loaded it is.

    roles: the stages it runs. `free_slots`: requests it would take now. `queued_tokens`: uncached prompt tokens
    waiting or running (prefill). `kv_used`: share 0..1 of its KV blocks. `ticket`: of its readable region.
    `max_prompt_tokens`: longest prompt that fits; `layout`: digest of the KV layout (hex).
    """

    worker: str
    epoch: int
    roles: tuple[str, ...]
    draining: bool = False
    free_slots: int = 0
    running: int = 0
    queued: int = 0
    queued_tokens: int = 0
    kv_used: float = 0.0
    model: str = ""
    fingerprint: str = ""
    layout: str = ""
    max_prompt_tokens: int = 0
    ticket: RegionTicket | None = None
    index_seq: int = 0
    counters: dict[str, int] = {}


class IndexChanged(Struct, frozen=True, tag="IndexChanged"):
    """prefill -> lookup: keys (16 B each) that became or ceased to be hittable at this holder; seq has no gaps."""

    holder: str
    epoch: int
    seq: int
    stored: bytes
    removed: bytes
    snapshot: bool = False  # stored is everything, seq the last number it covers


# Events that are not msgpack structs: what their bytes are. docs/protocol.md describes each.
OTHER_FORMATS: dict[str, str] = {
    "VerifiedSequence": "never leaves its process: what stages/decode.py begins with",
    "TokensDecoded": "a binary frame, see pipeline/wire.py",
    "TokensAcknowledged": "binary columns, see pipeline/wire.py",
    "StreamEvent": "JSON {n, a, c, event} or a msgpack batch of them",
    "Want": "JSON, see pipeline/wants.py",
    "CancelRequested": "JSON {rid}",
    "Ping": "empty; any answer is life",
    "IndexWanted": "empty; answered with an IndexChanged snapshot",
    "BlobPart": "raw bytes of one part",
    "Fence": "empty; its PubAck sequence is the attempt number",
}

Control = Accepted | PrefillNoted | KVTransferred | HandoffEnded | StageFailed | Cancelled | Find | Found
