from __future__ import annotations

import pytest
import torch

from kernels import row_linear as rows
from kernels.row_linear import Way, grouped_linear, padded_counts, row_linear

SHAPES = [(64, 64), (128, 192), (512, 24), (256, 128), (64, 8), (192, 640), (128, 12928)]


def random(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[Way.FEW, Way.MANY])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    monkeypatch.setattr(rows, "_way", request.param)
    found: Way = request.param
    return found


@pytest.fixture
def unsettled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_way", Way.MANY)
    monkeypatch.setattr(rows, "_stable", {})


@pytest.mark.parametrize(("width", "out"), SHAPES)
def test_rows_have_the_same_bits_alone_and_among_others(way: Way, width: int, out: int):
    x, w = random(150, width), random(out, width, seed=4)
    full = row_linear(x, w)
    assert torch.allclose(full, x @ w.t(), atol=1e-3)
    for start, count in ((0, 1), (3, 1), (7, 3), (4, 4), (15, 16), (2, 17), (100, 50)):
        assert torch.equal(row_linear(x[start : start + count], w), full[start : start + count])


def test_a_long_matrix_laid_out_by_columns_gives_the_same_values(way: Way):
    x, w = random(18, 128), random(12928, 128, seed=5)
    turned = w.t().contiguous().t()
    full = row_linear(x, turned)
    assert torch.allclose(full, row_linear(x, w), atol=1e-4)
    for start, count in ((0, 1), (5, 1), (2, 3), (1, 16)):
        assert torch.equal(row_linear(x[start : start + count], turned), full[start : start + count])


def test_no_rows_are_no_rows(way: Way):
    assert row_linear(random(0, 64), random(32, 64)).shape == (0, 32)
    assert padded_counts(torch.tensor([0, 0])).tolist() == [0, 0]


def test_groups_use_their_own_matrix(way: Way):
    x, w = random(21, 2, 64), random(2, 32, 64, seed=6)
    y = grouped_linear(x, w)
    assert y.shape == (21, 64)
    assert torch.equal(y[:, :32], row_linear(x[:, 0], w[0]))
    assert torch.equal(y[:, 32:], row_linear(x[:, 1], w[1]))
    assert torch.equal(grouped_linear(x[4:5], w), y[4:5])


@pytest.mark.usefixtures("unsettled")
def test_few_rows_are_padded_only_where_this_machine_keeps_them_stable(monkeypatch: pytest.MonkeyPatch):
    assert rows.settle([random(64, 32)]) in (Way.FEW, Way.MANY)
    monkeypatch.setattr(rows, "_stable", {})
    real = torch.mm
    # a BLAS that takes another path for exactly 17 rows
    monkeypatch.setattr(torch, "mm", lambda x, w: real(x, w) * (1 + 1e-7 * (len(x) == 17)))
    assert rows.settle([random(64, 32)]) is Way.MANY
    monkeypatch.setattr(torch, "mm", real)
    assert rows.settle([random(48, 32)]) is Way.MANY  # one shape that is not stable decides for all


@pytest.mark.usefixtures("unsettled")
def test_inexact_products_take_rows_as_they_come_and_exactness_comes_back():
    before = rows.settle([random(64, 32)])
    rows.exact(False)
    assert padded_counts(torch.tensor([1, 5])).tolist() == [1, 5]
    assert torch.equal(row_linear(random(5, 32), random(64, 32)), random(5, 32) @ random(64, 32).t())
    assert rows.settle([random(64, 32)]) is Way.NONE
    rows.exact(True)
    assert rows.settle([random(64, 32)]) is before
