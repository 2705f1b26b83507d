from __future__ import annotations

import torch

from kernels.engram_gate import engram_gate


def random(*shape: int, seed: int = 22) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_engram_gate_follows_its_equation():
    streams, keys, value, weight = random(5, 4, 32), random(5, 4, 32, seed=29), random(5, 32, seed=30), random(4, 32)
    s, k = streams.double(), keys.double()
    d = (s * k * weight).sum(-1) * s.square().mean(-1).rsqrt() * k.square().mean(-1).rsqrt() * 32**-0.5
    gate = torch.sigmoid(d.sign() * d.abs().clamp_min(1e-6).sqrt())
    want = s + gate.unsqueeze(-1) * value.double().unsqueeze(1)
    assert torch.allclose(engram_gate(streams, keys, value, weight, 1e-20).double(), want, atol=1e-5)
