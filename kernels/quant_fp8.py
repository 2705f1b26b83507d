"""Q8: e4m3 values with one power-of-two scale per 32 channels, for activations and sliding-window KV.

    amax = max(|x|, 1e-4);  scale = 2^ceil(log2(amax / 448))  (by exponent bits)
    code = e4m3(x / scale), ties to even;  value = code * scale

x: [..., n] fp32, n a multiple of 32. Bytes of one row: n codes, then n/32 scale exponents (ue8m0): [n + n/32].
No clip is needed: amax / 448 rounded to fp32 is never below a power of two that amax exceeds 448-fold.
The Triton kernels have the reference's bits (a zero's sign in `values` aside): the division that decides the scale
is correctly rounded, dividing by a power of two is exact, and codes are made with integers, which no cast of some
GPU or of the interpreter can round differently.
Source: facts-model 7 and 7.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.launch import Pointer, Scalar, Tile, constexpr, kernel, tiles, tl

BLOCK = 32  # channels per scale. Source: facts-model 7
TOP = 448.0  # the largest e4m3 value
LEAST_AMAX = 1e-4  # Source: facts-model 7
_MIN_NORMAL = 2.0**-6  # of e4m3; below it the step stays 2^-9
_ROUNDER = 1.5 * 2.0**20  # added to y/2^e it pushes all but three mantissa bits out of fp32


def power_of_two_scale(x: Tensor) -> Tensor:
    """The smallest power of two >= x, for normal positive fp32 x."""
    return x.view(torch.int32).add(0x7FFFFF).bitwise_and_(0x7F800000).view(torch.float32)


def split_last(x: Tensor, size: int) -> Tensor:
    """The last axis in blocks: [..., n] -> [..., n / size, size]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = split_last(x, BLOCK)
    scale = power_of_two_scale(blocks.abs().amax(-1, keepdim=True).clamp_min_(LEAST_AMAX).div_(TOP))
    return blocks / scale, scale


def round_e4m3(y: Tensor) -> Tensor:
    """The nearest e4m3 value of each |y| <= 448, ties to even, still in fp32; equals a cast there and back."""
    step = y.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32).clamp_min_(_MIN_NORMAL).mul_(_ROUNDER)
    return (y + step).sub_(step)


def fake_q8(x: Tensor) -> Tensor:
    """What a reader of the quantised x sees: fp32 of x's shape."""
    if x.is_cuda:
        return fake_q8_triton(x)
    y, scale = _scaled(x)
    return round_e4m3(y).mul_(scale).flatten(-2)


def pack_q8(x: Tensor) -> tuple[Tensor, Tensor]:
    """(bytes [..., n + n/32] uint8, values [..., n] fp32 as read back)."""
    if x.is_cuda:
        return pack_q8_triton(x)
    y, scale = _scaled(x)
    codes = y.to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2)
    exponents = (scale.view(torch.int32) >> 23).to(torch.uint8).squeeze(-1)
    return torch.cat([codes, exponents], -1), round_e4m3(y).mul_(scale).flatten(-2)


def unpack_q8(rows: Tensor) -> Tensor:
    """Values of packed rows: [..., n + n/32] uint8 -> [..., n] fp32."""
    if rows.is_cuda:
        return unpack_q8_triton(rows)
    n = rows.shape[-1] * BLOCK // (BLOCK + 1)
    values = _E4M3.index_select(0, rows[..., :n].reshape(-1).int()).view(*rows.shape[:-1], n // BLOCK, BLOCK)
    return values.mul_(exponent_value(rows[..., n:]).unsqueeze(-1)).flatten(-2)


def exponent_value(exponents: Tensor) -> Tensor:
    """2^(e - 127) of ue8m0 bytes, fp32; the byte 0 means 2^-127."""
    return _E8M0.index_select(0, exponents.reshape(-1).int()).view(exponents.shape)


_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
_E8M0 = torch.pow(2.0, torch.arange(256, dtype=torch.float64) - 127).float()


@kernel
def e4m3_code(y: Tile) -> Tile:
    """int32 codes of fp32 y, |y| <= 448, ties to even."""
    bits = y.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960  # 960: the biases' difference of 120, above 3 bits
    # below 2^-6 codes count steps of 2^-9, which is the last bit of 16384 + |y|
    small = (tl.abs(y) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)


@kernel
def e4m3_value(code: Tile) -> Tile:
    """fp32 values of int32 codes 0..255."""
    size = code & 0x7F
    normal = ((size + 960) << 20).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal).to(tl.int32, bitcast=True)
    value = tl.where(size == 0x7F, 0x7FC00000, value) | ((code & 0x80) << 24)
    return value.to(tl.float32, bitcast=True)


