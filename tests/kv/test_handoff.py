from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from kv.handoff import (
    DECODE_ENDS,
    DECODE_TABLE,
    PREFILL_ENDS,
    PREFILL_TABLE,
    DecodeAction,
    DecodeHandoff,
    DecodeInput,
    DecodeState,
    FailReason,
    HandoffError,
    PrefillAction,
    PrefillHandoff,
    PrefillInput,
    PrefillState,
    reading_failed,
)

P, D = PrefillInput, DecodeInput
TERMINAL = {DecodeAction.SAY_NEVER, DecodeAction.NOTE_RELEASED, DecodeAction.NOTE_FAILED}


def prefill(*heard: PrefillInput) -> tuple[PrefillHandoff, list[PrefillAction]]:
    handoff, done = PrefillHandoff(7), list[PrefillAction]()
    for what in heard:
        done += handoff.on(what, 7)
    return handoff, done


def decode(*happened: DecodeInput, reason: FailReason = FailReason.LINK) -> tuple[DecodeHandoff, list[DecodeAction]]:
    handoff, done = DecodeHandoff(7), list[DecodeAction]()
    for what in happened:
        done += handoff.on(what, reason if what is D.FAIL else None)
    return handoff, done


def test_the_tables_know_every_state_and_end_where_they_say():
    assert set(PREFILL_TABLE) == set(PrefillState)
    assert set(DECODE_TABLE) == set(DecodeState)
    assert all((not PREFILL_TABLE[state]) == (state in PREFILL_ENDS) for state in PrefillState)
    for state in DECODE_ENDS:
        assert [next_ for next_, _ in DECODE_TABLE[state].values()] == [state]


def test_a_good_handoff_ends_with_one_release():
    handoff, done = prefill(P.OK, P.DONE)
    assert (handoff.state, done) == (PrefillState.RELEASED, [PrefillAction.REVOKE, PrefillAction.FREE])
    other, actions = decode(D.ADMIT, D.COPIED, D.VERIFIED)
    assert (other.state, other.reason) == (DecodeState.DONE, None)
    assert [str(a) for a in actions] == ["say_ok", "read", "verify", "note_released", "decode"]


def test_a_note_that_overtakes_its_answer_releases_all_the_same():
    assert prefill(P.DONE, P.OK, P.LATER) == (
        PrefillHandoff(7, PrefillState.RELEASED, num_ignored=2),
        [PrefillAction.REVOKE, PrefillAction.FREE],
    )


@pytest.mark.parametrize("why", [P.NEVER, P.LOST, P.UNREAD])
def test_a_refusing_or_dead_decode_allows_another_offer_of_the_same_kv(why: PrefillInput):
    handoff, done = prefill(why)
    assert done == [PrefillAction.REVOKE, PrefillAction.CHOOSE]
    handoff.offer(8)
    assert handoff.on(P.DONE, 7) == ()  # the first one woke up: it is not the one that counts
    assert handoff.on(P.OK, 8) == ()
    assert handoff.on(P.DONE, 8) == (PrefillAction.REVOKE, PrefillAction.FREE)
    assert (handoff.num_offers, handoff.num_ignored) == (2, 1)


def test_a_decode_that_was_given_up_too_early_may_still_report_its_good_read():
    assert prefill(P.LOST, P.DONE)[1][-1] is PrefillAction.FREE


@pytest.mark.parametrize("before", [(), (P.OK,), (P.LATER,), (P.LATER, P.OK), (P.NEVER,), (P.LOST,)])
def test_an_expired_lease_is_revoked_before_it_frees_and_the_owner_hears_of_it(before: tuple[PrefillInput, ...]):
    handoff, _ = prefill(*before)
    assert handoff.on(P.EXPIRE) == (PrefillAction.REVOKE, PrefillAction.FREE, PrefillAction.REPORT)
    assert handoff.state is PrefillState.EXPIRED
    assert handoff.on(P.DONE, 7) == ()


@pytest.mark.parametrize(
    ("reason", "meaning"),
    [
        (FailReason.LINK, P.UNREAD),
        (FailReason.NO_ROOM, P.UNREAD),
        (FailReason.INTERNAL, P.UNREAD),
        (FailReason.REVOKED, P.UNREAD),
        (FailReason.CHECKSUM, P.BAD),
        (FailReason.MALFORMED, P.BAD),
        (FailReason.EXPIRED, P.BAD),
        (FailReason.CANCELLED, P.CANCEL),
        ("from the future", P.BAD),
    ],
)
def test_a_reason_decides_whether_another_decode_is_worth_a_try(reason: str, meaning: PrefillInput):
    assert reading_failed(reason) is meaning


