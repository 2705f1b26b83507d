"""Q8: e4m3 values with one power-of-two scale per 32 channels, for activations and sliding-window KV.

    amax = max(|x|, 1e-4);  scale = 2^ceil(log2(amax / 448))  (by exponent bits)
    code = e4m3(x / scale), ties to even;  value = code * scale

x: [..., n] fp32, n a multiple of 32. Bytes of one row: n codes, then n/32 scale exponents (ue8m0): [n + n/32].
No clip is needed: amax / 448 rounded to fp32 is never below a power of two that amax exceeds 448-fold.
Source: facts-model 7 and 7.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    y, scale = _scaled(x)
    return round_e4m3(y).mul_(scale).flatten(-2)


def pack_q8(x: Tensor) -> tuple[Tensor, Tensor]:
    """(bytes [..., n + n/32] uint8, values [..., n] fp32 as read back)."""
    y, scale = _scaled(x)
    codes = y.to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2)
    exponents = (scale.view(torch.int32) >> 23).to(torch.uint8).squeeze(-1)
    return torch.cat([codes, exponents], -1), round_e4m3(y).mul_(scale).flatten(-2)


def unpack_q8(rows: Tensor) -> Tensor:
    """Values of packed rows: [..., n + n/32] uint8 -> [..., n] fp32."""
    n = rows.shape[-1] * BLOCK // (BLOCK + 1)
    values = _E4M3.index_select(0, rows[..., :n].reshape(-1).int()).view(*rows.shape[:-1], n // BLOCK, BLOCK)
    return values.mul_(exponent_value(rows[..., n:]).unsqueeze(-1)).flatten(-2)


def exponent_value(exponents: Tensor) -> Tensor:
    """2^(e - 127) of ue8m0 bytes, fp32; the byte 0 means 2^-127."""
    return _E8M0.index_select(0, exponents.reshape(-1).int()).view(exponents.shape)


_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
_E8M0 = torch.pow(2.0, torch.arange(256, dtype=torch.float64) - 127).float()
