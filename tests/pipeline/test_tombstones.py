import pytest

from pipeline import tombstones as module
from pipeline.tombstones import Tombstones

RID, OTHER, THIRD = "1" * 32, "2" * 32, "3" * 32


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_cancel_that_overtakes_its_request_is_obeyed():
    stones = Tombstones(60)
    stones.bury(RID, 7)
    assert [stones.is_dead(RID, attempt) for attempt in (0, 7, 8)] == [True, True, False]
    assert not stones.is_dead(OTHER, 0)


def test_a_cancel_of_all_attempts_outlives_a_later_one_of_some():
    stones = Tombstones(60)
    stones.bury(RID, -1)
    stones.bury(RID, 3)
    assert stones.is_dead(RID, 2**62)


def test_an_earlier_cancel_does_not_lower_a_later_one():
    stones = Tombstones(60)
    stones.bury(RID, 9)
    stones.bury(RID, 4)
    assert stones.is_dead(RID, 9)


def test_an_attempt_is_taken_once_and_makes_lower_ones_dead():
    stones = Tombstones(60)
    assert stones.take(RID, 5)
    assert not stones.take(RID, 5)
    assert not stones.take(RID, 4)
    assert (stones.is_dead(RID, 4), stones.is_dead(RID, 5)) == (True, False)
    assert stones.take(RID, 6)
    assert stones.is_dead(RID, 5)


def test_what_is_given_back_may_be_taken_again():
    stones = Tombstones(60)
    stones.take(RID, 5)
    stones.give_back(RID, 4)  # of an attempt before: nothing to give back
    assert not stones.take(RID, 5)
    stones.give_back(RID, 5)
    stones.give_back(OTHER, 5)
    assert stones.take(RID, 5)


def test_everything_is_forgotten_its_time_after_the_last_change(clock):
    stones = Tombstones(60)
    stones.bury(RID, 5)
    stones.take(RID, 6)
    clock.now_s += 30
    stones.bury(OTHER, 5)
    stones.bury(RID, 4)  # it is not lowered, but kept longer
    stones.take(THIRD, 1)
    clock.now_s += 45
    stones.sweep()
    assert (stones.is_dead(RID, 5), stones.is_dead(OTHER, 5), stones.take(RID, 6)) == (True, True, True)
    stones.give_back(RID, 6)
    clock.now_s += 20
    stones.sweep()
    assert len(stones) == 0
