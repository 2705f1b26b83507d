"""One request across the whole pipeline: what arrives, in which form, and what a shared prefix saves."""

from __future__ import annotations

import asyncio

from pipeline.client import Client
from tests.system.answers import Answer, ask, chat, connected, words
from tests.system.fleet import Fleet

PROMPT = words(400, seed=1)


async def test_events_come_numbered_once_and_usage_adds_up(fleet: Fleet):
    async with connected(fleet.url) as client:
        answer = await ask(client, chat("How does a tide mill work?", max_tokens=20))
    assert answer.complete
    assert answer.end == "length"
    assert answer.text.startswith("[stub engine]")
    usage = answer.usage
    assert usage["completion_tokens"] == 20
    assert usage["prompt_cache_hit_tokens"] + usage["prompt_cache_miss_tokens"] == usage["prompt_tokens"]
    assert answer.bodies[-1]["choices"][0]["finish_reason"] == "length"
    assert all(body["object"] == "chat.completion.chunk" for body in answer.bodies)


async def test_the_timeline_names_every_stage_in_order(fleet: Fleet):
    async with connected(fleet.url) as client:
        answer = await ask(client, chat("Where was my time spent?"), timeline=True)
    (note,) = [note for note in answer.notes if note["type"] == "request_timeline"]
    spans = {span["stage"]: span for span in note["spans"]}
    assert set(spans) == {"intake", "codec", "lookup", "prefill", "transfer", "decode", "parse"}
    way = [spans[stage]["start_ns"] for stage in ("intake", "codec", "lookup", "prefill", "transfer", "decode")]
    assert way == sorted(way)
    assert {spans[stage]["worker"] for stage in ("codec", "parse")} == {"codec-0"}
    assert spans["prefill"]["worker"] == "prefill-0"
    assert spans["decode"]["worker"] == "decode-0"


async def test_without_stream_one_event_has_the_whole_completion(fleet: Fleet):
    body = chat("Say it at once.", max_tokens=12)
    async with connected(fleet.url) as client:
        whole = await ask(client, {**body, "stream": False})
        streamed = await ask(client, body)
    assert whole.complete
    assert len(whole.bodies) == 1
    assert whole.bodies[0]["object"] == "chat.completion"
    assert whole.text == streamed.text
    assert whole.usage["completion_tokens"] == 12


async def test_a_batching_connection_brings_the_same_bodies(fleet: Fleet):
    body = chat("The same by any road.", max_tokens=30)

    def without_identity(answer: Answer) -> list[dict[str, object]]:
        return [{key: value for key, value in b.items() if key not in ("id", "created")} for b in answer.bodies]

    async with connected(fleet.url) as one, connected(fleet.url, batch=True) as other:
        single, batched = await asyncio.gather(ask(one, body), ask(other, body))
        assert single.complete
        assert batched.complete
        assert batched.numbers == single.numbers
        assert batched.end == single.end == "length"
        assert without_identity(batched) == without_identity(single)


async def test_other_seeds_give_other_answers(fleet: Fleet):
    async with connected(fleet.url) as client:
        first, second = [await ask(client, chat("Draw.", seed=seed)) for seed in (5, 6)]
    assert first.complete
    assert second.complete
    assert first.text != second.text


async def test_a_shared_prefix_is_hit_and_changes_no_token(fleet: Fleet):
    warm = chat(PROMPT, seed=9)
    longer = chat(f"{PROMPT} And now?", seed=10, max_tokens=32)
    async with connected(fleet.url) as client, connected(fleet.url, "cold") as stranger:
        first = await ask(client, warm)
        again = await ask(client, warm)
        hit = await ask(client, longer)
        cold = await ask(stranger, longer)
    assert first.hit_tokens == 0
    assert again.hit_tokens == hit.hit_tokens > 0
    assert hit.hit_tokens % 128 == 0
    assert again.text == first.text
    assert cold.hit_tokens == 0
    assert hit.deltas == cold.deltas


async def test_no_tenant_hits_what_another_stored_and_each_hits_its_own(fleet: Fleet):
    body = chat(words(400, seed=2))
    hits: dict[str, list[int]] = {}
    for tenant in ("ant", "bee", "ant", "bee"):
        async with connected(fleet.url, tenant) as client:
            hits.setdefault(tenant, []).append((await ask(client, body)).hit_tokens)
    assert [first for first, _ in hits.values()] == [0, 0]
    assert all(second > 0 for _, second in hits.values())


async def test_user_ids_of_one_tenant_share_nothing(fleet: Fleet):
    body = chat(words(400, seed=3))
    async with connected(fleet.url) as client:
        mine, theirs, mine_again, theirs_again = [
            (await ask(client, {**body, "user_id": user})).hit_tokens for user in ("u1", "u2", "u1", "u2")
        ]
    assert (mine, theirs) == (0, 0)
    assert mine_again == theirs_again > 0


async def choices_of(client: Client, body: dict[str, object], num_choices: int) -> list[Answer]:
    """The answer of every choice."""
    answers = [Answer() for _ in range(num_choices)]
    async for event in await client.publish(body):
        answers[event.choice].add(event.number, event.end, event.json())
    return answers


async def test_every_choice_is_an_answer_of_its_own(fleet: Fleet):
    body = chat("Say it in three ways.", max_tokens=150, seed=4)
    async with connected(fleet.url) as client:
        three = await choices_of(client, {**body, "n": 3}, 3)
        one = await ask(client, body)
        again = await choices_of(client, {**body, "n": 3}, 3)
    assert all(answer.complete and answer.end == "length" for answer in three)
    assert [answer.usage["completion_tokens"] for answer in three] == [150] * 3
    assert len({answer.text for answer in three}) == 3
    assert three[0].text == one.text
    assert [answer.text for answer in again] == [answer.text for answer in three]
    assert {body["choices"][0]["index"] for body in three[2].bodies if body["choices"]} == {2}


async def test_choices_that_end_with_their_first_token(fleet: Fleet):
    async with connected(fleet.url) as client:
        answers = await choices_of(client, {**chat("Stop!", max_tokens=1), "n": 4}, 4)
    assert all(answer.complete and answer.end == "length" for answer in answers)
    assert [answer.usage["completion_tokens"] for answer in answers] == [1] * 4
