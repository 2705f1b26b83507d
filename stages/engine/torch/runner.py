"""The torch runner: prefill in chunks and decode in batches, KV bytes in the engine's memory.

Bit-equal for any batch, chunking and handoff on one build and machine, as long as the process has called
`torch.set_num_threads(1)` (see the package docstring).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.sample import sample, uniform
from stages.engine.choices import choice_seed
from stages.engine.constraint import mask_logits
from stages.engine.interface import KVMemory, ModelCard, Sequence
from stages.engine.torch.checkpoint import Checkpoint
from stages.engine.torch.decode_rows import DecodeRows
from stages.engine.torch.engram import Engram, Ids
from stages.engine.torch.kv_bytes import KVBytes
from stages.engine.torch.kv_layout import layout_of
from stages.engine.torch.model import Model
from stages.engine.torch.prefill_rows import PrefillRows
from stages.engine.torch.weights import load_weights


class SequenceError(ValueError):
    """A sequence that this runner cannot compute: a caller's fault."""


def model_card(checkpoint: Checkpoint) -> ModelCard:
    """What the system must know of a checkpoint; needed before there is memory to run in."""
    c = checkpoint.config
    return ModelCard(
        name=checkpoint.name,
        fingerprint=checkpoint.fingerprint,
        layout=layout_of(c),
        max_context_tokens=c.max_positions,
        window_tokens=c.window,
        keep_tokens=c.keep,
        replay_windows=c.first_decoder,
        vocab_size=c.vocab_size,
        engine="torch",
    )


class TorchRunner:
    """Computes sequences of one checkpoint in one memory. Not thread-safe: one call at a time."""

    def __init__(self, checkpoint: Checkpoint, memory: KVMemory) -> None:
        """Raises: MemoryShapeError when the memory does not fit `model_card(checkpoint).layout`."""
        self.card = model_card(checkpoint)
        config = checkpoint.config
        self._kv = KVBytes(config, self.card.layout, memory)
        self._engram = None
        if config.engram is not None and checkpoint.token_map is not None:
            self._engram = Engram(config.engram, checkpoint.token_map)
        self._model = Model(config, load_weights(checkpoint), self._engram, self._kv)

    def prefill(self, seq: Sequence, start: int, end: int) -> int | None:
        """See `Runner.prefill`. Where the plan starts at a snapshot, the caller has put it into the state slot.

        Raises:
            SequenceError: positions, context, blocks or token ids out of range.
        """
        hidden = self.prefill_hidden(seq, start, end)
        if end < seq.prefill_end or hidden is None:
            return None
        logits = self._allowed_logits(hidden[-1:], [seq])[0]
        seq.first_tokens = [_choose(seq, logits, choice) for choice in range(seq.sampling.num_choices)]
        return seq.first_tokens[0]

    def decode(self, seqs: list[Sequence]) -> list[int]:
        """See `Runner.decode`."""
        if not seqs:
            return []
        logits = self._allowed_logits(self.decode_hidden(seqs), seqs)
        tokens = [_choose(seq, row) for seq, row in zip(seqs, logits, strict=True)]
        for seq, token in zip(seqs, tokens, strict=True):
            if seq.constraint is not None and not seq.constraint.fault:
                seq.constraint.advance(token)
        return tokens

    @torch.inference_mode()
    def prefill_hidden(self, seq: Sequence, start: int, end: int) -> Tensor | None:
        """The final hidden rows [kept rows of the chunk, D] of a prefill chunk; None when none is kept.

        Raises:
            SequenceError: positions, context, blocks or token ids out of range.
        """
        self._check(seq, start, end)
        plan = seq.plan
        restored = 0 < plan.compute_from == plan.replay_from  # no replay: window state came from a snapshot
        if start == plan.replay_from:
            self._kv.reset_state(seq.state_slot, keep_stored=restored)
        seen_from = plan.replay_from - (self.card.window_tokens - 1 if restored else 0)
        ids = seq.ids.astype(np.int64)
        rows = PrefillRows(self._kv, seq, start, end, seen_from)
        return self._model.forward(rows, ids[start:end], self._grams(ids[:end], end - start))

    @torch.inference_mode()
    def decode_hidden(self, seqs: list[Sequence]) -> Tensor:
        """The final hidden row of each sequence, [B, D].

        Raises:
            SequenceError: nothing to decode from, or no room for the position in the context or the blocks.
        """
        for seq in seqs:
            self._check_room(seq)
        tails = [_tail(seq) for seq in seqs]
        grams = [self._grams(tail, 1) for tail in tails]
        together = None if self._engram is None else np.concatenate([g for g in grams if g is not None])
        ids = np.array([tail[-1] for tail in tails])
        hidden = self._model.forward(DecodeRows(self._kv, seqs), ids, together)
        assert hidden is not None  # noqa: S101  every decode row is kept
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[T, D] -> [T, vocab_size] fp32."""
        return self._model.logits(hidden)

    def _allowed_logits(self, hidden: Tensor, seqs: list[Sequence]) -> Tensor:
        """[B, V]; what a constraint forbids is -inf."""
        logits = self.logits(hidden)
        if any(seq.constraint is not None and seq.constraint.is_active for seq in seqs):
            mask_logits(logits, [seq.constraint for seq in seqs])
        return logits

    def _check(self, seq: Sequence, start: int, end: int) -> None:
        limits = self.card.max_context_tokens, len(seq.ids), len(seq.block_table) * self.card.layout.block_tokens
        if not seq.plan.replay_from <= start < end <= seq.prefill_end or end > min(limits):
            raise SequenceError(f"cannot prefill [{start}, {end}) of {seq.prefill_end} tokens; limits {limits}")
        if (top := int(seq.ids[start:end].max())) >= self.card.vocab_size:
            raise SequenceError(f"token {top} is outside the vocabulary of {self.card.vocab_size}")

    def _check_room(self, seq: Sequence) -> None:
        room = min(self.card.max_context_tokens, len(seq.block_table) * self.card.layout.block_tokens)
        if not seq.output or seq.num_tokens > room:
            raise SequenceError(f"cannot decode {seq.rid}: {len(seq.output)} of {seq.num_tokens} tokens, room {room}")

    def _grams(self, ids: Ids, rows: int) -> Ids | None:
        if self._engram is None:
            return None
        return self._engram.grams(ids[-(rows + self._engram.config.max_ngram - 1) :], rows)


def _tail(seq: Sequence) -> Ids:
    """The last tokens of prompt and output, as many as an n-gram needs where there are so many."""
    prompt = seq.tail_ids if len(seq.tail_ids) else seq.ids[: seq.num_prompt_tokens][-3:]
    return np.concatenate([prompt.astype(np.int64), np.array(seq.output, dtype=np.int64)])


def _choose(seq: Sequence, logits: Tensor, choice: int = 0) -> int:
    """The next token; choice: of a sequence that has not been forked yet."""
    p = seq.sampling
    u = uniform(choice_seed(seq.seed, choice), len(seq.output))
    return sample(logits, temperature=p.temperature, top_p=p.top_p, top_k=p.top_k, u=u)
