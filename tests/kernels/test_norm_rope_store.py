from __future__ import annotations

import pytest
import torch

from kernels.norm_rope_store import (
    store_index,
    store_index_triton,
    store_main,
    store_main_triton,
    store_window,
    store_window_triton,
)
from kernels.quant_fp4 import unpack_index, unpack_main
from kernels.quant_fp8 import unpack_q8
from kernels.rmsnorm import rmsnorm
from kernels.rope import rope_frequencies, rope_table, rotate

SLOTS, PLACES = torch.tensor([0, 1, 2, 0, 1, 2, 0]), torch.tensor([0, 1, 2, 3, 4, 0, 1])
EPS = 1e-20
SHAPES = [(32, 32), (64, 16), (96, 2), (512, 64)]  # width, rotated channels


def random(*shape: int, seed: int = 50) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact_rows(width: int) -> torch.Tensor:
    """Rows whose mean square is 4 in every order of sums: no rounding can tell the kernel from the reference."""
    sign = torch.where(random(7, width) > 0, 2.0, -2.0)
    sign[:, :4] = torch.tensor([4.0, 0.0, 0.0, 0.0])
    return sign


def rope(turned: int) -> torch.Tensor:
    return rope_table(rope_frequencies(turned, 1e4), 50)[torch.tensor([0, 1, 7, 49, 20, 20, 3])]


def poison(*shape: int) -> torch.Tensor:
    """Rows that lie apart, with columns between them that nobody may write."""
    return torch.full((*shape[:2], shape[2] + 7), 255, dtype=torch.uint8)[:, :, 3 : 3 + shape[2]]


def between(rows: torch.Tensor) -> torch.Tensor:
    """What lies around the rows of `poison`."""
    assert rows._base is not None
    return torch.cat([rows._base[:, :, :3], rows._base[:, :, 3 + rows.shape[2] :]], 2)


@pytest.mark.parametrize(("width", "turned"), SHAPES)
def test_exact_rows_have_the_references_bits(poisoned, width, turned):
    x, weight, table = exact_rows(width), random(width, seed=51), rope(turned)
    found, wanted = poison(3, 5, width * 33 // 32), poison(3, 5, width * 33 // 32)
    values = store_window_triton(x, weight, EPS, table, found, SLOTS, PLACES)
    assert torch.equal(values, store_window(x, weight, EPS, table, wanted, SLOTS, PLACES))
    assert torch.equal(found, wanted)
    assert between(found).eq(255).all()
    found, wanted = poison(3, 5, width * 9 // 16), poison(3, 5, width * 9 // 16)
    latent = store_main_triton(x, weight, EPS, table, found, SLOTS, PLACES)
    assert torch.equal(latent, store_main(x, weight, EPS, table, wanted, SLOTS, PLACES))
    assert torch.equal(found, wanted)
    assert between(found).eq(255).all()
    found, wanted = poison(3, 5, width // 2), poison(3, 5, width // 2)
    scales, exponents = poison(3, 5, width // 32), poison(3, 5, width // 32)
    store_index_triton(x, weight, EPS, table, found, scales, SLOTS, PLACES)
    store_index(x, weight, EPS, table, wanted, exponents, SLOTS, PLACES)
    assert torch.equal(found, wanted)
    assert torch.equal(scales, exponents)
    assert between(found).eq(255).all()
    assert between(scales).eq(255).all()


@pytest.mark.parametrize(("width", "turned"), SHAPES)
def test_any_rows_differ_in_few_codes_by_one_step(poisoned, width, turned):
    x, weight, table = random(7, width) * 30, random(width, seed=51), rope(turned)
    found, wanted = poison(3, 5, width * 33 // 32), poison(3, 5, width * 33 // 32)
    values = store_window_triton(x, weight, EPS, table, found, SLOTS, PLACES)
    assert torch.equal(values, unpack_q8(found[SLOTS, PLACES]))
    assert torch.allclose(values, store_window(x, weight, EPS, table, wanted, SLOTS, PLACES), rtol=1 / 8, atol=1e-3)
    assert (found != wanted).float().mean() < 0.01
    found, wanted = poison(3, 5, width * 9 // 16), poison(3, 5, width * 9 // 16)
    latent = store_main_triton(x, weight, EPS, table, found, SLOTS, PLACES)
    assert torch.allclose(latent, store_main(x, weight, EPS, table, wanted, SLOTS, PLACES), rtol=1e-6, atol=1e-6)
    assert (found != wanted).float().mean() < 0.01


def test_the_references_store_what_the_operations_give_one_by_one():
    x, weight, table = random(7, 64), random(64, seed=51), rope(16)
    turned = rotate(rmsnorm(x, weight, EPS), table)
    ring, main = poison(3, 5, 66), poison(3, 5, 36)
    codes, exponents = poison(3, 5, 32), poison(3, 5, 2)
    store_window(x, weight, EPS, table, ring, SLOTS, PLACES)
    store_main(x, weight, EPS, table, main, SLOTS, PLACES)
    store_index(x, weight, EPS, table, codes, exponents, SLOTS, PLACES)
    assert torch.allclose(unpack_q8(ring[SLOTS, PLACES]), turned, rtol=1 / 8, atol=1e-2)
    assert torch.allclose(unpack_main(main[SLOTS, PLACES]), turned, rtol=1 / 3, atol=0.3)
    assert torch.allclose(unpack_index(codes[SLOTS, PLACES], exponents[SLOTS, PLACES]), turned, rtol=1 / 3, atol=0.3)


def test_rows_without_a_place_have_values_and_are_not_stored(poisoned):
    x, weight, table, ring = exact_rows(64), random(64, seed=51), rope(16), poison(3, 5, 66)
    nowhere = torch.full((7,), -1)
    values = store_window_triton(x, weight, EPS, table, ring, SLOTS, nowhere)
    assert torch.equal(values, store_window(x, weight, EPS, table, ring, SLOTS, nowhere))
    assert ring.eq(255).all()


def test_rows_of_zeros_and_no_rows(poisoned):
    weight, ring = random(64, seed=51), poison(3, 5, 66)
    values = store_window_triton(torch.zeros(7, 64), weight, EPS, rope(16), ring, SLOTS, PLACES)
    assert values.eq(0).all()
    none = torch.zeros(0, dtype=torch.int64)
    assert store_main_triton(torch.zeros(0, 64), weight, EPS, rope(16)[:0], ring, none, none).shape == (0, 64)


def test_bf16_rows_are_widened_first(poisoned):
    x, weight, table = exact_rows(64).bfloat16(), random(64, seed=51), rope(16)
    found, wanted = poison(3, 5, 66), poison(3, 5, 66)
    store_window_triton(x, weight, EPS, table, found, SLOTS, PLACES)
    store_window(x, weight, EPS, table, wanted, SLOTS, PLACES)
    assert torch.equal(found, wanted)
