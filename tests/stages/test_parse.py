from __future__ import annotations

import json
from typing import Any

import pytest

import codec.codec
from codec.models import ParseSpec, StreamMeta, StreamStart
from codec.vocab import THINK_END_ID
from pipeline.events import Plan
from stages.parse import Parse
from tests.stages.engine.stub_engine import answer, prompt

META = StreamMeta(rid="5d" * 16, created=1_790_000_000, model="tern-1")
PLAN = Plan(prompt_tokens=900, hit_tokens=768, compute_from=640, replay_from=512, seed=3)


@pytest.fixture(scope="module")
def chat() -> codec.codec.Codec:
    return codec.codec.Codec.load({})


def parser(chat: codec.codec.Codec, **spec: Any) -> Parse:
    usual: dict[str, Any] = {"stream": True, "start": StreamStart.CONTENT}
    return Parse(ParseSpec(**(usual | spec)), META, chat.vocab)


def ids_of(chat: codec.codec.Codec, text: str) -> list[int]:
    return list(map(int, chat.tokenizer.encode(text, [])))


def text_of(chunks: list[bytes | None], field: str = "content") -> str:
    return "".join(json.loads(chunk)["choices"][0]["delta"].get(field, "") for chunk in chunks if chunk)


def test_an_answer_of_the_stub_is_its_text(chat: codec.codec.Codec):
    tokens = answer(prompt(300), 60)
    parse = parser(chat)
    chunks: list[bytes | None] = [*map(parse.feed, tokens), parse.finish("length", PLAN, 60)]
    text = b"".join(map(chat.vocab.token_bytes, tokens)).decode(errors="replace")
    assert text_of(chunks) == text
    assert text.startswith("[stub engine]")


def test_the_end_tells_usage_as_the_plan_has_it(chat: codec.codec.Codec):
    parse = parser(chat, start=StreamStart.REASONING)
    tokens = [*ids_of(chat, "let me think"), THINK_END_ID, *ids_of(chat, "yes")]
    num_thoughts = tokens.index(THINK_END_ID)
    for token in tokens:
        parse.feed(token)
    last = json.loads(parse.finish("stop", PLAN, len(tokens)))
    assert last["choices"][0]["finish_reason"] == "stop"
    usage = last["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (900, len(tokens))
    assert usage["total_tokens"] == 900 + len(tokens)
    assert (usage["prompt_cache_hit_tokens"], usage["prompt_cache_miss_tokens"]) == (768, 132)
    assert usage["completion_tokens_details"]["reasoning_tokens"] == num_thoughts


def test_fewer_counted_tokens_than_thoughts_are_no_contradiction(chat: codec.codec.Codec):
    parse = parser(chat, start=StreamStart.REASONING)
    for token in ids_of(chat, "one two three four"):
        parse.feed(token)
    usage = json.loads(parse.finish("abort", PLAN, 2))["usage"]
    assert usage["completion_tokens"] == usage["completion_tokens_details"]["reasoning_tokens"] == 2


def test_a_stop_string_ends_the_text_and_says_so(chat: codec.codec.Codec):
    parse = parser(chat, stop=("END",))
    chunks: list[bytes | None] = []
    stopped_after = 0
    for number, token in enumerate(ids_of(chat, "before END after"), start=1):
        chunks.append(parse.feed(token))
        if parse.stopped and not stopped_after:
            stopped_after = number
    assert 0 < stopped_after < number
    assert text_of([*chunks, parse.finish("stop", PLAN, stopped_after)]) == "before "
    assert all(chunk is None for chunk in chunks[stopped_after:])


def test_running_it_again_gives_the_same_bytes(chat: codec.codec.Codec):
    tokens = answer(prompt(200, 4), 50)

    def run() -> list[bytes | None]:
        parse = parser(chat, include_usage=True)
        return [*map(parse.feed, tokens), parse.finish("length", PLAN, 50), parse.finish("length", PLAN, 50)]

    first = run()
    assert first == run()
    assert first[-1] == first[-2]


def test_a_whole_answer_comes_at_the_end(chat: codec.codec.Codec):
    parse = parser(chat, stream=False)
    assert [parse.feed(token) for token in ids_of(chat, "all at once")] == [None] * len(ids_of(chat, "all at once"))
    body = json.loads(parse.finish("stop", PLAN, 3))
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["content"] == "all at once"


def test_a_choice_without_tokens_has_an_end(chat: codec.codec.Codec):
    last = json.loads(parser(chat).finish("insufficient_system_resource", PLAN, 0))
    assert last["choices"][0]["finish_reason"] == "insufficient_system_resource"
    assert last["usage"]["completion_tokens"] == 0


def test_an_id_outside_the_vocabulary_is_named(chat: codec.codec.Codec):
    with pytest.raises(ValueError, match="129280"):
        parser(chat).feed(129_280)
