from __future__ import annotations

import asyncio
import secrets

import numpy as np
import pytest

from kv.block import chain_keys, root_of, salt
from kv.index import PrefixIndex
from pipeline.events import Envelope, IndexChanged, PrefixMatched, PromptEncoded, Sampling
from pipeline.metrics import counters
from pipeline.wire import encode
from stages.engine.stub import LAYOUT
from stages.lookup import IndexFeed, Lookup
from tests.stages.engine.stub_engine import prompt
from tests.stages.town import FINGERPRINT, Town, engine, town

NUM_TOKENS = 1_000


def event(seed: int = 0, fingerprint: str = FINGERPRINT) -> PromptEncoded:
    ids = prompt(NUM_TOKENS, seed)
    env = Envelope(1, secrets.token_hex(16), "acme", "interactive", 0, 0, "codec-a", 1, (1,), 7)
    keys = chain_keys(root_of(FINGERPRINT, LAYOUT.digest(), salt("acme", "", b"")), ids)
    sampling = Sampling(max_tokens=5, temperature=1.0, top_p=1.0)
    return PromptEncoded(env, "stub", fingerprint, NUM_TOKENS, ids.tobytes(), "", keys, sampling, "codec-a")


async def alternatives(stage: Lookup, prompt_event: PromptEncoded) -> list[PrefixMatched]:
    return [matched async for matched in stage.handle(prompt_event)]


async def workers(stage: Lookup, prompt_event: PromptEncoded) -> list[tuple[str, int]]:
    return [(m.engine, m.expected_hit_tokens) for m in await alternatives(stage, prompt_event)]


def knows(index: PrefixIndex, holder: str, prompt_event: PromptEncoded, num_blocks: int) -> None:
    index.stored(holder, 1, 1, prompt_event.block_keys[: 16 * num_blocks])


async def test_every_engine_is_an_alternative_the_best_first(nats_url: str):
    async with town(nats_url) as here:
        await here.announce(
            engine("warm", queued_tokens=200),
            engine("cool", queued_tokens=100),
            engine("hot", queued_tokens=5_000),
            engine("full", free_slots=0),
        )
        index, wanted = PrefixIndex(1 << 20), event()
        knows(index, "warm", wanted, 4)
        knows(index, "hot", wanted, 7)
        found = await alternatives(Lookup(here.membership, index), wanted)
        assert [(m.engine, m.expected_hit_tokens) for m in found] == [
            ("warm", 512),
            ("cool", 0),
            ("hot", 896),
            ("full", 0),
        ]
        assert all(m.prompt == wanted for m in found)


async def test_only_fresh_prefill_engines_of_the_same_model_are_chosen(nats_url: str):
    async with town(nats_url) as here:
        stage = Lookup(here.membership, PrefixIndex(1 << 20))
        await here.announce(
            engine("right"),
            engine("other-model", fingerprint="stub-2"),
            engine("draining", draining=True),
            engine("decoder", "decode"),
            engine("both", "prefill", "decode"),
        )
        assert sorted(name for name, _ in await workers(stage, event())) == ["both", "right"]
        assert await workers(stage, event(fingerprint="stub-2")) == [("other-model", 0)]


async def test_an_engine_that_fell_silent_is_left_out(nats_url: str):
    async with town(nats_url, fresh_s=0.3) as here:
        stage = Lookup(here.membership, PrefixIndex(1 << 20))
        await here.announce(engine("silent"))
        while here.membership.silent_s("silent") <= 0.3:
            await here.announce(engine("lively"))
        await here.announce(engine("lively"))
        assert [name for name, _ in await workers(stage, event())] == ["lively"]


async def test_without_engines_there_are_no_alternatives(nats_url: str):
    """The hop then answers `busy`, so that the owner waits for one without spending an attempt."""
    async with town(nats_url) as here:
        stage = Lookup(here.membership, PrefixIndex(1 << 20))
        assert await workers(stage, event()) == []
        await here.announce(engine("other-model", fingerprint="stub-2"))
        assert await workers(stage, event()) == []


async def test_a_burst_between_two_beacons_spreads(nats_url: str):
    async with town(nats_url) as here:
        await here.announce(*(engine(name) for name in ("a", "b", "c", "d")))
        stage = Lookup(here.membership, PrefixIndex(1 << 20))
        stage._assigned._window_s = 600.0  # the test must not depend on how fast this machine is
        chosen = []
        for seed in range(20):
            first = await anext(stage.handle(event(seed)))
            chosen.append(first.engine)
        assert {name: chosen.count(name) for name in "abcd"} == dict.fromkeys("abcd", 5)


