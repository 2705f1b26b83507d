"""One token from one row of logits; a pure function of logits, parameters, seed and position.

    T < 1e-5: the largest logit, lowest id first. Else p = softmax(logits / T);
    top-p: in stable descending order drop a token when the mass before it exceeds top_p; top-k: keep the first k
    of that order; u = SplitMix64(seed, 3 position + case) in [0, 1); the token where the fp64 CDF (by id) passes u

logits: [V] fp32. Probabilities and the mass before a token in fp32, the CDF in fp64.
Source: facts-model 9.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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
    if temperature < GREEDY_BELOW:
        return int(np.argmax(logits.numpy()))  # numpy promises the first of equals, torch does not
    scaled = logits / temperature
    kept = kept_tokens(torch.softmax(scaled, -1), top_p, top_k)
    left = scaled if kept is None else scaled[torch.from_numpy(kept)]
    cdf = np.cumsum(torch.softmax(left, -1).numpy(), dtype=np.float64)
    place = min(int(np.searchsorted(cdf, u * cdf[-1], side="right")), len(cdf) - 1)
    return place if kept is None else int(kept[place])
