from __future__ import annotations

import os
import random
import tracemalloc

import pytest

from kv.index import PrefixIndex

ROOM = 1 << 24


def chain(name: int, depth: int, start: int = 0) -> bytes:
    return b"".join(name.to_bytes(8, "big") + i.to_bytes(8, "big") for i in range(start, depth))


def test_every_holder_answers_with_its_own_prefix():
    index = PrefixIndex(ROOM)
    for seq, (holder, depth) in enumerate((("a", 3), ("b", 7), ("c", 0), ("d", 7)), start=1):
        assert index.stored(holder, 1, 1, chain(5, depth)), seq
    assert index.match(chain(5, 9)) == {"a": 3, "b": 7, "d": 7}
    assert index.match(chain(5, 5)) == {"a": 3, "b": 5, "d": 5}
    assert index.match(chain(6, 5)) == index.match(b"") == {}
    index.check()


def test_a_hole_ends_the_prefix():
    index = PrefixIndex(ROOM)
    index.stored("a", 1, 1, chain(5, 6))
    index.removed("a", 1, 2, chain(5, 3, start=2))
    assert index.match(chain(5, 6)) == {"a": 2}
    index.removed("a", 1, 3, chain(5, 1))
    assert index.match(chain(5, 6)) == {}
    index.check()


def test_holders_agree_with_a_plain_dictionary():
    rng = random.Random(7)
    index, truth = PrefixIndex(ROOM), {f"w{i}": set[bytes]() for i in range(70)}
    seqs = dict.fromkeys(truth, 0)
    for _ in range(3000):
        holder = rng.choice(list(truth))
        name, start = rng.randrange(4), rng.randrange(6)
        keys = chain(name, start + rng.randrange(1, 4), start)
        split = {keys[i : i + 16] for i in range(0, len(keys), 16)}
        seqs[holder] += 1
        match rng.randrange(8):
            case 0 | 1 | 2 | 3:
                assert index.stored(holder, 1, seqs[holder], keys)
                truth[holder] |= split
            case 4 | 5 | 6:
                assert index.removed(holder, 1, seqs[holder], keys)
                truth[holder] -= split
            case _:
                assert index.snapshot(holder, 1, seqs[holder], keys)
                truth[holder] = split
        wanted = chain(name, 9)
        expected = {}
        for other, have in truth.items():
            depth = next(i for i in range(10) if i == 9 or wanted[16 * i : 16 * i + 16] not in have)
            if depth:
                expected[other] = depth
        assert index.match(wanted) == expected
    index.check()


def test_repeated_and_overtaken_events_change_nothing():
    index = PrefixIndex(ROOM)
    assert index.stored("a", 1, 1, chain(1, 2))
    assert index.removed("a", 1, 2, chain(1, 2))
    assert index.stored("a", 1, 1, chain(1, 2))
    assert index.match(chain(1, 2)) == {}
    assert (index.counts.repeated, index.counts.gaps, index.drain_wanted()) == (1, 0, {})


def test_a_gap_is_reported_once_and_repaired_by_a_snapshot():
    index = PrefixIndex(ROOM)
    index.stored("a", 3, 1, chain(1, 2))
    assert not index.stored("a", 3, 3, chain(2, 2))
    assert not index.stored("a", 3, 4, chain(3, 2))
    assert index.drain_wanted() == {"a": 3}
    assert index.drain_wanted() == {}
    assert index.out_of_sync == {"a": 3}
    assert index.snapshot("a", 3, 4, chain(2, 2) + chain(4, 1))
    assert [index.match(chain(n, 2)) for n in (1, 2, 3, 4)] == [{}, {"a": 2}, {}, {"a": 1}]
    assert index.stored("a", 3, 5, chain(9, 1))
    assert index.out_of_sync == {}
    index.check()


def test_a_first_event_that_is_not_the_first_is_a_gap():
    index = PrefixIndex(ROOM)
    assert not index.stored("late", 1, 8, chain(1, 2))
    assert index.match(chain(1, 2)) == {"late": 2}


def test_events_that_overtook_the_snapshot_are_applied_upon_it():
    index = PrefixIndex(ROOM)
    assert not index.stored("a", 1, 5, chain(5, 1))
    assert not index.removed("a", 1, 6, chain(6, 1))
    assert not index.stored("a", 1, 7, chain(7, 1))
    assert index.snapshot("a", 1, 5, chain(5, 1) + chain(6, 1))
    assert [index.match(chain(n, 1)) for n in (5, 6, 7)] == [{"a": 1}, {}, {"a": 1}]


