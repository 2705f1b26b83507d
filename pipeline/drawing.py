"""topics.yaml drawn: the request's way as a Mermaid flowchart, all topics as a Markdown table; and the owner's states.

The README holds the first two between two markers, docs/protocol.md the last; tests say when they no longer match.
Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.events import StageFailed
from pipeline.owner import ON_TIMER, TABLE, CancelAsked, State, TimedOut
from pipeline.topology import OUTSIDE, Topic, Topology, TopologyError

MARKER = "topology"
OWNER_MARKER = "owner"

Step = tuple[State, State, str]  # of the owner: from, to, the signal


def graph(topology: Topology) -> str:
    """A flowchart of the request's way: who sends what to whom, and how it travels. Same topology, same text."""
    lines = ["flowchart LR"]
    lines += [f'    {name}(["{name}"])' for name in sorted(OUTSIDE)]
    for group in _processes(topology):
        if len(group) == 1:
            lines.append(f'    {group[0]}["{group[0]}"]')
            continue
        lines.append(f'    subgraph {"_".join(group)}["one process: {" + ".join(group)}"]')
        lines += [f'        {name}["{name}"]' for name in group]
        lines.append("    end")
    lines += [
        f'    {source} -->|"{_label(topic)}"| {target}'
        for topic in _way(topology)
        for source in topic.sources
        for target in topic.targets
    ]
    return "\n".join(lines) + "\n"


def table(topology: Topology) -> str:
    """All topics as a Markdown table, in the file's order."""
    lines = ["| topic | subject | delivery | event | from | to |", "|---|---|---|---|---|---|"]
    for topic in topology.topics.values():
        subjects = "<br>".join(f"`{subject}`" for subject in (topic.subject, topic.named) if subject)
        ends = (", ".join(topic.sources), ", ".join(topic.targets))
        lines.append(f"| {topic.name} | {subjects} | {_delivery(topic)} | {topic.event} | {ends[0]} | {ends[1]} |")
    return "\n".join(lines) + "\n"


def block(topology: Topology) -> str:
    """What the README holds between its markers."""
    return f"```mermaid\n{graph(topology)}```\n\n{table(topology)}"


def owner_graph() -> str:
    """A state diagram of pipeline.owner.TABLE: each edge with the signals that may take it, staying put left out.

    Two boxes, one in the other: what leads out of a box from each of its states is drawn once, from the box.
    """
    live = [state for state in State if (state, CancelAsked) in TABLE]
    running = [state for state in State if (state, StageFailed) in TABLE]
    steps = list(dict.fromkeys(_owner_steps()))
    of_live = _shared(steps, live)
    of_running = [step for step in _shared(steps, running) if step not in of_live]
    drawn_once = {*of_live, *of_running}
    alone = [(at, to, word) for at, to, word in steps if at not in live or (to, word) not in of_live]
    alone = [(at, to, word) for at, to, word in alone if at not in running or (to, word) not in drawn_once]
    inner = [step for step in alone if step[0] in running and step[1] in running]
    middle = [step for step in alone if step not in inner and step[0] in live and step[1] in live]
    outer = [step for step in alone if step not in inner and step not in middle]
    inside_live = [*middle, *(("running", to, word) for to, word in of_running if to in live)]
    outside = [*outer, *(("running", to, word) for to, word in of_running if to not in live)]
    outside += [("live", to, word) for to, word in of_live]
    lines = ["stateDiagram-v2", "    [*] --> new", "    state live {", "        state running {"]
    lines += [*_arrows(inner, 12), "        }", *_arrows(inside_live, 8), "    }", *_arrows(outside, 4)]
    return "\n".join([*lines, "    ended --> [*]"]) + "\n"


def owner_block() -> str:
    """What docs/protocol.md holds between its markers."""
    return f"```mermaid\n{owner_graph()}```"


def _shared(steps: Sequence[Step], box: Sequence[State]) -> list[tuple[State, str]]:
    """Targets outside a box and their signals, as far as each state of the box has them."""
    ways = dict.fromkeys((to, word) for at, to, word in steps if at in box and to not in box)
    return [(to, word) for to, word in ways if all((at, to, word) in steps for at in box)]


def _arrows(steps: Sequence[tuple[str, State, str]], indent: int) -> list[str]:
    edges: dict[tuple[str, State], list[str]] = {}
    for at, to, word in steps:
        edges.setdefault((at, to), []).append(word)
    return [f"{' ' * indent}{at} --> {to} : {', '.join(words)}" for (at, to), words in edges.items()]


def _owner_steps() -> Iterator[Step]:
    """State, another state, and the signal that may lead from one to the other; of a timer its name."""
    for (at, signal), row in TABLE.items():
        if signal is not TimedOut:
            yield from ((at, to, signal.__name__) for to in row.leads_to if to is not at)
    for (at, timer), row in ON_TIMER.items():
        yield from ((at, to, f"{timer} timer") for to in row.leads_to if to is not at)


def embed(text: str, marker: str, content: str) -> str:
    """The text with everything between `<!-- marker:begin -->` and `<!-- marker:end -->` replaced.

    Raises: TopologyError if the two markers are not there exactly once, in this order.
    """
    begin, end = f"<!-- {marker}:begin -->", f"<!-- {marker}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise TopologyError(f"the text needs '{begin}' and '{end}', once each and in this order")
    head, _, rest = text.partition(begin)
    return f"{head}{begin}\n{content.strip()}\n{end}{rest.partition(end)[2]}"


def stale(readme_text: str, topology: Topology) -> bool:
    """Whether the README shows another topology. Raises: TopologyError if it has no markers."""
    return embed(readme_text, MARKER, block(topology)) != readme_text


def _processes(topology: Topology) -> list[tuple[str, ...]]:
    """The stages in groups that run in one process, in the file's order."""
    groups: list[set[str]] = []
    for name, stage in topology.stages.items():
        group = {name, *stage.companions} & set(topology.stages)
        for other in [known for known in groups if known & group]:
            groups.remove(other)
            group |= other
        groups.append(group)
    order = list(topology.stages)
    return sorted((tuple(sorted(group, key=order.index)) for group in groups), key=lambda group: order.index(group[0]))


def _way(topology: Topology) -> Iterator[Topic]:
    """The topics that some stage lists: the others steer."""
    listed = {name for stage in topology.stages.values() for name in stage.inputs + stage.outputs}
    return (topic for topic in topology.topics.values() if topic.name in listed)


def _delivery(topic: Topic) -> str:
    detail = topic.stream or topic.group
    return topic.delivery.replace("_", " ") + (f" {detail}" if detail else "")


def _label(topic: Topic) -> str:
    return f"{topic.event}<br>{_delivery(topic)}"
