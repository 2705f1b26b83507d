from __future__ import annotations

import pytest
import torch

from kernels.moe_gate import moe_gate, moe_gate_triton


def test_the_gate_prefers_the_lowest_expert_among_equals_and_ignores_the_bias_in_weights():
    a = torch.tensor([[1.0, 1.0, 1.0, 0.5], [0.0, 3.0, 0.0, 0.0]])
    experts, weights = moe_gate(a, torch.tensor([0.0, 0.0, 0.0, 5.0]), 2, 1.5)
    assert experts.tolist() == [[3, 0], [3, 1]]
    scores = torch.nn.functional.softplus(a).sqrt().gather(1, experts)
    assert torch.allclose(weights, 1.5 * scores / scores.sum(1, keepdim=True))
    assert torch.equal(moe_gate(a[:1], torch.zeros(4), 2, 1.5)[0], torch.tensor([[0, 1]]))


@pytest.mark.parametrize(("rows", "experts", "k"), [(5, 384, 6), (9, 8, 2), (1, 12, 12), (4, 3, 1), (0, 8, 2)])
def test_the_kernel_chooses_as_the_reference_does(poisoned, rows, experts, k):
    generator = torch.Generator().manual_seed(31)
    a = (
        torch.randn(rows, experts, generator=generator)
        * torch.tensor([0.0, 1.0, 8.0, 100.0, 1e4]).repeat(2)[:rows, None]
    )
    bias = torch.randn(experts, generator=generator) * 0.1
    found, weights = moe_gate_triton(a, bias, k, 1.5)
    wanted, shares = moe_gate(a, bias, k, 1.5)
    assert torch.equal(found, wanted)
    assert torch.allclose(weights, shares, rtol=1e-6, atol=1e-30)


def test_the_kernel_prefers_the_lowest_expert_among_equals(poisoned):
    a = torch.tensor([[1.0, 1.0, 1.0, 0.5], [0.0, 3.0, 0.0, 0.0]])
    assert moe_gate_triton(a, torch.tensor([0.0, 0.0, 0.0, 5.0]), 2, 1.5)[0].tolist() == [[3, 0], [3, 1]]
    assert moe_gate_triton(a, torch.zeros(4), 4, 1.5)[0].tolist() == [[0, 1, 2, 3], [1, 0, 2, 3]]


def test_small_scores_keep_their_digits_in_the_kernel(poisoned):
    a = torch.tensor([[-15.0, -16.0, -17.5, -90.0]])
    assert torch.allclose(
        moe_gate_triton(a, torch.zeros(4), 4, 1.5)[1], moe_gate(a, torch.zeros(4), 4, 1.5)[1], rtol=1e-6
    )


def test_a_damaged_row_still_names_different_experts_that_exist(poisoned):
    experts, _ = moe_gate_triton(torch.full((1, 5), float("nan")), torch.zeros(5), 3, 1.5)
    assert experts.tolist() == [[0, 1, 2]]
