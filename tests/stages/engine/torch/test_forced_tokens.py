"""An answer that was delivered in part and is computed again: prompt and delivered tokens in one prefill.

The decoder half's cut stays at the prompt's end, so that every later token is what the first run would have given.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stages.engine.interface import Sequence
from stages.engine.torch.checkpoint import Checkpoint
from tests.stages.engine.torch.conftest import Engine


def resumed(engine: Engine, first: Sequence, k: int, **options: int) -> Sequence:
    """The same request with its first k tokens forced, in blocks of its own."""
    seq = engine.sequence(first.num_prompt_tokens, **options)
    seq.output = first.output[:k]
    seq.ids = np.concatenate([first.ids, np.array(seq.output, np.uint32)])
    seq.num_forced_tokens = k
    return seq


def lived(tiny: Checkpoint, n: int, k: int) -> tuple[Engine, Sequence]:
    """A run that has written the KV of its first k tokens."""
    engine = Engine(tiny)
    seq = engine.sequence(n)
    engine.prefill(seq)
    engine.decode([seq], k)
    return engine, seq


# around the block border at 256, even and odd numbers of tokens, prompts shorter and longer than the kept tail
@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 4), (140, 3), (250, 1), (250, 5), (250, 6), (250, 7), (255, 20)])
@pytest.mark.parametrize("chunk", [512, 67])
def test_prompt_and_delivered_tokens_give_every_bit_of_the_run_that_delivered_them(
    tiny: Checkpoint, n: int, k: int, chunk: int
):
    before, first = lived(tiny, n, k)
    engine = Engine(tiny)
    again = resumed(engine, first, k)
    token = None
    for start in range(0, n + k, chunk):
        token = engine.runner.prefill(again, start, min(start + chunk, n + k))
    assert token == first.output[k]
    again.output.append(first.output[k])
    assert engine.kv_of(again) == before.kv_of(first)
    for _ in range(3):
        rows = engine.runner.decode_hidden([again]), before.runner.decode_hidden([first])
        assert torch.equal(*rows)
        assert torch.equal(*map(engine.runner.logits, rows))
        engine.decode([again], 1)
        before.decode([first], 1)
    assert again.output == first.output


def test_a_cut_at_the_new_end_would_give_other_tokens(tiny: Checkpoint):
    """Why the cut stays where it was."""
    n, k = 300, 40
    before, first = lived(tiny, n, k)
    engine = Engine(tiny)
    moved = engine.sequence(n + k)
    moved.ids = np.concatenate([first.ids, np.array(first.output[:k], np.uint32)])
    engine.prefill(moved)
    assert engine.kv_of(moved)[1] != before.kv_of(first)[1]


@pytest.mark.parametrize("hit_blocks", [1, 3, 5])
def test_forced_tokens_behind_a_prefix_hit(tiny: Checkpoint, hit_blocks: int):
    n, k = 700, 9
    before, first = lived(tiny, n, k)
    engine = Engine(tiny)
    stored = engine.sequence(n)
    engine.prefill(stored)
    again = resumed(engine, first, k, hit=hit_blocks * 128)
    again.block_table[:hit_blocks] = stored.block_table[:hit_blocks]
    token = None
    for start in range(again.plan.replay_from, n + k, 256):
        token = engine.runner.prefill(again, start, min(start + 256, n + k))
    again.output.append(first.output[k])
    assert token == first.output[k]
    assert engine.kv_of(again) == before.kv_of(first)
