from __future__ import annotations

import pytest
import torch

from kernels.quant_fp8 import exponent_value, fake_q8, pack_q8, power_of_two_scale, round_e4m3, unpack_q8


def rows(*shape: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * torch.exp(3 * torch.randn(*shape, generator=generator))


def test_rounding_equals_a_cast_for_every_magnitude_and_tie():
    grid = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    grid = grid[grid.isfinite()].sort().values.unique()
    middles = (grid[:-1] + grid[1:]) / 2
    around = torch.cat(
        [middles, torch.nextafter(middles, torch.tensor(1e9)), torch.nextafter(middles, torch.tensor(-1e9))]
    )
    values = torch.cat([grid, around, rows(100_000).clamp(-448, 448)])
    assert torch.equal(round_e4m3(values), values.to(torch.float8_e4m3fn).float())


def test_the_scale_is_the_power_of_two_at_or_above():
    x = torch.tensor([1.0, 1.0000001, 0.75, 2.0, 3.0, 2.0**-20, 2.0**-20 * 1.5])
    assert power_of_two_scale(x).tolist() == [1.0, 2.0, 1.0, 2.0, 4.0, 2.0**-20, 2.0**-19]


def test_no_value_leaves_the_range_at_the_edge_of_a_scale():
    """amax just above 448 * 2^k must take the next scale."""
    edge = torch.tensor(448.0)
    for amax in (edge, torch.nextafter(edge, torch.tensor(1e9)), torch.nextafter(edge, torch.tensor(0.0))):
        x = torch.zeros(1, 32)
        x[0, 3] = amax
        packed, values = pack_q8(x)
        assert values[0, 3] == 448.0
        assert packed[0, 32] == (127 if amax <= 448 else 128)


def test_a_packed_row_reads_back_as_the_fake_quantised_one():
    x = rows(7, 96)
    packed, values = pack_q8(x)
    assert packed.shape == (7, 99)
    assert torch.equal(unpack_q8(packed), values)
    assert torch.equal(values, fake_q8(x))


def test_quantising_twice_changes_nothing():
    once = fake_q8(rows(50, 64))
    assert torch.equal(fake_q8(once), once)


def test_rows_of_zeros_stay_zero():
    packed, values = pack_q8(torch.zeros(2, 32))
    assert values.eq(0).all()
    assert unpack_q8(packed).eq(0).all()
    assert unpack_q8(torch.zeros(2, 33, dtype=torch.uint8)).eq(0).all()


@pytest.mark.parametrize(("byte", "value"), [(0, 2.0**-127), (1, 2.0**-126), (127, 1.0), (130, 8.0), (254, 2.0**127)])
def test_exponent_bytes(byte, value):
    assert exponent_value(torch.tensor([byte], dtype=torch.uint8)).item() == value


@pytest.mark.parametrize("count", [1, 3, 16, 33])
def test_a_rows_bits_do_not_depend_on_its_company(count):
    x = rows(64, 64)
    assert torch.equal(fake_q8(x[5 : 5 + count]), fake_q8(x)[5 : 5 + count])
