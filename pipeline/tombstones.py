"""What an engine remembers of requests that need nothing more: cancelled ones and attempts it has already taken."""

from __future__ import annotations

import time

_CANCEL_ALL = 1 << 63


class Tombstones:
    """Cancelled attempts by request, remembered for a while so that a cancel may overtake its request."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        # Both in the order of their last change, which is the order in which they are forgotten.
        self._dead: dict[str, tuple[int, float]] = {}  # rid -> (highest dead attempt, until)
        self._taken: dict[str, tuple[int, float]] = {}  # rid -> (attempt taken, until)

    def __len__(self) -> int:
        return len(self._dead) + len(self._taken)

    def bury(self, rid: str, attempt: int) -> None:
        """Attempts up to `attempt` are dead; -1 = all of them."""
        level = _CANCEL_ALL if attempt < 0 else attempt
        known = self._dead.pop(rid, (-1, 0.0))[0]
        self._dead[rid] = (max(level, known), time.monotonic() + self._keep_s)

    def is_dead(self, rid: str, attempt: int) -> bool:
        """Whether this attempt was cancelled, or a higher one was taken here."""
        dead = self._dead.get(rid)
        taken = self._taken.get(rid)
        return (dead is not None and attempt <= dead[0]) or (taken is not None and attempt < taken[0])

    def take(self, rid: str, attempt: int) -> bool:
        """Remember an attempt as taken; False when it already was."""
        taken = self._taken.get(rid)
        if taken is not None and taken[0] >= attempt:
            return False
        self._taken.pop(rid, None)
        self._taken[rid] = (attempt, time.monotonic() + self._keep_s)
        return True

    def give_back(self, rid: str, attempt: int) -> None:
        """It was offered but not taken after all: it may be offered again."""
        if self._taken.get(rid, (None, 0.0))[0] == attempt:
            del self._taken[rid]

    def sweep(self) -> None:
        """Forget what is old."""
        now = time.monotonic()
        for table in (self._dead, self._taken):
            while table:
                rid = next(iter(table))
                if table[rid][1] >= now:
                    break
                del table[rid]
