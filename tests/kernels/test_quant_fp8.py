from __future__ import annotations

import pytest
import torch

from kernels.quant_fp8 import (
    exponent_value,
    fake_q8,
    fake_q8_triton,
    pack_q8,
    pack_q8_triton,
    power_of_two_scale,
    round_e4m3,
    unpack_q8,
    unpack_q8_triton,
)


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


def awkward(*shape: int, width: int) -> torch.Tensor:
    """Rows of very different sizes, with blocks of zeros, of ties, of subnormals and of the largest numbers."""
    x = rows(*shape, width) * torch.exp2(
        torch.randint(-30, 30, (*shape, 1), generator=torch.Generator().manual_seed(5))
    )
    flat = x.view(-1, 32)
    for block, value in enumerate((0.0, 1e-42, 2.5e38, 448.0, 448.00003, 1e-4, -0.0)):
        flat[block::8] = value
    flat[7::8] = torch.arange(32) * 8.5 - 100  # halves between codes of scale 1
    return x


@pytest.mark.parametrize(("shape", "width"), [((1,), 32), ((7,), 96), ((3, 5), 64), ((130,), 32), ((0,), 64)])
def test_the_kernels_have_the_references_bits(poisoned, shape, width):
    x = awkward(*shape, width=width)
    packed, values = pack_q8_triton(x)
    wanted, seen = pack_q8(x)
    assert torch.equal(packed, wanted)
    assert torch.equal(values, seen)
    assert torch.equal(fake_q8_triton(x), seen)
    assert torch.equal(unpack_q8_triton(wanted), unpack_q8(wanted))


@pytest.mark.filterwarnings("ignore:.* encountered in multiply")  # in the interpreter: scale 255 is infinity
def test_every_code_and_scale_byte_is_read_as_the_reference_reads_it(poisoned):
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
    scales = torch.arange(256, dtype=torch.uint8)
    packed = torch.cat([codes.repeat(256, 1), scales.repeat_interleave(8).unsqueeze(1)], 1)
    values, wanted = unpack_q8_triton(packed), unpack_q8(packed)
    assert torch.equal(values.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert torch.equal(values.isnan(), wanted.isnan())


def test_the_kernels_round_bf16_rows_and_strided_ones(poisoned):
    x = rows(9, 128).bfloat16()
    assert torch.equal(pack_q8_triton(x)[0], pack_q8(x.float())[0])
    assert torch.equal(fake_q8_triton(x[::2, 32:96]), fake_q8(x[::2, 32:96].float()))


def test_the_kernels_code_is_right_at_every_magnitude_and_tie(poisoned):
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (grid[:-1] + grid[1:]) / 2
    around = [middles, torch.nextafter(middles, torch.tensor(1e9)), torch.nextafter(middles, torch.tensor(0.0)), grid]
    y = torch.cat([*around, -torch.cat(around)])
    x = torch.full((len(y), 32), 448.0)  # the block's scale is 1
    x[:, 3] = y
    codes = pack_q8_triton(x)[0][:, 3]
    assert torch.equal(codes, y.to(torch.float8_e4m3fn).view(torch.uint8))
