"""Which experts a row goes to, and with which weights.

    a = x G^T;  s = sqrt(softplus(a));  chosen = the k largest of s + bias, ties to the lowest expert
    weight_e = factor * s_e / (sum of the chosen s + 1e-20)      (unbiased scores)

a: [T, E] fp32, bias: [E] fp32 -> experts [T, k] int64, best first; weights [T, k] fp32.
Source: facts-model 3.4 (factor 1.5).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.activation import softplus

EPS = 1e-20  # Source: facts-model 3.4


def moe_gate(a: Tensor, bias: Tensor, k: int, factor: float) -> tuple[Tensor, Tensor]:
    """(experts, weights) of each row."""
    scores = softplus(a).sqrt_()
    ranked = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices
    experts = ranked[:, :k].contiguous()
    chosen = scores.gather(1, experts)
    return experts, chosen.div_(chosen.sum(-1, keepdim=True).add_(EPS)).mul_(factor)
