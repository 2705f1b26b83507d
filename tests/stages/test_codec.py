from __future__ import annotations

import asyncio
import json
import secrets
from typing import Any

import numpy as np
import pytest

import codec.codec
from kv.block import chain_keys, root_of, salt
from pipeline.errors import HTTP_STATUS, ErrorCode, RequestError, TransientError
from pipeline.events import Plan, RequestBody
from stages.codec import HUGE_BODY_BYTES, INLINE_BODY_BYTES, ChatEncoding, Codec
from stages.engine.stub import LAYOUT
from tests.stages.town import FINGERPRINT, Town, engine, town

SECRET = b"of this cluster"
LONG = "the quick brown fox jumps over the lazy dog " * 40


@pytest.fixture(scope="module")
def chat() -> codec.codec.Codec:
    return codec.codec.Codec.load({"tern-1": "DeepSeek-V4.1-Flash"})


def request(
    content: Any = LONG, *, tenant: str = "acme", protocol: str = "chat_completions", **more: Any
) -> RequestBody:
    body = {"model": "tern-1", "messages": [{"role": "user", "content": content}], **more}
    return RequestBody(secrets.token_hex(16), tenant, protocol, json.dumps(body).encode())


async def encoded(stage: Codec, event: RequestBody) -> ChatEncoding:
    results = [encoding async for encoding in stage.handle(event)]
    assert len(results) == 1
    return results[0]


async def refused(stage: Codec, event: RequestBody) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await encoded(stage, event)
    return caught.value


async def stage_with_engine(here: Town, chat: codec.codec.Codec, secret: bytes = SECRET, **load: Any) -> Codec:
    await here.announce(engine("prefill-a", **load))
    return Codec(chat, here.membership, secret)


async def test_a_body_becomes_the_ids_that_the_codec_gives(nats_url: str, chat: codec.codec.Codec):
    async with town(nats_url) as here:
        stage = await stage_with_engine(here, chat)
        plain = {"type": "disabled"}  # thinking has its own temperature
        event = request(seed=5, temperature=0.3, top_p=0.9, max_tokens=77, ignore_eos=True, thinking=plain)
        encoding = await encoded(stage, event)
        prompt = chat.encode_chat(event.body, 60_000)
        assert np.frombuffer(encoding.ids, "<u4").tolist() == prompt.ids.tolist()
        assert encoding.num_prompt_tokens == len(prompt.ids) > 2 * 128
        assert (encoding.model, encoding.fingerprint, encoding.seed) == ("tern-1", FINGERPRINT, 5)
        sampling = encoding.sampling
        assert (sampling.temperature, sampling.max_tokens) == (0.3, 77)
        assert sampling.top_p == prompt.sampling.top_p
        assert (sampling.ignore_eos, sampling.eos_ids, sampling.num_choices) == (True, (1,), 1)
        assert not encoding.too_long


