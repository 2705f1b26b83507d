"""Root mean square norm.

    y = x * rsqrt(mean(x^2) + eps) * w

x: [..., D] fp32, w: [D] fp32, y: [..., D] fp32.
Source: facts-model 3 (eps is 1e-20 in the released config).
"""

from __future__ import annotations

import torch
from torch import Tensor


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """rsqrt(mean(x^2) + eps) over the last axis: [..., 1]."""
    return torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps))


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalised and weighted rows, a new tensor."""
    return (x * inverse_rms(x, eps)).mul_(weight)
