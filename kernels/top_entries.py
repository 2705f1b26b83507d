"""Top-k of index scores, and the candidate blocks that narrow later layers.

    TopK(t) = the k best of the first visible_t entries, ties to the lowest index, in ascending order
    block b = entries 8b .. 8b+7, score = its best visible entry; the block of the newest visible entry always
    counts as best; the candidates are the entries of the m best blocks

scores: [T, N] fp32, visible: [T] int64 -> indices [T, k] int64 with -1 behind the valid ones.
Source: facts-model 3.3 (the rule), 12 (ties).
"""

from __future__ import annotations

import torch
from torch import Tensor

_NEVER = float("-inf")


def hide_invisible(scores: Tensor, visible: Tensor) -> Tensor:
    """`scores` with every entry from `visible` on at minus infinity, in place; NaN (damaged KV) likewise."""
    hidden = torch.arange(scores.shape[1]) >= visible.unsqueeze(1)
    return scores.masked_fill_(hidden.logical_or_(scores.isnan()), _NEVER)


def _chosen(scores: Tensor, k: int) -> Tensor:
    """Mask of exactly k entries per row, ties to the lowest index. Needs N >= k."""
    least = scores.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    above, ties = scores > least, scores == least
    wanted = k - above.sum(1, keepdim=True)
    return above | (ties & (ties.cumsum(1) <= wanted))


def top_entries(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """TopK of rows whose invisible entries are at minus infinity."""
    rows, entries = scores.shape
    everything = torch.arange(k).expand(rows, k)
    index = everything if entries <= k else _chosen(scores, k).nonzero()[:, 1].view(rows, k)
    return torch.where(index < visible.unsqueeze(1), index, -1)


def candidate_mask(scores: Tensor, visible: Tensor, blocks: int, block_size: int) -> Tensor | None:
    """Which entries are in the pool, [T, N] bool; None when the pool is everything. `scores` as in `top_entries`."""
    rows, entries = scores.shape
    if entries <= blocks * block_size:
        return None
    padded = torch.nn.functional.pad(scores, (0, -entries % block_size), value=_NEVER)
    best = padded.view(rows, -1, block_size).amax(-1)
    newest = ((visible - 1).clamp_min(0) // block_size).unsqueeze(1)
    best.scatter_(1, newest, float("inf"))
    return _chosen(best, blocks).repeat_interleave(block_size, 1)[:, :entries]
