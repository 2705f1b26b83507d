from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.events import Beacon
from stages.assigned import Assigned
from stages.balance import BLOCK_TOKENS, rank_decode, rank_prefill

MODEL, LAYOUT = "fp-1", "aa"


def engine(worker: str, **load: Any) -> Beacon:
    usual: dict[str, Any] = {"free_slots": 8, "fingerprint": MODEL, "layout": LAYOUT}
    return Beacon(worker, 1, ("prefill",), **(usual | load))


def prefill(
    beacons: list[Beacon], hits: Mapping[str, int] | None = None, assigned: Mapping[str, int] | None = None
) -> list[str]:
    """A prompt of 1,000 tokens."""
    return [b.worker for b in rank_prefill(beacons, hits or {}, 1_000, assigned or {}, fingerprint=MODEL)]


def decode(beacons: list[Beacon], **assigned: int) -> list[str]:
    return [b.worker for b in rank_decode(beacons, assigned, fingerprint=MODEL, layout=LAYOUT)]


beacon_lists = st.lists(
    st.builds(
        engine,
        st.sampled_from(["p1", "p2", "p3", "p4", "p5"]),
        free_slots=st.integers(0, 3),
        running=st.integers(0, 2),
        queued=st.integers(0, 3),
        queued_tokens=st.integers(0, 3_000),
        kv_used=st.floats(0, 1),
        fingerprint=st.sampled_from([MODEL, "fp-2"]),
        layout=st.sampled_from([LAYOUT, "bb"]),
    ),
    unique_by=lambda beacon: beacon.worker,
)


def test_the_least_work_comes_first():
    busy, idle = engine("a", queued_tokens=3_000), engine("b", queued_tokens=200)
    assert prefill([busy, idle]) == ["b", "a"]


def test_a_hit_is_worth_what_it_saves():
    a, b = engine("a", queued_tokens=500), engine("b")
    assert prefill([a, b], {"a": 3}) == ["b", "a"]  # 384 saved, 500 to wait for
    assert prefill([a, b], {"a": 4}) == ["a", "b"]  # 512


@pytest.mark.parametrize("hit_blocks", [0, 1, 7, 8, 1_000])
def test_affinity_never_outweighs_a_longer_queue(hit_blocks: int):
    warm, cold = engine("a", queued_tokens=1_001), engine("b")
    assert prefill([warm, cold], {"a": hit_blocks})[0] == "b"


def test_a_full_engine_comes_last_whatever_it_stores():
    full, free = engine("a", free_slots=0), engine("b", queued_tokens=100_000)
    assert prefill([full, free], {"a": 7}) == ["b", "a"]


@given(beacon_lists, st.randoms(use_true_random=False))
def test_only_engines_of_the_model_are_ranked_and_all_of_them(beacons: list[Beacon], rng: random.Random):
    ranked = prefill(beacons)
    assert sorted(ranked) == sorted(b.worker for b in beacons if b.fingerprint == MODEL)
    shuffled = rng.sample(beacons, len(beacons))
    assert prefill(shuffled) == ranked
    fitting = decode(beacons)
    assert sorted(fitting) == sorted(b.worker for b in beacons if (b.fingerprint, b.layout) == (MODEL, LAYOUT))
    assert decode(shuffled) == fitting


@given(beacon_lists, st.integers(1, 5_000))
def test_more_work_never_makes_an_engine_more_attractive(beacons: list[Beacon], more: int):
    ranked = prefill(beacons)
    for place, worker in enumerate(ranked):
        assert prefill(beacons, None, {worker: more}).index(worker) >= place
        warmer = prefill(beacons, {worker: more // BLOCK_TOKENS})
        assert warmer.index(worker) <= place
        raised = [
            msgspec.structs.replace(b, queued_tokens=b.queued_tokens + more * (b.worker == worker)) for b in beacons
        ]
        assert prefill(raised).index(worker) >= place


@given(beacon_lists, st.integers(1, 4))
def test_more_requests_never_make_a_decode_engine_more_attractive(beacons: list[Beacon], more: int):
    ranked = decode(beacons)
    for place, worker in enumerate(ranked):
        assert decode(beacons, **{worker: more}).index(worker) >= place


def test_equal_engines_have_one_order():
    beacons = [engine(name) for name in "dbca"]
    assert prefill(beacons) == decode(beacons) == ["a", "b", "c", "d"]


def test_a_burst_of_prompts_spreads_over_equal_engines():
    beacons, assigned = [engine(name) for name in "abcd"], Assigned()
    for _ in range(40):
        best = rank_prefill(beacons, {}, 700, assigned.amounts, fingerprint=MODEL)[0]
        assigned.add(best.worker, 700)
    assert assigned.amounts == dict.fromkeys("abcd", 7_000)


def test_a_burst_with_one_prefix_fills_its_holder_only_up_to_the_others_load():
    """8,192 tokens each, 8,064 of them stored at `a`: the others get some once `a` has as much to do as they would."""
    beacons, assigned = [engine(name, free_slots=1_000) for name in "abcd"], Assigned()
    hits, places = {"a": 63}, Counter[str]()
    for _ in range(260):
        best = rank_prefill(beacons, hits, 8_192, assigned.amounts, fingerprint=MODEL)[0].worker
        places[best] += 1
        assigned.add(best, 8_192 - BLOCK_TOKENS * hits.get(best, 0))
    assert places["a"] > 200
    assert all(places[name] for name in "bcd")
    work = assigned.amounts
    assert max(work.values()) - min(work.values()) <= 8_192


def test_a_prompt_that_is_stored_whole_still_costs_something():
    """More blocks than the prompt has (a stale index) must not make work negative."""
    a, b = engine("a", queued_tokens=0, running=1), engine("b", queued_tokens=0)
    assert prefill([a, b], {"a": 50, "b": 8}) == ["b", "a"]


def test_the_emptiest_memory_comes_first_then_the_fewest_requests():
    beacons = [engine("a", kv_used=0.5), engine("b", kv_used=0.1, running=9), engine("c", kv_used=0.104, running=2)]
    assert decode(beacons) == ["c", "b", "a"]


def test_a_decode_engine_whose_slots_are_spoken_for_comes_last():
    few, many = engine("a", free_slots=2), engine("b", kv_used=0.9)
    assert decode([few, many], a=1) == ["a", "b"]
    assert decode([few, many], a=2) == ["b", "a"]


def test_a_burst_of_handoffs_spreads_over_equal_engines():
    beacons, assigned = [engine(name, free_slots=100) for name in "abc"], Assigned()
    for _ in range(30):
        best = rank_decode(beacons, assigned.amounts, fingerprint=MODEL, layout=LAYOUT)[0]
        assigned.add(best.worker, 1)
    assert assigned.amounts == dict.fromkeys("abc", 10)


def test_nobody_serves_an_unknown_model():
    assert rank_prefill([engine("a")], {}, 10, {}, fingerprint="fp-9") == []
    assert rank_decode([engine("a")], {}, fingerprint=MODEL, layout="cc") == []
