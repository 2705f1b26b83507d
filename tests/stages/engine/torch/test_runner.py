from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from kv.layout import Kind
from kv.plan import plan
from stages.engine.interface import KVMemory, Runner, Sequence
from stages.engine.torch.checkpoint import Checkpoint
from stages.engine.torch.kv_bytes import MemoryShapeError
from stages.engine.torch.runner import SequenceError, TorchRunner
from tests.stages.engine.torch.conftest import Engine


def entries_of(engine: Engine, seq: Sequence) -> dict[str, bytes]:
    """Global KV as far as the sequence's tokens reach, without the rest of its last block."""
    layout = engine.card.layout
    config = engine.checkpoint.config
    tokens = seq.num_tokens - 1
    found = {}
    for part in layout.components:
        if part.kind is Kind.PAGED and part.name.endswith("main"):
            ratio = config.ratios[int(part.name.split(".")[0].removeprefix("layer"))]
            rows = [layout.view(engine.memory.blocks[b], part.name) for b in seq.block_table]
            found[part.name] = np.concatenate(rows)[: tokens // ratio].tobytes()
    return found


def test_it_is_a_runner(engine):
    assert isinstance(engine.runner, Runner)


def test_memory_of_another_size_is_refused(tiny: Checkpoint, engine):
    layout = engine.card.layout
    states = engine.memory.states
    with pytest.raises(MemoryShapeError, match=f"blocks must be uint8 .any, {layout.block_bytes}."):
        TorchRunner(tiny, KVMemory(blocks=np.zeros((4, layout.block_bytes + 1), np.uint8), states=states))


@pytest.mark.parametrize("n", [1, 2, 3, 127, 128, 129, 140, 141, 300])
def test_every_prompt_length_gives_tokens_of_the_vocabulary(engine, n):
    seq = engine.sequence(n, prompt=n)
    engine.prefill(seq)
    engine.decode([seq], 5)
    assert len(seq.output) == 6
    assert all(0 <= token < engine.card.vocab_size for token in seq.output)
    assert len(set(seq.output)) > 1


@pytest.mark.parametrize("n", [5, 300, 511])
def test_a_handoff_of_bytes_continues_like_one_memory(tiny: Checkpoint, n):
    together, prefill_side, decode_side = Engine(tiny), Engine(tiny), Engine(tiny)
    decode_side.sequence(9)  # other blocks and another slot than on the prefill side
    whole, here, there = together.sequence(n), prefill_side.sequence(n), decode_side.sequence(n)
    assert here.block_table != there.block_table or here.state_slot != there.state_slot
    together.prefill(whole)
    there.output = [prefill_side.prefill(here)]
    there.ids = np.empty(0, np.uint32)  # decode only ever sees the tail
    decode_side.memory.blocks[there.block_table] = prefill_side.memory.blocks[here.block_table]
    decode_side.memory.states[there.state_slot] = prefill_side.memory.states[here.state_slot]
    for _ in range(20):
        assert torch.equal(together.runner.decode_hidden([whole]), decode_side.runner.decode_hidden([there]))
        together.decode([whole], 1)
        decode_side.decode([there], 1)
    assert whole.output == there.output
    assert together.kv_of(whole) == decode_side.kv_of(there)


def test_a_changed_byte_of_kv_changes_the_next_rows(engine):
    seq = engine.sequence(300)
    engine.prefill(seq)
    before = engine.runner.decode_hidden([seq])
    engine.memory.states[seq.state_slot][: engine.card.layout.stored_state_bytes // 2] ^= 1
    assert not torch.equal(before, engine.runner.decode_hidden([seq]))


@pytest.mark.parametrize("chunk", [1, 7, 128, 512])
def test_the_chunk_size_changes_no_bit(tiny: Checkpoint, chunk):
    n = 301 if chunk > 1 else 150
    whole, parts = Engine(tiny), Engine(tiny)
    a, b = whole.sequence(n), parts.sequence(n)
    assert whole.prefill(a, chunk=n) == parts.prefill(b, chunk=chunk)
    assert whole.kv_of(a) == parts.kv_of(b)
    assert torch.equal(whole.runner.decode_hidden([a]), parts.runner.decode_hidden([b]))


def test_uneven_chunks_around_the_cut_change_no_bit(tiny: Checkpoint):
    n = 301
    whole, parts = Engine(tiny), Engine(tiny)
    a, b = whole.sequence(n), parts.sequence(n)
    whole.prefill(a, chunk=n)
    cut = n - parts.card.keep_tokens
    bounds = [0, 3, cut - 1, cut + 1, n - 1, n]
    hidden = [parts.runner.prefill_hidden(b, start, end) for start, end in pairwise(bounds)]
    assert [h is None for h in hidden] == [True, True, False, False, False]
    together = whole.runner.prefill_hidden(a, 0, n)
    assert together is not None
    assert torch.equal(together, torch.cat([h for h in hidden if h is not None]))
    assert whole.kv_of(a) == parts.kv_of(b)


def test_up_to_backtracking_rows_may_be_computed_again(tiny: Checkpoint):
    """A ring holds that many rows beyond the window; a longer chunk overwrites what its first row saw."""
    once, twice = Engine(tiny), Engine(tiny)
    a, b = once.sequence(151), twice.sequence(151)
    for start, end in pairwise([0, 1, 2, 5, 138, 150, 151]):
        once.runner.prefill(a, start, end)
        tokens = [twice.runner.prefill(b, start, end) for _ in range(2 if 0 < end - start <= 12 else 1)]
        assert len(set(tokens)) == 1
        assert once.kv_of(a) == twice.kv_of(b)
    a.output, b.output = [9], [9]
    for _ in range(4):
        token = once.runner.decode([a])
        assert twice.runner.decode([b]) == twice.runner.decode([b]) == token
        assert once.kv_of(a) == twice.kv_of(b)
        a.output += token
        b.output += token


@pytest.mark.parametrize("n", [700, 1025, 1111])
@pytest.mark.parametrize("hit_blocks", [1, 3, 5, 8])
def test_an_exact_hit_gives_every_bit_of_a_cold_run(tiny: Checkpoint, n, hit_blocks):
    cold_engine, engine = Engine(tiny), Engine(tiny)
    cold, first = cold_engine.sequence(n), engine.sequence(n)
    cold_engine.prefill(cold)
    first.ids = np.concatenate([first.ids[: hit_blocks * 128], engine.sequence(n, prompt=77).ids])[:n]
    engine.prefill(first)  # another prompt with the same beginning fills the blocks
    hit = engine.sequence(n, hit=hit_blocks * 128)
    shared = min(hit_blocks, (n - 1) // 128)
    assert hit.plan.hit_tokens == shared * 128
    hit.block_table[:shared] = first.block_table[:shared]
    kept = engine.memory.blocks[hit.block_table[:shared]].tobytes()
    assert engine.prefill(hit, chunk=200) == cold.output[0]
    assert engine.memory.blocks[hit.block_table[:shared]].tobytes() == kept
    assert engine.kv_of(hit) == cold_engine.kv_of(cold)
    for _ in range(3):
        assert torch.equal(engine.runner.decode_hidden([hit]), cold_engine.runner.decode_hidden([cold]))
        engine.decode([hit], 1)
        cold_engine.decode([cold], 1)
    assert hit.output == cold.output


@pytest.mark.parametrize(("n", "hit"), [(700, 384), (1111, 1024)])
def test_a_snapshot_spares_the_replay_and_changes_no_bit(tiny: Checkpoint, n, hit):
    cold_engine, engine = Engine(tiny), Engine(tiny)
    cold, first = cold_engine.sequence(n), engine.sequence(n)
    cold_engine.prefill(cold)
    begin = min(hit, (n - engine.card.keep_tokens) // 128 * 128)
    engine.runner.prefill(first, 0, begin)
    stored = slice(0, engine.card.layout.stored_state_bytes)
    snapshot = engine.memory.states[first.state_slot, stored].copy()
    engine.runner.prefill(first, begin, n)
    again = engine.sequence(n)
    again.plan = plan(n, hit, keep=engine.card.keep_tokens, window=128, windows=1, snapshots={begin})
    assert again.plan.replay_from == begin
    again.block_table[: hit // 128] = first.block_table[: hit // 128]
    engine.memory.states[again.state_slot, stored] = snapshot
    assert engine.prefill(again) == cold.output[0]
    assert engine.kv_of(again) == cold_engine.kv_of(cold)


def test_a_bounded_replay_is_close_but_not_exact(tiny: Checkpoint):
    n, hit = 1111, 640
    cold_engine, engine = Engine(tiny), Engine(tiny)
    cold, first = cold_engine.sequence(n), engine.sequence(n)
    cold_engine.prefill(cold)
    engine.prefill(first)
    again = engine.sequence(n, hit=hit, windows=1)
    assert again.plan.replay_from == hit - engine.card.window_tokens
    again.block_table[: hit // 128] = first.block_table[: hit // 128]
    kept = engine.memory.blocks[first.block_table[: hit // 128]].tobytes()
    engine.prefill(again)
    assert engine.memory.blocks[first.block_table[: hit // 128]].tobytes() == kept
    assert engine.kv_of(again)[0] != cold_engine.kv_of(cold)[0]


@pytest.mark.parametrize("batch", [3, 16])
def test_a_sequence_decodes_alike_alone_and_in_a_batch(tiny: Checkpoint, batch):
    alone, crowd = Engine(tiny, num_blocks=160), Engine(tiny, num_blocks=160)
    lengths = [1 + 37 * i % 300 for i in range(batch)]
    singles = [alone.sequence(n, prompt=i) for i, n in enumerate(lengths)]
    seqs = [crowd.sequence(n, prompt=i) for i, n in enumerate(lengths)]
    for single, seq in zip(singles, seqs, strict=True):
        alone.prefill(single)
        crowd.prefill(seq)
    for _ in range(6):
        together = crowd.runner.decode_hidden(seqs)
        rows = [alone.runner.decode_hidden([single]) for single in singles]
        assert torch.equal(together, torch.cat(rows))
        assert torch.equal(crowd.runner.logits(together), torch.cat([alone.runner.logits(row) for row in rows]))
        crowd.decode(seqs, 1)
        for single in singles:
            alone.decode([single], 1)
    assert [s.output for s in seqs] == [s.output for s in singles]


def test_the_order_of_a_batch_changes_no_bit(engine):
    seqs = [engine.sequence(20 + 31 * i, prompt=i) for i in range(5)]
    for seq in seqs:
        engine.prefill(seq)
    straight = engine.runner.decode_hidden(seqs)
    assert torch.equal(engine.runner.decode_hidden(seqs[::-1]).flip(0), straight)


def test_encoder_kv_is_the_same_from_prefill_and_from_decode(tiny: Checkpoint):
    """The encoder half has no cut, so its global KV does not depend on which side computed a token."""
    engine, other = Engine(tiny), Engine(tiny)
    seq = engine.sequence(260)
    engine.prefill(seq)
    engine.decode([seq], 30)
    longer = other.sequence(260 + 30)
    longer.ids = np.concatenate([seq.ids, np.array(seq.output[:-1], np.uint32)])
    other.prefill(longer)
    name = "layer2.main"
    assert entries_of(engine, seq)[name] == entries_of(other, longer)[name]


def test_greedy_decoding_ignores_the_seed(tiny: Checkpoint):
    outputs = []
    for seed in (5, 6):
        engine = Engine(tiny)
        seq = engine.sequence(60, temperature=0.0)
        seq.seed = seed
        engine.prefill(seq)
        engine.decode([seq], 8)
        outputs.append(seq.output)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("start", "end", "change"),
    [
        (0, 61, {}),
        (5, 5, {}),
        (0, 60, {"block_table": []}),
        (0, 60, {"ids": np.full(60, 512, np.uint32)}),
        (0, 60, {"ids": np.full(59, 5, np.uint32)}),
        (0, 5000, {"num_prompt_tokens": 5000}),
    ],
)
def test_what_is_out_of_range_is_named(engine, start, end, change):
    with pytest.raises(SequenceError, match=r"cannot prefill|outside the vocabulary"):
        engine.runner.prefill(replace(engine.sequence(60), **change), start, end)


@pytest.mark.parametrize("change", [{"output": []}, {"block_table": [3]}, {"num_prompt_tokens": 4096}])
def test_a_step_without_room_or_input_is_refused(engine, change):
    seq = engine.sequence(200)
    engine.prefill(seq)
    with pytest.raises(SequenceError, match=f"cannot decode {seq.rid}"):
        engine.runner.decode([replace(seq, **change)])


def test_an_empty_batch_is_nothing_to_do(engine):
    assert engine.runner.decode([]) == []
