from __future__ import annotations

import dataclasses

import pytest

from kv.plan import KVPlan, PlanError, PlanKind, plan

KEEP, WINDOW, LAYERS = 140, 128, 20


def decide(n: int, hit: int, windows: int = 1, snapshots: frozenset[int] = frozenset()) -> KVPlan:
    return plan(n, hit, keep=KEEP, window=WINDOW, windows=windows, exact_windows=LAYERS, snapshots=snapshots)


def brute(n: int, stored: int, windows: int, snapshots: frozenset[int]) -> tuple[int, int, int]:
    """The same definitions, found by trying every position."""
    grid = range(0, n + 1, 128)
    hit = max(p for p in grid if p <= stored and p <= n - 1)
    start = max([p for p in grid if p <= hit and p <= n - KEEP], default=0)
    replay = (
        start if start in snapshots else max(p for p in range(start + 1) if p == 0 or start - p >= windows * WINDOW)
    )
    return hit, start, replay


def test_every_small_prompt_agrees_with_brute_force():
    places = [frozenset(), frozenset({128}), frozenset({256, 384}), frozenset(range(0, 1025, 128)), frozenset({100})]
    for n in range(1, 800):
        for stored in range(0, n + 129, 128):
            for windows in (1, 2, 3):
                for snapshots in places:
                    got = decide(n, stored, windows, snapshots)
                    assert (got.hit_tokens, got.compute_from, got.replay_from) == brute(n, stored, windows, snapshots)
                    assert 0 <= got.replay_from <= got.compute_from <= got.hit_tokens < n
                    assert got.compute_from <= max(0, n - KEEP)


def test_nothing_stored_is_cold():
    assert decide(5000, 0) == KVPlan(
        prompt_tokens=5000, hit_tokens=0, compute_from=0, replay_from=0, kind=PlanKind.COLD
    )


def test_a_snapshot_exactly_at_the_start_replays_nothing():
    got = decide(5000, 4096, snapshots=frozenset({4096}))
    assert (got.kind, got.compute_from, got.replay_from, got.approximate) == (PlanKind.HIT, 4096, 4096, False)
    assert (got.replayed_tokens, got.computed_tokens) == (0, 904)


@pytest.mark.parametrize("elsewhere", [3968, 4224, 4095])
def test_a_snapshot_anywhere_else_is_useless(elsewhere: int):
    got = decide(5000, 4096, snapshots=frozenset({elsewhere}))
    assert (got.kind, got.replay_from) == (PlanKind.REPLAY, 4096 - 128)


def test_bounded_replay_computes_exactly_one_window_more():
    got = decide(5000, 4096)
    assert (got.replayed_tokens, got.approximate) == (WINDOW, True)


def test_the_hit_does_not_depend_on_snapshots():
    for n in range(129, 2000, 61):
        for stored in range(0, n, 128):
            assert decide(n, stored).hit_tokens == decide(n, stored, snapshots=frozenset(range(0, n, 128))).hit_tokens


def test_exact_replay_is_never_approximate():
    got = decide(50_000, 40_960, windows=LAYERS)
    assert (got.replay_from, got.approximate) == (40_960 - LAYERS * 128, False)


def test_a_replay_from_position_zero_is_exact_with_any_dial():
    got = decide(400, 128)
    assert (got.kind, got.compute_from, got.replay_from, got.approximate) == (PlanKind.REPLAY, 128, 0, False)


def test_one_token_is_always_left_to_compute():
    assert decide(1024, 1024, snapshots=frozenset({1024, 896})).hit_tokens == 896


def test_rows_of_the_decoder_half_are_computed_even_when_they_hit():
    got = decide(1025, 1024, snapshots=frozenset(range(0, 1025, 128)))
    assert (got.hit_tokens, got.compute_from) == (1024, 768)
    assert decide(200, 128).compute_from == 0
    assert decide(200, 128).kind is PlanKind.HIT


def test_a_plan_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        decide(1, 0).hit_tokens = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt_tokens": 0}, "at least one token, not 0"),
        ({"hit_tokens": 127}, "127 is not a multiple of 128"),
        ({"hit_tokens": -128}, "-128 is not a multiple"),
        ({"window": 0}, "must be at least 1"),
        ({"windows": 0}, "must be at least 1"),
        ({"keep": 127}, "keep 127 is below the window 128"),
        ({"block_tokens": 0}, "block_tokens must be at least 1"),
    ],
)
def test_contradictions_are_named(change: dict[str, int], words: str):
    fields = {"prompt_tokens": 300, "hit_tokens": 128, "keep": 140, "window": 128, "windows": 1}
    with pytest.raises(PlanError, match=words):
        plan(**(fields | change))  # type: ignore[arg-type]
