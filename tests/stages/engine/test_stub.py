from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codec.vocab import OutputVocab, load_vocabulary
from kv.plan import PlanKind
from stages.engine.interface import BLOCK_TOKENS, Sequence
from stages.engine.stub import BANNER, FIRST_WORD, LAYOUT, NUM_WORDS, StubOptions, StubRunner
from tests.stages.engine.stub_engine import DIRT, Stub, answer, plan_of, prompt

LENGTHS = [1, 2, 127, 128, 129, 139, 140, 141, 255, 256, 267, 268, 269, 384, 395, 396, 397, 512, 640, 700]
TEXT = 12  # tokens after which two texts count as compared: seven of them are drawn from 100,000


def cold(num_tokens: int) -> tuple[Stub, Sequence]:
    stub = Stub(num_blocks=16, num_states=2)
    seq, _ = stub.admit(prompt(num_tokens))
    stub.prefill(seq)
    return stub, seq


def test_sizes_follow_from_the_layout():
    assert LAYOUT.block_bytes == 128 * 16
    assert LAYOUT.state_bytes == 128 * 8 + 8
    assert LAYOUT.stored_state_bytes == 128 * 8
    card = Stub().runner.card
    assert (card.layout, card.engine, card.keep_tokens, card.window_tokens) == (LAYOUT, "stub", 140, 128)


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_what_prefill_leaves_holds_nothing_of_who_was_there_before(num_tokens: int):
    stub, seq = cold(num_tokens)
    clean = Stub(num_blocks=16, num_states=2, dirt=0)
    other, _ = clean.admit(prompt(num_tokens))
    clean.prefill(other)
    assert stub.rows_of(seq) == clean.rows_of(other)
    assert stub.state_of(seq) == clean.state_of(other)
    assert not any(stub.rows_of(seq)[16 * num_tokens :])


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 900), st.lists(st.integers(1, 899), max_size=8), st.integers(0, 7))
def test_any_chunking_leaves_the_same_bytes_and_token(num_tokens: int, ends: list[int], hit_blocks: int):
    whole, first = cold(num_tokens)
    stub = Stub(num_blocks=16, num_states=2)
    hit_blocks = min(hit_blocks, (num_tokens - 1) // BLOCK_TOKENS)
    seq, _ = stub.admit(prompt(num_tokens), hit=stub.store(whole.blocks_of(first)[:hit_blocks]))
    assert stub.prefill(seq, ends) == first.output[0]
    assert stub.rows_of(seq) == whole.rows_of(first)
    assert stub.state_of(seq) == whole.state_of(first)


def test_a_hit_of_any_length_equals_a_cold_run_bit_for_bit():
    kinds = set()
    for num_tokens in LENGTHS:
        source, first = cold(num_tokens)
        blocks, state = source.blocks_of(first), source.state_of(first)
        text = source.decode(first, TEXT)
        for hit_blocks in range((num_tokens - 1) // BLOCK_TOKENS + 1):
            for snapshots in ((), range(0, num_tokens, BLOCK_TOKENS)):
                stub = Stub(num_blocks=16, num_states=2)
                hit = stub.store(blocks[:hit_blocks])
                kv_plan = plan_of(num_tokens, hit_blocks * BLOCK_TOKENS, snapshots)
                kinds.add((kv_plan.kind, kv_plan.replay_from > 0))
                seq, _ = stub.admit(prompt(num_tokens), hit=hit, kv_plan=kv_plan)
                stub.prefill(seq, range(0, num_tokens, 512))
                assert (stub.blocks_of(seq) == blocks).all()
                assert stub.state_of(seq) == state
                assert stub.decode(seq, TEXT) == text
    assert kinds >= {(kind, True) for kind in (PlanKind.HIT, PlanKind.REPLAY)} | {(PlanKind.COLD, False)}


@pytest.mark.parametrize("num_tokens", [129, 300, 396, 397, 512, 700])
def test_blocks_below_the_hit_are_never_written(num_tokens: int):
    for hit_blocks in range(1, (num_tokens - 1) // BLOCK_TOKENS + 1):
        stub = Stub(num_blocks=16, num_states=2)
        strange = prompt(hit_blocks * 512, seed=99).view(np.uint8).reshape(hit_blocks, -1)
        seq, _ = stub.admit(prompt(num_tokens), hit=stub.store(strange))
        before = stub.memory.kv.blocks.copy()
        stub.prefill(seq, range(0, num_tokens, 512))
        written = np.flatnonzero((stub.memory.kv.blocks != before).any(axis=1))
        assert set(written.tolist()) == set(seq.block_table[hit_blocks:])


def test_one_prompt_writes_only_its_own_blocks_and_slot():
    stub = Stub(num_blocks=32, num_states=4)
    seq, _ = stub.admit(prompt(500))
    blocks, states = stub.memory.kv.blocks.copy(), stub.memory.kv.states.copy()
    stub.prefill(seq)
    stub.decode(seq, 300)
    blocks[seq.block_table] = stub.memory.kv.blocks[seq.block_table]
    states[seq.state_slot] = stub.memory.kv.states[seq.state_slot]
    assert (stub.memory.kv.blocks == blocks).all()
    assert (stub.memory.kv.states == states).all()


class Spoil:
    """Ways in which bytes may arrive wrong; each changes at least one byte or says that it cannot."""

    def __init__(self, raw: np.ndarray, rng: random.Random) -> None:
        self.raw = raw
        self.rng = rng

    def flip(self) -> bool:
        self.raw[self.rng.randrange(len(self.raw))] ^= 1 << self.rng.randrange(8)
        return True

    def zero(self) -> bool:
        at = self.rng.randrange(len(self.raw))
        changed = bool(self.raw[at])
        self.raw[at] = 0
        return changed

    def swap(self) -> bool:
        a, b = self.rng.randrange(len(self.raw)), self.rng.randrange(len(self.raw))
        self.raw[[a, b]] = self.raw[[b, a]]
        return bool(self.raw[a] != self.raw[b])

    def lose_a_row(self) -> bool:
        at = self.rng.randrange(len(self.raw)) // 16 * 16
        changed = bool(self.raw[at : at + 16].any())
        self.raw[at : at + 16] = 0
        return changed


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from([1, 100, 128, 200, 384, 400]), st.sampled_from(["flip", "zero", "swap", "lose_a_row"]), st.data()
)
def test_any_wrong_byte_of_a_handed_over_copy_changes_the_text(num_tokens: int, way: str, data: st.DataObject):
    source, first = cold(num_tokens)
    stub = Stub(num_blocks=16, num_states=2)
    seq, _ = stub.receive(source, first)
    right = source.decode(first, TEXT)
    rng = random.Random(data.draw(st.integers(0, 1 << 32)))
    if data.draw(st.booleans()):
        raw = stub.memory.kv.states[seq.state_slot]
        changed = getattr(Spoil(raw, rng), way)()
    else:
        flat = stub.memory.kv.blocks[seq.block_table].reshape(-1)
        changed = getattr(Spoil(flat[: 16 * num_tokens], rng), way)()
        stub.memory.kv.blocks[seq.block_table] = flat.reshape(len(seq.block_table), -1)
    assert (stub.decode(seq, TEXT) != right) == changed


def test_every_byte_of_a_copy_matters():
    source, first = cold(131)
    stub = Stub(num_blocks=16, num_states=2)
    seq, _ = stub.receive(source, first)
    right = source.decode(first, TEXT)
    blocks, states = stub.memory.kv.blocks, stub.memory.kv.states
    clean_blocks, clean_state = blocks[seq.block_table].copy(), states[seq.state_slot].copy()
    places = [(0, at) for at in range(2048)] + [(1, at) for at in range(3 * 16)] + [(2, at) for at in range(1032)]
    for where, at in places:
        blocks[seq.block_table], states[seq.state_slot] = clean_blocks, clean_state
        raw = states[seq.state_slot] if where == 2 else blocks[seq.block_table[where]]
        raw[at] ^= 1
        del seq.output[1:]
        assert stub.decode(seq, TEXT) != right, (where, at)
    blocks[seq.block_table], states[seq.state_slot] = clean_blocks, clean_state
    del seq.output[1:]
    assert stub.decode(seq, TEXT) == right


def test_two_blocks_in_the_wrong_order_change_the_text():
    right = answer(prompt(400), 1 + TEXT)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        stub = Stub(num_blocks=16, num_states=2)
        seq, _ = stub.receive(*cold(400))
        table = seq.block_table
        table[a], table[b] = table[b], table[a]
        assert stub.decode(seq, TEXT) != right


@pytest.mark.parametrize("num_tokens", [1, 100, 127, 129, 300])
def test_bytes_beyond_the_valid_rows_do_not_matter(num_tokens: int):
    source, first = cold(num_tokens)
    stub = Stub(num_blocks=16, num_states=2)
    seq, _ = stub.receive(source, first)
    stub.memory.kv.blocks[seq.block_table[-1], num_tokens % BLOCK_TOKENS * 16 :] = DIRT
    assert stub.decode(seq, 300) == source.decode(first, 300)


@pytest.mark.parametrize("together", [False, True])
def test_decoding_never_reads_a_row_that_it_did_not_write(*, together: bool):
    stub = Stub(num_blocks=200, num_states=60)
    seqs = [stub.receive(*cold(num_tokens))[0] for num_tokens in (1, 127, 128, 129) for _ in range(10)]
    for seq in seqs:
        lease = stub.memory.allocate(1)
        assert lease is not None
        seq.block_table.extend(lease.blocks)
        stub.memory.kv.blocks[
            seq.block_table[-2], seq.num_prompt_tokens % BLOCK_TOKENS * 16 or LAYOUT.block_bytes :
        ] = DIRT
        stub.memory.kv.blocks[seq.block_table[-1]] = DIRT
    for _ in range(TEXT):
        for batch in [seqs] if together else [[seq] for seq in seqs]:
            stub.step(batch)
    assert all(seq.output == answer(prompt(seq.num_prompt_tokens), 1 + TEXT) for seq in seqs)


@pytest.mark.parametrize("num_tokens", [1, 127, 128, 129, 256, 300])
def test_a_handoff_by_copying_bytes_changes_nothing(num_tokens: int):
    source, first = cold(num_tokens)
    stub = Stub(num_blocks=32, num_states=4)
    stub.memory.allocate(5)
    seq, _ = stub.receive(source, first)
    assert seq.block_table != first.block_table
    assert stub.decode(seq, 300) == source.decode(first, 300) == answer(prompt(num_tokens), 301)
    assert stub.rows_of(seq)[: 16 * seq.num_tokens] == source.rows_of(first)[: 16 * seq.num_tokens]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(2, 60))
def test_tokens_do_not_depend_on_the_batch(seed: int, num_seqs: int):
    rng = random.Random(seed)
    stub = Stub(num_blocks=4 * num_seqs, num_states=num_seqs)
    lengths = [rng.choice([1, 60, 126, 127, 128, 129, 250, 256, 300]) for _ in range(num_seqs)]
    seqs = []
    for number, num_tokens in enumerate(lengths):
        seq, _ = stub.admit(prompt(num_tokens, number), seed=rng.getrandbits(64))
        seqs.append(seq)
        stub.prefill(seq)
    for _ in range(20):
        stub.step(rng.sample(seqs, rng.randint(1, num_seqs)))
    for number, seq in enumerate(seqs):
        assert seq.output == answer(prompt(lengths[number], number), len(seq.output), seq.seed)


def test_a_few_and_many_leave_the_same_bytes():
    ids = [prompt(100 + number, number) for number in range(40)]
    few, many = Stub(num_states=40, num_blocks=120), Stub(num_states=40, num_blocks=120)
    pairs = []
    for number, one in enumerate(ids):
        pair = (few.admit(one, seed=number)[0], many.admit(one, seed=number)[0])
        few.prefill(pair[0])
        many.prefill(pair[1])
        pairs.append(pair)
    for _ in range(TEXT):
        for alone, _ in pairs:
            few.step([alone])
        many.step([together for _, together in pairs])
    assert [a.output for a, _ in pairs] == [b.output for _, b in pairs]
    assert [few.rows_of(a) + few.state_of(a) for a, _ in pairs] == [
        many.rows_of(b) + many.state_of(b) for _, b in pairs
    ]


class NoDigest(StubRunner):
    """A runner whose digest is 0, by a chance of 2^-64."""

    def _digest(self, seq: Sequence) -> int:
        return 0


def test_a_digest_of_zero_is_a_digest():
    def texts(*, together: bool) -> list[list[int]]:
        stub = Stub(num_states=40, num_blocks=120, runner=NoDigest)
        seqs = [stub.admit(prompt(100, number), seed=number)[0] for number in range(40)]
        for seq in seqs:
            stub.prefill(seq)
        for _ in range(TEXT):
            for batch in [seqs] if together else [[seq] for seq in seqs]:
                stub.step(batch)
            assert all(any(stub.state_of(seq)[-8:]) for seq in seqs)  # taken, once and for all
        return [seq.output for seq in seqs]

    assert texts(together=True) == texts(together=False)


@pytest.mark.parametrize("seed", [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_any_seed_of_64_bits_gives_its_own_text(seed: int):
    text = answer(prompt(200), 40, seed)
    assert text == answer(prompt(200), 40, seed)
    assert text != answer(prompt(200), 40, seed ^ 1)
    stub = Stub(num_blocks=120, num_states=40)
    seqs = [stub.admit(prompt(200), seed=seed)[0] for _ in range(40)]
    for seq in seqs:
        stub.prefill(seq)
    for _ in range(39):
        stub.step(seqs)
    assert all(seq.output == text for seq in seqs)


def test_every_prompt_token_and_the_length_matter():
    ids = prompt(200)
    texts = {tuple(answer(ids[:length], TEXT)) for length in (1, 2, 128, 199, 200)}
    for position in range(200):
        changed = ids.copy()
        changed[position] += 1
        texts.add(tuple(answer(changed, TEXT)))
    assert len(texts) == 205


def test_the_first_tokens_say_what_answers():
    vocabulary = load_vocabulary()
    vocab = OutputVocab(vocabulary)
    text = answer(prompt(300), 40)
    assert b"".join(map(vocab.token_bytes, text[: len(BANNER)])) == b"[stub engine]"
    assert tuple(text[: len(BANNER)]) == BANNER


def test_tokens_are_ordinary_text():
    vocab = OutputVocab(load_vocabulary())
    assert not vocab.added_ids & set(range(FIRST_WORD, FIRST_WORD + NUM_WORDS))
    text = answer(prompt(300), 2_000)[len(BANNER) :]
    assert all(FIRST_WORD <= token < FIRST_WORD + NUM_WORDS for token in text)
    assert len(set(text)) > 1_900
    assert all(type(token) is int for token in text)


def test_chaos_spoils_as_many_prompts_as_it_was_told():
    stub = Stub(num_blocks=16, num_states=4)
    runner = StubRunner(stub.memory.kv, StubOptions(flip_blocks=2))
    seq, _ = stub.admit(prompt(200))
    stub.prefill(seq)
    rows = [stub.rows_of(seq)]
    for _ in range(3):
        runner.flip(seq)
        rows.append(stub.rows_of(seq))
    assert rows[0] != rows[1]
    assert rows[0] == rows[2] == rows[3]  # flipped back, then left alone
