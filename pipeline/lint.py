"""What topics.yaml must mean: a closed graph, subjects that do not collide, streams that hold exactly their topics.

Every check yields one line per fault and none stops another, so that one run names everything. Records that are
faulty in form (unknown keys, wrong types; see `pipeline.topology`) are left out of the other checks.
Source: ours; the server's own rules for streams and consumers: facts-bus 3.4.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from pathlib import Path

from pipeline.code_check import check_code as _check_code
from pipeline.topology import (
    OUTSIDE,
    Delivery,
    Reading,
    Topic,
    Topology,
    TopologyError,
    params_of,
    read_file,
    wildcard,
)

# Fields of a topic that each delivery kind needs; any other of _OPTIONAL is a fault, save `named` for a queue.
_NEEDED: dict[Delivery, frozenset[str]] = {
    Delivery.WORK_QUEUE: frozenset({"subject", "stream"}),
    Delivery.STREAM: frozenset({"subject", "stream"}),
    Delivery.QUEUE: frozenset({"subject", "group"}),
    Delivery.DIRECT: frozenset({"subject"}),
    Delivery.BROADCAST: frozenset({"subject"}),
    Delivery.REPLY: frozenset({"subject"}),
    Delivery.LOCAL: frozenset(),
}
_OPTIONAL = ("subject", "named", "stream", "group")
_TEMPLATE = re.compile(r"(?:[A-Za-z0-9_-]+|\{[a-z_]+\})(?:\.(?:[A-Za-z0-9_-]+|\{[a-z_]+\}))*")
_PATTERN = re.compile(r"(?:>|(?:[A-Za-z0-9_-]+|\*)(?:\.(?:[A-Za-z0-9_-]+|\*))*(?:\.>)?)")
_STREAM_WORDS = {
    "storage": ("file", "memory"),
    "retention": ("workqueue", "limits", "interest"),
    "discard": ("new", "old"),
}

# What must be smaller, what larger, and why.
_ORDER = (
    ("accept_timeout_s", "find_timeout_s", "an accept is answered before anyone asks who holds the request"),
    ("find_timeout_s", "holder_silent_s", "a holder is found faster than it is suspected"),
    ("beacon_s", "beacon_fresh_s", "a beacon stays fresh until the next one"),
    ("beacon_fresh_s", "holder_silent_s", "a holder is suspected after its beacon is stale"),
    ("retry_pause_s", "progress_s", "retries happen while the subscriber is told to wait"),
    ("ack_tokens_s", "repeat_end_s", "an end is acknowledged before it is repeated"),
    ("resend_after_s", "ack_tokens_s", "a gap is asked for before it would be acknowledged around"),
    ("repeat_end_s", "keep_tokens_s", "an end is repeated while its tokens are kept"),
    ("want_renew_s", "want_silence_s", "a subscriber renews before it counts as gone"),
    ("default_timeout_s", "max_timeout_s", "the default is an allowed timeout"),
    ("blob_part_bytes", "max_body_bytes", "a body may need parts"),
    ("inline_ids_bytes", "max_body_bytes", "ids are smaller than the largest body"),
)
_EQUAL_ALLOWED = frozenset({"default_timeout_s", "inline_ids_bytes", "blob_part_bytes"})
STREAM_AGE_SLACK_S = 600  # design 2.1: max_age = longest allowed timeout + 10 min


def lint(path: Path | None = None, *, check_code: bool = False) -> list[str]:
    """Every fault of topics.yaml, one line each, in the file's order; empty = none.

    Raises: TopologyError if the file cannot be read.
    `check_code` also imports each stage's class and looks for its shape, and each event in `pipeline.events`.
    """
    reading = read_file(path)
    faults = list(reading.faults)
    for check in CHECKS:
        faults += check(reading)
    if check_code:
        faults += _check_code(reading.topology)
    return sorted(dict.fromkeys(faults), key=_line)


def check(path: Path | None = None, *, check_code: bool = False) -> Topology:
    """The topology, if it has no fault. Raises: TopologyError with all of them."""
    if faults := lint(path, check_code=check_code):
        raise TopologyError(*faults)
    return Topology.load(path)


def overlap(one: str, other: str) -> bool:
    """Whether some subject matches both patterns."""
    left, right = one.split("."), other.split(".")
    for a, b in zip(left, right, strict=False):
        if ">" in (a, b):
            return True
        if a != b and "*" not in (a, b):
            return False
    return len(left) == len(right)


def covers(wide: str, narrow: str) -> bool:
    """Whether every subject of `narrow` matches `wide`."""
    left, right = wide.split("."), narrow.split(".")
    for a, b in zip(left, right, strict=False):
        if a == ">":
            return True
        if b == ">" or (a not in ("*", b)):
            return False
    return len(left) == len(right)


def _line(fault: str) -> int:
    found = re.match(r"line (\d+):", fault)
    return int(found[1]) if found else 0


def _fault(topology: Topology, where: str, what: str) -> str:
    line = topology.lines.get(where)
    return f"line {line}: {where}: {what}" if line else f"{where}: {what}"


def _fields(reading: Reading) -> Iterator[str]:
    """Each delivery kind has the fields it needs and no other."""
    for topic in reading.topology.topics.values():
        needed = _NEEDED[topic.delivery]
        allowed = needed | {"named"} if topic.delivery is Delivery.QUEUE else needed
        for key in _OPTIONAL:
            given, where = bool(getattr(topic, key)), f"topics.{topic.name}"
            if key in needed and not given:
                yield _fault(reading.topology, where, f"delivery {topic.delivery} needs '{key}'")
            if given and key not in allowed:
                yield _fault(reading.topology, where, f"delivery {topic.delivery} has no '{key}'")
        if topic.delivery is Delivery.DIRECT and "worker" not in params_of(topic.subject):
            yield _fault(reading.topology, f"topics.{topic.name}", "delivery direct needs {worker} in its subject")
        if topic.named and params_of(topic.named) != ("worker",):
            yield _fault(reading.topology, f"topics.{topic.name}", "'named' takes exactly one parameter, {worker}")


def _syntax(reading: Reading) -> Iterator[str]:
    """Subjects are made of tokens that NATS takes and parameters that fill whole tokens, each once."""
    topology = reading.topology
    for topic in topology.topics.values():
        for template in filter(None, (topic.subject, topic.named)):
            names = params_of(template)
            if not _TEMPLATE.fullmatch(template):
                yield _fault(
                    topology, f"topics.{topic.name}", f"'{template}' is no subject of tokens and {{parameters}}"
                )
            if len(set(names)) != len(names):
                yield _fault(topology, f"topics.{topic.name}", f"'{template}' names a parameter twice")


def _pattern_syntax(reading: Reading) -> Iterator[str]:
    """Streams and consumers have patterns that NATS takes, and the words that JetStream knows."""
    topology = reading.topology
    for stream in topology.streams.values():
        for subject in stream.subjects:
            if not _PATTERN.fullmatch(subject):
                yield _fault(topology, f"streams.{stream.name}", f"'{subject}' is no subject pattern")
        for key, words in _STREAM_WORDS.items():
            if getattr(stream, key) not in words:
                yield _fault(topology, f"streams.{stream.name}", f"'{key}' is one of {', '.join(words)}")
    for consumer in topology.consumers.values():
        if not _PATTERN.fullmatch(consumer.filter):
            yield _fault(topology, f"consumers.{consumer.name}", f"'{consumer.filter}' is no subject pattern")


def _references(reading: Reading) -> Iterator[str]:
    """Whatever is referred to by name is declared."""
    topology = reading.topology
    known = {
        section: {*getattr(topology, section), *_names(reading.broken, section)}
        for section in ("stages", "topics", "streams")
    }

    def missing(where: str, names: Iterable[str], section: str, also: frozenset[str] = frozenset()) -> Iterator[str]:
        for name in names:
            if name not in known[section] | also:
                yield _fault(topology, where, f"there is no {section.removesuffix('s')} '{name}'")

    for stage in topology.stages.values():
        yield from missing(f"stages.{stage.name}", stage.inputs + stage.outputs, "topics")
        yield from missing(f"stages.{stage.name}", stage.companions, "stages")
    for topic in topology.topics.values():
        yield from missing(f"topics.{topic.name}", topic.sources + topic.targets, "stages", OUTSIDE)
        yield from missing(f"topics.{topic.name}", filter(None, [topic.stream]), "streams")
    for consumer in topology.consumers.values():
        yield from missing(f"consumers.{consumer.name}", [consumer.stream], "streams")


def _names(broken: Iterable[str], section: str) -> set[str]:
    return {where.partition(".")[2] for where in broken if where.startswith(f"{section}.")}


def _agreement(reading: Reading) -> Iterator[str]:
    """Stages and topics say the same of each other, and every topic has two ends."""
    topology = reading.topology
    for stage in topology.stages.values():
        for other in stage.companions:
            if other in topology.stages and stage.name not in topology.stages[other].companions:
                yield _fault(topology, f"stages.{stage.name}", f"'with' names {other}, which does not name it")
    for topic in topology.topics.values():
        where = f"topics.{topic.name}"
        for key, ends in (("from", topic.sources), ("to", topic.targets)):
            if not ends:
                yield _fault(topology, where, f"'{key}' names nobody")
        yield from (_fault(topology, where, what) for what in _listed(topology, topic))


def _listed(topology: Topology, topic: Topic) -> Iterator[str]:
    """A topic that some stage lists is listed by all stages at its ends."""
    producers = {stage.name for stage in topology.stages.values() if topic.name in stage.outputs}
    consumers = {stage.name for stage in topology.stages.values() if topic.name in stage.inputs}
    if not producers and not consumers:
        return  # it steers; stages list only the request's way
    sources, targets = set(topic.sources) & set(topology.stages), set(topic.targets) & set(topology.stages)
    for stage in sorted(sources - producers):
        yield f"comes from {stage}, whose 'out' does not list it"
    for stage in sorted(producers - sources):
        yield f"is listed in 'out' of {stage}, which is not in its 'from'"
    for stage in sorted(targets - consumers):
        yield f"goes to {stage}, whose 'in' does not list it"
    for stage in sorted(consumers - targets):
        yield f"is listed in 'in' of {stage}, which is not in its 'to'"


def _way(reading: Reading) -> Iterator[str]:
    """Every stage lies on a way from the publisher to the subscriber."""
    topology = reading.topology
    if any(where.startswith(("topics.", "stages.")) for where in reading.broken):
        return  # it would seem broken wherever a record is missing
    listed = {name for stage in topology.stages.values() for name in stage.inputs + stage.outputs}
    topics = [topic for topic in topology.topics.values() if topic.name in listed]
    edges = {(source, target) for topic in topics for source in topic.sources for target in topic.targets}
    fed = _reachable("publisher", edges)
    heard = _reachable("subscriber", {(target, source) for source, target in edges})
    for stage in topology.stages:
        if stage not in fed:
            yield _fault(topology, f"stages.{stage}", "nothing that a publisher sends ever reaches it")
        if stage not in heard:
            yield _fault(topology, f"stages.{stage}", "nothing it sends ever reaches a subscriber")
    if "subscriber" not in fed:
        yield _fault(topology, "topics", "there is no way from the publisher to the subscriber")


def _reachable(start: str, edges: set[tuple[str, str]]) -> set[str]:
    found, todo = {start}, [start]
    while todo:
        here = todo.pop()
        fresh = {target for source, target in edges if source == here} - found
        found |= fresh
        todo += fresh
    return found


def _collisions(reading: Reading) -> Iterator[str]:
    """No subject belongs to two topics."""
    topology = reading.topology
    patterns = [
        (topic.name, wildcard(template))
        for topic in topology.topics.values()
        for template in (topic.subject, topic.named)
        if template
    ]
    for (name, pattern), (other, other_pattern) in combinations(patterns, 2):
        if overlap(pattern, other_pattern):
            yield _fault(topology, f"topics.{other}", f"'{other_pattern}' overlaps '{pattern}' of topic {name}")


def _streams(reading: Reading) -> Iterator[str]:
    """Streams hold exactly their topics, and what they hold is consumed by exactly one consumer if it is a queue."""
    topology = reading.topology
    for stream in topology.streams.values():
        where = f"streams.{stream.name}"
        topics = {t.name: wildcard(t.subject) for t in topology.topics.values() if t.stream == stream.name}
        others = {
            t.name: wildcard(t.subject) for t in topology.topics.values() if t.stream != stream.name and t.subject
        }
        filters = [c.filter for c in topology.consumers.values() if c.stream == stream.name]
        queue = stream.retention == "workqueue"
        for subject in stream.subjects:
            if not any(covers(pattern, subject) for pattern in topics.values()):
                yield _fault(topology, where, f"'{subject}' takes more than the subjects of its topics")
            for name in (name for name, pattern in others.items() if overlap(pattern, subject)):
                yield _fault(
                    topology, where, f"'{subject}' takes subjects of topic {name}, which does not name the stream"
                )
            if queue and not any(covers(pattern, subject) for pattern in filters):
                yield _fault(topology, where, f"'{subject}' takes messages that no consumer's filter lets out again")
        for name, pattern in topics.items():
            # a queue may take a part of a topic: what it refuses has no responder, and the publisher is told
            held = overlap if queue else covers
            if not any(held(subject, pattern) for subject in stream.subjects):
                yield _fault(topology, where, f"does not hold '{pattern}' of topic {name}")
            if (topology.topics[name].delivery is Delivery.WORK_QUEUE) != queue:
                yield _fault(topology, where, f"retention {stream.retention} does not fit topic {name}")
        if 0 < stream.max_age_s < stream.duplicate_window_s:
            yield _fault(topology, where, "'duplicate_window_s' exceeds 'max_age_s', which the server refuses")


def _consumers(reading: Reading) -> Iterator[str]:
    """Consumers of a work queue divide it; an acknowledgement in progress comes before the server gives up."""
    topology = reading.topology
    for consumer in topology.consumers.values():
        where, stream = f"consumers.{consumer.name}", topology.streams.get(consumer.stream)
        if stream and not any(covers(subject, consumer.filter) for subject in stream.subjects):
            yield _fault(topology, where, f"'{consumer.filter}' asks for more than stream {stream.name} holds")
        if "limits" not in reading.broken and consumer.ack_wait_s <= 2 * topology.limits.ack_in_progress_s:
            yield _fault(topology, where, "'ack_wait_s' leaves no room for one lost acknowledgement in progress")
        if consumer.max_ack_pending <= 0:
            yield _fault(topology, where, "'max_ack_pending' must be positive")
    for one, other in combinations(topology.consumers.values(), 2):
        queue = one.stream in topology.streams and topology.streams[one.stream].retention == "workqueue"
        if queue and one.stream == other.stream and overlap(one.filter, other.filter):
            yield _fault(
                topology, f"consumers.{other.name}", f"its filter overlaps that of {one.name}: refused by the server"
            )


def _limits(reading: Reading) -> Iterator[str]:
    """Limits are positive and fit together."""
    topology, limits = reading.topology, reading.topology.limits
    if "limits" in reading.broken:
        return
    for name in limits.__dataclass_fields__:
        if getattr(limits, name) <= 0:
            yield _fault(topology, "limits", f"'{name}' must be positive")
    if limits.inline_share > 1:
        yield _fault(topology, "limits", "'inline_share' is a share: at most 1")
    for small, large, why in _ORDER:
        less, more = getattr(limits, small), getattr(limits, large)
        if less > more or (less == more and small not in _EQUAL_ALLOWED):
            yield _fault(topology, "limits", f"'{small}' = {less:g} is not below '{large}' = {more:g}: {why}")
    for stream in topology.streams.values():
        if 0 < stream.max_age_s < limits.max_timeout_s + STREAM_AGE_SLACK_S:
            yield _fault(
                topology, f"streams.{stream.name}", f"'max_age_s' is below max_timeout_s + {STREAM_AGE_SLACK_S} s"
            )


CHECKS: tuple[Callable[[Reading], Iterator[str]], ...] = (
    _fields, _syntax, _pattern_syntax, _references, _agreement, _way, _collisions, _streams, _consumers, _limits,
)  # fmt: skip