async def test_an_engine_that_was_not_asked_is_not_charged(nats_url: str):
    async with town(nats_url) as here:
        await here.announce(engine("a"), engine("b"))
        stage = Lookup(here.membership, PrefixIndex(1 << 20))
        await anext(stage.handle(event()))
        assert stage._assigned.amounts == {"a": NUM_TOKENS}


class Fed:
    """An index kept by a feed, and an engine that tells what it stores."""

    def __init__(self, here: Town, holder: str) -> None:
        self.here = here
        self.holder = holder
        self.index = PrefixIndex(1 << 20)
        self.feed = IndexFeed(here.bus, here.membership, self.index)
        self.asked = asyncio.Event()
        self.stored = b""
        self.seq = 0
        topology = here.other.topology
        self.subject = topology.subject("index", worker=holder)
        here.other.subscribe(topology.subject("index_sync", worker=holder), self._asked)

    async def ready(self) -> Fed:
        await self.here.bus.flush()
        await self.here.other.flush()
        return self

    def _asked(self, _subject: str, reply: str, _payload: bytes, _headers: bytes | None) -> None:
        snapshot = IndexChanged(self.holder, 1, self.seq, self.stored, b"", snapshot=True)
        self.here.other.tell(reply, encode(snapshot))
        self.asked.set()

    def tell(self, stored: bytes = b"", removed: bytes = b"", *, lost: bool = False) -> None:
        keys = np.frombuffer(self.stored, "V16").tolist() if self.stored else []
        self.stored = b"".join(key for key in keys if key not in removed) + stored
        self.seq += 1
        if not lost:
            self.here.other.tell(self.subject, encode(IndexChanged(self.holder, 1, self.seq, stored, removed)))

    async def until_hit(self, prompt_event: PromptEncoded, num_blocks: int) -> None:
        """Return once the index says so; looked at after each of the holder's beacons."""
        async with asyncio.timeout(30):
            while self.index.match(prompt_event.block_keys).get(self.holder, 0) != num_blocks:
                await self.here.announce(engine(self.holder))


async def test_what_engines_tell_becomes_hits(nats_url: str):
    async with town(nats_url) as here:
        fed, wanted = await Fed(here, "teller").ready(), event()
        fed.tell(stored=wanted.block_keys[:80])
        await fed.until_hit(wanted, 5)
        fed.tell(removed=wanted.block_keys[48:80])
        await fed.until_hit(wanted, 3)
        stage = Lookup(here.membership, fed.index)
        assert await workers(stage, wanted) == [("teller", 384)]


async def test_a_new_engine_is_asked_what_it_has(nats_url: str):
    async with town(nats_url) as here:
        fed, wanted = await Fed(here, "veteran").ready(), event()
        fed.stored, fed.seq = wanted.block_keys[:96], 41
        await fed.until_hit(wanted, 6)
        assert fed.asked.is_set()


async def test_a_lost_change_is_repaired_at_the_next_one(nats_url: str):
    async with town(nats_url) as here:
        fed, wanted = await Fed(here, "lossy").ready(), event()
        fed.tell(stored=wanted.block_keys[:16])
        await fed.until_hit(wanted, 1)
        fed.tell(stored=wanted.block_keys[16:32], lost=True)
        fed.tell(stored=wanted.block_keys[32:48])
        await fed.until_hit(wanted, 3)


async def test_rubbish_on_the_index_subject_is_counted(nats_url: str):
    async with town(nats_url) as here:
        fed, wanted = await Fed(here, "rubbish").ready(), event()
        before = counters["index_events_malformed"]
        here.other.tell(fed.subject, b"\xc1rubbish")
        fed.tell(stored=wanted.block_keys[:16])
        await fed.until_hit(wanted, 1)
        assert counters["index_events_malformed"] == before + 1


@pytest.mark.parametrize("num_blocks", [0, 7])
async def test_a_prompt_without_full_blocks_or_with_all_of_them_can_be_looked_up(nats_url: str, num_blocks: int):
    async with town(nats_url) as here:
        await here.announce(engine("one"))
        index, wanted = PrefixIndex(1 << 20), event()
        knows(index, "one", wanted, num_blocks)
        assert await workers(Lookup(here.membership, index), wanted) == [("one", 128 * num_blocks)]
