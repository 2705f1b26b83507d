"""The real engine through separate processes: the same tokens as in one process, cold or from the cache."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import kv.plan
from codec.codec import Codec
from codec.models import EncodedPrompt, StreamMeta
from stages.engine.interface import BLOCK_TOKENS, SamplingParams, Sequence
from stages.engine.prefill_engine import CHUNK_TOKENS
from stages.parse import Parse
from tests.system.answers import Answer, ask, chat, connected, words
from tests.system.fleet import Fleet
from tidemill import engines
from tidemill.engine_options import EngineOptions
from tidemill.engines import Built
from tidemill.worker import SERVED_MODELS

NUM_TOKENS = 24


@pytest.fixture(scope="module")
def split(new_fleet: Fleet) -> Fleet:
    """Prefill and decode in processes of their own."""
    new_fleet.start_all(engine="torch")
    asyncio.run(new_fleet.ready())
    return new_fleet


@pytest.fixture(scope="module")
def whole() -> Iterator[Built]:
    """The same engine in this process, prefill and decode in one memory."""
    threads = torch.get_num_threads()
    built = engines.build("torch", EngineOptions(kv_blocks=64, states=2), shared=False)
    yield built
    built.memory.close()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def codec() -> Codec:
    return Codec.load(SERVED_MODELS)


def answer_of_one_process(built: Built, codec: Codec, body: dict[str, Any]) -> Answer:
    """What a single process that runs prefill and decode answers."""
    card, memory = built.runner.card, built.memory
    prompt = codec.encode_chat(json.dumps(body).encode(), card.max_context_tokens - 1)
    n = prompt.num_prompt_tokens
    blocks = memory.allocate(-(-(n + NUM_TOKENS) // BLOCK_TOKENS))
    slot = memory.take_state()
    assert blocks is not None
    assert slot is not None
    plan = kv.plan.plan(n, 0, keep=card.keep_tokens, window=card.window_tokens, windows=card.replay_windows)
    ids = np.asarray(prompt.ids, np.uint32)
    seq = Sequence(
        rid="ab" * 16,
        attempt=0,
        choice=0,
        ids=ids,
        tail_ids=ids[-3:],
        num_prompt_tokens=n,
        plan=plan,
        block_table=list(blocks.blocks),
        state_slot=slot,
        seed=prompt.sampling.seed or 0,
        sampling=sampling_of(prompt),
    )
    token = None
    for start in range(0, n, CHUNK_TOKENS):
        token = built.runner.prefill(seq, start, min(start + CHUNK_TOKENS, n))
    assert token is not None
    seq.output.append(token)
    while len(seq.output) < NUM_TOKENS:
        seq.output += built.runner.decode([seq])
    memory.release([blocks])
    memory.give_state(slot)
    return parsed(codec, prompt, seq.output)


def sampling_of(prompt: EncodedPrompt) -> SamplingParams:
    wishes = prompt.sampling
    return SamplingParams(
        temperature=wishes.temperature,
        top_p=wishes.top_p,
        top_k=wishes.top_k,
        max_tokens=wishes.max_tokens,
        eos_ids=(1,),
        ignore_eos=wishes.ignore_eos,
    )


def parsed(codec: Codec, prompt: EncodedPrompt, tokens: list[int]) -> Answer:
    parser = Parse(prompt.parse, StreamMeta(rid="ab" * 16, created=0, model=prompt.model, choice=0), codec.vocab)
    answer = Answer()
    for token in tokens:
        event = parser.feed(token)
        if event is not None:
            answer.add(len(answer.numbers), "", json.loads(event))
    return answer


@pytest.mark.parametrize("num_words", [5, 150, 500])
async def test_two_processes_give_the_tokens_of_one(split: Fleet, whole: Built, codec: Codec, num_words: int):
    body = chat(words(num_words, seed=num_words), seed=num_words, max_tokens=NUM_TOKENS)
    async with connected(split.url) as client:
        answer = await ask(client, body)
    assert answer.complete
    assert answer.usage["completion_tokens"] == NUM_TOKENS
    alone = answer_of_one_process(whole, codec, body)
    assert "".join(map("".join, alone.deltas)) != ""
    assert answer.deltas[: len(alone.deltas)] == alone.deltas
    assert answer.text.startswith(alone.text)


async def test_a_hit_gives_the_tokens_of_a_cold_run(split: Fleet):
    shared = words(450, seed=8)
    later = chat(f"{shared} Go on.", seed=11, max_tokens=NUM_TOKENS)
    async with connected(split.url) as client, connected(split.url, "cold") as stranger:
        await ask(client, chat(shared, max_tokens=2))
        hit = await ask(client, later)
        cold = await ask(stranger, later)
    assert hit.hit_tokens > 0
    assert hit.hit_tokens % BLOCK_TOKENS == 0
    assert cold.hit_tokens == 0
    assert hit.deltas == cold.deltas
    assert hit.usage["completion_tokens"] == cold.usage["completion_tokens"] == NUM_TOKENS


async def test_a_batch_of_streams_gives_each_the_tokens_it_has_alone(split: Fleet):
    bodies = [chat(words(30 * seed + 1, seed=seed), seed=seed, max_tokens=NUM_TOKENS) for seed in range(6)]
    async with connected(split.url) as client:
        alone = [await ask(client, body) for body in bodies]
    async with connected(split.url, "together") as client:
        together = await asyncio.gather(*(ask(client, body) for body in bodies))
    assert [answer.deltas for answer in together] == [answer.deltas for answer in alone]


def form(kind: str, **details: Any) -> dict[str, Any]:
    """What a request adds to have its answer constrained from the first token."""
    return {"response_format": {"type": kind, **details}, "thinking": {"type": "disabled"}, "ignore_eos": None}


async def test_an_answer_has_the_form_that_was_asked_for(split: Fleet):
    tide = {"type": "string", "enum": ["ebb", "flow", "slack"]}
    schema = {
        "type": "object",
        "properties": {"tide": tide, "metres": {"type": "integer", "minimum": 0, "maximum": 20}},
        "required": ["tide", "metres"],
        "additionalProperties": False,
    }
    wanted = form("json_schema", json_schema={"name": "reading", "schema": schema})
    async with connected(split.url) as client:
        bodies = [chat("Read the gauge as JSON.", seed=seed, max_tokens=200) | wanted for seed in (0, 1, 2, 3, 3)]
        *answers, again = [await ask(client, body) for body in bodies]
    for answer in answers:
        assert answer.complete
        assert answer.end == "stop"
        reading = json.loads(answer.text)
        assert reading["tide"] in tide["enum"]
        assert 0 <= reading["metres"] <= 20
    assert again.text == answers[3].text


async def test_choices_of_a_constrained_request_all_fit(split: Fleet):
    wanted = form("regex", regex="(north|south|east|west){2,6}")
    async with connected(split.url) as client:
        ends = {}
        texts = ["", "", ""]
        async for event in await client.publish(chat("Where to?", seed=1, max_tokens=60) | wanted | {"n": 3}):
            if event.number is not None:
                for choice in event.json()["choices"]:
                    texts[event.choice] += choice["delta"].get("content") or ""
            if event.end:
                ends[event.choice] = event.end
    assert ends == dict.fromkeys(range(3), "stop")
    assert all(re.fullmatch("(north|south|east|west){2,6}", text) for text in texts)


async def test_a_grammar_that_cannot_be_served_ends_its_request_by_name(split: Fleet):
    async with connected(split.url) as client:
        broken = await ask(client, chat("No.", max_tokens=9) | form("regex", regex="(unclosed"))
        after = await ask(client, chat("Still there?", max_tokens=9))
    assert broken.end == "grammar_error"
    assert broken.complete
    assert after.complete
    assert after.end == "length"
