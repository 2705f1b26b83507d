"""Which experts a row goes to, and with which weights.

    a = x G^T;  s = sqrt(softplus(a));  chosen = the k largest of s + bias, ties to the lowest expert
    weight_e = factor * s_e / (sum of the chosen s + 1e-20)      (unbiased scores)

a: [T, E] fp32, bias: [E] fp32 -> experts [T, k] int64, best first; weights [T, k] fp32.
The Triton kernel holds rows of all experts in registers and takes the best k times. It chooses as the reference
does wherever two biased scores are equal or differ by more than rounding (1e-6); weights are within 1e-6. A NaN
counts as the least score, so a damaged row still names k different experts that exist.
Source: facts-model 3.4 (factor 1.5).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.activation import softplus
from kernels.launch import EXACT, Pointer, Scalar, Tile, constexpr, kernel, power_of_two, tiles, tl

EPS = 1e-20  # Source: facts-model 3.4


def moe_gate(a: Tensor, bias: Tensor, k: int, factor: float) -> tuple[Tensor, Tensor]:
    """(experts, weights) of each row."""
    if a.is_cuda:
        return moe_gate_triton(a, bias, k, factor)
    scores = softplus(a).sqrt_()
    ranked = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices
    experts = ranked[:, :k].contiguous()
    chosen = scores.gather(1, experts)
    return experts, chosen.div_(chosen.sum(-1, keepdim=True).add_(EPS)).mul_(factor)


@kernel
def _softplus(x: Tile) -> Tile:
    """max(x, 0) + log1p(e^-|x|); log1p from log by what rounding did to 1 + e, as Triton has no log1p."""
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    corrected = tl.log(u) * tl.div_rn(e, tl.where(u == 1.0, 1.0, u - 1.0))
    return tl.maximum(x, 0.0) + tl.where(u == 1.0, e, corrected)


@kernel
def _moe_gate(  # noqa: PLR0917  four arrays and their sizes; then the tile
    a: Pointer, bias: Pointer, experts: Pointer, weights: Pointer, rows: Scalar, num_experts: Scalar, k: Scalar,
    factor: Scalar, step: constexpr, lanes: constexpr, slots: constexpr,
) -> None:  # fmt: skip
    row, expert, slot = tl.program_id(0) * step + tl.arange(0, step), tl.arange(0, lanes), tl.arange(0, slots)
    row, real, inside = row.to(tl.int64)[:, None], expert[None, :] < num_experts, slot[None, :] < k
    mask = (row < rows) & real
    scores = tl.sqrt_rn(_softplus(tl.load(a + row * num_experts + expert[None, :], mask=mask, other=0)))
    left = scores + tl.load(bias + expert, mask=expert < num_experts, other=0)[None, :]
    left = tl.where(left >= float("-inf"), left, -3.0e38)
    left = tl.where(real, left, float("-inf"))
    total, chosen = tl.zeros([step], tl.float32), tl.zeros([step, slots], tl.float32)
    numbers = tl.zeros([step, slots], tl.int64)
    for turn in range(k):
        best = tl.max(left, 1)[:, None]
        at = tl.min(tl.where(left == best, expert[None, :], lanes), 1)[:, None]
        score = tl.sum(tl.where(expert[None, :] == at, scores, 0.0), 1)
        left = tl.where(expert[None, :] == at, float("-inf"), left)
        numbers = tl.where(slot[None, :] == turn, at.to(tl.int64), numbers)
        chosen = tl.where(slot[None, :] == turn, score[:, None], chosen)
        total += score
    weight = tl.div_rn(chosen, tl.broadcast_to((total + 1e-20)[:, None], chosen.shape)) * factor
    place, stored = row * k + slot[None, :], (row < rows) & inside
    tl.store(experts + place, numbers, mask=stored)
    tl.store(weights + place, weight, mask=stored)


_STEP = 4  # rows of a program: one per warp, not tuned


def moe_gate_triton(a: Tensor, bias: Tensor, k: int, factor: float) -> tuple[Tensor, Tensor]:
    """`moe_gate` by its kernel."""
    a, (rows, num_experts) = a.contiguous(), a.shape
    experts = torch.empty((rows, k), dtype=torch.int64, device=a.device)
    weights = torch.empty((rows, k), dtype=torch.float32, device=a.device)
    _moe_gate[(tiles(rows, _STEP),)](
        a, bias, experts, weights, rows, num_experts, k, factor,
        step=_STEP, lanes=power_of_two(num_experts), slots=power_of_two(k), **EXACT,
    )  # fmt: skip
    return experts, weights
