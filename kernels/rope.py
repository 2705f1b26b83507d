"""Rotary embedding on the last r channels, in interleaved pairs.

    (a, b) = x[2i], x[2i+1];  angle = pos * f_i
    y[2i] = a cos - b sin;    y[2i+1] = a sin + b cos

computed as x * C + swap(x) * S with C = (cos, cos), S = (-sin, sin): the same two products and one sum.

x: [T, ..., d] fp32 with d >= r, C and S: [T, r] fp32 (one row per position).
Source: facts-model 3.1 (YaRN, no attention factor); angles in fp32 as in the official table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """How frequencies are stretched beyond `original_positions`; slow ones by `factor`, fast ones not at all."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_positions: int


def rope_frequencies(width: int, base: float, yarn: Yarn | None = None) -> Tensor:
    """f_i, [r/2] fp32; plain RoPE without `yarn`."""
    plain = 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    if yarn is None:
        return plain

    def dim_of(rotations: float) -> float:
        return width * math.log(yarn.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(dim_of(yarn.beta_fast)), 0), min(math.ceil(dim_of(yarn.beta_slow)), width - 1)
    ramp = ((torch.arange(width // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain * (1 - ramp) + plain / yarn.factor * ramp


def rope_table(frequencies: Tensor, num_positions: int) -> Tensor:
    """(C, S) of the positions 0..num_positions-1 beside each other: [num_positions, 2 r] fp32."""
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies.float())
    cos, sin = angles.cos(), angles.sin()
    doubled = torch.stack([cos, cos], -1).flatten(-2), torch.stack([-sin, sin], -1).flatten(-2)
    return torch.cat(doubled, -1)


def rotate(x: Tensor, rows: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last r channels of `x` in place and return it.

    x: [T, d] or [T, h, d], contiguous; rows: [T, 2 r] of `rope_table`. `inverse` turns the other way.
    """
    width = rows.shape[-1] // 2
    cos, sin = rows[..., :width], rows[..., width:]
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    part = x[..., x.shape[-1] - width :]
    swapped = part.view(*part.shape[:-1], width // 2, 2).flip(-1).flatten(-2).mul_(sin)
    part.mul_(cos)
    part.sub_(swapped) if inverse else part.add_(swapped)
    return x
