"""A KV row from its projection in one pass: norm, rotation, quantisation, and its bytes to where readers look.

    y = rotate(rmsnorm(x, w), C, S)
    window: ring[slot, place] = Q8 bytes of y; returns Q8 values of y      (place -1: not stored)
    main:   main[block, slot] = Q4 bytes of y; returns rmsnorm(x, w), which the index key is made of
    index:  codes[block, slot], exponents[block, slot] = Q4i bytes of y

x: [T, d] fp32 or bf16, w: [d], C and S: [T, r] as one [T, 2 r] of `rope_table` rows, all fp32; ring [S, R, d + d/32],
main [P, E, d/2 + d/16], codes [P, E, d/2], exponents [P, E, d/32]: uint8, bytes of an entry beside each other, any
other strides; slots, places, blocks: [T] int64. No two rows share a stored place. On a GPU places are not checked.
The Triton kernels keep a row in registers between the steps: 3 reads and writes of [T, d] fewer than the four
operations one by one. They sum squares in another order, so a value on the edge between two codes may take the
other one; otherwise their bits are the references'.
Source: facts-model 3.1-3.3 (order), 7 and 7.1 (bytes), 14 (kernels 3, 6, 7).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.launch import EXACT, Pointer, Scalar, Tile, constexpr, kernel, power_of_two, tl
from kernels.quant_fp4 import INDEX_BLOCK, MAIN_BLOCK, e2m1_code, index_exponent, main_scale_code, pack_index, pack_main
from kernels.quant_fp8 import BLOCK, e4m3_code, e4m3_value, exponent_scale, inverse_scale, pack_q8, q8_exponent
from kernels.rmsnorm import rmsnorm
from kernels.rope import rotate


def store_window(
    x: Tensor, weight: Tensor, eps: float, rope: Tensor, ring: Tensor, slots: Tensor, places: Tensor
) -> Tensor:
    """Store window rows; the values [T, d] fp32 that a reader of them sees."""
    if x.is_cuda:
        return store_window_triton(x, weight, eps, rope, ring, slots, places)
    packed, values = pack_q8(rotate(rmsnorm(x.float(), weight, eps), rope))
    stored = places >= 0
    ring[slots[stored], places[stored]] = packed[stored]
    return values


def store_main(
    x: Tensor, weight: Tensor, eps: float, rope: Tensor, main: Tensor, blocks: Tensor, slots: Tensor
) -> Tensor:
    """Store main rows of latents x; the normed latents [T, d] fp32, not rotated."""
    if x.is_cuda:
        return store_main_triton(x, weight, eps, rope, main, blocks, slots)
    latent = rmsnorm(x.float(), weight, eps)
    main[blocks, slots] = pack_main(rotate(latent.clone(), rope))
    return latent


def store_index(
    x: Tensor,
    weight: Tensor,
    eps: float,
    rope: Tensor,
    codes: Tensor,
    exponents: Tensor,
    blocks: Tensor,
    slots: Tensor,
) -> None:
    """Store index keys."""
    if x.is_cuda:
        return store_index_triton(x, weight, eps, rope, codes, exponents, blocks, slots)
    codes[blocks, slots], exponents[blocks, slots] = pack_index(rotate(rmsnorm(x.float(), weight, eps), rope))
    return None


@kernel
def _normed(x: Pointer, weight: Pointer, eps: Scalar, row: Tile, width: Scalar, pair: Tile) -> Tile:
    """Normed channels 2 pair and 2 pair + 1 of one row, zeros beyond its end."""
    inside = pair * 2 < width
    x += row * width
    even = tl.load(x + pair * 2, mask=inside, other=0).to(tl.float32)
    odd = tl.load(x + pair * 2 + 1, mask=inside, other=0).to(tl.float32)
    mean = tl.div_rn(tl.sum(tl.sum(even * even + odd * odd, 1), 0), width.to(tl.float32))
    inverse = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    even = even * inverse * tl.load(weight + pair * 2, mask=inside, other=0)
    odd = odd * inverse * tl.load(weight + pair * 2 + 1, mask=inside, other=0)
    return even, odd


@kernel
def _rotated(even: Tile, odd: Tile, rope: Pointer, row: Tile, width: Scalar, turned: Scalar, pair: Tile) -> Tile:
    """The last `turned` channels rotated by that row of the table."""
    at = pair * 2 - (width - turned)
    inside = (at >= 0) & (at < turned)
    rope += row * turned * 2
    cos = tl.load(rope + at, mask=inside, other=1)
    sin = tl.load(rope + turned + at + 1, mask=inside, other=0)
    return tl.where(inside, even * cos - odd * sin, even), tl.where(inside, odd * cos + even * sin, odd)


@kernel
def _pairs(blocks: constexpr, half: constexpr) -> Tile:
    """Numbers of channel pairs as [blocks, half]."""
    return tl.arange(0, blocks)[:, None] * half + tl.arange(0, half)[None, :]


@kernel
def _largest(even: Tile, odd: Tile) -> Tile:
    """The largest magnitude of each block of channels."""
    return tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 1)


@kernel
def _store_window(  # noqa: PLR0917  the arrays of the whole chain, their sizes and strides
    x: Pointer, weight: Pointer, eps: Scalar, rope: Pointer, ring: Pointer, slots: Pointer, places: Pointer,
    values: Pointer, width: Scalar, turned: Scalar, pitch: Scalar, entry_pitch: Scalar, blocks: constexpr,
) -> None:  # fmt: skip
    row, pair, block = tl.program_id(0).to(tl.int64), _pairs(blocks, 16), tl.arange(0, blocks)
    even, odd = _normed(x, weight, eps, row, width, pair)
    even, odd = _rotated(even, odd, rope, row, width, turned, pair)
    exponent = q8_exponent(_largest(even, odd))
    inverse, scale, inside = inverse_scale(exponent)[:, None], exponent_scale(exponent)[:, None], pair * 2 < width
    even, odd = e4m3_code(even * inverse), e4m3_code(odd * inverse)
    tl.store(values + row * width + pair * 2, e4m3_value(even) * scale, mask=inside)
    tl.store(values + row * width + pair * 2 + 1, e4m3_value(odd) * scale, mask=inside)
    place = tl.load(places + row)
    ring += tl.load(slots + row) * pitch + place * entry_pitch
    inside = inside & (place >= 0)
    tl.store(ring + pair * 2, even.to(tl.uint8), mask=inside)
    tl.store(ring + pair * 2 + 1, odd.to(tl.uint8), mask=inside)
    tl.store(ring + width + block, exponent.to(tl.uint8), mask=(block * 32 < width) & (place >= 0))


@kernel
def _store_main(  # noqa: PLR0917  the arrays of the whole chain, their sizes and strides
    x: Pointer, weight: Pointer, eps: Scalar, rope: Pointer, main: Pointer, numbers: Pointer, slots: Pointer,
    latent: Pointer, width: Scalar, turned: Scalar, pitch: Scalar, entry_pitch: Scalar, blocks: constexpr,
) -> None:  # fmt: skip
    row, pair, block = tl.program_id(0).to(tl.int64), _pairs(blocks, 8), tl.arange(0, blocks)
    even, odd = _normed(x, weight, eps, row, width, pair)
    inside = pair * 2 < width
    tl.store(latent + row * width + pair * 2, even, mask=inside)
    tl.store(latent + row * width + pair * 2 + 1, odd, mask=inside)
    even, odd = _rotated(even, odd, rope, row, width, turned, pair)
    scale_code = main_scale_code(_largest(even, odd))
    scale = e4m3_value(scale_code)[:, None]
    code = e2m1_code(tl.div_rn(even, scale)) | (e2m1_code(tl.div_rn(odd, scale)) << 4)
    main += tl.load(numbers + row) * pitch + tl.load(slots + row) * entry_pitch
    tl.store(main + pair, code.to(tl.uint8), mask=inside)
    tl.store(main + width // 2 + block, scale_code.to(tl.uint8), mask=block * 16 < width)


@kernel
def _store_index(  # noqa: PLR0917  the arrays of the whole chain, their sizes and strides
    x: Pointer, weight: Pointer, eps: Scalar, rope: Pointer, codes: Pointer, exponents: Pointer, numbers: Pointer,
    slots: Pointer, width: Scalar, turned: Scalar, pitch: Scalar, entry_pitch: Scalar, exponent_pitch: Scalar,
    exponent_entry_pitch: Scalar, blocks: constexpr,
) -> None:  # fmt: skip
    row, pair, block = tl.program_id(0).to(tl.int64), _pairs(blocks, 16), tl.arange(0, blocks)
    even, odd = _normed(x, weight, eps, row, width, pair)
    even, odd = _rotated(even, odd, rope, row, width, turned, pair)
    exponent = index_exponent(_largest(even, odd))
    inverse = inverse_scale(exponent)[:, None]
    code = e2m1_code(even * inverse) | (e2m1_code(odd * inverse) << 4)
    number, slot = tl.load(numbers + row), tl.load(slots + row)
    tl.store(codes + number * pitch + slot * entry_pitch + pair, code.to(tl.uint8), mask=pair * 2 < width)
    exponents += number * exponent_pitch + slot * exponent_entry_pitch
    tl.store(exponents + block, exponent.to(tl.uint8), mask=block * 32 < width)


def store_window_triton(
    x: Tensor, weight: Tensor, eps: float, rope: Tensor, ring: Tensor, slots: Tensor, places: Tensor
) -> Tensor:
    """`store_window` by its kernel."""
    x, (rows, width) = x.contiguous(), x.shape
    values = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _store_window[(rows,)](
        x, weight, eps, rope.contiguous(), ring, slots, places, values, width, rope.shape[1] // 2, *ring.stride()[:2],
        blocks=power_of_two(width // BLOCK), **EXACT,
    )  # fmt: skip
    return values


def store_main_triton(
    x: Tensor, weight: Tensor, eps: float, rope: Tensor, main: Tensor, blocks: Tensor, slots: Tensor
) -> Tensor:
    """`store_main` by its kernel."""
    x, (rows, width) = x.contiguous(), x.shape
    latent = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _store_main[(rows,)](
        x, weight, eps, rope.contiguous(), main, blocks, slots, latent, width, rope.shape[1] // 2, *main.stride()[:2],
        blocks=power_of_two(width // MAIN_BLOCK), **EXACT,
    )  # fmt: skip
    return latent


def store_index_triton(
    x: Tensor,
    weight: Tensor,
    eps: float,
    rope: Tensor,
    codes: Tensor,
    exponents: Tensor,
    blocks: Tensor,
    slots: Tensor,
) -> None:
    """`store_index` by its kernel."""
    x, (rows, width) = x.contiguous(), x.shape
    _store_index[(rows,)](
        x, weight, eps, rope.contiguous(), codes, exponents, blocks, slots, width, rope.shape[1] // 2,
        *codes.stride()[:2], *exponents.stride()[:2], blocks=power_of_two(width // INDEX_BLOCK), **EXACT,
    )  # fmt: skip
