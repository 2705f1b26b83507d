"""Gated pooling of token pairs into one latent (ratio 2 layers).

    lat_j = sum_i softmax_i(g_2j, g_2j+1) * u_i          the softmax is per channel, over the two tokens

u, g: [G, 2, D] fp32 (values and gates of G groups) -> [G, D] fp32, before the norm.
Source: facts-model 3.2.
"""

from __future__ import annotations

from torch import Tensor


def pool_pairs(values: Tensor, gates: Tensor) -> Tensor:
    """The pooled latent of each pair."""
    first, second = gates[:, 0], gates[:, 1]
    top = first.maximum(second)
    a, b = first.sub(top).exp_(), second.sub(top).exp_()
    pooled = (values[:, 0] * a).add_(values[:, 1] * b)
    return pooled.div_(a.add_(b))