async def test_a_large_body_gives_the_same_as_a_small_one(nats_url: str, chat: codec.codec.Codec):
    async with town(nats_url) as here:
        stage = await stage_with_engine(here, chat)
        event = request(LONG * 20)
        assert len(event.body) > INLINE_BODY_BYTES
        encoding = await encoded(stage, event)
        assert encoding.ids == chat.encode_chat(event.body, 60_000).ids.tobytes()
        assert len(encoding.block_keys) == 16 * (encoding.num_prompt_tokens // 128)


async def test_however_many_huge_bodies_come_others_do_not_wait_for_a_thread(nats_url: str, chat: codec.codec.Codec):
    """More of them than the loop's own pool has threads; what is asserted is an order, not a time."""
    async with town(nats_url) as here:
        stage = await stage_with_engine(here, chat)
        texts = [f"{i} " * (HUGE_BODY_BYTES // len(f"{i} ") + 1) for i in range(10, 50)]
        huge = [asyncio.create_task(encoded(stage, request(text))) for text in texts]
        await asyncio.sleep(0)  # each has begun
        other = asyncio.create_task(encoded(stage, request(LONG * 20)))
        await asyncio.wait([other, *huge], return_when=asyncio.FIRST_COMPLETED)
        assert (other.done(), sum(task.done() for task in huge)) == (True, 0)
        for task in huge:
            task.cancel()


async def test_block_keys_begin_at_model_layout_tenant_and_user(nats_url: str, chat: codec.codec.Codec):
    async with town(nats_url) as here:
        stage = await stage_with_engine(here, chat)
        encoding = await encoded(stage, request(user="ann"))
        root = root_of(FINGERPRINT, LAYOUT.digest(), salt("acme", "ann", SECRET))
        assert encoding.block_keys == chain_keys(root, np.frombuffer(encoding.ids, np.uint32))


async def test_caches_of_tenants_users_models_and_clusters_are_apart(nats_url: str, chat: codec.codec.Codec):
    async with town(nats_url) as here:
        stage = await stage_with_engine(here, chat)
        found = [
            await encoded(stage, request()),
            await encoded(stage, request(tenant="bond")),
            await encoded(stage, request(user="ann")),
            await encoded(stage, request(user="bob")),
            await encoded(stage, request(tenant="bond", user="ann")),
            await encoded(await stage_with_engine(here, chat, b"of another cluster"), request()),
            await encoded(await stage_with_engine(here, chat, fingerprint="stub-2"), request()),
            await encoded(await stage_with_engine(here, chat, layout="ab" * 16), request()),
        ]
        assert len({encoding.ids for encoding in found}) == 1
        firsts = {encoding.block_keys[at : at + 16] for encoding in found for at in range(0, 32, 16)}
        assert len(firsts) == 2 * len(found)
        assert len({encoding.salt for encoding in found}) == 6  # a salt knows neither model nor layout


async def test_the_same_user_of_a_tenant_hits_however_it_is_named(nats_url: str, chat: codec.codec.Codec):
    async with town(nats_url) as here:
        stage = await stage_with_engine(here, chat)
        named: list[dict[str, Any]] = [{"user": "ann"}, {"user_id": "ann"}, {"metadata": {"user_id": "ann"}}]
        keys = {(await encoded(stage, request(**member))).block_keys for member in named}
        assert len(keys) == 1


@pytest.mark.parametrize(
    ("event", "code", "param"),
    [
        (request(model="gull-3"), ErrorCode.MODEL_NOT_FOUND, "model"),
        (request(temperature=9), ErrorCode.INVALID_REQUEST, None),
        (request(max_tokens=59_999), ErrorCode.INVALID_REQUEST, "max_tokens"),
        (request(top_k=9), ErrorCode.INVALID_REQUEST, "top_k"),
        (request(user="u" * 513), ErrorCode.INVALID_REQUEST, "user"),
        (request(content=5), ErrorCode.INVALID_REQUEST, "messages[0]"),
        (request(LONG * 20, model="gull-3"), ErrorCode.MODEL_NOT_FOUND, "model"),
        (request(LONG * 20, top_k=9), ErrorCode.INVALID_REQUEST, "top_k"),
        (RequestBody("0" * 32, "acme", "chat_completions", b"{"), ErrorCode.INVALID_REQUEST, None),
        (RequestBody("1" * 32, "acme", "chat_completions", b""), ErrorCode.INVALID_REQUEST, None),
        (request(protocol="responses"), ErrorCode.INVALID_REQUEST, None),
    ],
)
async def test_a_fault_of_the_body_names_code_and_field(
    nats_url: str, chat: codec.codec.Codec, event: RequestBody, code: ErrorCode, param: str | None
):
    async with town(nats_url) as here:
        error = await refused(await stage_with_engine(here, chat), event)
        assert error.code is code
        assert error.message
        assert param is None or error.param == param


async def test_without_engines_good_bodies_are_retried_and_bad_ones_refused(nats_url: str, chat: codec.codec.Codec):
    async with town(nats_url) as here:
        stage = Codec(chat, here.membership, SECRET)
        for content in (LONG, LONG * 20):
            with pytest.raises(TransientError, match="no prefill engine"):
                await encoded(stage, request(content))
        assert (await refused(stage, request(top_k=9))).param == "top_k"


async def test_only_a_fresh_prefill_engine_says_what_is_served(nats_url: str, chat: codec.codec.Codec):
    async with town(nats_url) as here:
        stage = Codec(chat, here.membership, SECRET)
        await here.announce(engine("a", "decode"), engine("b", "codec"), engine("c", draining=True))
        with pytest.raises(TransientError):
            await encoded(stage, request())
        await here.announce(engine("c", draining=False))
        await encoded(stage, request())
    async with town(nats_url, fresh_s=0.0) as here:
        with pytest.raises(TransientError):
            await encoded(await stage_with_engine(here, chat), request())


async def test_a_prompt_beyond_the_engines_limit_is_too_long_and_no_error(nats_url: str, chat: codec.codec.Codec):
    async with town(nats_url) as here:
        num_tokens = (await encoded(await stage_with_engine(here, chat), request())).num_prompt_tokens
        for limit, too_long in ((num_tokens - 1, True), (num_tokens, False), (1, True)):
            stage = await stage_with_engine(here, chat, max_prompt_tokens=limit)
            encoding = await encoded(stage, request())
            assert (encoding.too_long, encoding.num_prompt_tokens) == (too_long, num_tokens)
            assert bool(encoding.block_keys) is not too_long
            assert encoding.sampling.max_tokens == (0 if too_long else 1)


async def test_an_encoding_opens_fresh_parsers(nats_url: str, chat: codec.codec.Codec):
    async with town(nats_url) as here:
        encoding = await encoded(await stage_with_engine(here, chat), request(stream=True))
        word = int(chat.tokenizer.encode("word", [])[0])
        first, second = (encoding.open("ab" * 16, 1_790_000_000, choice) for choice in (0, 1))
        chunks = [json.loads(parser.feed(word) or b"{}") for parser in (first, second)]
        assert [chunk["choices"][0]["index"] for chunk in chunks] == [0, 1]
        assert {chunk["id"] for chunk in chunks} == {"chatcmpl-" + "ab" * 16}
        assert {chunk["model"] for chunk in chunks} == {"tern-1"}
        last = json.loads(first.finish("stop", Plan(300, 256, 128, 0, 1), 1))
        assert last["usage"]["prompt_cache_hit_tokens"] == 256


async def test_every_failure_has_the_envelope_that_openai_clients_read(nats_url: str, chat: codec.codec.Codec):
    async with town(nats_url) as here:
        stage = Codec(chat, here.membership, SECRET)
        for code in ErrorCode:
            error = json.loads(stage.failure("chat_completions", code, f"why {code}", param="model"))["error"]
            assert (error["code"], error["message"], error["param"]) == (code, f"why {code}", "model")
            assert (error["type"] == "server_error") == (HTTP_STATUS[code] >= 500)
