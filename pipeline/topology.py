"""topics.yaml as typed objects: which stages run, which subjects join them, and every limit and timeout.

Subjects are templates, `in.{request_class}.{tenant}` after the version: a parameter fills one whole token of
[A-Za-z0-9_-]+, so no value can widen a subject or break out of the protocol line. Reading collects every
fault before it complains; what the parts mean together is checked by `pipeline.lint`.
Source: facts-bus 11.2 for the shape; the table itself is ours.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

from pipeline import lined_yaml
from pipeline.lined_yaml import RecordReader

DEFAULT_PATH = Path(__file__).parent.parent / "topics.yaml"
OUTSIDE = frozenset({"publisher", "subscriber"})  # who may send and receive without being a stage
_TOKEN = re.compile(r"[A-Za-z0-9_-]+")
_PARAM = re.compile(r"\{([a-z_]+)\}")
_CACHED_SUBJECTS = 4096  # facts-bus 2.7: at most 512 hot literals per publisher; eight times that costs 1 MB


class TopologyError(ValueError):
    """topics.yaml, or a use of it, is wrong. `faults` holds every fault found, one line each."""

    def __init__(self, *faults: str) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


class Delivery(StrEnum):
    """How a topic's events travel; explained at the top of topics.yaml."""

    WORK_QUEUE = "work_queue"
    STREAM = "stream"
    QUEUE = "queue"
    DIRECT = "direct"
    BROADCAST = "broadcast"
    REPLY = "reply"
    LOCAL = "local"


