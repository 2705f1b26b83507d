"""Which rows of the Engram tables belong to a position: hashes of the last tokens.

    roll_1 = c_t m_0 xor c_{t-1} m_1;  roll_2 = roll_1 xor c_{t-2} m_2;  ...      (int64, c = compressed ids)
    row(g, h) = roll_g mod P[g][h] + offset(g, h)

Letters: T rows, G n-gram sizes (max_ngram - 1), h heads.
Source: facts-model 5.2-5.4.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stages.engine.torch.config import ConfigError, EngramConfig

_SEED = 10007  # times the layer's number. Source: facts-model 5.3
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerHash:
    """Constants of one layer. multipliers: [max_ngram]; primes, offsets: [G, h]."""

    multipliers: Ids
    primes: Ids
    offsets: Ids

    def rows(self, grams: Ids) -> Ids:
        """Table rows of each position: grams [T, max_ngram] (newest first) -> [T, G h]."""
        roll = grams[:, 0] * self.multipliers[0]
        found = []
        for g in range(1, grams.shape[1]):
            roll = roll ^ (grams[:, g] * self.multipliers[g])
            found.append(roll[:, None] % self.primes[g - 1] + self.offsets[g - 1])
        return np.concatenate(found, axis=1)


class Engram:
    """Hash constants of all Engram layers, and the token map."""

    def __init__(self, config: EngramConfig, token_map: Ids) -> None:
        self.config = config
        self.token_map = token_map
        self.layers = dict(zip(config.layers, _layer_hashes(config), strict=True))
        self.pad = int(token_map[config.pad_id])

    def grams(self, ids: Ids, rows: int) -> Ids:
        """The last `rows` positions' compressed n-grams, newest first: [rows, max_ngram].

        ids: the tokens up to and including the last position, oldest first. Positions before the first of them
        count as padding, so pass max_ngram - 1 tokens more than rows wherever the prompt has them.
        """
        n = self.config.max_ngram
        padded = np.concatenate([np.full(n - 1, self.pad), self.token_map[ids]])
        windows = np.lib.stride_tricks.sliding_window_view(padded, n)[len(ids) - rows :]
        return windows[:, ::-1]


def _layer_hashes(config: EngramConfig) -> list[LayerHash]:
    """Raises: ConfigError when the config's table sizes are not the sums of the primes."""
    shape = (len(config.layers), config.max_ngram - 1, config.heads)
    primes = np.array(primes_from(config.vocab_size, int(np.prod(shape)))).reshape(shape)
    if (sizes := tuple(int(p.sum()) for p in primes)) != config.rows:
        raise ConfigError(f"engram_num_embeddings: the hash needs {list(sizes)} rows, not {list(config.rows)}")
    return [_layer_hash(config, layer, own) for layer, own in zip(config.layers, primes, strict=True)]


def _layer_hash(config: EngramConfig, layer: int, primes: Ids) -> LayerHash:
    highest = (2**63 - 1) // config.compressed_vocab_size // 2  # products with any id stay in int64
    drawn = np.random.default_rng(_SEED * layer).integers(0, highest, config.max_ngram)
    ends = primes.ravel().cumsum()
    return LayerHash(multipliers=2 * drawn + 1, primes=primes, offsets=(ends - primes.ravel()).reshape(primes.shape))


def primes_from(least: int, count: int) -> list[int]:
    """The first `count` primes at or above `least`."""
    found: list[int] = []
    number = least
    while len(found) < count:
        if _is_prime(number):
            found.append(number)
        number += 1
    return found


def _is_prime(number: int) -> bool:
    if number < 4:
        return number > 1
    return number % 2 == 1 and all(number % d for d in range(3, int(number**0.5) + 1, 2))
