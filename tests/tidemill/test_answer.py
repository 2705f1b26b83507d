from __future__ import annotations

import io
import json
from typing import Any

from pipeline.client import Event
from tidemill.answer import AnswerPrinter, timeline

USAGE = {"prompt_tokens": 300, "prompt_cache_hit_tokens": 128, "completion_tokens": 2}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def event(body: Any, number: int | None = 0) -> Event:
    return Event(json.dumps(body).encode(), number, 0)


def chunk(number: int, reason: str | None = None, **delta: str) -> Event:
    body: dict[str, Any] = {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
    return event(body | ({"usage": USAGE} if reason else {}), number)


def shown(*events: Event, raw: bool = False, out: io.StringIO | None = None) -> tuple[str, str, bool]:
    out, err = out or io.StringIO(), io.StringIO()
    printer = AnswerPrinter(out, err, raw=raw)
    for each in events:
        printer.show(each)
    printer.close()
    return out.getvalue(), err.getvalue(), printer.failed


def test_the_answer_goes_to_one_side_and_its_usage_to_the_other():
    out, err, failed = shown(chunk(0, content="Good "), chunk(1, content="tide"), chunk(2, "stop"))
    assert out == "Good tide\n"
    assert err == "[stop] 300 prompt tokens (128 from cache), 2 generated\n"
    assert not failed


def test_a_whole_completion_is_shown_as_its_stream_would_be():
    body = {"choices": [{"message": {"content": "Good tide"}, "finish_reason": "length"}], "usage": USAGE}
    assert shown(event(body))[:2] == (
        "Good tide\n",
        "[length] 300 prompt tokens (128 from cache), 2 generated\n",
    )


def test_only_a_terminal_sees_the_reasoning_apart():
    events = (chunk(0, reasoning_content="hm"), chunk(1, content="yes"))
    assert shown(*events)[0] == "hmyes"
    assert shown(*events, out=Terminal())[0] == "\x1b[2mhm\x1b[0m\nyes"


def test_a_named_error_is_told_and_remembered():
    out, err, failed = shown(event({"error": {"code": "overloaded", "message": "no room"}}))
    assert (out, err, failed) == ("", "overloaded: no room\n", True)


def test_raw_events_are_one_a_line_and_an_error_among_them_counts():
    assert shown(chunk(0, content="a"), raw=True)[2] is False
    out, err, failed = shown(event({"error": {"code": "internal", "message": ""}}), raw=True)
    assert (out, err, failed) == ('{"error": {"code": "internal", "message": ""}}\n', "", True)


def test_of_the_notes_progress_and_timeline_are_shown():
    spans = [{"stage": "codec", "worker": "codec-1", "start_ns": 0, "end_ns": 1, "note": ""}]
    out, err, _ = shown(
        event({"type": "request_accepted", "owner": "codec-1"}, None),
        event({"type": "request_progress", "stage": "prefill"}, None),
        event({"type": "request_timeline", "spans": spans}, None),
    )
    assert out == ""
    assert err == "waiting in prefill\n" + timeline(spans)


def test_a_timeline_lists_the_stages_by_their_start_in_milliseconds_since_the_first():
    spans = [
        {"stage": "decode", "worker": "d-1", "start_ns": 3_000_000, "end_ns": 5_000_000, "note": "12 tokens"},
        {"stage": "codec", "worker": "c-1", "start_ns": 1_000_000, "end_ns": 2_000_000, "note": ""},
    ]
    head, first, second = timeline(spans).splitlines()
    assert head.split() == ["stage", "worker", "from", "ms", "to", "ms"]
    assert first.split()[:4] == ["codec", "c-1", "0.00", "1.00"]
    assert second.split()[:4] == ["decode", "d-1", "2.00", "4.00"]
    assert second.endswith("12 tokens")
    assert (first.count("#"), second.count("#")) == (10, 20)


def test_clocks_of_two_hosts_may_disagree_without_harm():
    backwards = {"stage": "codec", "worker": "c-1", "start_ns": 9, "end_ns": 4, "note": ""}
    assert timeline([backwards]).count("#") == 1
    assert timeline([]) == ""
