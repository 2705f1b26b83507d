"""Attention of one query row over its window and its selected entries, with a sink.

    s_hk = (q_h . K_k) d^-0.5;  p = softmax over the visible keys and sink_h;  o_h = sum_k p_hk K_k

One KV head: K = V. A row may appear in both parts and then counts twice. The sink only adds to the denominator.

q: [T, H, d]; window: [T, W, d] with seen_window [T, W] bool; chosen: [T, K, d] with seen_chosen [T, K] bool, or
None for layers without global KV; sink: [H] -> o [T, H, d], all fp32. Hidden keys must hold finite values.
Each row is its own product of constant shape, so its bits depend on nothing else.
The Triton kernel walks the keys in tiles of a fixed size with a running maximum, which starts at the sink; it does
not read hidden keys. Other order of sums, other bits: within 1e-5 of the largest |K| for fp32, 2e-2 for bf16 q.
Source: facts-model 3.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.launch import Pointer, Scalar, Tile, constexpr, dot_in_bf16, kernel, power_of_two, tiles, tl

_LANE = 16  # parts of a score row start at multiples of 64 bytes, as BLAS wants for repeatable bits


def _lanes(n: int) -> int:
    return -(-n // _LANE) * _LANE


def sparse_attention(
    q: Tensor,
    window: Tensor,
    seen_window: Tensor,
    sink: Tensor,
    chosen: Tensor | None = None,
    seen_chosen: Tensor | None = None,
) -> Tensor:
    """The attention output of every row."""
    if q.is_cuda:
        return sparse_attention_triton(q, window, seen_window, sink, chosen, seen_chosen)
    parts = (
        [(window, seen_window)]
        if chosen is None or seen_chosen is None
        else [(window, seen_window), (chosen, seen_chosen)]
    )
    starts = [_LANE]  # the sink comes first, alone in its lane
    for keys, _ in parts:
        starts.append(starts[-1] + _lanes(keys.shape[1]))
    scaled = q * q.shape[-1] ** -0.5
    scores = q.new_full((*q.shape[:2], starts[-1]), float("-inf"))
    scores[..., 0] = sink
    for (keys, seen), start in zip(parts, starts, strict=False):
        hidden = seen.logical_not().unsqueeze(1)
        scores[..., start : start + keys.shape[1]] = torch.bmm(scaled, keys.transpose(1, 2)).masked_fill_(
            hidden, float("-inf")
        )
    p = torch.softmax(scores, -1)
    out = torch.zeros_like(q)
    for (keys, _), start in zip(parts, starts, strict=False):
        out += torch.bmm(p[..., start : start + keys.shape[1]], keys)
    return out


@kernel
def attend_tile(q: Tile, keys: Tile, seen: Tile, scale: Scalar, top: Tile, total: Tile, out: Tile) -> Tile:
    """One more tile of keys [k, d] for q [h, d]: the new running maximum, sum of weights [h] and output [h, d]."""
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    scores = tl.where(seen[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    fade, p = tl.exp(top - new_top), tl.exp(scores - new_top[:, None])
    out = out * fade[:, None] + tl.dot(p.to(keys.dtype), keys, input_precision="ieee")
    return new_top, total * fade + tl.sum(p, 1), out


@kernel
def _attend_part(
    q: Tile, row: Tile, part: Tile, shape: Tile, state: Tile, step: constexpr, channels: constexpr
) -> Tile:
    """All keys of one part, `_part` of the launch, after what `state` (top, total, out) has seen."""
    keys, seen, count, row_pitch, pitch, seen_row_pitch, seen_pitch = part
    width, scale = shape
    top, total, out = state
    channel = tl.arange(0, channels)
    for start in range(0, count, step):
        at = start + tl.arange(0, step)
        shown = tl.load(seen + row * seen_row_pitch + at * seen_pitch, mask=at < count, other=0) != 0
        place = row * row_pitch + at.to(tl.int64)[:, None] * pitch + channel[None, :]
        tile = tl.load(keys + place, mask=shown[:, None] & (channel < width)[None, :], other=0).to(q.dtype)
        top, total, out = attend_tile(q, tile, shown, scale, top, total, out)
    return top, total, out


@kernel
def load_heads(
    q: Pointer, row: Tile, heads: Scalar, width: Scalar, group: constexpr, channels: constexpr, in_bf16: constexpr
) -> Tile:
    """This program's heads of one row of q [T, H, d], zeros where there is none: [group, channels]."""
    head, channel = tl.program_id(1) * group + tl.arange(0, group), tl.arange(0, channels)
    at = (row * heads + head)[:, None] * width + channel[None, :]
    tile = tl.load(q + at, mask=(head < heads)[:, None] & (channel < width)[None, :], other=0)
    return tile.to(tl.bfloat16) if in_bf16 else tile.to(tl.float32)


