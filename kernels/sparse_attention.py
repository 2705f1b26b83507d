"""Attention of one query row over its window and its selected entries, with a sink.

    s_hk = (q_h . K_k) d^-0.5;  p = softmax over the visible keys and sink_h;  o_h = sum_k p_hk K_k

One KV head: K = V. A row may appear in both parts and then counts twice. The sink only adds to the denominator.

q: [T, H, d]; window: [T, W, d] with seen_window [T, W] bool; chosen: [T, K, d] with seen_chosen [T, K] bool, or
None for layers without global KV; sink: [H] -> o [T, H, d], all fp32. Hidden keys must hold finite values.
Each row is its own product of constant shape, so its bits depend on nothing else.
Source: facts-model 3.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LANE = 16  # parts of a score row start at multiples of 64 bytes, as BLAS wants for repeatable bits


def _lanes(n: int) -> int:
    return -(-n // _LANE) * _LANE


def sparse_attention(
    q: Tensor,
    window: Tensor,
    seen_window: Tensor,
    sink: Tensor,
    chosen: Tensor | None = None,
    seen_chosen: Tensor | None = None,
) -> Tensor:
    """The attention output of every row."""
    parts = (
        [(window, seen_window)]
        if chosen is None or seen_chosen is None
        else [(window, seen_window), (chosen, seen_chosen)]
    )
    starts = [_LANE]  # the sink comes first, alone in its lane
    for keys, _ in parts:
        starts.append(starts[-1] + _lanes(keys.shape[1]))
    scaled = q * q.shape[-1] ** -0.5
    scores = q.new_full((*q.shape[:2], starts[-1]), float("-inf"))
    scores[..., 0] = sink
    for (keys, seen), start in zip(parts, starts, strict=False):
        hidden = seen.logical_not().unsqueeze(1)
        scores[..., start : start + keys.shape[1]] = torch.bmm(scaled, keys.transpose(1, 2)).masked_fill_(
            hidden, float("-inf")
        )
    p = torch.softmax(scores, -1)
    out = torch.zeros_like(q)
    for (keys, _), start in zip(parts, starts, strict=False):
        out += torch.bmm(p[..., start : start + keys.shape[1]], keys)
    return out