def test_a_snapshot_older_than_what_can_be_replayed_is_refused_and_asked_for_again():
    index = PrefixIndex(ROOM)
    index.stored("a", 1, 1, chain(1, 1))
    index.stored("a", 1, 4, chain(4, 1))
    index.drain_wanted()
    assert not index.snapshot("a", 1, 2, chain(9, 1))  # event 3 was never seen
    assert index.drain_wanted() == {"a": 1}
    assert index.counts.refused_snapshots == 1
    assert index.match(chain(4, 1)) == {"a": 1}
    assert index.snapshot("a", 1, 3, chain(3, 1))
    assert index.match(chain(4, 1)) == {"a": 1}


def test_a_new_life_of_a_holder_starts_empty_and_its_old_one_is_ignored():
    index = PrefixIndex(ROOM)
    index.stored("a", 1, 1, chain(1, 4))
    index.stored("a", 2, 1, chain(2, 4))
    index.stored("a", 1, 2, chain(1, 4))
    assert (index.match(chain(1, 4)), index.match(chain(2, 4))) == ({}, {"a": 4})
    assert index.counts.stale_epoch == 1
    index.snapshot("a", 1, 9, chain(1, 4))
    assert index.match(chain(1, 4)) == {}
    assert index.holders == {"a": 2}
    index.check()


def test_a_forgotten_holder_is_never_matched_and_its_memory_comes_back():
    index = PrefixIndex(ROOM)
    index.stored("a", 5, 1, chain(1, 2000))
    index.stored("b", 1, 1, chain(1, 10))
    index.forget("a")
    index.forget("a")
    assert index.match(chain(1, 20)) == {"b": 10}
    index.stored("a", 4, 2, chain(1, 20))  # woke up late, in an earlier life
    assert index.match(chain(1, 20)) == {"b": 10}
    while not index.sweep():
        index.check()
    assert index.num_keys == 10
    index.stored("c", 1, 1, chain(1, 3))  # takes the bit of a
    assert index.match(chain(1, 20)) == {"b": 10, "c": 3}
    index.check()


def test_the_least_recently_matched_prompt_is_forgotten_first_and_its_deepest_block_before_its_head():
    index = PrefixIndex(100 * 280)
    index.stored("a", 1, 1, chain(1, 50))
    index.stored("a", 1, 2, chain(2, 50))
    assert index.match(chain(1, 50)) == {"a": 50}
    index.stored("a", 1, 3, chain(3, 20))
    assert [index.match(chain(n, 50)).get("a") for n in (1, 2, 3)] == [50, 30, 20]
    assert index.counts.evicted == 20
    index.stored("a", 1, 4, chain(4, 30))  # 1 is now the one that was matched longest ago
    assert [index.match(chain(n, 60)).get("a") for n in (1, 2, 3, 4)] == [20, 30, 20, 30]
    index.check()


def test_the_estimate_of_memory_is_honest():
    names = [os.urandom(8) for _ in range(300)]
    events = [b"".join(n + i.to_bytes(8, "big") for i in range(100)) for n in names]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    index = PrefixIndex(1 << 30)
    for seq, keys in enumerate(events, start=1):
        index.stored("a", 1, seq, keys)
    one = tracemalloc.get_traced_memory()[0] - before
    assert one / 2 < index.num_bytes < one * 2
    for seq, keys in enumerate(events, start=1):
        index.stored("b", 1, seq, keys)
    two = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert two / 2 < index.num_bytes < two * 2


@pytest.mark.slow
def test_memory_stays_flat_while_a_million_keys_come_and_go():
    index = PrefixIndex(4 << 20)
    sizes = []
    tracemalloc.start()
    for turn in range(10_000):
        worker = f"w{turn // 200}"  # workers come and go too
        if turn % 200 == 0:
            index.forget(f"w{turn // 200 - 4}")
        index.stored(worker, 1, turn % 200 + 1, chain(turn, 100))
        if turn >= 2000 and turn % 500 == 0:
            sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    index.check()
    assert max(sizes) < 1.3 * min(sizes)
    assert max(sizes) < 2 * index.max_bytes


def test_rubbish_is_refused_and_loses_nothing():
    index = PrefixIndex(ROOM)
    index.stored("a", 1, 1, chain(1, 3))
    for call in (index.stored, index.removed, index.snapshot):
        with pytest.raises(ValueError, match="17 bytes are not whole"):
            call("a", 1, 2, b"x" * 17)
    assert index.match(chain(1, 3)) == {"a": 3}
    with pytest.raises(ValueError, match="max_bytes must be at least 1, not 0"):
        PrefixIndex(0)


def test_an_index_that_knows_nobody_matches_nothing():
    index = PrefixIndex(1 << 20)
    assert index.match(chain(1, 5)) == {}
