from __future__ import annotations

import pytest
import torch

from kernels.sparse_attention import sparse_attention, sparse_attention_triton


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


@pytest.mark.parametrize(("heads", "width", "top"), [(4, 32, None), (64, 96, 40), (17, 64, 1), (1, 512, 33)])
def test_the_kernel_agrees_with_the_reference_and_never_reads_hidden_keys(poisoned, heads, width, top):
    q, window, sink = random(3, heads, width), random(3, 33, width, seed=23), random(heads, seed=24)
    seen = random(3, 33, seed=25) > 0
    more = () if top is None else (random(3, top, width, seed=26), random(3, top, seed=27) > 0)
    wanted = sparse_attention(q, window, seen, sink, *more)
    for keys, shown in ((window, seen), *([more] if more else [])):
        keys[~shown] = float("nan")
    found = sparse_attention_triton(q, window, seen, sink, *more)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-5)


def test_the_kernel_takes_overlapping_windows_and_masks_that_are_views(poisoned):
    q, line, sink = random(9, 4, 32), random(9 + 15, 32, seed=26), random(4)
    windows = line.as_strided((9, 16, 32), (32, 32, 1))
    for seen in ((torch.arange(16) > 2).expand(9, 16), random(16, 9).t() > 0):
        wanted = sparse_attention(q, windows, seen, sink)
        assert torch.allclose(sparse_attention_triton(q, windows, seen, sink), wanted, rtol=0, atol=1e-5)


def test_a_damaged_head_spoils_no_other(poisoned):
    q, window, sink, seen = random(2, 3, 96), random(2, 16, 96), random(3), torch.ones(2, 16, dtype=torch.bool)
    wanted = sparse_attention(q, window, seen, sink)
    q[:, 1] = float("nan")
    found = sparse_attention_triton(q, window, seen, sink)
    assert torch.allclose(found[:, ::2], wanted[:, ::2], rtol=0, atol=1e-5)
    assert found[:, 1].isnan().all()


def test_the_kernel_with_no_rows_or_no_visible_keys(poisoned):
    hidden = torch.zeros(2, 16, dtype=torch.bool)
    assert sparse_attention_triton(random(2, 4, 32), random(2, 16, 32), hidden, random(4)).eq(0).all()
    empty = sparse_attention_triton(random(0, 4, 32), random(0, 16, 32), hidden[:0], random(4))
    assert empty.shape == (0, 4, 32)


def test_the_kernel_survives_extreme_scores(poisoned):
    q, window, sink = random(2, 4, 32) * 1e4, random(2, 40, 32, seed=23) * 100, torch.tensor([1e5, -1e5, 0.0, 50.0])
    seen = torch.ones(2, 40, dtype=torch.bool)
    wanted = sparse_attention(q, window, seen, sink)
    assert wanted.isfinite().all()
    assert torch.allclose(sparse_attention_triton(q, window, seen, sink), wanted, rtol=0, atol=1e-5 * 400)


def test_a_rows_bits_from_the_kernel_do_not_depend_on_its_company(poisoned):
    q, window, sink, seen = random(5, 4, 32), random(5, 40, 32, seed=23), random(4), random(5, 40, seed=25) > 0
    full = sparse_attention_triton(q, window, seen, sink)
    assert torch.equal(sparse_attention_triton(q[3:4], window[3:4], seen[3:4], sink), full[3:4])
