"""What the engine stages know of constraints: how to begin and to take up one. The library behind it is another file's.

So a worker whose engine cannot constrain (the stub) loads none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from pipeline.events import FinishReason
from stages.engine.interface import OutputConstraint

Follow = Callable[[Sequence[int]], OutputConstraint]  # tokens of the answer so far -> the state after them


class ConstraintError(Exception):
    """A constraint that cannot be served: it ends its request, and no other, with `finish` and says why.

    `finish`: GRAMMAR_ERROR, or GRAMMAR_TIMEOUT when compiling took too long.
    """

    def __init__(self, finish: FinishReason, reason: str) -> None:
        super().__init__(reason)
        self.finish = finish
        self.reason = reason


class Constraints(Protocol):
    """Compiles constraint texts (events.Sampling.grammar), off the event loop. Raises: ConstraintError."""

    async def begin(self, text: str) -> OutputConstraint:
        """The state before the first token."""
        ...

    async def follow(self, text: str) -> Follow:
        """How to take up an answer."""
        ...
