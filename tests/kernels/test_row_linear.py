from __future__ import annotations

import pytest
import torch

from kernels.expert_linear import combine_rows, dispatch, expert_linear, scatter_rows
from kernels.row_linear import grouped_linear, head_linear, row_linear

SHAPES = [(64, 64), (128, 192), (512, 24), (256, 128), (64, 8), (192, 640)]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


def test_experts_give_each_row_what_its_experts_compute():
    generator = torch.Generator().manual_seed(7)
    x, w = random(37, 64), random(6, 32, 64, seed=8)
    experts = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(37)])
    experts[experts == 4] = 5  # an expert that nobody chose
    to = dispatch(experts, 6)
    assert all((end - start) % 16 == 0 and start % 16 == 0 for _, start, end in to.spans)
    assert 4 not in {expert for expert, _, _ in to.spans}
    y = combine_rows(expert_linear(scatter_rows(x, to), w, to), to)
    for row in range(37):
        first, second = experts[row].tolist()
        want = row_linear(x[row : row + 1], w[first]) + row_linear(x[row : row + 1], w[second])
        assert torch.equal(y[row : row + 1], want)
