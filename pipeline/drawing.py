"""topics.yaml drawn: the request's way as a Mermaid flowchart, all topics as a Markdown table.

The README holds both between two markers; `stale` says when they no longer match. Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.topology import OUTSIDE, Topic, Topology, TopologyError

MARKER = "topology"


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
