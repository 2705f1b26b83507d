import re
from pathlib import Path

import pytest

from pipeline.code_check import check_code, load_class
from pipeline.lint import check, covers, lint, overlap
from pipeline.topology import DEFAULT_PATH, Topology, TopologyError, read

TEXT = DEFAULT_PATH.read_text(encoding="utf-8")
ROOT = DEFAULT_PATH.parent


@pytest.fixture
def linted(tmp_path):
    """Faults of topics.yaml after replacements, each of which must hit exactly once."""

    def run(*replacements):
        text = TEXT
        for old, new in replacements:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        path = tmp_path / "topics.yaml"
        path.write_text(text, encoding="utf-8")
        return lint(path)

    return run


def test_our_own_topics_have_no_fault():
    assert lint() == []
    assert check() == Topology.load()


def test_our_own_code_is_what_topics_yaml_says():
    assert lint(check_code=True) == []


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.c", False),
        ("a.*", "a.c", True),
        ("a.*", "*.c", True),
        ("a.*", "a.b.c", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        ("a.>", "b.>", False),
        (">", "a", True),
        ("a.*.c", "a.b.*", True),
        ("a.*.c", "a.b.d", False),
    ],
)
def test_patterns_overlap_when_some_subject_matches_both(one, other, expected):
    assert overlap(one, other) is expected
    assert overlap(other, one) is expected


@pytest.mark.parametrize(
    ("wide", "narrow", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.*", "a.b", True),
        ("a.b", "a.*", False),
        ("a.>", "a.*.*", True),
        ("a.*", "a.>", False),
        ("a.>", "a.>", True),
        ("a.>", "a", False),
        ("a.*", "a.b.c", False),
        ("*.b", "a.*", False),
    ],
)
def test_a_pattern_covers_another_when_it_matches_all_of_its_subjects(wide, narrow, expected):
    assert covers(wide, narrow) is expected


