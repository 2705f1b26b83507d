from __future__ import annotations

import sys
from threading import Thread

from codec.segments import ENTRY_OVERHEAD_BYTES, SegmentCache


def entry_bytes(text: str) -> int:
    """Of a segment with one id."""
    return sys.getsizeof(text) + sys.getsizeof(b"0123") + ENTRY_OVERHEAD_BYTES


def test_a_kept_segment_comes_back():
    cache = SegmentCache(10_000)
    assert cache.get("the tide") is None
    cache.put("the tide", b"\x01\x00\x00\x00")
    assert cache.get("the tide") == b"\x01\x00\x00\x00"
    assert (cache.num_hits, cache.num_misses) == (1, 1)
    cache.check()


def test_the_least_recently_used_segment_goes_first():
    keys = ["ebb", "flow", "slack"]
    cache = SegmentCache(entry_bytes("ebb") + entry_bytes("slack"))
    cache.put(keys[0], b"\x00" * 4)
    cache.put(keys[1], b"\x01" * 4)
    cache.get(keys[0])
    cache.put(keys[2], b"\x02" * 4)
    assert [cache.get(key) is not None for key in keys] == [True, False, True]
    cache.check()


def test_a_segment_larger_than_the_cache_is_not_kept():
    cache = SegmentCache(300)
    cache.put("long", b"\x00" * 100)
    cache.check()
    assert cache.num_bytes == 0


def test_putting_a_segment_twice_counts_it_once():
    cache = SegmentCache(10_000)
    for _ in range(2):
        cache.put("twice", b"\x07" * 4)
    assert cache.num_bytes == entry_bytes("twice")


def test_the_text_counts_as_well_as_the_ids():
    cache = SegmentCache(1 << 20)
    cache.put("a" * 10_000, b"\x00" * 4)
    assert cache.num_bytes > 10_000
    cache.check()


def test_threads_share_it():
    cache = SegmentCache(20 * entry_bytes("12"))
    wrong: list[bytes] = []

    def work(seed: int) -> None:
        for i in range(2_000):
            key = str((seed * 7 + i) % 40)
            ids = cache.get(key)
            if ids is None:
                cache.put(key, key.encode() * 2)
            elif ids != key.encode() * 2:
                wrong.append(ids)

    threads = [Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    cache.check()
