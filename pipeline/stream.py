"""One choice of one request in its owner: tokens in, numbered events out, a window, a resume from any number.

Tokens are kept (4 bytes each) and events are re-derived from them at will: a slow or reconnecting reader never pauses
a decode step. A later attempt of the same request must repeat the tokens that are already here; the first one that
differs ends the stream as `stream_lost`, never as a contradiction. Source: design 2.5-2.7.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import orjson

from pipeline.delivery import Subscriber
from pipeline.events import FINISH_CODES, Plan
from pipeline.stage import TokenStream

MAX_NUMBER = (1 << 32) - 1  # of an event: u32 in the batch form
# Tokens re-derived in one go before the loop gets its turn: 1 us each, so 2 ms. Source: design 8 (stall < 5 ms).
PUMP_TOKENS = 2_000
UNLIMITED_BYTES = 1 << 62
MAX_WINDOW_BYTES = 64 << 20  # a subscriber cannot make the broker hold more for it than its max_pending


class Columns(Protocol):
    """Where the running state of many plain streams lies side by side (pipeline/plain.py)."""

    def recall(self, stream: Stream) -> None:
        """Bring the stream's own fields up to date and let go of it."""
        ...


def nothing(*_: object) -> None:
    """What happens until somebody wants to know."""


class ContradictionError(Exception):
    """A later attempt produced another token than the one delivered."""


@dataclass(slots=True)
class Ending:
    """How a choice ends: with a finish reason, or with a ready-made error event."""

    name: str
    failure: bytes | None = None


class NoTokens:
    """The parser of a stream that is not open yet, or that ends before it could be: it is given no token."""

    can_stop = True  # nothing runs on before the real one has been asked
    stopped = False
    pieces = None
    frame = (b"", b"")

    def feed(self, token: int) -> bytes | None:
        """Never called. Raises: AssertionError."""
        raise AssertionError(f"token {token} for a stream that is not open")

    def passed(self, num_tokens: int) -> None:
        """See TokenStream."""

    def finish(self, reason: str, _plan: Plan, num_tokens: int) -> bytes:
        """The last event of a request that was never encoded."""
        return orjson.dumps({"type": "ended", "reason": reason, "tokens": num_tokens})