class Shape(StrEnum):
    """The three shapes of a stage: event in and events out, an engine that steps, a stream that is fed."""

    REQUEST = "request"
    ENGINE = "engine"
    STREAM = "stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """A kind of event on its way: `sources` and `targets` are stages, `publisher` or `subscriber`."""

    name: str
    delivery: Delivery
    event: str
    sources: tuple[str, ...] = field(metadata={"key": "from"})
    targets: tuple[str, ...] = field(metadata={"key": "to"})
    subject: str = ""
    named: str = ""  # addresses one member of the queue group
    stream: str = ""
    group: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """A stage: its class as `module:Class`, its topics, and the stages that must run in the same process."""

    name: str
    code: str
    shape: Shape
    inputs: tuple[str, ...] = field(metadata={"key": "in"})
    outputs: tuple[str, ...] = field(metadata={"key": "out"})
    companions: tuple[str, ...] = field(default=(), metadata={"key": "with"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    """A JetStream stream. 0 in a cap or an age means the server's "unlimited"."""

    name: str
    subjects: tuple[str, ...]
    storage: str
    retention: str
    discard: str
    per_subject: bool = False  # `discard: new` counts per subject
    max_msgs: int = 0
    max_msgs_per_subject: int = 0
    max_bytes: int = 0
    max_age_s: float = 0.0
    duplicate_window_s: float = 0.0
    direct: bool = False  # any replica may answer a read by key


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSpec:
    """A durable pull consumer."""

    name: str
    stream: str
    filter: str
    ack_wait_s: float
    max_ack_pending: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Every limit and timeout, explained in topics.yaml. Seconds are floats, bytes and counts are ints."""

    max_body_bytes: int
    inline_share: float
    blob_part_bytes: int
    inline_ids_bytes: int
    default_timeout_s: float
    max_timeout_s: float
    end_grace_s: float
    accept_timeout_s: float
    accept_tries: int
    retry_pause_s: float
    find_timeout_s: float
    ack_in_progress_s: float
    ack_tokens_s: float
    repeat_end_s: float
    resend_after_s: float
    keep_tokens_s: float
    keep_finished_s: float
    tombstone_s: float
    beacon_s: float
    beacon_fresh_s: float
    holder_silent_s: float
    ping_timeout_s: float
    progress_s: float
    want_silence_s: float
    want_renew_s: float
    lease_s: float
    drain_s: float
    waiting_requests: int
    waiting_bytes: int
    max_attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """All of topics.yaml. `lines` maps `topics.intake` and the like to the line where it stands."""

    topics: Mapping[str, Topic]
    stages: Mapping[str, StageSpec]
    streams: Mapping[str, StreamSpec]
    consumers: Mapping[str, ConsumerSpec]
    limits: Limits
    lines: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)
    _filled: dict[tuple[object, ...], str] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def load(cls, path: Path | None = None) -> Topology:
        """Read topics.yaml. Raises: TopologyError with every fault of form (what it means: `pipeline.lint`)."""
        reading = read_file(path)
        if reading.faults:
            raise TopologyError(*reading.faults)
        return reading.topology

    def topic(self, name: str) -> Topic:
        """Raises: TopologyError if there is no such topic."""
        found = self.topics.get(name)
        if found is None:
            raise TopologyError(f"no topic '{name}' in topics.yaml")
        return found

    def subject(self, topic_name: str, **params: str) -> str:
        """The subject of a topic with every parameter filled in.

        Raises: TopologyError if a parameter is missing, unknown or not of [A-Za-z0-9_-]+, or the topic is local.
        """
        key = (topic_name, *params.items())
        found = self._filled.get(key)
        return self._fill(key, self._template(topic_name), params) if found is None else found

    def named(self, topic_name: str, worker: str) -> str:
        """The subject that reaches one worker: `named` of a queue topic, the subject of a direct one.

        Raises: TopologyError if the topic is neither, or needs more than a worker.
        """
        key = (topic_name, worker)
        found = self._filled.get(key)
        if found is not None:
            return found
        topic = self.topic(topic_name)
        template = topic.named or (topic.subject if topic.delivery is Delivery.DIRECT else "")
        if not template:
            raise TopologyError(f"topic '{topic_name}' does not address a worker by name")
        return self._fill(key, template, {"worker": worker})

    def pattern(self, topic_name: str, **params: str) -> str:
        """The subject to subscribe to: parameters that are not given become `*`.

        Raises: TopologyError as `subject` does.
        """
        template = self._template(topic_name)
        wanted = params_of(template)
        _check(topic_name, wanted, params)
        return _join(template, {name: params.get(name, "*") for name in wanted})

    def params(self, topic_name: str, subject: str) -> dict[str, str]:
        """The parameters in a received subject. Raises: TopologyError if it is not one of this topic."""
        values: dict[str, str] = {}
        template, tokens = self._template(topic_name).split("."), subject.split(".")
        if len(template) != len(tokens):
            raise TopologyError(f"'{subject}' is not a subject of topic '{topic_name}'")
        for want, got in zip(template, tokens, strict=True):
            if param := _PARAM.fullmatch(want):
                values[param[1]] = got
            elif want != got:
                raise TopologyError(f"'{subject}' is not a subject of topic '{topic_name}'")
        _check(topic_name, tuple(values), values)
        return values

    def group(self, topic_name: str) -> str:
        """The queue group of a topic; '' if it has none."""
        return self.topic(topic_name).group

    def _template(self, topic_name: str) -> str:
        template = self.topic(topic_name).subject
        if not template:
            raise TopologyError(f"topic '{topic_name}' is local: it has no subject")
        return template

    def _fill(self, key: tuple[object, ...], template: str, params: Mapping[str, str]) -> str:
        topic_name, wanted = str(key[0]), params_of(template)
        _check(topic_name, wanted, params)
        if missing := [name for name in wanted if name not in params]:
            raise TopologyError(f"topic '{topic_name}': parameter '{missing[0]}' is missing")
        if len(self._filled) >= _CACHED_SUBJECTS:
            self._filled.clear()
        subject = self._filled[key] = _join(template, params)
        return subject


def _check(topic_name: str, wanted: tuple[str, ...], params: Mapping[str, object]) -> None:
    for name, value in params.items():
        if name not in wanted:
            raise TopologyError(f"topic '{topic_name}' has no parameter '{name}'")
        if not isinstance(value, str) or not _TOKEN.fullmatch(value):
            raise TopologyError(f"topic '{topic_name}': parameter '{name}' = {value!r} is not of [A-Za-z0-9_-]+")


@lru_cache(maxsize=256)
def params_of(template: str) -> tuple[str, ...]:
    """The parameter names of a subject template, in order."""
    return tuple(_PARAM.findall(template))


def wildcard(template: str) -> str:
    """The template with every parameter as `*`."""
    return _PARAM.sub("*", template)


def _join(template: str, params: Mapping[str, str]) -> str:
    return _PARAM.sub(lambda found: params[found[1]], template)


@dataclass(slots=True, kw_only=True)
class Reading:
    """A file as far as it could be read. `broken` names (`topics.intake`) were declared but are faulty."""

    topology: Topology
    faults: list[str]
    broken: set[str]


def read(text: str) -> Reading:
    """Read topics.yaml's text as far as possible; never raises. Broken limits read as 0."""
    reader = RecordReader()
    top, reader.faults = lined_yaml.load(text)
    if not reader.faults and top.get("version") != 1:
        reader.fault(top.lines.get("version", 1), "version", f"is {top.get('version')!r}, this program reads 1")
    for key in top.keys() - {"version", "stages", "topics", "streams", "consumers", "limits"}:
        reader.fault(top.lines[key], key, "unknown section")
    limits = reader.values(reader.section(top, "limits"), "limits", Limits)
    topology = Topology(
        topics=reader.records(top, "topics", Topic),
        stages=reader.records(top, "stages", StageSpec),
        streams=reader.records(top, "streams", StreamSpec),
        consumers=reader.records(top, "consumers", ConsumerSpec),
        limits=Limits(**{item.name: limits.get(item.name) or 0 for item in dataclasses.fields(Limits)}),
        lines=reader.lines,
    )
    return Reading(topology=topology, faults=reader.faults, broken=reader.broken)


def read_file(path: Path | None = None) -> Reading:
    """Read a file as far as possible; topics.yaml beside the packages by default.

    Raises: TopologyError if it cannot be read at all.
    """
    try:
        return read((path or DEFAULT_PATH).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise TopologyError(f"{path or DEFAULT_PATH} cannot be read: {error}") from error
