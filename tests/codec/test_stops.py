from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codec.stops import StopMatcher

SHORT = st.text(alphabet="ab\n", min_size=1, max_size=4)


def run(stops: tuple[str, ...], parts: list[str]) -> tuple[str, str, bool]:
    matcher = StopMatcher(stops)
    text = "".join(matcher.feed(part) for part in parts)
    return text, matcher.held, matcher.found


def naive(stops: tuple[str, ...], text: str) -> str | None:
    """The text before the stop string that ends first, the longest of those; None when there is none."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return None


@given(st.lists(SHORT, min_size=1, max_size=4), st.lists(st.text(alphabet="abc\n", max_size=4), max_size=6))
def test_any_split_finds_what_a_search_in_the_whole_text_finds(stops: list[str], parts: list[str]):
    whole = "".join(parts)
    text, held, found = run(tuple(stops), parts)
    expected = naive(tuple(stops), whole)
    assert found == (expected is not None)
    assert (text if found else text + held) == (whole if expected is None else expected)


@given(st.lists(SHORT, min_size=1, max_size=4), st.text(alphabet="abc\n", max_size=12))
def test_held_is_the_longest_suffix_that_may_become_a_stop(stops: list[str], text: str):
    _, held, found = run(tuple(stops), [text])
    if not found:
        suffixes = [text[i:] for i in range(len(text) + 1)]
        assert held == next(s for s in suffixes if any(stop.startswith(s) for stop in stops))


@pytest.mark.parametrize(
    ("stops", "parts", "expected"),
    [
        (("ABABAC",), ["xxABAB", "ABAC yy"], "xxAB"),
        (("STOP",), list("say STOP now"), "say "),
        (("BCD", "ABC"), ["xABCD"], "x"),
        (("C", "ABC"), ["xA", "BC"], "x"),
        (("é🦀",), ["a é", "🦀b"], "a "),
    ],
)
def test_the_match_that_ends_first_wins_and_of_those_the_longest(
    stops: tuple[str, ...], parts: list[str], expected: str
):
    assert run(stops, parts) == (expected, "", True)


def test_nothing_comes_out_after_a_stop_string():
    matcher = StopMatcher(("END",))
    assert matcher.feed("abcEND") == "abc"
    assert matcher.feed("def") == ""


def test_a_hopeful_prefix_is_given_back_when_it_fails():
    matcher = StopMatcher(("hello world",))
    assert matcher.feed("say hello wor") == "say "
    assert matcher.held == "hello wor"
    assert matcher.feed("m") == "hello worm"