MISSTEPS = [
    # fields of a delivery kind
    ("delivery: queue, group: lookup", "delivery: queue", "topics.encoded: delivery queue needs 'group'"),
    ("stream: FENCE, event", "event", "topics.fence: delivery stream needs 'stream'"),
    ('{subject: "v1.want", ', "{", "topics.want_any: delivery broadcast needs 'subject'"),
    ("{delivery: local", '{subject: "v1.kv", delivery: local', "topics.transferred: delivery local has no 'subject'"),
    ("delivery: reply", "delivery: reply, group: readers", "topics.events: delivery reply has no 'group'"),
    ('"v1.ack.{worker}"', '"v1.ack"', "topics.acks: delivery direct needs {worker} in its subject"),
    ('"v1.lookup.{worker}"', '"v1.lookup.{w}"', "topics.encoded: 'named' takes exactly one parameter, {worker}"),
    # subjects
    ('"v1.ack.{worker}"', '"v1.ack..{worker}"', "topics.acks: 'v1.ack..{worker}' is no subject"),
    ('"v1.ack.{worker}"', '"v1.ack-{worker}"', "topics.acks: 'v1.ack-{worker}' is no subject"),
    ('"v1.ack.{worker}"', '"v1.a ck.{worker}"', "topics.acks: 'v1.a ck.{worker}' is no subject"),
    ('"v1.ack.{worker}"', '"v1.*.{worker}"', "topics.acks: 'v1.*.{worker}' is no subject"),
    ('"v1.ack.{worker}"', '"v1.{worker}.{worker}"', "names a parameter twice"),
    ('"v1.ack.{worker}"', '"v1.ping.{worker}"', "topics.ping: 'v1.ping.*' overlaps 'v1.ping.*' of topic acks"),
    ('"v1.ack.{worker}"', '"v1.{kind}.{worker}"', "overlaps 'v1.*.*' of topic acks"),
    ('named: "v1.lookup.{worker}"', 'named: "v1.ack.{worker}"', "overlaps 'v1.ack.*' of topic encoded"),
    # names
    ("to: [lookup]}\n  matched", "to: [lookups]}\n  matched", "topics.encoded: there is no stage 'lookups'"),
    ("out: [matched]", "out: [matches]", "stages.lookup: there is no topic 'matches'"),
    ("with: [decode]}", "with: [decoder]}", "stages.transfer: there is no stage 'decoder'"),
    ("stream: FENCE, event", "stream: FENCES, event", "topics.fence: there is no stream 'FENCES'"),
    ("codec_batch:       {stream: INTAKE", "codec_batch:       {stream: IN", "codec_batch: there is no stream 'IN'"),
    # the graph
    ("out: [matched]", "out: []", "topics.matched: comes from lookup, whose 'out' does not list it"),
    ("in: [matched], ", "in: [], ", "topics.matched: goes to prefill, whose 'in' does not list it"),
    ("out: [matched]", "out: [matched, offer]", "topics.offer: is listed in 'out' of lookup, which"),
    ("in: [matched], ", "in: [matched, offer], ", "topics.offer: is listed in 'in' of prefill, which"),
    ("event: Ping, from: [codec]", "event: Ping, from: []", "topics.ping: 'from' names nobody"),
    ("out: [events],          with: [codec]", "out: [events]",
     "stages.codec: 'with' names parse, which does not name it"),
    ("event: StreamEvent, from: [parse], to: [subscriber]", "event: StreamEvent, from: [parse], to: [codec]",
     "there is no way from the publisher to the subscriber"),
    ("event: RequestBody, from: [publisher]", "event: RequestBody, from: [subscriber]",
     "stages.decode: nothing that a publisher sends ever reaches it"),
    # streams and consumers
    ('subjects: ["v1.fence"]', 'subjects: ["v1.fence", "v1.other"]', "streams.FENCE: 'v1.other' takes more"),
    ('subjects: ["v1.fence"]', 'subjects: ["v1.>"]', "streams.FENCE: 'v1.>' takes subjects of topic"),
    ('subjects: ["v1.blob.*.*.*"]', 'subjects: ["v1.blob.*.*.0"]', "streams.BLOB: does not hold 'v1.blob.*.*.*'"),
    ('subjects: ["v1.fence"]', 'subjects: ["v1 fence"]', "streams.FENCE: 'v1 fence' is no subject pattern"),
    ("storage: file, retention: limits, discard: old", "storage: disk, retention: limits, discard: old",
     "streams.FENCE: 'storage' is one of file, memory"),
    ("retention: workqueue", "retention: limits", "streams.INTAKE: retention limits does not fit topic intake"),
    ("duplicate_window_s: 120", "duplicate_window_s: 9999", "streams.INTAKE: 'duplicate_window_s' exceeds 'max_age_s'"),
    ("max_age_s: 4200, duplicate", "max_age_s: 900, duplicate", "streams.INTAKE: 'max_age_s' is below"),
    ('filter: "v1.in.batch.*"', 'filter: "v1.in.batch.>"', "consumers.codec_batch: 'v1.in.batch.>' asks for more"),
    ('filter: "v1.in.batch.*"', 'filter: "v1.in.*.*"', "its filter overlaps that of codec_interactive"),
    ('filter: "v1.in.batch.*"', 'filter: "v1.in.batches.*"', "streams.INTAKE: 'v1.in.batch.*' takes messages"),
    ('v1.in.batch.*", ack_wait_s: 4', 'v1.in.batch.*", ack_wait_s: 2', "codec_batch: 'ack_wait_s' leaves no room"),
    ("ack_wait_s: 4, max_ack_pending: 20000}\n\n", "ack_wait_s: 4, max_ack_pending: 0}\n\n",
     "consumers.codec_batch: 'max_ack_pending' must be positive"),
    # limits
    ("drain_s: 30", "drain_s: 0", "limits: 'drain_s' must be positive"),
    ("accept_tries: 3", "accept_tries: -1", "limits: 'accept_tries' must be positive"),
    ("inline_share: 0.75", "inline_share: 1.5", "limits: 'inline_share' is a share"),
    ("accept_timeout_s: 0.025", "accept_timeout_s: 0.05", "'accept_timeout_s' = 0.05 is not below"),
    ("default_timeout_s: 600", "default_timeout_s: 7200", "'default_timeout_s' = 7200 is not below 'max_timeout_s'"),
    ("beacon_fresh_s: 0.3", "beacon_fresh_s: 0.1", "'beacon_s' = 0.1 is not below 'beacon_fresh_s'"),
    # form
    ("drain_s: 30", "drain_s: 30\n  drain_s: 31", "key 'drain_s' given twice"),
    ("delivery: reply", "delivery: reply, retries: 3", "topics.events: unknown key 'retries'"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "expected"), MISSTEPS, ids=[f"{m[2][:60]}" for m in MISSTEPS])
def test_a_misstep_is_named_with_its_line(linted, old, new, expected):
    faults = linted((old, new))
    hits = [fault for fault in faults if expected in fault]
    assert hits, faults
    assert all(re.match(r"line \d+: ", fault) for fault in faults), faults


