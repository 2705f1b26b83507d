"""The stub engine: a lasting part of the product for benches, chaos and load generation. No model, real KV bytes.

Every global row depends on all tokens before it, every token on a digest of all block and state bytes in order, so
a lost, stale, swapped or flipped byte changes the text. With mix = a SplitMix64 finaliser, + modulo 2^64 and
positions p = 128·b + j:

    c_p   = sum of mix(token_q + 1 + q-in-block) over the tokens q of block b up to p
    r_p   = mix(d_b xor c_p),   d_0 = root,   d_{b+1} = r of the last row of block b
    row   = (c_p, r_p)                       paged, 16 bytes an entry
    ring  = r_p at slot p mod 128            the sliding window
    D     = xxh3-64 of all rows below n, block by block, then of the state
    token = ordinary token number mix(seed + k·golden xor D_k), D_0 = D, D_{k+1} = mix(D_k xor r of the new row)

The first tokens of an answer spell "[stub engine]". Source: design 5; the arithmetic: ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from kv.layout import Component, Kind, Layout
from stages.engine.interface import BLOCK_TOKENS, KVMemory, ModelCard, Sequence

WINDOW_TOKENS = 128
KEEP_TOKENS = 140  # window + backtracking, as the real engine. Source: facts-model 2.1
# Ids of "[stub engine]" in the V4 vocabulary: the stub says what it is in every answer.
BANNER = (61, 318, 604, 5466, 63)
FIRST_WORD, NUM_WORDS = 1_000, 100_000  # ordinary text ids, clear of bytes and specials
# The constants of SplitMix64. Source: splitmix64
_GOLDEN, _M1, _M2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ROOT = 0x7469646D696C6C  # "tidmill"
_ALL = (1 << 64) - 1
_M1_U64, _M2_U64, _ROOT_U64 = np.uint64(_M1), np.uint64(_M2), np.uint64(_ROOT)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)
_FEW = 20  # sequences; below it plain integers are cheaper. Source: ours, measured

U64 = npt.NDArray[np.uint64]

LAYOUT = Layout(
    components=(
        Component(name="rows", kind=Kind.PAGED, entries=BLOCK_TOKENS, entry_bytes=16),
        Component(name="ring", kind=Kind.RING, entries=WINDOW_TOKENS, entry_bytes=8),
        Component(name="digest", kind=Kind.STATE, entries=1, entry_bytes=8, stored=False),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StubOptions:
    """How the stub behaves. How fast it is, is its scheduler's affair.

    flip_blocks: chaos: so many times, flip one byte of a finished prompt's first block, after its checksum.
    """

    max_context_tokens: int = 1 << 20
    flip_blocks: int = 0


def _mix(x: U64) -> U64:
    x = (x ^ (x >> _S30)) * _M1_U64
    x = (x ^ (x >> _S27)) * _M2_U64
    return x ^ (x >> _S31)


def _mix_int(x: int) -> int:
    x = (x ^ (x >> 30)) * _M1 & _ALL
    x = (x ^ (x >> 27)) * _M2 & _ALL
    return x ^ (x >> 31)


class StubRunner:
    """Implements Runner. A pretended pace is kept by its scheduler and the stepper, not by sleeping here."""

    def __init__(self, memory: KVMemory, options: StubOptions | None = None) -> None:
        self.options = options or StubOptions()
        self._flips_left = self.options.flip_blocks
        self.card = ModelCard(
            name="stub",
            fingerprint="stub-1",
            layout=LAYOUT,
            max_context_tokens=self.options.max_context_tokens,
            window_tokens=WINDOW_TOKENS,
            keep_tokens=KEEP_TOKENS,
            replay_windows=1,
            vocab_size=129_280,
            engine="stub",
        )
        at, size = LAYOUT.offset("rows"), BLOCK_TOKENS * 16
        self._rows = memory.blocks[:, at : at + size].view(np.uint64).reshape(-1, BLOCK_TOKENS, 2)
        ring_at = LAYOUT.offset("ring")
        self._rings = memory.states[:, ring_at : ring_at + 8 * WINDOW_TOKENS].view(np.uint64)
        digest_at = LAYOUT.offset("digest")
        self._digests = memory.states[:, digest_at : digest_at + 8].view(np.uint64)[:, 0]
        self._states = memory.states
        # a memoryview reads and writes single numbers three times as fast as numpy
        self._rows_raw = self._rows.data
        self._rings_raw = self._rings.data
        self._digests_raw = self._digests.data

    def prefill(self, seq: Sequence, start: int, end: int) -> int | None:
        """See Runner."""
        if start == seq.plan.replay_from:
            self._states[seq.state_slot] = 0
        positions = np.arange(start, end)
        terms = _mix(seq.ids[start:end].astype(np.uint64) + (positions % BLOCK_TOKENS + 1).astype(np.uint64))
        for at in range(start - start % BLOCK_TOKENS, end, BLOCK_TOKENS):
            first, last = max(at, start), min(at + BLOCK_TOKENS, end)
            self._block(seq, first, terms[first - start : last - start])
        if end < seq.num_prompt_tokens:
            return None
        seq.first_tokens = [self._word(seq, self._digest(seq))] * seq.sampling.num_choices  # the banner's
        return seq.first_tokens[0]

    def _block(self, seq: Sequence, start: int, terms: U64) -> None:
        """Rows of the positions from `start` on that `terms` belong to; they lie in one block."""
        number, first = divmod(start, BLOCK_TOKENS)
        last = first + len(terms)
        rows = self._rows[seq.block_table[number]]
        sums = np.add.accumulate(terms)
        if first:
            sums += rows[first - 1, 0]
        hashes = _mix(self._link(seq, number) ^ sums)
        if start >= seq.plan.hit_tokens:
            rows[first:last, 0] = sums
            rows[first:last, 1] = hashes
        self._rings[seq.state_slot, first:last] = hashes  # a block is as long as the window, so slots do not wrap

    def _link(self, seq: Sequence, number: int) -> np.uint64:
        """d_b: what a block's rows inherit from the block before it."""
        return self._rows[seq.block_table[number - 1], -1, 1] if number else _ROOT_U64

    def _digest(self, seq: Sequence) -> int:
        """D over every valid row and the ring, in order, as the bytes lie in this engine's memory."""
        digest = xxhash.xxh3_64(seed=seq.num_prompt_tokens)
        full, rest = divmod(seq.num_prompt_tokens, BLOCK_TOKENS)
        for block in seq.block_table[:full]:
            digest.update(self._rows[block].data)
        if rest:
            digest.update(np.ascontiguousarray(self._rows[seq.block_table[full], :rest]).data)
        digest.update(self._rings[seq.state_slot].data)
        return digest.intdigest()

    @staticmethod
    def _word(seq: Sequence, digest: int) -> int:
        """The token of the next output position."""
        k = len(seq.output)
        if k < len(BANNER):
            return BANNER[k]
        return FIRST_WORD + _mix_int(seq.seed + k * _GOLDEN & _ALL ^ digest) % NUM_WORDS

    def flip(self, seq: Sequence) -> None:
        """Chaos: spoil the first row of a finished prompt, while flips are left."""
        if self._flips_left > 0:
            self._flips_left -= 1
            self._rows[seq.block_table[0], 0, 1] ^= np.uint64(1)

    def decode(self, seqs: list[Sequence]) -> list[int]:
        """See Runner. One vectorised pass over a batch, plain integers for a few: a pass of numpy costs 40 us."""
        if len(seqs) < _FEW:
            return [self._decode_one(seq) for seq in seqs]
        slots = np.array([seq.state_slot for seq in seqs], np.int64)
        positions = np.array([seq.num_prompt_tokens + len(seq.output) - 1 for seq in seqs], np.int64)
        tokens = np.array([seq.output[-1] for seq in seqs], np.uint64)
        for index in np.flatnonzero(self._digests[slots] == 0):
            # the first step after a handoff: everything that was read decides everything that follows
            self._digests[slots[index]] = self._digest(seqs[index])
        hashes = self._append(seqs, slots, positions, tokens)
        counts = positions - np.array([seq.num_prompt_tokens for seq in seqs], np.int64) + 1
        digests = _mix(self._digests[slots] ^ hashes) | np.uint64(1)  # never 0: that means "not taken yet"
        self._digests[slots] = digests
        seeds = np.array([seq.seed for seq in seqs], np.uint64)
        drawn = _mix(seeds + counts.astype(np.uint64) * np.uint64(_GOLDEN) ^ digests)
        words: list[int] = (FIRST_WORD + (drawn % np.uint64(NUM_WORDS)).astype(np.int64)).tolist()
        if counts.min() < len(BANNER):
            words = [BANNER[k] if k < len(BANNER) else word for k, word in zip(counts.tolist(), words, strict=True)]
        return words

    def _decode_one(self, seq: Sequence) -> int:
        """What `decode` does, for one sequence: 2 us."""
        rows, slot = self._rows_raw, seq.state_slot
        digest = self._digests_raw[slot] or self._digest(seq)
        position = seq.num_tokens - 1
        number, offset = divmod(position, BLOCK_TOKENS)
        block = seq.block_table[number]
        total = (rows[block, offset - 1, 0] if offset else 0) + _mix_int(seq.output[-1] + offset + 1) & _ALL
        link = rows[seq.block_table[number - 1], BLOCK_TOKENS - 1, 1] if number else _ROOT
        hashed = _mix_int(link ^ total)
        rows[block, offset, 0], rows[block, offset, 1] = total, hashed
        self._rings_raw[slot, position % WINDOW_TOKENS] = hashed
        digest = self._digests_raw[slot] = _mix_int(digest ^ hashed) | 1  # see `decode`
        return self._word(seq, digest)

    def _append(
        self, seqs: list[Sequence], slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], tokens: U64
    ) -> U64:
        """Write the row of each sequence's newest token; returns r of each."""
        numbers, offsets = np.divmod(positions, BLOCK_TOKENS)
        tables = [(seq.block_table, number) for seq, number in zip(seqs, numbers.tolist(), strict=True)]
        blocks = np.array([table[number] for table, number in tables])
        before = np.where(offsets > 0, self._rows[blocks, offsets - 1, 0], np.uint64(0))
        sums = before + _mix(tokens + (offsets + 1).astype(np.uint64))
        parents = [table[number - 1] if number else -1 for table, number in tables]
        links = np.where(np.array(parents) >= 0, self._rows[parents, -1, 1], _ROOT_U64)
        hashes: U64 = _mix(links ^ sums)
        self._rows[blocks, offsets, 0] = sums
        self._rows[blocks, offsets, 1] = hashes
        self._rings[slots, positions % WINDOW_TOKENS] = hashes
        return hashes
