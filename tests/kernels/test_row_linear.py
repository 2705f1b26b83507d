from __future__ import annotations

import pytest
import torch

from kernels.row_linear import grouped_linear, head_linear, row_linear

SHAPES = [(64, 64), (128, 192), (512, 24), (256, 128), (64, 8), (192, 640)]


def random(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("width", "out"), SHAPES)
def test_rows_have_the_same_bits_alone_and_among_others(width, out):
    x, w = random(150, width), random(out, width, seed=4)
    full = row_linear(x, w)
    assert torch.allclose(full, x @ w.t(), atol=1e-4)
    for start, count in ((0, 1), (3, 1), (7, 3), (15, 16), (2, 17), (100, 50)):
        assert torch.equal(row_linear(x[start : start + count], w), full[start : start + count])


@pytest.mark.parametrize("vocabulary", [512, 12928])
def test_the_head_has_the_same_bits_alone_and_among_others(vocabulary):
    x, w = random(18, 128), random(vocabulary, 128, seed=5)
    full = head_linear(x, w)
    assert torch.allclose(full, x @ w.t(), atol=1e-4)
    for start, count in ((0, 1), (5, 1), (2, 3), (1, 16)):
        assert torch.equal(head_linear(x[start : start + count], w), full[start : start + count])


def test_groups_use_their_own_matrix():
    x, w = random(21, 2, 64), random(2, 32, 64, seed=6)
    y = grouped_linear(x, w)
    assert y.shape == (21, 64)
    assert torch.equal(y[:, :32], row_linear(x[:, 0], w[0]))
    assert torch.equal(y[:, 32:], row_linear(x[:, 1], w[1]))
    assert torch.equal(grouped_linear(x[4:5], w), y[4:5])
