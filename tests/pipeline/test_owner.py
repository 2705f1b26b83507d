"""The owner's decisions, one story each. Every schedule of faults is in test_owner_exhaustive.py."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.errors import ErrorCode
from pipeline.events import Accepted, FinishReason, Found, KVTransferred, Outcome, Plan, PrefillNoted, StageFailed
from pipeline.owner import (
    ALL_ATTEMPTS,
    MAX_PAUSE_S,
    MAX_RETRY_AFTER_S,
    AckIntake,
    Arm,
    AskFence,
    AskFind,
    Cancel,
    CancelAsked,
    Delivered,
    Disarm,
    Dispatch,
    Encode,
    Encoded,
    EndStream,
    Fenced,
    Finished,
    Forget,
    HolderLost,
    NotReady,
    Owner,
    OwnerLimits,
    Progress,
    Refused,
    Restart,
    Started,
    State,
    Superseded,
    TimedOut,
    Timer,
)

RID = "89abcdef0123456789abcdef01234567"
PLAN = Plan(900, 768, 640, 512, 31)
LIMITS = OwnerLimits(
    accept_timeout_s=0.025,
    accept_tries=3,
    retry_pause_s=0.05,
    find_timeout_s=0.04,
    stage_timeout_s=0.5,
    progress_s=5.5,
    max_attempts=4,
    end_grace_s=4.5,
)


def accepted(stage: str, worker: str, outcome: Outcome = Outcome.ACCEPTED, attempt: int = 0, **more: Any) -> Accepted:
    return Accepted(RID, attempt, stage, worker, 11, outcome, "codec-1", **more)


def failed(stage: str, worker: str, *, transient: bool = True, code: str = "internal", attempt: int = 0) -> StageFailed:
    return StageFailed(RID, attempt, stage, worker, 11, code, "no luck", transient)


def noted(worker: str = "prefill-2", decode: str = "decode-3", attempt: int = 0) -> PrefillNoted:
    return PrefillNoted(RID, attempt, PLAN, decode, (), worker, 11)


def transferred(worker: str = "decode-3", attempt: int = 0, epoch: int = 11) -> KVTransferred:
    return KVTransferred(RID, attempt, worker, epoch, 8192, 7, 1, (), PLAN)


STEPS = {
    State.ENCODING: Started(1),
    State.OFFERED: Encoded(),
    State.LOOKUP: accepted("lookup", "lookup-4"),
    State.PREFILL: accepted("prefill", "prefill-2"),
    State.TRANSFER: noted(),
    State.DECODE: transferred(),
}


def new_owner() -> Any:
    return Owner(RID, LIMITS, 60.0)


def owner_in(state: State) -> Any:
    """A machine that came to a state without any fault."""
    machine = new_owner()
    for reached, signal in STEPS.items():
        machine.on(signal)
        assert machine.state is reached
        if reached is state:
            return machine
    raise AssertionError(state)


def of_type(actions: list[Any], wanted: type) -> list[Any]:
    return [action for action in actions if isinstance(action, wanted)]


def test_a_request_without_faults_takes_the_straight_way():
    machine = new_owner()
    assert machine.on(Started(1)) == [Arm(Timer.DEADLINE, 60.0), Arm(Timer.PROGRESS, 5.5), Encode()]
    assert machine.on(Encoded()) == [Dispatch(named=False), Arm(Timer.ACCEPT, 0.025)]
    assert machine.on(STEPS[State.LOOKUP]) == [Disarm(Timer.ACCEPT), Disarm(Timer.RETRY), Arm(Timer.STAGE, 0.5)]
    assert Disarm(Timer.STAGE) in machine.on(STEPS[State.PREFILL])
    assert machine.on(noted()) == []
    assert machine.on(accepted("transfer", "decode-3"))[-1] == Disarm(Timer.STAGE)
    assert machine.on(transferred()) == []
    assert machine.on(Finished(FinishReason.LENGTH)) == [EndStream(reason=FinishReason.LENGTH)]
    assert machine.on(Delivered())[-1] == AckIntake()
    assert machine.state is State.ENDED


@pytest.mark.parametrize("state", STEPS)
def test_a_second_start_changes_nothing(state):
    machine = owner_in(state)
    assert machine.on(Started(2)) == []
    assert machine.state is state


def test_a_second_delivery_asks_for_an_owner_first_and_then_supersedes_every_attempt_before():
    machine = new_owner()
    assert machine.on(Started(2))[-2:] == [AskFind(), Arm(Timer.FIND, 0.04)]
    assert machine.on(Found(RID, "decode-3", 11, 8, "decode", 40)) == []  # a holder is no owner
    assert machine.on(TimedOut(Timer.FIND)) == [AskFence()]
    assert machine.on(Fenced(9)) == [Cancel("", 8, "superseded"), Restart(9), Encode()]
    assert machine.on(Encoded())[0] == Dispatch(named=False)


def test_a_living_owner_keeps_its_request():
    machine = new_owner()
    machine.on(Started(3))
    assert machine.on(Found(RID, "codec-2", 11, 8, "owner")) == [Forget()]
    assert machine.state is State.ENDED


@pytest.mark.parametrize("signal", [TimedOut(Timer.DEADLINE), CancelAsked("gone")])
@pytest.mark.parametrize("fencing", [False, True])
def test_an_end_before_the_attempt_is_known_cancels_every_attempt(signal, fencing):
    machine = new_owner()
    machine.on(Started(2))
    if fencing:
        machine.on(TimedOut(Timer.FIND))
    actions = machine.on(signal)
    assert [(a.worker, a.attempt) for a in of_type(actions, Cancel)] == [("", ALL_ATTEMPTS)]


def test_an_end_after_dispatch_cancels_its_own_attempts_only():
    # a stale owner must not kill what a newer one has started
    machine = owner_in(State.DECODE)
    machine.on(HolderLost("decode-3", 11))
    machine.on(Fenced(21))
    actions = machine.on(CancelAsked("gone"))
    assert [(a.worker, a.attempt) for a in of_type(actions, Cancel)] == [("", 21)]
    assert actions[-1] == EndStream(reason=FinishReason.ABORT, message="gone", stage="lookup")


def test_an_end_before_dispatch_tells_nobody():
    assert of_type(owner_in(State.ENCODING).on(CancelAsked("gone")), Cancel) == []


def test_silence_is_answered_with_named_workers_and_then_a_pause():
    machine = owner_in(State.OFFERED)
    for _ in range(2):
        assert machine.on(TimedOut(Timer.ACCEPT)) == [Dispatch(named=True), Arm(Timer.ACCEPT, 0.025)]
    assert machine.on(TimedOut(Timer.ACCEPT))[-1] == Arm(Timer.RETRY, 0.05)
    assert (machine.state, machine.stage) == (State.WAITING, "lookup")
    assert machine.on(TimedOut(Timer.RETRY))[0] == Dispatch(named=False)


def test_pauses_double_up_to_a_second_even_when_lookup_answers_in_between():
    machine = owner_in(State.OFFERED)
    pauses = []
    for _ in range(7):
        machine.on(accepted("lookup", "lookup-4"))
        pauses.append(machine.on(accepted("prefill", "lookup-4", Outcome.BUSY))[-1].delay_s)
        machine.on(TimedOut(Timer.RETRY))
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    machine.on(accepted("prefill", "prefill-2"))
    assert machine.pauses == 0


def test_an_hour_of_pauses_is_no_overflow():
    machine = new_owner()
    machine.on(Started(1))
    for _ in range(3_600):
        assert machine.on(NotReady())[-1].delay_s <= MAX_PAUSE_S
        machine.on(TimedOut(Timer.RETRY))
    assert machine.state is State.ENCODING


@pytest.mark.parametrize(
    ("wished_s", "waits_s"),
    [
        (0.3, 0.3),
        (0.0, 0.05),
        (-1.0, 0.05),
        (1e9, MAX_RETRY_AFTER_S),
        (float("inf"), MAX_RETRY_AFTER_S),
        (float("nan"), 0.05),
    ],
)
def test_a_wished_pause_is_kept_within_bounds(wished_s, waits_s):
    busy = accepted("prefill", "lookup-4", Outcome.BUSY, retry_after_s=wished_s)
    assert owner_in(State.LOOKUP).on(busy)[-1] == Arm(Timer.RETRY, waits_s)


def test_a_late_accept_ends_the_pause():
    machine = owner_in(State.LOOKUP)
    machine.on(accepted("prefill", "lookup-4", Outcome.BUSY))
    assert Disarm(Timer.RETRY) in machine.on(accepted("prefill", "prefill-2"))
    assert machine.state is State.PREFILL


@pytest.mark.parametrize("state", [State.PREFILL, State.TRANSFER, State.DECODE])
def test_a_busy_answer_to_an_earlier_dispatch_is_ignored_once_an_engine_has_it(state):
    machine = owner_in(state)
    assert machine.on(accepted("prefill", "lookup-4", Outcome.BUSY)) == []
    assert machine.state is state


def test_when_no_engine_speaks_up_after_lookup_it_is_asked_again():
    machine = owner_in(State.LOOKUP)
    assert machine.on(TimedOut(Timer.STAGE)) == [Dispatch(named=False), Arm(Timer.ACCEPT, 0.025)]


def test_words_of_a_later_stage_imply_the_lost_ones_before():
    machine = owner_in(State.OFFERED)
    machine.on(transferred())
    assert machine.state is State.DECODE
    assert machine.on(noted()) == []
    assert machine.holder().worker == "decode-3"
    assert machine.holders["prefill"].worker == "prefill-2"


def test_a_twin_is_cancelled_and_its_note_changes_nothing():
    machine = owner_in(State.PREFILL)
    twin = [Cancel("prefill-7", 0, "twin")]
    assert machine.on(accepted("prefill", "prefill-7")) == twin
    assert machine.on(noted("prefill-7")) == twin
    assert machine.state is State.PREFILL
    assert owner_in(State.DECODE).on(transferred("decode-8")) == [Cancel("decode-8", 0, "twin")]


def test_a_decode_engine_that_is_full_is_for_prefill_to_resolve():
    machine = owner_in(State.LOOKUP)
    assert machine.on(accepted("transfer", "decode-3", Outcome.BUSY)) == []
    assert machine.state is State.LOOKUP


def test_a_new_process_under_the_holders_id_is_its_twin():
    assert owner_in(State.DECODE).on(transferred(epoch=12)) == [Cancel("decode-3", 0, "twin")]


def test_a_late_note_of_the_holder_is_no_reason_to_go_on_to_transfer_for_a_twin():
    machine = owner_in(State.PREFILL)
    machine.holders["prefill"].epoch = 12  # restarted under its old id
    assert machine.on(noted()) == []  # an echo of the process before: its id is not cancelled
    assert machine.on(accepted("prefill", "prefill-2")) == []


@pytest.mark.parametrize("outcome", [Outcome.ACCEPTED, Outcome.QUEUED, Outcome.DUPLICATE])
def test_a_worker_on_a_lower_attempt_is_cancelled(outcome):
    machine = owner_in(State.DECODE)
    machine.on(HolderLost("decode-3", 11))
    superseded = [Cancel("prefill-7", 0, "superseded")]
    assert machine.on(accepted("prefill", "prefill-7", outcome)) == superseded  # FENCING
    machine.on(Fenced(21))
    assert machine.on(accepted("prefill", "prefill-7", outcome)) == superseded
    assert machine.on(noted("prefill-7")) == superseded
    assert machine.on(transferred("prefill-7")) == superseded
    assert machine.on(failed("prefill", "prefill-7")) == []
    assert machine.on(accepted("prefill", "prefill-7", Outcome.BUSY)) == []


def test_an_accept_after_the_end_is_cancelled_unless_it_is_the_holders():
    machine = owner_in(State.DECODE)
    machine.on(Finished(FinishReason.STOP))
    assert machine.on(accepted("transfer", "decode-8")) == [Cancel("decode-8", 0, "twin")]
    assert machine.on(transferred()) == []  # its note still brings the plan
    assert machine.on(accepted("prefill", "prefill-7", Outcome.REFUSED)) == []


def test_a_refusal_counts_only_while_nobody_else_has_it():
    refused = accepted("prefill", "prefill-7", Outcome.REFUSED, reason="a prompt of 900 tokens never fits")
    end = owner_in(State.LOOKUP).on(refused)[-1]
    assert end.reason is FinishReason.INSUFFICIENT_SYSTEM_RESOURCE
    assert "900 tokens" in end.message  # an end without a plan needs a message
    assert owner_in(State.PREFILL).on(refused) == []
    assert owner_in(State.DECODE).on(accepted("transfer", "decode-8", Outcome.REFUSED)) == []
    assert owner_in(State.TRANSFER).on(accepted("transfer", "decode-8", Outcome.REFUSED))[-1].message


def test_a_lost_holder_costs_an_attempt_and_the_third_death_the_request():
    machine = owner_in(State.DECODE)
    assert machine.on(HolderLost("prefill-2", 11)) == []  # no longer in hand there
    assert machine.on(HolderLost("decode-3", 10)) == []  # an earlier process of that id
    for attempt in (21, 22):
        actions = machine.on(HolderLost("decode-3", 11))
        assert actions[-1] == AskFence()
        assert Cancel("decode-3", machine.attempt, "lost decode-3") in actions
        assert machine.on(Fenced(attempt)) == [Restart(attempt), Dispatch(named=False), Arm(Timer.ACCEPT, 0.025)]
        assert machine.holders == {}
        machine.on(transferred(attempt=attempt))
    end = machine.on(HolderLost("decode-3", 11))[-1]
    assert (end.code, end.stage) == (ErrorCode.WORKER_LOST, "decode")


def test_lookup_is_not_watched_its_timer_is():
    machine = owner_in(State.LOOKUP)
    assert machine.holder() is None
    assert machine.on(HolderLost("lookup-4", 11)) == []


def test_lookup_without_engines_waits_and_costs_no_attempt():
    machine = owner_in(State.LOOKUP)
    for _ in range(2 * LIMITS.max_attempts):
        assert machine.on(failed("lookup", "lookup-4"))[-1].timer is Timer.RETRY
        assert machine.on(failed("lookup", "lookup-5")) == []
        machine.on(TimedOut(Timer.RETRY))
        machine.on(accepted("lookup", "lookup-4"))
    assert (machine.attempts, machine.state) == (0, State.LOOKUP)


def test_any_lookup_may_refuse_for_good():
    machine = owner_in(State.LOOKUP)
    end = machine.on(failed("lookup", "lookup-5", transient=False, code="invalid_request"))[-1]
    assert (end.code, end.message, end.stage) == (ErrorCode.INVALID_REQUEST, "no luck", "lookup")


def test_a_failure_counts_only_for_the_holder_and_only_before_the_next_stage_has_it():
    assert owner_in(State.PREFILL).on(failed("transfer", "decode-3"))[-1] == AskFence()
    assert owner_in(State.TRANSFER).on(failed("prefill", "prefill-2"))[-1] == AskFence()
    assert owner_in(State.PREFILL).on(failed("prefill", "prefill-7")) == []
    assert owner_in(State.PREFILL).on(failed("lookup", "lookup-4")) == []
    # the lease of KV that was read long ago lapsed: its reader decodes on
    assert owner_in(State.DECODE).on(failed("prefill", "prefill-2")) == []
    assert owner_in(State.DECODE).on(failed("decode", "decode-3"))[-1] == AskFence()


def test_an_unknown_error_name_is_internal():
    end = owner_in(State.PREFILL).on(failed("prefill", "prefill-2", transient=False, code="sunspots"))[-1]
    assert end.code is ErrorCode.INTERNAL


def test_attempts_are_bounded():
    machine = owner_in(State.PREFILL)
    for attempt in (31, 32, 33):
        assert machine.on(failed("prefill", "prefill-2", attempt=machine.attempt))[-1] == AskFence()
        machine.on(Fenced(attempt))
        machine.on(accepted("prefill", "prefill-2", attempt=attempt))
    end = machine.on(failed("prefill", "prefill-2", attempt=33))[-1]
    assert (end.code, end.message) == (ErrorCode.WORKER_LOST, "4 attempts failed, the last: prefill: no luck")


def test_a_number_that_does_not_rise_is_asked_for_again():
    machine = owner_in(State.PREFILL)
    machine.on(failed("prefill", "prefill-2"))
    assert machine.on(Fenced(0)) == [AskFence()]
    assert machine.on(Fenced(5))[0] == Restart(5)
    assert machine.on(Fenced(6)) == []


def test_tokens_that_finish_while_a_new_attempt_is_asked_for_end_the_request():
    machine = owner_in(State.DECODE)
    machine.on(HolderLost("decode-3", 11))
    assert machine.on(Finished(FinishReason.STOP)) == [EndStream(reason=FinishReason.STOP)]
    assert machine.on(Fenced(21)) == []
    assert machine.attempt == 0


@pytest.mark.parametrize("state", STEPS)
def test_the_deadline_names_the_stage_and_leaves_the_end_a_little_time(state):
    machine = owner_in(state)
    stage = machine.stage
    actions = machine.on(TimedOut(Timer.DEADLINE))
    assert actions[-2] == Arm(Timer.DEADLINE, 4.5)
    end = actions[-1]
    assert (end.code, end.stage) == (ErrorCode.DEADLINE_EXCEEDED, stage)
    assert f"in {stage}" in end.message
    assert machine.on(TimedOut(Timer.DEADLINE))[-1] == AckIntake()
    assert machine.state is State.ENDED


def test_an_end_stops_every_timer_but_the_deadline():
    stopped = {action.timer for action in of_type(owner_in(State.LOOKUP).on(CancelAsked("gone")), Disarm)}
    assert stopped == set(Timer) - {Timer.DEADLINE}


def test_a_refusal_of_this_process_keeps_its_code():
    end = owner_in(State.DECODE).on(Refused(ErrorCode.STREAM_LOST, "position 5 differs"))[-1]
    assert (end.code, end.message) == (ErrorCode.STREAM_LOST, "position 5 differs")


def test_waiting_is_told_with_the_stage_that_was_busy():
    machine = owner_in(State.LOOKUP)
    machine.on(accepted("prefill", "lookup-4", Outcome.BUSY))
    assert machine.on(TimedOut(Timer.PROGRESS)) == [Progress("prefill"), Arm(Timer.PROGRESS, 5.5)]


def test_an_owner_whose_attempt_another_has_overtaken_forgets_and_acknowledges_nothing():
    machine = Owner(RID, LIMITS, 600.0, state=State.DECODE, attempt=7, encoded=True)
    assert machine.on(Superseded(6)) == []  # its own word to everyone when it began
    assert machine.on(Superseded(8)) == [Forget()]
    assert machine.state is State.ENDED
