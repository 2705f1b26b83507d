from __future__ import annotations

import torch

from kernels.expert_linear import combine_rows, dispatch, expert_linear, scatter_rows
from kernels.row_linear import padded_counts, row_linear


def random(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_experts_give_each_row_what_its_experts_compute():
    generator = torch.Generator().manual_seed(7)
    x, w = random(37, 64), random(6, 32, 64, seed=8)
    experts = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(37)])
    experts[experts == 4] = 5  # an expert that nobody chose
    to = dispatch(experts, 6)
    chosen = torch.bincount(experts.flatten(), minlength=6)
    assert {e: end - start for e, start, end in to.spans} == {
        e: n for e, n in enumerate(padded_counts(chosen).tolist()) if n
    }
    assert 4 not in {expert for expert, _, _ in to.spans}
    y = combine_rows(expert_linear(scatter_rows(x, to), w, to), to)
    for row in range(37):
        first, second = experts[row].tolist()
        want = row_linear(x[row : row + 1], w[first]) + row_linear(x[row : row + 1], w[second])
        assert torch.equal(y[row : row + 1], want)
