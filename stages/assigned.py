"""What was sent to a worker since its last beacon, so that a burst does not all go to the same one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


class Assigned:
    """Amounts by worker over the last `window_s` seconds (two beacons). `clock`: seconds, never running back."""

    def __init__(self, window_s: float = 0.2, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_s = window_s
        self._clock = clock
        self._recent: deque[tuple[float, str, int]] = deque()
        self.amounts: dict[str, int] = {}

    def add(self, worker: str, amount: int) -> None:
        """This much was just sent to a worker. Raises: ValueError when it is not positive."""
        if amount <= 0:
            raise ValueError(f"an amount is positive, not {amount}")
        self._recent.append((self._clock(), worker, amount))
        self.amounts[worker] = self.amounts.get(worker, 0) + amount

    def expire(self) -> dict[str, int]:
        """Drop what a beacon has reported since; returns the amounts that are left."""
        oldest = self._clock() - self._window_s
        while self._recent and self._recent[0][0] < oldest:
            _, worker, amount = self._recent.popleft()
            self.amounts[worker] -= amount
            if not self.amounts[worker]:
                del self.amounts[worker]
        return self.amounts