class Stream:
    """One choice of one request in its owner. Positions count tokens, numbers count events."""

    __slots__ = (
        "acked",
        "ahead",
        "at",
        "before_end",
        "choice",
        "columns",
        "cumulative",
        "end_seen",
        "ending",
        "fed",
        "finish_at",
        "first_windowed",
        "gap_since",
        "handle",
        "limit_bytes",
        "n",
        "open_parser",
        "out",
        "parser",
        "plain",
        "plan",
        "prefix",
        "rid",
        "sent_bytes",
        "skip_below",
        "source",
        "terminal_n",
        "tokens",
    )

    def __init__(self, rid: str, choice: int, open_parser: Callable[[], TokenStream], out: Subscriber) -> None:
        self.rid = rid
        self.choice = choice
        self.open_parser = open_parser
        self.parser: TokenStream = NoTokens()
        self.out = out
        self.prefix = b""
        self.handle = 0
        self.tokens = array("I")
        self.at = 0  # next position expected of the present attempt
        self.acked = 0
        self.end_seen = False  # the engine's own end of the present attempt is here
        self.ahead: dict[int, tuple[tuple[int, ...], int]] = {}  # rows that arrived before their turn
        self.gap_since = 0.0
        self.source = ""  # where acknowledgements go
        self.finish_at = -1
        self.ending: Ending | None = None
        self.plan: Plan | None = None
        self.fed = 0  # tokens given to the parser
        self.n = 0  # number of the next event
        self.skip_below = 0  # events below are known to the subscriber
        self.terminal_n = -1
        self.sent_bytes = 0
        self.limit_bytes = -1  # -1: no Want yet, nothing is held back
        self.first_windowed = 0
        self.cumulative = array("Q")  # sent_bytes before event first_windowed + i
        self.before_end: Callable[[], None] = nothing
        self.plain = False  # see settle
        self.columns: Columns | None = None  # while it is plain and runs there

    def begin_attempt(self, handle: int, prefix: bytes) -> None:
        """Tokens of a new attempt come next, from position 0, under a new handle."""
        self.recall()
        self.handle = handle
        self.prefix = prefix
        self.at = 0
        self.acked = 0
        self.end_seen = False
        self.source = ""
        self.ahead.clear()
        self.plain = False

    @property
    def over(self) -> bool:
        """Whether its end is known; every token up to there is then here, of whatever attempt."""
        return self.finish_at >= 0

    def may_run_on(self, position: int) -> bool:
        """Whether a token at this position can only cause one more event, here and now."""
        open_window = self.limit_bytes < 0 or self.sent_bytes < self.limit_bytes
        return self.plain and self.columns is None and position == self.at and open_window

    def run_on(self, token: int) -> None:
        """Take such a token: what `receive` and `pump` would do, unrolled, because nearly every token is one."""
        self.tokens.append(token)
        self.at += 1
        self.fed += 1
        event = self.parser.feed(token)
        if event is not None:
            self.emit(event)

    def open(self) -> None:
        """Have the parser ready. The first `pump` does it at the latest: it is no part of a request's way to lookup."""
        if isinstance(self.parser, NoTokens):
            self.parser = self.open_parser()

    def recall(self) -> None:
        """Have the fields here say what is: do this before reading or changing them."""
        if self.columns is not None:
            self.columns.recall(self)

    def passed(self, tokens: bytes, sizes: npt.NDArray[np.int64]) -> None:
        """Tokens (u32) that ran on elsewhere, one event each, of these sizes."""
        count = len(sizes)
        self.tokens.frombytes(tokens)
        self.at += count
        self.fed += count
        self.n += count
        ends = np.cumsum(sizes, dtype=np.uint64) + np.uint64(self.sent_bytes)
        if self.limit_bytes >= 0:
            self.cumulative.frombytes((ends - sizes.astype(np.uint64)).tobytes())
        self.sent_bytes = int(ends[-1])
        self.parser.passed(count)

    def settle(self) -> None:
        """Work out whether the next token in order can only cause its event: nothing ends, waits or is held back."""
        self.plain = (
            not self.ahead
            and self.finish_at < 0
            and self.n >= self.skip_below
            and self.fed == self.at == len(self.tokens)
            and not self.parser.can_stop
        )

    def receive(self, position: int, tokens: tuple[int, ...], finish: int) -> None:
        """Take a row whose first position is not beyond `at`; what is known already is compared.

        Raises: ContradictionError.
        """
        self.recall()
        if position + len(tokens) <= self.at:
            self.acked = -1  # a repeat: our acknowledgement was lost, so say it again
        known = self.tokens
        for token in tokens[max(0, self.at - position) :]:
            if self.at < len(known):
                if known[self.at] != token:
                    raise ContradictionError(f"position {self.at} was {known[self.at]}, attempt repeats {token}")
            else:
                known.append(token)
            self.at += 1
        self.end_seen = self.end_seen or finish > 0
        if finish and self.finish_at < 0:
            if self.at < len(known):
                raise ContradictionError(f"{len(known)} tokens are here, attempt ends after {self.at}")
            self.finish_at = self.at
            self.ending = self.ending or Ending(FINISH_CODES[finish - 1])

    def drain_ahead(self) -> None:
        """Rows that waited for a gap to close."""
        while self.ahead:
            position = min(self.ahead)
            if position > self.at:
                return
            tokens, finish = self.ahead.pop(position)
            self.receive(position, tokens, finish)

    def end(self, ending: Ending) -> None:
        """End here, whatever the engine still sends."""
        self.recall()
        self.ending = ending
        self.plain = False
        if self.finish_at < 0:
            self.finish_at = len(self.tokens)

    def give_up(self) -> None:
        """The parser failed: it is given no further token, and the events so far are all there will be."""
        self.recall()
        self.plain = False
        self.finish_at = self.fed
        self.ending = None

    def pump(self) -> bool:
        """Feed the parser and publish events while the window is open; True when more could be done at once."""
        self.open()
        budget = PUMP_TOKENS
        tokens, parser = self.tokens, self.parser
        end = self.finish_at if self.finish_at >= 0 else len(tokens)
        while self.fed < end and self.terminal_n < 0:
            if self.sent_bytes >= self.limit_bytes >= 0 and self.n >= self.skip_below:
                return False
            event = parser.feed(tokens[self.fed])
            self.fed += 1
            if event is not None:
                self.emit(event)
            if parser.stopped:
                self.finish_at = end = self.fed
                if self.ending is None or self.ending.failure is None:
                    self.ending = Ending("stop")
            budget -= 1
            if not budget:
                return True
        if self.ending is not None and self.fed >= self.finish_at >= 0 and self.terminal_n < 0:
            self._emit_terminal(self.ending)
        return False

    def emit(self, event: bytes, end: str = "") -> None:
        """Number an event and publish it, unless the subscriber has it."""
        n = self.n
        self.n = n + 1
        if n < self.skip_below:
            return
        if self.limit_bytes >= 0:
            self.cumulative.append(self.sent_bytes)
        self.sent_bytes += len(event)
        self.out.event(self.prefix, n, event, end)

    def _emit_terminal(self, ending: Ending) -> None:
        if self.sent_bytes >= self.limit_bytes >= 0 and self.n >= self.skip_below:
            return
        if ending.failure is not None:
            event = ending.failure
            # the subscriber may have more events than a later owner could derive again before it failed
            self.n = max(self.n, self.skip_below)
        elif self.plan is not None:
            event = self.parser.finish(ending.name, self.plan, self.fed)
        else:
            return  # usage is part of it, so it waits for the plan (repeated with every unacknowledged end)
        self.terminal_n = self.n
        self.before_end()
        self.emit(event, ending.name)

    def want(self, following: int, window_bytes: int, out: Subscriber, prefix: bytes, again: bool) -> None:
        """The subscriber has every event below `following` and takes `window_bytes` more."""
        self.recall()
        following = min(following, MAX_NUMBER)
        ahead_of_us = following > self.n and following != self.skip_below  # told by an owner before us
        if again or out is not self.out or ahead_of_us:
            self._rewind(following)
        self.out = out
        self.prefix = prefix
        if self.limit_bytes < 0:
            self.first_windowed = max(self.n, self.skip_below)
        at = following - self.first_windowed
        known = self.cumulative
        base = known[at] if 0 <= at < len(known) else (self.sent_bytes if following >= self.n else 0)
        self.limit_bytes = max(self.limit_bytes, base + window_bytes)

    def _rewind(self, following: int) -> None:
        """Derive the events again and publish those from `following` on."""
        self.parser = self.open_parser()
        self.fed = 0
        self.n = 0
        self.terminal_n = -1
        self.skip_below = following
        self.first_windowed = following
        self.cumulative = array("Q")
        self.sent_bytes = 0
        self.limit_bytes = 0 if self.limit_bytes >= 0 else -1
