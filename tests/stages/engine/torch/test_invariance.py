"""A hundred prompts: alone, in any company, in chunks of any size, moved to another memory, started over."""

from __future__ import annotations

import random

import numpy as np
import pytest

from stages.engine.interface import Sequence
from stages.engine.torch.checkpoint import Checkpoint
from tests.stages.engine.torch.conftest import Engine

NUM_PROMPTS = 100
STEPS = 12


def alone(tiny: Checkpoint, n: int, number: int) -> list[int]:
    engine = Engine(tiny, num_blocks=8, num_slots=1)
    seq = engine.sequence(n, prompt=number)
    engine.prefill(seq, chunk=n)
    engine.decode([seq], STEPS)
    return seq.output


def moved(source: Engine, target: Engine, seq: Sequence, number: int) -> Sequence:
    """The sequence after a handoff."""
    there = target.sequence(seq.num_prompt_tokens, prompt=number)
    target.memory.blocks[there.block_table] = source.memory.blocks[seq.block_table]
    target.memory.states[there.state_slot] = source.memory.states[seq.state_slot]
    there.output, there.ids = list(seq.output), np.empty(0, np.uint32)
    return there


def together(tiny: Checkpoint, lengths: dict[int, int], chance: random.Random) -> dict[int, list[int]]:
    """Answers of prompts that join and leave one batch at any step; at one step all of them change memory."""
    here, there = (Engine(tiny, num_blocks=16 * 5, num_slots=20) for _ in range(2))
    seqs: dict[int, Sequence] = {}
    for number, n in lengths.items():
        seqs[number] = here.sequence(n, prompt=number)
        here.prefill(seqs[number], chunk=chance.choice([1, 7, 64, 128, 256, 512] if n < 150 else [100, 256]))
    waiting, running, engine = list(lengths), list[int](), here
    while waiting or running:
        if waiting:
            running.append(waiting.pop())
        if engine is here and chance.random() < 0.2:
            engine = there
            for number in (*running, *waiting):
                seqs[number] = moved(here, there, seqs[number], number)
        chance.shuffle(running)
        engine.decode([seqs[number] for number in running], 1)
        running = [number for number in running if len(seqs[number].output) <= STEPS]
    return {number: seq.output for number, seq in seqs.items()}


@pytest.mark.slow
def test_a_hundred_prompts_have_the_same_tokens_whatever_happens_to_them(tiny: Checkpoint):
    chance = random.Random(11)
    lengths = {i: chance.choice([1, 2, 127, 128, 129, 141, chance.randrange(3, 420)]) for i in range(NUM_PROMPTS)}
    expected = {number: alone(tiny, n, number) for number, n in lengths.items()}
    order = list(lengths)
    chance.shuffle(order)
    while order:
        batch = [order.pop() for _ in range(min(len(order), chance.choice([1, 2, 5, 16])))]
        answers = together(tiny, {number: lengths[number] for number in batch}, chance)
        assert answers == {number: expected[number] for number in batch}
