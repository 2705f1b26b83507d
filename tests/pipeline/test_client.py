"""The client on a real broker, against an owner that is played message by message."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from pipeline import blob
from pipeline.bus import Bus
from pipeline.client import (
    RESUME_SILENCE_S,
    WINDOW_BYTES,
    Client,
    Event,
    Stream,
    StreamLostError,
    _choices,
)
from pipeline.delivery import note_body
from pipeline.errors import ErrorCode, RequestError, TransientError
from pipeline.jetstream import ensure
from pipeline.topology import Topology
from tests.pipeline.fabric import Ear, eventually, joined, limited, new_rid, new_worker
from tests.pipeline.test_jetstream import with_stream
from tidemill.nats_server import EmbeddedNats

CALM = limited(want_renew_s=3600.0, resend_after_s=0.0)


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedNats]:
    with EmbeddedNats() as server:
        yield server


class Owner:
    """An owner by hand: `wants` it was sent by name, `calls` to everyone."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.name = new_worker("codec")
        self.want_subject = bus.topology.subject("want", worker=self.name)
        self._wants = Ear(bus, self.want_subject)
        self._calls = Ear(bus, bus.topology.subject("want_any"))

    @property
    def wants(self) -> list[dict[str, Any]]:
        return [json.loads(payload) for payload in self._wants.payloads]

    @property
    def calls(self) -> list[dict[str, Any]]:
        return [json.loads(payload) for payload in self._calls.payloads]

    def send(self, stream: Stream, number: int | None, *, reply: str = "", **fields: Any) -> None:
        """An event of the JSON form, or a note."""
        message = {"a": 0, "event": {"token": number}, **({} if number is None else {"n": number, "c": 0}), **fields}
        self.bus.publish(stream.reply, json.dumps(message).encode(), reply or self.want_subject)

    def send_rows(self, stream: Stream, *rows: list[Any]) -> None:
        self.bus.publish(stream.reply, msgspec.msgpack.encode(list(rows)), self.want_subject)

    async def wanted(self, number: int = 1) -> dict[str, Any]:
        await eventually(lambda: len(self.wants) >= number, f"Want {number}")
        return self.wants[number - 1]

    async def called(self, number: int = 1) -> dict[str, Any]:
        await eventually(lambda: len(self.calls) >= number, f"broadcast {number}")
        return self.calls[number - 1]


@asynccontextmanager
async def meeting(url: str, topology: Topology = CALM, *, batch: bool = False) -> AsyncIterator[tuple[Client, Owner]]:
    async with joined(url, topology=topology) as bus:
        await ensure(bus)
        owner = Owner(bus)
        async with await Client.connect([url], topology=topology, batch=batch) as client:
            await bus.flush()
            await client._bus.flush()
            yield client, owner


async def heard(stream: Stream, number: int) -> list[Event]:
    """The next events of a stream."""
    events = aiter(stream)
    return [await asyncio.wait_for(anext(events), 10) for _ in range(number)]


async def rest(stream: Stream) -> list[Event]:
    """Everything until the stream ends."""
    async with asyncio.timeout(10):
        return [event async for event in stream]


async def stored(bus: Bus, subject: str) -> list[dict[str, Any]]:
    """Messages of a subject in INTAKE: only the last can be had, and how many there are."""
    info = await bus.ask_json("$JS.API.STREAM.INFO.INTAKE", {"subjects_filter": subject})
    count = (info["state"].get("subjects") or {}).get(subject, 0)
    answer = await bus.ask_json("$JS.API.STREAM.MSG.GET.INTAKE", {"last_by_subj": subject})
    return [answer["message"]] * count if count else []


# --- publishing


async def test_a_request_is_stored_with_what_the_owner_must_know(server: EmbeddedNats):
    tenant = new_worker("tenant")
    async with meeting(server.url) as (_, owner), await Client.connect([server.url], tenant, topology=CALM) as client:
        body = {"model": "m", "text": "\N{SNOWMAN}"}
        stream = await client.publish(
            body, protocol="responses", request_class="batch", timeout_s=2.5, rid=new_rid(), timeline=True
        )
        [message] = await stored(owner.bus, f"v1.in.batch.{tenant}")
        data = msgspec.json.decode(json.dumps(message["data"]).encode(), type=bytes)
        assert json.loads(data) == body
        headers = msgspec.json.decode(json.dumps(message["hdrs"]).encode(), type=bytes).decode()
        for line in (
            f"Nats-Msg-Id: {tenant}:{stream.rid}",
            "Tm-Protocol: responses",
            f"Tm-Reply: {stream.reply}",
            "Tm-Timeout: 2.5",
            "Tm-Timeline: 1",
        ):
            assert line in headers
        assert "Tm-Batch" not in headers


