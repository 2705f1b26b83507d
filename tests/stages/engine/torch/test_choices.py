"""n > 1 on the real engine: every choice has the bits of a request of its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from stages.engine.choices import choice_seed
from stages.engine.interface import Sequence
from stages.engine.torch.checkpoint import Checkpoint
from tests.stages.engine.torch.conftest import Engine


def copies(engine: Engine, seq: Sequence, num_choices: int) -> list[Sequence]:
    """What stages.engine.choices.fork does, on this engine's plain memory: all blocks copied."""
    found = [replace(seq, output=[seq.first_tokens[0]])]
    for choice in range(1, num_choices):
        other = engine.sequence(seq.num_prompt_tokens)
        engine.memory.blocks[other.block_table] = engine.memory.blocks[seq.block_table]
        engine.memory.states[other.state_slot] = engine.memory.states[seq.state_slot]
        seed = choice_seed(seq.seed, choice)
        found.append(replace(other, ids=seq.ids, choice=choice, seed=seed, output=[seq.first_tokens[choice]]))
    return found


@pytest.mark.parametrize("n", [1, 127, 128, 250, 300])
def test_three_choices_have_the_bits_of_three_requests(tiny: Checkpoint, n: int):
    engine = Engine(tiny)
    seq = engine.sequence(n)
    seq.sampling = replace(seq.sampling, num_choices=3)
    engine.prefill(seq)
    seqs = copies(engine, seq, 3)
    engine.decode(seqs, 12)
    for choice, one in enumerate(seqs):
        alone = Engine(tiny)
        single = alone.sequence(n)
        single.seed = choice_seed(single.seed, choice)
        alone.prefill(single)
        alone.decode([single], 12)
        assert one.output == single.output
        assert torch.equal(engine.runner.decode_hidden([one]), alone.runner.decode_hidden([single]))
        assert engine.kv_of(one) == alone.kv_of(single)
    assert len({tuple(one.output) for one in seqs}) == 3


@pytest.mark.parametrize(("n", "k"), [(250, 6), (250, 7), (140, 3)])
def test_a_choice_is_resumed_by_one_prefill_of_its_own_tokens(tiny: Checkpoint, n: int, k: int):
    engine = Engine(tiny)
    seq = engine.sequence(n)
    seq.sampling = replace(seq.sampling, num_choices=3)
    engine.prefill(seq)
    seqs = copies(engine, seq, 3)
    engine.decode(seqs, k)
    for one in seqs:
        other = Engine(tiny)
        again = other.sequence(n)
        again.seed, again.choice, again.output = one.seed, one.choice, one.output[:k]
        again.ids = np.concatenate([seq.ids, np.array(again.output, np.uint32)])
        again.num_forced_tokens = k
        token = other.runner.prefill(again, 0, n + k)
        assert token == one.output[k]
        assert other.kv_of(again) == engine.kv_of(one)
