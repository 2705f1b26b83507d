from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import orjson
import pytest

from pipeline import plain, streams
from pipeline.batch import BatchReader
from pipeline.delivery import BatchSubscriber, Subscriber
from pipeline.events import Plan
from pipeline.stream import Stream
from pipeline.streams import StreamTable
from pipeline.wire import AckKind, decode_acks, encode_frame

PLAN = Plan(300, 256, 128, 0, 5)
LENGTH = 2  # 1 + the index of FinishReason.LENGTH
NO_PIECE = 7  # tokens that are multiples of it need feeding
VOCABULARY = 600
TABLE: list[bytes | None] = [None if t % NO_PIECE == 0 else b"%d" % (t * t) for t in range(VOCABULARY)]
OWNER = "v1.want.codec-7"


class Words:
    """A parser whose frame changes with every token that needs feeding; every third of those causes no event."""

    can_stop = False
    stopped = False

    def __init__(self, name: str) -> None:
        self._name = name
        self._fed = 0
        self._count = 0

    @property
    def pieces(self) -> Sequence[bytes | None] | None:
        return TABLE

    @property
    def frame(self) -> tuple[bytes, bytes]:
        return b'{"%b":%d,"t":"' % (self._name.encode(), self._fed), b'"}'

    def passed(self, num_tokens: int) -> None:
        self._count += num_tokens

    def feed(self, token: int) -> bytes | None:
        self._count += 1
        piece = TABLE[token]
        if piece is None:
            self._fed += 1
            return None if self._fed % 3 == 0 else b'{"fed":%d}' % token
        return self.frame[0] + piece + self.frame[1]

    def finish(self, reason: str, plan: Plan, num_tokens: int) -> bytes:
        return orjson.dumps({"end": reason, "tokens": num_tokens, "count": self._count, "hit": plan.hit_tokens})


def derived(name: str, tokens: Sequence[int]) -> list[bytes]:
    parser = Words(name)
    events = [event for token in tokens if (event := parser.feed(token)) is not None]
    return [*events, parser.finish("length", PLAN, len(tokens))]


@pytest.fixture(autouse=True)
def even_few_rows_go_by_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "FEW_ROWS", 1)


class Hall:
    """A table, its subscribers, and what they have got by now."""

    def __init__(self, num_streams: int, *, num_batches: int = 2) -> None:
        self.table = StreamTable("codec-7", lambda *message: self.acks.append(message), resend_after_s=0.02)
        self.acks: list[tuple[str, bytes, str]] = []
        self.readers = [BatchReader() for _ in range(num_batches)]
        self.got: dict[int, list[tuple[int, bytes]]] = {tag: [] for tag in range(num_streams)}
        self.lost = 0  # messages to drop
        self.outs: list[Subscriber] = [
            BatchSubscriber(self._receiver(number), f"_INBOX.{number}.batch", OWNER, 2_000)
            for number in range(num_batches)
        ]
        self.streams = [self._open(tag) for tag in range(num_streams)]

    def _receiver(self, number: int):
        def publish(_subject: str, payload: bytes, want: str) -> bool:
            if self.lost:
                self.lost -= 1
                return False
            for tag, _attempt, _choice, n, _end, event in self.readers[number].read(want, payload):
                if n is not None:
                    self.got[tag].append((n, event))
            return True

        return publish

    def _open(self, tag: int) -> Stream:
        out = self.outs[tag % len(self.outs)]
        stream = Stream(f"rid-{tag}", 0, lambda: Words(f"s{tag}"), out)
        stream.plan = PLAN
        self.restart(stream, tag, 0)
        return stream

    def restart(self, stream: Stream, tag: int, attempt: int) -> None:
        if stream.handle:
            self.table.release(stream.handle)
        stream.begin_attempt(self.table.issue(stream), stream.out.prefix(tag, attempt, 0))

    def frame(self, rows: list[tuple[int, int, Sequence[int], int]], source: str = "decode-1") -> None:
        """rows: stream number, position, tokens, finish."""
        self.table.on_frame(
            source,
            encode_frame(
                1,
                1,
                1,
                array("Q", [self.streams[number].handle for number, *_ in rows]),
                array("I", [position for _, position, *_ in rows]),
                bytes(len(tokens) for _, _, tokens, _ in rows),
                bytes(finish for *_, finish in rows),
                array("I", [token for _, _, tokens, _ in rows for token in tokens]),
            ),
            1.0,
        )

    def once(self, tag: int) -> list[bytes]:
        """What a subscriber keeps: every number once, in order; whatever comes twice is the same."""
        known: dict[int, bytes] = {}
        for number, event in self.got[tag]:
            assert known.setdefault(number, event) == event
        return [known[number] for number in sorted(known)]


