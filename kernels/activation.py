"""Gates built from `exp` and `log1p` alone, and the clamped SwiGLU of the experts.

    sigmoid(x) = 1 / (1 + e^-x);   silu(x) = x sigmoid(x);   softplus(x) = max(x, 0) + log1p(e^-|x|)
    swiglu(a, b) = silu(min(a, limit)) * clip(b, -limit, limit)

torch's own sigmoid, silu and softplus give an element other last bits in the tail of a tensor than in its
body, so a row's result would depend on the batch (measured; tests/kernels/test_activation.py).

h: [T, 2 I] fp32, a = h[:, :I] (w1 x), b = h[:, I:] (w3 x).
Source: facts-model 3.4 (limit 10); the construction: ours.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), a new tensor."""
    return x.neg().exp_().add_(1).reciprocal_()


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x) without overflow, a new tensor."""
    return x.abs().neg_().exp_().log1p_().add_(x.clamp_min(0))


def swiglu(h: Tensor, limit: float) -> Tensor:
    """The gated product of both halves of h: [T, I]."""
    half = h.shape[-1] // 2
    a = h[..., :half].clamp_max(limit)
    return torch.mul(a, sigmoid(a)).mul_(h[..., half:].clamp(-limit, limit))
