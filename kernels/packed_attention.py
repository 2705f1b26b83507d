"""Sparse attention of decode rows that reads keys as they lie in memory: packed, in rings and blocks.

    keys(t) = ring rows of positions max(first_t, p_t - W + 1) .. p_t, and main rows of the entries index_t (-1: none)
    entry e of a sequence lies in block table_t[e // E], slot e mod E; position p in ring slot p mod R
    o = the attention of `sparse_attention` over them

q: [T, H, d]; ring: [S, R, d + d/32] uint8 (Q8 rows), states and positions and first: [T] int64; sink: [H] fp32;
main: [P, E, d/2 + d/16] uint8 (Q4 rows), index: [T, K] int64, tables: [T, B] int64 -> o [T, H, d] fp32. Rows of
bytes lie together, all other strides are free. Hidden rows may hold anything. The reference unpacks W + K rows of
fp32, 4 d bytes each, and reads them back; the kernel reads 1 + 1/32 or 1/2 + 1/16 bytes per channel once per group
of heads. All packed values are exact in bf16. Tolerances as in `sparse_attention`, and one order of sums per row.
No split over the keys: a row has H/16 programs, enough to fill a GPU from a batch of some forty rows on.
Source: facts-model 3.1 and 7.1; 14 (kernel 9).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.launch import Pointer, Scalar, Tile, constexpr, dot_in_bf16, kernel, power_of_two, tiles, tl
from kernels.quant_fp4 import e2m1_value, unpack_main
from kernels.quant_fp8 import e4m3_value, exponent_scale, unpack_q8
from kernels.sparse_attention import (
    GROUP,
    RESOURCES,
    STEP,
    attend_tile,
    load_heads,
    sparse_attention,
    start_heads,
    store_heads,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Where the window rows of each query are. size: W; the rest as above."""

    ring: Tensor
    states: Tensor
    positions: Tensor
    first: Tensor
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Where the selected main rows of each query are; as above."""

    main: Tensor
    index: Tensor
    tables: Tensor


def packed_attention(q: Tensor, window: Window, sink: Tensor, chosen: Chosen | None = None) -> Tensor:
    """The attention output of every row."""
    if q.is_cuda:
        return packed_attention_triton(q, window, sink, chosen)
    keys = _window_keys(window)
    return sparse_attention(q, *keys, sink, *(_chosen_keys(chosen) if chosen else ()))


def _window_keys(w: Window) -> tuple[Tensor, Tensor]:
    at = w.positions.unsqueeze(1) + torch.arange(1 - w.size, 1)
    seen = at >= w.first.clamp_min(0).unsqueeze(1)
    rows = w.ring[w.states.unsqueeze(1), at % w.ring.shape[1]]
    return unpack_q8(rows).masked_fill_(~seen.unsqueeze(2), 0), seen


def _chosen_keys(c: Chosen) -> tuple[Tensor, Tensor]:
    per_block, entry = c.main.shape[1], c.index.clamp_min(0)
    rows = c.main[c.tables.gather(1, entry // per_block), entry % per_block]
    seen = c.index >= 0
    return unpack_main(rows).masked_fill_(~seen.unsqueeze(2), 0), seen


@kernel
def _attend_ring(
    q: Tile, row: Tile, window: Tile, shape: Tile, state: Tile, step: constexpr, channels: constexpr
) -> Tile:
    """All window rows, `_ring_arguments` of the launch, after what `state` (top, total, out) has seen."""
    ring, states, positions, firsts, size, slots, state_pitch, pitch = window
    width, scale = shape
    top, total, out = state
    ring += tl.load(states + row) * state_pitch
    position, first = tl.load(positions + row).to(tl.int32), tl.maximum(tl.load(firsts + row).to(tl.int32), 0)
    channel = tl.arange(0, channels)[None, :]
    for start in range(0, size, step):
        at = position - size + 1 + start + tl.arange(0, step)
        seen = (at >= first) & (at <= position)
        line = ring + ((at % slots).to(tl.int64) * pitch)[:, None]
        mask = seen[:, None] & (channel < width)
        code = tl.load(line + channel, mask=mask, other=0).to(tl.int32)
        exponent = tl.load(line + width + channel // 32, mask=mask, other=0).to(tl.int32)
        keys = (e4m3_value(code) * exponent_scale(exponent)).to(q.dtype)
        top, total, out = attend_tile(q, keys, seen, scale, top, total, out)
    return top, total, out


@kernel
def _attend_main(
    q: Tile, row: Tile, chosen: Tile, shape: Tile, state: Tile, step: constexpr, channels: constexpr
) -> Tile:
    """All selected rows, `_main_arguments` of the launch, after what `state` has seen."""
    main, index, tables, count, per_block, block_pitch, pitch, index_pitch, table_pitch = chosen
    width, scale = shape
    top, total, out = state
    channel = tl.arange(0, channels)[None, :]
    for start in range(0, count, step):
        at = start + tl.arange(0, step)
        entry = tl.load(index + row * index_pitch + at, mask=at < count, other=-1).to(tl.int32)
        seen = entry >= 0
        block = tl.load(tables + row * table_pitch + entry // per_block, mask=seen, other=0)
        line = main + (block * block_pitch + entry % per_block * pitch)[:, None]
        mask = seen[:, None] & (channel < width)
        code = tl.load(line + channel // 2, mask=mask, other=0).to(tl.int32) >> (channel % 2 * 4)
        scale_code = tl.load(line + width // 2 + channel // 16, mask=mask, other=0).to(tl.int32)
        keys = (e2m1_value(code) * e4m3_value(scale_code)).to(q.dtype)
        top, total, out = attend_tile(q, keys, seen, scale, top, total, out)
    return top, total, out


@kernel
def _packed_attention(  # noqa: PLR0917  three arrays, two parts, sizes; then the tile
    q: Pointer, sink: Pointer, out: Pointer, window: Tile, chosen: Tile, heads: Scalar, shape: Tile,
    group: constexpr, channels: constexpr, step: constexpr, in_bf16: constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    query = load_heads(q, row, heads, shape[0], group, channels, in_bf16)
    state = start_heads(sink, heads, group, channels)
    state = _attend_ring(query, row, window, shape, state, step, channels)
    state = _attend_main(query, row, chosen, shape, state, step, channels)
    store_heads(out, state, row, heads, shape[0], group)


def packed_attention_triton(q: Tensor, window: Window, sink: Tensor, chosen: Chosen | None = None) -> Tensor:
    """`packed_attention` by its kernel, for fp32 or bf16 q."""
    (rows, heads, width), q = q.shape, q.contiguous()
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    _packed_attention[(rows, tiles(heads, GROUP))](
        q, sink, out, _ring_arguments(window), _main_arguments(chosen, window.positions), heads, (width, width**-0.5),
        group=GROUP, channels=max(16, power_of_two(width)), step=STEP, in_bf16=dot_in_bf16(q), **RESOURCES,
    )  # fmt: skip
    return out


def _ring_arguments(w: Window) -> tuple[Tensor | int, ...]:
    return w.ring, w.states, w.positions, w.first, w.size, w.ring.shape[1], *w.ring.stride()[:2]


def _main_arguments(c: Chosen | None, unused: Tensor) -> tuple[Tensor | int, ...]:
    if c is None:
        return unused, unused, unused, 0, 1, 0, 0, 0, 0
    index = c.index.contiguous()
    pitches = *c.main.stride()[:2], index.stride(0), c.tables.stride(0)
    return c.main, index, c.tables, index.shape[1], c.main.shape[1], *pitches
