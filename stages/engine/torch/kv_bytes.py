"""Reading and writing KV rows in an engine's memory, in the layout's byte formats.

Nothing is cached here: what is read is what lies in the memory, so copied blocks and states behave like computed
ones. Letters: G entries written at once, N entries of a sequence, B sequences, k chosen entries, d head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.quant_fp4 import unpack_index, unpack_main
from kernels.quant_fp8 import unpack_q8
from kv.layout import BLOCK_TOKENS, Kind, Layout
from stages.engine.interface import KVMemory
from stages.engine.torch.config import TorchConfig
from stages.engine.torch.kv_layout import index_name, main_name, open_name, ring_name

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class MemoryShapeError(ValueError):
    """The memory does not have the layout's block and state sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where entries go. blocks: [G] pool blocks, slots: [G] entries in them, positions: [G] of their first token."""

    blocks: Ints
    slots: Ints
    positions: Ints


class KVBytes:
    """Views of one memory, by layer."""

    def __init__(self, config: TorchConfig, layout: Layout, memory: KVMemory) -> None:
        """Raises: MemoryShapeError."""
        for name, raw, size in (
            ("blocks", memory.blocks, layout.block_bytes),
            ("states", memory.states, layout.state_bytes),
        ):
            if raw.dtype != np.uint8 or raw.ndim != 2 or raw.shape[1] != size:
                raise MemoryShapeError(f"{name} must be uint8 [any, {size}], not {raw.dtype} {list(raw.shape)}")
        self.config = config
        self.states = memory.states
        self.stored_bytes = layout.stored_state_bytes
        self.rings = [_view(memory, layout, ring_name(layer)) for layer in range(config.layers)]
        sources = config.kv_sources
        self.open = {s: _view(memory, layout, open_name(s)) for s in sources if config.ratios[s] == 2}
        self.main = {s: _view(memory, layout, main_name(s)) for s in sources}
        self.index = {s: _index_views(memory, layout, s, config) for s in sources}

    def entries_per_block(self, source: int) -> int:
        """Entries that 128 tokens make in that layer."""
        return BLOCK_TOKENS // self.config.ratios[source]

    def reset_state(self, slot: int, *, keep_stored: bool) -> None:
        """Forget whatever request had the slot: zero bytes decode to finite values, which masks then hide.

        `keep_stored`: the stored part has just been restored from a snapshot and stays.
        """
        self.states[slot, self.stored_bytes if keep_stored else 0 :] = 0

    def read_ring(self, layer: int, slots: Ints, positions: Ints) -> Tensor:
        """Window rows of `positions` [..., W] in state `slots` (broadcast against them): [..., W, d] fp32."""
        ring = self.rings[layer]
        return unpack_q8(torch.from_numpy(ring[slots, positions % ring.shape[1]]))

    def write_ring(self, layer: int, slots: Ints | int, positions: Ints, rows: Tensor) -> None:
        """Store packed rows [T, bytes]; of rows that share a slot the caller passes only the last."""
        ring = self.rings[layer]
        ring[slots, positions % ring.shape[1]] = rows.numpy()

    def read_open(self, source: int, slots: Ints) -> Tensor:
        """Values and gates of the open tokens: [B, 2 d] fp32."""
        return torch.from_numpy(self.open[source][slots, 0].view(np.float32))

    def write_open(self, source: int, slots: Ints, rows: Tensor) -> None:
        """Store values and gates [B, 2 d] fp32 of tokens whose pair is open."""
        self.open[source][slots, 0] = rows.numpy().view(np.uint8)

    def write_entries(self, source: int, at: Places, main: Tensor, codes: Tensor, exponents: Tensor) -> None:
        """Store G entries of the global KV: packed main rows, and index codes with their scales."""
        self.main[source][at.blocks, at.slots] = main.numpy()
        index_codes, index_scales = self.index[source]
        index_codes[at.blocks, at.slots] = codes.numpy()
        index_scales[at.blocks, at.slots] = exponents.numpy()

    def index_keys(self, source: int, table: Ints, entries: int) -> Tensor:
        """The first N index keys of a sequence: [N, index_head_dim] fp32."""
        blocks = table[: -(-entries // self.entries_per_block(source))]
        codes, scales = (_rows(view[blocks], entries) for view in self.index[source])
        return unpack_index(codes, scales)

    def main_rows(self, source: int, table: Ints, entries: int) -> Tensor:
        """A zero row, then the first N main rows of a sequence: [1 + N, d] fp32."""
        blocks = table[: -(-entries // self.entries_per_block(source))]
        values = unpack_main(_rows(self.main[source][blocks], entries))
        return torch.cat([values.new_zeros(1, self.config.head_dim), values])

    def chosen_rows(self, source: int, tables: list[Ints], index: Ints) -> Tensor:
        """Main rows by entry number, one sequence a row: index [B, k] -> [B, k, d] fp32.

        -1 reads entry 0, which every decoding sequence has; the caller hides it.
        """
        per_block = self.entries_per_block(source)
        entry = np.maximum(index, 0)
        blocks = np.stack([table[row // per_block] for table, row in zip(tables, entry, strict=True)])
        return unpack_main(torch.from_numpy(self.main[source][blocks, entry % per_block]))


def _view(memory: KVMemory, layout: Layout, name: str) -> Bytes:
    """[number of blocks or states, entries, bytes], sharing memory."""
    part = layout.component(name)
    raw = memory.blocks if part.kind is Kind.PAGED else memory.states
    start = layout.offset(name)
    return _shared(raw[:, start : start + part.num_bytes], part.entries, part.entry_bytes)


def _index_views(memory: KVMemory, layout: Layout, source: int, config: TorchConfig) -> tuple[Bytes, Bytes]:
    """Codes and scales of one source's index keys; a block holds all its codes before its scales."""
    name = index_name(source)
    part, start = layout.component(name), layout.offset(name)
    half = config.index_head_dim // 2
    middle, end = start + part.entries * half, start + part.num_bytes
    codes = _shared(memory.blocks[:, start:middle], part.entries, half)
    return codes, _shared(memory.blocks[:, middle:end], part.entries, part.entry_bytes - half)


def _shared(raw: Bytes, entries: int, size: int) -> Bytes:
    step = raw.strides[0]
    return np.lib.stride_tricks.as_strided(raw, (len(raw), entries, size), (step, size, 1))


def _rows(blocks: Bytes, entries: int) -> Tensor:
    return torch.from_numpy(blocks.reshape(-1, blocks.shape[-1])[:entries])
