"""How streams begin and end: parsers, usage, failures, the timeline. The subscriber is real, on a real broker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pipeline.bus import Bus
from pipeline.endings import Endings, timeline
from pipeline.errors import ErrorCode, RequestError
from pipeline.events import FinishReason, Plan, Span
from pipeline.metrics import counters
from pipeline.owner import EndStream, Holder
from pipeline.request import Request
from pipeline.stream import NoTokens
from pipeline.streams import StreamTable
from pipeline.subscribers import Subscribers
from tests.pipeline.fabric import LENGTH, EchoCodec, Reader, encoded, eventually, frame_of, joined, new_request

PLAN = Plan(prompt_tokens=9, hit_tokens=5, compute_from=4, replay_from=3, seed=1)


class Desk:
    """One request and its endings."""

    def __init__(self, bus: Bus, *, choices: int, timeline: bool) -> None:
        self.bus = bus
        self.reader = Reader(bus)
        self.table = StreamTable(bus.worker, bus.tell, resend_after_s=1.0)
        self.endings = Endings(bus.worker, EchoCodec(), self.table)
        self.request: Request = new_request(bus, Subscribers(bus).get(self.reader.reply, -1), timeline=timeline)
        self.request.encoding = encoded(choices) if choices else None

    def open(self) -> None:
        self.endings.open_streams(self.request)
        for stream in self.request.streams:
            stream.begin_attempt(self.table.issue(stream), stream.prefix)

    def tokens(self, *tokens: int, choice: int = 0, finish: int = 0) -> None:
        stream = self.request.streams[choice]
        self.table.on_frame("", frame_of(stream.handle, len(stream.tokens), tokens, finish), 0.0)

    async def settled(self) -> None:
        await self.bus.flush()
        await self.bus.flush()

    def bodies(self, choice: int = 0) -> list[Any]:
        return [message["event"] for message in self.reader.events if message["c"] == choice]


@asynccontextmanager
async def desk_at(url: str, *, choices: int = 1, timeline: bool = False) -> AsyncIterator[Desk]:
    """choices 0: the request was not encoded yet."""
    async with joined(url, single=True) as bus:
        yield Desk(bus, choices=choices, timeline=timeline)


async def test_there_is_one_stream_per_choice_and_opening_again_changes_nothing(nats_url: str):
    async with desk_at(nats_url, choices=3) as desk:
        desk.open()
        streams = list(desk.request.streams)
        desk.endings.open_streams(desk.request)
        assert desk.request.streams == streams
        assert [stream.choice for stream in streams] == [0, 1, 2]


async def test_an_end_waits_for_the_plan_and_reports_its_usage(nats_url: str):
    async with desk_at(nats_url) as desk:
        desk.open()
        desk.tokens(1, 2, finish=LENGTH)
        await desk.settled()
        assert desk.reader.ends == []
        desk.endings.learn_plan(desk.request, PLAN)
        await eventually(lambda: desk.reader.ends == ["length"])
        assert desk.bodies()[-1] == {"reason": "length", "hit": 5, "tokens": 2}


async def test_the_first_plan_counts(nats_url: str):
    async with desk_at(nats_url) as desk:
        desk.open()
        desk.endings.learn_plan(desk.request, PLAN)
        desk.endings.learn_plan(desk.request, Plan(9, 0, 0, 0, 1))
        desk.endings.learn_plan(desk.request, None)
        desk.tokens(1, finish=LENGTH)
        await eventually(lambda: desk.reader.ends)
        assert desk.bodies()[-1]["hit"] == 5
        assert desk.request.plan == PLAN  # what binds a later attempt


async def test_the_publishers_fault_is_one_failure_without_tokens(nats_url: str):
    async with desk_at(nats_url, choices=0) as desk:
        error = RequestError(ErrorCode.MODEL_NOT_FOUND, "no such model", param="model")
        desk.endings.refuse(desk.request, error)
        desk.endings.end(desk.request, EndStream(code=error.code, message=error.message))
        await eventually(lambda: desk.reader.ends == ["model_not_found"])
        assert desk.bodies() == [{"error": {"code": "model_not_found", "message": "no such model", "param": "model"}}]
        assert desk.reader.numbers() == [0]


@pytest.mark.parametrize("code", list(ErrorCode))
async def test_a_failure_ends_every_choice_that_still_runs(nats_url: str, code: ErrorCode):
    async with desk_at(nats_url, choices=3) as desk:
        desk.open()
        desk.endings.learn_plan(desk.request, PLAN)
        desk.tokens(1, 2, choice=0, finish=LENGTH)
        desk.tokens(7, choice=1)
        before = counters[f"requests_ended_{code}"]
        desk.endings.end(desk.request, EndStream(code=code, message="why"))
        desk.endings.end(desk.request, EndStream(code=code, message="again"))
        await eventually(lambda: len(desk.reader.ends) == 3)
        await desk.settled()
        assert sorted(desk.reader.ends) == sorted(["length", code, code])
        assert (desk.reader.numbers(0), desk.reader.numbers(1), desk.reader.numbers(2)) == ([0, 1, 2], [0, 1], [0])
        assert desk.bodies(1)[-1]["error"]["message"] == "why"
        assert counters[f"requests_ended_{code}"] == before + 2


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.INSUFFICIENT_SYSTEM_RESOURCE])
async def test_a_finish_reason_without_a_plan_reports_that_nothing_was_computed(nats_url: str, reason: FinishReason):
    async with desk_at(nats_url) as desk:
        desk.open()
        desk.endings.end(desk.request, EndStream(reason=reason, message="why"))
        await eventually(lambda: desk.reader.ends == [reason])
        assert desk.bodies() == [{"reason": reason, "hit": 0, "tokens": 0}]
        assert desk.request.plan == Plan(2, 0, 0, 0, 0)


async def test_a_finish_reason_before_encoding_is_an_error_body_under_its_name(nats_url: str):
    async with desk_at(nats_url, choices=0) as desk:
        desk.endings.end(desk.request, EndStream(reason=FinishReason.ABORT, message="cancelled by the publisher"))
        await eventually(lambda: desk.reader.ends == ["abort"])
        assert desk.bodies()[0]["error"]["message"] == "cancelled by the publisher"


async def test_a_prompt_that_does_not_fit_ends_every_choice(nats_url: str):
    async with desk_at(nats_url, choices=2) as desk:
        desk.open()
        desk.endings.end_unprocessed(desk.request, FinishReason.PROMPT_LENGTH_EXCEEDED)
        desk.endings.end(desk.request, EndStream(reason=FinishReason.PROMPT_LENGTH_EXCEEDED))
        await eventually(lambda: desk.reader.ends == ["prompt_length_exceeded"] * 2)


async def test_the_timeline_is_told_just_before_the_last_end_and_only_to_who_asked(nats_url: str):
    for asked in (True, False):
        async with desk_at(nats_url, choices=2, timeline=asked) as desk:
            desk.open()
            desk.endings.learn_plan(desk.request, PLAN)
            for choice in (0, 1):
                desk.tokens(1, choice=choice, finish=LENGTH)
            await eventually(lambda: len(desk.reader.ends) == 2)
            kinds = [message.get("end") or message["event"].get("type") for message in desk.reader.messages]
            assert kinds == [None, "length", None, *(["request_timeline"] if asked else []), "length"]


async def test_who_asked_for_a_timeline_waits_for_the_transfers_span(nats_url: str):
    async with desk_at(nats_url, timeline=True) as desk:
        desk.open()
        desk.tokens(1, finish=LENGTH)
        desk.endings.learn_plan(desk.request, PLAN, final=False)
        await desk.settled()
        assert desk.reader.ends == []
        desk.endings.learn_plan(desk.request, None, final=True)
        await eventually(lambda: desk.reader.ends == ["length"])


async def test_the_owner_adds_decode_and_parse_to_what_stages_reported(nats_url: str):
    async with desk_at(nats_url) as desk:
        desk.open()
        desk.tokens(1, 2)
        request = desk.request
        request.spans["lookup"] = Span("lookup", "l", 1, 2)
        assert [span.stage for span in timeline(request, "me")] == ["lookup"]
        request.spans["prefill"] = Span("prefill", "p", 2, 5)
        request.spans["transfer"] = Span("transfer", "d", 5, 6)
        request.machine.holders["decode"] = Holder("d", 1)
        spans = {span.stage: span for span in timeline(request, "me")}
        assert list(spans) == ["lookup", "prefill", "transfer", "decode", "parse"]
        assert (spans["decode"].worker, spans["decode"].start_ns, spans["decode"].note) == ("d", 6, "2 tokens")
        assert (spans["parse"].worker, spans["parse"].start_ns, spans["parse"].note) == ("me", 5, "2 events")


def test_a_request_that_never_started_takes_no_token():
    with pytest.raises(AssertionError, match="token 7"):
        NoTokens().feed(7)
    assert NoTokens().finish("abort", PLAN, 0) == b'{"type":"ended","reason":"abort","tokens":0}'
