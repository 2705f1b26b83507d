from __future__ import annotations

import numpy as np
import torch

from stages.engine.torch.kv_bytes import KVBytes
from stages.engine.torch.prefill_rows import PrefillRows
from tests.stages.engine.torch.conftest import Engine


def rows_of(engine: Engine, start: int, end: int, seen_from: int, hit: int = 0) -> PrefillRows:
    kv = KVBytes(engine.checkpoint.config, engine.card.layout, engine.memory)
    return PrefillRows(kv, engine.sequence(1000, hit=hit), start, end, seen_from)


def test_the_window_ends_at_its_row_and_begins_where_keys_are_seen(engine):
    rows = rows_of(engine, 300, 303, seen_from=301)
    packed, values = torch.zeros(3, 33, dtype=torch.uint8), torch.arange(96.0).view(3, 32)
    engine.memory.states[:] = 0
    keys, seen = rows.window_keys(2, packed, values)
    assert keys.shape == (3, 128, 32)
    for row in range(3):
        positions = np.arange(300 + row - 127, 300 + row + 1)
        assert seen[row].tolist() == (positions >= 301).tolist()
        assert torch.equal(keys[row, -1], values[row])


def test_only_rows_from_the_hit_on_are_written(engine):
    assert rows_of(engine, 256, 512, 0, hit=384).written() == slice(128, 256)
    assert rows_of(engine, 0, 384, 0, hit=384).written() == slice(384, 384)
    assert rows_of(engine, 384, 400, 0, hit=384).written() == slice(0, 16)


def test_places_follow_the_block_table(engine):
    rows = rows_of(engine, 250, 260, 0)
    at = rows.places(4)
    table = rows.seq.block_table
    assert at.blocks.tolist() == [table[1]] * 6 + [table[2]] * 4
    assert at.slots.tolist() == [*range(122, 128), 0, 1, 2, 3]
    assert at.positions.tolist() == list(range(250, 260))


def test_a_pair_across_chunks_is_closed_with_the_kept_token(engine):
    first, second = rows_of(engine, 0, 3, 0), rows_of(engine, 3, 6, 0)
    second.seq.state_slot = first.seq.state_slot
    tokens = torch.arange(6.0).unsqueeze(1).expand(6, 64).contiguous()
    pairs, at = first.pairs(2, tokens[:3])
    assert pairs[:, :, 0].tolist() == [[0, 1]]
    pairs, at = second.pairs(2, tokens[3:])
    assert pairs[:, :, 0].tolist() == [[2, 3], [4, 5]]
    assert at.positions.tolist() == [2, 4]
    assert at.slots.tolist() == [1, 2]
