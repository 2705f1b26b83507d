"""How well each compressed entry fits a query (the lightning indexer).

    I_tj = sum_h w_th relu(q_th . k_j)        heads added in order h = 0, 1, ...

q: [T, h, d] and k: [N, d], values of the Q4i quantiser (multiples of a power of two per 32 channels); w: [T, h]
-> [T, N] fp32. Because of those values every product over 32 channels is exact in fp32 in any order of sums, so
a score depends neither on the number of rows or entries nor on the BLAS. Blocks of 32 are added in order.
Source: facts-model 3.3; exactness: ours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.quant_fp4 import INDEX_BLOCK

_TILE = 1 << 18  # elements of [h, rows, N] worked on at once: about one L2 cache


def _dots(q: Tensor, keys: Tensor) -> Tensor:
    dots = torch.mm(q[:, :INDEX_BLOCK], keys[:INDEX_BLOCK])
    for i in range(INDEX_BLOCK, q.shape[1], INDEX_BLOCK):
        dots += torch.mm(q[:, i : i + INDEX_BLOCK], keys[i : i + INDEX_BLOCK])
    return dots


def index_scores(q: Tensor, weights: Tensor, k: Tensor) -> Tensor:
    """I for every query and entry, visible or not."""
    (rows, heads, width), entries = q.shape, k.shape[0]
    out = q.new_empty(rows, entries)
    keys = k.t().contiguous()
    step = max(1, _TILE // max(1, heads * entries))
    for i in range(0, rows, step):
        part = q[i : i + step].transpose(0, 1).reshape(-1, width)
        terms = _dots(part, keys).view(heads, len(part) // heads, entries).clamp_min_(0)
        terms.mul_(weights[i : i + step].t().unsqueeze(2))
        total = out[i : i + step].copy_(terms[0])
        for term in terms[1:]:
            total += term
    return out
