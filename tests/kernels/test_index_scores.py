from __future__ import annotations

import pytest
import torch

from kernels.index_scores import index_scores, index_scores_triton
from kernels.quant_fp4 import fake_index


def random(*shape: int, seed: int = 18) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width", [32, 128])
def test_scores_are_exact_sums_in_head_order(width):
    q, w, k = fake_index(random(19, 16, width)), random(19, 16, seed=19), fake_index(random(701, width, seed=20))
    scores = index_scores(q, w, k)
    dots = torch.einsum("thd,nd->thn", q.double(), k.double()).float().clamp_min(0)
    want = dots[:, 0] * w[:, 0, None]
    for head in range(1, 16):
        want += dots[:, head] * w[:, head, None]
    assert torch.equal(scores, want) if width == 32 else torch.allclose(scores, want, atol=1e-4)


@pytest.mark.parametrize("width", [32, 128])
def test_scores_do_not_depend_on_company_or_context(width):
    q, w, k = fake_index(random(150, 16, width)), random(150, 16, seed=19), fake_index(random(2000, width, seed=20))
    full = index_scores(q, w, k)
    for rows, entries in ((1, 2000), (3, 17), (16, 1), (150, 33)):
        assert torch.equal(index_scores(q[5 : 5 + rows], w[5 : 5 + rows], k[:entries]), full[5 : 5 + rows, :entries])


def test_no_entries_give_no_scores():
    assert index_scores(random(3, 4, 32), random(3, 4), random(0, 32)).shape == (3, 0)


@pytest.mark.parametrize(("rows", "heads", "width", "entries"), [(1, 32, 128, 65), (35, 16, 32, 3), (3, 5, 96, 130)])
def test_the_kernel_agrees_with_the_reference(poisoned, rows, heads, width, entries):
    q, w, k = fake_index(random(rows, heads, width)), random(rows, heads, seed=19), fake_index(random(entries, width))
    scores, wanted = index_scores_triton(q, w, k), index_scores(q, w, k)
    largest = index_scores(q, w.abs(), k)
    assert ((scores - wanted).abs() <= 1e-5 * largest).all()


def test_the_kernel_is_exact_where_every_sum_is(poisoned):
    """Weights that are small integers: no order of sums rounds anything."""
    q, k = fake_index(random(19, 16, 64) * 0 + torch.randint(-6, 7, (19, 16, 64))), fake_index(random(70, 64).round())
    w = torch.randint(-3, 4, (19, 16), generator=torch.Generator().manual_seed(2)).float()
    assert torch.equal(index_scores_triton(q, w, k), index_scores(q, w, k))


def test_scores_of_the_kernel_do_not_depend_on_company_or_context(poisoned):
    q, w, k = fake_index(random(40, 16, 32)), random(40, 16, seed=19), fake_index(random(150, 32, seed=20))
    full = index_scores_triton(q, w, k)
    for rows, entries in ((1, 150), (3, 17), (33, 1)):
        part = index_scores_triton(q[5 : 5 + rows], w[5 : 5 + rows], k[:entries])
        assert torch.equal(part, full[5 : 5 + rows, :entries])


@pytest.mark.parametrize(("rows", "entries"), [(3, 0), (0, 5)])
def test_the_kernel_with_nothing_to_score(poisoned, rows, entries):
    found = index_scores_triton(random(rows, 4, 32), random(rows, 4), random(entries, 32))
    assert found.shape == (rows, entries)