async def test_the_same_rid_twice_is_stored_once(server: EmbeddedNats):
    async with meeting(server.url) as (client, owner):
        client.tenant = new_worker("tenant")
        rid = new_rid()
        await client.publish(b"{}", rid=rid)
        await client.publish(b"{}", rid=rid)
        assert len(await stored(owner.bus, f"v1.in.interactive.{client.tenant}")) == 1


async def test_a_publish_whose_acknowledgement_is_late_is_repeated_and_stored_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pipeline.client._ACK_TIMEOUT_S", 0.5)
    with EmbeddedNats() as own:
        async with meeting(own.url) as (client, owner):
            assert own.pid is not None
            os.kill(own.pid, signal.SIGSTOP)  # it hangs, and takes in everything when it goes on
            publishing = asyncio.ensure_future(client.publish(b"{}"))
            await eventually(lambda: len(client._acks) == 1)
            first = set(client._acks)
            await eventually(lambda: client._acks and set(client._acks) != first, "the second try")
            os.kill(own.pid, signal.SIGCONT)
            await publishing
            await client._bus.flush()
            assert len(await stored(owner.bus, "v1.in.interactive.default")) == 1


async def test_without_a_broker_publishing_is_transient_and_leaves_nothing_open():
    with EmbeddedNats() as own:
        async with meeting(own.url) as (client, _):
            own.kill()
            await eventually(lambda: not client._bus.data.is_connected)
            with pytest.raises(TransientError, match="did not acknowledge"):
                await client.publish(b"{}")
            assert not client._streams
            assert not client._tags
            assert not client._acks


async def test_without_the_stream_publishing_is_transient():
    with EmbeddedNats() as own:
        async with await Client.connect([own.url], topology=CALM) as client:
            with pytest.raises(TransientError, match="did not acknowledge"):
                await client.publish(b"{}")


@pytest.mark.parametrize("cap", [{"max_msgs_per_subject": 2}, {"max_bytes": 3000}])
async def test_a_full_intake_is_overloaded(cap: dict[str, int]):
    with EmbeddedNats() as own:
        async with meeting(own.url, with_stream("INTAKE", **cap)) as (client, _):
            body = bytes(1000)
            for _ in range(2):
                await client.publish(body)
            with pytest.raises(RequestError, match="intake is full: maximum") as refusal:
                await client.publish(body)
            assert refusal.value.code is ErrorCode.OVERLOADED
            assert len(client._streams) == 2


async def test_a_body_above_the_limit_is_refused_here_naming_both_numbers(server: EmbeddedNats):
    async with meeting(server.url, limited(max_body_bytes=1000)) as (client, _):
        with pytest.raises(RequestError, match=r"1001 bytes.*1000 bytes") as refusal:
            await client.publish(bytes(1001))
        assert refusal.value.code is ErrorCode.PAYLOAD_TOO_LARGE
        assert client._streams == {}


async def test_a_body_above_the_inline_share_goes_first_to_blob(server: EmbeddedNats):
    async with meeting(server.url) as (client, owner):
        client.tenant = new_worker("tenant")
        body = os.urandom(client._bus.max_inline_bytes + 1)
        stream = await client.publish(body)
        [message] = await stored(owner.bus, f"v1.in.interactive.{client.tenant}")
        assert "data" not in message
        headers = msgspec.json.decode(json.dumps(message["hdrs"]).encode(), type=bytes).decode()
        ref = blob.BlobRef.parse(headers.split("Tm-Blob: ")[1].split("\r\n")[0])
        assert await blob.get(owner.bus, client.tenant, stream.rid, ref, 1 << 24) == body
        inline = await client.publish(body[:-1])
        assert inline.rid != stream.rid
        assert "data" in (await stored(owner.bus, f"v1.in.interactive.{client.tenant}"))[0]


# --- a stream


