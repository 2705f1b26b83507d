"""The parser beside nats-py's own: same stream, same dispatch, however the bytes are split."""

import asyncio
import itertools
import random

import pytest
from nats.errors import ProtocolError
from nats.protocol.parser import Parser

from pipeline.fastnats import _Wire
from pipeline.fastparse import FastParser

SYNC, STOCK, GONE = b"7", b"8", b"9"  # subscription ids: synchronous, served by nats-py, unsubscribed

STREAM = (
    b"PING\r\n"
    b"MSG v1.a 7 5\r\nhello\r\n"
    b"MSG v1.b 7 _INBOX.r1 0\r\n\r\n"
    b"+OK\r\n"
    b"MSG v1.c 8 3\r\nabc\r\n"
    b"MSG v1.d 7 12\r\nMSG x 7 1\r\ny\r\n"
    b"HMSG v1.e 7 16 16\r\nNATS/1.0 503\r\n\r\n\r\n"
    b"HMSG v1.f 7 _INBOX.r2 21 25\r\nNATS/1.0\r\nA: bcde\r\n\r\nbody\r\n"
    b"PONG\r\n"
    b"HMSG v1.g 8 16 16\r\nNATS/1.0 404\r\n\r\n\r\n"
    b"MSG v1.h 9 2\r\nxx\r\n"
    b'INFO {"server_id":"s1","connect_urls":["10.0.0.1:4222"]}\r\n'
    b"MSG v1.i 7 300\r\n" + bytes(range(150)) * 2 + b"\r\n"
    b"-ERR 'Permissions Violation for Publish to \"v1.z\"'\r\n"
    b"MSG  v1.j\t7   4\r\nlast\r\n"
    b"PING\r\n"
)
DISPATCHED = [
    ("ping",),
    ("message", "7", "v1.a", "", b"hello", b""),
    ("message", "7", "v1.b", "_INBOX.r1", b"", b""),
    ("message", "8", "v1.c", "", b"abc", b""),
    ("message", "7", "v1.d", "", b"MSG x 7 1\r\ny", b""),
    ("message", "7", "v1.e", "", b"", b"NATS/1.0 503\r\n\r\n"),
    ("message", "7", "v1.f", "_INBOX.r2", b"body", b"NATS/1.0\r\nA: bcde\r\n\r\n"),
    ("pong",),
    ("message", "8", "v1.g", "", b"", b"NATS/1.0 404\r\n\r\n"),
    ("info", "s1"),
    ("message", "7", "v1.i", "", bytes(range(150)) * 2, b""),
    ("error", "'permissions violation for publish to \"v1.z\"'"),
    ("message", "7", "v1.j", "", b"last", b""),
    ("ping",),
]


class Recorder:
    """A client as both parsers see it: it notes what it is told, in order."""

    def __init__(self):
        self.seen = []
        self.received = (0, 0)
        self.listeners = {SYNC: self.listen}
        self.failing = False

    def listen(self, subject, reply, payload, headers):
        self.seen.append(("message", "7", subject, reply, payload, headers or b""))
        if self.failing:
            raise LookupError(subject)

    def serves(self, sid):
        return sid == STOCK

    def answer_ping(self):
        self.seen.append(("ping",))

    def take_pong(self):
        self.seen.append(("pong",))

    def count_in(self, messages, num_bytes):
        self.received = (self.received[0] + messages, self.received[1] + num_bytes)

    def callback_failed(self, error, where):
        self.seen.append(("failed", type(error).__name__, where))

    async def _process_msg(self, sid, subject, reply, data, headers):
        await asyncio.sleep(0)
        if sid != int(GONE):
            self.seen.append(("message", str(sid), subject.decode(), reply.decode(), data, headers or b""))

    async def _process_ping(self):
        self.answer_ping()

    async def _process_pong(self):
        self.take_pong()

    async def _process_info(self, info):
        await asyncio.sleep(0)
        self.seen.append(("info", info["server_id"]))

    async def _process_err(self, message):
        await asyncio.sleep(0)
        self.seen.append(("error", message))


async def parsed(parser_class, pieces):
    recorder = Recorder()
    parser = parser_class(recorder)
    for piece in pieces:
        await parser.parse(piece)
    return recorder


async def fed(pieces, recorder=None):
    """The synchronous way with its fall-back, as the socket callback drives it."""
    recorder = recorder or Recorder()
    parser = FastParser(recorder)
    for piece in pieces:
        rest = parser.feed(piece)
        if rest:
            await parser.parse(rest)
    return recorder


