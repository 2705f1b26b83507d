"""Q4 and Q4i: e2m1 values, two per byte, for the main KV and for index queries and keys.

    Q4i  block 32: amax = max(|x|, 6 * 2^-126);  scale = 2^ceil(log2(amax / 6))  (ue8m0 byte)
    Q4   block 16: scale = e4m3(clip(max|x| / 6, 2^-9, 448))                     (e4m3 byte)
    code = e2m1(x / scale): the grid 0 .5 1 1.5 2 3 4 6, ties to the even code;  value = code * scale

x: [..., n] fp32. Packed: channel 2i in the low nibble of byte i, the sign in bit 3: [..., n/2] uint8. Bytes of
one row: n/2 packed codes, then n/block scales.
Source: facts-model 7 (the grid, ties, both scales) and 7.1 (widths).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.quant_fp8 import exponent_value, power_of_two_scale, split_last

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
    blocks = split_last(x, INDEX_BLOCK)
    scale = power_of_two_scale(blocks.abs().amax(-1, keepdim=True).clamp_min_(LEAST_INDEX_AMAX).div_(TOP))
    exponents = (scale.view(torch.int32) >> 23).to(torch.uint8).squeeze(-1)
    return pack_nibbles(e2m1_codes(blocks / scale).flatten(-2)), exponents


def unpack_index(codes: Tensor, exponents: Tensor) -> Tensor:
    """Inverse of `pack_index` up to rounding: [..., n] fp32."""
    blocks = split_last(unpack_nibbles(codes), INDEX_BLOCK)
    return blocks.mul_(exponent_value(exponents).unsqueeze(-1)).flatten(-2)


def pack_main(x: Tensor) -> Tensor:
    """Q4: rows of bytes [..., n/2 + n/16] uint8."""
    blocks = split_last(x, MAIN_BLOCK)
    wanted = (blocks.abs().amax(-1) / TOP).clamp_(LEAST_MAIN_SCALE, MOST_MAIN_SCALE)
    scale = wanted.to(torch.float8_e4m3fn)
    codes = e2m1_codes(blocks / scale.float().unsqueeze(-1))
    return torch.cat([pack_nibbles(codes.flatten(-2)), scale.view(torch.uint8)], -1)


def unpack_main(rows: Tensor) -> Tensor:
    """Values of `pack_main` rows: [..., n] fp32."""
    n = rows.shape[-1] * 16 // 9  # n/2 + n/16 bytes
    scale = rows[..., n // 2 :].contiguous().view(torch.float8_e4m3fn).float()
    return split_last(unpack_nibbles(rows[..., : n // 2]), MAIN_BLOCK).mul_(scale.unsqueeze(-1)).flatten(-2)


def fake_index(x: Tensor) -> Tensor:
    """What a reader of the Q4i-quantised x sees: fp32 of x's shape."""
    return unpack_index(*pack_index(x))
