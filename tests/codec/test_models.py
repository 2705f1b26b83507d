from __future__ import annotations

import pytest

from codec.models import StreamStart, Usage


def test_usage_adds_up():
    usage = Usage(prompt_tokens=300, cached_tokens=256, completion_tokens=40, reasoning_tokens=7).as_dict()
    assert usage == {
        "prompt_tokens": 300,
        "completion_tokens": 40,
        "total_tokens": 340,
        "prompt_cache_hit_tokens": 256,
        "prompt_cache_miss_tokens": 44,
        "prompt_tokens_details": {"cached_tokens": 256},
        "completion_tokens_details": {"reasoning_tokens": 7},
    }


@pytest.mark.parametrize(("cached", "reasoning"), [(301, 0), (-1, 0), (0, 41), (0, -1)])
def test_a_part_larger_than_its_whole_is_refused(cached: int, reasoning: int):
    with pytest.raises(ValueError, match="tokens of"):
        Usage(prompt_tokens=300, cached_tokens=cached, completion_tokens=40, reasoning_tokens=reasoning)


def test_a_continued_field_keeps_its_newlines():
    assert [start for start in StreamStart if start.is_fresh] == [StreamStart.REASONING, StreamStart.CONTENT]
    assert [start for start in StreamStart if start.in_reasoning] == [
        StreamStart.REASONING,
        StreamStart.REASONING_CONTINUED,
    ]
