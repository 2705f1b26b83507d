"""How well each compressed entry fits a query (the lightning indexer).

    I_tj = sum_h w_th relu(q_th . k_j)        heads added in order h = 0, 1, ...

q: [T, h, d] and k: [N, d], values of the Q4i quantiser (multiples of a power of two per 32 channels); w: [T, h]
-> [T, N] fp32. Because of those values every product over 32 channels is exact in fp32 in any order of sums, so
a score depends neither on the number of rows or entries nor on the BLAS. Blocks of 32 are added in order.
The Triton kernel gives all heads of a query one product with a tile of keys and sums heads in a tree: within 1e-5 of
sum_h |w_h| relu(...), and equal where that sum is exact. Its order of sums is the same for every tile and batch.
Source: facts-model 3.3; exactness: ours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.launch import EXACT, Pointer, Scalar, constexpr, interpreted, kernel, power_of_two, tiles, tl
from kernels.quant_fp4 import INDEX_BLOCK

_TILE = 1 << 18  # elements of [h, rows, N] worked on at once: about one L2 cache


def _dots(q: Tensor, keys: Tensor) -> Tensor:
    dots = torch.mm(q[:, :INDEX_BLOCK], keys[:INDEX_BLOCK])
    for i in range(INDEX_BLOCK, q.shape[1], INDEX_BLOCK):
        dots += torch.mm(q[:, i : i + INDEX_BLOCK], keys[i : i + INDEX_BLOCK])
    return dots


def index_scores(q: Tensor, weights: Tensor, k: Tensor) -> Tensor:
    """I for every query and entry, visible or not."""
    if q.is_cuda:
        return index_scores_triton(q, weights, k)
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


@kernel
def _index_scores(  # noqa: PLR0917  four arrays and their sizes; then the tile
    q: Pointer, weights: Pointer, k: Pointer, out: Pointer, rows: Scalar, num_heads: Scalar, width: Scalar,
    entries: Scalar, heads: constexpr, channels: constexpr, step: constexpr, queries: constexpr, in_bf16: constexpr,
) -> None:  # fmt: skip
    entry, head, channel = tl.program_id(0) * step + tl.arange(0, step), tl.arange(0, heads), tl.arange(0, channels)
    there, real, inside = entry < entries, head < num_heads, channel < width
    at = entry.to(tl.int64)[None, :] * width + channel[:, None]
    keys = tl.load(k + at, mask=there[None, :] & inside[:, None], other=0).to(tl.bfloat16 if in_bf16 else tl.float32)
    first = tl.program_id(1).to(tl.int64) * queries
    q += first * num_heads * width + head[:, None] * width + channel[None, :]
    weights, out = weights + first * num_heads + head, out + first * entries + entry
    for _ in range(tl.minimum(rows - first, queries)):
        query = tl.load(q, mask=real[:, None] & inside[None, :], other=0)
        terms = tl.maximum(tl.dot(query.to(keys.dtype), keys, input_precision="ieee"), 0.0)
        tl.store(out, tl.sum(terms * tl.load(weights, mask=real, other=0)[:, None], 0), mask=there)
        q, weights, out = q + num_heads * width, weights + num_heads, out + entries


_STEP = 64  # keys of a tile, not tuned
_QUERIES = 32  # that read a tile of keys one after another while it is near, in prefill


def index_scores_triton(q: Tensor, weights: Tensor, k: Tensor) -> Tensor:
    """`index_scores` by its kernel. The quantiser's values are exact in bf16, so the products run on such operands."""
    (rows, heads, width), entries = q.shape, k.shape[0]
    out = torch.empty((rows, entries), dtype=torch.float32, device=q.device)
    _index_scores[(tiles(entries, _STEP), tiles(rows, _QUERIES))](
        q.contiguous(), weights.contiguous(), k.contiguous(), out, rows, heads, width, entries,
        heads=max(16, power_of_two(heads)), channels=max(16, power_of_two(width)), step=_STEP, queries=_QUERIES,
        in_bf16=not interpreted(), **EXACT,
    )  # fmt: skip
    return out
