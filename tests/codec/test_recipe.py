from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from codec.errors import CodecError
from codec.models import StreamStart
from codec.recipe import ChatRecipe, resolve_max_tokens
from codec.request import read_chat

RECIPE = ChatRecipe({"m": "DeepSeek-V4.1-Flash"})
OFF = {"thinking": {"type": "disabled"}}


def render(**members: Any):
    fields = read_chat(json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], **members}).encode())
    return RECIPE.render(fields)


def assistant(content: str, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "x"}, {"role": "assistant", "content": content, "prefix": True, **more}]


@pytest.mark.parametrize(
    ("members", "start"),
    [
        ({}, StreamStart.REASONING),
        (OFF, StreamStart.CONTENT),
        ({"messages": assistant("", reasoning_content="so")}, StreamStart.REASONING_CONTINUED),
        ({"messages": assistant("Sure", reasoning_content="so")}, StreamStart.CONTENT_CONTINUED),
        ({"messages": assistant("Sure"), **OFF}, StreamStart.CONTENT_CONTINUED),
        ({"messages": assistant(""), **OFF}, StreamStart.CONTENT),
    ],
)
def test_the_prompt_tells_where_the_answer_starts(members: dict[str, Any], start: StreamStart):
    assert render(**members).start is start


def test_control_ranges_count_code_points():
    chat = render(messages=[{"role": "user", "content": "🦀é"}], **OFF)
    assert [chat.prompt[a:b] for a, b in chat.control_ranges] == [
        "<｜begin▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "</think>",
    ]


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"stream": "yes"}, "stream"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": []}, "top_p"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"seed": -5}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stop": 5}, "stop"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user"}]}, "messages[1]"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0]"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0]"),
        ({"messages": [None]}, "messages[0]"),
        ({"thinking": {"type": "perhaps"}}, "thinking"),
        ({"reasoning_effort": 42}, "reasoning_effort"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools"),
    ],
)
def test_a_wrong_type_names_its_member(members: dict[str, Any], param: str):
    with pytest.raises(CodecError) as caught:
        render(**members)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "invalid_request", param)
    assert caught.value.message.startswith(f"{param}: ")


def test_official_refusals_keep_their_wording():
    with pytest.raises(CodecError, match=r"Invalid temperature value, the valid range of temperature is \[0, 2\]"):
        render(temperature=9)
    with pytest.raises(CodecError, match="Empty input messages"):
        render(messages=[])


def test_sampling_is_the_decimal_that_was_sent():
    assert render(temperature=0.3, **OFF).temperature == 0.3
    assert render(temperature=0.3).temperature == 1.0  # thinking has a fixed temperature
    assert render(seed=2**63 - 1).seed == 2**63 - 1


@pytest.mark.parametrize(
    ("members", "prompt_tokens", "context", "expected"),
    [
        ({"max_tokens": 7}, 100, 1_000, 7),
        (OFF, 100, 100_000, 8_192),
        ({}, 100, 100_000, 65_536),
        ({"reasoning_effort": "max"}, 100, 1_000_000, 131_072),
        ({}, 100, 1_000, 900),
        ({}, 1_000, 1_000, 1),
    ],
)
def test_max_tokens_is_resolved(members: dict[str, Any], prompt_tokens: int, context: int, expected: int):
    assert resolve_max_tokens(render(**members), prompt_tokens, context) == expected


def test_more_tokens_than_the_context_has_left_are_refused():
    with pytest.raises(CodecError, match="maximum context length is 100 tokens") as caught:
        resolve_max_tokens(render(max_tokens=51), 50, 100)
    assert caught.value.param == "max_tokens"


def test_an_unknown_model_version_is_refused_at_construction():
    with pytest.raises(ValueError, match="DeepSeek-V9"):
        ChatRecipe({"m": "DeepSeek-V9"})


def test_recipe_is_imported_in_one_file():
    root = Path(__file__).parents[2]
    folders = ("codec", "kernels", "kv", "loadgen", "pipeline", "stages", "tidemill")
    files = [path for folder in folders for path in (root / folder).rglob("*.py")]
    assert [path.name for path in files if "deepseek_recipe" in path.read_text()] == ["recipe.py"]
