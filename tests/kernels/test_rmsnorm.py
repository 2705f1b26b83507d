from __future__ import annotations

import pytest
import torch

from kernels.rmsnorm import rmsnorm


def random(*shape: int, seed: int = 22) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rmsnorm_has_unit_mean_square_before_its_weight():
    y = rmsnorm(random(6, 64) * 50, torch.ones(64), 1e-20)
    assert torch.allclose(y.square().mean(-1), torch.ones(6), atol=1e-5)


def test_the_weight_multiplies_the_normalised_row():
    x, w = random(6, 64), random(64, seed=32)
    assert torch.equal(rmsnorm(x, w, 1e-20), rmsnorm(x, torch.ones(64), 1e-20) * w)


@pytest.mark.parametrize("count", [1, 3, 16])
def test_a_rows_bits_do_not_depend_on_its_company(count):
    x, w = random(40, 96), random(96, seed=32)
    assert torch.equal(rmsnorm(x[7 : 7 + count], w, 1e-20), rmsnorm(x, w, 1e-20)[7 : 7 + count])
