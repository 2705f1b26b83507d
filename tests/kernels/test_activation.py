from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the customary name

from kernels.activation import sigmoid, softplus, swiglu

X = torch.randn(4096, generator=torch.Generator().manual_seed(9)) * 6


@pytest.mark.parametrize("count", [1, 3, 8, 17, 31, 48, 100, 1000])
@pytest.mark.parametrize("start", [0, 1, 7, 160])
@pytest.mark.parametrize("function", [sigmoid, softplus, torch.exp, torch.log1p, torch.sqrt, torch.rsqrt])
def test_an_elements_bits_do_not_depend_on_its_place_in_the_tensor(function, count, start):
    x = X.abs() if function in {torch.log1p, torch.sqrt, torch.rsqrt} else X
    assert torch.equal(function(x[start : start + count].clone()), function(x)[start : start + count])


def test_they_are_close_to_torchs_own():
    assert torch.allclose(sigmoid(X), torch.sigmoid(X), rtol=1e-6, atol=1e-7)
    assert torch.allclose(softplus(X), F.softplus(X), rtol=1e-6, atol=1e-7)


def test_extreme_inputs_stay_finite():
    x = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4])
    assert sigmoid(x).tolist() == [0.0, pytest.approx(0, abs=1e-30), 0.5, 1.0, 1.0]
    assert softplus(x).tolist() == [0.0, pytest.approx(0, abs=1e-30), pytest.approx(0.6931472), 100.0, 1e4]


def test_swiglu_clamps_the_gate_from_above_and_the_value_on_both_sides():
    h = torch.tensor([[20.0, -20.0, 1.0, 50.0, -50.0, 2.0]])
    a, b = torch.tensor([10.0, -20.0, 1.0]), torch.tensor([10.0, -10.0, 2.0])
    assert torch.allclose(swiglu(h, 10.0), (F.silu(a) * b).unsqueeze(0))
