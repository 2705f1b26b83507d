"""Top-k of index scores, and the candidate blocks that narrow later layers.

    TopK(t) = the k best of the first visible_t entries, ties to the lowest index, in ascending order
    block b = entries 8b .. 8b+7, score = its best visible entry; the block of the newest visible entry always
    counts as best; the candidates are the entries of the m best blocks

scores: [T, N] fp32, visible: [T] int64 -> indices [T, k] int64 with -1 behind the valid ones.
The Triton kernel gives each row one program: the k-th largest score by four passes of an 8-bit radix select over
bits ordered like the scores (-0 as +0, NaN as minus infinity), then one pass that writes what is above it and the
first of its equals. Integers only, so its choice is the reference's. A lone row of a million entries keeps one
program busy for five passes and would want them split; nobody has measured that yet. `hide_invisible` stays with
torch: it is one pass over what the next pass reads, and belongs into the kernel of the scores if it shows at all.
Source: facts-model 3.3 (the rule), 12 (ties).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.launch import Pointer, Scalar, Tile, constexpr, kernel, tl

_NEVER = float("-inf")


def hide_invisible(scores: Tensor, visible: Tensor) -> Tensor:
    """`scores` with every entry from `visible` on at minus infinity, in place; NaN (damaged KV) likewise."""
    hidden = torch.arange(scores.shape[1], device=scores.device) >= visible.unsqueeze(1)
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
    everything = torch.arange(k, device=scores.device).expand(rows, k)
    if scores.is_cuda and entries > k:
        return top_entries_triton(scores, visible, k)
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
    chosen = chosen_triton(best, blocks) if scores.is_cuda else _chosen(best, blocks)
    return chosen.repeat_interleave(block_size, 1)[:, :entries]


@kernel
def _ordered_bits(scores: Pointer, at: Tile, there: Tile) -> Tile:
    """uint32 that compare like the scores."""
    x = tl.load(scores + at, mask=there, other=0)
    x = tl.where(x >= float("-inf"), tl.where(x == 0, 0.0, x), float("-inf"))
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@kernel
def _kth_largest(scores: Pointer, entries: Scalar, k: Scalar, step: constexpr) -> Tile:
    """Its ordered bits, and how many entries equal to it are among the k best."""
    digits = tl.arange(0, 256)
    found, known, wanted = tl.full([], 0, tl.uint32), tl.full([], 0, tl.uint32), k
    for turn in tl.static_range(4):
        shift = 24 - 8 * turn
        counts = tl.zeros([256], tl.int32)
        for start in range(0, entries, step):
            at = start + tl.arange(0, step)
            bits = _ordered_bits(scores, at, at < entries)
            alike = (at < entries) & (((bits ^ found) & known) == 0)
            counts += tl.histogram(((bits >> shift) & 255).to(tl.int32), 256, mask=alike)
        above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
        here = (above < wanted) & (above + counts >= wanted)
        digit = tl.sum(tl.where(here, digits, 0), 0)
        wanted -= tl.sum(tl.where(here, above, 0), 0)
        found |= digit.to(tl.uint32) << shift
        known |= tl.full([], 255, tl.uint32) << shift
    return found, wanted


@kernel
def _select(
    scores: Pointer, visible: Pointer, out: Pointer, entries: Scalar, k: Scalar, as_mask: constexpr, step: constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    scores += row * entries
    least, wanted = _kth_largest(scores, entries, k, step)
    end = entries if as_mask else tl.load(visible + row)
    taken, equals = 0, 0
    for start in range(0, entries, step):
        at = start + tl.arange(0, step)
        bits = _ordered_bits(scores, at, at < entries)
        equal = ((bits == least) & (at < entries)).to(tl.int32)
        keep = ((bits > least) & (at < entries)) | ((equal != 0) & (equals + tl.cumsum(equal, 0) <= wanted))
        if as_mask:
            tl.store(out + row * entries + at, keep.to(tl.uint8), mask=at < entries)
        else:
            place = taken + tl.cumsum(keep.to(tl.int32), 0) - 1
            tl.store(out + row * k + place, tl.where(at < end, at, -1).to(tl.int64), mask=keep)
        taken += tl.sum(keep.to(tl.int32), 0)
        equals += tl.sum(equal, 0)


_STEP = 2048  # scores of a tile, not tuned


def top_entries_triton(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """`top_entries` by its kernel, for more than k entries."""
    out = torch.empty((len(scores), k), dtype=torch.int64, device=scores.device)
    _select[(len(scores),)](scores.contiguous(), visible, out, scores.shape[1], k, as_mask=False, step=_STEP)
    return out


def chosen_triton(scores: Tensor, k: int) -> Tensor:
    """Mask [T, N] of exactly k entries per row, ties to the lowest index, by its kernel. Needs N >= k."""
    out = torch.empty(scores.shape, dtype=torch.uint8, device=scores.device)
    _select[(len(scores),)](scores.contiguous(), out, out, scores.shape[1], k, as_mask=True, step=_STEP)
    return out.view(torch.bool)
