from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codec import bpe
from codec.vocab import load_vocabulary

JSON = load_vocabulary().tokenizer_json
OFFICIAL = bpe.official_bpe(JSON)
FAST = bpe.fast_bpe(JSON)
CHOSEN = bpe.load_bpe(JSON)


def test_the_fast_encoder_is_installed_and_serves():
    assert FAST is not None
    assert bpe.agree(FAST, OFFICIAL)
    assert bpe.load_bpe(JSON).__qualname__.startswith("chosen_bpe")


@pytest.mark.parametrize("context", [" {0}a{0}", "{0}1{0} {0}.", "\n{0}{0}'{0}"])
def test_both_give_the_same_ids_for_every_settled_character(context: str):
    assert FAST is not None
    for first, last in bpe.SETTLED:
        for low in range(first, last + 1, 4096):
            characters = map(chr, range(low, min(low + 4096, last + 1)))
            text = "\n\nQ\n\n".join(context.format(character) for character in characters)
            assert FAST(text) == OFFICIAL(text), f"somewhere in {low:x} and the 4095 after it"


def test_a_character_that_only_newer_unicode_knows_goes_to_the_official_one():
    """U+1FAC6 is an emoji since Unicode 16: the fast library knows it, the official one does not."""
    assert FAST is not None
    assert FAST(" \U0001fac6") != OFFICIAL(" \U0001fac6") == CHOSEN(" \U0001fac6")


@given(st.text(max_size=200))
def test_any_text_has_the_official_ids(text: str):
    assert CHOSEN(text) == OFFICIAL(text)


@given(st.text(alphabet=" \n\r\t\u00a0\u2028'1.,<|｜>aZé漢👍", max_size=80))
def test_blanks_and_punctuation_have_the_official_ids(text: str):
    assert CHOSEN(text) == OFFICIAL(text)


@pytest.mark.parametrize("wrong", [lambda text: OFFICIAL(text)[:-4], lambda text: OFFICIAL(text.replace("\r\n", "\n"))])
def test_an_encoder_that_differs_somewhere_does_not_agree(wrong: Callable[[str], bytes]):
    assert not bpe.agree(wrong, OFFICIAL)


def test_the_official_one_serves_where_the_fast_one_differs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bpe, "fast_bpe", lambda _json: lambda text: OFFICIAL(text)[:-4])
    ids = np.frombuffer(bpe.load_bpe(JSON)("High water"), "<u4")
    assert ids.tolist() == np.frombuffer(OFFICIAL("High water"), "<u4").tolist()


def test_the_official_one_serves_where_the_fast_one_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tuetoken", None)
    assert bpe.fast_bpe(JSON) is None
    assert bpe.load_bpe(JSON)("High water") == OFFICIAL("High water")


def test_a_file_that_the_fast_one_does_not_take_is_no_error():
    assert bpe.fast_bpe("{}") is None


def test_control_spellings_are_letters_to_both():
    assert FAST is not None
    for ids in (FAST("<｜User｜>"), OFFICIAL("<｜User｜>")):
        assert max(np.frombuffer(ids, "<u4")) < 128_000
