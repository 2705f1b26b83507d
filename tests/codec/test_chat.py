from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codec.chat import ChatStream
from codec.codec import Codec
from codec.models import ParseSpec, StreamMeta, StreamStart, Usage
from codec.vocab import DSML_ID, EOS_ID, THINK_END_ID, VOCAB_SIZE, OutputVocab, Vocabulary
from tests.codec.cases import cases

META = StreamMeta(rid="0123456789abcdef0123456789abcdef", created=1_790_000_000, model='mo"del', choice=0)
CRAB = [3574, 102, 225]  # one character in three tokens
CONTENT = StreamStart.CONTENT_CONTINUED  # nothing is stripped: the plainest start

# Ids that make trouble more often than random ones do: pieces of characters, control tokens, newlines, letters.
IDS = st.one_of(
    st.integers(0, VOCAB_SIZE - 1),
    st.sampled_from([*CRAB, EOS_ID, THINK_END_ID, 128_821, DSML_ID, 129_278, 201, 271, 90, 91]),
    st.integers(3, 260),  # single bytes
)


def spec(start: StreamStart = CONTENT, **more: Any) -> ParseSpec:
    return ParseSpec(stream=more.pop("stream", True), start=start, **more)


def feed_all(stream: ChatStream, ids: list[int]) -> list[bytes | None]:
    return [stream.feed(token_id) for token_id in ids]


def ids_of(codec: Codec, text: str) -> list[int]:
    return list(map(int, codec.tokenizer.encode(text, [])))


def usage(stream: ChatStream, prompt_tokens: int = 12, cached_tokens: int = 0) -> Usage:
    return Usage(
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        completion_tokens=stream.num_tokens,
        reasoning_tokens=stream.reasoning_tokens,
    )


def finish(stream: ChatStream, reason: str = "stop") -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(stream.finish(reason, usage(stream)))
    return parsed


def joined(chunks: list[bytes | None], last: dict[str, Any], field: str) -> str:
    deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks if chunk is not None]
    return "".join(delta.get(field, "") for delta in [*deltas, last["choices"][0]["delta"]])


def reference(vocab: OutputVocab, ids: list[int], *, in_reasoning: bool) -> tuple[str, str]:
    """(reasoning, content) of the ids, decoded as a whole."""
    fields = [bytearray(), bytearray()]
    at = 0 if in_reasoning else 1
    for token_id in ids:
        if token_id == THINK_END_ID:
            at = 1
        elif token_id not in vocab.hidden_ids:
            fields[at] += vocab.token_bytes(token_id)
    return fields[0].decode(errors="replace"), fields[1].decode(errors="replace")


@settings(max_examples=300)
@given(st.lists(IDS, max_size=30), st.sampled_from([StreamStart.REASONING_CONTINUED, CONTENT]))
def test_chunks_join_to_the_decoding_of_all_bytes(codec: Codec, ids: list[int], start: StreamStart):
    stream = ChatStream(spec(start), META, codec.vocab)
    chunks = feed_all(stream, ids)
    last = finish(stream)
    reasoning, content = reference(codec.vocab, ids, in_reasoning=start.in_reasoning)
    if THINK_END_ID in ids and start.in_reasoning:
        content = content.lstrip("\n")  # the field starts fresh
    assert joined(chunks, last, "reasoning_content") == reasoning
    assert joined(chunks, last, "content") == content


@settings(max_examples=200)
@given(st.lists(IDS, max_size=20), st.sampled_from(StreamStart), st.sampled_from([(), ("a",), ("x🦀", "\n")]))
def test_the_same_tokens_give_the_same_bytes_again(
    codec: Codec, vocabulary: Vocabulary, ids: list[int], start: StreamStart, stop: tuple[str, ...]
):
    untaught = OutputVocab(vocabulary)  # its table has met no id: every first look is slow
    streams = [ChatStream(spec(start, stop=stop), META, vocab) for vocab in (codec.vocab, untaught, codec.vocab)]
    first, second, third = [feed_all(stream, ids) for stream in streams]
    assert first == second == third
    assert len({stream.finish("stop", usage(stream, 9, 3)) for stream in streams}) == 1


