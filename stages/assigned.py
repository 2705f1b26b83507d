"""What was sent to a worker since its last beacon, so that a burst does not all go to the same one."""

from __future__ import annotations

import time
from collections import deque


class Assigned:
    """Amounts by worker over the last `window_s` seconds (two beacons)."""

    def __init__(self, window_s: float = 0.2) -> None:
        self._window_s = window_s
        self._recent: deque[tuple[float, str, int]] = deque()
        self.amounts: dict[str, int] = {}

    def add(self, worker: str, amount: int) -> None:
        """This much was just sent to a worker."""
        self._recent.append((time.monotonic(), worker, amount))
        self.amounts[worker] = self.amounts.get(worker, 0) + amount

    def expire(self) -> dict[str, int]:
        """Drop what a beacon has reported since; returns the amounts that are left."""
        oldest = time.monotonic() - self._window_s
        while self._recent and self._recent[0][0] < oldest:
            _, worker, amount = self._recent.popleft()
            self.amounts[worker] -= amount
            if not self.amounts[worker]:
                del self.amounts[worker]
        return self.amounts
