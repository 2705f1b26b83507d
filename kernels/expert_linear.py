"""Rows sorted by expert, in runs that belong to one expert each, and linear layers over them.

A dispatch holds for every (row, slot) pair the place of that pair in a buffer of P rows; rows that no pair fills are
zero. Each expert has as many rows as `row_linear` asks of a product.

x: [T, D], experts: [T, S] int64 (S = experts per token), W: [E, N, D].
Source: ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.row_linear import padded_counts, padded_linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """Where each pair goes. place: [T, S]; spans: (expert, first row, end row) of the used experts; rows: P."""

    place: Tensor
    spans: tuple[tuple[int, int, int], ...]
    rows: int


def dispatch(experts: Tensor, num_experts: int) -> Dispatch:
    """Plan the blocks of one batch of choices."""
    flat = experts.flatten()
    counts = torch.bincount(flat, minlength=num_experts)
    padded = padded_counts(counts)
    ends = padded.cumsum(0)
    order = flat.argsort(stable=True)
    rank = torch.arange(len(flat)) - (counts.cumsum(0) - counts)[flat[order]]
    place = torch.empty_like(flat)
    place[order] = (ends - padded)[flat[order]] + rank
    sizes, stops = padded.tolist(), ends.tolist()
    spans = tuple((e, stops[e] - size, stops[e]) for e, size in enumerate(sizes) if size)
    return Dispatch(place=place.view(experts.shape), spans=spans, rows=stops[-1])


def scatter_rows(x: Tensor, to: Dispatch) -> Tensor:
    """Copy each row once per slot into its expert's block: [P, D]."""
    out = x.new_zeros(to.rows, x.shape[-1])
    for slot in range(to.place.shape[1]):
        out[to.place[:, slot]] = x
    return out


def expert_linear(x: Tensor, weight: Tensor, to: Dispatch) -> Tensor:
    """Each block times its expert's matrix: [P, D] -> [P, N]."""
    out = x.new_empty(to.rows, weight.shape[1])
    for expert, start, end in to.spans:
        out[start:end] = padded_linear(x[start:end], weight[expert])
    return out


def combine_rows(y: Tensor, to: Dispatch) -> Tensor:
    """Sum of each row's slots, first slot first: [P, N] -> [T, N]."""
    total = y[to.place[:, 0]]
    for slot in range(1, to.place.shape[1]):
        total += y[to.place[:, slot]]
    return total
