"""How much of an Engram lookup joins each stream.

    d_k = sum_c S[k,c] q[k,c] K[k,c] * rsqrt(mean S_k^2 + eps) * rsqrt(mean K_k^2 + eps) * D^-0.5
    S'[k] = S[k] + sigmoid(sign(d_k) sqrt(max(|d_k|, 1e-6))) v

S, K: [T, n, D] fp32; q: [n, D] (product of both weights of the layer); v: [T, D].
Source: facts-model 5.
"""

from __future__ import annotations

from torch import Tensor

from kernels.activation import sigmoid
from kernels.rmsnorm import inverse_rms

LEAST = 1e-6  # Source: facts-model 5


def engram_gate(streams: Tensor, keys: Tensor, value: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The streams with the lookup added, a new tensor."""
    weighted = (streams * inverse_rms(streams, eps)).mul_(weight)
    d = weighted.mul_(keys * inverse_rms(keys, eps)).sum(-1).mul_(streams.shape[-1] ** -0.5)
    gate = sigmoid(d.abs().clamp_min_(LEAST).sqrt_().mul_(d.sign()))
    return streams + value.unsqueeze(1) * gate.unsqueeze(2)
