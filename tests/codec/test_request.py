from __future__ import annotations

import json
from typing import Any

import pytest

from codec.errors import CodecError
from codec.request import MAX_STOP_CHARS, check_stops, read_chat, refuse_unserved

USER = [{"role": "user", "content": "x"}]


def read(**members: Any):
    return read_chat(json.dumps({"model": "m", "messages": USER, **members}).encode())


def test_a_usual_body_reaches_recipe_as_the_very_same_bytes():
    body = b'{ "model":"m", "messages":[{"role":"user","content":"x"}], "max_tokens": 5, "temperature": 1.10}'
    assert read_chat(body).body is body


def test_developer_messages_become_system_messages_and_nothing_else_changes():
    message = b'{"role":"user","content":"a \\"developer\\" said","x":1.10,"y":123456789012345678901234567890}'
    body = b'{"model":"m","messages":[{"content":"D","role":"developer"},' + message + b'],"seed":7}'
    rewritten = read_chat(body).body
    assert b'"content":"D","role":"system"' in rewritten
    assert message in rewritten
    assert b'"seed":7' in rewritten


def test_max_completion_tokens_is_another_name_of_max_tokens():
    assert json.loads(read(max_completion_tokens=9).body)["max_tokens"] == 9
    assert json.loads(read(max_completion_tokens=9, max_tokens=9).body)["max_tokens"] == 9
    with pytest.raises(CodecError, match="contradict"):
        read(max_completion_tokens=9, max_tokens=8)


@pytest.mark.parametrize(
    ("members", "user"),
    [
        ({"user_id": "a", "user": "b", "metadata": {"user_id": "c"}}, "a"),
        ({"user": "b", "metadata": {"user_id": "c"}}, "b"),
        ({"metadata": {"user_id": "c", "else": [1]}}, "c"),
        ({"user_id": "", "user": None, "metadata": {}}, ""),
        ({"user": "é" * 256}, "é" * 256),
        ({}, ""),
    ],
)
def test_the_user_comes_from_the_first_field_that_names_one(members: dict[str, Any], user: str):
    assert read(**members).salt_user == user


@pytest.mark.parametrize("field", ["user_id", "user", "metadata"])
def test_a_user_id_of_more_than_512_bytes_is_refused(field: str):
    user: Any = "é" * 257
    with pytest.raises(CodecError, match=f"{field}: a user id of 514 bytes"):
        read(**{field: {"user_id": user} if field == "metadata" else user})


def test_our_extensions_and_options_are_read():
    fields = read(ignore_eos=True, stream_options={"include_usage": True}, tools=[{"function": {"name": "f"}}])
    assert (fields.ignore_eos, fields.include_usage, fields.has_tools) == (True, True, True)
    fields = read(ignore_eos=None, stream_options={}, tools=[])
    assert (fields.ignore_eos, fields.include_usage, fields.has_tools) == (False, False, False)


def test_the_last_of_two_equal_keys_counts_as_it_does_in_recipe():
    assert read_chat(b'{"model":"first","messages":[],"model":"last"}').model == "last"


@pytest.mark.parametrize(
    "members",
    [
        {"logprobs": True},
        {"top_logprobs": 1},
        {"logit_bias": {"5": 1}},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"parallel_tool_calls": False},
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
        {"functions": [{"name": "f"}]},
        {"modalities": ["text", "audio"]},
        {"chat_template_kwargs": {"thinking": False}},
        {"top_k": 5},
        {"min_p": 0.1},
        {"stop_token_ids": [1]},
        {"guided_regex": "a+"},
    ],
)
def test_a_wish_that_nothing_fulfils_is_refused_and_never_dropped(members: dict[str, Any]):
    with pytest.raises(CodecError, match="is not served yet") as caught:
        refuse_unserved(read(**members))
    assert caught.value.status == 400
    assert caught.value.param == next(iter(members))


@pytest.mark.parametrize(
    "members",
    [
        {"n": 8},
        {"n": None, "logprobs": None, "response_format": None, "tools": None},
        {"logprobs": False, "logit_bias": {}, "top_k": -1, "min_p": 0, "repetition_penalty": 1.0},
        {"tool_choice": "auto", "parallel_tool_calls": True},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"tools": [{"type": "function", "function": {"name": "f", "strict": False}}]},
        {"frequency_penalty": 1.5, "store": True, "prompt_cache_key": "k"},
    ],
)
def test_a_member_that_wishes_for_nothing_passes(members: dict[str, Any]):
    refuse_unserved(read(**members))


def test_stop_strings_are_kept_once_and_bounded():
    assert check_stops(("a", "b", "a")) == ("a", "b")
    with pytest.raises(CodecError, match=r"stop\[1\]: 257 characters, the limit is 256"):
        check_stops(("a", "b" * (MAX_STOP_CHARS + 1)))
