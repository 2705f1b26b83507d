"""Counters of one process."""

from __future__ import annotations

from pipeline.metrics import count, counters, snapshot


def test_counters_add_up_and_a_snapshot_names_only_what_was_counted():
    names = ("b_of_this_test", "a_of_this_test")
    assert not any(name in snapshot() for name in names)
    count("b_of_this_test")
    count("b_of_this_test", 2)
    count("a_of_this_test", 0)
    assert snapshot()["b_of_this_test"] == 3
    assert "a_of_this_test" not in snapshot()


def test_a_snapshot_is_sorted_and_a_copy():
    count("z_of_this_test")
    count("y_of_this_test")
    taken = snapshot()
    assert list(taken) == sorted(taken)
    taken["z_of_this_test"] = 99
    assert counters["z_of_this_test"] == 1
