"""Linear layers in fixed blocks of rows, so that a row's bits do not depend on its company.

    y = x W^T

A BLAS picks its code path, and with it the order of its sums, by the shape of the whole product: one row alone
gives other last bits than the same row among sixteen (measured: facts-spikes 7.3). Here every product over W
has the same R rows; the last block is padded with zeros.

x: [T, K] fp32, W: [N, K] fp32, y: [T, N] fp32.
Source: ours.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROW_BLOCK = 16  # facts-spikes 7.3: bit-equal for 1, 3 and 16 real rows, in any position
HEAD_BLOCK = 4  # the vocabulary is long: a lone decode row would pay four times as much with sixteen


def pad_rows(x: Tensor, block: int = ROW_BLOCK) -> Tensor:
    """X with zero rows added up to a multiple of `block`; x itself when nothing is missing."""
    missing = -x.shape[0] % block
    return x if not missing else torch.cat([x, x.new_zeros(missing, *x.shape[1:])])


def block_products(x: Tensor, weight: Tensor) -> Tensor:
    """Y of rows already padded to a multiple of the block."""
    rows, width = x.shape
    blocks = x.reshape(rows // ROW_BLOCK, ROW_BLOCK, width)
    return torch.bmm(blocks, weight.t().expand(len(blocks), -1, -1)).view(rows, -1)


def row_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Y for any number of rows."""
    return block_products(pad_rows(x), weight)[: x.shape[0]]


def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Group g of the channels times its own matrix: x [T, G, K], W [G, N, K] -> y [T, G N]."""
    padded = pad_rows(x)
    parts = [block_products(padded[:, g].contiguous(), w) for g, w in enumerate(weight)]
    return torch.cat(parts, -1)[: x.shape[0]]


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Y for a very long W (the vocabulary): W x^T on blocks of four rows reads W once per block."""
    padded = pad_rows(x, HEAD_BLOCK)
    blocks = [torch.mm(weight, padded[i : i + HEAD_BLOCK].t()).t() for i in range(0, len(padded), HEAD_BLOCK)]
    return torch.cat(blocks)[: x.shape[0]].contiguous()
