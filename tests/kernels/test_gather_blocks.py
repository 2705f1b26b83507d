from __future__ import annotations

import pytest
import torch

from kernels.gather_blocks import gather_blocks, gather_blocks_triton, scatter_blocks, scatter_blocks_triton

# where the columns lie decides the width of the words: 8, 4, 2 and 1 bytes
COLUMNS = [slice(0, 5008), slice(8, 4000), slice(4, 16), slice(2, 144), slice(3, 140), slice(5, 5)]


def bytes_of(*shape: int, seed: int = 40) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("blocks", [[3, 0, 8, 3], [7], []])
def test_the_kernel_gathers_what_the_reference_gathers(poisoned, columns, blocks):
    pool, numbers = bytes_of(9, 5008), torch.tensor(blocks, dtype=torch.int64)
    found = gather_blocks_triton(pool[:, columns], numbers)
    assert torch.equal(found, gather_blocks(pool[:, columns], numbers))
    assert found.is_contiguous()


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("blocks", [[3, 0, 8], [7], []])
def test_the_kernel_scatters_and_touches_nothing_else(columns, blocks):
    pool, numbers = bytes_of(9, 5008), torch.tensor(blocks, dtype=torch.int64)
    rows, wanted = bytes_of(len(blocks), columns.stop - columns.start, seed=41), pool.clone()
    scatter_blocks(wanted[:, columns], numbers, rows)
    scatter_blocks_triton(pool[:, columns], numbers, rows)
    assert torch.equal(pool, wanted)


def test_blocks_come_back_to_where_they_were():
    pool, numbers = bytes_of(9, 96), torch.tensor([4, 2])
    wanted = pool.clone()
    rows = gather_blocks(pool, numbers)
    pool[numbers] = 255
    scatter_blocks(pool, numbers, rows)
    assert torch.equal(pool, wanted)


def test_a_number_out_of_range_is_an_error_on_a_cpu():
    with pytest.raises(IndexError):
        gather_blocks(bytes_of(9, 96), torch.tensor([9]))
