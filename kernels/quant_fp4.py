"""Q4 and Q4i: e2m1 values, two per byte, for the main KV and for index queries and keys.

    Q4i  block 32: amax = max(|x|, 6 * 2^-126);  scale = 2^ceil(log2(amax / 6))  (ue8m0 byte)
    Q4   block 16: scale = e4m3(clip(max|x| / 6, 2^-9, 448))                     (e4m3 byte)
    code = e2m1(x / scale): the grid 0 .5 1 1.5 2 3 4 6, ties to the even code;  value = code * scale

x: [..., n] fp32. Packed: channel 2i in the low nibble of byte i, the sign in bit 3: [..., n/2] uint8. Bytes of
one row: n/2 packed codes, then n/block scales.
The Triton kernels have the reference's bits; they load even and odd channels apart, so packing is one shift.
Source: facts-model 7 (the grid, ties, both scales) and 7.1 (widths).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.launch import Pointer, Scalar, Tile, constexpr, kernel, tiles, tl
from kernels.quant_fp8 import (
    e4m3_code,
    e4m3_value,
    exponent_scale,
    exponent_value,
    inverse_scale,
    power_of_two_scale,
    scale_exponent,
    split_last,
)

INDEX_BLOCK = 32  # Source: facts-model 7
MAIN_BLOCK = 16  # Source: facts-model 7
TOP = 6.0  # the largest e2m1 value
LEAST_INDEX_AMAX = 6 * 2.0**-126  # keeps the scale a normal number. Source: facts-model 7
LEAST_MAIN_SCALE, MOST_MAIN_SCALE = 2.0**-9, 448.0  # what e4m3 can hold above zero
GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _boundaries() -> Tensor:
    """Where the code steps up, for a strict comparison: a step to an even code includes its boundary."""
    grid = torch.tensor(GRID)
    middle = (grid[:-1] + grid[1:]) / 2
    to_even = torch.arange(1, len(GRID)) % 2 == 0
    return torch.where(to_even, torch.nextafter(middle, torch.zeros_like(middle)), middle)


_BOUNDARIES = _boundaries()
_VALUES = torch.cat([torch.tensor(GRID), -torch.tensor(GRID)])
# both values of a byte as one 8-byte element: one gather per byte instead of two
_PAIRS = torch.stack([_VALUES.repeat(16), _VALUES.repeat_interleave(16)], -1).contiguous().view(torch.float64).flatten()


def e2m1_codes(y: Tensor) -> Tensor:
    """4-bit codes of y, |y| <= 6 or clipped to it: uint8 of y's shape."""
    codes = torch.bucketize(y.abs(), _BOUNDARIES, out_int32=True)
    return codes.add_((y < 0).int().mul_(8)).to(torch.uint8)


def pack_nibbles(codes: Tensor) -> Tensor:
    """[..., n] codes -> [..., n/2] bytes, the even channel in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Grid values of packed codes: [..., n/2] uint8 -> [..., n] fp32."""
    pairs = _PAIRS.index_select(0, packed.reshape(-1).int())
    return pairs.view(torch.float32).view(*packed.shape[:-1], packed.shape[-1] * 2)


def pack_index(x: Tensor) -> tuple[Tensor, Tensor]:
    """Q4i: (codes [..., n/2] uint8, scale exponents [..., n/32] uint8)."""
    if x.is_cuda:
        return pack_index_triton(x)
    blocks = split_last(x, INDEX_BLOCK)
    scale = power_of_two_scale(blocks.abs().amax(-1, keepdim=True).clamp_min_(LEAST_INDEX_AMAX).div_(TOP))
    exponents = (scale.view(torch.int32) >> 23).to(torch.uint8).squeeze(-1)
    return pack_nibbles(e2m1_codes(blocks / scale).flatten(-2)), exponents


def unpack_index(codes: Tensor, exponents: Tensor) -> Tensor:
    """Inverse of `pack_index` up to rounding: [..., n] fp32."""
    if codes.is_cuda:
        return unpack_index_triton(codes, exponents)
    blocks = split_last(unpack_nibbles(codes), INDEX_BLOCK)
    return blocks.mul_(exponent_value(exponents).unsqueeze(-1)).flatten(-2)


