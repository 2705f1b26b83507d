from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.assigned import Assigned


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_amounts_add_up_by_worker():
    assigned = Assigned()
    for worker, amount in (("a", 5), ("b", 1), ("a", 7)):
        assigned.add(worker, amount)
    assert assigned.amounts == {"a": 12, "b": 1}


def test_an_amount_counts_until_the_beacons_have_it():
    clock = Clock()
    assigned = Assigned(0.2, clock)
    assigned.add("a", 5)
    clock.now_s += 0.15
    assigned.add("a", 7)
    assigned.add("b", 1)
    assert assigned.expire() == {"a": 12, "b": 1}
    clock.now_s += 0.1
    assert assigned.expire() == {"a": 7, "b": 1}
    clock.now_s += 0.15
    assert assigned.expire() == {}


def test_the_real_clock_expires_what_was_before():
    assigned = Assigned(window_s=0.0)
    assigned.add("a", 5)
    assert assigned.expire() == {}


@pytest.mark.parametrize("amount", [0, -1])
def test_an_amount_that_is_not_positive_is_refused(amount: int):
    with pytest.raises(ValueError, match=str(amount)):
        Assigned().add("a", amount)


@given(st.lists(st.tuples(st.floats(0, 0.1), st.sampled_from("abc"), st.integers(1, 9))))
def test_what_is_left_is_exactly_what_was_added_within_the_window(adds: list[tuple[float, str, int]]):
    clock = Clock()
    assigned = Assigned(0.2, clock)
    log: list[tuple[float, str, int]] = []
    for pause_s, worker, amount in adds:
        clock.now_s += pause_s
        assigned.add(worker, amount)
        log.append((clock.now_s, worker, amount))
        expected: dict[str, int] = {}
        for at, whom, much in log:
            if at >= clock.now_s - 0.2:
                expected[whom] = expected.get(whom, 0) + much
        assert assigned.expire() == expected
