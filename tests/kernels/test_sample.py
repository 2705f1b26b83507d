from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.launch import Pointer, kernel, tl
from kernels.sample import (
    Draw,
    _uniform,
    descending_order,
    kept_tokens,
    sample,
    sample_rows,
    sample_rows_triton,
    splitmix64,
    uniform,
)


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


@kernel
def _draws(seeds: Pointer, positions: Pointer, out: Pointer) -> None:
    at = tl.program_id(0)
    tl.store(out + at, _uniform(tl.load(seeds + at), tl.load(positions + at)))


def test_uniform_in_a_kernel_has_the_same_bits():
    seeds = torch.tensor([0, 1, -1, 1234567, -(2**63), 2**63 - 1, 99])
    positions = torch.tensor([0, 1, 2**32, 5, 2**20, 7, 129_000])
    out = torch.full((7,), float("nan"), dtype=torch.float64)
    _draws[(7,)](seeds, positions, out)
    want = [uniform(seed % 2**64, at) for seed, at in zip(seeds.tolist(), positions.tolist(), strict=True)]
    assert out.tolist() == want


def parameters(rows: int) -> list[torch.Tensor]:
    """temperature, top_p, top_k, seeds, positions: greedy, free, limited by mass, by number, and by both."""
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.0, 1.3, 0.5, 9e-6, 1e-4]).repeat(rows)[:rows]
    top_p = torch.tensor([0.1, 1.0, 0.95, 0.5, 1.0, 0.9, 1.0, 0.001]).repeat(rows)[:rows]
    top_k = torch.tensor([1, 0, 0, -1, 40, 13, 0, 5]).repeat(rows)[:rows]
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=torch.Generator().manual_seed(8))
    return [temperature, top_p, top_k, seeds, torch.arange(rows) * 1000]


@pytest.mark.parametrize(("width", "spread"), [(1, 1.0), (4095, 3.0), (4097, 0.3), (900, 12.0), (130, 0.0)])
def test_the_kernel_gives_the_references_tokens(poisoned, width, spread):
    logits = torch.randn(16, width, generator=torch.Generator().manual_seed(9)) * spread
    given = parameters(16)
    assert torch.equal(sample_rows_triton(logits, *given), sample_rows(logits, *given))


def test_the_kernel_keeps_the_lowest_ids_of_equals(poisoned):
    """Forty equal tokens of which top-k, or top-p, keeps a few: every draw is among the first."""
    logits, u = torch.zeros(1, 40), torch.linspace(0, 1 - 2**-53, 5, dtype=torch.float64)
    for top_p, top_k, kept in ((1.0, 3, 3), (0.24, 0, 10), (0.24, 7, 7)):
        mass, number = torch.full((5,), top_p), torch.full((5,), top_k)
        found = sample_rows_triton(logits.expand(5, 40), torch.ones(5), mass, number, u).tolist()
        assert found == [sample(logits[0], temperature=1.0, top_p=top_p, top_k=top_k, u=float(v)) for v in u]
        assert set(found) <= set(range(kept))
        assert found[-1] == kept - 1


def test_the_ends_of_the_unit_interval_are_tokens_in_the_kernel(poisoned):
    """Where rounding leaves no token, as u = 1 does, it is the last one kept."""
    logits = torch.tensor([float("-inf"), 1.0, 3.0, 2.0, float("-inf")])
    u = torch.tensor([0.0, 1 - 2**-53, 1.0], dtype=torch.float64)
    found = sample_rows_triton(logits.expand(3, 5), torch.ones(3), torch.ones(3), torch.zeros(3, dtype=torch.int64), u)
    assert found.tolist() == [1, 3, 4]
    assert [sample(logits, temperature=1.0, top_p=1.0, top_k=0, u=float(v)) for v in u] == [1, 3, 4]


def test_the_kernel_draws_from_every_tile(poisoned):
    logits = torch.randn(9000, generator=torch.Generator().manual_seed(10)).expand(4, 9000)
    u, off = torch.tensor([0.2, 0.5, 0.7, 0.95], dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    found = sample_rows_triton(logits, torch.ones(4), torch.ones(4), off, u).tolist()
    assert found == [sample(logits[0], temperature=1.0, top_p=1.0, top_k=0, u=float(v)) for v in u]
    assert {place // 4096 for place in found} == {0, 1, 2}


def test_equals_are_counted_across_tiles(poisoned):
    """5,000 of 9,000 equal tokens are kept: the draw is among them, and as far along as u says."""
    u, one = torch.tensor([0.1, 0.9], dtype=torch.float64), torch.ones(2)
    found = sample_rows_triton(torch.zeros(2, 9000), one, one, torch.tensor([5000, 5000]), u).tolist()
    assert found == [sample(torch.zeros(9000), temperature=1.0, top_p=1.0, top_k=5000, u=float(v)) for v in u]
    assert [round(place / 5000, 2) for place in found] == [0.1, 0.9]


def test_greedy_takes_the_first_of_equals_in_the_kernel_across_tiles(poisoned):
    logits = torch.zeros(2, 9000)
    logits[0, [4200, 8999]], logits[1] = 5.0, -7.0
    greedy = [torch.zeros(2), torch.ones(2), torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.float64)]
    assert sample_rows_triton(logits, *greedy).tolist() == [4200, 0]


def test_the_kernel_with_no_rows(poisoned):
    assert sample_rows_triton(torch.zeros(0, 9), *parameters(0)).shape == (0,)