def pack_main(x: Tensor) -> Tensor:
    """Q4: rows of bytes [..., n/2 + n/16] uint8."""
    if x.is_cuda:
        return pack_main_triton(x)
    blocks = split_last(x, MAIN_BLOCK)
    wanted = (blocks.abs().amax(-1) / TOP).clamp_(LEAST_MAIN_SCALE, MOST_MAIN_SCALE)
    scale = wanted.to(torch.float8_e4m3fn)
    codes = e2m1_codes(blocks / scale.float().unsqueeze(-1))
    return torch.cat([pack_nibbles(codes.flatten(-2)), scale.view(torch.uint8)], -1)


def unpack_main(rows: Tensor) -> Tensor:
    """Values of `pack_main` rows: [..., n] fp32."""
    if rows.is_cuda:
        return unpack_main_triton(rows)
    n = rows.shape[-1] * 16 // 9  # n/2 + n/16 bytes
    scale = rows[..., n // 2 :].contiguous().view(torch.float8_e4m3fn).float()
    return split_last(unpack_nibbles(rows[..., : n // 2]), MAIN_BLOCK).mul_(scale.unsqueeze(-1)).flatten(-2)


def fake_index(x: Tensor) -> Tensor:
    """What a reader of the Q4i-quantised x sees: fp32 of x's shape."""
    return unpack_index(*pack_index(x))


@kernel
def e2m1_code(y: Tile) -> Tile:
    """int32 codes of fp32 y; each comparison is one step of the grid, inclusive where the step is to an even code."""
    a = tl.abs(y)
    low = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    high = (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    return low + high + (y < 0).to(tl.int32) * 8


@kernel
def e2m1_value(code: Tile) -> Tile:
    """fp32 values of int32 codes 0..15."""
    size = code & 7
    normal = ((size << 22) + 0x3F000000).to(tl.float32, bitcast=True)
    value = tl.where(size < 2, size.to(tl.float32) * 0.5, normal).to(tl.int32, bitcast=True)
    return (value | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@kernel
def index_exponent(amax: Tile) -> Tile:
    """The Q4i scale byte of blocks with that largest magnitude; the least one is 6 * 2^-126."""
    return scale_exponent(tl.div_rn(tl.maximum(amax, 7.052966104933725e-38), 6.0))


@kernel
def main_scale_code(amax: Tile) -> Tile:
    """The Q4 scale byte, as int32, of blocks with that largest magnitude."""
    return e4m3_code(tl.minimum(tl.maximum(tl.div_rn(amax, 6.0), 0.001953125), 448.0))


@kernel
def _pack_index(x: Pointer, codes: Pointer, exponents: Pointer, num_blocks: Scalar, step: constexpr) -> None:
    block = tl.program_id(0).to(tl.int64) * step + tl.arange(0, step)
    there = block < num_blocks
    at = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    even = tl.load(x + at * 2, mask=there[:, None], other=0).to(tl.float32)
    odd = tl.load(x + at * 2 + 1, mask=there[:, None], other=0).to(tl.float32)
    exponent = index_exponent(tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 1))
    inverse = inverse_scale(exponent)[:, None]
    code = e2m1_code(even * inverse) | (e2m1_code(odd * inverse) << 4)
    tl.store(codes + at, code.to(tl.uint8), mask=there[:, None])
    tl.store(exponents + block, exponent.to(tl.uint8), mask=there)


@kernel
def _unpack_index(codes: Pointer, exponents: Pointer, values: Pointer, num_blocks: Scalar, step: constexpr) -> None:
    block = tl.program_id(0).to(tl.int64) * step + tl.arange(0, step)
    there = block < num_blocks
    at = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    code = tl.load(codes + at, mask=there[:, None], other=0).to(tl.int32)
    scale = exponent_scale(tl.load(exponents + block, mask=there, other=0).to(tl.int32))[:, None]
    tl.store(values + at * 2, e2m1_value(code) * scale, mask=there[:, None])
    tl.store(values + at * 2 + 1, e2m1_value(code >> 4) * scale, mask=there[:, None])


@kernel
def _pack_main(x: Pointer, rows: Pointer, num_blocks: Scalar, per_row: Scalar, step: constexpr) -> None:
    block = tl.program_id(0).to(tl.int64) * step + tl.arange(0, step)
    lane, there = tl.arange(0, 8)[None, :], block < num_blocks
    at = block[:, None] * 16 + lane * 2
    even = tl.load(x + at, mask=there[:, None], other=0).to(tl.float32)
    odd = tl.load(x + at + 1, mask=there[:, None], other=0).to(tl.float32)
    scale_code = main_scale_code(tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 1))
    scale = e4m3_value(scale_code)[:, None]
    code = e2m1_code(tl.div_rn(even, scale)) | (e2m1_code(tl.div_rn(odd, scale)) << 4)
    place = block % per_row
    row = rows + block // per_row * per_row * 9
    tl.store(row[:, None] + place[:, None] * 8 + lane, code.to(tl.uint8), mask=there[:, None])
    tl.store(row + per_row * 8 + place, scale_code.to(tl.uint8), mask=there)


@kernel
def _unpack_main(rows: Pointer, values: Pointer, num_blocks: Scalar, per_row: Scalar, step: constexpr) -> None:
    block = tl.program_id(0).to(tl.int64) * step + tl.arange(0, step)
    lane, there = tl.arange(0, 8)[None, :], block < num_blocks
    place = block % per_row
    row = rows + block // per_row * per_row * 9
    code = tl.load(row[:, None] + place[:, None] * 8 + lane, mask=there[:, None], other=0).to(tl.int32)
    scale = e4m3_value(tl.load(row + per_row * 8 + place, mask=there, other=0).to(tl.int32))[:, None]
    at = block[:, None] * 16 + lane * 2
    tl.store(values + at, e2m1_value(code) * scale, mask=there[:, None])
    tl.store(values + at + 1, e2m1_value(code >> 4) * scale, mask=there[:, None])


_STEP = 64  # blocks of a program: 4 or 8 KiB of fp32, not tuned


def pack_index_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    """`pack_index` by its kernel."""
    x, shape, blocks = x.contiguous(), x.shape[:-1], x.numel() // INDEX_BLOCK
    codes = torch.empty((*shape, x.shape[-1] // 2), dtype=torch.uint8, device=x.device)
    exponents = torch.empty((*shape, x.shape[-1] // INDEX_BLOCK), dtype=torch.uint8, device=x.device)
    _pack_index[(tiles(blocks, _STEP),)](x, codes, exponents, blocks, step=_STEP)
    return codes, exponents


def unpack_index_triton(codes: Tensor, exponents: Tensor) -> Tensor:
    """`unpack_index` by its kernel."""
    values = torch.empty((*codes.shape[:-1], codes.shape[-1] * 2), dtype=torch.float32, device=codes.device)
    blocks = exponents.numel()
    _unpack_index[(tiles(blocks, _STEP),)](codes.contiguous(), exponents.contiguous(), values, blocks, step=_STEP)
    return values


def pack_main_triton(x: Tensor) -> Tensor:
    """`pack_main` by its kernel."""
    x, per_row, blocks = x.contiguous(), x.shape[-1] // MAIN_BLOCK, x.numel() // MAIN_BLOCK
    rows = torch.empty((*x.shape[:-1], per_row * 9), dtype=torch.uint8, device=x.device)
    _pack_main[(tiles(blocks, _STEP),)](x, rows, blocks, per_row, step=_STEP)
    return rows


def unpack_main_triton(rows: Tensor) -> Tensor:
    """`unpack_main` by its kernel."""
    rows, per_row = rows.contiguous(), rows.shape[-1] // 9
    values = torch.empty((*rows.shape[:-1], per_row * MAIN_BLOCK), dtype=torch.float32, device=rows.device)
    blocks = values.numel() // MAIN_BLOCK
    _unpack_main[(tiles(blocks, _STEP),)](rows, values, blocks, per_row, step=_STEP)
    return values
