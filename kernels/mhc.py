"""Manifold-constrained hyper-connections: n residual streams, mixed before and after every sublayer.

    z = fn (flat(S) * rsqrt(mean(flat(S)^2) + eps))                        [n + n + n^2]
    pre  = sigmoid(z[:n] scale_0 + base) + hc_eps
    post = 2 sigmoid(z[n:2n] scale_1 + base)
    C    = Sinkhorn(softmax_rows(z[2n:] scale_2 + base) + hc_eps)          [n, n]
    collapse: x = sum_k pre[k] S[k];   expand: S'[k] = post[k] y + sum_j C[j, k] S[j]

Sinkhorn: columns, then (iterations - 1) times rows and columns, each divided by (sum + hc_eps). Row index j is
the source stream, column k the destination. `pre` is used by the *next* sublayer.

S: [T, n, D] fp32, fn: [2n + n^2, n D], z: [T, 2n + n^2], C: [T, n, n], y and x: [T, D].
Source: facts-model 3 and 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.activation import sigmoid
from kernels.rmsnorm import inverse_rms
from kernels.row_linear import row_linear


@dataclass(frozen=True, slots=True, kw_only=True)
class MixWeights:
    """Parameters of one sublayer. fn: [2n + n^2, n D]; gain and base: [2n + n^2] (gain = scale per part)."""

    fn: Tensor
    gain: Tensor
    base: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixes:
    """What `mixes` gives. pre, post: [T, n]; comb: [T, n, n], row j source, column k destination."""

    pre: Tensor
    post: Tensor
    comb: Tensor


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Nearly doubly stochastic matrices: [T, n, n]. Worked on as [n, n, T], where every sum is over long rows."""
    c = logits.permute(1, 2, 0).contiguous()
    c.sub_(c.amax(1, keepdim=True)).exp_()
    c.div_(c.sum(1, keepdim=True)).add_(eps)
    c.div_(c.sum(0, keepdim=True).add_(eps))
    for _ in range(iterations - 1):
        c.div_(c.sum(1, keepdim=True).add_(eps))
        c.div_(c.sum(0, keepdim=True).add_(eps))
    return c.permute(2, 0, 1)


def mixes(streams: Tensor, weights: MixWeights, *, iterations: int, eps: float, norm_eps: float) -> Mixes:
    """The three mixes of one sublayer from the streams before it."""
    n = streams.shape[1]
    flat = streams.flatten(1)
    z = row_linear(flat, weights.fn).mul(inverse_rms(flat, norm_eps)).mul_(weights.gain).add_(weights.base)
    gates = sigmoid(z[:, : 2 * n].contiguous())
    comb = sinkhorn(z[:, 2 * n :].reshape(-1, n, n), iterations, eps)
    return Mixes(pre=gates[:, :n] + eps, post=gates[:, n:] * 2, comb=comb)


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """sum_k pre[k] S[k], streams added in order: [T, D]."""
    x = streams[:, 0] * pre[:, 0, None]
    for k in range(1, streams.shape[1]):
        x += streams[:, k] * pre[:, k, None]
    return x


def expand(streams: Tensor, y: Tensor, mix: Mixes) -> Tensor:
    """The streams after a sublayer whose output is y: a new [T, n, D]."""
    out = torch.bmm(mix.comb.transpose(1, 2).contiguous(), streams)
    return out.add_(y.unsqueeze(1) * mix.post.unsqueeze(2))
