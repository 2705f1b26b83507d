"""One token from each row of logits; a pure function of logits, parameters, seed and position.

    T < 1e-5: the largest logit, lowest id first. Else p = softmax(logits / T);
    top-p: in stable descending order drop a token when the mass before it exceeds top_p; top-k: keep the first k
    of that order; u = SplitMix64(seed, 3 position + case) in [0, 1); the token where the fp64 CDF (by id) passes u

logits: [V] fp32, or [B, V] with parameters [B]. Probabilities and the mass before a token in fp32, the CDF in fp64.
The Triton kernel sorts nothing: a bisection over the bits of e^(x - max) finds the smallest weight that is kept, for
which only the mass and the number of heavier tokens are needed. It sums in another order, so it gives the
reference's token except where u or top-p lies within 1e-5 of an edge. Its u has the reference's bits.
Source: facts-model 9.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.launch import EXACT, Pointer, Scalar, Tile, constexpr, kernel, tl

GREEDY_BELOW = 1e-5  # Source: facts-model 9
_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15  # of SplitMix64
_HALVINGS = (8, 14, 20)  # cut-offs below the largest probability to try, each about a third of a sort's time
_MARGIN = 1e-3  # far above what rounding does to a sum of probabilities


class Draw(IntEnum):
    """What a random number is for; each use of a position has its own stream. Source: facts-model 9."""

    TARGET = 0
    RESIDUAL = 1
    ACCEPT = 2


def splitmix64(seed: int) -> int:
    """The first output of SplitMix64 started at `seed`."""
    z = (seed + _GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def uniform(seed: int, position: int, draw: Draw = Draw.TARGET) -> float:
    """The number in [0, 1) of that seed, position and use, with 53 bits."""
    s = ((3 * position + draw) * _GAMMA) & _MASK
    mixed = seed ^ s if draw is Draw.ACCEPT else seed + (s ^ (s << 13))
    return (splitmix64(mixed & _MASK) >> 11) / (1 << 53)


def descending_order(p: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Stable order of probabilities, largest first. Two radix passes over 16 bits: six times a merge sort's speed."""
    key = ~p.view(np.uint32)  # bits of non-negative floats are ordered like the floats
    low, high = (key & 0xFFFF).astype(np.uint16), (key >> 16).astype(np.uint16)
    order = np.argsort(low, kind="stable")
    return order[np.argsort(high[order], kind="stable")]


def _likely(probabilities: Tensor, top_p: float) -> npt.NDArray[np.int64]:
    """Ids, ascending, of tokens that hold all of the top-p set: most of a long vocabulary need not be sorted."""
    for halvings in _HALVINGS if top_p < 1 else ():
        mask = probabilities >= probabilities.max() * 2.0**-halvings
        if float(probabilities[mask].sum(dtype=torch.float64)) > top_p + _MARGIN:
            return mask.numpy().nonzero()[0]
    return np.arange(len(probabilities))


def kept_tokens(probabilities: Tensor, top_p: float, top_k: int) -> npt.NDArray[np.int64] | None:
    """Ids that top-p and top-k leave, ascending; None when they leave all. `top_k` <= 0 is off."""
    if top_p >= 1 and not 0 < top_k < len(probabilities):
        return None
    likely = _likely(probabilities, top_p)
    order = likely[descending_order(probabilities.numpy()[likely])]
    kept = len(order)
    if top_p < 1:
        ranked = probabilities[torch.from_numpy(order)]
        before = ranked.cumsum(0).sub_(ranked)
        kept = max(1, int((before <= top_p).sum()))  # the first has no mass before it
    if top_k > 0:
        kept = min(kept, top_k)
    return np.sort(order[:kept])


def sample(logits: Tensor, *, temperature: float, top_p: float, top_k: int, u: float) -> int:
    """The chosen token id. Source: facts-model 9."""
    if logits.is_cuda:
        one = [[temperature], [top_p], [top_k], [u]]
        types = [torch.float32, torch.float32, torch.int64, torch.float64]
        row = [torch.tensor(value, dtype=kind, device=logits.device) for value, kind in zip(one, types, strict=True)]
        return int(sample_rows_triton(logits.unsqueeze(0), *row))
    if temperature < GREEDY_BELOW:
        return int(np.argmax(logits.numpy()))  # numpy promises the first of equals, torch does not
    scaled = logits / temperature
    kept = kept_tokens(torch.softmax(scaled, -1), top_p, top_k)
    left = scaled if kept is None else scaled[torch.from_numpy(kept)]
    cdf = np.cumsum(torch.softmax(left, -1).numpy(), dtype=np.float64)
    place = min(int(np.searchsorted(cdf, u * cdf[-1], side="right")), len(cdf) - 1)
    return place if kept is None else int(kept[place])


