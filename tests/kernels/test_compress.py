from __future__ import annotations

import torch

from kernels.compress import pool_pairs


def random(*shape: int, seed: int = 22) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_pairs_are_pooled_per_channel():
    u, g = random(7, 2, 32), random(7, 2, 32, seed=28) * 20
    assert torch.allclose(pool_pairs(u, g), (torch.softmax(g, 1) * u).sum(1), atol=1e-5)
