from __future__ import annotations

import torch

from kernels.moe_gate import moe_gate


def test_the_gate_prefers_the_lowest_expert_among_equals_and_ignores_the_bias_in_weights():
    a = torch.tensor([[1.0, 1.0, 1.0, 0.5], [0.0, 3.0, 0.0, 0.0]])
    experts, weights = moe_gate(a, torch.tensor([0.0, 0.0, 0.0, 5.0]), 2, 1.5)
    assert experts.tolist() == [[3, 0], [3, 1]]
    scores = torch.nn.functional.softplus(a).sqrt().gather(1, experts)
    assert torch.allclose(weights, 1.5 * scores / scores.sum(1, keepdim=True))
    assert torch.equal(moe_gate(a[:1], torch.zeros(4), 2, 1.5)[0], torch.tensor([[0, 1]]))