async def test_events_come_in_order_each_once_and_the_stream_ends(server: EmbeddedNats):
    async with meeting(server.url) as (client, owner):
        stream = await client.publish(b"{}")
        owner.send(stream, None, event={"type": "request_accepted"})
        for number in range(3):
            owner.send(stream, number)
        owner.send(stream, 3, end="stop")
        events = await rest(stream)
        assert [event.number for event in events] == [None, 0, 1, 2, 3]
        assert events[0].json() == {"type": "request_accepted"}
        assert [event.json() for event in events[1:]] == [{"token": number} for number in range(4)]
        assert (events[-1].end, stream.ended) == ("stop", True)
        assert not client._streams
        assert not client._tags
        # the request itself carried the first one: Tm-Window
        want = await owner.wanted(1)
        assert WINDOW_BYTES - 200 < want.pop("window_bytes") <= WINDOW_BYTES
        assert want == {
            "rid": stream.rid, "next": [4], "reply": stream.reply, "resend": False,
            "tag": -1,
        }  # fmt: skip
        assert owner.calls == []


async def test_a_gap_asks_again_from_the_first_event_that_lacks(server: EmbeddedNats):
    async with meeting(server.url) as (client, owner):
        stream = await client.publish(b"{}")
        owner.send(stream, 0)
        owner.send(stream, 2)
        want = await owner.wanted(1)
        assert (want["next"], want["resend"]) == ([1], True)
        for number in (1, 2):
            owner.send(stream, number)
        assert [event.number for event in await heard(stream, 3)] == [0, 1, 2]


async def test_a_gap_is_told_once_for_a_while_however_much_comes_after_it(server: EmbeddedNats):
    async with meeting(server.url, limited(want_renew_s=3600.0, resend_after_s=3600.0)) as (client, owner):
        stream = await client.publish(b"{}")
        stream._gap_told_at = -3600.0 * 24
        for number in (0, 2, 3, 4, 5):
            owner.send(stream, number)
        await owner.wanted(1)
        await client._bus.flush()
        await owner.bus.flush()
        assert [want["resend"] for want in owner.wants] == [True]


async def test_known_numbers_and_lower_attempts_are_ignored_and_higher_ones_go_on(server: EmbeddedNats):
    async with meeting(server.url) as (client, owner):
        stream = await client.publish(b"{}")
        for number, attempt in ((0, 0), (0, 0), (1, 4), (1, 4), (2, 3), (0, 4), (2, 9)):
            owner.send(stream, number, a=attempt)
        owner.send(stream, 3, a=9, end="length")
        events = await rest(stream)
        assert [(event.number, event.attempt) for event in events] == [(0, 0), (1, 4), (2, 9), (3, 9)]


