"""Stop strings in a text that arrives in pieces: an Aho-Corasick automaton, so that the pieces do not matter.

Held back is exactly the longest suffix that may still become a stop string. The match that ends first wins; of those
that end together the longest, so that nothing of a stop string is ever shown. Cost per character does not depend on
the number or length of the stop strings.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache


class StopAutomaton:
    """The tables of one set of stop strings. Node 0 is the root; immutable once built, shared between streams.

    children: [node] character -> node; fail: [node] node of its longest proper suffix; depth: [node] characters;
    match: [node] length of the longest stop string that ends here, 0 = none.
    """

    __slots__ = ("children", "depth", "fail", "match")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.match = [0]
        for stop in stops:
            self._insert(stop)
        self.fail = [0] * len(self.children)
        self._link()

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            if char not in self.children[node]:
                self.children[node][char] = len(self.children)
                self.children.append({})
                self.depth.append(self.depth[node] + 1)
                self.match.append(0)
            node = self.children[node][char]
        self.match[node] = len(stop)

    def _link(self) -> None:
        queue = deque(self.children[0].values())  # breadth first: a suffix is always shorter, so already linked
        while queue:
            node = queue.popleft()
            for char, child in self.children[node].items():
                self.fail[child] = self.step(self.fail[node], char)
                self.match[child] = self.match[child] or self.match[self.fail[child]]
                queue.append(child)

    def step(self, node: int, char: str) -> int:
        """The node after `char`."""
        while char not in self.children[node]:
            if node == 0:
                return 0
            node = self.fail[node]
        return self.children[node][char]


@lru_cache(maxsize=32)  # clients repeat their stop strings; the largest allowed set takes about 1.5 MB
def automaton(stops: tuple[str, ...]) -> StopAutomaton:
    """The shared automaton of a set of stop strings."""
    return StopAutomaton(stops)


class StopMatcher:
    """One stream's position in the automaton.

    `held` is text that may still become a stop string; `found` becomes True at the end of the first stop string.
    """

    __slots__ = ("_automaton", "_node", "found", "held")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._automaton = automaton(stops)
        self._node = 0
        self.held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """The text that is now known to precede any stop string; nothing after one was found."""
        if self.found:
            return ""
        buffer = self.held + text
        tables, node = self._automaton, self._node
        for end, char in enumerate(text, len(self.held) + 1):
            node = tables.step(node, char)
            if tables.match[node]:
                self.found, self.held = True, ""
                return buffer[: end - tables.match[node]]
        self._node = node
        keep = len(buffer) - tables.depth[node]
        self.held = buffer[keep:]
        return buffer[:keep]
