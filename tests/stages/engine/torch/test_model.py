from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from stages.engine.torch.checkpoint import Checkpoint, read_checkpoint
from stages.engine.torch.prefill_rows import PrefillRows
from stages.engine.torch.rows import Rows
from tests.stages.engine.torch.conftest import GOLDEN, Engine


@pytest.fixture(scope="module")
def golden() -> Checkpoint:
    """tiny-a with a decoder half that runs on all 150 golden positions."""
    found = read_checkpoint(GOLDEN)
    return replace(found, config=replace(found.config, backtracking=150 - found.config.window))


@pytest.mark.parametrize("chunk", [150, 40])
def test_logits_agree_with_an_independent_implementation(golden: Checkpoint, chunk):
    """A last-bit difference may flip an FP8 or FP4 code and move a window of positions, hence the shares."""
    stored = np.load(GOLDEN / "golden.npz")
    engine = Engine(golden)
    seq = engine.sequence(150)
    seq.ids = stored["ids"]
    rows = [engine.runner.prefill_hidden(seq, start, min(start + chunk, 150)) for start in range(0, 150, chunk)]
    logits = engine.runner.logits(torch.cat([r for r in rows if r is not None]))
    difference = (logits - torch.from_numpy(stored["logits"])).abs().amax(-1)
    assert difference.median() <= 1e-5
    assert (difference <= 1e-3).float().mean() >= 0.9


def test_decode_continues_the_golden_prefill(golden: Checkpoint):
    """Rows 100.. of the golden run, computed one at a time from the KV of the rows before them."""
    stored = np.load(GOLDEN / "golden.npz")
    engine = Engine(golden)
    seq = engine.sequence(100)
    seq.ids = stored["ids"][:100]
    seq.tail_ids = seq.ids[-3:]
    engine.runner.prefill(seq, 0, 100)
    difference = []
    for position in range(100, 150):
        seq.output.append(int(stored["ids"][position]))
        logits = engine.runner.logits(engine.runner.decode_hidden([seq]))[0]
        difference.append(float((logits - torch.from_numpy(stored["logits"][position])).abs().max()))
    assert np.median(difference) <= 1e-5
    assert np.mean(np.array(difference) <= 1e-3) >= 0.9


class MaskedRows(PrefillRows):
    """All rows go through the decoder half; only what they see is cut."""

    def kept(self) -> tuple[Rows, slice]:
        cut = max(0, self.seq.num_prompt_tokens - self.kv.config.keep)
        return PrefillRows(self.kv, self.seq, self.start, self.end, cut), slice(0, self.end - self.start)


@pytest.mark.parametrize("n", [141, 200, 333])
def test_cutting_rows_equals_masking_what_they_see(tiny: Checkpoint, n, monkeypatch):
    """Source: facts-model 2.1 (the mask mode must equal the compact mode)."""
    compact, masked = Engine(tiny), Engine(tiny)
    a, b = compact.sequence(n), masked.sequence(n)
    cut = compact.runner.prefill_hidden(a, 0, n)
    monkeypatch.setattr("stages.engine.torch.runner.PrefillRows", MaskedRows)
    full = masked.runner.prefill_hidden(b, 0, n)
    assert cut is not None
    assert full is not None
    assert len(cut) == compact.card.keep_tokens
    assert len(full) == n
    assert torch.equal(cut, full[-len(cut) :])
    assert compact.kv_of(a) == masked.kv_of(b)


def test_the_decoder_half_is_an_approximation_only_through_its_window(tiny: Checkpoint):
    """A longer kept tail moves the last row a little, and not at all once nothing is cut."""
    n = 300
    hidden = []
    for backtracking in (12, 100, n - 128, n):
        engine = Engine(replace(tiny, config=replace(tiny.config, backtracking=backtracking)))
        rows = engine.runner.prefill_hidden(engine.sequence(n), 0, n)
        assert rows is not None
        hidden.append(rows[-1])
    assert torch.equal(hidden[2], hidden[3])
    similar = [float(torch.cosine_similarity(h, hidden[3], dim=0)) for h in hidden[:2]]
    assert not torch.equal(hidden[0], hidden[3])
    assert min(similar) > 0.9
