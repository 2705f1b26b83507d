"""Linear layers whose rows have the same bits in any company.

    y = x W^T

A BLAS picks its code path, and with it the order of its sums, by the shape of the whole product: one row alone gives
other last bits than the same row among sixteen. Two ways around it:

* few  a product has at least LEAST_ROWS rows (zeros are added). From there on this machine's BLAS must give a row the
       same bits among any number of others, which `settle` tests for the shapes of a model's weights before they serve
* many where it does not: every product has exactly ROW_BLOCK rows, the last ones padded with zeros. Slower by up to a
       factor of two for many rows, and right by construction

`settle` chooses for the whole process, since a row must not meet both ways; before it, and for any shape that it has
not seen, it is `many`. `exact(False)` gives all of it up for speed: products as they come.

x: [T, K] fp32, W: [N, K] fp32, y: [T, N] fp32.
Source: ours; facts-spikes 7.3 (both measurements: blocks of 16, and rows that are stable from five up).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import torch
from torch import Tensor

LEAST_ROWS = 4
ROW_BLOCK = 16
_COUNTS = (4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 63, 64, 65)  # rows that `settle` compares
_MORE_COUNTS = (100, 127, 128, 129, 200, 255, 256, 257, 511, 512, 513)  # for weights small enough to do so quickly
_SMALL = 1 << 20  # elements of such a weight
_STARTS = (0, 3)  # a row's place in the product must not matter either


class Way(Enum):
    """How rows are kept independent of each other."""

    FEW = "few"
    MANY = "many"
    NONE = "none"


_way = Way.MANY
_stable: dict[tuple[int, int], bool] = {}  # by shape of W


def exact(wanted: bool) -> None:
    """Whether rows are kept independent at all (at first they are). Set it before anything is computed."""
    global _way  # noqa: PLW0603 -- a choice for the whole process, see above
    if not wanted:
        _way = Way.NONE
    elif _way is Way.NONE:
        _way = Way.FEW if _stable and all(_stable.values()) else Way.MANY


def settle(weights: Iterable[Tensor]) -> Way:
    """Test the shapes of these weights [N, K] and choose the way of this process; 0.3 s for the demo model's."""
    global _way  # noqa: PLW0603 -- see above
    for weight in weights:
        shape = (weight.shape[0], weight.shape[1])
        if shape not in _stable:
            _stable[shape] = _rows_are_stable(weight)
    if _way is not Way.NONE:
        _way = Way.FEW if all(_stable.values()) else Way.MANY
    return _way


def _rows_are_stable(weight: Tensor) -> bool:
    counts = _COUNTS + (_MORE_COUNTS if weight.numel() <= _SMALL else ())
    rows = max(counts) + max(_STARTS)
    x = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(29))
    y = torch.mm(x, weight.t())
    return all(
        torch.equal(torch.mm(x[start : start + count], weight.t()), y[start : start + count])
        for count in counts
        for start in _STARTS
    )


def padded_counts(rows: Tensor) -> Tensor:
    """Rows of products that have so many real ones, [any] int64; none needs none."""
    match _way:
        case Way.FEW:
            return torch.where(rows > 0, rows.clamp_min(LEAST_ROWS), 0)
        case Way.MANY:
            return (rows + ROW_BLOCK - 1) // ROW_BLOCK * ROW_BLOCK
        case Way.NONE:
            return rows


def pad_rows(x: Tensor) -> Tensor:
    """X with zero rows added as `padded_counts` says; x itself when nothing is missing."""
    rows = x.shape[0]
    missing = -rows % ROW_BLOCK if _way is Way.MANY else max(LEAST_ROWS - rows, 0) if _way is Way.FEW and rows else 0
    return x if not missing else torch.cat([x, x.new_zeros(missing, *x.shape[1:])])


def padded_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Y of rows that are padded already."""
    if _way is not Way.MANY:
        return torch.mm(x, weight.t())
    rows, width = x.shape
    blocks = x.reshape(rows // ROW_BLOCK, ROW_BLOCK, width)
    return torch.bmm(blocks, weight.t().expand(len(blocks), -1, -1)).view(rows, weight.shape[0])


def row_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Y for any number of rows."""
    return padded_linear(pad_rows(x), weight)[: x.shape[0]]


def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Group g of the channels times its own matrix: x [T, G, K], W [G, N, K] -> y [T, G N]."""
    padded = pad_rows(x)
    parts = [padded_linear(padded[:, g].contiguous(), w) for g, w in enumerate(weight)]
    return torch.cat(parts, -1)[: x.shape[0]]