@kernel
def exponent_scale(exponent: Tile) -> Tile:
    """2^(e - 127) of int32 e in 0..255; 0 is the subnormal 2^-127."""
    return tl.where(exponent == 0, 0x00400000, exponent << 23).to(tl.float32, bitcast=True)


@kernel
def scale_exponent(wanted: Tile) -> Tile:
    """int32 exponent byte of the smallest power of two >= wanted, a normal positive fp32."""
    return (wanted.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23


@kernel
def inverse_scale(exponent: Tile) -> Tile:
    """2^(127 - e), for the exponents 1..253 that quantisers give: a product with it is the exact quotient."""
    return ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@kernel
def q8_exponent(amax: Tile) -> Tile:
    """The scale byte of blocks with that largest magnitude."""
    return scale_exponent(tl.div_rn(tl.maximum(amax, 1e-4), 448.0))


@kernel
def _pack_q8(
    x: Pointer, rows: Pointer, values: Pointer, num_blocks: Scalar, per_row: Scalar, pack: constexpr, step: constexpr
) -> None:
    block = tl.program_id(0).to(tl.int64) * step + tl.arange(0, step)
    lane, there = tl.arange(0, 32)[None, :], block < num_blocks
    at = block[:, None] * 32 + lane
    y = tl.load(x + at, mask=there[:, None], other=0).to(tl.float32)
    exponent = q8_exponent(tl.max(tl.abs(y), 1))
    code = e4m3_code(y * inverse_scale(exponent)[:, None])
    tl.store(values + at, e4m3_value(code) * exponent_scale(exponent)[:, None], mask=there[:, None])
    if pack:
        place = block % per_row
        row = rows + block // per_row * per_row * 33
        tl.store(row[:, None] + place[:, None] * 32 + lane, code.to(tl.uint8), mask=there[:, None])
        tl.store(row + per_row * 32 + place, exponent.to(tl.uint8), mask=there)


@kernel
def _unpack_q8(rows: Pointer, values: Pointer, num_blocks: Scalar, per_row: Scalar, step: constexpr) -> None:
    block = tl.program_id(0).to(tl.int64) * step + tl.arange(0, step)
    lane, there = tl.arange(0, 32)[None, :], block < num_blocks
    place = block % per_row
    row = rows + block // per_row * per_row * 33
    code = tl.load(row[:, None] + place[:, None] * 32 + lane, mask=there[:, None], other=0).to(tl.int32)
    exponent = tl.load(row + per_row * 32 + place, mask=there, other=0).to(tl.int32)
    value = e4m3_value(code) * exponent_scale(exponent)[:, None]
    tl.store(values + block[:, None] * 32 + lane, value, mask=there[:, None])


_STEP = 32  # blocks of a program: 4 KiB of fp32 in, not tuned


def fake_q8_triton(x: Tensor) -> Tensor:
    """`fake_q8` by its kernel."""
    x, values = x.contiguous(), torch.empty(x.shape, dtype=torch.float32, device=x.device)
    blocks = x.numel() // BLOCK
    _pack_q8[(tiles(blocks, _STEP),)](x, values, values, blocks, x.shape[-1] // BLOCK, pack=False, step=_STEP)
    return values


def pack_q8_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    """`pack_q8` by its kernel."""
    x, values = x.contiguous(), torch.empty(x.shape, dtype=torch.float32, device=x.device)
    blocks, per_row = x.numel() // BLOCK, x.shape[-1] // BLOCK
    rows = torch.empty((*x.shape[:-1], per_row * 33), dtype=torch.uint8, device=x.device)
    _pack_q8[(tiles(blocks, _STEP),)](x, rows, values, blocks, per_row, pack=True, step=_STEP)
    return rows, values


def unpack_q8_triton(rows: Tensor) -> Tensor:
    """`unpack_q8` by its kernel."""
    rows, per_row = rows.contiguous(), rows.shape[-1] // (BLOCK + 1)
    values = torch.empty((*rows.shape[:-1], per_row * BLOCK), dtype=torch.float32, device=rows.device)
    blocks = values.numel() // BLOCK
    _unpack_q8[(tiles(blocks, _STEP),)](rows, values, blocks, per_row, step=_STEP)
    return values