def story(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1, VOCABULARY) for _ in range(length)]


@pytest.mark.parametrize("few_rows", [1, 9, 1_000])
@pytest.mark.parametrize("seed", range(25))
def test_events_taken_by_columns_are_those_derived_one_by_one(
    seed: int, few_rows: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(streams, "FEW_ROWS", few_rows)
    rng = random.Random(seed)
    hall = Hall(12, num_batches=rng.randint(1, 3))
    stories = [story(rng, rng.randint(1, 300)) for _ in hall.streams]
    at = [0] * len(stories)
    while any(position < len(tokens) for position, tokens in zip(at, stories, strict=True)):
        rows: list[tuple[int, int, Sequence[int], int]] = []
        for number, tokens in enumerate(stories):
            if at[number] < len(tokens) and rng.random() < 0.9:
                count = 1 if rng.random() < 0.93 else rng.randint(1, 5)
                part = tokens[at[number] : at[number] + count]
                ends = at[number] + len(part) == len(tokens)
                rows.append((number, at[number], part, LENGTH if ends else 0))
                at[number] += len(part)
        if rng.random() < 0.1 and rows:
            rows.append(rng.choice(rows))  # a repeat in the same frame
        hall.frame(rows, rng.choice(["decode-1"] * 9 + ["decode-2"]))
        if rng.random() < 0.1:
            tag = rng.randrange(len(stories))
            if at[tag] < len(stories[tag]):
                hall.restart(hall.streams[tag], tag, 9)
                at[tag] = 0
    for tag, tokens in enumerate(stories):
        assert hall.once(tag) == derived(f"s{tag}", tokens)
        assert list(hall.streams[tag].tokens) == tokens


def test_running_streams_are_plain_and_travel_as_columns():
    hall = Hall(3, num_batches=1)
    for position in range(200):
        hall.frame([(number, position, [1 + position % 6], 0) for number in range(3)])
    assert [stream.columns is not None for stream in hall.streams] == [True] * 3
    assert len(hall.streams[0].tokens) >= 200 - plain.KEPT_TOKENS
    hall.streams[0].recall()
    assert (hall.streams[0].at, hall.streams[0].n, len(hall.streams[0].tokens)) == (200, 200, 200)


def test_a_window_holds_plain_streams_back_to_within_one_event():
    hall = Hall(1, num_batches=1)
    stream = hall.streams[0]
    hall.frame([(0, 0, [1], 0)])
    stream.want(1, 300, stream.out, stream.prefix, again=False)
    hall.table.pump(stream)
    for position in range(1, 120):
        hall.frame([(0, position, [1 + position % 6], 0)])
    after_first = hall.got[0][1:]
    sizes = [len(event) for _, event in after_first]
    assert sum(sizes[:-1]) < 300 <= sum(sizes)
    following = hall.got[0][-1][0] + 1
    stream.want(following, 10_000, stream.out, stream.prefix, again=False)
    hall.table.pump(stream)
    assert hall.got[0][-1][0] == 119


def test_an_acknowledgement_inside_the_window_gives_exactly_what_it_frees():
    hall = Hall(1, num_batches=1)
    stream = hall.streams[0]
    hall.frame([(0, 0, [1], 0)])
    stream.want(1, 400, stream.out, stream.prefix, again=False)
    hall.table.pump(stream)
    for position in range(1, 200):
        hall.frame([(0, position, [1 + position % 6], 0)])
    sent = len(hall.got[0])
    stream.want(sent // 2, 400, stream.out, stream.prefix, again=False)
    hall.table.pump(stream)
    bytes_from = sum(len(event) for number, event in hall.got[0] if number >= sent // 2)
    last = len(hall.got[0][-1][1])
    assert bytes_from - last < 400 <= bytes_from


@pytest.mark.parametrize("lost", [1, 2, 5])
def test_a_lost_batch_is_a_gap_and_resent_with_its_frame(lost: int):
    hall = Hall(2, num_batches=1)
    tokens = story(random.Random(3), 80)
    for position, token in enumerate(tokens[:-1]):
        if position in (0, 30):
            hall.lost = lost
        hall.frame([(number, position, [token], 0) for number in range(2)])
    stream = hall.streams[1]
    stream.want(0, 1 << 20, stream.out, stream.prefix, again=True)
    hall.table.pump(stream)
    hall.frame([(1, 79, tokens[-1:], LENGTH)])
    assert hall.once(1) == derived("s1", tokens)


def test_acknowledgements_count_what_still_lies_in_columns():
    hall = Hall(2, num_batches=1)
    for position in range(10):
        hall.frame([(number, position, [1], 0) for number in range(2)])
    hall.table.acknowledge(2.0)
    kind, handles, positions = decode_acks(hall.acks[-1][1])
    assert (kind, list(handles), list(positions)) == (AckKind.HAVE, [s.handle for s in hall.streams], [10, 10])


def test_acknowledgements_go_to_whoever_sends_now():
    hall = Hall(1, num_batches=1)
    for position, source in enumerate(["decode-1", "decode-1", "decode-1", "decode-2", "decode-2"]):
        hall.frame([(0, position, [1], 0)], source)
    hall.table.acknowledge(2.0)
    assert [source for source, *_ in hall.acks] == ["decode-2"]


def test_the_same_row_twice_in_a_frame_is_one_event():
    hall = Hall(1, num_batches=1)
    for position in range(70):
        hall.frame([(0, position, [1 + position % 6], 0)] * 2)
    hall.frame([(0, 70, [5], LENGTH)])
    tokens = [1 + position % 6 for position in range(70)] + [5]
    assert hall.once(0) == derived("s0", tokens)
    assert list(hall.streams[0].tokens) == tokens


def test_a_token_outside_the_vocabulary_fails_its_stream_alone():
    hall = Hall(2, num_batches=1)
    failed: list[str] = []
    hall.table.on_failed = lambda stream, _why: failed.append(stream.rid)
    for position in range(5):
        hall.frame([(number, position, [1], 0) for number in range(2)])
    hall.frame([(0, 5, [VOCABULARY + 1], 0), (1, 5, [2], 0)])
    assert failed == ["rid-0"]
    assert [number for number, _ in hall.got[1]] == [0, 1, 2, 3, 4, 5]


def test_more_slots_than_at_first_and_released_ones_are_no_trouble():
    hall = Hall(1_500, num_batches=1)
    for position in range(3):
        hall.frame([(number, position, [1 + number % 5], 0) for number in range(1_500)])
    for stream in hall.streams[::2]:
        hall.table.release(stream.handle)
    hall.frame([(number, 3, [3], 0) for number in range(1_500)])
    assert [len(hall.got[number]) for number in (0, 1, 1_498, 1_499)] == [3, 4, 3, 4]
    assert len(hall.table) == 750


def test_pieces_whose_frame_is_unknown_are_left_out():
    hall = Hall(1, num_batches=1)
    hall.frame([(0, 0, [1], 0)])
    hall.readers[0].forget(0)
    hall.frame([(0, 1, [1], 0)])
    assert [number for number, _ in hall.got[0]] == [0]
