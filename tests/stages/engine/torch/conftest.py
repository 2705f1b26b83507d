"""A real engine on a tiny random checkpoint, and sequences for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

from kv.plan import plan
from stages.engine.interface import KVMemory, SamplingParams, Sequence
from stages.engine.torch.checkpoint import Checkpoint, read_checkpoint
from stages.engine.torch.random_checkpoint import tiny_checkpoint
from stages.engine.torch.runner import TorchRunner, model_card

GOLDEN = Path(__file__).parents[3] / "data" / "golden" / "tiny-a"
POISON = 0x7F  # NaN as an e4m3 code and as an e4m3 scale: whatever reads a byte it should not read is found out


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return read_checkpoint(tiny_checkpoint(tmp_path_factory.mktemp("checkpoints")))


@dataclass
class Engine:
    """One runner with its own poisoned memory, and a block allocator that never gives neighbours."""

    checkpoint: Checkpoint
    num_blocks: int = 96
    num_slots: int = 20
    _numbers: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.card = model_card(self.checkpoint)
        layout = self.card.layout
        self.memory = KVMemory(
            blocks=np.full((self.num_blocks, layout.block_bytes), POISON, np.uint8),
            states=np.full((self.num_slots, layout.state_bytes), POISON, np.uint8),
        )
        self.runner = TorchRunner(self.checkpoint, self.memory)
        self._free = list(np.random.default_rng(5).permutation(self.num_blocks))

    def sequence(
        self, n: int, *, prompt: int = 0, hit: int = 0, windows: int | None = None, temperature: float = 1.0
    ) -> Sequence:
        """A sequence of n tokens drawn from the stream `prompt`; blocks and slot are its own."""
        number = next(self._numbers)
        ids = np.random.default_rng(1000 + prompt).integers(3, self.card.vocab_size, n).astype(np.uint32)
        return Sequence(
            rid=f"{number + 17:032x}",
            attempt=3,
            choice=0,
            ids=ids,
            tail_ids=ids[-3:],
            num_prompt_tokens=n,
            plan=plan(
                n,
                hit,
                keep=self.card.keep_tokens,
                window=self.card.window_tokens,
                windows=self.card.replay_windows if windows is None else windows,
            ),
            block_table=[int(self._free.pop()) for _ in range((n + 80) // 128 + 1)],
            state_slot=number % self.num_slots,
            seed=0x9E00_0000_0000_0001 + prompt,
            sampling=SamplingParams(
                temperature=temperature, top_p=0.95, top_k=0, max_tokens=64, eos_ids=(1,), ignore_eos=True
            ),
        )

    def prefill(self, seq: Sequence, chunk: int = 256) -> int:
        token = None
        for start in range(seq.plan.replay_from, seq.num_prompt_tokens, chunk):
            assert token is None
            token = self.runner.prefill(seq, start, min(start + chunk, seq.num_prompt_tokens))
        assert token is not None
        seq.output.append(token)
        return token

    def decode(self, seqs: list[Sequence], steps: int) -> None:
        for _ in range(steps):
            for seq, token in zip(seqs, self.runner.decode(seqs), strict=True):
                seq.output.append(token)

    def kv_of(self, seq: Sequence) -> tuple[bytes, bytes]:
        """Every byte that a handoff moves: whole blocks in order, and the state."""
        return self.memory.blocks[seq.block_table].tobytes(), self.memory.states[seq.state_slot].tobytes()


@pytest.fixture
def engine(tiny: Checkpoint) -> Engine:
    return Engine(tiny)