@kernel
def start_heads(sink: Pointer, heads: Scalar, group: constexpr, channels: constexpr) -> Tile:
    """(top, total, out) of this program's heads before any key: the sink has been seen and has no value."""
    head = tl.program_id(1) * group + tl.arange(0, group)
    top = tl.load(sink + head, mask=head < heads, other=0)
    return top, tl.full([group], 1.0, tl.float32), tl.zeros([group, channels], tl.float32)


@kernel
def store_heads(out: Pointer, state: Tile, row: Tile, heads: Scalar, width: Scalar, group: constexpr) -> None:
    """Write where `load_heads` would load, as fp32."""
    _, total, tile = state
    head, channel = tl.program_id(1) * group + tl.arange(0, group), tl.arange(0, tile.shape[1])
    at = (row * heads + head)[:, None] * width + channel[None, :]
    tl.store(out + at, tile / total[:, None], mask=(head < heads)[:, None] & (channel < width)[None, :])


@kernel
def _sparse_attention(  # noqa: PLR0917  three arrays, two parts, sizes; then the tile
    q: Pointer, sink: Pointer, out: Pointer, window: Tile, chosen: Tile, heads: Scalar, shape: Tile,
    group: constexpr, channels: constexpr, step: constexpr, in_bf16: constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    query = load_heads(q, row, heads, shape[0], group, channels, in_bf16)
    state = start_heads(sink, heads, group, channels)
    state = _attend_part(query, row, window, shape, state, step, channels)
    state = _attend_part(query, row, chosen, shape, state, step, channels)
    store_heads(out, state, row, heads, shape[0], group)


GROUP = 16  # heads of a program: the least side of a product; their output of 512 channels fills half the registers
STEP = 32  # keys of a tile, not tuned
RESOURCES = {"num_warps": 8, "num_stages": 1}  # for 512 channels: no register spills, 100 KiB of shared memory


def sparse_attention_triton(
    q: Tensor,
    window: Tensor,
    seen_window: Tensor,
    sink: Tensor,
    chosen: Tensor | None = None,
    seen_chosen: Tensor | None = None,
) -> Tensor:
    """`sparse_attention` by its kernel, for fp32 or bf16 q; keys of any float type, channels beside each other."""
    (rows, heads, width), q = q.shape, q.contiguous()
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    if chosen is None or seen_chosen is None:
        chosen, seen_chosen = window[:, :0], seen_window[:, :0]
    _sparse_attention[(rows, tiles(heads, GROUP))](
        q, sink, out, _part(window, seen_window), _part(chosen, seen_chosen), heads, (width, width**-0.5),
        group=GROUP, channels=max(16, power_of_two(width)), step=STEP, in_bf16=dot_in_bf16(q), **RESOURCES,
    )  # fmt: skip
    return out


def _part(keys: Tensor, seen: Tensor) -> tuple[Tensor | int, ...]:
    seen = seen.view(torch.uint8)
    return keys, seen, keys.shape[1], *keys.stride()[:2], *seen.stride()
