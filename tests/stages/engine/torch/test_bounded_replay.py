"""The paper's bounded replay (R30, R31) against brute force: all positions in one pass, and a mask of who sees whom."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stages.engine.interface import Sequence
from stages.engine.torch.checkpoint import Checkpoint
from stages.engine.torch.kv_bytes import KVBytes
from stages.engine.torch.prefill_rows import PrefillRows
from stages.engine.torch.rows import Rows
from tests.stages.engine.torch.conftest import Engine


class ByMask(PrefillRows):
    """Rows of a whole prompt, of which those from `replay_from` on see no window key before it."""

    def __init__(self, kv: KVBytes, seq: Sequence, end: int, replay_from: int) -> None:
        super().__init__(kv, seq, 0, end, 0)
        window = kv.config.window
        keys = self.positions.unsqueeze(1) + torch.arange(1 - window, 1)
        replayed = (self.positions >= replay_from).unsqueeze(1)
        self._seen = (keys >= 0) & (~replayed | (keys >= replay_from))

    def kept(self) -> tuple[Rows, slice]:
        rows, part = super().kept() or (self, slice(0))
        return rows, part


def brute_force(engine: Engine, seq: Sequence) -> torch.Tensor:
    """Hidden rows of the decoder half; KV is written from the hit on."""
    n, runner = seq.num_prompt_tokens, engine.runner
    runner._kv.reset_state(seq.state_slot, keep_stored=False)
    ids = seq.ids.astype(np.int64)
    rows = ByMask(runner._kv, seq, n, seq.plan.replay_from)
    with torch.inference_mode():
        hidden = runner._model.forward(rows, ids, runner._grams(ids, n))
    assert hidden is not None
    return hidden


@pytest.mark.parametrize(("n", "hit"), [(700, 384), (1111, 640), (1111, 896), (1025, 128)])
def test_a_replay_of_one_window_equals_the_masked_whole(tiny: Checkpoint, n: int, hit: int):
    engine, brute = Engine(tiny), Engine(tiny)
    replayed = []
    for each in (engine, brute):
        cold = each.sequence(n)
        each.prefill(cold)
        again = each.sequence(n, hit=hit, windows=1)
        assert again.plan.replay_from == hit - engine.card.window_tokens
        again.block_table[: hit // 128] = cold.block_table[: hit // 128]
        replayed.append(again)
    mine, masked = replayed
    hidden = None
    for start in range(mine.plan.replay_from, n, 200):
        hidden = engine.runner.prefill_hidden(mine, start, min(start + 200, n))
    expected = brute_force(brute, masked)
    assert hidden is not None
    assert torch.equal(hidden[-1], expected[-1])
    assert engine.kv_of(mine)[0] == brute.kv_of(masked)[0]
    for _ in range(3):
        for each, seq in ((engine, mine), (brute, masked)):
            if not seq.output:
                seq.output.append(7)
            seq.output += each.runner.decode([seq])
    assert mine.output == masked.output


def test_it_is_not_the_cold_run(tiny: Checkpoint):
    """Else the equality above would prove nothing."""
    engine = Engine(tiny)
    cold = engine.sequence(1111)
    engine.prefill(cold)
    again = engine.sequence(1111, hit=640, windows=1)
    again.block_table[:5] = cold.block_table[:5]
    expected = brute_force(engine, again)
    other = Engine(tiny)
    whole = other.runner.prefill_hidden(other.sequence(1111), 0, 1111)
    assert whole is not None
    assert not torch.equal(expected, whole)