@pytest.mark.parametrize("happened", [(D.REFUSE,), (D.CANCEL,), (D.EXPIRE,), (D.FAIL,), (D.DELAY, D.FAIL)])
def test_every_way_of_not_taking_an_offer_tells_prefill(happened: tuple[DecodeInput, ...]):
    handoff, done = decode(*happened)
    assert handoff.ended
    assert sum(action in TERMINAL for action in done) == 1
    assert DecodeAction.FREE not in done  # nothing was allocated


@pytest.mark.parametrize("end", [D.COPIED, D.VERIFIED, D.FAIL])
@pytest.mark.parametrize("before", [(D.ADMIT,), (D.ADMIT, D.COPIED)])
def test_a_cancel_during_the_copy_frees_only_when_nothing_writes_any_more(
    before: tuple[DecodeInput, ...], end: DecodeInput
):
    handoff, done = decode(*before, D.CANCEL, D.CANCEL)
    assert handoff.state is DecodeState.STOPPING
    assert not {DecodeAction.FREE, *TERMINAL} & set(done)
    assert handoff.on(end, FailReason.CHECKSUM if end is D.FAIL else None) == (
        DecodeAction.FREE,
        DecodeAction.NOTE_FAILED,
    )
    assert handoff.reason is FailReason.CANCELLED


def test_an_offer_that_comes_again_hears_the_same_again():
    for happened, again in (
        ((D.DELAY,), DecodeAction.SAY_LATER),
        ((D.ADMIT,), DecodeAction.SAY_OK),
        ((D.ADMIT, D.COPIED), DecodeAction.SAY_OK),
        ((D.ADMIT, D.COPIED, D.VERIFIED), DecodeAction.NOTE_RELEASED),
        ((D.ADMIT, D.FAIL), DecodeAction.NOTE_FAILED),
        ((D.REFUSE,), DecodeAction.SAY_NEVER),
    ):
        handoff, _ = decode(*happened)
        assert handoff.on(D.REPEAT) == (again,)


def test_callers_faults_are_named():
    with pytest.raises(HandoffError, match="its epoch is missing"):
        PrefillHandoff(7).on(P.OK)
    with pytest.raises(HandoffError, match="cannot offer again what is offered"):
        PrefillHandoff(7).offer(8)
    with pytest.raises(HandoffError, match="every offer has its own lease"):
        prefill(P.NEVER)[0].offer(7)
    with pytest.raises(HandoffError, match="a failure needs a reason"):
        DecodeHandoff(7).on(D.FAIL)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_prefill_frees_once_and_after_revoking_whatever_it_hears(length: int):
    for heard in itertools.product(P, repeat=length):
        handoff, done = PrefillHandoff(7), list[PrefillAction]()
        for what in heard:
            was_over = handoff.ended
            actions = handoff.on(what, 7)
            assert not (was_over and actions)
            done += actions
        assert done.count(PrefillAction.FREE) == handoff.ended
        if handoff.ended:
            assert PrefillAction.REVOKE in done[: done.index(PrefillAction.FREE)]
        else:
            assert PrefillAction.FREE in handoff.on(P.EXPIRE)  # never stuck


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_decode_ends_with_one_terminal_message_whatever_happens(length: int):
    for happened in itertools.product(D, repeat=length):
        handoff, done = decode(*happened)
        told = {action for action in done if action in TERMINAL}
        assert len(told) == handoff.ended
        assert done.count(DecodeAction.DECODE) == (handoff.state is DecodeState.DONE)
        assert done.count(DecodeAction.READ) <= 1
        reads_in_vain = DecodeAction.READ in done and handoff.state is DecodeState.FAILED
        assert done.count(DecodeAction.FREE) == reads_in_vain
        assert (handoff.reason is not None) == (handoff.state in {DecodeState.FAILED, DecodeState.STOPPING})


