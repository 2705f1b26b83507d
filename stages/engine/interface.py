"""What an engine is made of: the memory it computes in, the sequences it works on, and the runner that computes.

The schedulers (prefill_engine.py, decode_engine.py) decide what runs in a step; a `Runner` only computes. Two runners
exist: the stub (stages/engine/stub.py) and the torch one (stages/engine/torch/).

Letters used in shapes: n = tokens of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kv.layout import Layout
from kv.plan import KVPlan

BLOCK_TOKENS = 128  # Source: facts-system 3.3 (KVSTORE_GRAIN)

Bytes = npt.NDArray[np.uint8]
Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What the rest of the system must know of a model. `fingerprint` (hex) covers config and weights.

    `keep_tokens`: rows the decoder half runs on at a prompt's end. `replay_windows`: how many SWA windows a
    replay needs to be exact (the number of encoder layers; 0 when the model has no window at all).
    """

    name: str
    fingerprint: str
    layout: Layout
    max_context_tokens: int
    window_tokens: int
    keep_tokens: int
    replay_windows: int
    vocab_size: int
    engine: str  # torch | stub


@dataclass(frozen=True, slots=True, kw_only=True)
class KVMemory:
    """The bytes an engine computes in; both arrays are views of one region that a peer may read.

    blocks: [num_blocks, layout.block_bytes]; states: [num_slots, layout.state_bytes].
    """

    blocks: Bytes
    states: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose a token; already resolved. `temperature` < 1e-5 is greedy. Source: facts-model 9."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    eos_ids: tuple[int, ...]
    ignore_eos: bool
    num_choices: int = 1


class OutputConstraint(Protocol):
    """What the next token must fit: `stages.engine.constraint.ConstraintState`, which a stub engine never loads."""

    fault: str  # why the sequence must end, '' while it need not

    @property
    def is_active(self) -> bool:
        """Whether the next token is constrained."""
        ...

    def allowed_mask(self, row: npt.NDArray[np.int32]) -> str:
        """Fill a bit mask of the tokens that may be next; says what kind of mask it is."""
        ...

    def advance(self, token: int) -> None:
        """The token was taken."""
        ...


@dataclass(slots=True, kw_only=True)
class Sequence:
    """One choice of one request inside an engine.

    ids: [n + forced] u32 on the prefill side, empty on the decode side, where `tail_ids` holds the prompt's last <= 3.
    Position p lives in pool block `block_table[p // 128]`; SWA rings and open groups in `state_slot`.
    num_forced_tokens: tokens of the answer that prefill computes along with the prompt, because they were delivered
    before: they stand behind the prompt in `ids`, and in `output`. first_tokens: of each choice, once prefill is over.
    constraint: has taken all of `output`; the runner lets it take what it samples.
    """

    rid: str
    attempt: int
    choice: int
    ids: Tokens
    tail_ids: Tokens
    num_prompt_tokens: int
    plan: KVPlan
    block_table: list[int]
    state_slot: int
    seed: int
    sampling: SamplingParams
    output: list[int] = field(default_factory=list)
    num_forced_tokens: int = 0
    first_tokens: list[int] = field(default_factory=list)
    constraint: OutputConstraint | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output so far."""
        return self.num_prompt_tokens + len(self.output)

    @property
    def prefill_end(self) -> int:
        """Positions that prefill computes. The decoder half's cut stays at the prompt's own end (design 2.7)."""
        return self.num_prompt_tokens + self.num_forced_tokens


@runtime_checkable
class Runner(Protocol):
    """Computes. Holds no scheduling state; everything a sequence needs is in its blocks and its state slot."""

    card: ModelCard

    def prefill(self, seq: Sequence, start: int, end: int) -> int | None:
        """Compute positions [start, end) of the prompt; the first call starts at `seq.plan.replay_from`.

        Global KV rows are written only from `plan.hit_tokens` on. Returns the first token that is not forced when
        `end` is `seq.prefill_end`, else None; `seq.first_tokens` then has it for every choice.
        """
        ...

    def decode(self, seqs: list[Sequence]) -> list[int]:
        """One step: write KV for each sequence's last output token, return the next token of each.

        Where a sequence's constraint has a fault afterwards, its token is none.
        """
        ...
