from __future__ import annotations

import pytest
import torch

from kernels.sparse_attention import sparse_attention


def random(*shape: int, seed: int = 22) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain(q, window, seen_window, sink, chosen=None, seen_chosen=None):
    keys = window if chosen is None else torch.cat([window, chosen], 1)
    seen = seen_window if seen_chosen is None else torch.cat([seen_window, seen_chosen], 1)
    scores = torch.einsum("thd,tkd->thk", q.double(), keys.double()) * q.shape[-1] ** -0.5
    weight = scores.exp() * seen[:, None]
    total = weight.sum(-1, keepdim=True) + sink.double().exp().view(1, -1, 1)
    return torch.einsum("thk,tkd->thd", weight / total, keys.double())


@pytest.mark.parametrize("top", [None, 8, 32])
def test_it_follows_its_equation(top):
    q, window, sink = random(20, 4, 32), random(20, 16, 32, seed=23), random(4, seed=24)
    seen = torch.arange(16) >= 15 - torch.arange(20).unsqueeze(1)
    more = () if top is None else (random(20, top, 32, seed=25), torch.arange(top) < torch.arange(20).unsqueeze(1))
    found = sparse_attention(q, window, seen, sink, *more)
    assert torch.allclose(found.double(), plain(q, window, seen, sink, *more), atol=1e-5)


def test_a_row_without_visible_keys_gives_zero():
    found = sparse_attention(random(1, 2, 32), random(1, 16, 32), torch.zeros(1, 16, dtype=torch.bool), random(2))
    assert found.eq(0).all()


def test_hidden_keys_change_nothing():
    q, window, sink, seen = random(6, 4, 32), random(6, 16, 32, seed=23), random(4), torch.arange(16).expand(6, 16) > 4
    other = window.clone()
    other[:, :5] = 3e4
    assert torch.equal(sparse_attention(q, window, seen, sink), sparse_attention(q, other, seen, sink))


@pytest.mark.parametrize("count", [1, 3, 16, 100])
def test_overlapping_windows_give_the_bits_of_separate_ones(count):
    q, line, sink = random(150, 4, 32), random(150 + 127, 32, seed=26), random(4)
    chosen, some = random(150, 64, 32, seed=27), torch.arange(64).expand(150, 64) < 40
    seen = torch.ones(150, 128, dtype=torch.bool)
    views = line.as_strided((150, 128, 32), (32, 32, 1))
    full = sparse_attention(q, views, seen, sink, chosen, some)
    part = slice(9, 9 + count)
    alone = sparse_attention(q[part], views[part].contiguous(), seen[part], sink, chosen[part].contiguous(), some[part])
    assert torch.equal(alone, full[part])