def sample_rows(
    logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    """The chosen token of each row, [B] int64: `sample` at `uniform(seed, position)`.

    temperature, top_p: [B] fp32; top_k, positions: [B] int64; seeds: [B] int64 with the bits of the unsigned seed.
    """
    if logits.is_cuda:
        return sample_rows_triton(logits, temperature, top_p, top_k, seeds, positions)
    draws = [uniform(seed & _MASK, at) for seed, at in zip(seeds.tolist(), positions.tolist(), strict=True)]
    columns = zip(logits, temperature.tolist(), top_p.tolist(), top_k.tolist(), draws, strict=True)
    return torch.tensor([sample(row, temperature=t, top_p=p, top_k=k, u=u) for row, t, p, k, u in columns])


@kernel
def _uniform(seed: Tile, position: Tile) -> Tile:
    """`uniform(seed, position)` of int64 with the bits of both, fp64."""
    s = (position * 3).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = seed.to(tl.uint64, bitcast=True) + (s ^ (s << 13)) + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return ((z ^ (z >> 31)) >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@kernel
def _largest(logits: Pointer, width: Scalar, step: constexpr) -> Tile:
    """The largest logit and the lowest id that has it."""
    best, place = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
    for start in range(0, width, step):
        at = start + tl.arange(0, step)
        x = tl.load(logits + at, mask=at < width, other=float("-inf"))
        top = tl.max(x, 0)
        first = tl.min(tl.where(x == top, at, width), 0)
        place = tl.where(top > best, first, place)
        best = tl.maximum(top, best)
    return best, place


@kernel
def _weigh(logits: Pointer, weights: Pointer, width: Scalar, best: Tile, temperature: Tile, step: constexpr) -> Tile:
    """Write e^(x / T - max / T) of every token; their sum in fp64."""
    total = tl.full([], 0, tl.float64)
    for start in range(0, width, step):
        at = start + tl.arange(0, step)
        x = tl.load(logits + at, mask=at < width, other=float("-inf"))
        weight = tl.exp(tl.div_rn(x, temperature) - tl.div_rn(best, temperature))
        tl.store(weights + at, weight, mask=at < width)
        total += tl.sum(weight, 0).to(tl.float64)
    tl.debug_barrier()  # other threads of this program may read what one has written
    return total


@kernel
def _heavier(weights: Pointer, width: Scalar, bits: Tile, step: constexpr) -> Tile:
    """Mass (fp64) and number of the tokens whose weight has larger bits."""
    mass, count = tl.full([], 0, tl.float64), tl.full([], 0, tl.int32)
    for start in range(0, width, step):
        at = start + tl.arange(0, step)
        weight = tl.load(weights + at, mask=at < width, other=0)
        above = (weight.to(tl.int32, bitcast=True) > bits) & (at < width)
        mass += tl.sum(tl.where(above, weight, 0.0), 0).to(tl.float64)
        count += tl.sum(above.to(tl.int32), 0)
    return mass, count


@kernel
def _least_kept(weights: Pointer, width: Scalar, limit: Tile, most: Tile, limited: Tile, step: constexpr) -> Tile:
    """Bits of the smallest weight x with a mass above it of at most `limit` and fewer than `most` tokens above it."""
    low = tl.full([], 0, tl.int32)
    high = tl.where(limited, 0x3F800000, 0)  # the largest weight is 1; all tokens are kept when nothing limits them
    for _ in range(tl.where(limited, 30, 0)):  # 30 halvings of that range leave one number
        middle = (low + high) // 2
        mass, count = _heavier(weights, width, middle, step)
        good = (mass <= limit) & (count < most)
        high, low = tl.where(good, middle, high), tl.where(good, low, tl.minimum(middle + 1, high))
    return high


@kernel
def _kept(  # noqa: PLR0917  what the rule needs to know
    weights: Pointer, at: Tile, width: Scalar, least: Tile, mass: Tile, count: Tile, equals: Tile, limit: Tile,
    most: Tile,
) -> Tile:  # fmt: skip
    """fp64 weights of one tile's kept tokens, which they are, and how many are as heavy as the least one."""
    weight = tl.load(weights + at, mask=at < width, other=0)
    bits = weight.to(tl.int32, bitcast=True)
    equal = ((bits == least) & (at < width)).to(tl.int32)
    earlier = equals + tl.cumsum(equal, 0) - equal
    before = mass + earlier.to(tl.float64) * weight.to(tl.float64)
    fits = (before <= limit) & (count + earlier < most)
    keep = (at < width) & ((bits > least) | ((equal != 0) & fits))
    return tl.where(keep, weight, 0.0).to(tl.float64), keep, tl.sum(equal, 0)


@kernel
def _draw(weights: Pointer, width: Scalar, least: Tile, limit: Tile, most: Tile, u: Tile, step: constexpr) -> Tile:
    """The first kept token at which the sum of kept weights passes u times their total, else the last kept one."""
    mass, count = _heavier(weights, width, least, step)
    total, equals = tl.full([], 0, tl.float64), tl.full([], 0, tl.int32)
    for start in range(0, width, step):
        at = start + tl.arange(0, step)
        weight, _, more = _kept(weights, at, width, least, mass, count, equals, limit, most)
        total += tl.sum(weight, 0)
        equals += more
    done, equals = tl.full([], 0, tl.float64), tl.full([], 0, tl.int32)
    found, last = tl.full([], 0x7FFFFFFF, tl.int32), tl.full([], 0, tl.int32)
    for start in range(0, width, step):
        at = start + tl.arange(0, step)
        weight, keep, more = _kept(weights, at, width, least, mass, count, equals, limit, most)
        passed = keep & (done + tl.cumsum(weight, 0) > u * total)
        found = tl.minimum(found, tl.min(tl.where(passed, at, 0x7FFFFFFF), 0))
        last = tl.maximum(last, tl.max(tl.where(keep, at, 0), 0))
        done += tl.sum(weight, 0)
        equals += more
    return tl.minimum(found, last)


@kernel
def _sample_rows(  # noqa: PLR0917  one array per parameter of a row
    logits: Pointer, temperatures: Pointer, top_ps: Pointer, top_ks: Pointer, draws: Pointer, positions: Pointer,
    weights: Pointer, out: Pointer, width: Scalar, seeded: constexpr, step: constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits, weights = logits + row * width, weights + row * width
    temperature = tl.load(temperatures + row)
    best, token = _largest(logits, width, step)
    if temperature >= 1e-5:
        u = _uniform(tl.load(draws + row), tl.load(positions + row)) if seeded else tl.load(draws + row)
        top_p, top_k = tl.load(top_ps + row), tl.load(top_ks + row)
        limit = _weigh(logits, weights, width, best, temperature, step) * top_p.to(tl.float64)
        limit = tl.where(top_p < 1, limit, float("inf"))
        most = tl.where((top_k > 0) & (top_k < width), top_k, width).to(tl.int32)
        limited = (top_p < 1) | (most < width)
        least = _least_kept(weights, width, limit, most, limited, step)
        token = _draw(weights, width, least, limit, most, u, step)
    tl.store(out + row, token.to(tl.int64))


_STEP = 4096  # logits of a tile; 8 warps with 16 each per thread, not tuned


def sample_rows_triton(
    logits: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    top_k: Tensor,
    draws: Tensor,
    positions: Tensor | None = None,
) -> Tensor:
    """`sample_rows` by its kernel; without `positions`, `draws` are the numbers u themselves, [B] fp64, not seeds."""
    logits, out = logits.contiguous(), torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    seeded, weights = positions is not None, torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    _sample_rows[(len(logits),)](
        logits, temperature, top_p, top_k, draws, positions if seeded else draws, weights, out, logits.shape[1],
        seeded=seeded, step=_STEP, num_warps=8, **EXACT,
    )  # fmt: skip
    return out