@settings(max_examples=200)
@given(st.lists(IDS, max_size=20), st.sampled_from(StreamStart), st.sampled_from([(), ("a",), ("🦀", "\n")]))
def test_a_whole_answer_says_what_its_stream_says(
    codec: Codec, ids: list[int], start: StreamStart, stop: tuple[str, ...]
):
    stream = ChatStream(spec(start, stop=stop), META, codec.vocab)
    whole = ChatStream(spec(start, stop=stop, stream=False), META, codec.vocab)
    chunks = feed_all(stream, ids)
    assert feed_all(whole, ids) == [None] * len(ids)
    last, answer = finish(stream), finish(whole)
    message = answer["choices"][0]["message"]
    assert message["content"] == joined(chunks, last, "content")
    assert message.get("reasoning_content", "") == joined(chunks, last, "reasoning_content")
    assert answer["usage"] == last["usage"]
    assert answer["object"] == "chat.completion"
    assert (whole.stopped, whole.num_tokens) == (stream.stopped, stream.num_tokens)


def test_every_id_gives_valid_json_on_the_fast_path_as_on_the_slow_one(codec: Codec):
    stream = ChatStream(spec(), META, codec.vocab)
    stream.feed(90)
    for token_id in range(VOCAB_SIZE):
        slow = stream.feed(token_id)
        fast = stream.feed(token_id)
        if codec.vocab.fragments[token_id] is not None:
            text = codec.vocab.token_bytes(token_id).decode()
            assert fast == slow
            assert fast is not None
            assert orjson.loads(fast)["choices"][0]["delta"] == {"content": text}
        while stream.feed(EOS_ID) or stream._utf8.getstate()[0]:
            stream.feed(90)  # close an open character before the next id


def test_a_character_comes_with_its_last_token(codec: Codec):
    stream = ChatStream(spec(), META, codec.vocab)
    chunks = feed_all(stream, [90, *CRAB, 91])
    assert [c and json.loads(c)["choices"][0]["delta"].get("content") for c in chunks] == ["x", None, None, "🦀", "y"]


def test_an_invalid_byte_is_replaced_at_once(codec: Codec):
    stream = ChatStream(spec(), META, codec.vocab)
    chunks = feed_all(stream, [90, CRAB[0], 91])  # an opened character that "y" cannot continue
    assert chunks[2] is not None
    assert json.loads(chunks[2])["choices"][0]["delta"]["content"] == "�y"


def test_bytes_left_at_the_end_come_with_the_last_chunk(codec: Codec):
    stream = ChatStream(spec(), META, codec.vocab)
    feed_all(stream, [90, *CRAB[:2]])
    last = finish(stream, "length")
    assert last["choices"][0] == {"index": 0, "delta": {"content": "�"}, "finish_reason": "length"}


def test_finishing_twice_gives_the_same_bytes(codec: Codec):
    stream = ChatStream(spec(stop=("hello",)), META, codec.vocab)
    feed_all(stream, [*ids_of(codec, "say hel"), CRAB[0]])
    of_prompt = usage(stream, 3)
    assert stream.finish("stop", of_prompt) == stream.finish("stop", of_prompt)
    assert finish(stream)["choices"][0]["delta"]["content"] == "hel�"


def test_only_the_first_chunk_carries_the_role(codec: Codec):
    stream = ChatStream(spec(StreamStart.REASONING), META, codec.vocab)
    chunks = feed_all(stream, [EOS_ID, 90, 91, THINK_END_ID, 90])
    deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks if chunk is not None]
    assert deltas == [
        {"role": "assistant", "reasoning_content": "x"},
        {"reasoning_content": "y"},
        {"content": "x"},
    ]


