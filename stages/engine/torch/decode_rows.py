"""Rows of a decode step: the newest position of each of many sequences. Letters as in `rows`, B sequences."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from torch import Tensor

from kernels.index_scores import index_scores
from kv.layout import BLOCK_TOKENS
from stages.engine.interface import Sequence
from stages.engine.torch.kv_bytes import Ints, KVBytes, Places
from stages.engine.torch.rows import Rows, Selection


class DecodeRows:
    """The newest position of each of many sequences."""

    def __init__(self, kv: KVBytes, seqs: SequenceOf[Sequence]) -> None:
        self.kv = kv
        self.at = np.array([s.num_tokens - 1 for s in seqs], dtype=np.int64)
        self.positions = torch.from_numpy(self.at)
        self.slots = np.array([s.state_slot for s in seqs], dtype=np.int64)
        self.tables = [np.array(s.block_table, dtype=np.int64) for s in seqs]
        self._window = self.at[:, None] + np.arange(1 - kv.config.window, 1)
        self._seen = torch.from_numpy(self._window >= 0)
        self._selections = [Selection(kv.config) for _ in seqs]
        self._chosen: tuple[Tensor, Tensor] | None = None

    def window_keys(self, layer: int, packed: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Everything is read back from the rings, this step's rows included."""
        del values  # the packed rows are read back with the rest of the window
        self.kv.write_ring(layer, self.slots, self.at, packed)
        return self.kv.read_ring(layer, self.slots[:, None], self._window), self._seen

    def written(self) -> slice:
        """All rows."""
        return slice(0, len(self.at))

    def places(self, source: int) -> Places:
        """In the blocks of each sequence."""
        return self._places(source, np.arange(len(self.at)))

    def pairs(self, source: int, opened: Tensor) -> tuple[Tensor, Places]:
        """Odd positions close a pair, even ones open one."""
        opens, closes = np.flatnonzero(self.at % 2 == 0), np.flatnonzero(self.at % 2)
        first = self.kv.read_open(source, self.slots[closes])
        self.kv.write_open(source, self.slots[opens], opened[opens])
        return torch.stack([first, opened[closes]], 1), self._places(source, closes)

    def _places(self, source: int, rows: Ints) -> Places:
        ratio, per_block = self.kv.config.ratios[source], self.kv.entries_per_block(source)
        at = self.at[rows]
        blocks = [self.tables[row][p // BLOCK_TOKENS] for row, p in zip(rows, at, strict=True)]
        return Places(
            blocks=np.array(blocks, dtype=np.int64), slots=at // ratio % per_block, positions=at // ratio * ratio
        )

    def choose(self, layer: int, q: Tensor, weights: Tensor) -> None:
        """Sequence by sequence, each against its own entries."""
        config = self.kv.config
        source, ratio = config.kv_source(layer), config.ratios[layer]
        index = torch.cat([self._choose_one(layer, source, ratio, i, q, weights) for i in range(len(self.at))])
        self._chosen = self.kv.chosen_rows(source, self.tables, index.numpy()), index >= 0

    def _choose_one(self, layer: int, source: int, ratio: int, i: int, q: Tensor, weights: Tensor) -> Tensor:
        entries = (int(self.at[i]) + 1) // ratio
        keys = self.kv.index_keys(source, self.tables[i], entries)
        scores = index_scores(q[i : i + 1], weights[i : i + 1], keys)
        return self._selections[i].select(layer, scores, torch.tensor([entries]))

    def chosen(self) -> tuple[Tensor, Tensor]:
        """Of the last index layer."""
        if self._chosen is None:
            raise LookupError("no layer has chosen entries yet")
        return self._chosen

    def kept(self) -> tuple[Rows, slice]:
        """All rows."""
        return self, slice(0, len(self.at))
