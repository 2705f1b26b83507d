"""Rows of a prefill chunk: consecutive positions of one prompt. Letters as in `rows`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.index_scores import index_scores
from stages.engine.interface import Sequence
from stages.engine.torch.kv_bytes import Ints, KVBytes, Places
from stages.engine.torch.rows import Rows, Selection


class PrefillRows:
    """Positions [start, end) of one prompt. `seen_from`: window keys before it are not visible."""

    def __init__(self, kv: KVBytes, seq: Sequence, start: int, end: int, seen_from: int) -> None:
        self.kv, self.seq, self.start, self.end, self.seen_from = kv, seq, start, end, seen_from
        self.positions = torch.arange(start, end)
        self.table = np.array(seq.block_table, dtype=np.int64)
        window = kv.config.window
        self._before = np.arange(start - window + 1, start)
        self._seen = (self.positions.unsqueeze(1) + torch.arange(1 - window, 1)) >= seen_from
        self._selection = Selection(kv.config)
        self._main: dict[int, Tensor] = {}
        self._chosen: tuple[Tensor, Tensor] | None = None

    def window_keys(self, layer: int, packed: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Windows are overlapping views of one array: the ring before the chunk, then the chunk."""
        slot = np.full(1, self.seq.state_slot)
        keys = torch.cat([self.kv.read_ring(layer, slot, self._before), values])
        size = min(self.end - self.start, self.kv.config.keep)
        last = np.arange(self.end - size, self.end)
        self.kv.write_ring(layer, self.seq.state_slot, last, packed[len(packed) - size :])
        step, width = keys.stride(0), keys.shape[1]
        shape = (self.end - self.start, self.kv.config.window, width)
        return keys.as_strided(shape, (step, step, 1)), self._seen

    def written(self) -> slice:
        """Rows from the prefix hit on: what lies below is shared and never written."""
        return slice(min(max(self.seq.plan.hit_tokens - self.start, 0), self.end - self.start), self.end - self.start)

    def places(self, source: int) -> Places:
        """In the blocks of this prompt."""
        return self._places(source, np.arange(self.start + self.written().start, self.end))

    def pairs(self, source: int, opened: Tensor) -> tuple[Tensor, Places]:
        """The first token of a pair may have come with an earlier chunk."""
        first = self.start + self.written().start
        slot = np.array([self.seq.state_slot])
        if first % 2:
            opened = torch.cat([self.kv.read_open(source, slot), opened])
            first -= 1
        groups = len(opened) // 2
        # the newest first token of a pair, open or closed: so the state's bytes depend on the tokens alone
        newest = (len(opened) - 1) // 2 * 2
        self.kv.write_open(source, slot, opened[newest : newest + 1])
        entries = np.arange(first // 2, first // 2 + groups)
        return opened[: 2 * groups].view(groups, 2, opened.shape[1]), self._places(source, entries)

    def _places(self, source: int, entries: Ints) -> Places:
        per_block = self.kv.entries_per_block(source)
        return Places(
            blocks=self.table[entries // per_block],
            slots=entries % per_block,
            positions=entries * self.kv.config.ratios[source],
        )

    def choose(self, layer: int, q: Tensor, weights: Tensor) -> None:
        """All rows against the entries that the chunk's end can see."""
        config = self.kv.config
        source, ratio = config.kv_source(layer), config.ratios[layer]
        entries = self.end // ratio
        scores = index_scores(q, weights, self.kv.index_keys(source, self.table, entries))
        index = self._selection.select(layer, scores, (self.positions + 1) // ratio)
        if source not in self._main:
            self._main[source] = self.kv.main_rows(source, self.table, entries)
        keys = self._main[source].index_select(0, (index + 1).flatten())  # row 0 is the zero row of -1
        self._chosen = keys.view(*index.shape, -1), index >= 0

    def chosen(self) -> tuple[Tensor, Tensor]:
        """Of the last index layer."""
        if self._chosen is None:
            raise LookupError("no layer has chosen entries yet")
        return self._chosen

    def kept(self) -> tuple[Rows, slice] | None:
        """Rows from the decoder cut on; their window sees nothing before the cut."""
        cut = max(0, self.seq.num_prompt_tokens - self.kv.config.keep)
        first = max(self.start, cut)
        if first >= self.end:
            return None
        rows = PrefillRows(self.kv, self.seq, first, self.end, cut)
        return rows, slice(first - self.start, self.end - self.start)
