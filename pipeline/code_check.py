"""Whether the code that topics.yaml names is there and has the shape it claims.

Stages are imported by their path, so the fabric needs no import of theirs. Source: ours.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator

from pipeline import events
from pipeline.topology import Delivery, Shape, StageSpec, Topology, TopologyError

# The methods by which each shape is driven; `feed` of a stream is often an attribute, bound once.
_METHODS = {
    Shape.REQUEST: ("handle",),
    Shape.ENGINE: ("cancel", "holds", "load"),
    Shape.STREAM: ("feed", "finish"),
}
_OFFERED = {Shape.REQUEST: "handle", Shape.ENGINE: "submit"}  # what takes an event of the stage's input topics


def load_class(code: str) -> type:
    """The class at `module:Class`. Raises: TopologyError if it is not there."""
    module_name, colon, class_name = code.partition(":")
    if not colon or not module_name or not class_name:
        raise TopologyError(f"'{code}' is not of the form module:Class")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise TopologyError(f"'{code}' cannot be imported: {error}") from error
    if not isinstance(found, type):
        raise TopologyError(f"'{code}' is no class")
    return found


def check_code(topology: Topology) -> list[str]:
    """Every fault of the code named by a topology, one line each."""
    faults: list[str] = []
    for stage in topology.stages.values():
        try:
            cls = load_class(stage.code)
        except TopologyError as error:
            problems = list(error.faults)
        else:
            problems = [f"{stage.code} {problem}" for problem in _shape(topology, stage, cls)]
        faults += [_fault(topology, f"stages.{stage.name}", problem) for problem in problems]
    # frames, bodies and pings are no msgpack structs; where they are defined is said there
    elsewhere = getattr(events, "OTHER_FORMATS", ())
    for topic in topology.topics.values():
        if not hasattr(events, topic.event) and topic.event not in elsewhere:
            faults.append(
                _fault(topology, f"topics.{topic.name}", f"there is no event '{topic.event}' in pipeline.events")
            )
    return faults


def _fault(topology: Topology, where: str, what: str) -> str:
    return f"line {topology.lines.get(where, 0)}: {where}: {what}"


def _shape(topology: Topology, stage: StageSpec, cls: type) -> Iterator[str]:
    """What the class lacks of its shape."""
    for method in _METHODS[stage.shape]:
        if not hasattr(cls, method) and method not in inspect.get_annotations(cls):
            yield f"is of shape {stage.shape} and has no '{method}'"
    # what comes from inside the process is handed over by a companion, in its own way
    topics = [topology.topics[name] for name in stage.inputs if name in topology.topics]
    wanted = {topic.event for topic in topics if topic.delivery is not Delivery.LOCAL}
    method = _OFFERED.get(stage.shape, "")
    if method and wanted:
        yield from _signature(cls, method, wanted, generator=stage.shape is Shape.REQUEST)


def _signature(cls: type, method: str, wanted: set[str], *, generator: bool) -> Iterator[str]:
    """`method(self, event: E)`, with E the event (or the union of the events) of the stage's input topics."""
    function = getattr(cls, method, None)
    if not inspect.isfunction(function):
        yield f"has no method '{method}'"
        return
    if generator and not inspect.isasyncgenfunction(function):
        yield f"'{method}' is not an async generator"
    parameters = list(inspect.signature(function).parameters.values())[1:]
    if len(parameters) != 1 or parameters[0].annotation is inspect.Parameter.empty:
        yield f"'{method}' must take one annotated event"
        return
    annotation = parameters[0].annotation
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    taken = {part.strip().rpartition(".")[2] for part in text.split("|")}
    if taken != wanted:
        yield f"'{method}' takes {text}, its topics carry {' | '.join(sorted(wanted))}"
