"""KV blocks by number: together in one array, to be moved or read in order, and back to where they belong.

    gather:   out[i] = pool[block_i]             scatter:   pool[block_i] = rows[i]

pool: [P, n] uint8 whose rows may lie apart (a component's columns of all blocks: `pool[:, start:end]`, or the ring
of each state), blocks: [B] int64 in 0..P-1 -> out and rows: [B, n] uint8. Scattered block numbers are distinct. On
a GPU numbers are not checked. A byte copy: the kernels have the reference's bits and no arithmetic, so all that
counts is the width of a load; they move the widest words that sizes and addresses allow.
Source: facts-model 7.1 (a block of 114,048 bytes, components at multiples of 16), 14 (kernel 14).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.launch import Pointer, Scalar, constexpr, kernel, tiles, tl

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_STEP = 2048  # words of a program: 16 KiB of the widest, not tuned


def gather_blocks(pool: Tensor, blocks: Tensor) -> Tensor:
    """The blocks of those numbers in one new array.

    Raises: IndexError for a number out of range, on a CPU.
    """
    return gather_blocks_triton(pool, blocks) if pool.is_cuda else pool[blocks]


def scatter_blocks(pool: Tensor, blocks: Tensor, rows: Tensor) -> None:
    """Write each row over the block of its number.

    Raises: IndexError for a number out of range, on a CPU.
    """
    if pool.is_cuda:
        scatter_blocks_triton(pool, blocks, rows)
    else:
        pool[blocks] = rows


@kernel
def _copy_blocks(
    pool: Pointer, blocks: Pointer, rows: Pointer, width: Scalar, pitch: Scalar, back: constexpr, step: constexpr
) -> None:
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * step + tl.arange(0, step)
    there = at < width
    block = pool + tl.load(blocks + row).to(tl.int64) * pitch + at
    line = rows + row * width + at
    if back:
        tl.store(block, tl.load(line, mask=there), mask=there)
    else:
        tl.store(line, tl.load(block, mask=there), mask=there)


def gather_blocks_triton(pool: Tensor, blocks: Tensor) -> Tensor:
    """`gather_blocks` by its kernel."""
    rows = torch.empty((len(blocks), pool.shape[1]), dtype=torch.uint8, device=pool.device)
    _launch(pool, blocks, rows, back=False)
    return rows


def scatter_blocks_triton(pool: Tensor, blocks: Tensor, rows: Tensor) -> None:
    """`scatter_blocks` by its kernel."""
    _launch(pool, blocks, rows.contiguous(), back=True)


def _launch(pool: Tensor, blocks: Tensor, rows: Tensor, *, back: bool) -> None:
    sizes = [pool.shape[1], pool.stride(0)]
    for part in (pool, rows):
        sizes += [int(part.storage_offset()), part.data_ptr()]
    size, word = next((n, word) for n, word in _WORDS.items() if all(value % n == 0 for value in sizes))
    width, pitch = pool.shape[1] // size, pool.stride(0) // size
    grid = (len(blocks), tiles(width, _STEP))
    _copy_blocks[grid](pool.view(word), blocks, rows.view(word), width, pitch, back=back, step=_STEP)
