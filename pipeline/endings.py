"""How the streams of a request begin and end in its owner: parsers, usage, error bodies, the timeline."""

from __future__ import annotations

import time
from functools import partial

import msgspec

from pipeline.delivery import note_body
from pipeline.errors import ErrorCode, RequestError
from pipeline.events import FinishReason, Plan, Span
from pipeline.metrics import count
from pipeline.owner import EndStream
from pipeline.request import Request
from pipeline.stage import CodecStage, TokenStream
from pipeline.stream import MAX_WINDOW_BYTES, Ending, NoTokens, Stream
from pipeline.streams import StreamTable


class Endings:
    """Opens and ends streams. Everything it publishes goes through the stream table."""

    def __init__(self, worker: str, codec: CodecStage, streams: StreamTable) -> None:
        self._worker = worker
        self._codec = codec
        self._streams = streams

    def open_streams(self, request: Request, ending: Ending | None = None) -> None:
        """One stream per choice, if there are none yet; with `ending` they end at once."""
        if request.streams:
            return
        encoding = request.encoding
        choices = encoding.sampling.num_choices if encoding else 1
        for choice in range(choices):
            stream = Stream(request.rid, choice, partial(_parser, request, choice), request.subscriber)
            stream.prefix = request.subscriber.prefix(request.tag, request.machine.attempt, choice)
            if request.head.window_bytes:
                stream.limit_bytes = min(request.head.window_bytes, MAX_WINDOW_BYTES)
            if request.head.timeline and choice == choices - 1:
                stream.before_end = partial(self._timeline, request)
            if ending is not None:
                stream.end(ending)
            request.streams.append(stream)

    def refuse(self, request: Request, error: RequestError) -> None:
        """The publisher's fault, found before there were tokens."""
        failure = self._codec.failure(request.head.protocol, error.code, error.message, error.param)
        self.open_streams(request, Ending(error.code, failure))

    def end_unprocessed(self, request: Request, reason: FinishReason) -> None:
        """A finish reason without any token (the prompt does not fit)."""
        self.learn_plan(request, _nothing_computed(request))
        for stream in request.streams:
            stream.end(Ending(reason))

    def settle(self, request: Request) -> None:
        """The request is given up: an end that still waits for its plan goes out without one."""
        if any(stream.terminal_n < 0 for stream in request.streams):
            self.learn_plan(request, _nothing_computed(request))

    def learn_plan(self, request: Request, plan: Plan | None, *, final: bool = True) -> None:
        """The first plan heard counts: usage is the first attempt's. Ends that waited for it go out.

        final: no more is needed for the last event. Who asked for a timeline waits for the transfer's span too.
        """
        request.plan = request.plan or plan
        if request.plan is None or not (final or not request.head.timeline):
            return
        for stream in request.streams:
            if stream.plan is not None:
                continue
            stream.plan = request.plan
            if stream.finish_at >= 0:
                self._streams.pump(stream)

    def end(self, request: Request, end: EndStream) -> None:
        """Give every unfinished choice its ending and publish what can be published."""
        count(f"requests_ended_{end.code or end.reason}")
        ending = self._ending(request, end)
        self.open_streams(request)
        unfinished = [stream for stream in request.streams if stream.ending is None]
        for stream in unfinished:
            stream.end(ending)
        if unfinished:
            self.learn_plan(request, _nothing_computed(request))
        for stream in request.streams:
            self._streams.pump(stream)

    def _ending(self, request: Request, end: EndStream) -> Ending:
        if end.code is not None:
            return Ending(end.code, self._codec.failure(request.head.protocol, end.code, end.message))
        reason = end.reason or FinishReason.ABORT
        if request.encoding is None:
            # nothing to word a chunk with yet: an error body, under the finish reason's name
            failure = self._codec.failure(request.head.protocol, ErrorCode.INVALID_REQUEST, end.message or reason)
            return Ending(reason, failure)
        return Ending(reason)

    def _timeline(self, request: Request) -> None:
        """Tell the subscriber which stage had the request when; sent just before the last event."""
        spans = timeline(request, self._worker)
        note = note_body("request_timeline", rid=request.rid, spans=[msgspec.structs.asdict(span) for span in spans])
        request.subscriber.note(request.tag, request.machine.attempt, note)


def timeline(request: Request, worker: str) -> list[Span]:
    """The spans that stages reported, and the owner's own of decode and parse."""
    now_ns = time.time_ns()
    spans = dict(request.spans)
    for stream in request.streams:
        stream.recall()
    if "prefill" in spans:
        transfer = spans.get("transfer")
        if transfer is not None:  # its reader is who decodes
            tokens = sum(len(stream.tokens) for stream in request.streams)
            spans["decode"] = Span("decode", transfer.worker, transfer.end_ns, now_ns, f"{tokens} tokens")
        events = sum(stream.n for stream in request.streams)
        spans["parse"] = Span("parse", worker, spans["prefill"].end_ns, now_ns, f"{events} events")
    return list(spans.values())


def _parser(request: Request, choice: int) -> TokenStream:
    encoding = request.encoding
    return NoTokens() if encoding is None else encoding.open(request.rid, request.created, choice)


def _nothing_computed(request: Request) -> Plan:
    tokens = request.encoding.num_prompt_tokens if request.encoding else 0
    return Plan(prompt_tokens=tokens, hit_tokens=0, compute_from=0, replay_from=0, seed=0)
