from __future__ import annotations

from threading import Thread

from codec.segments import ENTRY_OVERHEAD_BYTES, SegmentCache


def test_a_kept_segment_comes_back():
    cache = SegmentCache(10_000)
    key = cache.digest("the tide")
    assert cache.get(key) is None
    cache.put(key, b"\x01\x00\x00\x00")
    assert cache.get(key) == b"\x01\x00\x00\x00"
    assert (cache.num_hits, cache.num_misses) == (1, 1)
    cache.check()


def test_the_least_recently_used_segment_goes_first():
    cache = SegmentCache(2 * (ENTRY_OVERHEAD_BYTES + 4))
    keys = [cache.digest(text) for text in ("ebb", "flow", "slack")]
    cache.put(keys[0], b"\x00" * 4)
    cache.put(keys[1], b"\x01" * 4)
    cache.get(keys[0])
    cache.put(keys[2], b"\x02" * 4)
    assert [cache.get(key) is not None for key in keys] == [True, False, True]
    cache.check()


def test_a_segment_larger_than_the_cache_is_not_kept():
    cache = SegmentCache(300)
    cache.put(cache.digest("long"), b"\x00" * 100)
    cache.check()
    assert cache.num_bytes == 0


def test_putting_a_segment_twice_counts_it_once():
    cache = SegmentCache(10_000)
    for _ in range(2):
        cache.put(cache.digest("twice"), b"\x07" * 8)
    assert cache.num_bytes == ENTRY_OVERHEAD_BYTES + 8


def test_digests_differ_between_processes_secrets_and_between_texts():
    one, other = SegmentCache(1), SegmentCache(1)
    assert one.digest("a") == one.digest("a")
    assert one.digest("a") != one.digest("b")
    assert one.digest("a") != other.digest("a")


def test_threads_share_it():
    cache = SegmentCache(20 * ENTRY_OVERHEAD_BYTES)
    wrong: list[bytes] = []

    def work(seed: int) -> None:
        for i in range(2_000):
            key = cache.digest(str((seed * 7 + i) % 40))
            ids = cache.get(key)
            if ids is None:
                cache.put(key, key * 2)
            elif ids != key * 2:
                wrong.append(ids)

    threads = [Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    cache.check()
