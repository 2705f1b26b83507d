"""Every schedule with few faults, and many with many: whatever happens outside, the owner ends its request once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import ErrorCode
from pipeline.events import Accepted, FinishReason, Found, KVTransferred, Outcome, Plan, PrefillNoted, StageFailed
from pipeline.owner import (
    TABLE,
    Cancel,
    CancelAsked,
    Delivered,
    Encoded,
    Fenced,
    Finished,
    Holder,
    HolderLost,
    NotReady,
    Owner,
    Refused,
    Signal,
    Started,
    State,
    Superseded,
    TimedOut,
    Timer,
)
from tests.pipeline.owner_world import DECODES, LIMITS, LOOKUPS, PREFILLS, RID, TIMEOUT_S, World, run

FAULTY_STEPS = 45  # a request without faults takes 18 steps; later ones only repeat what a retry does
WORLDS: dict[str, dict[str, Any]] = {
    "first delivery": {},
    "second delivery": {"num_delivered": 2},
    "codec not ready, engines full": {"ready_after": 2, "busy": 3},
}
OUTSIDERS = (
    CancelAsked("the subscriber went silent"),
    Refused(ErrorCode.STREAM_LOST, "token 5 differs"),
    Finished(FinishReason.LENGTH),
)


def explore(world: World, num_faults: int, meddling: tuple[Signal, ...] = ()) -> list[World]:
    """The ends of every schedule with at most `num_faults` faults (equal states are followed once)."""
    known: set[tuple[Any, ...]] = set()
    ends: list[World] = []
    stack = [(world.clone(), num_faults, 0)]
    while stack:
        world, left, steps = stack.pop()
        while not world.closed:
            key = (left, world.key())
            if key in known:
                break
            known.add(key)
            if left and steps < FAULTY_STEPS:
                for fault in (*world.faults(), *(("hear", signal) for signal in meddling)):
                    other = world.clone()
                    other.suffer(fault)
                    stack.append((other, left - 1, steps + 1))
            world.step()
            steps += 1
            assert world.now <= TIMEOUT_S + LIMITS.end_grace_s + 0.001, f"past its deadline: {world.suffered}"
        else:
            ends.append(world)
    return ends


def outcome(world: World) -> str:
    return str(world.end.code or world.end.reason) if world.end else "left to its owner"


@pytest.mark.parametrize("options", WORLDS.values(), ids=WORLDS.keys())
def test_no_single_fault_costs_a_request_its_answer(options):
    ends = explore(World.begin(**options), 1)
    assert len(ends) > 20
    assert Counter(map(outcome, ends)) == {"stop": len(ends)}


@pytest.mark.parametrize("options", WORLDS.values(), ids=WORLDS.keys())
def test_two_faults_cost_the_answer_only_when_nobody_is_left_or_a_failure_went_unheard(options):
    ends = explore(World.begin(**options), 2)
    assert len(ends) > 500
    for world in ends:
        if outcome(world) == "stop":
            continue
        assert outcome(world) == "deadline_exceeded"
        killed = {what.removeprefix("kill ") for what in world.suffered if what.startswith("kill")}
        all_dead = any(set(role) <= killed for role in (LOOKUPS, PREFILLS, DECODES))
        assert all_dead or "lose StageFailed" in world.suffered, world.suffered


@pytest.mark.slow
def test_three_faults_end_in_an_answer_or_a_named_error():
    ends = explore(World.begin(), 3)
    assert set(map(outcome, ends)) == {"stop", "deadline_exceeded", "worker_lost"}


@pytest.mark.parametrize("options", WORLDS.values(), ids=WORLDS.keys())
def test_a_cancel_a_contradiction_or_an_early_end_at_any_step_ends_the_request_once(options):
    ends = explore(World.begin(**options), 1, OUTSIDERS)
    assert {"abort", "stream_lost", "stop", "length"} == set(map(outcome, ends))


def test_a_living_owner_is_left_alone_whatever_is_lost():
    ends = explore(World.begin(num_delivered=2, living_owner=True), 1)
    assert {"left to its owner", "stop"} == set(map(outcome, ends))
    assert outcome(run(World.begin(num_delivered=2, living_owner=True))) == "left to its owner"


@pytest.mark.parametrize("refusing", [PREFILLS, DECODES])
def test_a_request_that_fits_nowhere_ends_with_insufficient_resources(refusing):
    ends = explore(World.begin(refusing=frozenset(refusing)), 1)
    assert "insufficient_system_resource" in map(outcome, ends)
    assert outcome(run(World.begin(refusing=frozenset(refusing)))) == "insufficient_system_resource"


def test_an_engine_that_refuses_does_not_end_what_another_has_in_hand():
    # the world itself checks it; the second engines are only asked after the first ones' answers got lost
    ends = explore(World.begin(refusing=frozenset({PREFILLS[1], DECODES[1]})), 2)
    assert "stop" in map(outcome, ends)


@settings(derandomize=True, max_examples=400, deadline=None)
@given(
    st.sampled_from(list(WORLDS.values())),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 10_000)), min_size=10, max_size=150),
)
def test_any_number_of_faults_ends_in_time(options, schedule):
    world = World.begin(**options)
    for step, choice in schedule:
        if world.closed:
            break
        faults = [*world.faults(), *(("hear", signal) for signal in OUTSIDERS[:2])]
        kills = [fault for fault in faults if fault[0] in ("kill", "hear")]
        if step < 5:
            world.step()
        elif step == 9:
            world.suffer(kills[choice % len(kills)])
        else:
            world.suffer(faults[choice % len(faults)])
    run(world)
    assert world.machine.state is State.ENDED


PLAN = Plan(700, 512, 512, 384, 77)


def machine_in(state: State, **facts: Any) -> Any:
    """A machine at attempt 7 whose holders are the first engines."""
    machine = Owner(RID, LIMITS, TIMEOUT_S, state=state, attempt=7, **{"tries": 1, "encoded": True, **facts})
    if state in (State.PREFILL, State.TRANSFER, State.DECODE):
        machine.holders["prefill"] = Holder(PREFILLS[0], 101)
    if state is State.DECODE:
        machine.holders["decode"] = Holder(DECODES[0], 102)
    return machine


def signals() -> list[Signal]:
    """Every kind of signal, from the holder, from a twin and from attempts before and after."""
    told: list[Signal] = [Started(1), Started(2), Encoded(), NotReady(), Delivered(), *OUTSIDERS]
    told += [TimedOut(timer) for timer in Timer]
    told += [Superseded(6), Superseded(7)]
    told += [Fenced(6), Fenced(8), Found(RID, "codec-9", 1, 7, "owner"), Found(RID, DECODES[0], 1, 7, "decode", 3)]
    told += [
        HolderLost(worker, epoch) for worker in (PREFILLS[0], DECODES[0], "stranger") for epoch in (1, 101, 102, 103)
    ]
    for attempt in (6, 7, 8):
        for worker, epoch in (
            (LOOKUPS[0], 100),
            (PREFILLS[0], 101),
            (PREFILLS[1], 104),
            (DECODES[0], 102),
            (DECODES[1], 105),
        ):
            told.append(PrefillNoted(RID, attempt, PLAN, DECODES[0], (), worker, epoch))
            told.append(PrefillNoted(RID, attempt, PLAN, "", (), worker, epoch))
            told.append(KVTransferred(RID, attempt, worker, epoch, 4096, 6, 0, (), PLAN))
            for stage in ("lookup", "prefill", "transfer", "decode", "unheard-of"):
                told += [Accepted(RID, attempt, stage, worker, epoch, outcome) for outcome in Outcome]
                for code, transient in (("internal", True), ("invalid_request", False), ("unheard-of", False)):
                    told.append(StageFailed(RID, attempt, stage, worker, epoch, code, "why", transient))
    return told


def machines() -> list[Any]:
    variants: tuple[dict[str, Any], ...] = (
        {},
        {"encoded": False},
        {"attempts": LIMITS.max_attempts - 1},
        {"deaths": 2},
        {"tries": 3},
    )
    return [machine_in(state, **variant) for state in State for variant in variants]


def test_every_signal_in_every_state_does_what_the_table_says():
    moves: set[tuple[Any, ...]] = set()
    for machine in machines():
        for signal in signals():
            tried = replace(machine, holders={role: replace(holder) for role, holder in machine.holders.items()})
            before, unchanged = tried.state, repr(tried)
            actions = tried.on(signal)
            row = TABLE.get((before, type(signal)))
            moves.add((before, type(signal), tried.state))
            if row is None:
                assert (actions, repr(tried)) == ([], unchanged), f"{signal} in {before} is not in the table"
            elif getattr(signal, "attempt", 7) != 7 and not isinstance(signal, Fenced | Found):
                assert repr(tried) == unchanged, f"{signal} is of another attempt"
                assert all(isinstance(action, Cancel) for action in actions)
            else:
                assert tried.state in row.leads_to
                assert tried.attempt >= 7
    assert set(TABLE) - {(state, signal) for state, signal, _ in moves} == set()
    declared = {(state, signal, to) for (state, signal), row in TABLE.items() for to in row.leads_to}
    assert declared - moves == set(), "the table promises what never happens"


def test_an_ended_request_says_nothing_more():
    assert all(machine_in(State.ENDED).on(signal) == [] for signal in signals())