def test_an_answer_without_text_still_has_a_role(codec: Codec):
    last = finish(ChatStream(spec(), META, codec.vocab))
    assert last["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_a_chunk_has_the_members_that_clients_read(codec: Codec):
    stream = ChatStream(spec(include_usage=True), StreamMeta(rid="ab", created=7, model="m@x", choice=2), codec.vocab)
    chunk = stream.feed(90)
    assert chunk is not None
    assert json.loads(chunk) == {
        "id": "chatcmpl-ab",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": "m@x",
        "choices": [{"index": 2, "delta": {"role": "assistant", "content": "x"}, "finish_reason": None}],
        "usage": None,
    }


def test_control_tokens_add_no_text_and_do_not_break_a_character(codec: Codec):
    stream = ChatStream(spec(), META, codec.vocab)
    assert stream.feed(EOS_ID) is None
    chunks = feed_all(stream, [CRAB[0], 128_803, CRAB[1], THINK_END_ID, CRAB[2]])
    assert joined(chunks, finish(stream), "content") == "🦀"


def test_dsml_and_grounding_tags_are_text(codec: Codec):
    stream = ChatStream(spec(), META, codec.vocab)
    assert joined(feed_all(stream, [DSML_ID, 129_278]), finish(stream), "content") == "｜DSML｜<｜ref｜>"


def test_reasoning_ends_at_its_token_and_not_at_its_spelling(codec: Codec):
    stream = ChatStream(spec(StreamStart.REASONING), META, codec.vocab)
    ids = [*ids_of(codec, "a</think>b"), CRAB[0], THINK_END_ID, *ids_of(codec, "\n\nc")]
    chunks = feed_all(stream, ids)
    last = finish(stream)
    assert joined(chunks, last, "reasoning_content") == "a</think>b�"
    assert joined(chunks, last, "content") == "c"
    assert stream.reasoning_tokens == ids.index(THINK_END_ID)
    assert last["usage"]["completion_tokens_details"]["reasoning_tokens"] == ids.index(THINK_END_ID)


@pytest.mark.parametrize(("start", "expected"), [(StreamStart.CONTENT, "hi\n"), (CONTENT, "\n\nhi\n")])
def test_newlines_before_a_fresh_field_are_dropped(codec: Codec, start: StreamStart, expected: str):
    stream = ChatStream(spec(start), META, codec.vocab)
    chunks = feed_all(stream, ids_of(codec, "\n\nhi\n"))
    assert joined(chunks, finish(stream), "content") == expected


def test_a_stop_string_over_many_tokens_is_never_shown(codec: Codec):
    stream = ChatStream(spec(stop=("ABABAC",)), META, codec.vocab)
    ids = [ids_of(codec, char)[0] for char in "xxABABABAC yy"]
    chunks = feed_all(stream, ids)
    assert stream.stopped
    assert stream.num_tokens == len("xxABABABAC")
    assert joined(chunks, finish(stream), "content") == "xxAB"
    assert chunks[len("xxABABABAC") :] == [None] * 3


def test_a_stop_string_inside_one_token_cuts_the_token(codec: Codec):
    stream = ChatStream(spec(stop=("ell",)), META, codec.vocab)
    (hello,) = ids_of(codec, "hello")
    chunk = stream.feed(hello)
    assert chunk is not None
    assert json.loads(chunk)["choices"][0]["delta"]["content"] == "h"
    assert stream.stopped


def test_stop_strings_do_not_apply_to_reasoning(codec: Codec):
    stream = ChatStream(spec(StreamStart.REASONING, stop=("STOP",)), META, codec.vocab)
    ids = [*ids_of(codec, "x STOP y"), THINK_END_ID, *ids_of(codec, "z STOP w")]
    chunks = feed_all(stream, ids)
    last = finish(stream)
    assert joined(chunks, last, "reasoning_content") == "x STOP y"
    assert joined(chunks, last, "content") == "z "


def test_a_hopeful_prefix_is_shown_at_the_end(codec: Codec):
    stream = ChatStream(spec(stop=("hello world",)), META, codec.vocab)
    chunks = feed_all(stream, ids_of(codec, "say hello wor"))
    last = finish(stream)
    assert last["choices"][0]["delta"]["content"] == "hello wor"
    assert joined(chunks, last, "content") == "say hello wor"


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, 2**32 - 1])
def test_a_foreign_id_is_refused(codec: Codec, token_id: int):
    stream = ChatStream(spec(), META, codec.vocab)
    stream.feed(90)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        stream.feed(token_id)
    assert stream.num_tokens == 1


def chunk_ids(codec: Codec, chunk: Any) -> list[int]:
    if isinstance(chunk, dict):
        if "ids" in chunk:
            return list(chunk["ids"])
        return [THINK_END_ID] if "special_text" in chunk else ids_of(codec, chunk["plain"])
    out: list[int] = []
    for index, part in enumerate(chunk.split("</think>")):  # in the cases' text form a spelling is the token
        out += [THINK_END_ID] if index else []
        opener, _, text = part.rpartition("<think>")
        out += [128_821, *ids_of(codec, text)] if opener or "<think>" in part else ids_of(codec, text)
    return out


@pytest.mark.parametrize(("given_", "expect"), cases("stream"))
def test_a_stream_case_gives_what_the_case_table_says(codec: Codec, given_: Any, expect: Any):
    encoded = codec.encode_chat(json.dumps(given_["body"]).encode(), 65_536)
    stream = ChatStream(encoded.parse, META, codec.vocab)
    for chunk in given_["chunks"]:
        for token_id in chunk_ids(codec, chunk):
            if not stream.stopped:
                stream.feed(token_id)
    answer = finish(stream, given_["finish"])
    message = answer["choices"][0]["message"]
    assert (message["content"], message.get("reasoning_content")) == (expect["content"], expect["reasoning_content"])
    assert answer["choices"][0]["finish_reason"] == expect["finish_reason"]
    if "completion_tokens" in expect:
        assert answer["usage"]["completion_tokens"] == expect["completion_tokens"]