async def test_half_a_window_read_asks_for_more_and_what_waits_gets_no_credit(server: EmbeddedNats):
    async with meeting(server.url) as (client, owner):
        stream = await client.publish(b"{}")
        large = {"text": "x" * (WINDOW_BYTES // 4 + 10)}
        for number in range(3):
            owner.send(stream, number, event=large)
        await eventually(lambda: stream.following == [3])
        assert owner.wants == []
        await heard(stream, 2)
        want = await owner.wanted(1)
        assert want["next"] == [3]
        assert 0.7 * WINDOW_BYTES < want["window_bytes"] < 0.76 * WINDOW_BYTES


async def test_a_stream_that_nobody_knows_is_lost_in_the_end(server: EmbeddedNats):
    async with meeting(server.url, limited(want_renew_s=0.05)) as (client, _owner):
        stream = client.resume(new_rid())
        assert stream.silence_s == RESUME_SILENCE_S
        stream.silence_s = 0.1
        with pytest.raises(StreamLostError, match=stream.rid):
            await rest(stream)
        assert not client._streams


async def test_when_the_owner_is_gone_everyone_is_asked(server: EmbeddedNats):
    async with meeting(server.url) as (client, owner):
        stream = await client.publish(b"{}")
        owner.send(stream, 0, reply="v1.want.somebody-who-died")
        await eventually(lambda: stream.following == [1])
        stream.want()
        call = await owner.called()
        assert (call["rid"], call["next"], call["resend"]) == (stream.rid, [1], True)
        assert stream.want_subject == ""
        owner.send(stream, 1, a=5)  # its new owner
        assert [event.number for event in await heard(stream, 2)] == [0, 1]


@pytest.mark.parametrize("batch", [False, True])
async def test_an_owner_that_does_not_know_the_request_has_everyone_asked(server: EmbeddedNats, batch: bool):
    async with meeting(server.url, batch=batch) as (client, owner):
        stream, other = await client.publish(b"{}"), await client.publish(b"{}")
        if batch:
            owner.send_rows(stream, [stream.tag, 0, 0, 0, None, b"{}"])
        else:
            owner.send(stream, 0)
        await eventually(lambda: stream.following == [1])
        owner.bus.publish(stream.reply, b'{"a":0,"event":%b}' % note_body("request_unknown", rid=stream.rid))
        call = await owner.called()
        assert (call["rid"], call["next"]) == (stream.rid, [1])
        assert [event.number for event in await heard(stream, 1)] == [0]
        assert stream._queue.empty()  # it is no event of the answer
        assert other._queue.empty()
        assert client._bus.data.callback_errors == 0


async def test_a_batching_connection_sorts_rows_by_tag(server: EmbeddedNats):
    async with meeting(server.url, batch=True) as (client, owner):
        one, two = await client.publish(b"{}"), await client.publish(b"{}")
        assert one.reply == two.reply
        owner.send_rows(
            one,
            [one.tag, 0, None, None, None, b'{"type":"request_accepted"}'],
            [one.tag, 0, 0, 0, None, b'{"x":1}'],
            [two.tag, 0, 0, 0, None, b'{"x":2}'],
            [two.tag + 1000, 0, 0, 0, None, b"{}"],  # nobody's
            [two.tag, 0, 0, 1, "stop", b"{}"],
            [one.tag, 0, 0, 1, "length", b"{}"],
        )
        assert [(event.number, event.end) for event in await rest(one)] == [(None, ""), (0, ""), (1, "length")]
        assert [event.body for event in await rest(two)] == [b'{"x":2}', b"{}"]
        assert {want["tag"] for want in owner.wants} <= {one.tag, two.tag}


async def test_choices_are_numbered_apart_and_the_last_one_ends_the_stream(server: EmbeddedNats):
    async with meeting(server.url) as (client, owner):
        stream = await client.publish({"n": 2})
        owner.send(stream, 0)
        owner.send(stream, 0, c=1)
        owner.send(stream, 1, c=0, end="stop")
        assert len(await heard(stream, 3)) == 3
        assert not stream.ended
        owner.send(stream, 1, c=1, end="length")
        assert [(event.choice, event.end) for event in await rest(stream)] == [(1, "length")]
        await eventually(lambda: owner.wants[-1:] and owner.wants[-1]["next"] == [2, 2])


@pytest.mark.parametrize("end", ["invalid_request", "deadline_exceeded", "abort"])
@pytest.mark.parametrize("batch", [False, True])
async def test_what_fails_before_its_choices_were_counted_ends_all_of_them(server: EmbeddedNats, end: str, batch: bool):
    async with meeting(server.url, batch=batch) as (client, owner):
        stream = await client.publish({"n": 3})
        if batch:
            owner.send_rows(stream, [stream.tag, 0, 0, 0, end, b"{}"])
        else:
            owner.send(stream, 0, end=end)
        assert [event.end for event in await rest(stream)] == [end]
        assert (await owner.wanted())["next"] == [1, 1, 1]


async def test_a_first_choice_that_ends_at_once_leaves_the_others_running(server: EmbeddedNats):
    async with meeting(server.url) as (client, owner):
        stream = await client.publish({"n": 2})
        owner.send(stream, 0, end="stop")
        owner.send(stream, 0, c=1)
        owner.send(stream, 1, c=1, end="internal")
        assert [(e.choice, e.end) for e in await rest(stream)] == [(0, "stop"), (1, ""), (1, "internal")]


async def test_a_failure_of_one_choice_after_another_began_is_that_ones_own(server: EmbeddedNats):
    async with meeting(server.url) as (client, owner):
        stream = await client.publish({"n": 2})
        owner.send(stream, 0, c=1)
        owner.send(stream, 0, c=0, end="internal")
        owner.send(stream, 1, c=1, end="internal")
        assert [(e.choice, e.end) for e in await rest(stream)] == [(1, ""), (0, "internal"), (1, "internal")]


async def test_a_choice_that_nobody_asked_for_is_left_out(server: EmbeddedNats):
    async with meeting(server.url) as (client, owner):
        stream = client.resume(new_rid())
        owner.send(stream, 0, c=1)
        owner.send(stream, 0, end="stop")
        assert [(event.choice, event.end) for event in await rest(stream)] == [(0, "stop")]
        assert client._bus.data.callback_errors == 0


async def test_rubbish_on_the_reply_subject_harms_no_stream(server: EmbeddedNats):
    for batch in (False, True):
        async with meeting(server.url, batch=batch) as (client, owner):
            stream = await client.publish(b"{}")
            for payload in (b"", b"{", b"\xc1", b"[]", b'{"a":"x"}', b'{"event":7}', b"\x91\x07"):
                owner.bus.publish(stream.reply, payload, owner.want_subject)
            if batch:
                owner.send_rows(stream, [stream.tag, 0, 0, 0, "stop", b"{}"])
            else:
                owner.send(stream, 0, end="stop")
            assert [event.end for event in await rest(stream)] == ["stop"]


# --- resuming, cancelling, closing


async def test_resume_asks_everyone_from_the_numbers_that_it_was_given(server: EmbeddedNats):
    async with meeting(server.url) as (client, owner):
        rid = new_rid()
        stream = client.resume(rid, (3, 0))
        call = await owner.called()
        assert (call["rid"], call["next"], call["reply"], call["resend"]) == (rid, [3, 0], stream.reply, True)
        owner.send(stream, 2)
        owner.send(stream, 3, end="stop")
        owner.send(stream, 0, c=1, end="stop")
        assert [(event.choice, event.number) for event in await rest(stream)] == [(0, 3), (1, 0)]


async def test_after_a_reconnect_every_stream_asks_for_what_it_lacks(server: EmbeddedNats):
    async with meeting(server.url) as (client, owner):
        streams = [await client.publish(b"{}") for _ in range(2)]
        for stream in streams:
            owner.send(stream, 0)
        await eventually(lambda: [stream.following for stream in streams] == [[1], [1]])
        await client._bus.data.force_reconnect()
        await owner.wanted(2)
        assert {want["rid"] for want in owner.wants} == {stream.rid for stream in streams}
        assert [(want["next"], want["resend"]) for want in owner.wants] == [([1], True)] * 2


async def test_a_stream_says_that_it_lives_and_asks_everyone_when_it_hears_nothing(server: EmbeddedNats):
    async with meeting(server.url, limited(want_renew_s=0.05)) as (client, owner):
        stream = await client.publish(b"{}")
        owner.send(stream, 0)
        await owner.wanted(2)  # nothing new came in between
        stream.heard_at -= 60.0
        assert (await owner.called())["next"] == [1]


async def test_a_cancel_is_sent_and_may_be_waited_for(server: EmbeddedNats):
    async with meeting(server.url) as (client, owner):
        client.tenant = new_worker("tenant")
        assert await client.cancel_and_wait(new_rid()) is False  # nobody listens at all
        ear = Ear(owner.bus, f"v1.cancel.{client.tenant}", reply_with=b"{}")
        await owner.bus.flush()
        rid = new_rid()
        assert await client.cancel_and_wait(rid) is True
        client.cancel(rid)
        await eventually(lambda: len(ear.payloads) == 2)
        assert [json.loads(payload) for payload in ear.payloads] == [{"rid": rid}] * 2


async def test_closing_ends_open_streams_with_an_error(server: EmbeddedNats):
    async with meeting(server.url) as (client, owner):
        open_one, ended = await client.publish(b"{}"), await client.publish(b"{}")
        owner.send(open_one, 0)
        owner.send(ended, 0, end="stop")
        await eventually(lambda: ended.ended and open_one.following == [1])
        await client.close()
        assert [event.number for event in await heard(open_one, 1)] == [0]
        with pytest.raises(StreamLostError, match="closed"):
            await heard(open_one, 1)
        assert [event.end for event in await rest(ended)] == ["stop"]


@pytest.mark.parametrize(
    ("body", "num"),
    [
        ({}, 1),
        ({"n": 4}, 4),
        ({"n": 0}, 1),
        ({"n": -1}, 1),
        ({"n": 129}, 1),
        ({"n": "2"}, 1),
        ({"n": True}, 1),
        ({"n": None}, 1),
        (b'{"n": 3}', 3),
        (b"{", 1),
        (b"[1]", 1),
        (b"\xff", 1),
        (b"7", 1),
    ],
)
def test_choices_are_counted_from_the_body_as_far_as_it_can_be_read(body: Any, num: int):
    assert _choices(body) == num
