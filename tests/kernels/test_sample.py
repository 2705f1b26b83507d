from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.sample import Draw, descending_order, kept_tokens, sample, splitmix64, uniform


def plain_top_p(p: torch.Tensor, top_p: float, top_k: int) -> set[int]:
    """The rule as it is written, with a stable sort of everything."""
    ranked, order = torch.sort(p, descending=True, stable=True)
    kept = int((ranked.cumsum(0) - ranked <= top_p).sum()) if top_p < 1 else len(p)
    return set(order[: min(kept, top_k) if top_k > 0 else kept].tolist())


def test_splitmix_gives_the_published_numbers():
    """The first outputs of the reference generator for seeds 0 and 1234567."""
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert splitmix64(1234567) == 6457827717110365317


def test_uniform_is_a_pure_function_and_each_use_has_its_own_stream():
    seen = {uniform(99, position, draw) for position in range(50) for draw in Draw}
    assert len(seen) == 150
    assert uniform(99, 7) == uniform(99, 7)
    assert all(0 <= u < 1 for u in seen)


def test_uniform_takes_the_largest_seed():
    assert 0 <= uniform(2**64 - 1, 2**32) < 1


def test_the_radix_order_is_the_stable_order():
    p = torch.softmax(torch.randn(5000, generator=torch.Generator().manual_seed(3)), 0)
    p[100:2000] = p[50]  # many ties
    want = torch.sort(p, descending=True, stable=True).indices
    assert np.array_equal(descending_order(p.numpy()), want.numpy())


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 12.0])
@pytest.mark.parametrize(("top_p", "top_k"), [(0.95, 0), (0.5, 0), (0.95, 7), (1.0, 40), (0.001, 0), (0.9999, 0)])
def test_the_kept_tokens_are_those_of_a_full_sort(spread, top_p, top_k):
    logits = torch.randn(20000, generator=torch.Generator().manual_seed(4)) * spread
    p = torch.softmax(logits, 0)
    kept = kept_tokens(p, top_p, top_k)
    assert kept is not None
    assert list(kept) == sorted(plain_top_p(p, top_p, top_k))


def test_nothing_is_sorted_when_all_tokens_may_come():
    assert kept_tokens(torch.full((8,), 0.125), 1.0, 0) is None
    assert kept_tokens(torch.full((8,), 0.125), 1.0, 8) is None


def test_greedy_takes_the_first_of_equals():
    logits = torch.zeros(1000)
    logits[[700, 300, 900]] = 5.0
    assert sample(logits, temperature=0.0, top_p=0.1, top_k=1, u=0.99) == 300


def test_the_inverse_cdf_follows_the_probabilities():
    logits = torch.tensor([1.0, 3.0, 2.0, -4.0])
    p = torch.softmax(logits / 0.8, 0)
    draws = [sample(logits, temperature=0.8, top_p=1.0, top_k=0, u=uniform(5, i)) for i in range(4000)]
    share = torch.bincount(torch.tensor(draws), minlength=4) / 4000
    assert torch.allclose(share, p, atol=0.03)


def test_the_ends_of_the_unit_interval_are_tokens():
    logits = torch.tensor([1.0, 3.0, 2.0])
    assert sample(logits, temperature=1.0, top_p=1.0, top_k=0, u=0.0) == 0
    assert sample(logits, temperature=1.0, top_p=1.0, top_k=0, u=1 - 2**-53) == 2


def test_tokens_outside_top_p_never_come():
    logits = torch.tensor([0.0, 5.0, 4.9, 0.1, -1.0])
    draws = {sample(logits, temperature=1.0, top_p=0.9, top_k=0, u=uniform(6, i)) for i in range(500)}
    assert draws == {1, 2}
