from __future__ import annotations

import pytest
import torch

from kernels.mhc import Mixes, MixWeights, collapse, expand, mixes, sinkhorn


def random(*shape: int, seed: int = 10) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain_sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    c = torch.softmax(logits.double(), -1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


def test_sinkhorn_follows_its_equation_and_ends_nearly_doubly_stochastic():
    logits = random(9, 4, 4)
    c = sinkhorn(logits, 20, 1e-6)
    assert torch.allclose(c.double(), plain_sinkhorn(logits, 20, 1e-6), atol=1e-6)
    assert torch.allclose(c.sum(1), torch.ones(9, 4), atol=1e-4)
    assert torch.allclose(c.sum(2), torch.ones(9, 4), atol=1e-2)


def test_one_iteration_only_normalises_columns():
    logits = random(3, 4, 4)
    assert torch.allclose(sinkhorn(logits, 1, 1e-6).double(), plain_sinkhorn(logits, 1, 1e-6), atol=1e-6)


@pytest.mark.parametrize("count", [1, 3, 16, 40])
def test_mixes_of_a_row_do_not_depend_on_its_company(count):
    streams = random(64, 4, 32)
    w = MixWeights(fn=random(24, 128, seed=11) * 0.1, gain=torch.ones(24), base=random(24, seed=12))
    full = mixes(streams, w, iterations=20, eps=1e-6, norm_eps=1e-20)
    part = mixes(streams[5 : 5 + count], w, iterations=20, eps=1e-6, norm_eps=1e-20)
    for name in ("pre", "post", "comb"):
        assert torch.equal(getattr(part, name), getattr(full, name)[5 : 5 + count])
    assert torch.equal(
        expand(streams[5 : 5 + count], streams[5 : 5 + count, 0], part),
        expand(streams, streams[:, 0], full)[5 : 5 + count],
    )


def test_expand_sums_over_source_streams_and_adds_the_output():
    streams, y = random(5, 4, 32), random(5, 32, seed=13)
    mix = Mixes(pre=random(5, 4), post=random(5, 4, seed=14), comb=random(5, 4, 4, seed=15))
    want = torch.einsum("tjk,tjd->tkd", mix.comb, streams) + mix.post[:, :, None] * y[:, None]
    assert torch.allclose(expand(streams, y, mix), want, atol=1e-5)


def test_collapse_weighs_the_streams():
    streams, pre = random(5, 4, 32), random(5, 4)
    assert torch.allclose(collapse(streams, pre), torch.einsum("tk,tkd->td", pre, streams), atol=1e-5)