def test_every_fault_comes_in_one_go_and_in_the_order_of_the_file(linted):
    faults = linted(
        ("drain_s: 30", "drain_s: 0"),
        ("delivery: reply", "delivery: reply, retries: 3"),
        ("delivery: queue, group: lookup", "delivery: queue"),
        ("accept_tries: 3", "accept_tries: few"),
        ("duplicate_window_s: 120", "duplicate_window_s: 9999"),
    )
    assert len(faults) == 4, "limits that cannot be read are not weighed"
    lines = [int(fault.split(":")[0].removeprefix("line ")) for fault in faults]
    assert lines == sorted(lines)


def test_a_broken_record_causes_no_second_fault_elsewhere(linted):
    assert len(linted(("delivery: reply", "delivery: smoke"))) == 1


def test_check_raises_with_everything(tmp_path):
    path = tmp_path / "topics.yaml"
    path.write_text(
        TEXT.replace("drain_s: 30", "drain_s: 0").replace("accept_tries: 3", "accept_tries: 0"), encoding="utf-8"
    )
    with pytest.raises(TopologyError) as error:
        check(path)
    assert len(error.value.faults) == 2
    with pytest.raises(TopologyError, match="cannot be read"):
        check(tmp_path / "missing.yaml")


STAGES = """
from __future__ import annotations
from collections.abc import AsyncIterator
from pipeline import events
from pipeline.events import PrefixMatched, PromptEncoded, RequestBody

class Good:
    async def handle(self, event: events.RequestBody) -> AsyncIterator[PromptEncoded]:
        yield event

class NotAGenerator:
    async def handle(self, event: RequestBody) -> PromptEncoded: ...

class OtherEvent:
    async def handle(self, event: PrefixMatched) -> AsyncIterator[PromptEncoded]:
        yield event

class TwoArguments:
    async def handle(self, event: RequestBody, more: int) -> AsyncIterator[PromptEncoded]:
        yield event

class Bare:
    async def handle(self, event):
        yield event

class Nothing: ...

number = 7
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("{module}:Good", None),
        ("{module}:NotAGenerator", "'handle' is not an async generator"),
        ("{module}:OtherEvent", "'handle' takes PrefixMatched, its topics carry RequestBody"),
        ("{module}:TwoArguments", "'handle' must take one annotated event"),
        ("{module}:Bare", "'handle' must take one annotated event"),
        ("{module}:Nothing", "is of shape request and has no 'handle'"),
        ("{module}:Missing", "cannot be imported"),
        ("{module}:number", "is no class"),
        ("{module}.nowhere:Good", "cannot be imported"),
        ("{module}", "is not of the form module:Class"),
    ],
)
def test_the_code_of_a_stage_must_have_its_shape(tmp_path, monkeypatch, code, expected):
    (tmp_path / "stages_for_lint.py").write_text(STAGES, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    name = code.format(module="stages_for_lint")
    faults = check_code(read(TEXT.replace("stages.codec:Codec", name)).topology)
    mine = [fault for fault in faults if "stages.codec:" in fault]
    if expected is None:
        assert mine == []
        assert load_class(name).__name__ == "Good"
    else:
        assert any(expected in fault for fault in mine), faults


def test_an_engine_and_a_stream_without_their_methods_are_named():
    text = TEXT.replace("stages.prefill:Prefill", "collections:OrderedDict").replace(
        "stages.parse:Parse", "collections:deque"
    )
    faults = check_code(read(text).topology)
    for method in ("cancel", "holds", "load"):
        assert any(f"collections:OrderedDict is of shape engine and has no '{method}'" in fault for fault in faults)
    assert any("collections:deque is of shape stream and has no 'feed'" in fault for fault in faults)
    assert any("stages.prefill: collections:OrderedDict has no method 'submit'" in fault for fault in faults)


def test_an_event_that_does_not_exist_is_named():
    faults = check_code(read(TEXT.replace("event: Beacon", "event: Lighthouse")).topology)
    assert any("topics.beacon: there is no event 'Lighthouse' in pipeline.events" in fault for fault in faults)


def test_no_file_but_topics_yaml_names_a_subject():
    packages = ("tidemill", "pipeline", "stages", "kernels", "codec", "kv", "loadgen", "bench")
    sources = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(sources) > 10
    first_tokens = {topic.subject.split(".")[0] for topic in Topology.load().topics.values() if topic.subject}
    named = re.compile(rf"""["'](?:{"|".join(first_tokens)})\.[a-z_{{]""")
    offenders = [str(path.relative_to(ROOT)) for path in sources if _names_a_subject(path, named)]
    assert offenders == []


def _names_a_subject(path: Path, named: re.Pattern[str]) -> bool:
    code = re.sub(r'"""[\s\S]*?"""', "", path.read_text(encoding="utf-8"))  # a docstring may show an example
    return bool(named.search(code))
