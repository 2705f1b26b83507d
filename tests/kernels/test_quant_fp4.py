from __future__ import annotations

import pytest
import torch

from kernels.quant_fp4 import (
    GRID,
    e2m1_codes,
    fake_index,
    pack_index,
    pack_index_triton,
    pack_main,
    pack_main_triton,
    pack_nibbles,
    unpack_index,
    unpack_index_triton,
    unpack_main,
    unpack_main_triton,
    unpack_nibbles,
)


def rows(*shape: int, seed: int = 2) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_every_grid_value_has_its_code_and_sign_bit():
    assert e2m1_codes(torch.tensor(GRID)).tolist() == list(range(8))
    assert e2m1_codes(-torch.tensor(GRID)[1:]).tolist() == list(range(9, 16))


@pytest.mark.parametrize(
    ("tie", "value"), [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)]
)
def test_ties_go_to_the_even_code(tie, value):
    exact = torch.tensor(tie)
    around = torch.stack(
        [exact, torch.nextafter(exact, torch.tensor(9.0)), torch.nextafter(exact, torch.tensor(0.0)), -exact]
    )
    codes = e2m1_codes(around)
    found = [(-1 if c >= 8 else 1) * GRID[c % 8] for c in codes.tolist()]
    above, below = min(g for g in GRID if g > tie), max(g for g in GRID if g < tie)
    assert found == [value, above, below, -value]


def test_even_channels_lie_in_the_low_nibble():
    packed = pack_nibbles(torch.tensor([[1, 2, 15, 8]], dtype=torch.uint8))
    assert packed.tolist() == [[0x21, 0x8F]]
    assert unpack_nibbles(packed).tolist() == [[0.5, 1.0, -6.0, -0.0]]


def test_index_rows_read_back_and_use_power_of_two_scales():
    x = rows(9, 64)
    codes, exponents = pack_index(x)
    assert codes.shape == (9, 32)
    assert exponents.shape == (9, 2)
    values = unpack_index(codes, exponents)
    assert torch.equal(values, fake_index(x))
    scale = torch.exp2(torch.ceil(torch.log2(x.view(9, 2, 32).abs().amax(-1) / 6)))
    assert torch.equal(torch.exp2(exponents.float() - 127), scale)
    assert ((values - x).view(9, 2, 32).abs() <= scale.unsqueeze(-1)).all()


def test_main_rows_have_an_e4m3_scale_per_sixteen_channels():
    x = rows(5, 64)
    packed = pack_main(x)
    assert packed.shape == (5, 36)
    scale = packed[:, 32:].contiguous().view(torch.float8_e4m3fn).float()
    assert torch.equal(scale, (x.view(5, 4, 16).abs().amax(-1) / 6).to(torch.float8_e4m3fn).float())
    grid = unpack_main(packed).view(5, 4, 16) / scale.unsqueeze(-1)
    assert set(grid.abs().flatten().tolist()) <= set(GRID)


def test_the_largest_of_a_block_is_clipped_to_six_scales():
    x = torch.zeros(1, 16)
    x[0, 0], x[0, 1] = 3.3, -3.3  # 0.55 rounds down to 0.5625 or up; the value may exceed 6 scales
    scale = torch.tensor(3.3 / 6).to(torch.float8_e4m3fn).float().item()
    assert unpack_main(pack_main(x))[0, :2].tolist() == [6 * scale, -6 * scale]


@pytest.mark.parametrize("width", [32, 64])
def test_zeros_stay_zero(width):
    zeros = torch.zeros(3, width)
    assert unpack_main(pack_main(zeros)).eq(0).all()
    assert fake_index(zeros).eq(0).all()


def test_tiny_blocks_keep_the_least_main_scale():
    packed = pack_main(torch.full((1, 16), 2.0**-12))
    assert packed[0, 8:].view(torch.float8_e4m3fn).float().item() == 2.0**-9


def awkward(*shape: int, width: int) -> torch.Tensor:
    """Rows of very different sizes, with blocks of zeros, of subnormals, of the largest numbers and of grid ties."""
    x = rows(*shape, width) * torch.exp2(
        torch.randint(-20, 12, (*shape, 1), generator=torch.Generator().manual_seed(6))
    )
    flat = x.view(-1, 16)
    for block, value in enumerate((0.0, 1e-42, 2.5e38, 6 * 448.0, 2.0**-12, 6.0000005, -0.0)):
        flat[block::10] = value
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    flat[7::10] = torch.cat([ties, -ties])
    flat[8::10] = torch.cat([torch.nextafter(ties, torch.tensor(9.0)), torch.nextafter(-ties, torch.tensor(9.0))])
    return x


@pytest.mark.parametrize(("shape", "width"), [((1,), 32), ((7,), 96), ((3, 5), 64), ((150,), 32), ((0,), 64)])
def test_the_kernels_have_the_references_bits(poisoned, shape, width):
    x = awkward(*shape, width=width)
    codes, exponents = pack_index(x)
    found, scales = pack_index_triton(x)
    assert torch.equal(found, codes)
    assert torch.equal(scales, exponents)
    assert torch.equal(unpack_index_triton(codes, exponents), unpack_index(codes, exponents))
    packed = pack_main(x)
    assert torch.equal(pack_main_triton(x), packed)
    assert torch.equal(unpack_main_triton(packed), unpack_main(packed))


@pytest.mark.filterwarnings("ignore:.* encountered in multiply")  # in the interpreter: scale 255 is infinity
def test_every_code_and_scale_byte_is_read_as_the_reference_reads_it(poisoned):
    codes, scales = torch.arange(256, dtype=torch.uint8), torch.arange(256, dtype=torch.uint8)
    main = torch.cat([codes.view(32, 8).repeat(256, 1), scales.repeat_interleave(32).unsqueeze(1)], 1)
    values, wanted = unpack_main_triton(main), unpack_main(main)
    assert torch.equal(values.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert torch.equal(values.isnan(), wanted.isnan())
    index = codes.view(16, 16).repeat(256, 1), scales.repeat_interleave(16).unsqueeze(1)
    assert torch.equal(unpack_index_triton(*index).nan_to_num(7.0), unpack_index(*index).nan_to_num(7.0))


def test_the_kernels_round_bf16_rows_and_strided_ones(poisoned):
    x = rows(9, 128).bfloat16()
    assert torch.equal(pack_main_triton(x), pack_main(x.float()))
    codes, exponents = pack_index_triton(x[::2, 32:96])
    assert torch.equal(unpack_index(codes, exponents), fake_index(x[::2, 32:96].float()))