@dataclass(frozen=True)
class World:
    """One prefill, one decode per offer, and a network that loses, doubles and reorders at will.

    A message that was sent can be delivered at any time, any number of times, or never: the set only grows.
    """

    prefill: tuple[int, PrefillState] = (1, PrefillState.OFFERED)
    standing: frozenset[int] = frozenset({1})  # leases not revoked
    num_freed: int = 0
    decodes: tuple[tuple[DecodeState, FailReason | None] | None, ...] = (None, None)
    sent: frozenset[tuple[str, int]] = frozenset({("offer", 1)})
    told: frozenset[tuple[DecodeAction, int]] = frozenset()
    path: tuple[str, ...] = field(default=(), compare=False)

    def next(self) -> Iterator[World]:
        for message, epoch in self.sent:
            yield self.deliver(message, epoch)
        for what in (P.EXPIRE, P.CANCEL, P.LOST):
            yield self.at_prefill(what, self.prefill[0])
        if self.prefill == (1, PrefillState.REFUSED):
            again = PrefillHandoff(*self.prefill)
            again.offer(2)
            yield replace(
                self,
                prefill=(2, again.state),
                standing=self.standing | {2},
                sent=self.sent | {("offer", 2)},
                path=(*self.path, "offer again"),
            )
        for number, one in enumerate(self.decodes, start=1):
            for event in D if one is not None else ():
                reasons = (FailReason.LINK, FailReason.CHECKSUM) if event is D.FAIL else (None,)
                for reason in reasons:
                    yield self.at_decode(number, event, reason)

    def deliver(self, message: str, epoch: int) -> World:
        if message != "offer":
            return self.at_prefill(P(message), epoch)
        if self.decodes[epoch - 1] is not None:
            return self.at_decode(epoch, D.REPEAT, None)
        fresh = list(self.decodes)
        fresh[epoch - 1] = (DecodeState.OFFERED, None)
        return replace(self, decodes=tuple(fresh), path=(*self.path, f"offer {epoch} arrives"))

    def at_prefill(self, what: PrefillInput, epoch: int) -> World:
        machine = PrefillHandoff(*self.prefill)
        standing, freed = self.standing, self.num_freed
        for action in machine.on(what, epoch):
            if action is PrefillAction.REVOKE:
                standing -= {machine.current}
            elif action is PrefillAction.FREE:
                assert not standing, f"freed under a standing lease: {self.path}"
                freed += 1
        return replace(
            self,
            prefill=(machine.current, machine.state),
            standing=standing,
            num_freed=freed,
            path=(*self.path, f"prefill hears {what} {epoch}"),
        )

    def at_decode(self, number: int, what: DecodeInput, reason: FailReason | None) -> World:
        state, old = self.decodes[number - 1] or (DecodeState.OFFERED, None)
        if what is D.COPIED and number not in self.standing:
            what, reason = D.FAIL, FailReason.REVOKED  # what the check after the copy says
        if what is D.COPIED and state is DecodeState.READING:
            assert not self.num_freed, f"copied freed bytes and took them for good: {self.path}"
        machine = DecodeHandoff(number, state, old)
        sent, told = self.sent, self.told
        for action in machine.on(what, reason):
            match action:
                case DecodeAction.SAY_OK | DecodeAction.SAY_LATER | DecodeAction.SAY_NEVER:
                    sent |= {(str(action).removeprefix("say_"), number)}
                case DecodeAction.NOTE_RELEASED:
                    sent |= {("done", number)}
                case DecodeAction.NOTE_FAILED:
                    assert machine.reason is not None
                    sent |= {(str(reading_failed(machine.reason)), number)}
            if action in TERMINAL:
                told |= {(action, number)}
        states = list(self.decodes)
        states[number - 1] = (machine.state, machine.reason)
        return replace(
            self, decodes=tuple(states), sent=sent, told=told, path=(*self.path, f"decode {number}: {what} {reason}")
        )

    def check(self) -> None:
        assert self.num_freed == (self.prefill[1] in PREFILL_ENDS), self.path
        for number, one in enumerate(self.decodes, start=1):
            told = {action for action, of in self.told if of == number}
            assert len(told) == (one is not None and one[0] in DECODE_ENDS), self.path
        assert self.at_prefill(P.EXPIRE, 0).prefill[1] in PREFILL_ENDS  # never stuck, even if nobody answers


def test_no_order_of_messages_deaths_and_clocks_frees_twice_or_lets_freed_bytes_pass():
    seen, waiting = {World()}, deque([World()])
    while waiting:
        for world in waiting.popleft().next():
            if world not in seen:
                world.check()
                seen.add(world)
                waiting.append(world)
    ends = {world.prefill[1] for world in seen}
    assert ends == set(PrefillState)
    assert {one[0] for world in seen for one in world.decodes if one} == set(DecodeState)
    assert len(seen) > 4_000
