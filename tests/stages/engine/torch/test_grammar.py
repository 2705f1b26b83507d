"""Decoding under a grammar: its text is right, and a run taken up by one prefill of its tokens has every bit."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from codec import grammar
from codec.vocab import OutputVocab, load_vocabulary
from stages.engine.choices import choice_seed
from stages.engine.constraint import CompiledConstraint, ConstraintState, GrammarBuilder
from stages.engine.interface import Sequence
from stages.engine.torch.checkpoint import Checkpoint
from tests.stages.engine.torch.conftest import Engine

WORDS = grammar.regex("(ebb|flow|slack|spring|neap)( (ebb|flow|slack|spring|neap)){3,40}")


@pytest.fixture(scope="module")
def vocab() -> OutputVocab:
    return OutputVocab(load_vocabulary())


@pytest.fixture(scope="module")
def builder(vocab: OutputVocab, tiny: Checkpoint) -> GrammarBuilder:
    return GrammarBuilder(vocab, tiny.config.vocab_size)


@pytest.fixture(scope="module")
def compiled(builder: GrammarBuilder) -> CompiledConstraint:
    return builder(WORDS.text())


def begun(engine: Engine, compiled: CompiledConstraint, n: int, choice: int = 0) -> Sequence:
    seq = engine.sequence(n)
    seq.seed = choice_seed(seq.seed, choice)
    seq.constraint = ConstraintState(compiled)
    token = engine.prefill(seq)
    seq.constraint = ConstraintState.replay(compiled, [token])
    return seq


def text_of(vocab: OutputVocab, tokens: list[int]) -> str:
    return b"".join(vocab.token_bytes(token) for token in tokens if token != 1).decode()


@pytest.mark.parametrize(("n", "k"), [(250, 4), (250, 5), (250, 6), (250, 7), (120, 11)])
@pytest.mark.parametrize("choice", [0, 2])
def test_a_constrained_answer_is_taken_up_with_every_bit(
    tiny: Checkpoint, compiled: CompiledConstraint, n: int, k: int, choice: int
):
    before = Engine(tiny)
    first = begun(before, compiled, n, choice)
    before.decode([first], k)
    engine = Engine(tiny)
    again = engine.sequence(n)
    again.seed, again.output, again.num_forced_tokens = first.seed, first.output[:k], k
    again.ids = np.concatenate([first.ids, np.array(again.output, np.uint32)])
    again.constraint = ConstraintState.replay(compiled, again.output)
    token = engine.runner.prefill(again, 0, n + k)
    assert token == first.output[k]
    again.output.append(token)
    again.constraint.advance(token)
    assert engine.kv_of(again) == before.kv_of(first)
    for _ in range(4):
        engine.decode([again], 1)
        before.decode([first], 1)
    assert again.output == first.output


def test_a_constrained_row_changes_nothing_for_its_neighbours(tiny: Checkpoint, compiled: CompiledConstraint):
    alone, crowd = Engine(tiny), Engine(tiny)
    free = [engine.sequence(60, prompt=1) for engine in (alone, crowd)]
    for engine, seq in zip((alone, crowd), free, strict=True):
        engine.prefill(seq)
    bound = begun(crowd, compiled, 60)
    only = begun(Engine(tiny), compiled, 60)
    assert bound.output == only.output
    alone.decode([free[0]], 10)
    crowd.decode([bound, free[1]], 10)
    assert free[0].output == free[1].output
    assert crowd.runner.decode_hidden([free[1]]).equal(alone.runner.decode_hidden([free[0]]))


def test_the_text_fits_the_schema_whatever_the_seed(tiny: Checkpoint, builder: GrammarBuilder, vocab: OutputVocab):
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 999}},
        "required": ["n"],
    }
    ready = builder(grammar.json_schema(schema | {"additionalProperties": False}).text())
    for number in range(12):
        engine = Engine(tiny)
        seq = engine.sequence(20, prompt=number)
        seq.sampling = replace(seq.sampling, ignore_eos=False, temperature=1.0)
        seq.constraint = ConstraintState(ready)
        seq.constraint = ConstraintState.replay(ready, [engine.prefill(seq)])
        while seq.output[-1] != 1:
            engine.decode([seq], 1)
            assert not seq.constraint.fault
        assert 0 <= json.loads(text_of(vocab, seq.output))["n"] <= 999


def test_forbidden_tokens_are_minus_infinity_and_others_are_as_they_were(
    tiny: Checkpoint, compiled: CompiledConstraint
):
    engine = Engine(tiny)
    seq = begun(engine, compiled, 30)
    hidden = engine.runner.decode_hidden([seq])
    plain = engine.runner.logits(hidden)
    masked = engine.runner._allowed_logits(hidden, [seq])
    forbidden = torch.isinf(masked)
    assert 0 < int((~forbidden).sum()) < tiny.config.vocab_size
    assert torch.equal(masked[~forbidden], plain[~forbidden])
