"""Engram's token compression: token id -> compressed id, derived from a tokenizer.

Tokens that read the same after normalising (case, accents, spaces) share one id; ids are given in order of first
appearance. The released tokenizer gives 99,092 of them.
Source: facts-model 5.1.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, normalizers

_UNDECODABLE = "\ufffd"
_LONE_SPACE = "\ue000"  # a private-use character keeps a token of spaces apart from an empty one while we strip
# Source: facts-model 5.1, in this order
_NORMALISER = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
        normalizers.Strip(),
        normalizers.Replace(_LONE_SPACE, " "),
    ]
)


class TokenMapError(ValueError):
    """The tokenizer file is missing or unusable."""


def derive_token_map(tokenizer: Path, vocab_size: int) -> npt.NDArray[np.int64]:
    """[vocab_size] compressed id of each token; ids that the tokenizer lacks get one of their own.

    Raises:
        TokenMapError: no readable tokenizer.json at that path.
    """
    if not tokenizer.is_file():
        raise TokenMapError(f"{tokenizer} does not exist")
    try:
        loaded = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # tokenizers raises plain Exception for any bad file
        raise TokenMapError(f"{tokenizer}: {error}") from error
    seen: dict[str, int] = {}
    ids = [seen.setdefault(_key(loaded, token), len(seen)) for token in range(vocab_size)]
    return np.array(ids, dtype=np.int64)


def _key(tokenizer: Tokenizer, token: int) -> str:
    text = tokenizer.decode([token], skip_special_tokens=False)
    if _UNDECODABLE in text:
        return tokenizer.id_to_token(token) or f"{_UNDECODABLE}{token}"
    return _NORMALISER.normalize_str(text) or text