def split(data, *cuts):
    edges = [0, *cuts, len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


async def test_the_stock_parser_dispatches_what_the_expectation_says():
    assert (await parsed(Parser, [STREAM])).seen == DISPATCHED


async def test_a_whole_stream_is_dispatched_in_order():
    assert (await parsed(FastParser, [STREAM])).seen == DISPATCHED
    assert (await fed([STREAM])).seen == DISPATCHED


async def test_a_stream_byte_by_byte_is_dispatched_alike():
    pieces = [STREAM[i : i + 1] for i in range(len(STREAM))]
    assert (await parsed(FastParser, pieces)).seen == DISPATCHED
    assert (await fed(pieces)).seen == DISPATCHED


async def test_every_single_split_is_dispatched_alike():
    for cut in range(1, len(STREAM)):
        assert (await fed(split(STREAM, cut))).seen == DISPATCHED, cut


async def test_random_splits_are_dispatched_alike():
    rng = random.Random(20)
    for _ in range(300):
        cuts = sorted(rng.sample(range(1, len(STREAM)), rng.randint(2, 9)))
        assert (await fed(split(STREAM, *cuts))).seen == DISPATCHED, cuts


async def test_synchronous_messages_are_counted_and_stock_ones_left_to_nats_py():
    assert (await fed([STREAM])).received == (7, 5 + 0 + 12 + 0 + 4 + 300 + 4)


async def test_a_callback_that_raises_is_reported_and_the_next_message_dispatched():
    recorder = Recorder()
    recorder.failing = True
    await fed([b"MSG v1.k 7 1\r\n1\r\nMSG v1.l 7 1\r\n2\r\n"], recorder)
    assert [entry[0] for entry in recorder.seen] == ["message", "failed", "message", "failed"]
    assert recorder.seen[1] == ("failed", "LookupError", "v1.k")


async def test_a_subject_that_is_not_utf8_is_reported_and_skipped():
    recorder = await fed([b"MSG v1.\xff 7 1\r\n1\r\nMSG v1.m 7 1\r\n2\r\n"])
    assert [entry[0] for entry in recorder.seen] == ["failed", "message"]


@pytest.mark.parametrize(
    "rubbish",
    [
        b"HELLO there\r\n",
        b"\r\n",
        b"MSG v1.a 7\r\n",
        b"MSG v1.a 7 -3\r\nabc\r\n",
        b"MSG v1.a 7 many\r\n",
        b"MSG v1.a 7 r1 r2 3\r\nabc\r\n",
        b"MSG v1.a 7 999999999\r\n",
        b"MSG v1.a 7 " + b"9" * 5000 + b"\r\n",
        b"HMSG v1.a 7 9 3\r\nabc\r\n",
        b"HMSG v1.a 7 3\r\nabc\r\n",
        b"-ERR \r\n",
        b"-ERR without quotes\r\n",
        b"INFO not json\r\n",
        b"INFO\r\n",
        b"PING now\r\n",
        b"x" * 2_000_000,
    ],
)
async def test_rubbish_is_a_protocol_error_and_nothing_else(rubbish):
    with pytest.raises(ProtocolError):
        await fed([b"MSG v1.a 7 1\r\n1\r\n" + rubbish])


async def test_mutated_streams_raise_protocol_errors_only():
    rng = random.Random(21)
    for _ in range(2000):
        mutated = bytearray(STREAM)
        for _ in range(rng.randint(1, 4)):
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        try:
            await fed(split(bytes(mutated), *sorted(rng.sample(range(1, len(mutated)), 3))))
        except ProtocolError:
            continue


async def test_a_reset_forgets_half_a_message():
    recorder = Recorder()
    parser = FastParser(recorder)
    parser.feed(b"MSG v1.a 7 5\r\nhe")
    parser.reset()
    parser.feed(b"MSG v1.b 7 2\r\nok\r\n")
    assert recorder.seen == [("message", "7", "v1.b", "", b"ok", b"")]


async def test_the_parser_is_busy_exactly_while_it_awaits():
    recorder = Recorder()
    parser = FastParser(recorder)
    rest = parser.feed(b"MSG v1.c 8 1\r\n1\r\nMSG v1.a 7 1\r\n2\r\n")
    task = asyncio.ensure_future(parser.parse(rest))
    await asyncio.sleep(0)
    assert parser.busy
    assert recorder.seen == []
    await task
    assert not parser.busy
    assert [entry[2] for entry in recorder.seen] == ["v1.c", "v1.a"]


async def test_bytes_that_arrive_while_an_operation_is_awaited_keep_their_place():
    """The socket's side and the reading task's side of the parser, with pieces coming at every moment."""
    rng = random.Random(22)
    for _ in range(200):
        recorder, reader = Recorder(), asyncio.StreamReader(limit=64)
        parser, wire = FastParser(recorder), _Wire(reader)
        wire.parser, parser.open = parser, True
        reading = asyncio.ensure_future(read_as_nats_py_does(reader, wire, parser))
        for piece in split(STREAM, *sorted(rng.sample(range(1, len(STREAM)), rng.randint(1, 12)))):
            wire.data_received(piece)
            for _ in range(rng.randint(0, 4)):
                await asyncio.sleep(0)
        wire.eof_received()
        await reading
        assert recorder.seen == DISPATCHED
        assert wire.held_bytes == 0


async def read_as_nats_py_does(reader, wire, parser):
    while not reader.at_eof():
        data = await reader.read(50)
        wire.held_bytes -= len(data)
        await parser.parse(data)
